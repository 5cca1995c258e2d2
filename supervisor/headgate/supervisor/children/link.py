"""The supervisor's end of the link to a child: messages over a non-blocking socket."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from headgate.protocol import marks
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.splitting import split_sync
from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.runner import FromRunner, FromSupervisor, StateSync
from headgate.protocol.messages.worker import FromWorker, ToWorker

READ_BYTES_MAX = 1024 * 1024  # of one read; more data waits for the next turn of the loop
# A child with more unsent bytes than this, apart from the longest waiting message, does not read, and is replaced.
UNSENT_BYTES_MAX = 256 * 1024 * 1024

Sent = TypeVar("Sent", bound=WireStruct)
Received = TypeVar("Received", bound=WireStruct)


class Link(Generic[Sent, Received]):
    """Messages to and from one child. It never blocks. ``peer`` is the name of the child in errors."""

    def __init__(self, sock: socket.socket, connection: Connection[Sent, Received], peer: str) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._connection = connection
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
        """Read available data, at most `READ_BYTES_MAX`; return the messages that are complete.

        Sets `error` if the child broke the protocol. The messages before that are complete, so a round among them may
        still be stored.
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
            self._connection.receive_data(data)
            while (message := self._connection.next_message()) is not None:
                messages.append(message)
        except RemoteProtocolError as error:
            self.error = error
        return messages

    def send(self, message: Sent) -> None:
        """Queue a message and write as much as the socket takes; does nothing if the child has closed the link.

        Raises `LocalProtocolError` (`FrameTooLong`) for a message that cannot be sent, `RemoteProtocolError` if the
        child has broken the protocol, for example by not reading any more.
        """
        if self.is_ended:
            return
        length = 0
        for part in self._encoded(message):
            self._unsent.append(memoryview(part))
            self._unsent_bytes += len(part)
            length += len(part)
            self.flush()
        # The triggers sent at a start may be longer than the limit, and the child needs time to read and start them.
        # Therefore the longest message does not count.
        self._longest = max(self._longest, length) if self._unsent else 0
        if self._unsent_bytes - self._longest > UNSENT_BYTES_MAX:
            raise RemoteProtocolError(f"the {self._peer} reads nothing: {self._unsent_bytes:,} bytes wait for it")
        marks.reach("supervisor.frame_sent")

    def _encoded(self, message: Sent) -> Iterator[bytes]:
        if not isinstance(message, StateSync):
            yield from self._framed(message)
            return
        for piece in split_sync(message, self._connection.frame_bytes_max):
            yield from self._framed(piece)

    def _framed(self, message: Any) -> Iterator[bytes]:
        data = self._connection.send(message)
        marks.reach("supervisor.frame_encoded")
        yield from marks.in_halves("supervisor.frame_half_sent", data)

    def flush(self) -> None:
        """Write as much as the socket takes now."""
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
        """Close the sending direction: the child reads the end of the link after all messages."""
        with contextlib.suppress(OSError):  # the child may have died
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self.is_ended = True
        self._socket.close()


RunnerLink: TypeAlias = Link[FromSupervisor, FromRunner]
WorkerLink: TypeAlias = Link[ToWorker, FromWorker]
