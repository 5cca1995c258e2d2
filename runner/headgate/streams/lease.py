"""How long brokers may be advanced: until the lease of this runner's supervisor may be another's (I10).

The answer to a round says for how many seconds the lease was sure to last when the supervisor had read the round. They
count from when the round was *sent*, which was before, however long either process stood still meanwhile. An advance
that would begin later waits for another answer.

Events that were fired need a confirmation anyway. This is for the messages that fired none: without it the runner of a
supervisor that was cut off from the database would go on to commit what its own filters skip, while subscribers of
whoever took over may still work on the same messages. An advance that has begun is not cut off; for that the supervisor
keeps a margin (`headgate.supervisor.triggers.leases.ADVANCE_SHARE`). The clock is one that stands still while the
machine is
suspended. One round is in flight at a time: while it cannot be stored, no newer answer comes, and advances wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio


class Lease:
    """The right to advance. ``ask`` is called when somebody waits for it: a round should be sent."""

    def __init__(self, *, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._until = -math.inf
        self._is_given_up = False
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def is_held(self) -> bool:
        """Whether an advance may begin now."""
        return trio.current_time() < self._until

    @property
    def is_wanted(self) -> bool:
        """Whether an advance waits for it."""
        return bool(self._waiting)

    def renew(self, sent_at: float, lasts_s: float | None) -> None:
        """A round that was sent at ``sent_at`` has been answered: from then on the lease lasts for ``lasts_s``.

        None: there is no limit, until one is told.
        """
        if not self._is_given_up:
            until = math.inf if lasts_s is None else sent_at + lasts_s
            self._until = until if self._until == math.inf else max(self._until, until)
        if self.is_held:
            self._waiting.unpark_all()

    def give_up(self) -> None:
        """The supervisor has lost its lease: nothing is advanced by this process any more."""
        self._is_given_up = True
        self._until = -math.inf
        self._waiting.unpark_all()

    async def wait(self) -> bool:
        """Wait until an advance may begin, and return in that very step; False where none ever may again.

        A round is asked for once: if its answer does not help, that of the next heartbeat may.
        """
        if not self.is_held and not self._is_given_up:
            self._ask()
        while not self.is_held:
            if self._is_given_up:
                return False
            await self._waiting.park()
        return True
