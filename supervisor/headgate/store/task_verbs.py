"""`TaskVerbs`: what a store does with tasks, each verb one transaction. It is reached as ``store.tasks``.

What `headgate.store.store.Store` says of its verbs holds for these: the errors, the epoch, and that each may be
repeated. A verb that moves a task says whether it did; where somebody else was first, it changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection, Table

from headgate.protocol import marks
from headgate.protocol.messages.dags import DagSpec, TaskState
from headgate.store.db import notices
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Database, LeasedTx
from headgate.store.db.verbs import Verbs, leased
from headgate.store.ids import Epoch, TaskInstanceId
from headgate.store.scheduling import planning
from headgate.store.tables import connection as connection_table
from headgate.store.tables import variable
from headgate.store.tasks import dags, deferral, task_actions, task_ends, task_rows, task_values, tasks
from headgate.store.tasks.graphs import Graphs
from headgate.store.triggers import leases
from headgate.store.triggers.leases import Clock

TASKS_A_TRANSACTION_MAX = 500  # of one kind of due tasks: some tens of milliseconds, so that others have their turn

Transaction = Callable[[], AbstractContextManager[Connection]]


class TaskVerbs(Verbs):
    """The verbs for DAGs, runs, tasks, and the values they read."""

    def __init__(
        self,
        writing: Transaction,
        reading: Transaction,
        secrets: Secrets,
        clock: Clock | None,
        graphs: Graphs,
        database: Database,
    ) -> None:
        super().__init__(database)
        self._writing = writing
        self._reading = reading
        self._secrets = secrets
        self._clock = clock
        self._graphs = graphs
        self.variables = ValueVerbs(variable, writing, reading, secrets, clock)
        self.connections = ValueVerbs(connection_table, writing, reading, secrets, clock)

    # --- DAGs and runs ---------------------------------------------------------------------------

    def save_file(self, epoch: Epoch, file: str, specs: Sequence[DagSpec]) -> None:
        """Record the DAGs of a file that was parsed; those it holds no more are put away."""
        with self._writing() as connection:
            dags.save_file(connection, leases.hold(connection, epoch, self._clock), file, specs)

    def save_import_error(self, epoch: Epoch, file: str, error: str) -> None:
        """Record why a file cannot be parsed, until it can be."""
        with self._writing() as connection:
            dags.save_import_error(connection, leases.hold(connection, epoch, self._clock), file, error)

    def dag_files(self) -> dict[str, list[str]]:
        """Return the files that have DAGs or an error, each with the ids of its DAGs."""
        with self._reading() as connection:
            return dags.files(connection)

    def set_paused(self, dag: str, *, is_paused: bool) -> None:
        """Pause a DAG, or have it go on. Raises `NoSuchRow`."""
        with self._writing() as connection:
            notices.tell(connection)
            dags.set_paused(connection, dag, is_paused=is_paused)

    def create_run(
        self,
        dag: str,
        run_id: str,
        *,
        run_type: dags.RunType = "manual",
        logical_date: datetime | None = None,
        conf: bytes | None = None,
        interval: tuple[datetime, datetime] | None = None,
    ) -> int | None:
        """Make a run with all tasks of its DAG; return its id, None where the DAG has a run of this name already.

        It begins when a scheduler looks at it, at once where the DAG may have one more. ``conf`` is encoded. Of several
        supervisors that create the same run one does. Raises `NoSuchRow` and `BadName`.
        """
        with self._writing() as connection:
            now = leases.read_clock(connection, self._clock)
            notices.tell(connection)
            return dags.create_run(connection, now, dag, dags.NewRun(run_id, run_type, logical_date, conf, interval))

    def run_standing(
        self, dag: str, *, run_id: str | None = None, logical_date: datetime | None = None
    ) -> dags.RunStanding | None:
        """Return how the newest such run of a DAG stands, None where there is no such DAG."""
        with self._reading() as connection:
            return dags.run_standing(connection, dag, run_id, logical_date)

    # --- to a worker -----------------------------------------------------------------------------

    def retry_due(self, epoch: Epoch, *, limit: int = TASKS_A_TRANSACTION_MAX) -> list[int]:
        """Begin the next try of tasks whose retry delay is over; return their ids. Some begin in their trigger."""
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            retried = tasks.retry_due(connection, now, self._graphs, limit=limit)
            if planning.retry_in_triggers(connection, now, self._secrets, self._graphs, retried):
                notices.tell(connection)
            return [task.id for task in retried]

    def dispatch(self, epoch: Epoch, *, limit: int, queues: Sequence[str]) -> tasks.Dispatched:
        """Give up to ``limit`` scheduled tasks of these queues to idle workers, as priorities and pools allow.

        They are ``running`` from now on, with a new token each.
        """
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            return tasks.dispatch(connection, now, self._secrets, epoch, limit=limit, queues=queues)

    def taken(self, epoch: Epoch) -> list[tasks.TaskToRun]:
        """Return what this epoch's workers should be running: also what a `dispatch` gave whose answer was lost.

        No dispatch that was begun before can give anything after this: one that is still being committed is waited for.
        """
        with self._writing() as connection:  # it writes nothing, but the lock is a writer's
            leases.outwait(connection, epoch)
            return tasks.taken(connection, leases.read_clock(connection, self._clock), self._secrets, epoch)

    def set_pool(self, name: str, slots: int) -> None:
        """Make a pool, or change how many slots it has. Raises `BadName` and `ValueRefused`."""
        with self._writing() as connection:
            tasks.set_pool(connection, name, slots)

    # --- deferral --------------------------------------------------------------------------------

    def defer(
        self,
        epoch: Epoch,
        task_id: int,
        token: str,
        wait: deferral.Deferral,
        *,
        xcoms: Mapping[str, bytes] | None = None,
    ) -> str | None:
        """Have a running task wait, and its worker go; return its new token, None where it is too late.

        Raises `ValueRefused` as `succeed` does.
        """
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            notices.tell(connection)
            deferred = deferral.defer(connection, now, self._secrets, task_id, token, wait, xcoms or {})
            marks.reach("defer.written")
        marks.reach("defer.committed")
        return deferred

    def time_out(self, epoch: Epoch, *, limit: int = TASKS_A_TRANSACTION_MAX) -> list[int]:
        """Resume deferred tasks to fail that have waited for too long, by the database's clock; return their ids."""
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            notices.tell(connection)
            return deferral.time_out(connection, now, self._secrets, limit=limit)

    def remove_orphans(self, epoch: Epoch | None = None) -> list[int]:
        """Remove triggers that neither a watcher nor a task has; return their ids. A user has no epoch."""
        with self._writing() as connection:
            if epoch is None:
                now = leases.read_clock(connection, self._clock)
            else:
                now = leases.hold(connection, epoch, self._clock)
            notices.tell(connection)
            return deferral.remove_orphans(connection, now)

    # --- ends ------------------------------------------------------------------------------------

    def succeed(
        self,
        epoch: Epoch,
        task_id: int,
        token: str,
        *,
        end: Literal["succeeded", "skipped"] = "succeeded",
        xcoms: Mapping[str, bytes] | None = None,
        skips: Collection[str] = (),
    ) -> bool:
        """End a running task well, with its encoded XComs; return whether it was the token's to end.

        ``skips`` are tasks of its run that shall not run; those that have begun do.

        Raises `ValueRefused` for an XCom over the limit; nothing was written then: fail the task with it.
        """
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            return task_ends.succeed(connection, now, task_id, token, end, xcoms or {}, skips)

    def fail(
        self,
        epoch: Epoch,
        task_id: int,
        token: str,
        error: str,
        *,
        may_retry: bool = True,
        xcoms: Mapping[str, bytes] | None = None,
    ) -> TaskState | None:
        """End the try of a running task badly; return its new state, None where it was not the token's to end.

        Raises `ValueRefused` as `succeed` does: then fail it without XComs.
        """
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            return task_ends.fail(connection, now, task_id, token, error, may_retry=may_retry, xcoms=xcoms or {})

    @leased
    def lose_worker(self, tx: LeasedTx, instance: TaskInstanceId, token: str, reason: str) -> TaskState | None:
        """Record that the worker of a task is gone; return the task's new state, None if it is not this worker's.

        A running task has failed this try, with the reason. One that was cleared while it ran begins anew.
        """
        task = task_rows.locked(tx.connection, instance, token=token)
        if task is None:
            return None
        match task.state:
            case TaskState.RUNNING:
                return task_rows.fail(tx.connection, tx.now, task, "worker_lost", "worker_lost_to_retry", reason)
            case TaskState.RESTARTING:
                return task_rows.apply(tx.connection, tx.now, task, "restarted")
            case _:
                return None  # deferred: the token is the trigger's

    def adopt(self, epoch: Epoch, *, limit: int = TASKS_A_TRANSACTION_MAX) -> list[task_ends.Adopted]:
        """Take tasks from supervisors that are fenced or have ended; return them."""
        with self._writing() as connection:
            return task_ends.adopt(connection, leases.hold(connection, epoch, self._clock), limit=limit)

    def owned(self, epoch: Epoch) -> list[task_ends.OwnedTask]:
        """Return the tasks that this epoch's workers have; a worker that has another is to be ended."""
        with self._reading() as connection:
            return task_ends.owned(connection, leases.read_clock(connection, self._clock), epoch)

    # --- users -----------------------------------------------------------------------------------

    def mark(self, task_id: int, mark: task_actions.Mark) -> bool:
        """End a task as a user says; return whether it had not ended. Raises `NoSuchRow`."""
        with self._writing() as connection:
            notices.tell(connection)
            return task_actions.mark(connection, leases.read_clock(connection, self._clock), task_id, mark)

    def clear_many(
        self,
        dag_run_id: int,
        task_ids: Sequence[str] = (),
        *,
        upstream: bool = False,
        downstream: bool = False,
        only_failed: bool = False,
    ) -> task_actions.Cleared:
        """Have tasks of a run, and their relatives, begin anew; no ids: all. Raises `NoSuchRow`.

        Nothing was done to those that come back as busy: ask again for them, without relatives.
        """
        with self._writing() as connection:
            notices.tell(connection)
            now = leases.read_clock(connection, self._clock)
            return task_actions.clear_many(
                connection,
                now,
                dag_run_id,
                task_ids,
                upstream=upstream,
                downstream=downstream,
                only_failed=only_failed,
            )

    def cancel_run(self, dag_run_id: int) -> task_actions.Cancelled:
        """End what is unfinished of a run, as failed; ask again while it has not ended."""
        with self._writing() as connection:
            notices.tell(connection)
            return task_actions.cancel_run(connection, leases.read_clock(connection, self._clock), dag_run_id)

    # --- values ----------------------------------------------------------------------------------

    def pull_xcom(self, dag_run_id: int, task_id: str, key: str) -> bytes | None:
        """Return an XCom, encoded; None where there is none."""
        with self._reading() as connection:
            return task_values.pull_xcom(connection, dag_run_id, task_id, key)


class ValueVerbs:
    """The verbs for the variables, or for the connections: values under names, encrypted."""

    def __init__(
        self, table: Table, writing: Transaction, reading: Transaction, secrets: Secrets, clock: Clock | None
    ) -> None:
        self._table = table
        self._writing = writing
        self._reading = reading
        self._secrets = secrets
        self._clock = clock

    def put(self, name: str, value: bytes, *, description: str = "") -> None:
        """Store a value, in place of what was there. Raises `BadName` and `ValueRefused`."""
        with self._writing() as connection:
            now = leases.read_clock(connection, self._clock)
            task_values.put(connection, now, self._secrets, self._table, name, value, description)

    def get(self, name: str) -> bytes | None:
        """Return a value in clear, None where there is none. Raises `BadKey`."""
        with self._reading() as connection:
            return task_values.get(connection, self._secrets, self._table, name)

    def remove(self, name: str) -> None:
        """Delete a value. Raises `NoSuchRow`."""
        with self._writing() as connection:
            task_values.drop(connection, self._table, name)

    def listed(self) -> list[task_values.NamedValue]:
        """Return all of them by name, without their values."""
        with self._reading() as connection:
            return task_values.listed(connection, self._table)
