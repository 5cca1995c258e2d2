"""The right to run triggers: an epoch in the database, kept by heartbeats, checked by every write (I10).

A supervisor registers and gets an epoch. As long as its heartbeats arrive, its triggers are its own. When
they stop for too long, or when its process is known to be gone from this machine, another supervisor
*fences* the epoch: no transaction of it can commit from then on, and its triggers may be claimed.

`Leases.step` runs at most one of its duties at a time, each a single short transaction, the most urgent
first: heartbeat, then looking for fallen neighbours, then looking for triggers to claim or cancel. The last is asked of
the database when somebody seems to have written to it, and rarely otherwise (`headgate.store.db.changes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import structlog

from headgate.protocol import marks
from headgate.store.errors import DATABASE_UNUSABLE
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.triggers.leases import ClaimedTrigger, TriggererRow
from headgate.supervisor.backoff import DatabaseRetry

log = structlog.get_logger(__name__)

# For so long, in seconds, a supervisor takes no more than its share of what it and others could claim: then the others
# had their chance, and are full, or slow.
FAIR_WAIT_S = 1.0
# Of the time until others may fence an epoch: only so long does its runner begin to advance brokers. The rest is for an
# advance that has begun, which takes as long as its broker does.
ADVANCE_SHARE = 0.8
CLAIM_TRIGGERS_MAX = 1000  # claimed in one transaction: bounds its locks and the first message to the runner


class Identity(msgspec.Struct, frozen=True):
    """Who this supervisor is. ``machine`` tells apart where a pid means the same process and where not."""

    hostname: str
    pid: int
    machine: str
    process_started: float


class LeaseTimes(msgspec.Struct, frozen=True):
    """How often things are done, in seconds.

    ``notice_interval_s``: how often to look whether others have written to the database, which costs no statement;
    for a moment after somebody has, ten times as often. ``poll_interval_s``: how often to ask it even if nobody
    seems to have.
    """

    heartbeat_s: float
    silence_max_s: float
    poll_interval_s: float
    notice_interval_s: float = 0.5


class LeaseNews(msgspec.Struct, frozen=True):
    """What one step found: triggers that are now owned, maybe known as such, and owned ones that a user removed.

    ``ended``: owned ones that nothing waits for any more (`headgate.store.triggers.leases.Poll`). ``has_fenced``:
    others lost
    their leases. ``has_looked``: somebody else seems to have written to the database, or could have for a while.
    """

    claimed: list[ClaimedTrigger]
    removed: list[int]
    ended: list[int] = []
    has_fenced: bool = False
    has_looked: bool = False


NO_NEWS = LeaseNews([], [])


class Leases:
    """One supervisor's epoch, and what it does to keep it and to fill it with triggers."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        capacity: int,
        queues: Sequence[str],
        workers: int = 0,
        times: LeaseTimes,
        is_gone: Callable[[TriggererRow], bool],
        retry: DatabaseRetry,
    ) -> None:
        self._store = store
        self._identity = identity
        self._capacity = capacity
        self._queues = tuple(queues)
        self._workers = workers
        self._times = times
        self._is_gone = is_gone
        self._retry = retry
        self._epoch: Epoch | None = None
        self._renewed_at = -math.inf  # when what renewed the lease last was begun
        self._heartbeat_at = self._look_around_at = self._poll_at = self._notice_at = 0.0
        self._notice_wait_s = times.notice_interval_s
        self._is_claiming = False
        self._wants_room = False  # something could be claimed, and there was no room for it
        self._claim_is_unknown = False
        self._neighbours = 0  # other supervisors that serve one of our queues, as of the last look around
        self._claimable_since: float | None = None  # something has been there to be claimed for so long

    @property
    def epoch(self) -> Epoch:
        """The epoch; asking before `is_held` is a bug."""
        assert self._epoch is not None, "no epoch yet"
        return self._epoch

    @property
    def is_held(self) -> bool:
        """Whether this supervisor has registered."""
        return self._epoch is not None

    @property
    def is_claiming(self) -> bool:
        """Whether the next poll may find more that belongs to what was claimed: nothing should start before it."""
        return self._is_claiming

    def lasts_s(self, now: float) -> float:
        """Return for how many seconds brokers may be advanced: nobody can fence this epoch for that long, and a while.

        Counted from the beginning of the last renewal, which is before the moment that the database has written down;
        by the same `silence_max_s`, which is why it must be the same for all.
        """
        return max(0.0, self._renewed_at + ADVANCE_SHARE * self._times.silence_max_s - now)

    def wake_at(self) -> float:
        """When the next duty is due."""
        return min(self._heartbeat_at, self._look_around_at, self._notice_at)

    def look_soon(self) -> None:
        """Look for triggers to claim or cancel in the next step: tasks of our own have made or ended some."""
        self._poll_at = self._notice_at = 0.0

    def step(self, now: float, *, owned: int, claiming: bool) -> LeaseNews:
        """Do what is most urgently due, if anything. ``owned`` counts against the capacity.

        Raises `LeaseLost` when another supervisor has fenced this epoch.
        """
        if now < self.wake_at():
            return NO_NEWS
        try:
            news = self._duty(now, owned, claiming)
        except DATABASE_UNUSABLE as exc:
            retry_at = self._retry.failed(exc, now)
            self._heartbeat_at = self._look_around_at = self._poll_at = self._notice_at = retry_at
            return NO_NEWS
        self._retry.succeeded(now)
        return news

    def _duty(self, now: float, owned: int, claiming: bool) -> LeaseNews:
        if self._epoch is None:
            self._register(now)
        elif now >= self._heartbeat_at:
            self._store.heartbeat(self._epoch)
            self._renewed_at = now
            self._heartbeat_at = now + self._times.heartbeat_s
        elif now >= self._look_around_at:
            has_fenced = self._look_around(self._epoch)
            self._look_around_at = now + self._times.heartbeat_s
            return LeaseNews([], [], has_fenced=has_fenced)
        else:
            # Before the poll, so that what comes after it is noticed the next time.
            has_changes = self._store.has_changes()
            longest_s = self._times.notice_interval_s
            # Who has written may soon write more: a looping script, a deployment, another supervisor that leaves.
            self._notice_wait_s = longest_s / 10 if has_changes else min(longest_s, self._notice_wait_s * 1.5)
            self._notice_at = now + self._notice_wait_s
            has_room = self._wants_room and owned < self._capacity
            if has_changes or has_room or now >= self._poll_at or self._claim_is_unknown:
                news = self._poll(self._epoch, now, owned, claiming)
                return news
        return NO_NEWS

    def _register(self, now: float) -> None:
        who = self._identity
        self._epoch = self._store.register_triggerer(
            hostname=who.hostname,
            pid=who.pid,
            machine=who.machine,
            process_started=who.process_started,
            capacity=self._capacity,
            queues=self._queues,
            workers=self._workers,
        )
        marks.reach("leases.registered")
        self._renewed_at = now
        self._heartbeat_at = now + self._times.heartbeat_s
        log.info("registered", epoch=self._epoch, capacity=self._capacity, queues=self._queues)

    def _look_around(self, epoch: Epoch) -> bool:
        """Fence the neighbours that fell silent, and those whose process this machine knows to be gone."""
        fenced: list[Epoch] = []
        others = [row for row in self._store.live_triggerers() if row.id != epoch]
        gone = [row.id for row in others if self._is_gone(row)]
        self._neighbours = sum(
            row.id not in gone
            and row.heartbeat_age_s <= self._times.silence_max_s
            and not set(self._queues).isdisjoint(row.queues)
            for row in others
        )
        if gone or any(row.heartbeat_age_s > self._times.silence_max_s for row in others):
            fenced = self._store.fence_triggerers(epoch, silence_max_s=self._times.silence_max_s, dead=gone)
            if fenced:
                self._poll_at = self._notice_at = 0.0  # their triggers can be claimed now
                log.warning("took over from supervisors that are gone", epochs=fenced)
        return bool(fenced)

    def _share(self, now: float, room: int) -> tuple[int, bool]:
        """Return how many triggers to claim, and whether that leaves some to others that there would be room for.

        It is as many as there is room for, or, while others may want some, a share.
        """
        if self._claimable_since is None:
            self._claimable_since = now
        if self._neighbours == 0 or now - self._claimable_since >= FAIR_WAIT_S:
            return room, False
        claimable = self._store.count_claimable(self._queues)
        share = max(1, math.ceil(claimable / (self._neighbours + 1)))
        return min(room, share), share < min(room, claimable)

    def _poll(self, epoch: Epoch, now: float, owned: int, claiming: bool) -> LeaseNews:
        if self._claim_is_unknown:
            # The last claim did not return, so nobody knows whether it was committed: what it took would be
            # owned by us and run by nobody.
            owned_triggers = self._store.claimed_triggers(epoch)
            self._claim_is_unknown = False
            self._is_claiming = True  # it may not have been all
            self._poll_at = self._notice_at = now  # and removals were not asked for
            return LeaseNews(owned_triggers, [], has_looked=True)
        poll = self._store.poll(epoch, self._queues)
        room = min(self._capacity - owned, CLAIM_TRIGGERS_MAX)
        leaves_some = False
        claimed: list[ClaimedTrigger] = []
        if poll.claimable and claiming and room > 0:
            share, leaves_some = self._share(now, room)
            self._claim_is_unknown = True
            claimed = self._store.claim_triggers(epoch, limit=share, queues=self._queues)
            self._claim_is_unknown = False
            marks.reach("leases.claim_written")
        if not poll.claimable:
            self._claimable_since = None
        self._wants_room = poll.claimable and len(claimed) >= room
        # A full claim means there may be more: look again at once, after the other duties.
        is_full = len(claimed) == CLAIM_TRIGGERS_MAX
        self._poll_at = now if is_full else now + self._times.poll_interval_s
        if leaves_some:
            self._poll_at = min(self._poll_at, now + FAIR_WAIT_S)  # for what the others leave
        # What they leave may share a stream with what we have. The trigger of a task is in a stream of its own, or
        # misses nothing: it waits for nobody.
        has_watchers = self._is_claiming or any(trigger.task is None for trigger in claimed)
        self._is_claiming = is_full or (leaves_some and has_watchers)
        self._notice_at = min(self._notice_at, self._poll_at)
        return LeaseNews(claimed, poll.removed, poll.ended, has_looked=True)
