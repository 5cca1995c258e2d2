"""The command line of headgate for tests: a user's commands, one after the other, in one process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

READ_BYTES_MAX = 1 << 20
# Without -P it would search its working folder for modules.
ARGUMENTS = ("-P", "-m", "headgate.cli.batch")


class PairFailed(AssertionError):
    """The pair or a command did not do what a test needs. The text says what happened, with the end of the log."""


class Commands:
    """Runs commands in ``folder``, one at a time, also for several threads; the first one starts their process.

    What this process prints itself is in ``commands.log``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], within_s: float) -> str:
        """Return the output of ``headgate`` with these arguments. Raises `PairFailed` if it fails.

        Of the ``environment``, the first command determines all variables but headgate's own.
        """
        own = {name: value for name, value in environment.items() if name.startswith("HEADGATE_")}
        what = f"headgate {' '.join(arguments[:2])}"
        with self._lock:
            try:
                process = self._started(environment)
                answer = self._ask(process, {"arguments": arguments, "environment": own}, what, within_s)
                if answer["code"] != 0:
                    raise PairFailed(f"{what} failed: {answer['errors'].strip()}")
            except BaseException:
                self.close()  # it may be in the middle of a command, and the pair that it is for may never be made
                raise
        return str(answer["output"])

    def close(self) -> None:
        """End the process. A later command starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def _started(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if self._process is None:
            with (self._folder / "commands.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, *ARGUMENTS],
                    cwd=self._folder,
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    # Ctrl-C is for the tests, which then end their processes in order.
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)  # a process that reads nothing keeps nobody waiting
        return self._process

    def _ask(
        self, process: subprocess.Popen[bytes], command: Mapping[str, object], what: str, within_s: float
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + within_s

        def wait(pipe: IO[bytes], event: int) -> None:
            ready = select.poll()
            ready.register(pipe, event)
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise PairFailed(f"{what} has not ended within {within_s:g} s")

        request, parts = json.dumps(command).encode() + b"\n", list[bytes]()
        try:
            while request:
                wait(process.stdin, select.POLLOUT)
                request = request[os.write(process.stdin.fileno(), request) :]
            while not parts or not parts[-1].endswith(b"\n"):
                wait(process.stdout, select.POLLIN)
                parts.append(process.stdout.read(READ_BYTES_MAX))
                if not parts[-1]:
                    raise BrokenPipeError
        except BrokenPipeError:
            log = (self._folder / "commands.log").read_text(errors="backslashreplace")
            raise PairFailed(f"{what} has ended the process of commands:\n{log.strip()}") from None
        answer: dict[str, Any] = json.loads(b"".join(parts))
        return answer
