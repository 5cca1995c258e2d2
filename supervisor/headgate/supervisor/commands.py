"""Commands of the supervisor's core: the core decides, the arbiter carries them out."""

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
    """Have the runner, which may be stuck, write the stacks of its threads to its standard error."""


class Kill(msgspec.Struct, frozen=True):
    """End the runner with SIGKILL; ``reason`` is for the log."""

    reason: str


class Exit(msgspec.Struct, frozen=True):
    """The supervisor's work is over: leave with this exit code."""

    code: int
    reason: str


Command = Spawn | Send | DumpStacks | Kill | Exit

EXIT_DRAINED = 0  # asked to stop; all fired events are stored, and every task that ran has ended
EXIT_KILLED = 1  # asked to stop twice, or the drain was cut short
EXIT_LEASE_LOST = 3  # another supervisor has taken this one's triggers
EXIT_INCOMPATIBLE = 4  # the runner speaks another version of the protocol
EXIT_DATABASE_REPLACED = 5  # the file of its SQLite database was deleted, moved or replaced
EXIT_CUT_OFF = 6  # it could not renew its lease for too long, and has given up what it held
