"""DAGs as their files say, and their runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec
from sqlalchemy import Connection, and_, delete, exists, func, select, update

from headgate.protocol.dags import DEFAULT_POOL, DagSpec, TaskSpec, TaskState, decode_dag, encode_dag
from headgate.protocol.messages import ERROR_CHARS_MAX
from headgate.scheduling import states
from headgate.store import task_rows
from headgate.store.bulk import Kind, insert_into, insert_new
from headgate.store.dead_letters import storable_text
from headgate.store.errors import NoSuchRow
from headgate.store.tables import dag, dag_run, import_error, pool, task_instance
from headgate.store.times import bound
from headgate.store.watchers import check_name

DEFAULT_POOL_SLOTS = 128  # of `DEFAULT_POOL`, until somebody says otherwise: more than the workers of a machine
FILE_CHARS_MAX = 4096  # of a path, as Linux has it
RunType = Literal["manual", "scheduled", "asset"]
RunEnd = Literal["success", "failed"]

_NEW_TASK = Kind(
    task_instance,
    (
        *("dag_run_id", "task_id", "tries_max", "retries", "retry_delay_s", "retry_exponential_backoff"),
        *("max_retry_delay_s", "execution_timeout_s", "priority_weight", "queue", "pool", "pool_slots", "created_date"),
    ),
)


class DagRow(msgspec.Struct, frozen=True):
    """One DAG that some file has."""

    id: int
    name: str
    file: str
    spec: DagSpec
    is_paused: bool
    parsed_at: datetime


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
    unless they say otherwise is made where it is not there: no dispatch may wait for another one that makes it.
    """
    check_name(file, "the path of a DAG file", chars_max=FILE_CHARS_MAX)
    for spec in sorted(specs, key=lambda spec: spec.dag_id):
        told = {
            "file": file,
            "spec": encode_dag(spec),
            "max_active_runs": spec.max_active_runs,
            "parsed_at": now,
            "removed_at": None,
        }
        statement = insert_into(connection, dag).values(
            name=spec.dag_id, created_date=now, is_paused=spec.is_paused_upon_creation, **told
        )
        connection.execute(statement.on_conflict_do_update(index_elements=[dag.c.name], set_=told))
    default = insert_into(connection, pool).values(name=DEFAULT_POOL, slots=DEFAULT_POOL_SLOTS)
    connection.execute(default.on_conflict_do_nothing())
    gone = [dag.c.file == file, dag.c.removed_at.is_(None), dag.c.name.not_in([spec.dag_id for spec in specs])]
    connection.execute(update(dag).where(*gone).values(removed_at=now))
    connection.execute(delete(import_error).where(import_error.c.file == file))


def save_import_error(connection: Connection, now: datetime, file: str, error: str) -> None:
    """Record that a file cannot be parsed. The DAGs it had stay as they were: nobody took them out."""
    check_name(file, "the path of a DAG file", chars_max=FILE_CHARS_MAX)
    told = {"error": storable_text(error, ERROR_CHARS_MAX), "stored_at": now}
    statement = insert_into(connection, import_error).values(file=file, **told)
    connection.execute(statement.on_conflict_do_update(index_elements=[import_error.c.file], set_=told))


def import_errors(connection: Connection) -> dict[str, str]:
    """Return the error of each file that cannot be parsed, by file."""
    rows = connection.execute(select(import_error.c.file, import_error.c.error).order_by(import_error.c.file))
    return {file: error for file, error in rows}


def listed(connection: Connection) -> list[DagRow]:
    """Return the DAGs that some file has, by name."""
    columns = [dag.c[name] for name in DagRow.__struct_fields__]
    rows = connection.execute(select(*columns).where(dag.c.removed_at.is_(None)).order_by(dag.c.name))
    return [
        DagRow(row.id, row.name, row.file, decode_dag(row.spec), bool(row.is_paused), row.parsed_at) for row in rows
    ]


def set_paused(connection: Connection, name: str, *, is_paused: bool) -> None:
    """Pause a DAG or have it go on. Of a paused one no task is given to a worker. Raises `NoSuchRow`."""
    statement = update(dag).where(dag.c.name == name, dag.c.removed_at.is_(None)).values(is_paused=is_paused)
    if connection.execute(statement).rowcount != 1:
        raise NoSuchRow("DAG", name)


# --- runs ----------------------------------------------------------------------------------------


def create_run(
    connection: Connection,
    now: datetime,
    dag_name: str,
    run_id: str,
    run_type: RunType,
    logical_date: datetime | None,
    conf: bytes | None,
) -> int | None:
    """Begin a run with all tasks of the DAG; return its id. None where the DAG has a run of this name already.

    Raises `NoSuchRow` and `BadName`.
    """
    check_name(run_id, "the run_id")
    row = connection.execute(
        select(dag.c.id, dag.c.spec).where(dag.c.name == dag_name, dag.c.removed_at.is_(None))
    ).first()
    if row is None:
        raise NoSuchRow("DAG", dag_name)
    statement = insert_into(connection, dag_run).values(
        dag_id=row.id,
        run_id=run_id,
        run_type=run_type,
        state="running",
        logical_date=logical_date,
        conf=conf,
        created_date=now,
    )
    created = connection.execute(statement.on_conflict_do_nothing().returning(dag_run.c.id)).scalar_one_or_none()
    if created is None:
        return None
    _insert_tasks(connection, now, int(created), decode_dag(row.spec).tasks)
    return int(created)


def _insert_tasks(connection: Connection, now: datetime, dag_run_id: int, tasks: Sequence[TaskSpec]) -> None:
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


def follow_dag(connection: Connection, now: datetime, dag_run_id: int) -> list[int]:
    """Bring a run in line with its DAG: add tasks that are new, remove those that are gone; return the ids of these.

    A task that is with a worker is let end first. Those that have ended stay: they did run.
    """
    row = connection.execute(
        select(dag.c.spec).join(dag_run, dag_run.c.dag_id == dag.c.id).where(dag_run.c.id == dag_run_id)
    ).first()
    if row is None:
        raise NoSuchRow("run", str(dag_run_id))
    tasks = decode_dag(row.spec).tasks
    _insert_tasks(connection, now, dag_run_id, tasks)
    gone = (
        select(task_instance.c.id)
        .where(
            task_instance.c.dag_run_id == dag_run_id, task_instance.c.task_id.not_in([task.task_id for task in tasks])
        )
        .order_by(task_instance.c.id)
    )
    return [task_id for task_id in connection.execute(gone).scalars().all() if _remove(connection, now, task_id)]


def _remove(connection: Connection, now: datetime, task_id: int) -> bool:
    task = task_rows.locked(connection, task_id)
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
    unfinished = exists().where(task_instance.c.dag_run_id == dag_run_id, task_rows.is_in(*sorted(states.UNFINISHED)))
    statement = update(dag_run).where(running, ~unfinished).values(state=state, ended_at=now)
    return connection.execute(statement).rowcount == 1


def reopen(connection: Connection, dag_run_id: int) -> None:
    """Have a run go on: one of its tasks was cleared."""
    connection.execute(update(dag_run).where(dag_run.c.id == dag_run_id).values(state="running", ended_at=None))


def task_states(connection: Connection, dag_run_id: int) -> dict[str, TaskState]:
    """Return the state of each task of a run, by task id."""
    rows = connection.execute(
        select(task_instance.c.task_id, task_instance.c.state).where(task_instance.c.dag_run_id == dag_run_id)
    )
    return {task_id: TaskState(state) for task_id, state in rows}


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


def active_runs(connection: Connection, dag_name: str) -> int:
    """Return how many runs of a DAG have not ended."""
    statement = (
        select(func.count()).select_from(dag_run.join(dag)).where(dag.c.name == dag_name, dag_run.c.ended_at.is_(None))
    )
    return connection.execute(statement).scalar_one()
