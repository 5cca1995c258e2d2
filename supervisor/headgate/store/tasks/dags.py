"""DAGs as their files define them, and their runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal
from uuid import uuid4

import msgspec
from sqlalchemy import and_, delete, func, select, true, update

from headgate.protocol.messages.dags import (
    DEFAULT_POOL,
    MOMENT_S_MAX,
    MOMENT_S_MIN,
    POOL_SLOTS_MAX,
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
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, acting, leased, reading
from headgate.store.errors import NoSuchRow, ValueRefused
from headgate.store.ids import DagRowId, DagRunId, TaskInstanceId
from headgate.store.signals import dag_signals, subscriptions, waits
from headgate.store.tables import dag, dag_run, import_error, pool, task_instance
from headgate.store.tasks import run_states, schedules, task_rows, task_streams
from headgate.store.tasks.graphs import read_spec
from headgate.store.triggers import assets
from headgate.store.triggers.dead_letters import storable_text
from headgate.store.triggers.watchers import check_name

DEFAULT_POOL_SLOTS = 128  # of `DEFAULT_POOL`, until a user changes it: more than the workers of a machine
FILE_CHARS_MAX = 4096  # of a path, as Linux has it
RunType = Literal["manual", "scheduled", "asset", "signal"]

_NEW_TASK = Kind(
    task_instance,
    (
        *("dag_run_id", "task_id", "map_index", "tries_max", "retries", "retry_delay_s", "retry_exponential_backoff"),
        *("max_retry_delay_s", "execution_timeout_s", "priority_weight", "queue", "pool", "pool_slots"),
        *("created_date", "active_max", "is_endless"),
    ),
)


class NewRun(msgspec.Struct, frozen=True):
    """A run to be created. ``interval`` are start and end of its data interval; ``conf`` is encoded.

    ``creator`` is the task that asks for it, None for anybody else.
    """

    run_id: str
    run_type: RunType
    logical_date: datetime | None = None
    conf: bytes | None = None
    interval: tuple[datetime, datetime] | None = None
    creator: str | None = None


class RunStanding(msgspec.Struct, frozen=True):
    """The state of a run and of its tasks; ``run_id`` is None if the DAG has no such run.

    ``state`` is ``queued`` for a run that waits for others of its DAG to end, else that of its row.
    """

    run_id: str | None = None
    state: str = ""
    tasks: dict[str, TaskState] = {}


class DagVerbs(Verbs):
    """The verbs for DAGs and their runs."""

    @leased
    def save_file(self, tx: LeasedTx, file: str, specs: Sequence[DagSpec]) -> None:
        """Record the DAGs of a parsed file; those it no longer defines are deactivated.

        A DAG of the same name in another file moves to this one: the file parsed last has it. Changes of a DAG are
        applied to its runs, to the date of its next run, and to what it has runs for.
        """
        check_name(file, "the path of a DAG file", chars_max=FILE_CHARS_MAX)
        for spec in sorted(specs, key=lambda spec: spec.dag_id):
            _save_dag(tx, file, spec)
        # The pool of tasks that name none. It is created here, because a dispatch may not wait for one that creates it.
        default = insert_into(tx.connection, pool).values(name=DEFAULT_POOL, slots=DEFAULT_POOL_SLOTS)
        tx.connection.execute(default.on_conflict_do_nothing())
        gone = [dag.c.file == file, dag.c.removed_at.is_(None), dag.c.name.not_in([spec.dag_id for spec in specs])]
        tx.connection.execute(update(dag).where(*gone).values(removed_at=tx.now))
        tx.connection.execute(delete(import_error).where(import_error.c.file == file))

    @leased
    def save_import_error(self, tx: LeasedTx, file: str, error: str) -> None:
        """Record why a file cannot be parsed, until it can be. Its DAGs stay as they were when it was parsed last."""
        check_name(file, "the path of a DAG file", chars_max=FILE_CHARS_MAX)
        columns = {"error": storable_text(error, ERROR_CHARS_MAX), "stored_at": tx.now}
        statement = insert_into(tx.connection, import_error).values(file=file, **columns)
        tx.connection.execute(statement.on_conflict_do_update(index_elements=[import_error.c.file], set_=columns))

    @reading
    def dag_files(self, tx: Tx) -> dict[str, list[str]]:
        """Return the files that have DAGs or an import error, by path, each with the ids of its DAGs."""
        errors = tx.connection.execute(select(import_error.c.file)).scalars()
        found: dict[str, list[str]] = {file: [] for file in errors}
        for row in tx.connection.execute(select(dag.c.file, dag.c.name).where(dag.c.removed_at.is_(None))):
            found.setdefault(row.file, []).append(row.name)
        return found

    @acting
    def set_paused(self, tx: Tx, dag_id: str, *, is_paused: bool) -> None:
        """Pause a DAG, or unpause it. No run is created and no task begins in a paused DAG. Raises `NoSuchRow`."""
        tx.notify()
        present = (dag.c.name == dag_id, dag.c.removed_at.is_(None))
        found = select(dag.c.id, dag.c.is_paused).where(*present).with_for_update(key_share=True)
        row = tx.connection.execute(found).first()
        if row is None:
            raise NoSuchRow("DAG", dag_id)
        dag_row = row.id
        tx.connection.execute(update(dag).where(dag.c.id == dag_row).values(is_paused=is_paused))
        tx.act(
            "dags pause" if is_paused else "dags unpause",
            f"DAG {dag_id}",
            before={"is_paused": row.is_paused},
            after={"is_paused": is_paused},
            changed=row.is_paused != is_paused,
        )
        if not is_paused:
            _mark_active_runs(tx, dag_row)

    @acting
    def create_run(
        self,
        tx: Tx,
        dag_id: str,
        run_id: str,
        *,
        run_type: RunType = "manual",
        logical_date: datetime | None = None,
        conf: bytes | None = None,
        interval: tuple[datetime, datetime] | None = None,
        creator: str | None = None,
    ) -> DagRunId | None:
        """Create a run with all tasks of its DAG; return its id, None if the DAG has a run of this name already.

        A task that asks for the run that it has created before, in an earlier try, is given that one.
        It begins when a scheduler evaluates it, unless its DAG has as many active runs as it may have. ``conf`` is
        encoded. If several supervisors create the same run, one of them does. Raises `NoSuchRow`, `BadName` and
        `ValueRefused`.
        """
        tx.notify()
        check_name(run_id, "the run_id")
        if logical_date is not None and not MOMENT_S_MIN <= logical_date.timestamp() <= MOMENT_S_MAX:
            # PostgreSQL would store it, and return it in its own time zone, where the date may not exist.
            raise ValueRefused(f"the logical date must lie in the years 2 to 9998: {logical_date.isoformat()}")
        row = tx.connection.execute(
            select(dag.c.id, dag.c.spec).where(dag.c.name == dag_id, dag.c.removed_at.is_(None))
        ).first()
        if row is None:
            raise NoSuchRow("DAG", dag_id)
        run = NewRun(run_id, run_type, logical_date, conf, interval, creator)
        created = insert_run(tx, row.id, read_spec(dag_id, row.spec), run)
        about = {"logical_date": None if logical_date is None else logical_date.isoformat(), "conf": conf is not None}
        after = None if created is None else about
        tx.act("dags trigger", f"run {dag_id} {run_id}", after=after, changed=created is not None)
        if created is None and creator is not None:
            own = select(dag_run.c.id).where(dag_run.c.dag_id == row.id, dag_run.c.run_id == run_id)
            return tx.connection.execute(own.where(dag_run.c.creator == creator)).scalar_one_or_none()
        return created

    @reading
    def run_standing(
        self, tx: Tx, dag_id: str, *, run_id: str | None = None, logical_date: datetime | None = None
    ) -> RunStanding | None:
        """Return the state of the newest run of a DAG with this run_id and logical date; None if there is no such DAG.

        A DAG that no file defines any more still has its runs.
        """
        dag_row = tx.connection.execute(select(dag.c.id).where(dag.c.name == dag_id)).scalar_one_or_none()
        if dag_row is None:
            return None
        which = [dag_run.c.dag_id == dag_row, dag_run.c.removed_at.is_(None)]
        if run_id is not None:
            which.append(dag_run.c.run_id == run_id)
        if logical_date is not None:
            which.append(dag_run.c.logical_date == logical_date)
        columns = [dag_run.c[name] for name in ("id", "run_id", "state", "started_at")]
        row = tx.connection.execute(select(*columns).where(*which).order_by(dag_run.c.id.desc()).limit(1)).first()
        if row is None:
            return RunStanding()
        state = "queued" if row.state == "running" and row.started_at is None else row.state
        return RunStanding(row.run_id, state, task_states(tx, row.id))

    # --- files ---------------------------------------------------------------------------------------

    @acting
    def set_pool(self, tx: Tx, name: str, slots: int) -> None:
        """Create a pool, or change its number of slots. Raises `BadName` and `ValueRefused`."""
        check_name(name, "the name of a pool")
        if not 0 <= slots <= POOL_SLOTS_MAX:
            raise ValueRefused(f"a pool has 0 to {POOL_SLOTS_MAX:,} slots, not {slots:,}")
        tx.notify()
        before = tx.connection.execute(select(pool.c.slots).where(pool.c.name == name)).scalar_one_or_none()
        tx.act("pools set", f"pool {name}", before={"slots": before}, after={"slots": slots}, changed=before != slots)
        statement = insert_into(tx.connection, pool).values(name=name, slots=slots)
        tx.connection.execute(statement.on_conflict_do_update(index_elements=[pool.c.name], set_={"slots": slots}))

    @acting
    def delete_pool(self, tx: Tx, name: str) -> None:
        """Delete a pool that no unfinished task is in. Raises `NoSuchRow` and `ValueRefused`."""
        if name == DEFAULT_POOL:
            raise ValueRefused(f"the pool {name} cannot be deleted: tasks that name no pool are in it")
        if tx.connection.execute(select(pool.c.name).where(pool.c.name == name)).first() is None:
            raise NoSuchRow("pool", name)  # also where tasks wait for it, because a DAG names a pool that nobody made
        unfinished = select(func.count()).where(task_instance.c.pool == name, task_rows.is_in(*states.UNFINISHED))
        if tasks := tx.connection.execute(unfinished).scalar_one():
            count = "1 unfinished task is" if tasks == 1 else f"{tasks:,} unfinished tasks are"
            raise ValueRefused(f"the pool {name!r} cannot be deleted: {count} in it")
        if tx.connection.execute(delete(pool).where(pool.c.name == name)).rowcount == 0:
            raise NoSuchRow("pool", name)
        tx.act("pools delete", f"pool {name}")


def _save_dag(tx: Tx, file: str, spec: DagSpec) -> None:
    data = encode_dag(spec)
    digest = hashlib.sha256(data).hexdigest()
    values = {
        "file": file,
        "spec": data,
        "spec_hash": digest,
        "max_active_runs": spec.max_active_runs,
        "parsed_at": tx.now,
        "removed_at": None,
    }
    columns = (dag.c.id, dag.c.spec, dag.c.spec_hash, dag.c.removed_at)
    of_name = select(*columns).where(dag.c.name == spec.dag_id)
    before = tx.connection.execute(of_name.with_for_update(key_share=True)).first()
    statement = insert_into(tx.connection, dag).values(
        name=spec.dag_id, created_date=tx.now, is_paused=spec.is_paused_upon_creation, **values
    )
    statement = statement.on_conflict_do_update(index_elements=[dag.c.name], set_=values)
    dag_row = DagRowId(tx.connection.execute(statement.returning(dag.c.id)).scalar_one())
    if before is not None and before.spec_hash == digest and before.removed_at is None:
        return
    schedules.update_next_date(tx, dag_row, spec, None if before is None else before.spec)
    assets.subscribe(tx, dag_row, spec)
    dag_signals.subscribe(tx, dag_row, spec.schedule)
    _mark_active_runs(tx, dag_row)


def _mark_active_runs(tx: Tx, dag_row: DagRowId) -> None:
    runs = select(dag_run.c.id).where(dag_run.c.dag_id == dag_row, dag_run.c.ended_at.is_(None))
    for dag_run_id in tx.connection.execute(runs).scalars():
        tx.mark_run_dirty(dag_run_id)


# --- runs ----------------------------------------------------------------------------------------


def insert_run(tx: Tx, dag_row: DagRowId, spec: DagSpec, run: NewRun) -> DagRunId | None:
    """Create a run with the tasks of its DAG; return its id, None if the DAG has a run of this name already."""
    start, end = run.interval or (None, None)
    statement = insert_into(tx.connection, dag_run).values(
        dag_id=dag_row,
        run_id=run.run_id,
        run_type=run.run_type,
        state="running",
        logical_date=run.logical_date,
        conf=run.conf,
        created_date=tx.now,
        needs_look=True,
        data_interval_start=start,
        data_interval_end=end,
        creator=run.creator,
    )
    created = tx.connection.execute(statement.on_conflict_do_nothing().returning(dag_run.c.id)).scalar_one_or_none()
    if created is None:
        return None
    insert_tasks(tx, created, spec.tasks)
    waits.note_starts(tx, created, spec)
    return DagRunId(created)


def has_open_run(tx: Tx, dag_row: DagRowId) -> bool:
    """Whether a DAG, which is locked, has a run that takes signals; that run does not end before the commit."""
    is_open = (dag_run.c.ended_at.is_(None), dag_run.c.removed_at.is_(None), dag_run.c.is_ending.is_(False))
    runs = select(dag_run.c.id).where(dag_run.c.dag_id == dag_row, *is_open).order_by(dag_run.c.id.desc())
    return tx.connection.execute(runs.limit(1).with_for_update(key_share=True)).first() is not None


def start_with(tx: Tx, dag_row: DagRowId, spec: DagSpec, before: Mapping[tuple[str, str], int]) -> str:
    """Create a run for which signals count that this transaction has sent, behind these versions; return its run_id."""
    name = f"manual__{tx.now.isoformat()}"
    while (run := insert_run(tx, dag_row, spec, NewRun(name, "manual"))) is None:
        name = f"manual__{tx.now.isoformat()}__{uuid4().hex}"
    waits.begin_before(tx, run, before)
    tx.notify()
    return name


def insert_tasks(tx: Tx, run: DagRunId, tasks: Sequence[TaskSpec]) -> None:
    """Add tasks to a run, except those it has already."""
    _insert_rows(tx, run, [(task, -1) for task in tasks])


def insert_instances(tx: Tx, run: DagRunId, task: TaskSpec, indexes: Sequence[int]) -> list[TaskInstanceId]:
    """Add instances of a mapped task to a run, except those it has already; return the ids of the new ones."""
    return _insert_rows(tx, run, [(task, index) for index in indexes])


def _insert_rows(tx: Tx, run: DagRunId, tasks: Sequence[tuple[TaskSpec, int]]) -> list[TaskInstanceId]:
    rows = [
        (
            run,
            task.task_id,
            map_index,
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
            bound(tx.connection, tx.now),
            task.active_max,
            task.endless,
        )
        for task, map_index in tasks
    ]
    return [id_ for (id_,) in insert_new(tx.connection, _NEW_TASK, rows, returning=("id",))] if rows else []


def remove_task(tx: Tx, instance: TaskInstanceId) -> bool:
    """Remove a task from its run, which is locked; return whether it was removed: not while a worker has it.

    A task whose row is locked by another transaction is not waited for, because that one may wait for the run.
    """
    task = task_rows.locked_unless_busy(tx, instance)
    if task is None or not any(task.state in row.from_ for row in states.of("removed")):
        return False
    task_rows.apply(tx, task, "removed")
    task_streams.close(tx, task.id)
    if task.trigger_id is not None:
        task_rows.finish_trigger(tx, task.trigger_id)
    return True


def end_run(tx: Tx, run: DagRunId, state: RunEnd) -> Literal["ended", "goes on", "busy"]:
    """End a run that has no unfinished task; return what has become of it.

    Its row is locked before its tasks are read, and a clear updates both: no run ends over a task that is being
    cleared, which flags it again. Its rules about signals act no more; if signals are being held against them just now
    ("busy"), it does not end, and nobody flags it if none of them fits.
    """
    running = and_(dag_run.c.id == run, dag_run.c.state == "running")
    if tx.connection.execute(select(dag_run.c.id).where(running).with_for_update(key_share=True)).first() is None:
        return "goes on"
    if tx.connection.execute(select(run_states.has_unfinished()), {"of_run": run}).scalar_one():
        return "goes on"
    if not subscriptions.close(tx, run):
        return "busy"
    tx.connection.execute(update(dag_run).where(running).values(state=state, ended_at=tx.now))
    return "ended"


def has_ended(tx: Tx, run: DagRunId) -> bool:
    """Whether a run has ended, and was not cleared since."""
    of_run = select(dag_run.c.ended_at).where(dag_run.c.id == run)
    return tx.connection.execute(of_run).scalar_one_or_none() is not None


def begin_end(tx: Tx, run: DagRunId) -> bool:
    """Have signals start nothing more in a run, and stop its endless tasks; return False if it has ended.

    It ends with what is under way otherwise.
    """
    open_run = (dag_run.c.id == run, dag_run.c.ended_at.is_(None), dag_run.c.removed_at.is_(None))
    ending = update(dag_run).where(*open_run).values(is_ending=true(), needs_look=true())
    if not tx.connection.execute(ending).rowcount:
        return False
    of_run = (task_instance.c.dag_run_id == run, task_instance.c.is_endless, task_rows.is_in(*states.UNFINISHED))
    for instance in tx.connection.execute(select(task_instance.c.id).where(*of_run)).scalars().all():
        subscriptions.ask(tx, run, instance, "STOP")
    return True


def reopen(tx: Tx, run: DagRunId) -> None:
    """Set a run to running again, because one of its tasks was cleared. Raises `NoSuchRow` if it is being deleted."""
    values = {"state": "running", "ended_at": None, "needs_look": True, "is_ending": False}
    present = (dag_run.c.id == run, dag_run.c.removed_at.is_(None))
    if not tx.connection.execute(update(dag_run).where(*present).values(values)).rowcount:
        raise NoSuchRow("run", str(run))
    subscriptions.open_again(tx, run)


def task_states(tx: Tx, run: DagRunId) -> dict[str, TaskState]:
    """Return the state of each task of a run, by task id; of a mapped one that of all its rows together."""
    return run_states.read(tx, run).of_tasks()


def count_active_runs(tx: Tx, dag_row: DagRowId) -> int:
    """Return how many runs of a DAG have not ended. While the caller has the DAG's row locked, no other is created."""
    active = dag_run.c.dag_id == dag_row, dag_run.c.ended_at.is_(None)
    return int(tx.connection.execute(select(func.count()).select_from(dag_run).where(*active)).scalar_one())
