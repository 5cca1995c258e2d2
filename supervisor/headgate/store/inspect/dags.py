"""DAGs, runs, tasks and pools as people look at them. Nothing here writes, and every list has a limit.

Lists that grow for ever are newest first, a page at a time: the next page begins at the id of the last row.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Label, Select, and_, case, func, null, select

from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, DagSpec, TaskSpec, TaskState
from headgate.store.db.bulk import chunks
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import NoSuchRow, SpecUnreadable
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.tables import (
    asset,
    dag,
    dag_run,
    dag_run_event,
    import_error,
    pool,
    task_instance,
    waiting_event,
    xcom,
)
from headgate.store.tasks import task_rows
from headgate.store.tasks.graphs import read_spec

ROWS_PER_PAGE_MAX = 1000  # of one list verb, unless it says otherwise: callers ask for the next page
NEWEST_SHOWN = 100  # rows of a list that grows for ever, if the caller does not say
LIST_DAGS_MAX = 10_000  # in one list, which decodes the spec of each
NAMES_COMPARED_MAX = 2000  # with a name that was not found, to say which one was meant: some tens of milliseconds
NEAR_NAMES_MAX = 3
RUN_EVENTS_MAX = 1000  # shown of those a run was made for
LATEST = "latest"  # in place of a run_id: the newest run of the DAG

_C = task_instance.c
# A run that waits, since its DAG has as many as it may have at once, is shown as what it is.
_waits = and_(dag_run.c.state == "running", dag_run.c.started_at.is_(None))
RUN_STATE: Label[str] = case((_waits, "queued"), else_=dag_run.c.state).label("state")


class DagLine(msgspec.Struct, frozen=True):
    """One DAG in a list; ``name`` is None for a file that cannot be parsed and never held a DAG.

    ``waiting_events``: events of its assets that have had no run yet. ``next_run_at``: by its cron schedule.
    ``import_error``: what is wrong with its file now, with the traceback; the DAG is as the file said before.
    """

    name: str | None
    schedule: str
    is_paused: bool
    tasks: int
    active_runs: int
    queued_runs: int
    waiting_events: int
    next_run_at: datetime | None
    last_run: str | None
    last_run_state: str | None
    last_run_at: datetime | None
    file: str
    parsed_at: datetime | None
    import_error: str | None


class RunLine(msgspec.Struct, frozen=True):
    """One run, ``queued`` until it may start. ``tasks`` says how many of its tasks are in each state that any is in."""

    id: DagRunId
    dag: str
    run_id: str
    run_type: str
    state: str
    logical_date: datetime | None
    created_date: datetime
    started_at: datetime | None
    ended_at: datetime | None
    tasks: dict[str, int]


class RunDetail(msgspec.Struct, frozen=True):
    """All that is known of a run. ``conf`` is encoded; ``events`` are what it was made for: id, asset, superseded."""

    line: RunLine
    conf: bytes | None
    data_interval_start: datetime | None
    data_interval_end: datetime | None
    needs_look: bool
    events: tuple[tuple[int, str, bool], ...]


class TaskLine(msgspec.Struct, frozen=True):
    """One task of one run. ``triggerer_id`` is the epoch of the supervisor whose worker has it."""

    id: int
    dag: str
    run_id: str
    task_id: str
    state: TaskState
    try_number: int
    tries_max: int
    queue: str
    pool: str
    triggerer_id: int | None
    trigger_id: int | None
    started_at: datetime | None
    ended_at: datetime | None
    retry_at: datetime | None
    trigger_timeout: datetime | None
    last_error: str | None


class TaskDetail(msgspec.Struct, frozen=True):
    """All that is known of a task. ``upstream`` and ``trigger_rule`` are its DAG's, None where that has it no more."""

    line: TaskLine
    operator: str | None
    upstream: dict[str, str | None] | None
    trigger_rule: str | None
    priority_weight: int
    pool_slots: int
    retries: int
    next_method: str | None
    created_date: datetime
    scheduled_at: datetime | None
    deadline: datetime | None
    xcoms: dict[str, bytes]


class TaskRef(msgspec.Struct, frozen=True):
    """A task that was looked up by its names."""

    id: TaskInstanceId
    dag_run_id: DagRunId
    dag: str
    run_id: str
    task_id: str


class PoolLine(msgspec.Struct, frozen=True):
    """One pool: how many slots it has, and how many are in use by how many tasks; ``waiting`` tasks are scheduled."""

    name: str
    slots: int
    used: int
    tasks: int
    waiting: int


# --- DAGs ----------------------------------------------------------------------------------------


def _contract_text(schedule: AssetSchedule) -> str:
    if schedule.contract == "batch":
        late = "" if schedule.batch_seconds is None else f" or after {schedule.batch_seconds:g} s"
        return f"{schedule.batch_count} events{late} of"
    return {"all": "an event of all of", "each": "each event of", "latest": "the latest event of"}[schedule.contract]


def schedule_text(spec: DagSpec) -> str:
    """Return the schedule of a DAG as people write it."""
    match spec.schedule:
        case None:
            return "none"
        case CronSchedule(cron, timezone):
            return cron if timezone == "UTC" else f"{cron} ({timezone})"
        case AssetSchedule():
            return f"{_contract_text(spec.schedule)} {', '.join(spec.schedule.assets)}"


_NEWEST_RUN = select(dag_run.c.dag_id, func.max(dag_run.c.id).label("id")).group_by(dag_run.c.dag_id).subquery("newest")
_ACTIVE_RUNS = (
    select(
        dag_run.c.dag_id,
        func.count(dag_run.c.started_at).label("active"),
        (func.count() - func.count(dag_run.c.started_at)).label("queued"),
    )
    .where(dag_run.c.ended_at.is_(None))
    .group_by(dag_run.c.dag_id)
    .subquery("active_runs")
)
_WAITING = (
    select(waiting_event.c.dag_id, func.count().label("events")).group_by(waiting_event.c.dag_id).subquery("waiting")
)
_DAGS = (
    select(
        *(dag.c.name, dag.c.spec, dag.c.is_paused, _ACTIVE_RUNS.c.active, _ACTIVE_RUNS.c.queued, _WAITING.c.events),
        *(dag.c.next_run_at, dag_run.c.run_id, RUN_STATE, dag_run.c.created_date),
        *(dag.c.file, dag.c.parsed_at, import_error.c.error),
    )
    .select_from(
        dag.outerjoin(import_error, import_error.c.file == dag.c.file)
        .outerjoin(_ACTIVE_RUNS, _ACTIVE_RUNS.c.dag_id == dag.c.id)
        .outerjoin(_WAITING, _WAITING.c.dag_id == dag.c.id)
        .outerjoin(_NEWEST_RUN, _NEWEST_RUN.c.dag_id == dag.c.id)
        .outerjoin(dag_run, dag_run.c.id == _NEWEST_RUN.c.id)
    )
    .where(dag.c.removed_at.is_(None))
)


def _line_of(row: Any) -> DagLine:
    try:
        return _dag_line(row, read_spec(row.name, row.spec))
    except SpecUnreadable as error:
        line = _dag_line(row, None)
        return msgspec.structs.replace(line, import_error=line.import_error or str(error))


def _dag_line(row: Any, spec: DagSpec | None) -> DagLine:
    return DagLine(
        name=row.name,
        schedule="?" if spec is None else schedule_text(spec),
        is_paused=bool(row.is_paused),
        tasks=0 if spec is None else len(spec.tasks),
        active_runs=row.active or 0,
        queued_runs=row.queued or 0,
        waiting_events=row.events or 0,
        next_run_at=row.next_run_at,
        last_run=row.run_id,
        last_run_state=row.state,
        last_run_at=row.created_date,
        file=row.file,
        parsed_at=row.parsed_at,
        import_error=row.error,
    )


def task_spec(name: str, data: bytes, task_id: str) -> TaskSpec | None:
    """Return what a DAG as it is stored says of a task; None where it has it no more. Raises `SpecUnreadable`."""
    return next((task for task in read_spec(name, data).tasks if task.task_id == task_id), None)


def _broken_files(tx: Tx, limit: int) -> list[DagLine]:
    holds_dags = select(dag.c.file).where(dag.c.removed_at.is_(None))
    statement = (
        select(import_error.c.file, import_error.c.error)
        .where(import_error.c.file.not_in(holds_dags))
        .order_by(import_error.c.file)
        .limit(limit)
    )
    rows = tx.connection.execute(statement)
    return [DagLine(None, "", False, 0, 0, 0, 0, None, None, None, None, file, None, error) for file, error in rows]


def _no_such_dag(tx: Tx, name: str) -> NoSuchRow:
    statement = select(dag.c.name).where(dag.c.removed_at.is_(None)).order_by(dag.c.name)
    return NoSuchRow("DAG", name, near=_near(tx, name, statement))


def _near(tx: Tx, name: str, statement: Select[Any]) -> list[str]:
    names: list[str] = list(tx.connection.execute(statement.limit(NAMES_COMPARED_MAX)).scalars())
    # By its beginning first: who types half of a long name has it right as far as it goes.
    begin = [one for one in names if name and one.startswith(name)][:NEAR_NAMES_MAX]
    return begin or difflib.get_close_matches(name, names, n=NEAR_NAMES_MAX)


# --- runs ----------------------------------------------------------------------------------------

_RUNS = dag_run.join(dag)
_RUN_COLUMNS = (
    *(dag_run.c.id, dag.c.name.label("dag"), dag_run.c.run_id, dag_run.c.run_type, RUN_STATE),
    *(dag_run.c.logical_date, dag_run.c.created_date, dag_run.c.started_at, dag_run.c.ended_at),
)


def run_id_of(tx: Tx, dag_name: str, run_id: str) -> DagRunId:
    """Return the id of the row of a run; ``latest`` is the newest of its DAG. Raises `NoSuchRow`."""
    dag_id = _dag_id(tx, dag_name)
    of_dag = select(dag_run.c.id).where(dag_run.c.dag_id == dag_id)
    found = tx.connection.execute(of_dag.where(dag_run.c.run_id == run_id)).scalar_one_or_none()
    if found is None and run_id == LATEST:
        found = tx.connection.execute(of_dag.order_by(dag_run.c.id.desc()).limit(1)).scalar_one_or_none()
        if found is None:
            raise NoSuchRow("run", LATEST, of=f"the DAG {dag_name}, which has no runs yet")
    if found is None:
        names = select(dag_run.c.run_id).where(dag_run.c.dag_id == dag_id).order_by(dag_run.c.id.desc())
        raise NoSuchRow("run", run_id, of=f"the DAG {dag_name}", near=_near(tx, run_id, names))
    return DagRunId(found)


def _dag_id(tx: Tx, name: str) -> int:
    """Return the id of a DAG, removed or not: its runs stay to be looked at."""
    found = tx.connection.execute(select(dag.c.id).where(dag.c.name == name)).scalar_one_or_none()
    if found is None:
        raise _no_such_dag(tx, name)
    return int(found)


def _state_counts(tx: Tx, ids: Sequence[int]) -> dict[int, dict[str, int]]:
    order = list(TaskState)
    counts: dict[int, dict[str, int]] = {}
    for part in chunks(ids):
        statement = (
            select(_C.dag_run_id, _C.state, func.count())
            .where(_C.dag_run_id.in_(part))
            .group_by(_C.dag_run_id, _C.state)
        )
        rows = sorted(tx.connection.execute(statement), key=lambda row: order.index(TaskState(row[1])))
        for dag_run_id, state, count in rows:
            counts.setdefault(dag_run_id, {})[state] = count
    return counts


# --- tasks ---------------------------------------------------------------------------------------

_TASKS = task_instance.join(dag_run).join(dag)
_TASK_COLUMNS: tuple[Label[Any], ...] = tuple(
    {"dag": dag.c.name, "run_id": dag_run.c.run_id}.get(name, _C.get(name, null())).label(name)
    for name in TaskLine.__struct_fields__
)


def _task_line_of(fields: dict[str, Any]) -> TaskLine:
    """Return a line of these fields, taken out of ``fields``."""
    told = {name: fields.pop(name) for name in TaskLine.__struct_fields__}
    told["state"] = TaskState(told["state"])
    return TaskLine(**told)


def states_of(tx: Tx, dag_run_id: int, task_ids: Sequence[str]) -> dict[str, TaskState]:
    """Return the states of these tasks of a run."""
    found: dict[str, TaskState] = {}
    for part in chunks(task_ids):
        statement = select(_C.task_id, _C.state).where(_C.dag_run_id == dag_run_id, _C.task_id.in_(part))
        found |= {name: TaskState(state) for name, state in tx.connection.execute(statement)}
    return found


# --- the verbs -----------------------------------------------------------------------------------


class DagInspection(Verbs):
    """The verbs that look at DAGs, runs, tasks and pools."""

    @reading
    def dags(self, tx: Tx, *, is_paused: bool | None = None, limit: int = LIST_DAGS_MAX) -> list[DagLine]:
        """Return the DAGs that some file has, by name, and then the files that hold none and have an error."""
        statement = _DAGS.order_by(dag.c.name).limit(min(limit, LIST_DAGS_MAX))
        if is_paused is not None:
            statement = statement.where(dag.c.is_paused.is_(is_paused))
        lines = [_line_of(row) for row in tx.connection.execute(statement)]
        if is_paused is None and len(lines) < limit:
            lines += _broken_files(tx, limit - len(lines))
        return lines

    @reading
    def dag(self, tx: Tx, name: str) -> tuple[DagLine, DagSpec]:
        """Return a DAG and its spec. Raises `NoSuchRow`, which names those of like name."""
        row = tx.connection.execute(_DAGS.where(dag.c.name == name)).first()
        if row is None:
            raise _no_such_dag(tx, name)
        spec = read_spec(name, row.spec)
        return _dag_line(row, spec), spec

    @reading
    def runs(
        self,
        tx: Tx,
        *,
        dag: str | None = None,
        states: Sequence[str] = (),
        since: datetime | None = None,
        beyond_id: int | None = None,
        limit: int = ROWS_PER_PAGE_MAX,
    ) -> list[RunLine]:
        """Return runs beyond an id, newest first. ``since``: created no earlier. Raises `NoSuchRow` for the DAG."""
        where: list[ColumnElement[bool]] = []
        if dag is not None:
            where.append(dag_run.c.dag_id == _dag_id(tx, dag))
        if states:
            where.append(RUN_STATE.element.in_(states))
        if since is not None:
            where.append(dag_run.c.created_date >= since)
        if beyond_id is not None:
            where.append(dag_run.c.id < beyond_id)
        statement = select(*_RUN_COLUMNS).select_from(_RUNS).where(and_(True, *where))
        rows = tx.connection.execute(statement.order_by(dag_run.c.id.desc()).limit(limit)).all()
        counts = _state_counts(tx, [row.id for row in rows])
        return [RunLine(**dict(row._mapping), tasks=counts.get(row.id, {})) for row in rows]

    @reading
    def run(self, tx: Tx, dag: str, run_id: str) -> RunDetail:
        """Return all that is known of a run; ``latest`` is the newest of its DAG. Raises `NoSuchRow`."""
        dag_run_id = run_id_of(tx, dag, run_id)
        columns = (dag_run.c.conf, dag_run.c.data_interval_start, dag_run.c.data_interval_end, dag_run.c.needs_look)
        statement = select(*_RUN_COLUMNS, *columns).select_from(_RUNS).where(dag_run.c.id == dag_run_id)
        fields = dict(tx.connection.execute(statement).one()._mapping)
        conf, start, end, needs_look = (fields.pop(column.name) for column in columns)
        line = RunLine(**fields, tasks=_state_counts(tx, [dag_run_id]).get(dag_run_id, {}))
        events = tx.connection.execute(
            select(dag_run_event.c.trigger_event_id, asset.c.name, dag_run_event.c.is_superseded)
            .select_from(dag_run_event.join(asset))
            .where(dag_run_event.c.dag_run_id == dag_run_id)
            .order_by(dag_run_event.c.trigger_event_id)
            .limit(RUN_EVENTS_MAX)
        )
        made_for = tuple((id_, name, bool(is_superseded)) for id_, name, is_superseded in events)
        return RunDetail(line, None if conf is None else bytes(conf), start, end, bool(needs_look), made_for)

    @reading
    def tasks(
        self,
        tx: Tx,
        *,
        dag: str | None = None,
        run_id: str | None = None,
        states: Iterable[TaskState] = (),
        since: datetime | None = None,
        beyond_id: int | None = None,
        limit: int = ROWS_PER_PAGE_MAX,
    ) -> list[TaskLine]:
        """Return tasks, newest first; those of one run in its order. Raises `NoSuchRow` for DAG or run.

        ``since``: of runs created no earlier. ``beyond_id``: those that come after it.
        """
        is_of_run = run_id is not None
        where: list[ColumnElement[bool]] = []
        if dag is not None and run_id is not None:
            where.append(_C.dag_run_id == run_id_of(tx, dag, run_id))
        elif dag is not None:
            where.append(dag_run.c.dag_id == _dag_id(tx, dag))
        some_states = [*states]
        if some_states:
            where.append(task_rows.is_in(*some_states))
        if since is not None:
            where.append(dag_run.c.created_date >= since)
        if beyond_id is not None:
            where.append(_C.id > beyond_id if is_of_run else _C.id < beyond_id)
        order = _C.id if is_of_run else _C.id.desc()
        statement = select(*_TASK_COLUMNS).select_from(_TASKS).where(and_(True, *where)).order_by(order).limit(limit)
        return [_task_line_of(dict(row._mapping)) for row in tx.connection.execute(statement)]

    @reading
    def find_task(self, tx: Tx, dag: str, run_id: str, task_id: str) -> TaskRef:
        """Return the task of these names; ``latest`` is the newest run.

        Raises `NoSuchRow`, which says which of the names is wrong and what may be meant.
        """
        dag_run_id = run_id_of(tx, dag, run_id)
        row = tx.connection.execute(
            select(_C.id, dag_run.c.run_id)
            .select_from(task_instance.join(dag_run))
            .where(_C.dag_run_id == dag_run_id, _C.task_id == task_id)
        ).first()
        if row is None:
            names = select(_C.task_id).where(_C.dag_run_id == dag_run_id).order_by(_C.id)
            raise NoSuchRow("task", task_id, of=f"the run {run_id} of {dag}", near=_near(tx, task_id, names))
        return TaskRef(row.id, dag_run_id, dag, row.run_id, task_id)

    @reading
    def task(self, tx: Tx, task: TaskRef) -> TaskDetail:
        """Return all that is known of a task."""
        row = tx.connection.execute(
            select(
                *_TASK_COLUMNS,
                *(_C.priority_weight, _C.pool_slots, _C.retries, _C.next_method, _C.created_date),
                *(_C.scheduled_at, _C.deadline, dag.c.spec),
            )
            .select_from(_TASKS)
            .where(_C.id == task.id)
        ).one()
        fields = dict(row._mapping)
        line = _task_line_of(fields)
        data, spec = fields.pop("spec"), None
        with contextlib.suppress(SpecUnreadable):
            spec = task_spec(task.dag, data, task.task_id)
        states = {} if spec is None else states_of(tx, task.dag_run_id, spec.upstream)
        values = tx.connection.execute(
            select(xcom.c.key, xcom.c.value).where(xcom.c.task_instance_id == task.id).order_by(xcom.c.key)
        )
        return TaskDetail(
            line=line,
            operator=None if spec is None else spec.operator,
            upstream=None if spec is None else {name: states.get(name) for name in spec.upstream},
            trigger_rule=None if spec is None else spec.trigger_rule,
            xcoms={key: bytes(value) for key, value in values},
            **fields,
        )

    @reading
    def pools(self, tx: Tx) -> list[PoolLine]:
        """Return the pools by name, and how much of each is in use."""
        holding, waits = _C.triggerer_id.is_not(None), task_rows.is_in(TaskState.SCHEDULED)
        # Each count goes by its partial index; together they would read the whole table.
        used = dict[str, tuple[int, int]]()
        for name, slots, count in tx.connection.execute(
            select(_C.pool, func.sum(_C.pool_slots), func.count()).where(holding).group_by(_C.pool)
        ):
            used[name] = (int(slots), count)
        waiting_rows = tx.connection.execute(select(_C.pool, func.count()).where(waits).group_by(_C.pool))
        waiting: dict[str, int] = {name: count for name, count in waiting_rows}
        rows = tx.connection.execute(select(pool.c.name, pool.c.slots).order_by(pool.c.name))
        return [PoolLine(name, slots, *used.get(name, (0, 0)), waiting.get(name, 0)) for name, slots in rows]
