"""The state of one conversation between a child of the supervisor, a runner or a worker, and its supervisor.

Both sides hold a `Session` and move it with every message that either of them sends, so both always know which messages
are legal next. The `Dialect` of the link defines them: see the drawings at the head of `runner_dialect` and
`worker_dialect`. They begin and end alike::

               child: Hello                        supervisor: Welcome
    OPENING ------------------> HELLO_RECEIVED ------------------> ...

    any state -- either side: Closed --> CLOSED

A message is checked when it is sent and when it is received, by the same table. A side can die at any moment, so
`Closed` is legal in every state; the owner of the link decides whether it was expected. A message with ``more`` is
continued by the next one, so it does not change the state.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final, Generic, TypeAlias, TypeVar

from headgate.protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError, VersionMismatch
from headgate.protocol.link.framing import check_frame_limit
from headgate.protocol.link.wire import Role, Wire
from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.runner import PROTOCOL_VERSION, Hello, Welcome
from headgate.protocol.messages.worker import WorkerHello, WorkerWelcome

FromChild = TypeVar("FromChild", bound=WireStruct)
FromSupervisor = TypeVar("FromSupervisor", bound=WireStruct)


class State(enum.Enum):
    """The state of a conversation; see the drawings of the dialects."""

    OPENING = "OPENING"
    HELLO_RECEIVED = "HELLO_RECEIVED"
    READY = "READY"  # of a runner
    DRAINING = "DRAINING"
    IDLE = "IDLE"  # of a worker
    RUNNING = "RUNNING"
    PARSING = "PARSING"
    DECIDING = "DECIDING"
    CLOSED = "CLOSED"


class Closed:
    """The event of a side that closes its end. It is not a message, so it is not on the wire."""

    __slots__ = ()


Event: TypeAlias = WireStruct | Closed
Transitions: TypeAlias = Mapping[State, Mapping[tuple[Role, type[Event]], State]]


def closing(child: Role) -> dict[tuple[Role, type[Event]], State]:
    """Return the transitions that every state has."""
    return {(child, Closed): State.CLOSED, (Role.SUPERVISOR, Closed): State.CLOSED}


class Dialect(ABC, Generic[FromChild, FromSupervisor]):
    """Rules for the messages between one kind of child and its supervisor.

    ``transitions`` has the messages that each side may send in each state. `check` adds the rules that depend on
    earlier messages: for example, an answer must fit its question. An instance belongs to one session and keeps the
    data that `check` needs.
    """

    child: ClassVar[Role]
    wire: ClassVar[Wire]
    transitions: ClassVar[Transitions]

    @abstractmethod
    def check(self, here: Role, sender: Role, message: WireStruct) -> str | None:
        """Return why a message that the table allows does not fit the messages before it; None if it does.

        ``here`` is this side. Raises `VersionMismatch` for a peer of another version.
        """

    def note(self, here: Role, message: WireStruct) -> None:  # not every dialect has to remember
        """Keep the data of a sent or received message that `check` needs later."""

    def settled(self, to: State) -> State:
        """Return the state after the last message, which is ``to`` by the table, unless earlier messages decide it."""
        return to

    def check_handshake(
        self, here: Role, sender: Role, message: Hello | Welcome | WorkerHello | WorkerWelcome
    ) -> str | None:
        """Check the version and the frame limit of a handshake; returns and raises as `check` does."""
        theirs = message.protocol_version
        if theirs != PROTOCOL_VERSION:
            if sender is here:
                return f"it must carry protocol version {PROTOCOL_VERSION}"
            if sender is Role.SUPERVISOR:
                raise VersionMismatch(self.child.value, supervisor=theirs, child=PROTOCOL_VERSION)
            raise VersionMismatch(self.child.value, supervisor=PROTOCOL_VERSION, child=theirs)
        if isinstance(message, Welcome | WorkerWelcome):
            try:
                check_frame_limit(message.settings.frame_bytes_max)
            except ValueError as error:
                return str(error)
        return None


class Session:
    """The state of one conversation, as seen by ``role``; ValueError if the dialect has no such role."""

    __slots__ = ("_state", "dialect", "role")

    def __init__(self, dialect: Dialect[FromChild, FromSupervisor], role: Role) -> None:
        if role not in dialect.wire.types:
            raise ValueError(f"this link is between supervisor and {dialect.child.value}, so it has no {role.value}")
        self.dialect: Final = dialect
        self.role = role
        self._state = State.OPENING

    @property
    def state(self) -> State:
        """The state of the conversation."""
        return self._state

    def move(self, sender: Role, event: Event) -> None:
        """Change the state by one event of ``sender``.

        If the event is illegal now, raises `LocalProtocolError` if this side is the sender, otherwise
        `RemoteProtocolError` (`VersionMismatch` for a peer of another version); then the state does not change.
        """
        to = self.dialect.transitions[self._state].get((sender, type(event)))
        if to is None:
            raise self._fault(sender, f"cannot send {type(event).__name__} in state {self._state.name}")
        if not isinstance(event, Closed):
            if (problem := self.dialect.check(self.role, sender, event)) is not None:
                raise self._fault(sender, f"cannot send this {type(event).__name__}: {problem}")
            self.dialect.note(self.role, event)
            if getattr(event, "more", False):
                return
        self._state = self.dialect.settled(to)

    def _fault(self, sender: Role, problem: str) -> ProtocolError:
        kind = LocalProtocolError if sender is self.role else RemoteProtocolError
        return kind(f"the {sender.value} {problem}")
