"""The state of one conversation between a runner and its supervisor.

Both sides hold a `Session` and move it by what either of them sends, so both always know what may come::

               runner: Hello            supervisor: Welcome
    OPENING ------------------> GREETED ------------------> READY --+  runner: StateChanges, Request
                                                              |  ^  |  supervisor: StateSync, Response, Reply
                                                              |  +--+
                                            supervisor: Drain |
                                                              v
                                                          DRAINING --+  runner: StateChanges, Request
                                                                 ^   |  supervisor: StateSync, Response, Reply
                                                                 +---+
    any state -- either side: Closed --> CLOSED

Both sides speak at will once READY, so a message is judged when it is sent and when it arrives, by the
same table: what the runner sent before it read `Drain` is legal in DRAINING too. A side can die at any
moment, so `Closed` is legal everywhere; whether it was expected is for the owner of the link to say.

The handshake is judged by its content as well: both sides must speak one version and mean the same
incarnation (I6).
"""

from __future__ import annotations

import enum
from typing import Final

from headgate.protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError, VersionMismatch
from headgate.protocol.link.framing import check_frame_limit
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FromRunner,
    FromSupervisor,
    Hello,
    Reply,
    Request,
    Response,
    StateChanges,
    StateSync,
    Welcome,
)


class Role(enum.Enum):
    """Which side of the link."""

    RUNNER = "runner"
    SUPERVISOR = "supervisor"

    @property
    def peer(self) -> Role:
        """The other side."""
        return Role.SUPERVISOR if self is Role.RUNNER else Role.RUNNER


class Direction(enum.Enum):
    """Which way a frame goes; the values are those of the frame log."""

    FROM_RUNNER = 1
    FROM_SUPERVISOR = 2

    @property
    def sender(self) -> Role:
        """The side that sends in this direction."""
        return Role.RUNNER if self is Direction.FROM_RUNNER else Role.SUPERVISOR

    @classmethod
    def of(cls, sender: Role) -> Direction:
        """Return the direction in which ``sender`` sends."""
        return cls.FROM_RUNNER if sender is Role.RUNNER else cls.FROM_SUPERVISOR


class State(enum.Enum):
    """Where a conversation stands; see the drawing at the head of the module."""

    OPENING = "OPENING"
    GREETED = "GREETED"
    READY = "READY"
    DRAINING = "DRAINING"
    CLOSED = "CLOSED"


class Closed:
    """The event of a side that closes its end; no message, it is not on the wire."""

    __slots__ = ()


Event = FromRunner | FromSupervisor | Closed

_CLOSING: Final[dict[tuple[Role, type[Event]], State]] = {
    (Role.RUNNER, Closed): State.CLOSED,
    (Role.SUPERVISOR, Closed): State.CLOSED,
}

TRANSITIONS: Final[dict[State, dict[tuple[Role, type[Event]], State]]] = {
    State.OPENING: {
        (Role.RUNNER, Hello): State.GREETED,
        **_CLOSING,
    },
    State.GREETED: {
        (Role.SUPERVISOR, Welcome): State.READY,
        **_CLOSING,
    },
    State.READY: {
        (Role.RUNNER, StateChanges): State.READY,
        (Role.RUNNER, Request): State.READY,
        (Role.SUPERVISOR, StateSync): State.READY,
        (Role.SUPERVISOR, Response): State.READY,
        (Role.SUPERVISOR, Reply): State.READY,
        (Role.SUPERVISOR, Drain): State.DRAINING,
        **_CLOSING,
    },
    State.DRAINING: {
        (Role.RUNNER, StateChanges): State.DRAINING,
        (Role.RUNNER, Request): State.DRAINING,
        (Role.SUPERVISOR, StateSync): State.DRAINING,
        (Role.SUPERVISOR, Response): State.DRAINING,
        (Role.SUPERVISOR, Reply): State.DRAINING,
        **_CLOSING,
    },
    State.CLOSED: {
        **_CLOSING,
    },
}


class Session:
    """The state of one incarnation's conversation, as seen by ``role``.

    ``incarnation`` is the number this side knows the runner by; the handshake must carry it.
    """

    __slots__ = ("_state", "incarnation", "role")

    def __init__(self, role: Role, *, incarnation: int) -> None:
        self.role = role
        self.incarnation = incarnation
        self._state = State.OPENING

    @property
    def state(self) -> State:
        """Where the conversation stands."""
        return self._state

    def move(self, sender: Role, event: Event) -> None:
        """Move on by one event of ``sender``.

        Raises `LocalProtocolError` if this side is the sender and the event is illegal now,
        `RemoteProtocolError` (`VersionMismatch` for a peer of another version) if the peer is; the state
        is then as it was.
        """
        to = TRANSITIONS[self._state].get((sender, type(event)))
        if to is None:
            raise self._fault(sender, f"cannot send {type(event).__name__} in state {self._state.name}")
        if isinstance(event, Hello | Welcome):
            self._check_handshake(sender, event)
        self._state = to

    def _check_handshake(self, sender: Role, message: Hello | Welcome) -> None:
        name = type(message).__name__
        if message.protocol_version != PROTOCOL_VERSION:
            if sender is self.role:
                raise LocalProtocolError(f"{name} must carry protocol version {PROTOCOL_VERSION}")
            theirs, ours = message.protocol_version, PROTOCOL_VERSION
            if sender is Role.RUNNER:
                raise VersionMismatch(supervisor=ours, runner=theirs)
            raise VersionMismatch(supervisor=theirs, runner=ours)
        if message.incarnation != self.incarnation:
            raise self._fault(
                sender,
                f"cannot send {name} of incarnation {message.incarnation}: this is incarnation {self.incarnation}",
            )
        if isinstance(message, Welcome):
            try:
                check_frame_limit(message.settings.frame_bytes_max)
            except ValueError as error:
                raise self._fault(sender, f"cannot send this Welcome: {error}") from None

    def _fault(self, sender: Role, problem: str) -> ProtocolError:
        kind = LocalProtocolError if sender is self.role else RemoteProtocolError
        return kind(f"the {sender.value} {problem}")
