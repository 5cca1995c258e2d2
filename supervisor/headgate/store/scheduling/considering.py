"""Signals are held against the waits for them, in the database alone: no worker, no trigger, no users' code (I28).

Each wait is held against the versions of its key, in their order, each once. The first that fits ends a sensor: it is
stored as the event of the wait's trigger, and from there on everything is as with the event of any other trigger. The
newest that fits meets a rule (I29): it is kept with the rule, and the run is flagged, so that the rule acts when the
run is evaluated (`headgate.store.scheduling.rules`). All that fit a rule of a DAG wait for its runs (I32). Place and
effect are one transaction.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from sqlalchemy import Integer, bindparam, select

from headgate.protocol import marks
from headgate.protocol.messages.rules import decode_predicate, is_met
from headgate.protocol.messages.runner import FiredEvent
from headgate.store.db.faults import blaming
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import LeasedTx
from headgate.store.db.verbs import Verbs, leased
from headgate.store.ids import DagRowId, Epoch, TriggerId
from headgate.store.signals import dag_signals, ticks, waits
from headgate.store.signals.waits import OpenWait
from headgate.store.tables import signal, signal_key
from headgate.store.tasks import deferral, task_rows
from headgate.store.triggers import events as event_log

CONSIDERED_MAX = 500  # waits of one transaction
CONSIDERED_BYTES_MAX = 16 << 20  # values that are read in one transaction, but for those of one page more
PAGE_VERSIONS_MAX = 20  # read at once, and held against one wait in one transaction: values of 1 MiB at most


class Considered(msgspec.Struct, frozen=True):
    """Result of one transaction: how many sensors have ended, how many rules were met; whether there may be more.

    About ``asked`` rules users' code is to decide. ``for_runs`` signals wait for runs now.
    """

    tasks: int = 0
    rules: int = 0
    has_more: bool = False
    asked: int = 0
    for_runs: int = 0


class Version(NamedTuple):
    """One version of a key; ``dag_run_id`` is set if it is for that run alone."""

    version: int
    value: bytes
    dag_run_id: int | None
    sent_at: object  # as the driver returned it
    id: int


PAGE = Prepared(
    select(signal.c.version, signal.c.value, signal.c.dag_run_id, signal.c.sent_at, signal.c.id)
    .select_from(signal.join(signal_key))
    .where(
        signal_key.c.namespace == bindparam("namespace"),
        signal_key.c.key == bindparam("key"),
        signal.c.version > bindparam("after"),
    )
    .order_by(signal.c.version)
    .limit(bindparam("limit", type_=Integer()))
)


class SignalDutyVerbs(Verbs):
    """The verb by which signals end the waits for them."""

    def consider_signals(self, epoch: Epoch, *, limit: int = CONSIDERED_MAX) -> Considered:
        """Hold up to ``limit`` waits against the signals that they have not seen. Without any, it only reads.

        Raises `ItemFailed` for a wait that cannot be held against them.
        """
        with self.database.reading() as tx:
            if not waits.has_work(tx):
                return Considered()
        return self._consider(epoch, limit)

    @leased
    def tick(self, tx: LeasedTx, *, limit: int = CONSIDERED_MAX) -> int:
        """Have rules about the time be met that are due, by the database's clock; return how many."""
        return ticks.tick(tx, limit)

    @leased
    def _consider(self, tx: LeasedTx, limit: int) -> Considered:
        found = waits.to_look_at(tx, limit)
        if not found:
            return Considered(has_more=waits.unmark_keys(tx, limit))
        looks = _Looks(tx)
        met = for_runs = asked = 0
        ended: dict[OpenWait, FiredEvent] = {}
        for wait in found:
            if looks.bytes_read > CONSIDERED_BYTES_MAX:
                break  # the rest is as it was
            with blaming("rule", wait.id):
                if wait.trigger_id is not None:
                    if (version := looks.look(wait, wait.trigger_id)) is not None:
                        ended[wait] = _event(wait.trigger_id, version)
                elif wait.dag_id is not None:
                    for_runs += looks.look_for_dag(wait, wait.dag_id)
                elif wait.asks:
                    asked += looks.look_for_decision(wait)
                else:
                    met += looks.look_for_rule(wait)
        if ended:
            event_log.insert_events(tx, list(ended.values()))
            for wait, event in ended.items():
                with blaming("rule", wait.id):
                    deferral.take_event(tx, event)
                    waits.end(tx, wait)
            tx.notify()  # this supervisor may have no worker that is free for what comes next
        marks.reach("signals.considered")
        return Considered(len(ended), met, has_more=True, asked=asked, for_runs=for_runs)


class _Looks:
    """Holds waits against versions; many waits for one key read them once."""

    def __init__(self, tx: LeasedTx) -> None:
        self._tx = tx
        self._pages: dict[tuple[str, str, int], list[Version]] = {}
        self.bytes_read = 0

    def look(self, wait: OpenWait, trigger_id: TriggerId) -> Version | None:
        """Return the version that ends a sensor; else move its wait behind those that do not, and return None."""
        if task_rows.locked_by_trigger(self._tx, trigger_id) is None:
            waits.end(self._tx, wait)  # a user has cleared or marked the task, or its timeout was over
            return None
        fitting = self._fitting(wait)
        if fitting:
            return fitting[0]
        waits.move(self._tx, wait, self._end_of_page(wait))
        return None

    def look_for_rule(self, wait: OpenWait) -> bool:
        """Hold a rule against versions, and move it behind them; return whether one has met it."""
        fitting = self._fitting(wait)
        if not fitting:
            waits.move(self._tx, wait, self._end_of_page(wait))
            return False
        met = fitting[0 if wait.takes_each else -1]
        to = met.version if wait.takes_each else self._end_of_page(wait)
        waits.move(self._tx, wait, to, is_held=wait.takes_each)
        waits.meet(self._tx, wait, met.version, met.value, met.sent_at, met.id)
        assert wait.dag_run_id is not None, "only rules of DAGs are for all runs"
        self._tx.mark_run_dirty(wait.dag_run_id)
        return True

    def look_for_dag(self, wait: OpenWait, dag_id: DagRowId) -> int:
        """Have the versions that meet a rule of a DAG wait for its runs, and move it behind them; return how many."""
        fitting = self._fitting(wait)
        rows = [(wait.namespace, wait.key, one.version, one.value, one.sent_at) for one in fitting]
        if rows:
            dag_signals.keep(self._tx, dag_id, wait.id, rows)
        waits.move(self._tx, wait, self._end_of_page(wait))
        return len(rows)

    def look_for_decision(self, wait: OpenWait) -> bool:
        """Move a rule to the first version that fits, about which users' code is to decide; return whether one does."""
        fitting = self._fitting(wait)
        if fitting:
            waits.ask(self._tx, wait, fitting[0].version)
        else:
            waits.move(self._tx, wait, self._end_of_page(wait))
        return bool(fitting)

    def _fitting(self, wait: OpenWait) -> list[Version]:
        """Return the versions on the next page that are for the run of a wait, and meet its predicate."""
        predicate = decode_predicate(wait.predicate)
        return [
            version
            for version in self._page(wait)
            if version.dag_run_id in (None, wait.dag_run_id) and is_met(predicate, version.value)
        ]

    def _end_of_page(self, wait: OpenWait) -> int:
        """Return the version up to which a wait was held against all."""
        page = self._page(wait)
        newest = page[-1].version if page else wait.seen_version
        # A page that was read after the wait may have versions that were sent meanwhile: they are held against it, too.
        return newest if len(page) == PAGE_VERSIONS_MAX else max(wait.last_version, newest)

    def _page(self, wait: OpenWait) -> list[Version]:
        """Return versions of a key from a place on; maybe newer ones than the wait knows of."""
        place = (wait.namespace, wait.key, wait.seen_version)
        if place not in self._pages:
            where = {"namespace": wait.namespace, "key": wait.key, "after": wait.seen_version}
            rows = PAGE.run(self._tx.connection, **where, limit=PAGE_VERSIONS_MAX).fetchall()
            self._pages[place] = page = [Version(row[0], bytes(row[1]), *row[2:]) for row in rows]
            self.bytes_read += sum(len(version.value) for version in page)
        return self._pages[place]


def _event(trigger_id: TriggerId, met: Version) -> FiredEvent:
    """Return the event that ends a sensor: the value of the signal becomes that of the task, encoded as it is."""
    xcoms = b'"version":%d' % met.version
    if met.value != b"null":
        xcoms += b',"return_value":' + met.value
    run = f"signal {trigger_id}"
    return FiredEvent(trigger_id, run, 0, 0, b'{"xcoms":{' + xcoms + b"}}", kind="success", is_last=True)
