"""The supervisor's ends of its sockets: bytes on a non-blocking socket, messages on the other side."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from headgate.protocol import marks
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.connection import Connection, split_sync
from headgate.protocol.link.workconnection import WorkConnection
from headgate.protocol.messages.runner import FromRunner, FromSupervisor, StateSync
from headgate.protocol.messages.worker import FromWorker, ToWorker

READ_BYTES_MAX = 1024 * 1024  # read in one go; the rest of a flood waits for the next turn of the loop
# A child that lets so much pile up besides the longest message that waits does not read, and is replaced.
UNSENT_BYTES_MAX = 256 * 1024 * 1024

Received = TypeVar("Received")
Received_co = TypeVar("Received_co", covariant=True)


class _Receiving(Protocol[Received_co]):
    """The half of a connection that takes bytes in."""

    def receive_data(self, data: bytes) -> None: ...

    def next_message(self) -> Received_co | None: ...


class FrameSocket(Generic[Received]):
    """Frames to and from one child. Nothing in it blocks. ``peer`` is what the child is called."""

    def __init__(self, sock: socket.socket, connection: _Receiving[Received], peer: str) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._receiving = connection
        self._peer = peer
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._longest = 0  # bytes of the longest message that was queued since nothing waited
        self.is_ended = False
        self.error: RemoteProtocolError | None = None

    def fileno(self) -> int:
        """The socket's descriptor, for the selector."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has more to do once the socket is writable."""
        return bool(self._unsent)

    def receive(self) -> list[Received]:
        """Read what there is, at most `READ_BYTES_MAX`; return the messages that are complete.

        Sets `error` when the child broke the protocol. What came before that is whole, and a round among it
        may still be stored.
        """
        try:
            data = self._socket.recv(READ_BYTES_MAX)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            self.is_ended = True
            return []
        messages: list[Received] = []
        try:
            self._receiving.receive_data(data)
            while (message := self._receiving.next_message()) is not None:
                messages.append(message)
        except RemoteProtocolError as error:
            self.error = error
        return messages

    def queue(self, parts: Iterable[bytes]) -> None:
        """Queue the bytes of one message, and write as much as the socket takes.

        Raises `RemoteProtocolError` when the child has broken the protocol by not reading any more.
        """
        length = 0
        for part in parts:
            self._unsent.append(memoryview(part))
            self._unsent_bytes += len(part)
            length += len(part)
            self.flush()
        # What is handed over at a start may be longer than the limit, and takes its time to be read and begun. What
        # comes to lie besides it is what nobody reads.
        self._longest = max(self._longest, length) if self._unsent else 0
        if self._unsent_bytes - self._longest > UNSENT_BYTES_MAX:
            raise RemoteProtocolError(f"the {self._peer} reads nothing: {self._unsent_bytes:,} bytes wait for it")

    def flush(self) -> None:
        """Write what the socket takes now."""
        while self._unsent:
            data = self._unsent[0]
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()
                self._unsent_bytes = 0
                return  # the read side will see the end
            self._unsent_bytes -= sent
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = data[sent:]

    def close_sending(self) -> None:
        """Let the child read the end of the link, once what was sent is read."""
        with contextlib.suppress(OSError):  # the child may be gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self.is_ended = True
        self._socket.close()


class Link(FrameSocket[FromRunner]):
    """Messages to and from one runner. `receive` and `flush` never block.

    `send` raises `RemoteProtocolError` when the runner has broken the protocol, be it by not reading any more.
    """

    def __init__(
        self, sock: socket.socket, connection: Connection[FromSupervisor, FromRunner], frame_bytes_max: int
    ) -> None:
        super().__init__(sock, connection, "runner")
        self._connection = connection
        self._frame_bytes_max = frame_bytes_max

    def send(self, message: FromSupervisor) -> None:
        """Queue a message and write as much as the socket takes."""
        if self.is_ended:
            return  # the runner is going; whoever reaps it decides what follows
        self.queue(self._encoded(message))
        marks.reach("supervisor.frame_sent")

    def _encoded(self, message: FromSupervisor) -> Iterator[bytes]:
        pieces = split_sync(message, self._frame_bytes_max) if isinstance(message, StateSync) else [message]
        for piece in pieces:
            data = self._connection.send(piece)
            marks.reach("supervisor.frame_encoded")
            yield from marks.in_halves("supervisor.frame_half_sent", data)


class WorkerLink(FrameSocket[FromWorker]):
    """Messages to and from one task worker. `receive` and `flush` never block."""

    def __init__(self, sock: socket.socket, connection: WorkConnection[ToWorker, FromWorker]) -> None:
        super().__init__(sock, connection, "worker")
        self._connection = connection

    def send(self, message: ToWorker) -> None:
        """Queue a message and write as much as the socket takes.

        Raises `LocalProtocolError` (`FrameTooLong`) for one that cannot be sent, `RemoteProtocolError` when the worker
        does not read any more.
        """
        if not self.is_ended:
            self.queue((self._connection.send(message),))

    def is_open(self, ask: int) -> bool:
        """Whether the worker's question of this id waits for its answer."""
        return not self.is_ended and self._connection.is_open(ask)
