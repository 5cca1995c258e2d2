"""Processes forked from one that has imported all that they need: for tests that start the same a hundred times.

``python -m tests.lives MODULE`` is that one process: for each line of arguments it forks, and calls ``main`` of
the module there. Each is a process of its own, which a test kills as any other, and begins with nothing open: what
modules make when they are imported is all that they share. To import took most of the time of those that die soon.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

from tests.waiting import WITHIN_S

ARGUMENTS_BYTES_MAX = 64 << 10
_NUMBER = struct.Struct("=q")  # the process, and later how it ended
_FAILED = 1  # the exit code after an exception, which is on standard error


class Life:
    """One such process. What it says must fit into a pipe if it is read when it has ended."""

    def __init__(self, said: int, told: int) -> None:
        self.said = open(said, encoding="utf-8", errors="replace")  # its output, and its errors
        self._told = told
        self._returncode: int | None = None
        self._pid = self._next(WITHIN_S)

    def poll(self) -> int | None:
        """Return how it has ended, as `subprocess` says it; None if it has not."""
        return self._ended(0.0)

    def wait(self, within_s: float = WITHIN_S) -> int:
        """Return how it ended. Raises `TimeoutError`."""
        if (code := self._ended(within_s)) is None:
            raise TimeoutError(f"process {self._pid} has not ended within {within_s:g} s")
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def close(self) -> str:
        """Return what it has said since it was read last, once it has ended."""
        with self.said:
            rest = self.said.read()
        os.close(self._told)
        return rest

    def _ended(self, within_s: float) -> int | None:
        if self._returncode is None and self._has_news(within_s):
            self._returncode = self._next(0.0)
        return self._returncode

    def _next(self, within_s: float) -> int:
        if not self._has_news(within_s) or len(told := os.read(self._told, _NUMBER.size)) != _NUMBER.size:
            raise RuntimeError("the process that forks others has said nothing: it may have died")
        (number,) = _NUMBER.unpack(told)
        return int(number)

    def _has_news(self, within_s: float) -> bool:
        ready = select.poll()
        ready.register(self._told, select.POLLIN)
        return bool(ready.poll(within_s * 1000))


class Lives:
    """Starts such processes, for as long as it is open. Any thread may."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.lives", module]
            self._process = subprocess.Popen(command, stdin=theirs.fileno())
        self._lock = threading.Lock()

    def __enter__(self) -> Lives:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait(WITHIN_S)

    def start(self, *arguments: str) -> Life:
        """Start one."""
        said, say = os.pipe()
        told, tell = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(arguments).encode()], [say, tell])
        finally:
            os.close(say)
            os.close(tell)
        return Life(said, told)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Start one, and wait for its end; return how it ended, and what it said."""
        life = self.start(*arguments)
        code = life.wait()
        return code, life.close()


# --- the process that forks ------------------------------------------------------------------------


def _serve(module: str) -> None:
    main = importlib.import_module(module).main
    requests = socket.socket(fileno=os.dup(0))
    watching: list[int] = []
    while True:
        request, descriptors, *_ = socket.recv_fds(requests, ARGUMENTS_BYTES_MAX, 2)
        if not request:
            break
        if (watcher := os.fork()) == 0:
            requests.close()
            _watch(main, json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        watching = [one for one in [*watching, watcher] if os.waitpid(one, os.WNOHANG) == (0, 0)]
    for one in watching:
        os.waitpid(one, 0)


def _watch(main: object, arguments: Sequence[str], say: int, tell: int) -> None:
    """Have the work done in a child of this process, which tells the test of its end."""
    try:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        child = os.fork()
        if child == 0:
            os.close(tell)
            os.dup2(say, 1)
            os.dup2(say, 2)
            os.close(say)
            _live(main, arguments)
        os.close(say)
        os.write(tell, _NUMBER.pack(child))
        _, status = os.waitpid(child, 0)
        os.write(tell, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    except BaseException:  # without a word the test would only know that it was not told
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(0)


def _live(main: object, arguments: Sequence[str]) -> None:
    code = _FAILED
    try:
        assert callable(main)
        main(arguments)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
