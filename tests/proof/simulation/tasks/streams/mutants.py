"""Deliberate bugs of the streams of tasks: each breaks one promise, and the simulation has to find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import bindparam, literal_column, select, true, update
from tests.proof.simulation.mutants import Mutant, Patch
from tests.proof.simulation.tasks.streams.directed import DIRECTED

from headgate.protocol.messages.task_streams import Handled, StreamEvent, StreamPart
from headgate.runner.trigger_run import TriggerRun
from headgate.scheduling.task_streams import decide
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.ids import TaskInstanceId, TriggerId
from headgate.store.streams import rows
from headgate.store.tables import task_instance, task_stream
from headgate.store.tasks import outcomes, poison, stream_steps, task_rows, task_streams
from headgate.store.tasks.deferral import DeferralVerbs
from headgate.store.tasks.outcomes import StepEnd
from headgate.store.tasks.task_rows import LockedTask
from headgate.store.tasks.task_streams import EVENTS_BEHIND, Stream
from headgate.store.triggers import reopening
from headgate.tasks.streaming import StreamStep

_E = stream_steps._E
MOVES_BROKEN = 3


def _change(tx: Tx, stream: Stream, **values: Any) -> None:
    of_task = task_stream.c.task_instance_id == stream.task_instance_id
    tx.connection.execute(update(task_stream).where(of_task).values(**values))


# --- places ----------------------------------------------------------------------------------------


def _moved_and_then(**back: str) -> Sequence[Patch]:
    """Have a place moved without these of its columns."""
    original = stream_steps.move

    def move(tx: LeasedTx, task: LockedTask, handled: Handled) -> tuple[LockedTask, Stream]:
        before = task_streams.locked(tx, task.id)
        task, stream = original(tx, task, handled)
        assert before is not None
        # Where there is a state, and not for ever: it would never come to rest.
        if 0 < before.handled <= MOVES_BROKEN:
            values = {name: getattr(before, name) for name in back}
            _change(tx, stream, **values)
            stream = msgspec.structs.replace(stream, **values)
        return task, stream

    return [(stream_steps, "move", move)]


def _outcome_without_its_place() -> Sequence[Patch]:
    return _moved_and_then(handled_to="")


def _outcome_without_its_state() -> Sequence[Patch]:
    return _moved_and_then(state="")


def _a_late_outcome_moves_the_place() -> Sequence[Patch]:
    original = outcomes._go_on_with_streams

    def go_on(tx: LeasedTx, ends: Sequence[StepEnd]) -> Any:
        locked = task_rows.locked
        task_rows.locked = lambda tx, instance, **_guard: locked(tx, instance)
        try:
            return original(tx, ends)
        finally:
            task_rows.locked = locked

    return [(outcomes, "_go_on_with_streams", go_on)]


def _a_retry_begins_at_the_start() -> Sequence[Patch]:
    original = task_streams.begin

    def begin(tx: Tx, task: LockedTask, *arguments: Any) -> TriggerId:
        stream = task_streams.locked(tx, task.id)
        if stream is not None and task.try_number == 2:  # in each try it would never come to rest
            _change(tx, stream, handled_to=0, handled=0, state=None)
        return original(tx, task, *arguments)

    return [(task_streams, "begin", begin)]


def _tries_are_not_given_back() -> Sequence[Patch]:
    class Nothing:
        def run(self, *_arguments: Any, **_parameters: Any) -> None:
            pass

    return [(rows, "GIVE_TRIES_BACK", Nothing())]


# --- the events of a step --------------------------------------------------------------------------


def _events_of_earlier_runs_are_forgotten() -> Sequence[Patch]:
    original = stream_steps._read

    def read(tx: Tx, stream: Stream) -> tuple[StreamEvent, ...]:
        events = original(tx, stream)
        return tuple(event for event in events if event.trigger_run_id == events[-1].trigger_run_id)

    return [(stream_steps, "_read", read)]


def _events_backwards() -> Sequence[Patch]:
    original = stream_steps._read
    return [(stream_steps, "_read", lambda tx, stream: original(tx, stream)[::-1])]


def _latest_takes_the_oldest() -> Sequence[Patch]:
    oldest = select(_E.id).where(*EVENTS_BEHIND).order_by(_E.id).limit(literal_column("1"))
    return [(stream_steps, "_NEWEST", Prepared(oldest))]


def _over_before_its_last_event() -> Sequence[Patch]:
    original = stream_steps.part_of

    def part_of(tx: Tx, instance: TaskInstanceId, *arguments: Any) -> StreamPart | None:
        part, stream = original(tx, instance, *arguments), task_streams.read_of(tx, instance)
        if part is None or not part.events or stream is None:
            return part
        return msgspec.structs.replace(part, is_over=stream.ended_as == "returned")

    return [(stream_steps, "part_of", part_of)]


def _batches_begin_at_once() -> Sequence[Patch]:
    def begin_at_once(contract: Any, **known: Any) -> Any:
        return decide("available", **known)

    return [(task_streams, "decide", begin_at_once)]


def _batches_are_never_due() -> Sequence[Patch]:
    def begin_none(*_arguments: Any) -> list[Any]:
        return []

    return [(DeferralVerbs, "begin_due_batches", begin_none)]


def _older_events_shorten_a_wait() -> Sequence[Patch]:
    of_task = update(task_instance).where(task_instance.c.id == bindparam("of_task"))
    return [(task_streams, "_SET_TIMEOUT", Prepared(of_task.values(trigger_timeout=bindparam("timeout"))))]


# --- the trigger -----------------------------------------------------------------------------------


def _credit_is_ignored() -> Sequence[Patch]:
    return [(TriggerRun, "has_no_credit", property(lambda self: False))]


def _an_old_run_ends_the_stream() -> Sequence[Patch]:
    def end(tx: Tx, stream: Stream, end: Any) -> Stream:
        task_rows.finish_trigger(tx, stream.trigger_id)
        _change(tx, stream, **end._asdict())
        return msgspec.structs.replace(stream, **end._asdict())

    return [(task_streams, "_end", end)]


def _opened_beside_the_old_run() -> Sequence[Patch]:
    return [(reopening, "is_gone", lambda owner: true())]


def _never_opened_again() -> Sequence[Patch]:
    def reopen(tx: Tx, trigger_ids: Any = None) -> list[TriggerId]:
        return []

    return [(reopening, "reopen", reopen)]


def _a_late_end_opens_the_trigger() -> Sequence[Patch]:
    def is_open(tx: Tx, trigger_id: int) -> bool:
        stream = task_streams.read_by_trigger(tx, trigger_id)
        return stream is not None and stream.ended_as is None

    return [(task_streams, "_is_open", is_open)]


# --- failures --------------------------------------------------------------------------------------


def _poison_passes_two_events() -> Sequence[Patch]:
    original = poison._pass_over

    def pass_over(tx: Tx, task: LockedTask, stream: Stream, event_id: int, failure: poison.Failure) -> None:
        original(tx, task, stream, event_id, failure)
        now = task_streams.locked(tx, task.id)
        assert now is not None
        following = select(_E.id).where(_E.trigger_id == stream.trigger_id, _E.id > event_id, _E.kind == "event")
        next_id = tx.connection.execute(following.order_by(_E.id).limit(1)).scalar()
        if next_id is not None:
            _change(tx, now, handled_to=next_id, handled=now.handled + 1)

    return [(poison, "_pass_over", pass_over)]


def _what_was_handled_is_forgotten() -> Sequence[Patch]:
    def forget(self: StreamStep, event: Any, state: Any) -> None:
        pass

    return [(StreamStep, "mark_handled", forget)]


MUTANTS: dict[str, Mutant] = {
    "outcome-without-its-place": Mutant(
        "I20: a place is stored with the outcome", "place not moved", _outcome_without_its_place, 50
    ),
    "outcome-without-its-state": Mutant(
        "I20: a state is stored with its place", "state of another history", _outcome_without_its_state, 50
    ),
    "a-late-outcome-moves-the-place": Mutant(
        "I20: only the step that has the task moves its place",
        "a place that nobody came to",
        _a_late_outcome_moves_the_place,
        directed="cleared step",
    ),
    "a-retry-begins-at-the-start": Mutant(
        "I20: an event is handled once", "handled twice", _a_retry_begins_at_the_start, 50
    ),
    "tries-are-not-given-back": Mutant(
        "retries are counted for each place", "tries not given back", _tries_are_not_given_back, 50
    ),
    "events-of-earlier-runs-are-forgotten": Mutant(
        "I21: no event is lost to a retry",
        "event left out",
        _events_of_earlier_runs_are_forgotten,
        directed="two tries",
    ),
    "events-backwards": Mutant("I20: in the order in which they were stored", "out of order", _events_backwards, 50),
    "latest-takes-the-oldest": Mutant("latest is the newest event", "not the newest", _latest_takes_the_oldest, 50),
    "over-before-its-last-event": Mutant(
        "a stream ends behind its last event",
        "ended before its last event",
        _over_before_its_last_event,
        directed="poison",
    ),
    "batches-begin-at-once": Mutant(
        "a batch is whole, or due", "a step before its batch", _batches_begin_at_once, directed="two tries"
    ),
    "batches-are-never-due": Mutant(
        "a batch waits for its seconds only", "late", _batches_are_never_due, directed="batch"
    ),
    "older-events-shorten-a-wait": Mutant(
        "a timeout is of the wait for the next event",
        "timed out early",
        _older_events_shorten_a_wait,
        directed="old events",
    ),
    "credit-is-ignored": Mutant("I22: no further than its credit", "beyond its credit", _credit_is_ignored, 50),
    "an-old-run-ends-the-stream": Mutant(
        "I21: an old run ends no later try", "ended by another run", _an_old_run_ends_the_stream, 50
    ),
    "opened-beside-the-old-run": Mutant(
        "I21: a run begins after the one before has ended",
        "ended by another run",
        _opened_beside_the_old_run,
        directed="two runs",
    ),
    "never-opened-again": Mutant("I21: a stream goes on", "never resumed", _never_opened_again, 50),
    "a-late-end-opens-the-trigger": Mutant(
        "the trigger of a try is over with it",
        "a trigger left open",
        _a_late_end_opens_the_trigger,
        directed="late end",
    ),
    "poison-passes-two-events": Mutant(
        "only the poison is passed over", "passed over", _poison_passes_two_events, directed="poison"
    ),
    "what-was-handled-is-forgotten": Mutant(
        "handled() counts if the step fails",
        "not what its handler said",
        _what_was_handled_is_forgotten,
        directed="two tries",
    ),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())
