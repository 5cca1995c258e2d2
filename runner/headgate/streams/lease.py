"""The runner's view of its supervisor's lease: brokers are advanced only while no other supervisor can have it (I10).

The answer to a round says for how many more seconds the lease is certain to last, counted by the supervisor from the
moment it read the round. The runner counts these seconds from the moment it *sent* the round. That was earlier, however
long either process was stopped in between, so the runner's deadline is never later than the supervisor's. An advance
that would begin after the deadline waits for another answer::

    runner       send round ------------------------ deadline        (sent_at + lasts_s)
    supervisor        read round ----------------------- lease may be taken over
                          <------- lasts_s ------------>

Events that were fired need a confirmation in any case. The lease matters for messages from which nothing was derived:
without it the runner of a supervisor that is cut off from the database would continue to commit the messages that its
own filters skip, while the subscribers of the supervisor that took over may still be working on the same messages.

An advance that has begun is not interrupted; the supervisor keeps a margin for it
(`headgate.supervisor.triggers.leases.ADVANCE_SHARE`). Trio's clock does not count while the machine is suspended. One
round is in flight at a time: while it cannot be stored, no newer answer arrives, and advances wait.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import trio


class Lease:
    """The right to advance. ``request_round`` is called if an advance has to wait: the next answer may renew it."""

    def __init__(self, *, request_round: Callable[[], object]) -> None:
        self._request_round = request_round
        self._until = -math.inf
        self._is_given_up = False
        self._pid = os.getpid()
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def is_held(self) -> bool:
        """Whether an advance may begin now. Never in a fork: the streams belong to the process that opened them."""
        return trio.current_time() < self._until and os.getpid() == self._pid

    @property
    def is_wanted(self) -> bool:
        """Whether an advance waits for it."""
        return bool(self._waiting)

    def renew(self, sent_at: float, lasts_s: float | None) -> None:
        """Take the answer to a round sent at ``sent_at``: the lease lasts ``lasts_s`` seconds from then on.

        None means no limit, until an answer names one.
        """
        if not self._is_given_up:
            until = math.inf if lasts_s is None else sent_at + lasts_s
            self._until = until if self._until == math.inf else max(self._until, until)
        if self.is_held:
            self._waiting.unpark_all()

    def give_up(self) -> None:
        """Give the lease up for good: the supervisor has lost it, and this process advances nothing more."""
        self._is_given_up = True
        self._until = -math.inf
        self._waiting.unpark_all()

    async def wait(self) -> bool:
        """Wait until an advance may begin, and return in that same step; False if none ever may again.

        A round is requested once: if its answer does not help, the answer to the next heartbeat may.
        """
        if not self.is_held and not self._is_given_up:
            self._request_round()
        while not self.is_held:
            if self._is_given_up:
                return False
            await self._waiting.park()
        return True
