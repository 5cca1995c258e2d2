"""One side of a link: bytes in, messages out; messages in, bytes out. It does no I/O.

::

    connection = Connection(RunnerDialect(incarnation=7), Role.SUPERVISOR)
    connection.receive_data(sock.recv(65536))
    while (message := connection.next_message()) is not None:
        ...
    sock.sendall(connection.send(Welcome(...)))

`Connection` combines the other modules: frames (`framing`), bodies (`wire`) and the order of messages (`session`,
`runner_dialect`, `worker_dialect`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, overload

from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError
from headgate.protocol.link.framing import FrameReader, encode_frame
from headgate.protocol.link.session import Closed, Dialect, FromChild, FromSupervisor, Session, State
from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.runner import FRAME_BYTES_MAX, Welcome
from headgate.protocol.messages.worker import WorkerWelcome

Observer: TypeAlias = Callable[[Role, Any, bytes], None]

Sent = TypeVar("Sent", bound=WireStruct)
Received = TypeVar("Received", bound=WireStruct)


class Connection(Generic[Sent, Received]):
    """One side of the link between a child and its supervisor.

    ``dialect`` defines the messages of the link and their order, ``role`` is this side. ``frame_bytes_max`` limits the
    frames of both directions until `Welcome` or `WorkerWelcome`, whose settings then apply to both sides. ``observer``
    is called with sender, message and body of every frame sent, and of every frame received that could be decoded,
    before the session checks it; it must not raise.

    A `LocalProtocolError` changes nothing. After a `RemoteProtocolError` the connection is broken: every further call
    raises it again, and the link must be closed.
    """

    @overload
    def __init__(
        self: Connection[FromChild, FromSupervisor],
        dialect: Dialect[FromChild, FromSupervisor],
        role: Literal[Role.RUNNER, Role.WORKER],
        *,
        frame_bytes_max: int = ...,
        observer: Observer | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: Connection[FromSupervisor, FromChild],
        dialect: Dialect[FromChild, FromSupervisor],
        role: Literal[Role.SUPERVISOR],
        *,
        frame_bytes_max: int = ...,
        observer: Observer | None = ...,
    ) -> None: ...

    def __init__(
        self,
        dialect: Dialect[Any, Any],
        role: Role,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        observer: Observer | None = None,
    ) -> None:
        self._session = Session(dialect, role)
        self._wire = dialect.wire
        self._role = role
        self._peer = dialect.wire.peer(role)
        self._reader = FrameReader(frame_bytes_max)
        self._observer = observer
        self._closed_here = False
        self._error: RemoteProtocolError | None = None

    @property
    def state(self) -> State:
        """The state of the conversation: CLOSED once the peer has closed the link and all its messages are taken."""
        return self._session.state

    @property
    def frame_bytes_max(self) -> int:
        """The limit of a frame's body in either direction, in bytes."""
        return self._reader.frame_bytes_max

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take data read from the link; then call `next_message` until it returns None.

        Raises `RemoteProtocolError` if a frame is empty or over the limit, `LocalProtocolError` if messages were left
        untaken or the link is closed.
        """
        self._require_open()
        try:
            self._reader.feed(data)
        except RemoteProtocolError as error:
            self._error = error
            raise

    def receive_eof(self) -> None:
        """Take the end of the peer's stream. Complete messages received before can still be taken.

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
        """Return the peer's next message; None if it is not complete yet, or after the last one (`state` is CLOSED).

        Raises `RemoteProtocolError` for a malformed frame or body, an unknown tag, a message that is illegal in this
        direction or state, one that does not fit the message it answers, and another version (`VersionMismatch`).
        """
        self._require_open()
        try:
            body = self._reader.next_frame()
            if body is None:
                self._close_at_eof()
                return None
            message = self._wire.decode(self._peer, body)
            if self._observer is not None:
                self._observer(self._peer, message, body)
            self._session.move(self._peer, message)
        except RemoteProtocolError as error:
            self._error = error
            raise
        self._adopt_limit(message)
        return cast(Received, message)

    def send(self, message: Sent) -> bytes:
        """Return the bytes of ``message``, which now counts as sent.

        Raises `FrameTooLong` (see `headgate.protocol.link.splitting`), and `LocalProtocolError` if this side may not
        send this message, or not in this state; then nothing has changed, and nothing may be sent.
        """
        self._require_open()
        body = encode_message(message)
        frame = encode_frame(body, self.frame_bytes_max, message_name=type(message).__name__)
        self._session.move(self._role, message)
        self._adopt_limit(message)
        if self._observer is not None:
            self._observer(self._role, message, body)
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
            self._session.move(self._peer, Closed())

    def _adopt_limit(self, message: WireStruct) -> None:
        if isinstance(message, Welcome | WorkerWelcome):
            self._reader.frame_bytes_max = message.settings.frame_bytes_max
