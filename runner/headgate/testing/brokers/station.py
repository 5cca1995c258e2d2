"""`Station`: a private broker for conformance tests, that can be killed, paused and cut off, with a tap before it."""

from __future__ import annotations

import abc
import atexit
import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from headgate.testing.brokers.tap import Tap
from headgate.triggers.base import BaseEventTrigger

CONNECTION = "station"  # the name of the connection that the triggers of a station use
WITHIN_S = 300.0  # the longest that one thing may take, however busy the machine: only what hangs waits so long
LOOK_INTERVAL_S = 0.01


class ServerProcess:
    """A server in a process of its own: `start` it, and end it in one of several ways. ``log_path`` has its output."""

    def __init__(
        self, command: Sequence[str], *, port: int, log_path: Path, is_ready: Callable[[], object] | None = None
    ) -> None:
        self._command = list(command)
        self._port = port
        self._is_ready = is_ready  # beyond accepting connections
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; return when it accepts connections. Raises `RuntimeError` with its output if it does not."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self._answers, "the server accepts connections")
        if self._is_ready is not None:
            wait_until(self._is_ready, "the server is ready")

    def stop(self) -> None:
        """Ask it to end, and wait for that."""
        self._end(signal.SIGTERM)

    def kill9(self) -> None:
        """End it with SIGKILL."""
        self._end(signal.SIGKILL)

    def crash(self) -> None:
        """End it with SIGKILL, and start it again."""
        self.kill9()
        self.start()

    def pause(self) -> None:
        """Stop it with SIGSTOP: its kernel still accepts connections, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def close(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it, however the test ended; with another signal than SIGKILL, if it is to leave in order."""
        if self._process is not None and self._process.poll() is None:
            if number != signal.SIGKILL:
                self.resume()
            self._end(number)

    def _end(self, number: signal.Signals) -> None:
        processes = self._signal(number)
        assert self._process is not None
        self._process.wait(WITHIN_S)
        psutil.wait_procs(processes[1:], WITHIN_S)

    def _signal(self, number: signal.Signals) -> list[psutil.Process]:
        """Signal the server and, unless it is to leave in order, all processes that it has started; return them."""
        assert self._process is not None
        assert self._process.poll() is None, "the server does not run"
        own = psutil.Process(self._process.pid)
        processes = [own, *own.children(recursive=True)]
        for process in processes[:1] if number in (signal.SIGTERM, signal.SIGINT) else processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return processes

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            output = self.log_path.read_text(errors="backslashreplace")[-2000:]
            raise RuntimeError(f"the server left with {self._process.returncode}: {output}")
        try:
            socket.create_connection(("127.0.0.1", self._port), 1).close()
        except OSError:
            return False
        return True


class Refusal(NamedTuple):
    """A mistake of a user: what `connect` must refuse, with an error that says ``says``, and never shows ``secret``."""

    uri: str | None  # of the connection; None: the right one
    kwargs: Mapping[str, Any]
    says: str
    secret: str = ""


class Station(abc.ABC):
    """One broker and one source of messages on it (a stream, a queue, a topic), for one test.

    A test starts it, and closes it at the end. Messages have names, and `publish` puts a name into each; the events of
    the trigger must have it somewhere in their payload, and so must the texts of `pending`.
    """

    server: ServerProcess | None = None  # None: the tests leave the server alone, because others use it too
    tap: Tap
    key_is_stable = True  # False for a broker without coordinates: a message may then be stored twice after a crash
    keeps_order = True  # within the one lane of the messages that `publish` publishes
    can_be_deleted = True  # False where a reader cannot be told that its source is gone: a topic is none
    lease_s: float | None = None  # for how long the broker lends a message, if it does

    @property
    @abc.abstractmethod
    def uri(self) -> str:
        """The URI of the connection `CONNECTION`, through the tap."""

    @abc.abstractmethod
    def trigger(self, **kwargs: Any) -> BaseEventTrigger:
        """Return a trigger that reads the source over the connection `CONNECTION`, with these ``kwargs``."""

    @abc.abstractmethod
    def create(self) -> None:
        """Make the source, empty."""

    @abc.abstractmethod
    def delete(self) -> None:
        """Delete the source with all messages."""

    @abc.abstractmethod
    def publish(self, messages: Sequence[str]) -> None:
        """Publish a message for each name, and return when the broker would keep them over a crash."""

    @abc.abstractmethod
    def pending(self) -> Iterable[str]:
        """Return all messages that the broker still has: to be delivered, and delivered but not acknowledged."""

    @abc.abstractmethod
    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to publish messages that no filter may get, by what is wrong with them."""

    @abc.abstractmethod
    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes of a user: a wrong password, no permission, no such source, settings that lose messages."""

    def with_place(self) -> Mapping[str, Any] | None:
        """Return the kwargs that give rejected messages a place at the broker; None if it has none."""
        return None

    def in_place(self) -> Iterable[str]:
        """Return the messages in that place."""
        return ()

    def close(self) -> None:
        """End server and tap."""
        self.tap.close()
        if self.server is not None:
            self.server.close()


_reserved: list[socket.socket] = []


@atexit.register
def _close_reserved() -> None:
    for reserved in _reserved:
        reserved.close()


def free_port() -> int:
    """Return a port that nobody listens on, and that is given to nobody else by chance while this process lives.

    A socket keeps it without listening. A server that sets SO_REUSEADDR, as servers do, may listen on it, be killed and
    listen again; but the system does not choose it for a server or a connection of any other test meanwhile.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    _reserved.append(reserved)
    port: int = reserved.getsockname()[1]
    return port


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition is true; raise `AssertionError` after `WITHIN_S`."""
    deadline, pause = time.monotonic() + WITHIN_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {WITHIN_S:g} s: {what}"
        pause.wait(LOOK_INTERVAL_S)
