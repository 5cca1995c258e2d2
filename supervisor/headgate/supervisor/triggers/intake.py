"""Storing the runner's rounds: the module that decides whether an event may be acknowledged.

A round of the runner arrives as one or more `StateChanges` frames. Each is queued as a `Slice`, and each slice is
stored in one transaction. A long slice is split first, so that the supervisor's other duties run between two
transactions; `SliceSize` learns the right size from the times that the database takes. The round is answered only when
its last slice is committed, and the answer names the seqs that are now durable (I1): only `Intake.step` adds to them.

If the database refuses rows, the slice is halved until the single bad event is found. An event that is refused twice by
itself becomes a dead letter, and all the others are stored (I9). If the database is away, the slice is tried again
after a wait; until then nothing is confirmed and nothing is dropped. If it took long to fail, the slice is made
smaller.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog

from headgate.protocol import marks
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.messages.runner import (
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    RedeliveryEnd,
    Refusal,
    RefusedEvent,
    StateChanges,
    StateSync,
)
from headgate.protocol.messages.signals import SIGNAL_BYTES_MAX
from headgate.store.errors import DATABASE_UNUSABLE, ItemFailed, RowsRefused
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.triggers.claimed import ClaimedTrigger
from headgate.store.triggers.events import StoredSlice
from headgate.store.triggers.redeliveries import Difference
from headgate.store.triggers.watchers import Replaced
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.slice_size import SliceSize

log = structlog.get_logger(__name__)

# A runner waits for the answer to its round before it sends the next one: one that has sent so many is broken. What
# earlier incarnations have left waits beside them, and is no more than the last one with triggers has left: the next
# gets its triggers only when that is stored.
ROUNDS_WAITING_MAX = 16
UNREADABLE_PER_SLICE_MAX = 100  # triggers that cannot be started, whose failures are stored in one transaction

DIFFERING_LOGGED_MAX = 10  # events of one slice that are named in the log if they differ from the stored ones


class Slice(msgspec.Struct, frozen=True):
    """A part of a round that is stored in one transaction: a frame of it, or a part of one that was too long."""

    incarnation: int
    round: int
    events: tuple[FiredEvent, ...] = ()
    refused: tuple[RefusedEvent, ...] = ()
    finished: tuple[FinishedTrigger, ...] = ()
    described: tuple[DescribedTrigger, ...] = ()
    redriven: tuple[RedeliveryEnd, ...] = ()
    ends_round: bool = False

    def __len__(self) -> int:
        return self.rows + len(self.described)

    @property
    def rows(self) -> int:
        """The number of elements that each take about the same time to store. Most descriptions take none."""
        return len(self.events) + len(self.refused) + len(self.finished) + len(self.redriven)

    def cut(self, items: int) -> tuple[Slice, Slice]:
        """Split in two, the first with ``items`` items, by kind, in the order of the fields."""
        after_events = max(0, items - len(self.events))
        after_refused = max(0, after_events - len(self.refused))
        after_finished = max(0, after_refused - len(self.finished))
        after_described = max(0, after_finished - len(self.described))
        first = Slice(
            self.incarnation,
            self.round,
            self.events[:items],
            self.refused[:after_events],
            self.finished[:after_refused],
            self.described[:after_finished],
            self.redriven[:after_described],
            ends_round=False,
        )
        rest = Slice(
            self.incarnation,
            self.round,
            self.events[items:],
            self.refused[after_events:],
            self.finished[after_refused:],
            self.described[after_finished:],
            self.redriven[after_described:],
            self.ends_round,
        )
        return first, rest


class Stored(msgspec.Struct, frozen=True):
    """Result of one step of the intake.

    ``answer`` is set if a round is complete: it may be sent only to the runner of that ``incarnation`` (I6).
    ``finished`` are trigger runs whose end is now recorded, ``described`` triggers whose streams are, ``redriven``
    messages whose ends are. ``result`` is the result of the store; it is empty if the slice was, or if its only element
    was refused.
    """

    incarnation: int
    answer: StateSync | None
    finished: tuple[FinishedTrigger, ...]
    result: StoredSlice
    described: tuple[DescribedTrigger, ...] = ()
    redriven: tuple[RedeliveryEnd, ...] = ()

    def strikes_of(self, finished: FinishedTrigger) -> int | None:
        """Return how often a trigger has failed by now on the message that its run has failed on; None if on none."""
        struck = self.result.struck.get((finished.trigger_id, finished.message_key or ""))
        return None if struck is None else struck.strikes


NOTHING_STORED = StoredSlice(stored=0, redelivered=0, failure_counts={})


class Tally(NamedTuple):
    """The answer to a round, for the slices that are stored so far."""

    persisted: list[int]
    refused: list[Refusal]


class Intake:
    """The queue of slices that wait for the database. One `step` is one transaction; ``clock`` measures its seconds."""

    def __init__(
        self,
        store: Store,
        figures: Figures | None = None,
        *,
        slice_events_max: int,
        retry: DatabaseRetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._figures = Figures() if figures is None else figures
        self._slice_size = SliceSize(slice_events_max)
        self._clock = clock
        self._retry = retry
        self._waiting: deque[Slice] = deque()
        # The first slice that waits, if it is a single element and was refused by itself: see `_split_or_dead_letter`.
        self._refused_alone: Slice | None = None
        # The answers to the rounds being stored, by incarnation and round. A round whose runner died before its last
        # frame is never answered, and none of its seqs may get into another answer (I6).
        self._tallies: dict[tuple[int, int], Tally] = {}
        self._told_replaced: set[str] = set()  # watchers
        # Runs for streams of tasks of which the database has refused an event: nothing behind it is stored (I20).
        self._cut_runs: set[tuple[int, str]] = set()

    def add_unreadable(self, triggers: Sequence[ClaimedTrigger]) -> None:
        """Record the failures of triggers whose kwargs cannot be read; all others run (I9)."""
        failures = []
        for one in triggers:
            log.error("a trigger cannot be started", trigger_id=one.id, trigger_name=one.name, error=one.error)
            error = one.error or "its kwargs cannot be read"
            failures.append(FinishedTrigger(one.id, "", "failed", 0, error=error))
        for first in range(0, len(failures), UNREADABLE_PER_SLICE_MAX):
            some = failures[first : first + UNREADABLE_PER_SLICE_MAX]
            self.add_frame(0, StateChanges(round=0, finished=tuple(some)))

    def add_frame(self, incarnation: int, changes: StateChanges) -> None:
        """Queue one frame of a round. Raises `RemoteProtocolError` if the runner does not wait for answers."""
        marks.reach("intake.round_read")
        if incarnation:  # the core itself, as 0, reports each trigger once
            rounds = {slice_.round for slice_ in self._waiting if slice_.incarnation == incarnation}
            if not rounds:
                self._drop_empty_of_dead()
            if len(rounds) >= ROUNDS_WAITING_MAX:
                raise RemoteProtocolError(f"the runner sent more than {ROUNDS_WAITING_MAX} rounds without an answer")
        self._waiting.append(
            Slice(
                incarnation,
                changes.round,
                changes.events,
                changes.refused,
                changes.finished,
                changes.described,
                changes.redriven,
                ends_round=not changes.more,
            )
        )

    def _drop_empty_of_dead(self) -> None:
        """Drop heartbeats, all of earlier incarnations: there is nothing to store, and nobody to answer."""
        self._waiting = deque([slice_ for slice_ in self._waiting if len(slice_)])

    def is_waiting_for(self, incarnation: int) -> bool:
        """Whether a round of this incarnation is unanswered: its runner cannot be blamed for silence."""
        return any(slice_.incarnation == incarnation for slice_ in self._waiting)

    def is_waiting_for_others(self, incarnation: int) -> bool:
        """Whether a round of another incarnation is not stored yet."""
        return any(slice_.incarnation != incarnation for slice_ in self._waiting)

    @property
    def waiting_events(self) -> int:
        """The number of events that are not stored yet."""
        return sum(len(slice_.events) for slice_ in self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether everything that was received is stored."""
        return not self._waiting

    def discard(self, incarnation: int) -> list[int]:
        """Drop all slices: the lease is lost, and nothing more may be written.

        Return the complete rounds of an incarnation: they must be answered, but confirm nothing.
        """
        rounds = [slice_.round for slice_ in self._waiting if slice_.incarnation == incarnation and slice_.ends_round]
        self._waiting.clear()
        self._refused_alone = None
        self._tallies.clear()
        self._cut_runs.clear()
        return rounds

    def wake_at(self) -> float | None:
        """Return the time at which the next `step` is due; None while nothing waits."""
        return self._retry.at if self._waiting else None

    def step(
        self, epoch: Epoch, now: float, end_of: Callable[[FinishedTrigger], FinishedTrigger] = lambda finished: finished
    ) -> Stored | None:
        """Store the next slice; return the result, or None if there was nothing to do or no database.

        ``end_of`` says as what the end of a run is to be stored, at this moment. Raises `LeaseLost` if another
        supervisor has taken over; then nothing was written.
        """
        if not self._waiting or not self._retry.ready(now):
            return None
        slice_ = self._without_cut(self._take_slice())
        tally = self._tally_of(slice_)
        finished = tuple(map(end_of, slice_.finished))
        result = NOTHING_STORED
        begun_at = self._clock()
        try:
            if len(slice_):
                result = self._store.store_slice(
                    epoch,
                    events=slice_.events,
                    refused=slice_.refused,
                    finished=finished,
                    described=slice_.described,
                    redriven=slice_.redriven,
                )
                self._note(slice_, result, self._clock() - begun_at)
            # From here on the slice is committed and durable: because of this line its events may be acknowledged.
            tally.persisted.extend([event.seq for event in slice_.events if event.seq])
            # A whole letter is handled; of any other the broker still has the message, and must not forget it.
            tally.refused.extend(
                Refusal(event.seq, event.trigger_id, event.reason, payload_kept=event.is_whole)
                for event in slice_.refused
            )
        except (RowsRefused, ItemFailed) as exc:
            if not self._split_or_dead_letter(epoch, slice_, tally, exc, now):
                return None
        except DATABASE_UNUSABLE as exc:
            self._slice_size.failed(len(slice_), self._clock() - begun_at)
            self._retry.failed(exc, now)
            return None
        self._retry.succeeded(now)
        self._waiting.popleft()
        self._refused_alone = None
        return Stored(
            slice_.incarnation,
            self._answer(slice_, tally),
            finished,
            result,
            slice_.described,
            slice_.redriven,
        )

    def _note(self, slice_: Slice, result: StoredSlice, took_s: float) -> None:
        self._slice_size.stored(slice_.rows, took_s)
        _log_differing(result.differing)
        self._log_replaced(result.replaced)
        if slice_.events:
            self._figures.observe(catalogue.SLICE_SECONDS, took_s)
            self._figures.observe(catalogue.SLICE_EVENTS, len(slice_.events))
        self._figures.add(catalogue.EVENTS_STORED, by=result.stored)
        self._figures.add(catalogue.EVENTS_REDELIVERED, by=result.redelivered)
        self._figures.add(catalogue.EVENTS_REFUSED, "runner", by=len(slice_.refused))
        self._figures.add(catalogue.EVENTS_REFUSED, "difference", by=len(result.differing))
        self._figures.add(catalogue.MESSAGES_PASSED_OVER, by=len(result.passed_over))
        for finished in slice_.finished:
            self._figures.add(catalogue.TRIGGER_RUNS, finished.outcome)

    def _log_replaced(self, replaced: Sequence[Replaced]) -> None:
        """Log, once for each watcher, that an event is no signal as it is: no rule with a predicate is met by it."""
        for event in replaced:
            if event.watcher not in self._told_replaced:
                self._told_replaced.add(event.watcher)
                log.warning(
                    "the payload of an event does not fit into a signal, which has the id of the event in place of it",
                    watcher=event.watcher,
                    event_id=event.event_id,
                    bytes=event.bytes,
                    bytes_max=SIGNAL_BYTES_MAX,
                )

    def _take_slice(self) -> Slice:
        """Return the first slice, split if it is longer than the current size."""
        if len(self._waiting[0]) > self._slice_size.items:
            self._cut_first(self._slice_size.items)
        return self._waiting[0]

    def _without_cut(self, slice_: Slice) -> Slice:
        """Leave out the events behind one that was refused, if they belong to no message that waits for an answer."""
        if not self._cut_runs:
            return slice_
        kept = [event for event in slice_.events if event.seq or _run_of(event) not in self._cut_runs]
        self._cut_runs.difference_update(map(_run_of, slice_.finished))
        if len(kept) < len(slice_.events):
            self._waiting[0] = msgspec.structs.replace(slice_, events=tuple(kept))
        return self._waiting[0]

    def _cut_first(self, items: int) -> None:
        first, rest = self._waiting.popleft().cut(items)
        self._waiting.extendleft((rest, first))

    def _tally_of(self, slice_: Slice) -> Tally:
        if slice_.incarnation:
            dead = [key for key in self._tallies if 0 < key[0] < slice_.incarnation]
            for key in dead:
                del self._tallies[key]
        return self._tallies.setdefault((slice_.incarnation, slice_.round), Tally([], []))

    def _answer(self, slice_: Slice, tally: Tally) -> StateSync | None:
        if not slice_.ends_round:
            return None
        del self._tallies[slice_.incarnation, slice_.round]
        return StateSync(round=slice_.round, persisted=tuple(tally.persisted), refused=tuple(tally.refused))

    def _split_or_dead_letter(
        self, epoch: Epoch, slice_: Slice, tally: Tally, error: RowsRefused | ItemFailed, now: float
    ) -> bool:
        """Halve a refused slice, or dead-letter its single element. Return whether the element has been handled.

        A refusal may be temporary: if a row that the new ones refer to is deleted while they are being stored, the
        check of the foreign key waits for the deletion, then fails. The next transaction does not refer to that row any
        more. Therefore an element is dead-lettered only if it is refused by itself in two transactions (I11).
        """
        if len(slice_) > 1:
            self._cut_first(len(slice_) // 2)
            return False
        if slice_ is not self._refused_alone:
            self._refused_alone = slice_
            if isinstance(error, ItemFailed):  # a fault of ours: a dead letter has one line of it
                told = {"error": error.reason, "exc_info": error.__cause__}
                log.error("the task that waits for an event cannot take it", **told)
            return False
        if not slice_.events:
            # Not an event, but the report of a refused event or of an end: it is logged instead.
            log.error("the database refuses a report of the runner", report=_shown(slice_), error=str(error))
            tally.refused.extend(
                Refusal(item.seq, item.trigger_id, str(error), payload_kept=False) for item in slice_.refused
            )
            return True
        event = slice_.events[0]
        try:
            is_kept = self._store.dead_letter_event(epoch, event, str(error))
        except DATABASE_UNUSABLE as exc:
            self._retry.failed(exc, now)
            return False
        self._figures.add(catalogue.EVENTS_REFUSED, "database")
        if not is_kept:
            self._cut_runs.add(_run_of(event))
        log.error(
            "an event cannot be stored and is kept as a dead letter" if is_kept else "an event cannot be stored",
            trigger_id=event.trigger_id,
            trigger_run_id=event.trigger_run_id,
            sequence_index=event.sequence_index,
            error=str(error),
        )
        # The dead letter holds the whole event, so for the broker it is handled like a stored one.
        tally.refused.append(Refusal(event.seq, event.trigger_id, str(error), payload_kept=True))
        return True


def _run_of(item: FiredEvent | FinishedTrigger) -> tuple[int, str]:
    return item.trigger_id, item.trigger_run_id


def _shown(slice_: Slice) -> str:
    """Return a slice of one report for the log; a letter may hold megabytes, of which the log gets none."""
    refused = tuple(msgspec.structs.replace(item, payload_head=b"") for item in slice_.refused)
    return repr(msgspec.structs.replace(slice_, refused=refused))[:2000]


def _log_differing(differing: Sequence[Difference]) -> None:
    for difference in differing[:DIFFERING_LOGGED_MAX]:
        event = difference.event
        log.error(
            "an event differs from the one stored for its message before, and is a dead letter",
            trigger_id=event.trigger_id,
            key=event.key,
            position=event.position,
            stored_event=difference.stored_id,
        )
    if (more := len(differing) - DIFFERING_LOGGED_MAX) > 0:
        log.error("more events differ from those stored for their messages before", events=more)
