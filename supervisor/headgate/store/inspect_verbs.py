"""`InspectVerbs`: what a store is asked by people, each verb one transaction that writes nothing; as ``store.inspect``.

What `headgate.store.store.Store` says of errors holds for these. A name that is not there is `NoSuchRow`, with the
names that may have been meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime

from sqlalchemy import Connection

from headgate.protocol.messages.dags import DagSpec, TaskState
from headgate.scheduling import why_tasks, why_triggers
from headgate.scheduling.why import Answer
from headgate.store.db.secrets import Secrets
from headgate.store.inspect import inspecting, inspecting_triggers, why_facts
from headgate.store.inspect.inspecting import LIST_DAGS_MAX, TaskRef
from headgate.store.triggers import leases
from headgate.store.triggers.leases import SILENCE_MAX_S, Clock

Transaction = Callable[[], AbstractContextManager[Connection]]
ROWS_PER_PAGE_MAX = 1000  # of one list verb; whoever wants more asks for the next page


class InspectVerbs:
    """The verbs that look. Lists say no more than ``limit``, `ROWS_PER_PAGE_MAX` at most unless they say otherwise."""

    def __init__(self, reading: Transaction, secrets: Secrets, clock: Clock | None) -> None:
        self._reading = reading
        self._secrets = secrets
        self._clock = clock

    def now(self) -> datetime:
        """Return the time by the database's clock."""
        with self._reading() as connection:
            return leases.read_clock(connection, self._clock)

    # --- DAGs, runs, tasks, pools ----------------------------------------------------------------

    def dags(self, *, is_paused: bool | None = None, limit: int = LIST_DAGS_MAX) -> list[inspecting.DagLine]:
        """Return the DAGs by name, and the files that cannot be parsed and never held one."""
        with self._reading() as connection:
            return inspecting.dags(connection, is_paused=is_paused, limit=limit)

    def dag(self, name: str) -> tuple[inspecting.DagLine, DagSpec]:
        """Return a DAG and what its file says. Raises `NoSuchRow`."""
        with self._reading() as connection:
            return inspecting.one_dag(connection, name)

    def runs(
        self,
        *,
        dag: str | None = None,
        states: Sequence[str] = (),
        since: datetime | None = None,
        beyond_id: int | None = None,
        limit: int = ROWS_PER_PAGE_MAX,
    ) -> list[inspecting.RunLine]:
        """Return runs, newest first. Raises `NoSuchRow` for the DAG."""
        with self._reading() as connection:
            return inspecting.runs(
                connection, dag_name=dag, states=states, since=since, beyond_id=beyond_id, limit=limit
            )

    def run(self, dag: str, run_id: str) -> inspecting.RunDetail:
        """Return a run; ``latest`` is the newest of its DAG. Raises `NoSuchRow`."""
        with self._reading() as connection:
            return inspecting.one_run(connection, dag, run_id)

    def tasks(
        self,
        *,
        dag: str | None = None,
        run_id: str | None = None,
        states: Iterable[TaskState] = (),
        since: datetime | None = None,
        beyond_id: int | None = None,
        limit: int = ROWS_PER_PAGE_MAX,
    ) -> list[inspecting.TaskLine]:
        """Return tasks, newest first; those of one run in its order. Raises `NoSuchRow` for DAG or run."""
        with self._reading() as connection:
            return inspecting.tasks(
                connection,
                dag_name=dag,
                run_id=run_id,
                states=states,
                since=since,
                beyond_id=beyond_id,
                limit=limit,
            )

    def find_task(self, dag: str, run_id: str, task_id: str) -> TaskRef:
        """Return the task of these names; ``latest`` is the newest run. Raises `NoSuchRow`."""
        with self._reading() as connection:
            return inspecting.task_ref(connection, dag, run_id, task_id)

    def task(self, task: TaskRef) -> inspecting.TaskDetail:
        """Return all that is known of a task."""
        with self._reading() as connection:
            return inspecting.one_task(connection, task)

    def pools(self) -> list[inspecting.PoolLine]:
        """Return the pools by name, and how much of each is in use."""
        with self._reading() as connection:
            return inspecting.pools(connection)

    # --- triggers --------------------------------------------------------------------------------

    def triggers(
        self,
        *,
        with_ended: bool = False,
        queue: str | None = None,
        beyond_id: int = 0,
        limit: int = ROWS_PER_PAGE_MAX,
    ) -> list[inspecting_triggers.TriggerLine]:
        """Return triggers by id: open ones and watchers', or all that there are."""
        with self._reading() as connection:
            return inspecting_triggers.triggers(
                connection, with_ended=with_ended, queue=queue, beyond_id=beyond_id, limit=limit
            )

    def orphans(self, *, limit: int = ROWS_PER_PAGE_MAX) -> list[inspecting_triggers.TriggerLine]:
        """Return open triggers that neither a watcher nor a task has."""
        with self._reading() as connection:
            return inspecting_triggers.orphans(connection, limit=limit)

    def slow(self, *, longer_than_s: float, limit: int = ROWS_PER_PAGE_MAX) -> list[inspecting_triggers.TriggerLine]:
        """Return the triggers that tasks have waited for longer than this, the oldest first."""
        with self._reading() as connection:
            now = leases.read_clock(connection, self._clock)
            return inspecting_triggers.slow(connection, now, longer_than_s=longer_than_s, limit=limit)

    def find_trigger(self, name: str) -> int:
        """Return the id of a trigger by its number or its watcher's name. Raises `NoSuchRow`."""
        with self._reading() as connection:
            return inspecting_triggers.trigger_id_of(connection, name)

    def trigger(self, trigger_id: int) -> inspecting_triggers.TriggerDetail:
        """Return all that is known of a trigger but its kwargs. Raises `NoSuchRow`."""
        with self._reading() as connection:
            return inspecting_triggers.one_trigger(connection, trigger_id)

    def trigger_kwargs(self, trigger_id: int) -> bytes:
        """Return the kwargs of a trigger in clear, encoded. Raises `NoSuchRow` and `BadKey`."""
        with self._reading() as connection:
            return self._secrets.decrypt(inspecting_triggers.encrypted_kwargs(connection, trigger_id))

    # --- why -------------------------------------------------------------------------------------

    def why_task(self, task: TaskRef, *, silence_max_s: float = SILENCE_MAX_S) -> Answer:
        """Say why a task is where it is, and what comes next."""
        with self._reading() as connection:
            now = leases.read_clock(connection, self._clock)
            facts = why_facts.task_facts(connection, now, task, silence_max_s=silence_max_s)
            living = why_facts.supervisors(connection, now, silence_max_s=silence_max_s)
        return why_tasks.explain_task(facts, living)

    def why_trigger(self, trigger_id: int, *, silence_max_s: float = SILENCE_MAX_S) -> Answer:
        """Say how a trigger stands, and what comes next. Raises `NoSuchRow`."""
        with self._reading() as connection:
            now = leases.read_clock(connection, self._clock)
            facts = why_facts.trigger_facts(connection, now, trigger_id, silence_max_s=silence_max_s)
            living = why_facts.supervisors(connection, now, silence_max_s=silence_max_s)
        return why_triggers.explain_trigger(facts, living)
