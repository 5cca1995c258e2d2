"""Read-only queries about runs and tasks. Every list has a limit.

Lists are newest first, in pages: the next page begins at the id of the last row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Label, and_, func, null, select

from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.scheduling import map_states
from headgate.scheduling.states import TERMINAL
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import NoSuchInstance, NoSuchRow, SpecUnreadable
from headgate.store.ids import DagRunId, Instances, TaskInstanceId, instance_name, instances_named
from headgate.store.inspect import maps
from headgate.store.inspect.dags import IS_PRESENT, ROWS_PER_PAGE_MAX, RUN_STATE, dag_id_of, near_names
from headgate.store.tables import asset, dag, dag_run, dag_run_event, task_instance, xcom
from headgate.store.tasks import run_states, task_rows
from headgate.store.tasks.graphs import read_spec
from headgate.store.tasks.run_states import HELD

RUN_EVENTS_MAX = 1000  # of one run that are shown
UNORDERED_RUNS_MAX = 1000  # transactions that overlap commit ids that are not in the order of their times
LATEST = "latest"  # in place of a run_id: the newest run of the DAG

_C = task_instance.c


class RunLine(msgspec.Struct, frozen=True):
    """One run, ``queued`` until it may start. ``tasks`` has the number of its tasks by state."""

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
    """All details of a run. ``conf`` is encoded; ``events`` are those it was created for: id, asset, superseded."""

    line: RunLine
    conf: bytes | None
    data_interval_start: datetime | None
    data_interval_end: datetime | None
    needs_look: bool
    events: tuple[tuple[int, str, bool], ...]


class TaskLine(msgspec.Struct, frozen=True):
    """One task of one run. ``triggerer_id`` is the epoch of the supervisor whose worker has it.

    One with a ``map_index`` is an instance of a mapped task. The task itself has the number of its ``instances`` by
    state, and, once that is known, of all that it is to have, its ``map_length``; its state is that of all of them.
    ``map_name`` is the name of an instance of a mapped task, if it has one. An ``is_endless`` one has lost its worker
    ``moves`` times in a row, and no worker gets it before ``begins_at``.
    """

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
    map_name: str | None = None
    map_index: int = -1
    map_length: int | None = None
    instances: dict[str, int] | None = None
    is_endless: bool = False
    moves: int = 0
    begins_at: datetime | None = None
    retries: int = 0

    @property
    def name(self) -> str:
        """The name for users: ``enrich[]`` for a mapped task as a whole, ``enrich[3]`` for an instance."""
        return f"{self.task_id}[]" if self.is_map else instance_name(self.task_id, self.map_index)

    @property
    def is_map(self) -> bool:
        """Whether it is a mapped task of which something is known already."""
        return self.instances is not None

    @property
    def error(self) -> str | None:
        """The last error, but for a task that was stopped, and counts as well ended: that says what has stopped it."""
        is_reason = self.state in (TaskState.SUCCESS, TaskState.SKIPPED) and not self.is_map
        return None if is_reason else self.last_error


class TaskDetail(msgspec.Struct, frozen=True):
    """All details of a task. ``upstream`` and ``trigger_rule`` are None if its DAG no longer has it.

    ``waits_in_database``: it waits for a signal with neither a worker nor a trigger, so that nothing writes a log.
    """

    line: TaskLine
    operator: str | None
    upstream: dict[str, str | None] | None
    trigger_rule: str | None
    priority_weight: int
    pool_slots: int
    next_method: str | None
    created_date: datetime
    scheduled_at: datetime | None
    deadline: datetime | None
    xcoms: dict[str, bytes]
    waits_in_database: bool = False

    @property
    def no_log(self) -> str | None:
        """Why nothing can have written a log of it; None if what has run it may have."""
        line = self.line
        if line.is_map:
            return f"a mapped task has the logs of its instances: name one of them, such as {line.task_id}[0]"
        if line.try_number > 1:
            return None
        if self.waits_in_database and line.state in (TaskState.DEFERRED, TaskState.SUCCESS):
            return "it waits for its signal in the database: nothing runs that could write a log"
        if line.started_at is not None:
            return None
        if line.state in TERMINAL and line.try_number == 0:
            return "it has ended without having begun"
        return "it has not begun yet" if line.state in (TaskState.NONE, TaskState.SCHEDULED) else None


class TaskRef(msgspec.Struct, frozen=True):
    """A task that was found by its names, or an instance of a mapped one."""

    id: TaskInstanceId
    dag_run_id: DagRunId
    dag: str
    run_id: str
    task_id: str
    map_index: int = -1

    @property
    def name(self) -> str:
        """The name for users."""
        return instance_name(self.task_id, self.map_index)


# --- runs ----------------------------------------------------------------------------------------

_RUNS = dag_run.join(dag)
_RUN_COLUMNS = (
    *(dag_run.c.id, dag.c.name.label("dag"), dag_run.c.run_id, dag_run.c.run_type, RUN_STATE),
    *(dag_run.c.logical_date, dag_run.c.created_date, dag_run.c.started_at, dag_run.c.ended_at),
)


def _in_states(states: Sequence[str]) -> ColumnElement[bool]:
    """Return the condition that a run is shown in one of these states, so that the index of states is used."""
    stored = {"running" if state == "queued" else state for state in states}
    return and_(dag_run.c.state.in_(sorted(stored)), RUN_STATE.element.in_(states))


def _id_before(tx: Tx, since: datetime) -> int:
    """Return an id that no run has passed which was created since a moment: by halves, because ids follow the times."""
    low, high = 0, int(tx.connection.execute(select(func.coalesce(func.max(dag_run.c.id), 0))).scalar_one())
    while high - low > UNORDERED_RUNS_MAX:
        middle = (low + high) // 2
        from_there = select(dag_run.c.id, dag_run.c.created_date).where(dag_run.c.id >= middle).order_by(dag_run.c.id)
        row = tx.connection.execute(from_there.limit(1)).one()
        if row.created_date < since:
            low = row.id
        else:
            high = middle - 1
    return max(0, low - UNORDERED_RUNS_MAX)


def run_id_of(tx: Tx, dag_name: str, run_id: str) -> DagRunId:
    """Return the id of the row of a run; ``latest`` is the newest of its DAG. Raises `NoSuchRow`."""
    dag_id = dag_id_of(tx, dag_name)
    of_dag = select(dag_run.c.id).where(dag_run.c.dag_id == dag_id, IS_PRESENT)
    found = tx.connection.execute(of_dag.where(dag_run.c.run_id == run_id)).scalar_one_or_none()
    if found is None and run_id == LATEST:
        found = tx.connection.execute(of_dag.order_by(dag_run.c.id.desc()).limit(1)).scalar_one_or_none()
        if found is None:
            raise NoSuchRow("run", LATEST, of=f"the DAG {dag_name}, which has no runs yet")
    if found is None:
        names = select(dag_run.c.run_id).where(dag_run.c.dag_id == dag_id, IS_PRESENT).order_by(dag_run.c.id.desc())
        raise NoSuchRow("run", run_id, of=f"the DAG {dag_name}", near=near_names(tx, run_id, names))
    return DagRunId(found)


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


def _with_instances(line: TaskLine, counts: maps.Counts | None) -> TaskLine:
    """Return the line of a task itself with what its instances are, if it is mapped."""
    if counts is None and line.map_length is None:
        return line
    instances = dict(sorted((counts or {}).items()))
    state = map_states.state_with(line.state, map(TaskState, instances))
    length = None if line.map_length == HELD else line.map_length
    # Its row has ended when all are made, which is not the end of the task.
    return msgspec.structs.replace(line, state=state, instances=instances, map_length=length, ended_at=None)


def task_spec(name: str, data: bytes, task_id: str) -> TaskSpec | None:
    """Return the spec of a task in a stored DAG; None if the DAG no longer has it. Raises `SpecUnreadable`."""
    return next((task for task in read_spec(name, data).tasks if task.task_id == task_id), None)


# --- by name -------------------------------------------------------------------------------------


def _find(tx: Tx, dag_name: str, run_id: str, name: str) -> list[TaskRef]:
    dag_run_id = run_id_of(tx, dag_name, run_id)
    named = instances_named(name)
    wanted = [name, name.removesuffix("[]"), *([] if named is None else [named.task_id])]
    rows = tx.connection.execute(
        select(_C.id, _C.task_id, dag_run.c.run_id)
        .select_from(task_instance.join(dag_run))
        .where(task_rows.unmapped_of(dag_run_id), _C.task_id.in_(wanted))
    )
    row = min(rows, key=lambda row: wanted.index(row.task_id), default=None)
    if row is None:
        names = select(_C.task_id).where(task_rows.unmapped_of(dag_run_id)).order_by(_C.id)
        near = near_names(tx, wanted[-1], names)
        found_id = tx.connection.execute(select(dag_run.c.run_id).where(dag_run.c.id == dag_run_id)).scalar_one()
        raise NoSuchRow("task", name, of=f"the run {found_id} of {dag_name}", near=near)  # which `latest` is
    if named is None or row.task_id != named.task_id:
        return [TaskRef(row.id, dag_run_id, dag_name, row.run_id, row.task_id)]
    of_task = (_C.dag_run_id == dag_run_id, maps.IS_INSTANCE, _C.task_id == named.task_id)
    between = select(_C.id, _C.map_index).where(*of_task, _C.map_index.between(named.first, named.last))
    found = tx.connection.execute(between.order_by(_C.map_index)).all()
    if not found or len(found) != named.last - named.first + 1:
        newest = tx.connection.execute(select(func.max(_C.map_index)).where(*of_task)).scalar_one()
        raise NoSuchInstance(named.task_id, _what_it_has(tx, dag_name, named, newest))
    return [TaskRef(id_, dag_run_id, dag_name, row.run_id, named.task_id, index) for id_, index in found]


def _what_it_has(tx: Tx, dag_name: str, named: Instances, newest: int | None) -> str:
    """Return why a task does not have the instances that were named; they have no gap."""
    if named.first > named.last:
        return f"[{named.first}-{named.last}] ends before it begins"
    if newest is None:
        spec = None
        with contextlib.suppress(SpecUnreadable):
            data = tx.connection.execute(select(dag.c.spec).where(dag.c.name == dag_name)).scalar_one()
            spec = task_spec(dag_name, data, named.task_id)
        return "is not mapped" if spec is None or spec.map is None else "has no instances yet"
    has = "one instance, 0" if newest == 0 else f"instances 0 to {newest}"
    return f"has {has}; there is no {max(named.first, newest + 1)}"


# --- the verbs -----------------------------------------------------------------------------------


class RunInspection(Verbs):
    """The queries about runs and tasks."""

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
        where: list[ColumnElement[bool]] = [IS_PRESENT]
        if dag is not None:
            where.append(dag_run.c.dag_id == dag_id_of(tx, dag))
        if states:
            where.append(_in_states(states))
        if since is not None:
            where += [dag_run.c.created_date >= since, dag_run.c.id > _id_before(tx, since)]
        if beyond_id is not None:
            where.append(dag_run.c.id < beyond_id)
        statement = select(*_RUN_COLUMNS).select_from(_RUNS).where(and_(True, *where))
        rows = tx.connection.execute(statement.order_by(dag_run.c.id.desc()).limit(limit)).all()
        counts = maps.counts_by_run(tx, [row.id for row in rows])
        return [RunLine(**dict(row._mapping), tasks=counts.get(row.id, {})) for row in rows]

    @reading
    def run(self, tx: Tx, dag: str, run_id: str) -> RunDetail:
        """Return all details of a run; ``latest`` is the newest of its DAG. Raises `NoSuchRow`."""
        dag_run_id = run_id_of(tx, dag, run_id)
        columns = (dag_run.c.conf, dag_run.c.data_interval_start, dag_run.c.data_interval_end, dag_run.c.needs_look)
        statement = select(*_RUN_COLUMNS, *columns).select_from(_RUNS).where(dag_run.c.id == dag_run_id)
        fields = dict(tx.connection.execute(statement).one()._mapping)
        conf, start, end, needs_look = (fields.pop(column.name) for column in columns)
        line = RunLine(**fields, tasks=maps.counts_by_run(tx, [dag_run_id]).get(dag_run_id, {}))
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
        each: bool = False,
    ) -> list[TaskLine]:
        """Return tasks, newest first; those of one run in its order. Raises `NoSuchRow` for DAG or run.

        A mapped task is one line, in ``states`` if a row of it is in one of them; with ``each`` its instances are lines
        in its place. ``since``: of runs created no earlier. ``beyond_id``: those that come after it.
        """
        is_of_run = run_id is not None
        where: list[ColumnElement[bool]] = [IS_PRESENT, maps.is_counted() if each else maps.IS_TASK]
        if dag is not None and run_id is not None:
            where.append(_C.dag_run_id == run_id_of(tx, dag, run_id))
        elif dag is not None:
            where.append(dag_run.c.dag_id == dag_id_of(tx, dag))
        some_states = [*states]
        if some_states:
            where.append(task_rows.is_in(*some_states) if each else maps.has_row_in(some_states))
        if since is not None:
            where.append(dag_run.c.created_date >= since)
        if beyond_id is not None:
            where.append(_C.id > beyond_id if is_of_run else _C.id < beyond_id)
        order = _C.id if is_of_run else _C.id.desc()
        columns = (*_TASK_COLUMNS, _C.dag_run_id)
        statement = select(*columns).select_from(_TASKS).where(and_(True, *where)).order_by(order).limit(limit)
        rows = tx.connection.execute(statement).all()
        lines = [_task_line_of(dict(row._mapping)) for row in rows]
        if each:
            return lines
        counts = maps.counts_of(tx, {row.dag_run_id for row in rows})
        return [
            _with_instances(line, counts.get((row.dag_run_id, line.task_id)))
            for line, row in zip(lines, rows, strict=True)
        ]

    @reading
    def instances(
        self,
        tx: Tx,
        task: TaskRef,
        *,
        states: Collection[TaskState] = (),
        name: str | None = None,
        beyond_index: int | None = None,
        limit: int = ROWS_PER_PAGE_MAX,
    ) -> list[TaskLine]:
        """Return the instances of a mapped task in their order, those beyond an index; none if it is not mapped.

        ``name`` is a part of the name that an instance was given, in any case of its letters.
        """
        where = [_C.dag_run_id == task.dag_run_id, _C.task_id == task.task_id, maps.IS_INSTANCE]
        if states:
            where.append(task_rows.is_in(*states))
        if name is not None:
            where.append(_C.map_name.icontains(name, autoescape=True))
        if beyond_index is not None:
            where.append(_C.map_index > beyond_index)
        statement = select(*_TASK_COLUMNS).select_from(_TASKS).where(and_(True, *where))
        rows = tx.connection.execute(statement.order_by(_C.map_index).limit(limit))
        return [_task_line_of(dict(row._mapping)) for row in rows]

    @reading
    def find_tasks(self, tx: Tx, dag: str, run_id: str, name: str) -> list[TaskRef]:
        """Return the task of this name, or the instances of a mapped one; ``latest`` is the newest run.

        ``enrich[17]`` names one instance, ``enrich[10-19]`` ten of them, ``enrich`` and ``enrich[]`` the task itself.
        Raises `NoSuchRow`, with the name that is wrong and similar ones, and `NoSuchInstance`.
        """
        return _find(tx, dag, run_id, name)

    @reading
    def find_task(self, tx: Tx, dag: str, run_id: str, name: str) -> TaskRef:
        """Return the only task, or instance, of this name; see `find_tasks`, which also has the errors."""
        found = _find(tx, dag, run_id, name)
        if len(found) > 1:
            raise NoSuchInstance(name, f"are {len(found):,} instances: name one of them, such as {found[0].name}")
        return found[0]

    @reading
    def task(self, tx: Tx, task: TaskRef) -> TaskDetail:
        """Return all details of a task."""
        row = tx.connection.execute(
            select(
                *_TASK_COLUMNS,
                *(_C.priority_weight, _C.pool_slots, _C.next_method, _C.created_date),
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
        states = {} if spec is None else run_states.read(tx, task.dag_run_id).of_tasks()
        if line.map_index < 0:
            of_it = maps.counts_of(tx, [task.dag_run_id], task.task_id)
            line = _with_instances(line, of_it.get((task.dag_run_id, task.task_id)))
        values = tx.connection.execute(
            select(xcom.c.key, xcom.c.value).where(xcom.c.task_instance_id == task.id).order_by(xcom.c.key)
        )
        return TaskDetail(
            line=line,
            operator=None if spec is None else spec.operator,
            upstream=None if spec is None else {name: states.get(name) for name in spec.upstream},
            trigger_rule=None if spec is None else spec.trigger_rule,
            xcoms={key: bytes(value) for key, value in values},
            waits_in_database=spec is not None and spec.start_trigger is not None and bool(spec.start_trigger.signal),
            **fields,
        )
