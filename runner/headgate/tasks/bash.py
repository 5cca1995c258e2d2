"""`BashOperator`: a command, and everything it starts, in a process group of its own."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import Any, Final, Unpack

from headgate.protocol.errors import ValueTooLong
from headgate.protocol.messages.dags import XCOM_BYTES_MAX
from headgate.tasks.context import Context
from headgate.tasks.errors import TaskSkipped
from headgate.tasks.graph import DAG
from headgate.tasks.operator import BaseOperator
from headgate.tasks.options import TaskOptions

__all__ = ["BashFailed", "BashOperator"]

LINE_BYTES_MAX: Final = 32 * 1024  # a longer line is logged in pieces
READ_BYTES_MAX: Final = 64 * 1024  # what a pipe holds
KILL_GRACE_S: Final = 5.0  # between SIGTERM and SIGKILL
SKIP_EXIT_CODE: Final = 99


class BashFailed(Exception):
    """The command ended with an exit code that is not 0; negative: by that signal."""

    def __init__(self, returncode: int, last_line: str) -> None:
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        super().__init__(f"the command ended with {how}; the last line of its output: {last_line!r:.500}")
        self.returncode = returncode
        self.last_line = last_line


class BashOperator(BaseOperator):
    """Runs ``bash_command`` with bash, logs its output line by line, and returns the last line.

    stderr is part of the output. Bytes that are not UTF-8 are escaped in the log, and replaced in the returned line.
    A last line that is too long for an XCom fails the try with `ValueTooLong`; end the command with ``; echo`` if
    nobody needs it. ``env`` is the whole environment, or is added to the worker's with ``append_env``. The exit code
    ``skip_on_exit_code`` skips the task.

    The command leads a process group. When it ends, by itself or because the task is killed, the rest of the group is
    killed too: processes left in the background would outlive the task unnoticed. Raises `BashFailed`.
    """

    template_fields = ("bash_command", "env", "cwd")

    def __init__(
        self,
        *,
        bash_command: str,
        env: Mapping[str, str] | None = None,
        append_env: bool = False,
        cwd: str | None = None,
        skip_on_exit_code: int | None = SKIP_EXIT_CODE,
        task_id: str,
        dag: DAG | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(task_id=task_id, dag=dag, **options)
        if not isinstance(bash_command, str) or not bash_command or "\0" in bash_command:
            raise self._malformed(f"bash_command must be a str that is not empty, not {bash_command!r:.100}")
        self.bash_command = bash_command
        self.env = None if env is None else dict(env)
        self.append_env = append_env
        self.cwd = cwd
        self.skip_on_exit_code = skip_on_exit_code
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._lock = threading.RLock()  # held while the process is waited for, and while it is signalled

    def execute(self, context: Context) -> Any:
        """Run the command to its end."""
        lines, returncode = _Lines(self.log), 0
        try:
            # A kill from another thread waits for the start; one from a signal handler during it is seen here.
            with self._lock:
                self._process = process = self._start()
                if self._is_killed:
                    _signal_group(process, signal.SIGKILL)
            self._read_output(process, lines)
        finally:
            with self._lock:
                if self._process is not None:
                    # The leader is not reaped yet, so its pid cannot name another group.
                    _signal_group(self._process, signal.SIGKILL)
                    with self._process:
                        returncode = self._process.wait()
                    self._process = None
        if returncode == 0:
            return lines.returned()
        if returncode == self.skip_on_exit_code:
            raise TaskSkipped(f"the command ended with exit code {returncode}, which says to skip")
        raise BashFailed(returncode, lines.last)

    def on_kill(self) -> None:
        """Send SIGTERM to the command's group, and SIGKILL if it has not ended after ``KILL_GRACE_S``.

        A command that has not started yet is killed at once. May be called from another thread than the step's, or
        from a signal handler.
        """
        with self._lock:
            self._is_killed = True
            process = self._process
            if process is None or process.returncode is not None:
                return
            ended = os.pidfd_open(process.pid)
            _signal_group(process, signal.SIGTERM)
        try:
            if not _watching(ended).poll(KILL_GRACE_S * 1000):
                with self._lock:
                    _signal_group(process, signal.SIGKILL)
        finally:
            os.close(ended)

    def _start(self) -> subprocess.Popen[bytes]:
        bash = shutil.which("bash")
        if bash is None:
            raise FileNotFoundError("there is no bash on this machine's PATH")
        env = {**os.environ, **self.env} if self.append_env and self.env is not None else self.env
        return subprocess.Popen(
            [bash, "-c", self.bash_command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=self.cwd,
            # A group of its own, so that it can be killed as a whole; in the worker's session, so that it is found
            # when a worker that is stuck is killed.
            process_group=0,
        )

    def _read_output(self, process: subprocess.Popen[bytes], lines: _Lines) -> None:
        """Log the output until the command has ended.

        Do not wait for the end of the output: a process in the background may keep it open for ever.
        """
        assert process.stdout is not None
        output = process.stdout.fileno()
        os.set_blocking(output, False)
        ended = os.pidfd_open(process.pid)
        try:
            waiting = _watching(output, ended)
            while ended not in (ready := {fd for fd, _ in waiting.poll()}):
                if output in ready and not lines.read(output):
                    waiting.unregister(output)
        finally:
            os.close(ended)
        # All output of the command is in the pipe by now. Output that other processes write later is not waited for.
        left = fcntl.fcntl(output, fcntl.F_GETPIPE_SZ)
        while left > 0 and (taken := lines.read(output)):
            left -= taken
        lines.close()


class _Lines:
    """Logs bytes line by line, and keeps the last line, as far as an XCom could take it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._rest = b""  # not logged yet
        self._line, self._line_bytes = b"", 0
        self._is_cut = False  # what comes next belongs to the line, too

    @property
    def last(self) -> str:
        """The last line, or its beginning."""
        return self._line.decode(errors="replace").rstrip("\r")

    def returned(self) -> str:
        """Return the last line. Raises `ValueTooLong`."""
        if self._line_bytes > XCOM_BYTES_MAX:
            head = self._line[:LINE_BYTES_MAX]
            raise ValueTooLong("the last line of the command's output", self._line_bytes, XCOM_BYTES_MAX, head)
        return self.last

    def read(self, output: int) -> int:
        """Read once without blocking; return the number of bytes, 0 at the end or if there is nothing."""
        try:
            data = os.read(output, READ_BYTES_MAX)
        except BlockingIOError:
            return 0
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log_piece(line)
            self._is_cut = False
        while len(self._rest) > LINE_BYTES_MAX:
            self._log_piece(self._rest[:LINE_BYTES_MAX])
            self._is_cut = True
            self._rest = self._rest[LINE_BYTES_MAX:]
        return len(data)

    def close(self) -> None:
        """Log an unfinished line."""
        if self._rest:
            self._log_piece(self._rest)

    def _log_piece(self, piece: bytes) -> None:
        if not self._is_cut:
            self._line, self._line_bytes = b"", 0
        self._line += piece[: XCOM_BYTES_MAX - len(self._line)]
        self._line_bytes += len(piece)
        self._log.info("%s", piece.decode(errors="backslashreplace").rstrip("\r"))


def _watching(*fds: int) -> select.poll:
    # Not select(): it is limited to descriptors below 1024, and a worker may have more.
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the process's group, unless the process was reaped: its pid may belong to another by then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
