"""Processes that run users' code: started with three descriptors and a scrubbed environment, and reaped.

Each inherits one end of the socket for frames, one end of the socket for log records, and a pipe as standard output
and error. Nothing else: no database descriptor, and of the environment only the variables on an allow-list, less any
that holds the database's URL or a key (I12).
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
import psutil
import structlog
from sqlalchemy.engine import URL

from headgate.protocol.black_box import BOX_BYTES, Record, read_record
from headgate.store.db.secrets import keys_in
from headgate.supervisor.children.isolation import RunAs
from headgate.supervisor.children.memory_kills import MemoryKills, have_risen, memory_kills
from headgate.supervisor.config import Settings

log = structlog.get_logger(__name__)

# Variables that a program needs to find files, speak the user's language and trust certificates.
ENVIRONMENT_ALLOWED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "VIRTUAL_ENV",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)

SECRET_CHARS_MIN = 6  # a shorter secret would be found by chance in any PATH

LINE_BYTES_MAX = 64 * 1024  # a longer line of output or log is cut into several
READ_BYTES_MAX = 256 * 1024  # of output or log records in one turn of the loop, so that frames never wait for logs
EMPTY_READS_MAX = 16  # reads to empty a pipe: they cover all that it held before, even if somebody keeps writing
HOW_CHARS_MAX = 200  # of the explanation of a death, where it is stored
LAST_LINES_MAX = 40  # of standard error, kept to explain a death
SESSION_LOOKS_MAX = 10  # for processes left in a session: one that forks as fast as we kill must not hold us up
# Signals that users and systems send to a process: unlike the others, they are no evidence against the code that it
# executed. The kernel sends SIGKILL, too, if memory is short: that is known if it counts it.
SENT_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
REAP_WAIT_S = 5.0  # a process whose end was signalled is gone within this time, or waits for a device that is stuck


def scrub(environ: Mapping[str, str], *, passed: Iterable[str], secrets: Iterable[str]) -> dict[str, str]:
    """Return the environment of a child: the variables on the allow-list or in ``passed``, less those with a secret.

    ``passed`` are names or patterns from the user (for example ``AWS_*``), ``secrets`` values that must not leave.
    ``HEADGATE_*`` never passes.
    """
    patterns = (*ENVIRONMENT_ALLOWED, *passed)
    hidden = [secret for secret in secrets if len(secret) >= SECRET_CHARS_MIN]
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("HEADGATE_")
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        and not any(secret in value for secret in hidden)
    }


def environment_of_children(settings: Settings, url: URL) -> dict[str, str]:
    """Return the environment of this process, scrubbed for users' code; ``url`` is that of the database, read."""
    passwords = [password for password in (url.password, *url.normalized_query.get("password", ())) if password]
    return scrub(
        os.environ,
        passed=settings.pass_env,
        # A password may stand alone in a variable, or in another URL of the same database.
        secrets=(
            settings.database_url,
            *keys_in(settings.fernet_keys or ""),
            *passwords,
            *(quote(each, safe="") for each in passwords),
        ),
    )


class LineReader:
    """Reads lines from a descriptor without blocking; cuts a long line, and returns a last one that has no end."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._partial = b""
        self._reads = 0  # that returned data
        self.is_ended = False

    def fileno(self) -> int:
        """The descriptor, for the selector."""
        return self._descriptor

    def read(self) -> list[bytes]:
        """Return the complete lines that can be read now, at most `READ_BYTES_MAX`."""
        try:
            data = os.read(self._descriptor, READ_BYTES_MAX)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_ended = True
            last, self._partial = self._partial, b""
            return [last] if last else []
        self._reads += 1
        *lines, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > LINE_BYTES_MAX:
            lines.append(self._partial[:LINE_BYTES_MAX])
            self._partial = self._partial[LINE_BYTES_MAX:]
        return lines

    def read_empty(self) -> list[bytes]:
        """Return all that can be read now, in `EMPTY_READS_MAX` reads at most, and an incomplete last line with it."""
        lines: list[bytes] = []
        for _ in range(EMPTY_READS_MAX):
            held = self._reads
            lines += self.read()
            if self._reads == held or self.is_ended:
                break
        if self._partial:
            rest, self._partial = self._partial, b""
            lines.append(rest)
        return lines

    def close(self) -> None:
        """Close the descriptor."""
        self.is_ended = True
        os.close(self._descriptor)


class SharedBox:
    """Memory that is shared with a child, for its black box. The child cannot make it smaller. Raises `OSError`."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("headgate black box", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, BOX_BYTES)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def read(self) -> Record | None:
        """Return the record in it, None if there is none. Read, not mapped: whatever it holds, that does no harm."""
        return read_record(os.pread(self.descriptor, BOX_BYTES, 0))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class ChildStatistics(msgspec.Struct, frozen=True):
    """Use of resources by a process: resident memory in bytes, CPU time in seconds."""

    rss_bytes: int
    cpu_s: float


def statistics_of(process: psutil.Process) -> ChildStatistics | None:
    """Return what a process uses; None if it is gone, or hides it."""
    try:
        with process.oneshot():
            times = process.cpu_times()
            return ChildStatistics(process.memory_info().rss, times.user + times.system)
    except psutil.Error:
        return None


class ChildProcess:
    """A process that runs ``module``, with its two sockets, the pipe of its output, and its pidfd."""

    def __init__(
        self,
        module: str,
        arguments: Iterable[str],
        environment: Mapping[str, str],
        *,
        hide: Callable[[bytes], bytes] = bytes,
        run_as: RunAs | None = None,
        box: SharedBox | None = None,
        count_kills: Callable[[], MemoryKills | None] = lambda: None,
    ) -> None:
        """Start it. ``hide`` removes secrets from a line of its output; ``box`` is shared with it.

        It has the same user, or that of ``run_as``. With ``count_kills`` it is known whether it was killed for want of
        memory.
        """
        self._box = box
        self._count_kills = count_kills
        self._kills_before = count_kills()
        self._has_memory_run_out = False
        user: dict[str, Any] = {}
        if run_as is not None and os.geteuid() == 0:
            user = {"user": run_as.uid, "group": run_as.gid, "extra_groups": run_as.groups}
            environment = run_as.environment(environment)
        frames, frames_of_child = socket.socketpair()
        logs, logs_of_child = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            with frames_of_child, logs_of_child:
                command = [sys.executable, "-P", "-m", module]
                command += ["--frames-fd", str(frames_of_child.fileno()), "--logs-fd", str(logs_of_child.fileno())]
                command += [*arguments, "--supervisor-pid", str(os.getpid())]
                passed = [frames_of_child.fileno(), logs_of_child.fileno()]
                if box is not None:
                    command += ["--box-fd", str(box.descriptor)]
                    passed.append(box.descriptor)
                self._process = subprocess.Popen(
                    command,
                    env=dict(environment),
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which drains, and
                    # processes that users' code has started can be ended together with the child.
                    start_new_session=True,
                    **user,
                )
            self.pid = self._process.pid
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            frames.close()
            logs.close()
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self.frames = frames
        self.output = LineReader(read_end)
        self._logs = logs
        self.records = LineReader(logs.fileno())
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES_MAX)
        self._killed_because = ""
        self.returncode: int | None = None  # once reaped
        self.last_record: Record | None = None  # of its box, once reaped
        self._hide = hide

    def note_output(self, line: bytes) -> str:
        """Return a line of output as text without secrets, and remember it in case it explains a death."""
        text = self._hide(line).decode("utf-8", "backslashreplace")
        self._last_lines.append(text)
        return text

    def has_died(self) -> bool:
        """Ask the kernel whether the process has ended; it must still be reaped."""
        return os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def dump_stacks(self) -> None:
        """Have the process write the stacks of all its threads to standard error, even if it is stuck."""
        self.send_signal(signal.SIGUSR1)

    def kill(self, reason: str) -> None:
        """Send SIGKILL to the process and its group; ``reason`` becomes part of the explanation of its death."""
        self._killed_because = reason
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def statistics(self) -> ChildStatistics | None:
        """Return what it uses; None if it is gone."""
        try:
            return statistics_of(psutil.Process(self.pid))
        except psutil.Error:
            return None

    def reap(self) -> str:
        """Collect the process, whose end has been signalled; return how it died, in one sentence.

        The kernel may not be able to end it, while it waits for a disk or a network drive: then it is left behind.
        """
        # Processes that it had started die with it: none may go on beside its successor. They are killed before it is
        # collected: its pid is the id of the session, and could be another's afterwards.
        kill_rest_of_session(self.pid)
        try:
            self.returncode = self._process.wait(REAP_WAIT_S)
        except subprocess.TimeoutExpired:
            log.error("a process cannot be killed, it is left behind", pid=self.pid, waited_s=REAP_WAIT_S)
            return "it cannot be killed: it waits for a device"
        self.last_record = None if self._box is None else self._box.read()
        if self.returncode == -signal.SIGKILL and not self._killed_because:
            self._has_memory_run_out = have_risen(self._kills_before, self._count_kills())
        return explain_death(
            self.returncode, self._killed_because, self._last_lines, has_memory_run_out=self._has_memory_run_out
        )

    def close(self) -> None:
        """Close all descriptors."""
        self.frames.close()
        self.output.close()
        self.records.is_ended = True  # or what reuses its number could be read
        self._logs.close()
        os.close(self.pidfd)
        if self._box is not None:
            self._box.close()

    @property
    def ended_itself(self) -> bool:
        """Whether its end may be the doing of the code that it executed, rather than of a signal from outside."""
        code, is_known = self.returncode, bool(self._killed_because) or self._has_memory_run_out
        return code is not None and (code >= 0 or is_known or -code not in SENT_FROM_OUTSIDE)


def start_runner(
    incarnation: int,
    *,
    environment: Mapping[str, str],
    hide: Callable[[bytes], bytes] = bytes,
    run_as: RunAs | None = None,
) -> ChildProcess:
    """Start one incarnation of the runner. Raises `OSError`."""
    arguments = ("--incarnation", str(incarnation))
    box = SharedBox()
    try:
        return ChildProcess(
            "headgate.runner", arguments, environment, hide=hide, run_as=run_as, box=box, count_kills=memory_kills
        )
    except OSError:
        box.close()
        raise


def start_worker(
    *, environment: Mapping[str, str], hide: Callable[[bytes], bytes] = bytes, run_as: RunAs | None = None
) -> ChildProcess:
    """Start a worker. Raises `OSError`."""
    return ChildProcess("headgate.worker", (), environment, hide=hide, run_as=run_as)


def processes_of(session: int) -> list[int]:
    """Return the pids of the processes of a session, whatever groups they have made within it. Raises `OSError`."""
    found: list[int] = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                found.append(pid)
    return found


def kill_rest_of_session(leader: int) -> None:
    """Send SIGKILL to all processes of a session but its leader, which is dead and not yet collected."""
    for _ in range(SESSION_LOOKS_MAX):
        try:
            left = [pid for pid in processes_of(leader) if pid != leader]
        except OSError:
            # No descriptor is free to list /proc with. The leader's group, which needs none, has most of them.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
            return
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals, which have no names of their own
        return f"signal {number}"


def explain_death(
    code: int, killed_because: str, last_lines: Iterable[str], *, has_memory_run_out: bool = False
) -> str:
    """Say how a process died: its exit code or signal, our reason if we killed it, and its last output."""
    if code < 0:
        how = f"killed by {_signal_name(-code)}"
    else:
        how = f"exited with code {code}"
    if has_memory_run_out:
        how += " for want of memory"
    if killed_because:
        how += f" (we did it: {killed_because})"
    words = "\n".join(last_lines)
    return f"{how}; its last output was:\n{words}" if words and code != 0 else how


def without_output(explanation: str) -> str:
    """Return of the explanation of a death how the process died, without its last output."""
    return explanation.partition("\n")[0].partition(";")[0][:HOW_CHARS_MAX]
