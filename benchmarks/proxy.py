"""A proxy in front of a PostgreSQL server that counts statements, and delays the answers to commits.

It listens on a local port, with one thread per direction and connection. It reads the messages of the protocol,
version 3 (https://www.postgresql.org/docs/current/protocol-message-formats.html), and changes none of them. A commit is
an answer that ends a transaction and names COMMIT, or a change made outside a transaction. That answer, and all after
it, are delayed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator

from sqlalchemy.engine import make_url

from benchmarks.board import Board

READ_BYTES_MAX = 256 * 1024
COMMANDS_THAT_CHANGE = (b"COMMIT", b"INSERT", b"UPDATE", b"DELETE")
QUERY, EXECUTE = b"Q", b"E"  # of the client
COMMAND_COMPLETE, READY_FOR_QUERY = b"C", b"Z"  # of the server
IDLE = b"I"  # no transaction is open


@contextlib.contextmanager
def in_front_of(url: str, *, board: Board | None = None, commit_delay_s: float = 0.0) -> Generator[str]:
    """Yield the URL of a proxy in front of the server at ``url``; it counts the statements on ``board``."""
    server = make_url(url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(
            target=_accept, args=(listener, (server.host or "127.0.0.1", server.port or 5432), board, commit_delay_s)
        )
        accepting.start()
        # With encryption, the first answer of the server is not a message.
        plain = {"sslmode": "disable", "gssencmode": "disable"}
        proxied = server.set(host="127.0.0.1", port=listener.getsockname()[1]).update_query_dict(plain)
        try:
            yield proxied.render_as_string(hide_password=False)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(listener: socket.socket, server: tuple[str, int], board: Board | None, commit_delay_s: float) -> None:
    threads = []
    with contextlib.ExitStack() as sockets:
        with contextlib.suppress(OSError):  # of the listener, when it is shut down
            while True:
                client = sockets.enter_context(listener.accept()[0])
                upstream = sockets.enter_context(socket.create_connection(server))
                for end in (client, upstream):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threads.append(threading.Thread(target=_pass_on, args=(client, upstream, _Counting(board).look)))
                threads.append(
                    threading.Thread(target=_pass_on, args=(upstream, client, _Delaying(commit_delay_s).look))
                )
                for thread in threads[-2:]:
                    thread.start()
        for thread in threads:
            thread.join()


def _pass_on(source: socket.socket, target: socket.socket, look: Callable[[bytes], None]) -> None:
    with contextlib.suppress(OSError):  # if one end closes, the other is shut down
        while data := source.recv(READ_BYTES_MAX):
            look(data)
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class _Messages:
    """Cuts a stream into messages: their kind and their body."""

    def __init__(self, *, begins_without_kind: bool) -> None:
        self._buffer = bytearray()
        self._kind_bytes = 0 if begins_without_kind else 1

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._buffer += data
        while len(self._buffer) >= (head := self._kind_bytes + 4):
            size = self._kind_bytes + int.from_bytes(self._buffer[self._kind_bytes : head], "big")
            if len(self._buffer) < size:
                return
            yield bytes(self._buffer[: self._kind_bytes]), bytes(self._buffer[head:size])
            del self._buffer[:size]
            self._kind_bytes = 1  # only the first of the client has none


class _Counting:
    """Counts the statements that a client sends."""

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._messages = _Messages(begins_without_kind=True)

    def look(self, data: bytes) -> None:
        if self._board is not None:
            for kind, _ in self._messages.feed(data):
                if kind in (QUERY, EXECUTE):
                    self._board.add("statements")


class _Delaying:
    """Delays the answers of a server to commits."""

    def __init__(self, commit_delay_s: float) -> None:
        self._commit_delay_s = commit_delay_s
        self._messages = _Messages(begins_without_kind=False)
        self._has_changed = False

    def look(self, data: bytes) -> None:
        if not self._commit_delay_s:
            return
        for kind, body in self._messages.feed(data):
            if kind == COMMAND_COMPLETE and body.startswith(COMMANDS_THAT_CHANGE):
                self._has_changed = True
            elif kind == READY_FOR_QUERY and body == IDLE:
                if self._has_changed:
                    time.sleep(self._commit_delay_s)
                self._has_changed = False
