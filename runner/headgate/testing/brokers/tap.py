"""A TCP proxy between a producer and its broker: it reads acknowledgements, and cuts or stalls the link.

For brokers that do not say what is acknowledged, what has passed here is the only honest account. One thread accepts,
and two threads for each link pass bytes on.
"""

from __future__ import annotations

import abc
import contextlib
import socket
import struct
import threading
from collections.abc import Callable

READ_BYTES_MAX = 64 * 1024
CONNECT_TIMEOUT_S = 5.0


class AckParser(abc.ABC):
    """Finds acknowledgements in what one client sends. It gets the bytes of one connection, in order."""

    @abc.abstractmethod
    def feed(self, data: bytes) -> list[str]:
        """Return the names of the messages that are acknowledged in these bytes, as the broker names them."""

    def feed_answer(self, data: bytes) -> None:  # noqa: B027 - most acknowledgements name the message
        """Look at what the server sends, before the client has it: for a broker whose acknowledgements have no names.

        Called in another thread than `feed`.
        """

    def pass_answer(self, data: bytes) -> bytes:
        """Return what the client gets of what the server sends: for a broker that tells its own address.

        What is held back of one answer is returned with the next.
        """
        self.feed_answer(data)
        return data


class Tap:
    """Listens on a local port, and passes everything on to ``server``; `close` it.

    ``make_parser`` makes a parser for each connection. ``acknowledged`` are the acknowledgements that have passed, in
    order; an acknowledgement whose bytes were cut off on their way to the server is not among them.
    """

    def __init__(self, server: tuple[str, int], make_parser: Callable[[], AckParser]) -> None:
        self._server = server
        self._make_parser = make_parser
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.acknowledged: list[str] = []
        self.links = 0  # accepted so far
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._cut_after: int | None = None
        self._is_closed = False
        threading.Thread(target=self._accept, name="headgate tap", daemon=True).start()

    def cut(self) -> None:
        """Reset all links; new ones are accepted."""
        with self._lock:
            links, self._open = self._open, set()
        for link in links:
            _reset(link)

    def cut_after(self, answer_bytes: int) -> None:
        """Reset the next link that has brought so many bytes of answers, perhaps within a frame; the rest is lost."""
        with self._lock:
            self._cut_after = answer_bytes

    @property
    def is_cut_pending(self) -> bool:
        """Whether what `cut_after` asked for has not happened yet."""
        return self._cut_after is not None

    def stall(self) -> None:
        """Pass nothing on, in both directions, as a network does that has lost its route."""
        self._flows.clear()

    def flow(self) -> None:
        """Undo `stall`."""
        self._flows.set()

    def close(self) -> None:
        """Stop listening, and end all links."""
        self._is_closed = True
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    # --- inside ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # of the listener, when it is closed
            while not self._is_closed:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._server, CONNECT_TIMEOUT_S)
                except OSError:
                    _reset(client)
                    continue
                server.settimeout(None)
                with self._lock:
                    self.links += 1
                    self._open |= {client, server}
                parser = self._make_parser()
                for ends in ((client, server, False), (server, client, True)):
                    given = (*ends, parser)
                    threading.Thread(target=self._pass_on, args=given, name="headgate tap", daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool, parser: AckParser) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES_MAX):
                self._flows.wait()
                if is_answer:
                    data = parser.pass_answer(data)
                    if (kept := self._kept_of_answer(len(data))) is not None:
                        target.sendall(data[:kept])
                        break
                target.sendall(data)
                if not is_answer:
                    self.acknowledged += parser.feed(data)
        with self._lock:
            self._open -= {source, target}
        for end in (source, target):
            _reset(end)

    def _kept_of_answer(self, answer_bytes: int) -> int | None:
        """Return how many bytes of this answer may pass before the link is cut; None if it is not cut here."""
        with self._lock:
            if self._cut_after is None:
                return None
            kept, self._cut_after = self._cut_after, self._cut_after - answer_bytes
            if self._cut_after >= 0:
                return None
            self._cut_after = None
            return kept


def _reset(link: socket.socket) -> None:
    """End a link at once, so that both sides see it as broken, whichever thread reads from it."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.shutdown(socket.SHUT_RDWR)
    link.close()
