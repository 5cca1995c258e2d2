"""The conversation between the runner and its supervisor::

               runner: Hello                   supervisor: Welcome
    OPENING ------------------> HELLO_RECEIVED ------------------> READY --+  runner: StateChanges, Request
                                                                     |  ^  |  supervisor: StateSync, Response
                                                                     |  +--+
                                                   supervisor: Drain |
                                                                     v
                                                                 DRAINING --+  runner: StateChanges, Request
                                                                        ^   |  supervisor: StateSync, Response
                                                                        +---+
    any state -- either side: Closed --> CLOSED

In READY both sides may send at any time, so messages can cross: a message that the runner sent before it read `Drain`
is legal in DRAINING too. In addition to the table:

- Both sides speak the same version and name the same incarnation (I6).
- The `Request` of a runner carries a query that a trigger may send.
"""

from __future__ import annotations

import enum
import typing
from typing import ClassVar, Final, TypeAlias

from headgate.protocol.link.session import Dialect, State, Transitions, closing
from headgate.protocol.link.wire import Role, Wire
from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.queries import LastEvent, Request, Response, TriggerQuery
from headgate.protocol.messages.runner import Drain, FromRunner, FromSupervisor, Hello, StateChanges, StateSync, Welcome

Message: TypeAlias = FromRunner | FromSupervisor

RUNNER_WIRE: Final = Wire(
    {Role.RUNNER: (Hello, StateChanges, Request), Role.SUPERVISOR: (Welcome, StateSync, Response, Drain)}
)

_QUERIES: Final = (LastEvent, *typing.get_args(TriggerQuery))
_CLOSING: Final = closing(Role.RUNNER)

TRANSITIONS: Final[Transitions] = {
    State.OPENING: {
        (Role.RUNNER, Hello): State.HELLO_RECEIVED,
        **_CLOSING,
    },
    State.HELLO_RECEIVED: {
        (Role.SUPERVISOR, Welcome): State.READY,
        **_CLOSING,
    },
    State.READY: {
        (Role.RUNNER, StateChanges): State.READY,
        (Role.RUNNER, Request): State.READY,
        (Role.SUPERVISOR, StateSync): State.READY,
        (Role.SUPERVISOR, Response): State.READY,
        (Role.SUPERVISOR, Drain): State.DRAINING,
        **_CLOSING,
    },
    State.DRAINING: {
        (Role.RUNNER, StateChanges): State.DRAINING,
        (Role.RUNNER, Request): State.DRAINING,
        (Role.SUPERVISOR, StateSync): State.DRAINING,
        (Role.SUPERVISOR, Response): State.DRAINING,
        **_CLOSING,
    },
    State.CLOSED: {
        **_CLOSING,
    },
}


class Direction(enum.Enum):
    """The direction of a frame on the runner's link; the values are those of the frame log."""

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


class RunnerDialect(Dialect[FromRunner, FromSupervisor]):
    """The dialect of the link of one incarnation of the runner; the handshake must carry ``incarnation``."""

    child: ClassVar = Role.RUNNER
    wire: ClassVar = RUNNER_WIRE
    transitions: ClassVar = TRANSITIONS

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation

    def check(self, here: Role, sender: Role, message: WireStruct) -> str | None:
        """See `Dialect.check`."""
        match message:
            case Hello() | Welcome():
                problem = self.check_handshake(here, sender, message)
                if problem is None and message.incarnation != self.incarnation:
                    problem = f"it is of incarnation {message.incarnation}, and this is incarnation {self.incarnation}"
                return problem
            case Request() if not isinstance(message.query, _QUERIES):
                return f"{type(message.query).__name__} is not a query of triggers"
            case _:
                return None
