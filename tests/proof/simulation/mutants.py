"""Deliberate bugs: each breaks one promise by a small patch, and the simulation has to find it.

A mutant that survives means that the simulation cannot see that promise broken; the test of it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import trio
from tests.proof.simulation import database
from tests.proof.simulation import mutants_of_owners as owners
from tests.proof.simulation import mutants_of_poison as poison
from tests.proof.simulation import mutants_of_runaways as runaways
from tests.proof.simulation.directed import DIRECTED
from tests.proof.simulation.families import FamilyName, family

from headgate.brokers.filelog_partition import Partition, Verdict
from headgate.store.db import transaction
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


@dataclass(frozen=True)
class Mutant:
    """One bug.

    ``promise`` is what it breaks, and ``found_as`` how the finding begins that says so: a pair that falls over, because
    a patch no longer fits the code, would pass for any. It must be found within ``seeds`` of the random scenarios, or,
    where it is named, by the scenario ``directed``.
    """

    promise: str
    found_as: str
    patches: Callable[[], Sequence[Patch]]
    seeds: int = 0
    directed: str = ""

    def findings_in(self, found: Iterable[str]) -> list[str]:
        """Return those that say that this promise is broken."""
        return [finding for finding in found if finding.startswith(self.found_as)]

    @contextmanager
    def applied(self) -> Generator[None]:
        """Break the pair for a while."""
        patches = self.patches()
        originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
        for owner, name, replacement in patches:
            setattr(owner, name, replacement)
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


# --- the persist gate ------------------------------------------------------------------------------


def _advance_before_confirmation() -> Sequence[Patch]:
    def move_past(self: Ledger, share: Share) -> None:
        if share.state is OPEN:
            share.state = PASSED
            self._resolve(share, ACKED)

    return [(Ledger, "move_past", move_past)]


def _unsubscribe_bypasses_the_gate() -> Sequence[Patch]:
    def leave(self: Ledger, account: Account, *, cut_short: bool) -> None:
        self._online.pop(account, None)
        account.is_online = False
        for share in list(account.shares):
            failed = share.state is QUEUED or (cut_short and share.state is OPEN)
            self._resolve(share, FAILED if failed else ACKED)

    return [(Ledger, "leave", leave)]


def _file_is_not_looked_at() -> Sequence[Patch]:
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


def _confirm_before_commit() -> Sequence[Patch]:
    original = Intake.__init__

    def init(self: Intake, store: Any, **settings: Any) -> None:
        original(self, cast(Any, _WriteBehind(store)), **settings)

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


def _database_error_counts_as_stored() -> Sequence[Patch]:
    original = Intake.__init__

    def init(self: Intake, store: Any, **settings: Any) -> None:
        original(self, cast(Any, _Careless(store)), **settings)

    return [(Intake, "__init__", init)]


def _reject_waits_for_persistence() -> Sequence[Patch]:
    def reject(self: Ledger, share: Share) -> bool:
        if share.state is not OPEN or self._is_closed:
            return False
        share.is_refused = True
        return True

    return [(Ledger, "reject", reject)]


# --- storing ---------------------------------------------------------------------------------------


def _dedup_dropped() -> Sequence[Patch]:
    original = database.reset

    def reset(names: Sequence[str]) -> None:
        original(names)
        database._raw().execute("DROP INDEX uq_trigger_event_key")

    return [(database, "reset", reset)]


def _difference_is_ignored() -> Sequence[Patch]:
    return [(dead_letters, "dead_letter_many", lambda tx, events: None)]


def _fencing_check_removed() -> Sequence[Patch]:
    def lock_lease(connection: Any, epoch: int, clock: Any) -> Any:
        return transaction.read_clock(connection, clock)

    return [(transaction, "lock_lease", lock_lease)]


def _lease_ignored() -> Sequence[Patch]:
    return [(Lease, "is_held", property(lambda self: True))]


def _no_end_has_a_deadline() -> Sequence[Patch]:
    return [(EndDeadlines, "expire", lambda self, now: None)]


def _events_dropped_on_bisect() -> Sequence[Patch]:
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


def _commit_past_a_failed_offset() -> Sequence[Patch]:
    def judge(self: Partition, batch: Sequence[Any]) -> Verdict:
        ours = [item for item in batch if item.broker_payload.generation == self.generation]
        commit_to = ours[-1].broker_payload.end_offset if ours else self.committed
        return Verdict(commit_to, [], None, len(ours))

    return [(Partition, "judge", judge)]


def _lane_order_by_resolution() -> Sequence[Patch]:
    def event_resolved(self: Ledger, event: BroadcastEvent) -> None:
        event.lane.events.remove(event)
        event.lane.events.appendleft(event)
        self._mark_ready(event.lane)

    return [(Ledger, "_event_resolved", event_resolved)]


def _second_aclose() -> Sequence[Patch]:
    original = Group._close_producer

    async def close_twice(self: Group) -> None:
        await original(self)
        await original(self)

    return [(Group, "_close_producer", close_twice)]


# --- subscribers -----------------------------------------------------------------------------------


def _window_closed_too_late() -> Sequence[Patch]:
    async def anext_late(self: Subscription) -> Any:
        await trio.lowlevel.checkpoint()
        await self._wait_for_event()
        was_full = self.is_full
        raw_event, share = self._queue.popleft()
        self._close_window()
        if share is not None:
            self._open_window(share)
        if was_full:
            self._on_room()
        return raw_event

    return [(Subscription, "__anext__", anext_late)]


def _timeout_a_moment_late() -> Sequence[Patch]:
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


def _overflow_leaves_entries_pending() -> Sequence[Patch]:
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


def _eviction_after_an_await() -> Sequence[Patch]:
    end, run = Group._end, Group.run

    def end_without_eviction(self: Group, cause: BaseException | None) -> None:
        evict, self._evict = self._evict, _evict_nothing
        end(self, cause)
        self._evict = evict

    async def run_and_evict(self: Group) -> None:
        await run(self)
        self._evict(self)

    return [(Group, "_end", end_without_eviction), (Group, "run", run_and_evict)]


MUTANTS: dict[str, Mutant] = {
    "advance-before-confirmation": Mutant(
        "I1: acked means confirmed", "advanced before stored", _advance_before_confirmation, 20
    ),
    "confirm-before-commit": Mutant(
        "I1: confirmed means committed", "confirmed before stored", _confirm_before_commit, 20
    ),
    "database-error-counts-as-stored": Mutant(
        "I1: an error is no commit", "confirmed before stored", _database_error_counts_as_stored, 100
    ),
    "file-is-not-looked-at": Mutant(
        "I1: confirmed means in the file that is there",
        "confirmed before stored",
        _file_is_not_looked_at,
        directed="file replaced",
    ),
    "confirmations-kept-across-incarnations": Mutant(
        "I6: a confirmation reaches no later incarnation",
        "confirmed to a stranger",
        runaways.confirmations_kept_across_incarnations,
        directed="late answer",
    ),
    "half-a-round-is-kept": Mutant(
        "I6: half a round is not answered",
        "confirmed to a stranger",
        runaways.half_a_round_is_kept,
        directed="half a round",
    ),
    "dedup-dropped": Mutant("I2: one message, one row", "stored twice", _dedup_dropped, 50),
    "difference-is-ignored": Mutant(
        "I2: what a message gives is never lost without a trace", "difference forgotten", _difference_is_ignored, 50
    ),
    "commit-past-a-failed-offset": Mutant(
        "I3: no commit passes a failure", "commit past a failed message", _commit_past_a_failed_offset, 20
    ),
    "window-closed-too-late": Mutant(
        "streams: asking for the next is moving past", "stuck", _window_closed_too_late, 20
    ),
    "timeout-a-moment-late": Mutant(
        "streams: at the ack timeout", "timed out late", _timeout_a_moment_late, directed="timeout"
    ),
    "overflow-leaves-entries-pending": Mutant(
        "streams: overflow fails all", "stuck", _overflow_leaves_entries_pending, directed="overflow"
    ),
    "eviction-after-an-await": Mutant(
        "I5: no key of a dead poll", "failed without a cause", _eviction_after_an_await, directed="dying stream"
    ),
    "unsubscribe-bypasses-the-gate": Mutant(
        "I1: leaving waits, too", "advanced before stored", _unsubscribe_bypasses_the_gate, 200
    ),
    "fencing-check-removed": Mutant(
        "I10: a lost lease writes nothing", "written without a lease", _fencing_check_removed, 300
    ),
    "lease-ignored": Mutant(
        "I10: a lost lease advances nothing", "advanced without a lease", _lease_ignored, directed="cut off"
    ),
    "no-timeout-after-the-end": Mutant(
        "a filter that hangs hears of the end",
        "the filter was cancelled",
        _no_end_has_a_deadline,
        directed="hung at the end",
    ),
    "reject-waits-for-persistence": Mutant(
        "streams: a reject resolves at once", "rejected at", _reject_waits_for_persistence, directed="reject"
    ),
    "lane-order-by-resolution": Mutant("I3: fan-out order", "out of lane order", _lane_order_by_resolution, 50),
    "second-aclose": Mutant("streams: aclose once", "closed twice", _second_aclose, 50),
    "events-dropped-on-bisect": Mutant(
        "I9: one bad event alone", "confirmed before stored", _events_dropped_on_bisect, 200
    ),
    "cut-short-counts-as-done": Mutant("I13: cut short is not done", "lost", poison.cut_short_counts_as_done, 50),
    "no-rejoin-is-awaited": Mutant("a failure costs no event", "lost", poison.no_rejoin_is_awaited, 100),
    "drained-triggers-are-forgotten": Mutant(
        "a recycled runner costs no trigger", "stuck", owners.drained_triggers_are_forgotten, 400
    ),
    "signing-off-ends-the-triggers": Mutant(
        "a drain costs no trigger", "stuck", owners.signing_off_ends_the_triggers, 50
    ),
}

MUTANTS |= {
    "strike-not-stored": Mutant(
        "a message costs only the trigger that cannot take it",
        "stuck",
        poison.strike_not_stored,
        directed="poison",
    ),
    "strikes-of-repeated-reports": Mutant(
        "a failure is one strike",
        "passed over too early",
        poison.strikes_of_repeated_reports,
        directed="repeated failure",
    ),
    "no-brake": Mutant("a topic is not buried", "no brake", poison.no_brake, directed="brake"),
    "passed-over-without-a-letter": Mutant(
        "a message that is passed over is kept", "lost", poison.passed_over_without_a_letter, directed="letter"
    ),
    "letter-confirmed-before-it-is-stored": Mutant(
        "I1: a letter is stored before its message is forgotten",
        "lost",
        poison.letter_confirmed_before_it_is_stored,
        directed="letter",
    ),
    "passed-over-forgotten-at-respawn": Mutant(
        "a message is passed over for good",
        "forgotten",
        poison.passed_over_forgotten_at_respawn,
        directed="passed over again",
    ),
    "no-absent-subscriber-is-awaited": Mutant(
        "no held trigger is left behind", "lost", poison.no_absent_subscriber_is_awaited, directed="held"
    ),
    "passing-over-resets-nothing": Mutant(
        "a stream goes on without a message",
        "stands still",
        poison.passing_over_resets_nothing,
        directed="after poison",
    ),
    "claims-a-trigger-without-its-stream": Mutant(
        "I19: a trigger of a stream goes to its owner",
        "split stream",
        owners.claims_a_trigger_without_its_stream,
        directed="two supervisors",
    ),
    "owner-not-checked-at-a-description": Mutant(
        "I19: a trigger is started by the owner of its stream",
        "split stream",
        owners.owner_is_not_checked_at_a_description,
        directed="two supervisors",
    ),
    "takes-over-half-a-stream": Mutant(
        "I19: a stream moves as a whole", "taken in part", owners.takes_over_half_a_stream, directed="takeover"
    ),
    "change-is-not-awaited": Mutant("a change costs no event", "lost", owners.change_is_not_awaited, 0, "changed"),
    "change-is-forgotten": Mutant(
        "a change takes effect", "not started again", owners.change_is_read_and_forgotten, directed="changed"
    ),
    "no-quarantine": Mutant(
        "I18: a trigger harms only so often", "ends its runner", runaways.no_quarantine, directed="killer"
    ),
    "held-back-is-not-awaited": Mutant(
        "I18: no trigger held back is left behind",
        "broadcast without a trigger",
        runaways.held_back_is_not_awaited,
        directed="killer",
    ),
    "respawn-slows-down": Mutant(
        "I18: all others start again at once",
        "started late",
        runaways.respawn_slows_down_though_a_culprit_is_named,
        directed="killer",
    ),
    "old-box-is-believed": Mutant(
        "I18: only the record of a current run counts",
        "passed over too early",
        runaways.box_of_an_earlier_incarnation_is_believed,
        directed="old box",
    ),
    "search-waits-for-a-start": Mutant(
        "I18: no trigger held back is left behind", "stuck", runaways.search_waits_for_a_start, directed="search"
    ),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())


def find(mutant: Mutant, name: FamilyName = "pair") -> tuple[int, str] | None:
    """Break the pair and look: after how many seeds it was found, and by what; None where it survives."""
    from tests.proof.simulation import judging

    of = family(name)
    with mutant.applied():
        if mutant.directed:
            found = mutant.findings_in(of.directed[mutant.directed]())
            return (1, found[0]) if found else None
        for seed in range(mutant.seeds):
            found = mutant.findings_in(map(str, judging.judge(of.draw(seed))))
            if found:
                return seed + 1, found[0]
    return None
