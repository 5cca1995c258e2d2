"""What the supervisor's core tells its surroundings to do: the core decides, the arbiter acts."""

from __future__ import annotations

import msgspec

from headgate.protocol.messages.runner import FromSupervisor


class Spawn(msgspec.Struct, frozen=True):
    """Start a runner process with this incarnation number."""

    incarnation: int


class Send(msgspec.Struct, frozen=True):
    """Send this message to the runner that is running."""

    message: FromSupervisor


class DumpStacks(msgspec.Struct, frozen=True):
    """Have the runner write the stacks of its threads to its standard error; it may be stuck."""


class Kill(msgspec.Struct, frozen=True):
    """End the runner with SIGKILL; ``reason`` is for the log."""

    reason: str


class Exit(msgspec.Struct, frozen=True):
    """The supervisor's work is over: leave with this exit code."""

    code: int
    reason: str


Command = Spawn | Send | DumpStacks | Kill | Exit

EXIT_DRAINED = 0  # asked to stop; everything that was fired is stored, and every task that ran has ended
EXIT_KILLED = 1  # asked to stop twice, or the drain was cut short
EXIT_LEASE_LOST = 3  # another supervisor has taken this one's triggers
EXIT_INCOMPATIBLE = 4  # the runner speaks another version of the protocol
