"""Read-only queries about DAGs and pools. Every list has a limit."""

from __future__ import annotations

import difflib
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import FromClause, Label, Select, and_, case, func, select

from headgate.protocol.messages.dags import DagSpec, TaskState
from headgate.protocol.messages.schedules import AssetSchedule, CronSchedule, EventSchedule, SignalSchedule
from headgate.scheduling.signal_rules import rule_text
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import DagRemoved, NoSuchRow, SpecUnreadable
from headgate.store.tables import (
    dag,
    dag_run,
    dag_signal,
    import_error,
    pool,
    task_instance,
    waiting_event,
)
from headgate.store.tasks import task_rows
from headgate.store.tasks.graphs import read_spec

ROWS_PER_PAGE_MAX = 1000  # of one list verb, unless it says otherwise: callers ask for the next page
NEWEST_SHOWN = 100  # rows of a list that grows for ever, if the caller does not say
LIST_DAGS_MAX = 10_000  # in one list, which decodes the spec of each
NAMES_COMPARED_MAX = 2000  # with a name that was not found, to say which one was meant: some tens of milliseconds
NEAR_NAMES_MAX = 3

_C = task_instance.c
# A run that waits, because its DAG has as many active runs as it may have, is shown as queued.
IS_PRESENT = dag_run.c.removed_at.is_(None)  # what is left of a run that is being deleted is shown nowhere


def state_of(run: FromClause) -> Label[str]:
    """Return the state of runs as it is shown."""
    waits = and_(run.c.state == "running", run.c.started_at.is_(None))
    return case((waits, "queued"), else_=run.c.state).label("state")


RUN_STATE = state_of(dag_run)


_OF_FILE = "file:"


class DagLine(msgspec.Struct, frozen=True):
    """One DAG in a list; ``name`` is None for a file that could never be parsed.

    ``waiting_events``: events of its assets, or signals, that have had no run yet. ``next_run_at``: by its cron
    schedule. ``import_error``: the error of its file, with the traceback; the DAG is the last valid version.
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

    @property
    def place(self) -> str:
        """Where it is in a list: no name of a DAG has a colon."""
        return f"{_OF_FILE}{self.file}" if self.name is None else self.name


class PoolLine(msgspec.Struct, frozen=True):
    """One pool: how many slots it has, and how many are in use by how many tasks; ``waiting`` tasks are scheduled."""

    name: str
    slots: int
    used: int
    tasks: int
    waiting: int


# --- DAGs ----------------------------------------------------------------------------------------


def _contract_text(schedule: EventSchedule) -> str:
    what = "event" if isinstance(schedule, AssetSchedule) else "signal"
    if schedule.contract == "batch":
        late = "" if schedule.batch_seconds is None else f" or after {schedule.batch_seconds:g} s"
        return f"{schedule.batch_count} {what}s{late} of"
    of_all = "an event of all of" if what == "event" else "a signal of all of"
    return {"all": of_all, "each": f"each {what} of", "latest": f"the latest {what} of"}[schedule.contract]


def schedule_text(spec: DagSpec) -> str:
    """Return the schedule of a DAG as text."""
    match spec.schedule:
        case None:
            return "none"
        case CronSchedule(cron, timezone):
            return cron if timezone == "UTC" else f"{cron} ({timezone})"
        case AssetSchedule():
            return f"{_contract_text(spec.schedule)} {', '.join(spec.schedule.assets)}"
        case SignalSchedule(rules=rules):
            return f"{_contract_text(spec.schedule)} {'; '.join(map(rule_text, rules))}"


# Each for the DAGs of one page alone, from an index.
_of_dag = dag_run.c.dag_id == dag.c.id
_NEWEST_RUN = select(func.max(dag_run.c.id)).where(_of_dag).correlate(dag).scalar_subquery()
_ACTIVE = select(func.count(dag_run.c.started_at)).where(_of_dag, dag_run.c.ended_at.is_(None))
_UNFINISHED = select(func.count()).where(_of_dag, dag_run.c.ended_at.is_(None))
_WAITING = select(func.count()).where(waiting_event.c.dag_id == dag.c.id)
_SIGNALS = select(func.count()).where(dag_signal.c.dag_id == dag.c.id, dag_signal.c.dag_run_id.is_(None))
_active, _unfinished, _events, _signals = (
    count.correlate(dag).scalar_subquery() for count in (_ACTIVE, _UNFINISHED, _WAITING, _SIGNALS)
)
_newest_run = dag_run.alias("newest_run")
_DAGS = (
    select(
        *(dag.c.name, dag.c.spec, dag.c.spec_hash, dag.c.is_paused, _active.label("active")),
        *((_unfinished - _active).label("queued"), (_events + _signals).label("events")),
        *(dag.c.next_run_at, _newest_run.c.run_id, state_of(_newest_run), _newest_run.c.created_date),
        *(dag.c.file, dag.c.parsed_at, import_error.c.error),
    )
    .select_from(
        dag.outerjoin(import_error, import_error.c.file == dag.c.file).outerjoin(
            _newest_run, and_(_newest_run.c.id == _NEWEST_RUN, _newest_run.c.removed_at.is_(None))
        )
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


def _broken_files(tx: Tx, name: str | None, beyond: str, limit: int) -> list[DagLine]:
    holds_dags = select(dag.c.file).where(dag.c.removed_at.is_(None))
    statement = (
        select(import_error.c.file, import_error.c.error)
        .where(import_error.c.file.not_in(holds_dags), import_error.c.file > beyond)
        .order_by(import_error.c.file)
        .limit(limit)
    )
    if name is not None:
        statement = statement.where(import_error.c.file.icontains(name, autoescape=True))
    rows = tx.connection.execute(statement)
    return [DagLine(None, "", False, 0, 0, 0, 0, None, None, None, None, file, None, error) for file, error in rows]


def _no_such_dag(tx: Tx, name: str) -> NoSuchRow:
    removed = select(dag.c.file).where(dag.c.name == name, dag.c.removed_at.is_not(None))
    if (file := tx.connection.execute(removed).scalar_one_or_none()) is not None:
        return DagRemoved(name, file)
    statement = select(dag.c.name).where(dag.c.removed_at.is_(None)).order_by(dag.c.name)
    return NoSuchRow("DAG", name, near=near_names(tx, name, statement))


def near_names(tx: Tx, name: str, statement: Select[Any]) -> list[str]:
    """Return the names, of those that the statement finds, that may have been meant by ``name``."""
    names: list[str] = list(tx.connection.execute(statement.limit(NAMES_COMPARED_MAX)).scalars())
    # By the beginning first, for a name that is only incomplete.
    begin = [one for one in names if name and one.startswith(name)][:NEAR_NAMES_MAX]
    return begin or difflib.get_close_matches(name, names, n=NEAR_NAMES_MAX)


def dag_id_of(tx: Tx, name: str) -> int:
    """Return the id of a DAG, removed or not, because the runs of a removed one stay."""
    found = tx.connection.execute(select(dag.c.id).where(dag.c.name == name)).scalar_one_or_none()
    if found is None:
        raise _no_such_dag(tx, name)
    return int(found)


# --- the verbs -----------------------------------------------------------------------------------


class DagInspection(Verbs):
    """The queries about DAGs and pools."""

    @reading
    def dags(
        self,
        tx: Tx,
        *,
        is_paused: bool | None = None,
        is_broken: bool = False,
        name: str | None = None,
        beyond: str | None = None,
        limit: int = LIST_DAGS_MAX,
    ) -> list[DagLine]:
        """Return the DAGs that are in some file, by name, then the files with an error and without a DAG.

        ``is_broken``: of files with an error alone. ``name`` is a part of the name, in any case of its letters.
        ``beyond``: what comes after the line with this ``place``.
        """
        is_file, beyond_file = False, ""
        if beyond is not None and beyond.startswith(_OF_FILE):
            is_file, beyond_file = True, beyond.removeprefix(_OF_FILE)
        statement = _DAGS.order_by(dag.c.name).limit(min(limit, LIST_DAGS_MAX))
        if is_paused is not None:
            statement = statement.where(dag.c.is_paused.is_(is_paused))
        if is_broken:
            statement = statement.where(import_error.c.error.is_not(None))
        if name is not None:
            statement = statement.where(dag.c.name.icontains(name, autoescape=True))
        if beyond is not None:
            statement = statement.where(dag.c.name > beyond)
        lines = [] if is_file else [_line_of(row) for row in tx.connection.execute(statement)]
        if is_paused is None and len(lines) < limit:
            lines += _broken_files(tx, name, beyond_file, limit - len(lines))
        return lines

    @reading
    def dag(self, tx: Tx, name: str) -> tuple[DagLine, DagSpec]:
        """Return a DAG and its spec. Raises `NoSuchRow`, which has similar names."""
        row = tx.connection.execute(_DAGS.where(dag.c.name == name)).first()
        if row is None:
            raise _no_such_dag(tx, name)
        spec = read_spec(name, row.spec)
        return _dag_line(row, spec), spec

    @reading
    def pools(self, tx: Tx) -> list[PoolLine]:
        """Return the pools by name, with the slots in use."""
        holding, waits = _C.triggerer_id.is_not(None), task_rows.is_in(TaskState.SCHEDULED)
        # Each count uses its own partial index; a single query would read the whole table.
        used = dict[str, tuple[int, int]]()
        for name, slots, count in tx.connection.execute(
            select(_C.pool, func.sum(_C.pool_slots), func.count()).where(holding).group_by(_C.pool)
        ):
            used[name] = (int(slots), count)
        waiting_rows = tx.connection.execute(select(_C.pool, func.count()).where(waits).group_by(_C.pool))
        waiting: dict[str, int] = {name: count for name, count in waiting_rows}
        rows = tx.connection.execute(select(pool.c.name, pool.c.slots).order_by(pool.c.name))
        return [PoolLine(name, slots, *used.get(name, (0, 0)), waiting.get(name, 0)) for name, slots in rows]
