"""The creation of runs that no user asked for: by the clock, by the events of assets, and by signals."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final, Protocol

import msgspec

from headgate.protocol import marks
from headgate.protocol.messages.dags import DagSpec
from headgate.protocol.messages.schedules import AssetSchedule, CronSchedule, EventSchedule, SignalSchedule
from headgate.scheduling import contracts, timetable
from headgate.scheduling.contracts import EventRun, Waiting
from headgate.scheduling.timetable import NoMoment
from headgate.store.db.faults import blaming
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import leased
from headgate.store.errors import SpecUnreadable
from headgate.store.ids import DagRowId, DagRunId, Epoch
from headgate.store.signals import dag_signals
from headgate.store.tasks import dags, schedules
from headgate.store.tasks.dags import NewRun, RunType
from headgate.store.tasks.graphs import Graphs, GraphVerbs
from headgate.store.tasks.schedules import DueDag
from headgate.store.triggers import assets
from headgate.store.triggers.assets import WAITING_EVENTS_MAX, Backlogged

RUNS_MAX = 20  # created in one transaction: each writes a row for each of its tasks
INTERVALS_PASSED_MAX = 200  # of one DAG in one transaction, which have their runs already
SAME_NAME_MAX = 10  # names tried in order for a run of events, before a random one


class NewRuns(msgspec.Struct):
    """Runs that were created, as (dag_id, run_id).

    ``dropped``: number of events by DAG that no longer wait, because more waited than may. ``broken``: the error in the
    schedule of a DAG, by its name: it has no next run. ``unreadable``: the reason why a stored DAG cannot be read, by
    its name. ``more``: there may be more to do at once.
    """

    made: list[tuple[str, str]] = msgspec.field(default_factory=list)
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    broken: dict[str, str] = msgspec.field(default_factory=dict)
    unreadable: dict[str, str] = msgspec.field(default_factory=dict)
    more: bool = False


class NewRunVerbs(GraphVerbs):
    """The verbs that create runs."""

    @leased
    def create_due_runs(self, tx: LeasedTx, *, limit: int = RUNS_MAX) -> NewRuns:
        """Create the next run of up to ``limit`` DAGs that are due, and set their next dates.

        Raises `ItemFailed` for a DAG that can have no run.
        """
        new = NewRuns()
        locked = schedules.lock_due(tx, self.graphs.unreadable(tx), limit=limit)
        for due in locked:
            try:
                with blaming("DAG", due.id):
                    _create_due_run(tx, self.graphs, due, new)
            except SpecUnreadable as error:
                new.unreadable[due.name] = error.reason
                new.more = True  # its date is kept for a supervisor that can read it
        new.more = new.more or len(locked) == limit or bool(new.made)
        return new

    def create_event_runs(self, epoch: Epoch, *, limit: int = RUNS_MAX) -> NewRuns:
        """Create up to ``limit`` runs for events of assets, or for signals. If none can be created, it only reads.

        Raises `ItemFailed` for a DAG that can have no run.
        """
        with self.database.reading() as tx:
            ready = [
                (source, one) for source in SOURCES for one in source.backlogs(tx) if _has_work(tx, self.graphs, one)
            ]
        if not ready:
            return NewRuns()
        with self.database.leased(epoch) as leased_tx:
            return _create_event_runs(leased_tx, self.graphs, ready, limit=limit)


class Source(Protocol):
    """A module with what waits for the runs of DAGs: events of assets, or signals."""

    def backlogs(self, tx: Tx) -> list[Backlogged]:
        """Return the DAGs for which something waits."""
        ...

    def waiting(self, tx: Tx, dag_id: DagRowId, limit: int | None) -> list[Waiting]:
        """Return what waits for a DAG, the oldest first. The caller has locked the DAG."""
        ...

    def take(self, tx: Tx, dag_id: DagRowId, dag_run_id: DagRunId, run: EventRun) -> None:
        """Assign to a run what it was created for."""
        ...

    def drop_oldest(self, tx: Tx, dag_id: DagRowId) -> int:
        """Drop the oldest, if more than `WAITING_EVENTS_MAX` wait; return their number."""
        ...


SOURCES: Final[tuple[Source, ...]] = (assets, dag_signals)


# --- by the clock --------------------------------------------------------------------------------


def _create_due_run(tx: Tx, graphs: Graphs, due: DueDag, new: NewRuns) -> None:
    spec = graphs.get(tx, due.id, due.spec_hash).spec
    # Counted again with the lock held: runs of a supervisor that had the lock before are visible now.
    if isinstance(spec.schedule, CronSchedule) and dags.count_active_runs(tx, due.id) < spec.max_active_runs:
        _create_scheduled(tx, due, spec, spec.schedule, new)


def _create_scheduled(tx: Tx, due: DueDag, spec: DagSpec, schedule: CronSchedule, new: NewRuns) -> None:
    next_ = due.next_
    for _ in range(INTERVALS_PASSED_MAX):
        try:
            interval, next_ = timetable.due(schedule, next_, tx.now, catchup=spec.catchup)
        except NoMoment as error:
            schedules.set_next(tx, due.id, None)
            new.broken[due.name] = str(error)
            return
        run = NewRun(
            f"scheduled__{interval.start.isoformat()}",
            "scheduled",
            logical_date=interval.start,
            interval=(interval.start, interval.end),
        )
        if dags.insert_run(tx, due.id, spec, run) is not None:
            new.made.append((due.name, run.run_id))
            break
        # It has its run already, from before its schedule was changed, or by hand.
        if next_.end > tx.now:
            break
    else:
        new.more = True
    schedules.set_next(tx, due.id, next_)


# --- by events -----------------------------------------------------------------------------------


def _has_work(tx: Tx, graphs: Graphs, one: Backlogged) -> bool:
    """Whether the DAG can have a run for events that wait, or too many events wait for it."""
    if tx.passed_over.has("DAG", one.dag_id):
        return False
    with blaming("DAG", one.dag_id):
        return one.backlog.events > WAITING_EVENTS_MAX or _is_ready(one, _schedule(tx, graphs, one), tx.now)


def _is_ready(one: Backlogged, schedule: EventSchedule | None, now: datetime) -> bool:
    if schedule is None or one.is_held or one.room <= 0:
        return False
    return contracts.is_ready(schedule, one.backlog, now)


def _schedule(tx: Tx, graphs: Graphs, one: Backlogged) -> EventSchedule | None:
    try:
        schedule = graphs.get(tx, one.dag_id, one.spec_hash).spec.schedule
    except SpecUnreadable:
        return None  # its events wait for a supervisor that can read it
    return schedule if isinstance(schedule, AssetSchedule | SignalSchedule) else None


def _create_event_runs(
    tx: LeasedTx, graphs: Graphs, ready: Sequence[tuple[Source, Backlogged]], *, limit: int
) -> NewRuns:
    new = NewRuns()
    # Each has its share, and the one that has waited longest goes first: many events of one hold up no other DAG.
    share = max(1, limit // len(ready))
    for source, found in sorted(ready, key=lambda each: each[1].backlog.first_at):
        if len(new.made) >= limit:
            new.more = True
            break
        with blaming("DAG", found.dag_id):
            _create_event_runs_of(tx, graphs, source, found, new, limit=min(share, limit - len(new.made)))
    return new


def _create_event_runs_of(
    tx: LeasedTx, graphs: Graphs, source: Source, found: Backlogged, new: NewRuns, *, limit: int
) -> None:
    locked = assets.lock_dag(tx, found.dag_id)
    if locked is None:
        new.more = True
        return
    # It may be paused by now, or have another schedule.
    one = msgspec.structs.replace(found, spec_hash=locked.spec_hash, is_held=locked.is_held)
    if one.backlog.events > WAITING_EVENTS_MAX:
        new.dropped[one.name] = source.drop_oldest(tx, one.dag_id)
    schedule = _schedule(tx, graphs, one)
    if schedule is None or one.is_held:
        return
    spec = graphs.get(tx, one.dag_id, one.spec_hash).spec
    room = min(limit, spec.max_active_runs - dags.count_active_runs(tx, one.dag_id))
    if room <= 0:
        return
    waiting = source.waiting(tx, one.dag_id, contracts.rows_needed(schedule, room))
    for run in contracts.runs_of(schedule, waiting, tx.now, room=room):
        run_id, created = _create_from_events(tx, one.dag_id, spec, run)
        source.take(tx, one.dag_id, created, run)
        new.made.append((one.name, run_id))
        marks.reach("runs.of_events_written")
    new.more = True  # events that these runs did not take may create others


def _create_from_events(tx: Tx, dag_row: DagRowId, spec: DagSpec, run: EventRun) -> tuple[str, DagRunId]:
    run_type: RunType = "asset" if isinstance(spec.schedule, AssetSchedule) else "signal"
    names = _names_for(run.run_id)
    run_id = next(names)
    while (created := dags.insert_run(tx, dag_row, spec, NewRun(run_id, run_type))) is None:
        run_id = next(names)
    return run_id, created


def _names_for(run_id: str) -> Iterator[str]:
    """Yield names for a run, without end: users may have given the first ones to runs of their own."""
    yield run_id
    for number in range(1, SAME_NAME_MAX):
        yield f"{run_id}__{number}"
    while True:
        yield f"{run_id}__{uuid.uuid4().hex}"
