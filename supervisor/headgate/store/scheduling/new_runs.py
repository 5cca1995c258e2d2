"""The making of runs that nobody asked for by hand: by the clock, and by the events of assets."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import Connection

from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, DagSpec
from headgate.scheduling import contracts, timetable
from headgate.scheduling.contracts import AssetRun
from headgate.scheduling.timetable import NoMoment
from headgate.store.errors import SpecUnreadable
from headgate.store.tasks import dags, schedules
from headgate.store.tasks.dags import NewRun
from headgate.store.tasks.graphs import Graphs
from headgate.store.tasks.schedules import DueDag
from headgate.store.triggers import assets
from headgate.store.triggers.assets import WAITING_EVENTS_MAX, Backlogged

SAME_NAME_MAX = 10  # names in a row that are tried for a run of events before one that nobody can have


class NewRuns(msgspec.Struct):
    """Runs that were made, as (dag_id, run_id).

    ``dropped``: events by DAG that wait no longer, since more waited than may. ``broken``: what is wrong with the
    schedule of a DAG, by its name: it has no next run. ``unreadable``: why a DAG that is stored cannot be read, by its
    name. ``more``: there may be more to do at once.
    """

    made: list[tuple[str, str]] = msgspec.field(default_factory=list)
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    broken: dict[str, str] = msgspec.field(default_factory=dict)
    unreadable: dict[str, str] = msgspec.field(default_factory=dict)
    more: bool = False


# --- by the clock --------------------------------------------------------------------------------


def by_clock(connection: Connection, now: datetime, graphs: Graphs, *, limit: int) -> NewRuns:
    """Make the next run of up to ``limit`` DAGs that are due, and move their dates on."""
    new = NewRuns()
    locked = schedules.lock_due(connection, now, graphs.readable(connection), limit=limit)
    for due in locked:
        try:
            spec = graphs.get(connection, due.id, due.spec_hash).spec
        except SpecUnreadable as error:
            new.unreadable[due.name] = error.reason
            new.more = True
            continue  # with its date, for whoever can read it
        # Counted again with the lock held: what another made before it let go of the DAG is seen now.
        if isinstance(spec.schedule, CronSchedule) and dags.run_count(connection, due.id) < spec.max_active_runs:
            _make_scheduled(connection, now, due, spec, spec.schedule, new)
    new.more = new.more or len(locked) == limit or bool(new.made)
    return new


def _make_scheduled(
    connection: Connection, now: datetime, due: DueDag, spec: DagSpec, schedule: CronSchedule, new: NewRuns
) -> None:
    try:
        interval, next_ = timetable.due(schedule, due.next_, now, catchup=spec.catchup)
    except NoMoment as error:
        schedules.set_next(connection, due.id, None)
        new.broken[due.name] = str(error)
        return
    run = NewRun(
        f"scheduled__{interval.start.isoformat()}",
        "scheduled",
        logical_date=interval.start,
        interval=(interval.start, interval.end),
    )
    if dags.insert_run(connection, now, due.id, spec.tasks, run) is not None:
        new.made.append((due.name, run.run_id))
    schedules.set_next(connection, due.id, next_)


# --- by events -----------------------------------------------------------------------------------


def with_work(connection: Connection, now: datetime, graphs: Graphs) -> list[Backlogged]:
    """Return the DAGs that can have a run for events that wait, or for which too many wait."""
    return [
        one
        for one in assets.backlogs(connection)
        if one.backlog.events > WAITING_EVENTS_MAX or _is_ready(one, _schedule(connection, graphs, one), now)
    ]


def _is_ready(one: Backlogged, schedule: AssetSchedule | None, now: datetime) -> bool:
    if schedule is None or one.is_held or one.room <= 0:
        return False
    return contracts.is_ready(schedule, one.backlog, now)


def _schedule(connection: Connection, graphs: Graphs, one: Backlogged) -> AssetSchedule | None:
    try:
        schedule = graphs.get(connection, one.dag_id, one.spec_hash).spec.schedule
    except SpecUnreadable:
        return None  # its events wait for whoever can read it
    return schedule if isinstance(schedule, AssetSchedule) else None


def by_events(
    connection: Connection, now: datetime, graphs: Graphs, ready: Sequence[Backlogged], *, limit: int
) -> NewRuns:
    """Make runs of these DAGs, up to ``limit`` in all; DAGs that another is busy with are passed over."""
    new = NewRuns()
    for one in ready:
        if len(new.made) >= limit:
            new.more = True
            break
        if not assets.lock_dag(connection, one.dag_id):
            new.more = True
            continue
        if one.backlog.events > WAITING_EVENTS_MAX:
            new.dropped[one.name] = assets.drop_oldest(connection, one.dag_id)
        schedule = _schedule(connection, graphs, one)
        if schedule is None or one.is_held:
            continue
        spec = graphs.get(connection, one.dag_id, one.spec_hash).spec
        room = min(limit - len(new.made), spec.max_active_runs - dags.run_count(connection, one.dag_id))
        if room <= 0:
            continue
        waiting = assets.waiting(connection, one.dag_id, contracts.rows_needed(schedule, room))
        for run in contracts.runs_of(schedule, waiting, now, room=room):
            new.made.append((one.name, _make_of_events(connection, now, one.dag_id, spec, run)))
        new.more = True  # what these runs did not take may make others
    return new


def _make_of_events(connection: Connection, now: datetime, dag_id: int, spec: DagSpec, run: AssetRun) -> str:
    names = _names_for(run.run_id)
    run_id = next(names)
    while (created := dags.insert_run(connection, now, dag_id, spec.tasks, NewRun(run_id, "asset"))) is None:
        run_id = next(names)
    assets.take(connection, dag_id, created, run)
    return run_id


def _names_for(run_id: str) -> Iterator[str]:
    """Yield names for a run, without end: a user may have given the first ones to runs of their own."""
    yield run_id
    for number in range(1, SAME_NAME_MAX):
        yield f"{run_id}__{number}"
    while True:
        yield f"{run_id}__{uuid.uuid4().hex}"
