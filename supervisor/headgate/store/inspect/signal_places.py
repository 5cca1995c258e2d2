"""Where the rules of DAGs and of runs about signals stand, and when a DAG has its next run."""

from __future__ import annotations

from sqlalchemy import ColumnElement, func, select

from headgate.protocol.messages.rules import SignalRule, rule_name
from headgate.protocol.messages.schedules import SignalSchedule
from headgate.scheduling import planning, signal_rules
from headgate.scheduling.contracts import DagFacts, RulePlace
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.ids import DagRunId
from headgate.store.inspect.dags import DagInspection
from headgate.store.signals import waits
from headgate.store.tables import dag, dag_run, dag_signal, signal_key, signal_wait, waiting_event
from headgate.store.tasks.graphs import read_spec

SIGNALS_SHOWN_MAX = 1000  # of one run: as many as it can have


class RunSignals(Verbs):
    """The queries about signals of runs."""

    @reading
    def run_signals(self, tx: Tx, run: DagRunId) -> list[tuple[str, str, int, bool]]:
        """Return the signals that a run was created for: namespace, key, version, and whether it was superseded."""
        of_run = dag_signal.c
        rows = tx.connection.execute(
            select(of_run.namespace, of_run.key, of_run.version, of_run.is_superseded)
            .where(of_run.dag_run_id == run)
            .order_by(of_run.id)
            .limit(SIGNALS_SHOWN_MAX)
        )
        return [(namespace, key, version, bool(superseded)) for namespace, key, version, superseded in rows]

    @reading
    def run_end_rules(self, tx: Tx, run: DagRunId) -> list[RulePlace]:
        """Return the rules by which signals end a run."""
        of_run = select(dag.c.name, dag.c.spec).select_from(dag_run.join(dag)).where(dag_run.c.id == run)
        row = tx.connection.execute(of_run).first()
        rules = () if row is None else read_spec(row.name, row.spec).end_on
        return _places(tx, rules, (signal_wait.c.dag_run_id == run) & signal_wait.c.task_instance_id.is_(None))

    @reading
    def is_kept_open(self, tx: Tx, run: DagRunId) -> bool:
        """Whether a run does not end by itself: signals start all of its tasks, and nobody has said that it is to end.

        See `headgate.scheduling.planning.decide`.
        """
        goes_on = (dag_run.c.ended_at.is_(None), dag_run.c.is_ending.is_(False))
        of_run = select(dag.c.name, dag.c.spec).select_from(dag_run.join(dag)).where(dag_run.c.id == run, *goes_on)
        row = tx.connection.execute(of_run).first()
        return row is not None and planning.Graph(read_spec(row.name, row.spec)).is_started_by_signals_alone


class DagPlaces(DagInspection):
    """The queries about the next runs of DAGs."""

    def dag_facts(self, name: str) -> DagFacts:
        """Return what decides when a DAG has its next run. Raises `NoSuchRow`."""
        line, spec = self.dag(name)
        with self.database.reading() as tx:
            row = tx.connection.execute(select(dag.c.id).where(dag.c.name == name)).one()
            of_dag = (dag_signal.c.dag_id == row.id, dag_signal.c.dag_run_id.is_(None))
            first_at = select(func.min(dag_signal.c.sent_at)).where(*of_dag)
            if not isinstance(spec.schedule, SignalSchedule):
                first_at = select(func.min(waiting_event.c.stored_at)).where(waiting_event.c.dag_id == row.id)
            rules = spec.schedule.rules if isinstance(spec.schedule, SignalSchedule) else ()
            first = tx.connection.execute(first_at).scalar_one()
            return DagFacts(
                name,
                line.schedule,
                spec.schedule,
                line.is_paused,
                line.active_runs + line.queued_runs,
                spec.max_active_runs,
                None if line.next_run_at is None else (line.next_run_at - tx.now).total_seconds(),
                line.waiting_events,
                None if first is None else (tx.now - first).total_seconds(),
                tuple(_places(tx, rules, signal_wait.c.dag_id == row.id)),
            )


def _places(tx: Tx, rules: tuple[SignalRule, ...], which: ColumnElement[bool]) -> list[RulePlace]:
    waiting = select(func.count()).where(dag_signal.c.wait_id == signal_wait.c.id, dag_signal.c.dag_run_id.is_(None))
    columns = (
        *(signal_wait.c.rule, signal_wait.c.seen_version, signal_key.c.last_version),
        waiting.where(dag_signal.c.dag_id == signal_wait.c.dag_id).scalar_subquery().label("waiting"),
    )
    found = select(*columns).select_from(signal_wait.outerjoin(signal_key, waits.SAME_KEY)).where(which)
    rows = {row.rule: row for row in tx.connection.execute(found)}
    return [
        RulePlace(signal_rules.rule_text(rule), row.seen_version, row.last_version or 0, row.waiting)
        for rule in rules
        if (row := rows.get(rule_name(rule))) is not None
    ]
