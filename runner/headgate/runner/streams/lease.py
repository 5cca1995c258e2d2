"""How long brokers may be advanced: until the lease of this runner's supervisor may have run out (I10).

The supervisor answers a round only while nobody can have taken its triggers over, and for ``valid_s`` seconds more
nobody can (`headgate.supervisor.leases.Leases.is_fresh`). So what an answer is worth counts from the moment the *round*
was sent, whatever time either process stood still meanwhile. An advance that begins later waits for another answer.

Events that were fired need a confirmation anyway. This is for the messages that fired none: without it the runner of a
supervisor that was cut off from the database would go on to commit what its own filters skip, while subscribers of
whoever took over may still work on the same messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio


class Lease:
    """The right to advance. ``ask`` is called when somebody waits for it: a round should be sent."""

    def __init__(self, *, valid_s: float, ask: Callable[[], object]) -> None:
        self._valid_s = valid_s
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
        return bool(self._waiting) and not self._is_given_up

    def renew(self, sent_at: float) -> None:
        """A round that was sent at ``sent_at`` has been answered."""
        if not self._is_given_up:
            self._until = sent_at + self._valid_s
            self._waiting.unpark_all()

    def give_up(self) -> None:
        """The supervisor has lost its lease: nothing is advanced by this process any more."""
        self._is_given_up = True
        self._until = -math.inf

    async def wait(self) -> None:
        """Return when an advance may begin: at once, in this very step, where it may now."""
        while not self.is_held:
            if not self._is_given_up:
                self._ask()
            await self._waiting.park()
