"""One side of a link: bytes in, messages out; messages in, bytes out. It does no I/O.

::

    connection = Connection(Role.SUPERVISOR, incarnation=7)
    connection.receive_data(sock.recv(65536))
    while (message := connection.next_message()) is not None:
        ...
    sock.sendall(connection.send(Welcome(...)))

`Connection` puts together what the other modules hold one by one: frames (`framing`), bodies (`wire`) and
the order of messages (`session`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, Literal, TypeVar, cast, overload

import msgspec

from headgate.protocol.errors import FrameTooLong, LocalProtocolError, RemoteProtocolError
from headgate.protocol.link.framing import FrameReader, encode_frame
from headgate.protocol.link.session import Closed, Direction, Role, Session, State
from headgate.protocol.link.wire import Message, decode_message, encode_message
from headgate.protocol.messages.runner import (
    FRAME_BYTES_MAX,
    FromRunner,
    FromSupervisor,
    StateChanges,
    StateSync,
    Welcome,
)

Observer = Callable[[Direction, Message, bytes], None]

Sent = TypeVar("Sent", FromRunner, FromSupervisor)
Received = TypeVar("Received", FromSupervisor, FromRunner)


class Connection(Generic[Sent, Received]):
    """One side of the link of one incarnation of the runner.

    ``role`` is this side. ``incarnation`` is the number the handshake must carry (I6).
    ``frame_bytes_max`` bounds frames both ways until `Welcome`, whose settings then hold for both sides.
    ``observer`` is called with direction, message and body of every frame sent, and of every frame
    received that could be decoded, before it is judged by the session; it must not raise.

    A `LocalProtocolError` changes nothing. After a `RemoteProtocolError` the connection is broken: every
    further call raises it again, and the link must be closed.
    """

    @overload
    def __init__(
        self: Connection[FromRunner, FromSupervisor],
        role: Literal[Role.RUNNER],
        *,
        incarnation: int,
        frame_bytes_max: int = ...,
        observer: Observer | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: Connection[FromSupervisor, FromRunner],
        role: Literal[Role.SUPERVISOR],
        *,
        incarnation: int,
        frame_bytes_max: int = ...,
        observer: Observer | None = ...,
    ) -> None: ...

    def __init__(
        self,
        role: Role,
        *,
        incarnation: int,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        observer: Observer | None = None,
    ) -> None:
        self._role = role
        self._session = Session(role, incarnation=incarnation)
        self._reader = FrameReader(frame_bytes_max)
        self._observer = observer
        self._closed_here = False
        self._error: RemoteProtocolError | None = None

    @property
    def role(self) -> Role:
        """This side of the link."""
        return self._role

    @property
    def incarnation(self) -> int:
        """The incarnation of the runner this link belongs to."""
        return self._session.incarnation

    @property
    def state(self) -> State:
        """Where the conversation stands. CLOSED once the peer's end is reached and all its messages are taken."""
        return self._session.state

    @property
    def frame_bytes_max(self) -> int:
        """The longest body of a frame that may go either way now, in bytes."""
        return self._reader.frame_bytes_max

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what was read from the link; then call `next_message` until it gives None.

        Raises `RemoteProtocolError` for a frame over the limit or an empty one, `LocalProtocolError` when
        messages are left untaken, or the link is closed.
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

        Raises `RemoteProtocolError` that says which: a malformed frame or body, an unknown tag, a message
        of the wrong direction or out of session state, another version (`VersionMismatch`) or incarnation.
        """
        self._require_open()
        try:
            body = self._reader.next_frame()
            if body is None:
                self._close_at_eof()
                return None
            message = decode_message(self._role.peer, body)
            if self._observer is not None:
                self._observer(Direction.of(self._role.peer), message, body)
            self._session.move(self._role.peer, message)
        except RemoteProtocolError as error:
            self._error = error
            raise
        self._adopt_limit(message)
        return cast(Received, message)

    def send(self, message: Sent) -> bytes:
        """Return the bytes that carry ``message``; they count as sent.

        Raises `FrameTooLong` (see `split_round` and `split_sync`) and `LocalProtocolError` for a message
        that is not this side's to send, or not now; nothing has changed then, and nothing may be sent.
        """
        self._require_open()
        body = encode_message(message)
        frame = encode_frame(body, self.frame_bytes_max, message_name=type(message).__name__)
        self._session.move(self._role, message)
        self._adopt_limit(message)
        if self._observer is not None:
            self._observer(Direction.of(self._role), message, body)
        return frame

    def close(self) -> None:
        """Close this side: nothing can be sent or received any more. Closing twice is allowed."""
        if not self._closed_here:
            self._closed_here = True
            self._session.move(self._role, Closed())

    def _require_open(self) -> None:
        if self._error is not None:
            raise RemoteProtocolError(f"the link is broken: {self._error}") from self._error
        if self._closed_here:
            raise LocalProtocolError("this side has closed the link")

    def _close_at_eof(self) -> None:
        if self._reader.at_eof and self.state is not State.CLOSED:
            self._session.move(self._role.peer, Closed())

    def _adopt_limit(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._reader.frame_bytes_max = message.settings.frame_bytes_max


RunnerConnection = Connection[FromRunner, FromSupervisor]
SupervisorConnection = Connection[FromSupervisor, FromRunner]


# --- cutting what is too long for one frame --------------------------------------------------------

# The order of the fields in the pieces. Events go before what finished, so that a trigger's end never
# overtakes its events; what is stored goes before what is to start, and cancels before creates, so that
# a trigger that is handed over anew is ended before it is begun.
_ROUND_FIELDS: Final = ("events", "refused", "finished", "stuck")
_SYNC_FIELDS: Final = ("persisted", "refused", "to_cancel", "to_create")

# What one element of a tuple, or a message without any, can need at most beside its variable parts: 9
# bytes an integer, 5 a header, the longest literal; a little more than counted, to be on the safe side.
_EVENT_BYTES_FIXED = 96
_PERSISTED_BYTES_FIXED = 9
_ENVELOPE_BYTES_FIXED = 64


def split_round(changes: StateChanges, frame_bytes_max: int) -> list[StateChanges]:
    """Cut a round into pieces that fit a frame each, in order, all but the last with ``more``.

    Elements keep their order, and no `FinishedTrigger` comes before an event of its run. A round that
    fits, which is the ordinary case, is returned as it is, without being encoded to find out. Raises
    `FrameTooLong` for an element that does not fit a frame alone.
    """
    fields = [getattr(changes, field) for field in _ROUND_FIELDS]
    variable_bytes = sum(
        [len(e.payload) + 4 * len(e.trigger_run_id) + (4 * len(e.key) if e.key else 0) for e in changes.events]
    )
    bound = (
        _ENVELOPE_BYTES_FIXED
        + _EVENT_BYTES_FIXED * len(changes.events)
        + variable_bytes
        + sum(_encoded_bytes(elements) for elements in fields[1:] if elements)
    )
    if bound <= frame_bytes_max:
        return [changes]
    pieces = _cut(StateChanges(round=changes.round), _ROUND_FIELDS, fields, frame_bytes_max)
    return [
        msgspec.structs.replace(changes, **piece, more=changes.more or number < len(pieces))
        for number, piece in enumerate(pieces, 1)
    ]


def split_sync(sync: StateSync, frame_bytes_max: int) -> list[StateSync]:
    """Cut a `StateSync` into pieces that fit a frame each, in order, all but the last with ``more``.

    All pieces carry its round. What is persisted and refused comes first, then what to cancel, then what
    to create; elements keep their order. One that fits is returned as it is. Raises `FrameTooLong` for an
    element that does not fit a frame alone.
    """
    fields = [getattr(sync, field) for field in _SYNC_FIELDS]
    bound = (
        _ENVELOPE_BYTES_FIXED
        + _PERSISTED_BYTES_FIXED * len(sync.persisted)
        + sum(_encoded_bytes(elements) for elements in fields[1:] if elements)
    )
    if bound <= frame_bytes_max:
        return [sync]
    pieces = _cut(StateSync(round=sync.round), _SYNC_FIELDS, fields, frame_bytes_max)
    return [
        msgspec.structs.replace(sync, **piece, more=sync.more or number < len(pieces))
        for number, piece in enumerate(pieces, 1)
    ]


def _cut(
    envelope: StateChanges | StateSync, names: tuple[str, ...], fields: list[tuple[Any, ...]], frame_bytes_max: int
) -> list[dict[str, tuple[Any, ...]]]:
    """Return the fields of each piece; every piece is as full as the order of elements allows."""
    envelope_bytes = len(encode_message(envelope))
    pieces: list[dict[str, list[Any]]] = [{name: [] for name in names}]
    elements_bytes = 0
    for name, elements in zip(names, fields, strict=True):
        for element in elements:
            element_bytes = _encoded_bytes(element)
            piece = pieces[-1]
            headers_bytes = sum(_array_header_bytes(len(piece[n]) + (n == name)) - 1 for n in names)
            if envelope_bytes + headers_bytes + elements_bytes + element_bytes > frame_bytes_max:
                if envelope_bytes + element_bytes > frame_bytes_max:
                    what = f"{type(envelope).__name__} with one element of {name}"
                    raise FrameTooLong(what, envelope_bytes + element_bytes, frame_bytes_max)
                piece = {n: [] for n in names}
                pieces.append(piece)
                elements_bytes = 0
            piece[name].append(element)
            elements_bytes += element_bytes
    return [{name: tuple(elements) for name, elements in piece.items()} for piece in pieces]


def _encoded_bytes(part: Any) -> int:
    """Return how many bytes a part of a message takes on the wire, where it takes the same as alone."""
    return len(encode_message(part))


def _array_header_bytes(elements: int) -> int:
    """Return the size of msgpack's header of an array, of which an empty one has 1 byte."""
    if elements < 16:
        return 1
    return 3 if elements < 2**16 else 5
