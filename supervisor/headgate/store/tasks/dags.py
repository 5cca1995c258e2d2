"""DAGs as their files say, and their runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, select, update

from headgate.protocol.messages.dags import (
    DEFAULT_POOL,
    MOMENT_S_MAX,
    MOMENT_S_MIN,
    DagSpec,
    TaskSpec,
    TaskState,
    encode_dag,
)
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.scheduling import states
from headgate.scheduling.planning import RunEnd
from headgate.store.db.bulk import Kind, insert_into, insert_new
from headgate.store.db.times import bound
from headgate.store.errors import NoSuchRow, ValueRefused
from headgate.store.tables import dag, dag_run, import_error, pool, task_instance
from headgate.store.tasks import schedules, task_rows
from headgate.store.tasks.graphs import read_spec
from headgate.store.triggers import assets
from headgate.store.triggers.dead_letters import storable_text
from headgate.store.triggers.watchers import check_name

DEFAULT_POOL_SLOTS = 128  # of `DEFAULT_POOL`, until somebody says otherwise: more than the workers of a machine
FILE_CHARS_MAX = 4096  # of a path, as Linux has it
RunType = Literal["manual", "scheduled", "asset"]

_NEW_TASK = Kind(
    task_instance,
    (
        *("dag_run_id", "task_id", "tries_max", "retries", "retry_delay_s", "retry_exponential_backoff"),
        *("max_retry_delay_s", "execution_timeout_s", "priority_weight", "queue", "pool", "pool_slots", "created_date"),
    ),
)


class RunStanding(msgspec.Struct, frozen=True):
    """How a run of a DAG stands; ``run_id`` None where the DAG has no such run.

    ``state`` is ``queued`` for a run that waits for others of its DAG to end, else that of its row.
    """

    run_id: str | None = None
    state: str = ""
    tasks: dict[str, TaskState] = {}


# --- files ---------------------------------------------------------------------------------------


def save_file(connection: Connection, now: datetime, file: str, specs: Sequence[DagSpec]) -> None:
    """Record what a file that was parsed holds now; DAGs it held earlier and holds no more are put away.

    A DAG of the same name in another file moves to this one: the file parsed last has it. The pool that tasks use
    unless they say otherwise is made where it is not there: no dispatch may wait for another one that makes it. What
    has changed in a DAG is followed by its runs, by the date of its next one, and by what assets it waits for.
    """
    check_name(file, "the path of a DAG file", chars_max=FILE_CHARS_MAX)
    for spec in sorted(specs, key=lambda spec: spec.dag_id):
        _save_dag(connection, now, file, spec)
    default = insert_into(connection, pool).values(name=DEFAULT_POOL, slots=DEFAULT_POOL_SLOTS)
    connection.execute(default.on_conflict_do_nothing())
    gone = [dag.c.file == file, dag.c.removed_at.is_(None), dag.c.name.not_in([spec.dag_id for spec in specs])]
    connection.execute(update(dag).where(*gone).values(removed_at=now))
    connection.execute(delete(import_error).where(import_error.c.file == file))


def _save_dag(connection: Connection, now: datetime, file: str, spec: DagSpec) -> None:
    data = encode_dag(spec)
    digest = hashlib.sha256(data).hexdigest()
    told = {
        "file": file,
        "spec": data,
        "spec_hash": digest,
        "max_active_runs": spec.max_active_runs,
        "parsed_at": now,
        "removed_at": None,
    }
    of_name = dag.c.name == spec.dag_id
    columns = (dag.c.id, dag.c.spec, dag.c.spec_hash, dag.c.removed_at)
    before = connection.execute(select(*columns).where(of_name).with_for_update(key_share=True)).first()
    statement = insert_into(connection, dag).values(
        name=spec.dag_id, created_date=now, is_paused=spec.is_paused_upon_creation, **told
    )
    statement = statement.on_conflict_do_update(index_elements=[dag.c.name], set_=told)
    dag_id = int(connection.execute(statement.returning(dag.c.id)).scalar_one())
    if before is not None and before.spec_hash == digest and before.removed_at is None:
        return
    schedules.follow_schedule(connection, now, dag_id, spec, None if before is None else before.spec)
    assets.subscribe(connection, now, dag_id, spec.schedule)
    note_active_runs(connection, dag_id)


def note_active_runs(connection: Connection, dag_id: int) -> None:
    """Have the scheduler look at the runs of a DAG that have not ended."""
    runs = select(dag_run.c.id).where(dag_run.c.dag_id == dag_id, dag_run.c.ended_at.is_(None))
    for dag_run_id in connection.execute(runs).scalars():
        task_rows.note_run(connection, dag_run_id)


def save_import_error(connection: Connection, now: datetime, file: str, error: str) -> None:
    """Record that a file cannot be parsed. The DAGs it had stay as they were: nobody took them out."""
    check_name(file, "the path of a DAG file", chars_max=FILE_CHARS_MAX)
    told = {"error": storable_text(error, ERROR_CHARS_MAX), "stored_at": now}
    statement = insert_into(connection, import_error).values(file=file, **told)
    connection.execute(statement.on_conflict_do_update(index_elements=[import_error.c.file], set_=told))


def files(connection: Connection) -> dict[str, list[str]]:
    """Return the files that have DAGs or an error, by path, each with the ids of its DAGs."""
    found: dict[str, list[str]] = {file: [] for file in connection.execute(select(import_error.c.file)).scalars()}
    for row in connection.execute(select(dag.c.file, dag.c.name).where(dag.c.removed_at.is_(None))):
        found.setdefault(row.file, []).append(row.name)
    return found


def set_paused(connection: Connection, name: str, *, is_paused: bool) -> None:
    """Pause a DAG or have it go on. Of a paused one no run is made and no task begins. Raises `NoSuchRow`."""
    statement = update(dag).where(dag.c.name == name, dag.c.removed_at.is_(None)).values(is_paused=is_paused)
    dag_id = connection.execute(statement.returning(dag.c.id)).scalar_one_or_none()
    if dag_id is None:
        raise NoSuchRow("DAG", name)
    if not is_paused:
        note_active_runs(connection, dag_id)


# --- runs ----------------------------------------------------------------------------------------


class NewRun(msgspec.Struct, frozen=True):
    """A run to be made. ``interval`` are start and end of its data interval; ``conf`` is encoded."""

    run_id: str
    run_type: RunType
    logical_date: datetime | None = None
    conf: bytes | None = None
    interval: tuple[datetime, datetime] | None = None


def create_run(connection: Connection, now: datetime, dag_name: str, run: NewRun) -> int | None:
    """Make a run with all tasks of the DAG; return its id. None where the DAG has a run of this name already.

    It begins when the scheduler looks at it. Raises `NoSuchRow`, `BadName` and `ValueRefused`.
    """
    check_name(run.run_id, "the run_id")
    if run.logical_date is not None and not MOMENT_S_MIN <= run.logical_date.timestamp() <= MOMENT_S_MAX:
        # PostgreSQL would keep it, and tell it in its own time zone, where it may have no date: nobody could read it.
        raise ValueRefused(f"the logical date must lie in the years 2 to 9998: {run.logical_date.isoformat()}")
    row = connection.execute(
        select(dag.c.id, dag.c.spec).where(dag.c.name == dag_name, dag.c.removed_at.is_(None))
    ).first()
    if row is None:
        raise NoSuchRow("DAG", dag_name)
    return insert_run(connection, now, row.id, read_spec(dag_name, row.spec).tasks, run)


def insert_run(
    connection: Connection, now: datetime, dag_id: int, tasks: Sequence[TaskSpec], run: NewRun
) -> int | None:
    """Make a run with these tasks; return its id, None where the DAG has a run of this name already."""
    start, end = run.interval or (None, None)
    statement = insert_into(connection, dag_run).values(
        dag_id=dag_id,
        run_id=run.run_id,
        run_type=run.run_type,
        state="running",
        logical_date=run.logical_date,
        conf=run.conf,
        created_date=now,
        needs_look=True,
        data_interval_start=start,
        data_interval_end=end,
    )
    created = connection.execute(statement.on_conflict_do_nothing().returning(dag_run.c.id)).scalar_one_or_none()
    if created is None:
        return None
    insert_tasks(connection, now, int(created), tasks)
    return int(created)


def insert_tasks(connection: Connection, now: datetime, dag_run_id: int, tasks: Sequence[TaskSpec]) -> None:
    rows = [
        (
            dag_run_id,
            task.task_id,
            task.retries + 1,
            task.retries,
            task.retry_delay_s,
            task.retry_exponential_backoff,
            task.max_retry_delay_s,
            task.execution_timeout_s,
            task.priority_weight,
            task.queue,
            task.pool,
            task.pool_slots,
            bound(connection, now),
        )
        for task in tasks
    ]
    if rows:
        insert_new(connection, _NEW_TASK, rows, returning=("id",))


def _of_run(dag_run_id: int) -> ColumnElement[bool]:
    return task_instance.c.dag_run_id == dag_run_id


def remove_task(connection: Connection, now: datetime, task_id: int) -> bool:
    """Take a task out of its run, which is locked; return whether that was done: not while a worker has it.

    One whose row another has locked is passed over: whoever has it may wait for the run.
    """
    task = task_rows.locked_unless_busy(connection, task_id)
    if task is None or not any(task.state in row.from_ for row in states.of("removed")):
        return False
    task_rows.apply(connection, now, task, "removed")
    if task.trigger_id is not None:
        task_rows.finish_trigger(connection, now, task.trigger_id)
    return True


def end_run(connection: Connection, now: datetime, dag_run_id: int, state: RunEnd) -> bool:
    """End a run none of whose tasks is unfinished; return whether it was ended now.

    Its row is locked before its tasks are looked at, and a clear changes both: no run ends over a task that was
    cleared.
    """
    running = and_(dag_run.c.id == dag_run_id, dag_run.c.state == "running")
    if connection.execute(select(dag_run.c.id).where(running).with_for_update(key_share=True)).first() is None:
        return False
    unfinished = exists().where(_of_run(dag_run_id), task_rows.is_in(*sorted(states.UNFINISHED)))
    statement = update(dag_run).where(running, ~unfinished).values(state=state, ended_at=now)
    return connection.execute(statement).rowcount == 1


def reopen(connection: Connection, dag_run_id: int) -> None:
    """Have a run go on: one of its tasks was cleared."""
    values = {"state": "running", "ended_at": None, "needs_look": True}
    connection.execute(update(dag_run).where(dag_run.c.id == dag_run_id).values(values))


def task_states(connection: Connection, dag_run_id: int) -> dict[str, TaskState]:
    """Return the state of each task of a run, by task id."""
    rows = connection.execute(
        select(task_instance.c.task_id, task_instance.c.state).where(task_instance.c.dag_run_id == dag_run_id)
    )
    return {task_id: TaskState(state) for task_id, state in rows}


def run_count(connection: Connection, dag_id: int) -> int:
    """Return how many runs of a DAG have not ended; no more can begin to be counted while its row is locked."""
    active = dag_run.c.dag_id == dag_id, dag_run.c.ended_at.is_(None)
    return int(connection.execute(select(func.count()).select_from(dag_run).where(*active)).scalar_one())


def run_standing(
    connection: Connection, dag_name: str, run_id: str | None, logical_date: datetime | None
) -> RunStanding | None:
    """Return how the newest run of a DAG stands that has this run_id and this logical date; None for no such DAG.

    A DAG that no file has any more still has its runs.
    """
    dag_id = connection.execute(select(dag.c.id).where(dag.c.name == dag_name)).scalar_one_or_none()
    if dag_id is None:
        return None
    which = [dag_run.c.dag_id == dag_id]
    if run_id is not None:
        which.append(dag_run.c.run_id == run_id)
    if logical_date is not None:
        which.append(dag_run.c.logical_date == logical_date)
    columns = [dag_run.c[name] for name in ("id", "run_id", "state", "started_at")]
    row = connection.execute(select(*columns).where(*which).order_by(dag_run.c.id.desc()).limit(1)).first()
    if row is None:
        return RunStanding()
    state = "queued" if row.state == "running" and row.started_at is None else row.state
    return RunStanding(row.run_id, state, task_states(connection, row.id))
