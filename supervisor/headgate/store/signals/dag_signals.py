"""Runs for signals: the rules of DAGs about keys, and the signals that have met them and wait for a run.

The rules of a DAG are rows beside those of tasks and sensors (`headgate.store.signals.waits`), and are held against the
versions of their keys by the same duty. What meets one is kept with its value, in the transaction that moves the place
of the rule, and is taken by a run in the one that creates it, by the contract of the DAG. So each signal is in one run,
at most and at least once (I32). While a DAG is paused, or has as many active runs as it may have, its signals wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, delete, func, select, update

from headgate.protocol.messages.queries import StartSignal
from headgate.protocol.messages.rules import encode_predicate, rule_name
from headgate.protocol.messages.schedules import Schedule, SignalSchedule
from headgate.scheduling.contracts import EventRun, Waiting
from headgate.store.db.bulk import Kind, chunks, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRowId, DagRunId
from headgate.store.signals import waits
from headgate.store.tables import dag, dag_signal, signal_wait
from headgate.store.triggers.assets import BACKLOG_COLUMNS, WAITING_EVENTS_MAX, Backlogged, read_backlogs

_W, _S = signal_wait.c, dag_signal.c
_RULE = Kind(signal_wait, ("dag_id", "rule", "namespace", "key", "predicate", "seen_version", "batch_seconds"))
_SIGNAL = Kind(dag_signal, ("dag_id", "wait_id", "namespace", "key", "version", "value", "sent_at"))
IS_WAITING = _S.dag_run_id.is_(None)


# --- rules ---------------------------------------------------------------------------------------


def subscribe(tx: Tx, dag_id: DagRowId, schedule: Schedule | None) -> None:
    """Have a DAG, which is locked, exactly the rules of its schedule; what has met others waits no longer.

    A new rule is fresh: so no signal is passed over that is committed while the DAG is stored (I28).
    """
    of_signals = schedule if isinstance(schedule, SignalSchedule) else SignalSchedule(())
    batch_seconds = of_signals.batch_seconds
    wanted = {rule_name(rule): rule for rule in of_signals.rules}
    known = {row.rule: row.id for row in tx.connection.execute(select(_W.id, _W.rule).where(_W.dag_id == dag_id))}
    gone = sorted(id_ for name, id_ in known.items() if name not in wanted)
    for some in chunks(gone):
        tx.connection.execute(delete(signal_wait).where(_W.id.in_(some)))
        tx.connection.execute(delete(dag_signal).where(_S.dag_id == dag_id, _S.wait_id.in_(some), IS_WAITING))
    tx.connection.execute(update(signal_wait).where(_W.dag_id == dag_id).values(batch_seconds=batch_seconds))
    rows = [
        (
            *(dag_id, name, rule.namespace, rule.key, encode_predicate(rule.predicate)),
            *(waits.newest(tx, rule), batch_seconds),
        )
        for name, rule in wanted.items()
        if name not in known
    ]
    if rows:
        insert_new(tx.connection, _RULE, rows, returning=("id",))


def keep(tx: Tx, dag_id: DagRowId, wait_id: int, rows: Sequence[tuple[Any, ...]]) -> None:
    """Keep signals that have met a rule of a DAG, as (namespace, key, version, value, sent_at), for its runs."""
    insert_new(tx.connection, _SIGNAL, [(dag_id, wait_id, *row) for row in rows], returning=("id",))


# --- signals that wait ---------------------------------------------------------------------------

_BACKLOGS = Prepared(
    select(*BACKLOG_COLUMNS, func.count(_S.wait_id.distinct()), func.min(_S.sent_at))
    .select_from(dag_signal.join(dag, dag.c.id == _S.dag_id))
    .where(IS_WAITING)
    .group_by(dag.c.id)
    .order_by(dag.c.id)
)


def backlogs(tx: Tx) -> list[Backlogged]:
    """Return the DAGs for whose runs signals wait."""
    return read_backlogs(tx, _BACKLOGS)


def waiting(tx: Tx, dag_id: DagRowId, limit: int | None) -> list[Waiting]:
    """Return the signals that wait for a DAG, in the order in which they met its rules. The caller has locked the DAG.

    Those of one key are in the order of their versions.
    """
    statement = (
        select(_S.id, _S.wait_id, _S.sent_at, func.length(_S.value))
        .where(_S.dag_id == dag_id, IS_WAITING)
        .order_by(_S.id)
        .limit(WAITING_EVENTS_MAX if limit is None else limit)
    )
    return [Waiting(*row) for row in tx.connection.execute(statement)]


def take(tx: Tx, dag_id: DagRowId, dag_run_id: DagRunId, run: EventRun) -> None:
    """Assign the signals of a run to it; they no longer wait."""
    for signals, is_superseded in ((run.events, False), (run.superseded, True)):
        for some in chunks([one.event_id for one in signals]):
            of = update(dag_signal).where(_S.dag_id == dag_id, _S.id.in_(some))
            tx.connection.execute(of.values(dag_run_id=dag_run_id, is_superseded=is_superseded))


def drop_oldest(tx: Tx, dag_id: DagRowId) -> int:
    """Forget the oldest signals that wait for a DAG, if more than `WAITING_EVENTS_MAX` do; return their number.

    The newest of each rule stays, as of events of assets.
    """
    of_dag = (_S.dag_id == dag_id, IS_WAITING)
    count = tx.connection.execute(select(func.count()).where(*of_dag)).scalar_one()
    dropped = 0
    newest = select(func.max(_S.id)).where(*of_dag).group_by(_S.wait_id)
    oldest = select(_S.id).where(*of_dag, _S.id.not_in(newest)).order_by(_S.id)
    oldest = oldest.limit(max(0, count - WAITING_EVENTS_MAX))
    for some in chunks(list(tx.connection.execute(oldest).scalars())):
        dropped += tx.connection.execute(delete(dag_signal).where(_S.id.in_(some))).rowcount
    return dropped


# --- signals of a run ----------------------------------------------------------------------------

_OF_RUN = Prepared(
    select(_S.key, _S.namespace, _S.version, _S.value)
    .where(_S.dag_run_id == bindparam("of_run"), _S.is_superseded.is_(False))
    .order_by(_S.id)
)


def of_run(tx: Tx, run: DagRunId) -> tuple[StartSignal, ...]:
    """Return the signals for which a run was created, in the order in which they met the rules of its DAG."""
    rows = _OF_RUN.run(tx.connection, of_run=run).fetchall()
    return tuple(StartSignal(key, namespace, version, bytes(value)) for key, namespace, version, value in rows)
