"""The right to run triggers: an epoch in the database, kept by heartbeats, checked by every write (I10).

A supervisor registers and gets an epoch. It owns its triggers as long as its heartbeats arrive. When another one has
seen none for too long (`Silences`), or knows that its process has ended on this machine, it *fences* the epoch: from
then on no transaction of it can commit, and its triggers may be claimed.

`Leases.step` runs at most one of its duties at a time, each a single short transaction, the most urgent first: the
heartbeat, then fencing of dead neighbours, then a poll for triggers to claim or cancel. The poll is made when other
processes have written to the database, which `Leases.listen` finds out (`headgate.store.db.changes`), and rarely
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import msgspec
import structlog

from headgate.protocol import marks
from headgate.store.errors import DATABASE_UNUSABLE, LeaseLost
from headgate.store.ids import Epoch, Hold
from headgate.store.store import Store
from headgate.store.triggers.changes import CHANGES_AT_ONCE_MAX
from headgate.store.triggers.leases import ClaimedTrigger, TriggererRow
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.published import Published

log = structlog.get_logger(__name__)

# For so many seconds a supervisor takes no more than its share of the triggers that all could claim. After that it
# takes the rest, because the others are full or slow.
FAIR_WAIT_S = 1.0
# The part of the time until others may fence an epoch during which its runner may begin to advance brokers. The rest is
# for an advance that has begun, which takes as long as its broker does.
ADVANCE_SHARE = 0.8
# After others have written, their bell is not listened to for a moment: for so many seconds, and twice as long after
# each time that it has rung meanwhile, up to `LeaseTimes.listen_pause_max_s`. So a single write is noticed at once, and
# thousands in a second cost no more than a few polls.
LISTEN_PAUSE_S = 0.005
CLAIM_TRIGGERS_MAX = 1000  # claimed in one transaction: bounds its locks and the first message to the runner


class Identity(msgspec.Struct, frozen=True):
    """Identity of this supervisor. A pid names the same process only on the same ``machine``."""

    hostname: str
    pid: int
    machine: str
    process_started: float


class LeaseTimes(msgspec.Struct, frozen=True):
    """Intervals in seconds.

    ``poll_interval_s``: between two polls if no others seem to have written to the database. ``listen_pause_max_s``:
    between two polls if they write all the time, at least. ``look_interval_s``: between two looks whether they have
    written, where no bell says so; shorter for a while after they have. ``cut_off_max_s``: how long the lease may go
    without being renewed until the supervisor gives up; None if it never does.
    """

    heartbeat_s: float
    silence_max_s: float
    poll_interval_s: float
    listen_pause_max_s: float = 0.05
    look_interval_s: float = 0.5
    cut_off_max_s: float | None = None


class LeaseStep(msgspec.Struct, frozen=True):
    """Result of one step: triggers that are owned now (some may be known already), and those that a user removed.

    ``ended``: owned ones that nothing waits for any more (`headgate.store.triggers.leases.Poll`). ``has_fenced``:
    others lost their leases. ``has_looked``: others seem to have written to the database, or could have for a while.
    ``held`` are all owned triggers with a hold, except those in ``claimed``; None if that was not looked at.
    ``changed``: owned triggers that a user has changed or restarted, as they are now. ``redriving``: owned ones that
    are to get a message again. ``describe``: digests of owned streams whose brokers are to be asked.
    """

    claimed: list[ClaimedTrigger]
    removed: list[int]
    ended: list[int] = []
    has_fenced: bool = False
    has_looked: bool = False
    held: dict[int, Hold] | None = None
    changed: list[ClaimedTrigger] = []
    redriving: list[int] = []
    describe: list[str] = []


NOTHING_FOUND = LeaseStep([], [])


class Silences:
    """For how long others have been silent, as it was seen from here.

    One is silent for as long as each look has found the same heartbeat. How old that is by the database's clock means
    nothing: after an outage of the database all are old, for one that was started meanwhile as well, and a clock can
    be set. So who was not watched is not judged. Between two looks that are far apart the database was away, or this
    process stood still, and maybe the others: all get the whole time again.
    """

    def __init__(self, times: LeaseTimes) -> None:
        self._silence_max_s = times.silence_max_s
        self._apart_max_s = times.heartbeat_s + times.silence_max_s / 2
        self._looked_at = -math.inf
        self._seen: dict[Epoch, tuple[datetime, float]] = {}  # with the time since when it has been the same
        self._new: dict[Epoch, datetime] = {}  # heartbeats that the last look has found

    def answered(self, now: float) -> None:
        """Note that the last look was over by now. A heartbeat that it found may have been written while it ran."""
        self._seen.update({epoch: (heartbeat, now) for epoch, heartbeat in self._new.items()})
        self._new = {}

    def look(self, found: Mapping[Epoch, datetime], now: float) -> dict[Epoch, datetime]:
        """Compare the latest heartbeats of all others; return those of who has been silent for too long."""
        before = self._seen if now - self._looked_at <= self._apart_max_s else {}
        self._looked_at = now
        self._seen = {epoch: seen for epoch, seen in before.items() if found.get(epoch) == seen[0]}
        self._new = {epoch: heartbeat for epoch, heartbeat in found.items() if epoch not in self._seen}
        return {epoch: beat for epoch, (beat, since) in self._seen.items() if now - since >= self._silence_max_s}


class Leases:
    """One supervisor's epoch: its heartbeats, the fencing of others, and claims of triggers."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        capacity: int,
        queues: Sequence[str],
        workers: int = 0,
        endless_workers: int = 0,
        times: LeaseTimes,
        is_gone: Callable[[TriggererRow], bool],
        retry: DatabaseRetry,
    ) -> None:
        self._store = store
        self._identity = identity
        self.capacity = capacity
        self._queues = tuple(queues)
        self.workers = workers
        self._endless_workers = endless_workers
        self._times = times
        self._is_gone = is_gone
        self._retry = retry
        self._epoch: Epoch | None = None
        self._renewed_at = -math.inf  # when the last renewal of the lease began
        self._heartbeat_at = self._fence_at = self._poll_at = 0.0
        self._release_at = math.inf  # when the triggers are to be released
        self._polled_at = -math.inf
        self._listen_at: float | None = 0.0  # None: when the bell rings
        self._pause_s = 0.0  # the last one between two times of listening
        self._no_bell: str | None = None  # what was logged of it
        self._is_claiming = False
        self._wants_room = False  # something could be claimed, and there was no room for it
        self._claim_in_doubt = False
        # Changed triggers that are to be read. They are kept until that has succeeded: if it is unknown whether its
        # commit arrived, no poll may find them again.
        self._changed: set[int] = set()
        self._silences = Silences(times)
        self._neighbours = 0  # other supervisors that serve one of our queues
        self._claimable_since: float | None = None  # since when there have been triggers to claim

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
        """Whether the next poll may find more triggers that are to start together with the claimed ones."""
        return self._is_claiming

    def lasts_s(self, now: float) -> float:
        """Return for how many seconds brokers may be advanced: no other can fence this epoch for longer than that.

        The time counts from the beginning of the last renewal, which is earlier than the time in the database. Others
        fence by their own `silence_max_s`, so it must be the same for all supervisors.
        """
        return max(0.0, self._renewed_at + ADVANCE_SHARE * self._times.silence_max_s - now)

    def is_cut_off(self, now: float) -> bool:
        """Whether the lease, once held, could not be renewed for longer than a supervisor waits for its database."""
        limit_s = self._times.cut_off_max_s
        return limit_s is not None and self.is_held and now >= self._renewed_at + limit_s

    def wake_at(self) -> float:
        """When the next duty is due, or `listen` is to be called although no bell has rung."""
        listen_at = math.inf if self._listen_at is None or self._epoch is None else self._listen_at
        return min(self._heartbeat_at, self._fence_at, self._poll_at, self._release_at, listen_at)

    @property
    def is_listening(self) -> bool:
        """Whether to be woken when the bell rings: not for a moment after it has."""
        return self._listen_at is None

    def poll_soon(self) -> None:
        """Poll in the next step: own tasks have created triggers or ended some."""
        self._poll_at = 0.0

    def listen(self, now: float, *, owned: int) -> None:
        """Have a poll made if others have written. To be called at the end of each step of the supervisor.

        That is necessary although a bell wakes it, because PostgreSQL may say so in the answers of other statements. It
        is asked before the poll, so that writes after the poll are noticed the next time. A poll is made as well if
        there is room for triggers again that were left to others.
        """
        if self._wants_room and owned < self.capacity:
            self._poll_at = min(self._poll_at, self._polled_at + self._times.listen_pause_max_s)
        if self._epoch is None or (self._listen_at is not None and now < self._listen_at):
            return
        try:
            has_changes = self._store.has_changes()
        except DATABASE_UNUSABLE as exc:
            self._failed(exc, now)
            return
        times, no_bell = self._times, self._store.no_bell()
        if no_bell != self._no_bell and no_bell is not None:
            log.info("writes of other processes are looked for, because no bell can ring", reason=no_bell)
        self._no_bell = no_bell
        if has_changes:
            self._poll_at = min(self._poll_at, now)
        # One write is often followed by more: a script, a deployment, another supervisor that leaves.
        pause_max_s = times.listen_pause_max_s
        if no_bell is None:
            self._pause_s = min(pause_max_s, max(LISTEN_PAUSE_S, 2 * self._pause_s)) if has_changes else 0.0
        else:
            self._pause_s = pause_max_s if has_changes else min(times.look_interval_s, 1.5 * self._pause_s)
        self._listen_at = None if no_bell is None and not has_changes else now + self._pause_s

    def step(self, now: float, *, owned: int, claiming: bool, published: Published | None = None) -> LeaseStep:
        """Run the most urgent duty that is due, if any. ``owned`` counts against the capacity.

        ``published``: what the supervisor says of itself goes with its heartbeats.
        Raises `LeaseLost` if another supervisor has fenced this epoch.
        """
        self._silences.answered(now)
        if now < min(self._heartbeat_at, self._fence_at, self._poll_at, self._release_at):
            return NOTHING_FOUND
        try:
            result = self._duty(now, owned, claiming, published)
        except DATABASE_UNUSABLE as exc:
            self._failed(exc, now)
            return NOTHING_FOUND
        self._retry.succeeded(now)
        return result

    def release_triggers(self) -> None:
        """Let others claim the triggers in the next step: none of them runs here any more."""
        self._release_at = 0.0

    def sign_off(self, *, asks: bool = True) -> None:
        """Give the lease up, so that others need not wait until it runs out; the database is asked once.

        Not at all unless ``asks``: it has just been found away, and would be waited for again.
        """
        if not asks:
            log.warning("does not sign off at a database that is away; others take over when the lease runs out")
            return
        try:
            self._store.release_triggerer(self.epoch)
        except (*DATABASE_UNUSABLE, LeaseLost) as exc:
            log.warning("could not sign off; others take over when the lease runs out", error=str(exc))

    def _failed(self, error: Exception, now: float) -> None:
        # The heartbeat is due again no later than without a failure: when the database is back, others wait for it.
        retry_at = min(self._retry.failed(error, now), now + self._times.heartbeat_s)
        if self._release_at < math.inf:
            self._release_at = retry_at
        self._heartbeat_at = self._fence_at = self._poll_at = self._listen_at = retry_at

    def _duty(self, now: float, owned: int, claiming: bool, published: Published | None) -> LeaseStep:
        if self._epoch is None:
            self._register(now)
        elif now >= self._heartbeat_at:
            status = None if published is None else published.changed()
            self._store.heartbeat(self._epoch, status)
            if published is not None:
                published.stored(status)
            self._renewed(now)
        elif now >= self._release_at:
            self._store.release_owned(self._epoch)
            self._release_at = math.inf
        elif now >= self._fence_at:
            has_fenced = self._fence_neighbours(self._epoch, now)
            self._fence_at = now + self._times.heartbeat_s
            return LeaseStep([], [], has_fenced=has_fenced)
        elif now >= self._poll_at:
            return self._poll(self._epoch, now, owned, claiming)
        return NOTHING_FOUND

    def _register(self, now: float) -> None:
        who = self._identity
        self._epoch = self._store.register_triggerer(
            hostname=who.hostname,
            pid=who.pid,
            machine=who.machine,
            process_started=who.process_started,
            capacity=self.capacity,
            queues=self._queues,
            workers=self.workers,
            endless_workers=self._endless_workers,
        )
        marks.reach("leases.registered")
        self._renewed(now)
        log.info("registered", epoch=self._epoch, capacity=self.capacity, queues=self._queues)

    def _renewed(self, now: float) -> None:
        self._renewed_at = now
        self._heartbeat_at = now + self._times.heartbeat_s

    def _fence_neighbours(self, epoch: Epoch, now: float) -> bool:
        """Fence neighbours that are silent, and those whose process is known to have ended on this machine."""
        others = [row for row in self._store.live_triggerers() if row.id != epoch]
        gone = [row.id for row in others if self._is_gone(row)]
        silent = self._silences.look({row.id: row.latest_heartbeat for row in others}, now)
        dead = {*gone, *silent}
        self._neighbours = sum(row.id not in dead and not set(self._queues).isdisjoint(row.queues) for row in others)
        fenced = self._store.fence_triggerers(epoch, silent=silent, dead=gone) if dead else []
        if fenced:
            self._poll_at = 0.0  # their triggers can be claimed now
            log.warning("took over from supervisors that are gone", epochs=fenced)
        return bool(fenced)

    def _share(self, now: float, room: int) -> tuple[int, bool]:
        """Return how many triggers to claim, and whether that leaves some to others although there is room for them.

        There is room for ``room``. While others may want some, it is a share.
        """
        if self._claimable_since is None:
            self._claimable_since = now
        if self._neighbours == 0 or now - self._claimable_since >= FAIR_WAIT_S:
            return room, False
        assert self._epoch is not None
        claimable = self._store.count_claimable(self._epoch, self._queues)
        share = max(1, math.ceil(claimable / (self._neighbours + 1)))
        return min(room, share), share < min(room, claimable)

    def _poll(self, epoch: Epoch, now: float, owned: int, claiming: bool) -> LeaseStep:
        if self._claim_in_doubt:
            # The last claim raised, so it may have been committed or not. If it was, this epoch owns its triggers, and
            # without this query would never run them.
            owned_triggers = self._store.claimed_triggers(epoch)
            self._claim_in_doubt = False
            self._is_claiming = True  # there may be more
            self._poll_at = now  # this was no poll for removals
            return LeaseStep(owned_triggers, [], has_looked=True)
        self._polled_at = now
        poll = self._store.poll(epoch, self._queues)
        changed = self._take_changes(epoch, poll.changed)
        room = min(self.capacity - owned, CLAIM_TRIGGERS_MAX)
        leaves_some = False
        claimed: list[ClaimedTrigger] = []
        if poll.claimable and claiming and room > 0:
            share, leaves_some = self._share(now, room)
            self._claim_in_doubt = True
            claimed = self._store.claim_triggers(
                epoch, limit=share, room=self.capacity - owned, is_idle=owned == 0, queues=self._queues
            )
            self._claim_in_doubt = False
            if owned + len(claimed) > self.capacity:
                log.warning(
                    "a stream has more triggers than the capacity; it is run nevertheless, because nothing else is",
                    triggers=len(claimed),
                    capacity=self.capacity,
                )
            marks.reach("leases.claim_written")
        if not poll.claimable:
            self._claimable_since = None
        self._wants_room = poll.claimable and len(claimed) >= room
        # After a full claim there may be more: poll again at once, after the other duties.
        is_full = len(claimed) >= CLAIM_TRIGGERS_MAX
        self._poll_at = now if is_full or self._changed else now + self._times.poll_interval_s
        if leaves_some:
            self._poll_at = min(self._poll_at, now + FAIR_WAIT_S)  # for triggers that the others leave
        # Triggers that others leave may share a stream with ours, so ours wait for them. The trigger of a task need not
        # wait: it has its own stream, or misses nothing.
        has_watchers = self._is_claiming or any(trigger.task is None for trigger in claimed)
        self._is_claiming = is_full or (leaves_some and has_watchers)
        return LeaseStep(
            claimed,
            poll.removed,
            poll.ended,
            has_looked=True,
            held=poll.held,
            changed=changed,
            redriving=poll.redriving,
            describe=poll.describe,
        )

    def _take_changes(self, epoch: Epoch, found: Sequence[int]) -> list[ClaimedTrigger]:
        """Read triggers that a user has changed; more than `CHANGES_AT_ONCE_MAX` are read by the next polls."""
        self._changed.update(found)
        if not self._changed:
            return []
        some = sorted(self._changed)[:CHANGES_AT_ONCE_MAX]
        changed = self._store.take_changes(epoch, some)
        self._changed.difference_update(some)
        return changed
