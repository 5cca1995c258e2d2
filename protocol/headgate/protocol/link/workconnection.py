"""One side of the link between a task worker and its supervisor: bytes in, messages out, and back. It does no I/O.

The twin of `connection`: frames are the same, bodies are those of `workwire`, and `worksession` keeps their order.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar, cast, overload

from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError
from headgate.protocol.link.framing import FrameReader, encode_frame
from headgate.protocol.link.worksession import WorkClosed, WorkRole, WorkSession, WorkState
from headgate.protocol.link.workwire import decode_work, encode_work
from headgate.protocol.messages.runner import FRAME_BYTES_MAX
from headgate.protocol.messages.worker import FromWorker, ToWorker, WorkerWelcome

Sent = TypeVar("Sent", FromWorker, ToWorker)
Received = TypeVar("Received", ToWorker, FromWorker)


class WorkConnection(Generic[Sent, Received]):
    """One side of the link of one worker; ``role`` is this side.

    ``frame_bytes_max`` bounds frames both ways until `WorkerWelcome`, whose settings then hold for both sides.

    A `LocalProtocolError` changes nothing. After a `RemoteProtocolError` the connection is broken: every further call
    raises it again, and the link must be closed.
    """

    @overload
    def __init__(
        self: WorkConnection[FromWorker, ToWorker], role: Literal[WorkRole.WORKER], *, frame_bytes_max: int = ...
    ) -> None: ...

    @overload
    def __init__(
        self: WorkConnection[ToWorker, FromWorker], role: Literal[WorkRole.SUPERVISOR], *, frame_bytes_max: int = ...
    ) -> None: ...

    def __init__(self, role: WorkRole, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._role = role
        self._session = WorkSession(role)
        self._reader = FrameReader(frame_bytes_max)
        self._closed_here = False
        self._error: RemoteProtocolError | None = None

    @property
    def state(self) -> WorkState:
        """Where the conversation stands. CLOSED once the peer's end is reached and all its messages are taken."""
        return self._session.state

    @property
    def frame_bytes_max(self) -> int:
        """The longest body of a frame that may go either way now, in bytes."""
        return self._reader.frame_bytes_max

    def is_open(self, ask: int) -> bool:
        """Whether the question of this id waits for its answer."""
        return self._session.is_open(ask)

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what was read from the link; then call `next_message` until it gives None.

        Raises `RemoteProtocolError` for a frame over the limit or an empty one, `LocalProtocolError` when messages are
        left untaken, or the link is closed.
        """
        self._require_open()
        try:
            self._reader.feed(data)
        except RemoteProtocolError as error:
            self._error = error
            raise

    def receive_eof(self) -> None:
        """Take the end of the peer's stream. Whole messages that came before it can still be taken.

        Raises `RemoteProtocolError` if the peer left in the middle of a frame.
        """
        self._require_open()
        try:
            self._reader.receive_eof()
        except RemoteProtocolError as error:
            self._error = error
            raise
        self._close_at_eof()

    def next_message(self) -> Received | None:
        """Return the peer's next message; None while it is not complete, or after the last one (`state` is CLOSED).

        Raises `RemoteProtocolError` that says which: a malformed frame or body, an unknown tag, a message of the wrong
        direction, out of state or to no question, another version (`WorkerVersionMismatch`).
        """
        self._require_open()
        try:
            body = self._reader.next_frame()
            if body is None:
                self._close_at_eof()
                return None
            message = decode_work(self._role.peer, body)
            self._session.move(self._role.peer, message)
        except RemoteProtocolError as error:
            self._error = error
            raise
        self._adopt_limit(message)
        return cast(Received, message)

    def send(self, message: Sent) -> bytes:
        """Return the bytes that carry ``message``; they count as sent.

        Raises `FrameTooLong`, and `LocalProtocolError` for a message that is not this side's to send, or not now;
        nothing has changed then, and nothing may be sent.
        """
        self._require_open()
        body = encode_work(message)
        frame = encode_frame(body, self.frame_bytes_max, message_name=type(message).__name__)
        self._session.move(self._role, message)
        self._adopt_limit(message)
        return frame

    def close(self) -> None:
        """Close this side: nothing can be sent or received any more. Closing twice is allowed."""
        if not self._closed_here:
            self._closed_here = True
            self._session.move(self._role, WorkClosed())

    def _require_open(self) -> None:
        if self._error is not None:
            raise RemoteProtocolError(f"the link is broken: {self._error}") from self._error
        if self._closed_here:
            raise LocalProtocolError("this side has closed the link")

    def _close_at_eof(self) -> None:
        if self._reader.at_eof and self.state is not WorkState.CLOSED:
            self._session.move(self._role.peer, WorkClosed())

    def _adopt_limit(self, message: Any) -> None:
        if isinstance(message, WorkerWelcome):
            self._reader.frame_bytes_max = message.settings.frame_bytes_max
