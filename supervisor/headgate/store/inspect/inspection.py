"""`Inspection`: all read-only queries, which a store has as ``store.inspect``.

`headgate.store.store.Store` has the errors that they raise. An unknown name raises `NoSuchRow`, which has similar
names. Lists have at most ``limit`` rows, by default `ROWS_PER_PAGE_MAX` if nothing else is stated.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import func, select

from headgate.scheduling import contracts, status, why_tasks, why_triggers
from headgate.scheduling.status_facts import Problem
from headgate.scheduling.why import Answer, Supervisor
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import reading
from headgate.store.facts.supervisor_status import PublishedStatus, published
from headgate.store.inspect import status_facts, why_facts
from headgate.store.inspect.audit import AuditInspection
from headgate.store.inspect.browsing.assets import AssetInspection
from headgate.store.inspect.browsing.grid import GridInspection
from headgate.store.inspect.browsing.search import SearchInspection
from headgate.store.inspect.event_log import EventInspection
from headgate.store.inspect.letters import LetterInspection
from headgate.store.inspect.runs import RunInspection, TaskRef
from headgate.store.inspect.signal_places import DagPlaces, RunSignals
from headgate.store.inspect.spans import SpanInspection
from headgate.store.inspect.streams import StreamInspection
from headgate.store.inspect.triggers import TriggerInspection
from headgate.store.inspect.why_facts import BY_SILENCE, Liveness


class Inspection(
    DagPlaces,
    RunInspection,
    RunSignals,
    GridInspection,
    SpanInspection,
    TriggerInspection,
    StreamInspection,
    EventInspection,
    LetterInspection,
    AuditInspection,
    AssetInspection,
    SearchInspection,
):
    """All read-only queries, `headgate why` and `headgate status`."""

    @reading
    def now(self, tx: Tx) -> datetime:
        """Return the time by the database's clock."""
        return tx.now

    @reading
    def why_read_only(self, tx: Tx) -> str | None:
        """Return why the server lets this session write nothing; None if it may write. SQLite is not asked."""
        if not tx.is_postgresql:
            return None
        if tx.connection.execute(select(func.pg_is_in_recovery())).scalar_one():
            return "it is a standby, and supervisors need the primary server"
        is_read_only = tx.connection.execute(select(func.current_setting("transaction_read_only"))).scalar_one() == "on"
        return "default_transaction_read_only is on, of the server, the database or the role" if is_read_only else None

    @reading
    def supervisors(self, tx: Tx, *, liveness: Liveness = BY_SILENCE) -> list[Supervisor]:
        """Return the supervisors that neither ended nor were fenced, newest first."""
        return why_facts.supervisors(tx, liveness=liveness)

    @reading
    def supervisor_statuses(self, tx: Tx, epochs: Collection[int]) -> dict[int, PublishedStatus]:
        """Return what these supervisors say of themselves, by their epochs; those that say nothing are left out."""
        return published(tx, epochs)

    @reading
    def why_task(self, tx: Tx, task: TaskRef, *, liveness: Liveness = BY_SILENCE) -> Answer:
        """Explain why a task is in its state, and what happens next."""
        facts = why_facts.task_facts(tx, task, liveness=liveness)
        is_unowned = facts.trigger is not None and facts.trigger.owner is None
        return why_tasks.explain_task(facts, why_facts.supervisors(tx, liveness=liveness, exactly=is_unowned))

    @reading
    def why_trigger(self, tx: Tx, trigger_id: int, *, liveness: Liveness = BY_SILENCE) -> Answer:
        """Explain the state of a trigger, and what happens next. Raises `NoSuchRow`."""
        facts = why_facts.trigger_facts(tx, trigger_id, liveness=liveness)
        is_unowned = facts.owner is None
        return why_triggers.explain_trigger(facts, why_facts.supervisors(tx, liveness=liveness, exactly=is_unowned))

    def why_dag(self, name: str, *, liveness: Liveness = BY_SILENCE) -> Answer:
        """Say when a DAG has its next run, and what has to happen before. Raises `NoSuchRow`."""
        return contracts.explain_dag(self.dag_facts(name), self.supervisors(liveness=liveness))

    @reading
    def status(self, tx: Tx, *, liveness: Liveness = BY_SILENCE) -> list[Problem]:
        """Return all that is wrong, the worst first; nothing if everything is well."""
        return status.problems(status_facts.status_facts(tx, liveness=liveness))

    @reading
    def status_and_supervisors(
        self, tx: Tx, *, liveness: Liveness = BY_SILENCE
    ) -> tuple[list[Problem], list[Supervisor]]:
        """Return what `status` and `supervisors` do, which read the same."""
        facts = status_facts.status_facts(tx, liveness=liveness)
        return status.problems(facts), list(facts.supervisors)
