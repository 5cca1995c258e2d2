"""Deliberate bugs on the way of an event: the persist gate, storing, the broker, subscribers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import trio
from tests.proof.simulation import database

from headgate.brokers.filelogs.partition import Partition, Verdict
from headgate.store.db import times, transaction
from headgate.store.errors import DATABASE_UNUSABLE, RowsRefused
from headgate.store.ids import Epoch
from headgate.store.triggers import dead_letters
from headgate.store.triggers.events import StoredSlice
from headgate.streams.contract import AckTimeout, SubscriberOverflow
from headgate.streams.end_deadlines import EndDeadlines
from headgate.streams.group import Group
from headgate.streams.lease import Lease
from headgate.streams.ledger import ACKED, FAILED, OPEN, PASSED, QUEUED, Account, BroadcastEvent, Ledger, Share
from headgate.streams.subscription import Subscription
from headgate.supervisor.triggers.intake import Intake, Slice, Tally

Patch = tuple[Any, str, Any]


# --- the persist gate ------------------------------------------------------------------------------


def advance_before_confirmation() -> Sequence[Patch]:
    def move_past(self: Ledger, share: Share) -> None:
        if share.state is OPEN:
            share.state = PASSED
            self._resolve(share, ACKED)

    return [(Ledger, "move_past", move_past)]


def unsubscribe_bypasses_the_gate() -> Sequence[Patch]:
    def leave(self: Ledger, account: Account, *, cut_short: bool) -> None:
        self._online.pop(account, None)
        account.is_online = False
        for share in list(account.shares):
            failed = share.state is QUEUED or (cut_short and share.state is OPEN)
            self._resolve(share, FAILED if failed else ACKED)

    return [(Ledger, "leave", leave)]


def file_is_not_looked_at() -> Sequence[Patch]:
    return [(transaction.Database, "_check_file", lambda self: None)]


class _WriteBehind:
    """Says that a slice is stored, and stores it with the next one."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._behind: list[tuple[int, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def store_slice(self, epoch: int, **parts: Any) -> StoredSlice:
        while self._behind:
            self._store.store_slice(self._behind[0][0], **self._behind[0][1])
            self._behind.pop(0)
        if not parts["events"]:  # nothing would run at all if descriptions of triggers came late
            stored: StoredSlice = self._store.store_slice(epoch, **parts)
            return stored
        self._behind.append((epoch, parts))
        return StoredSlice(0, 0, {})


def confirm_before_commit() -> Sequence[Patch]:
    original = Intake.__init__

    def init(self: Intake, store: Any, *others: Any, **settings: Any) -> None:
        original(self, cast(Any, _WriteBehind(store)), *others, **settings)

    return [(Intake, "__init__", init)]


class _Careless:
    """Takes a database that is away for one that has stored what it was given."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def store_slice(self, epoch: int, **parts: Any) -> StoredSlice:
        try:
            stored: StoredSlice = self._store.store_slice(epoch, **parts)
        except DATABASE_UNUSABLE:
            return StoredSlice(0, 0, {})
        return stored


def database_error_counts_as_stored() -> Sequence[Patch]:
    original = Intake.__init__

    def init(self: Intake, store: Any, *others: Any, **settings: Any) -> None:
        original(self, cast(Any, _Careless(store)), *others, **settings)

    return [(Intake, "__init__", init)]


def reject_waits_for_persistence() -> Sequence[Patch]:
    def reject(self: Ledger, share: Share) -> bool:
        if share.state is not OPEN or self._is_closed:
            return False
        share.is_refused = True
        return True

    return [(Ledger, "reject", reject)]


# --- storing ---------------------------------------------------------------------------------------


def dedup_dropped() -> Sequence[Patch]:
    original = database.reset

    def reset(names: Sequence[str]) -> None:
        original(names)
        database._raw().execute("DROP INDEX uq_trigger_event_key")

    return [(database, "reset", reset)]


def difference_is_ignored() -> Sequence[Patch]:
    return [(dead_letters, "dead_letter_many", lambda tx, events: None)]


def fencing_check_removed() -> Sequence[Patch]:
    def lock_lease(connection: Any, epoch: int, clock: Any) -> Any:
        return times.read_clock(connection, clock)

    return [(transaction, "lock_lease", lock_lease)]


def lease_ignored() -> Sequence[Patch]:
    return [(Lease, "is_held", property(lambda self: True))]


def no_end_has_a_deadline() -> Sequence[Patch]:
    return [(EndDeadlines, "expire", lambda self, now: None)]


def events_dropped_on_bisect() -> Sequence[Patch]:
    original = Intake._split_or_dead_letter

    def split_or_dead_letter(
        self: Intake, epoch: Epoch, slice_: Slice, tally: Tally, error: RowsRefused, now: float
    ) -> bool:
        if len(slice_) == 1:
            return original(self, epoch, slice_, tally, error, now)
        first, second = self._waiting.popleft().cut(len(slice_) // 2)
        tally.persisted.extend([event.seq for event in second.events if event.seq])
        self._waiting.appendleft(msgspec.structs.replace(first, ends_round=slice_.ends_round))
        return False

    return [(Intake, "_split_or_dead_letter", split_or_dead_letter)]


# --- the broker ------------------------------------------------------------------------------------


def commit_past_a_failed_offset() -> Sequence[Patch]:
    def judge(self: Partition, batch: Sequence[Any]) -> Verdict:
        ours = [item for item in batch if item.broker_payload.generation == self.generation]
        commit_to = ours[-1].broker_payload.end_offset if ours else self.committed
        return Verdict(commit_to, [], None, len(ours))

    return [(Partition, "judge", judge)]


def lane_order_by_resolution() -> Sequence[Patch]:
    def event_resolved(self: Ledger, event: BroadcastEvent) -> None:
        event.lane.events.remove(event)
        event.lane.events.appendleft(event)
        self._mark_ready(event.lane)

    return [(Ledger, "_event_resolved", event_resolved)]


def second_aclose() -> Sequence[Patch]:
    original = Group._close_producer

    async def close_twice(self: Group) -> None:
        await original(self)
        await original(self)

    return [(Group, "_close_producer", close_twice)]


# --- subscribers -----------------------------------------------------------------------------------


def window_closed_too_late() -> Sequence[Patch]:
    original = Subscription.__anext__

    async def anext_late(self: Subscription) -> Any:
        await trio.lowlevel.checkpoint()
        await self._wait_for_event()
        return await original(self)

    return [(Subscription, "__anext__", anext_late)]


def timeout_a_moment_late() -> Sequence[Patch]:
    def expire(self: Group, now: float) -> float | None:
        if self._ledger is None:
            return None
        deadlines = [self._ledger.expire_departed(now)]
        for subscription in list(self._online.values()):
            assert subscription.account is not None
            deadline = subscription.account.earliest_deadline()
            if deadline is not None and deadline < now:
                self._fail(subscription, AckTimeout(self.key, self._settings.ack_timeout_s))
            else:
                deadlines.append(deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    return [(Group, "expire", expire)]


def overflow_leaves_entries_pending() -> Sequence[Patch]:
    original = Ledger.fail
    fail_of_group = Group._fail
    overflows: list[bool] = [False]

    def fail(self: Ledger, account: Account) -> None:
        if not overflows[0]:
            original(self, account)

    def fail_subscriber(self: Group, subscription: Any, failure: Exception) -> None:
        overflows[0] = isinstance(failure, SubscriberOverflow)
        try:
            fail_of_group(self, subscription, failure)
        finally:
            overflows[0] = False

    return [(Ledger, "fail", fail), (Group, "_fail", fail_subscriber)]


def _evict_nothing(group: Group) -> None:
    pass


def eviction_after_an_await() -> Sequence[Patch]:
    end, run = Group._end, Group.run

    def end_without_eviction(self: Group, cause: BaseException | None) -> None:
        evict, self._evict = self._evict, _evict_nothing
        end(self, cause)
        self._evict = evict

    async def run_and_evict(self: Group) -> None:
        await run(self)
        self._evict(self)

    return [(Group, "_end", end_without_eviction), (Group, "run", run_and_evict)]
