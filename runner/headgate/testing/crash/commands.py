"""The command line of headgate for tests: a user's commands, one after the other, in one process."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READ_BYTES_MAX = 1 << 20
# Without -P it would search its working folder for modules.
ARGUMENTS = ("-P", "-m", "headgate.cli.batch")


class PairFailed(AssertionError):
    """The pair or a command did not do what a test needs. The text says what happened, with the end of the log."""


class Commands:
    """Runs commands in ``folder``, where a file has what their process says beside; it is started by the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], within_s: float) -> str:
        """Return the output of ``headgate`` with these arguments. Raises `PairFailed` if it fails.

        Of the ``environment``, the first command determines all variables but headgate's own.
        """
        own = {name: value for name, value in environment.items() if name.startswith("HEADGATE_")}
        process = self._started(environment)
        try:
            answer = self._ask(process, {"arguments": arguments, "environment": own}, within_s)
            if answer["code"] != 0:
                raise PairFailed(f"headgate {' '.join(arguments[:2])} failed: {answer['errors'].strip()}")
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
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], command: Mapping[str, object], within_s: float) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        what = "a command of headgate"
        deadline = time.monotonic() + within_s
        parts: list[bytes] = []
        try:
            process.stdin.write(json.dumps(command).encode() + b"\n")
            while not parts or not parts[-1].endswith(b"\n"):
                left_s = max(0.0, deadline - time.monotonic())
                if not select.select([process.stdout], [], [], left_s)[0]:
                    raise PairFailed(f"{what} has not ended within {within_s:g} s")
                parts.append(process.stdout.read(READ_BYTES_MAX))
                if not parts[-1]:
                    raise BrokenPipeError
        except BrokenPipeError:
            log = (self._folder / "commands.log").read_text(errors="backslashreplace")
            raise PairFailed(f"{what} has ended the process of commands:\n{log.strip()}") from None
        answer: dict[str, Any] = json.loads(b"".join(parts))
        return answer
