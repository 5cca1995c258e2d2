"""Tasks that wait for signals are ended by them, in the database alone: no worker, no trigger, no users' code (I28).

Each wait is held against the versions of its key, in their order, each once. The first that fits ends the task: it is
stored as the event of the wait's trigger, and from there on everything is as with the event of any other trigger. Place
and end are one transaction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Integer, bindparam, select

from headgate.protocol import marks
from headgate.protocol.messages.runner import FiredEvent
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import LeasedTx
from headgate.store.db.verbs import Verbs, leased
from headgate.store.ids import Epoch
from headgate.store.signals import waits
from headgate.store.signals.waits import OpenWait
from headgate.store.tables import signal, signal_key
from headgate.store.tasks import deferral, task_rows
from headgate.store.triggers import events as event_log

CONSIDERED_MAX = 500  # waits of one transaction
PAGE_VERSIONS_MAX = 20  # read at once, and held against one wait in one transaction: values of 1 MiB at most


class Considered(msgspec.Struct, frozen=True):
    """Result of one transaction: how many tasks have ended, and whether there may be more to consider."""

    tasks: int = 0
    has_more: bool = False


class _Version(NamedTuple):
    """One version of a key; ``dag_run_id`` is set if it is for that run alone."""

    version: int
    value: bytes
    dag_run_id: int | None


_PAGE = Prepared(
    select(signal.c.version, signal.c.value, signal.c.dag_run_id)
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
        """Hold up to ``limit`` waits against the signals that they have not seen. Without any, it only reads."""
        with self.database.reading() as tx:
            if not waits.has_work(tx):
                return Considered()
        return self._consider(epoch, limit)

    @leased
    def _consider(self, tx: LeasedTx, limit: int) -> Considered:
        found = waits.to_look_at(tx, limit)
        if not found:
            return Considered(0, waits.unmark_keys(tx, limit))
        looks = _Looks(tx)
        ended = {wait: met for wait in found if (met := looks.look(wait)) is not None}
        events = [_event(wait, met) for wait, met in ended.items()]
        if events:
            event_log.insert_events(tx, events)
            deferral.take_events(tx, events, {wait.trigger_id for wait in ended})
            tx.notify()  # this supervisor may have no worker that is free for what comes next
        for wait in ended:
            waits.end(tx, wait)
        marks.reach("signals.considered")
        return Considered(len(ended), has_more=True)


class _Looks:
    """Holds waits against versions; many waits for one key read them once."""

    def __init__(self, tx: LeasedTx) -> None:
        self._tx = tx
        self._pages: dict[tuple[str, str, int], list[_Version]] = {}

    def look(self, wait: OpenWait) -> _Version | None:
        """Return the version that ends a wait; else move the wait behind those that do not, and return None."""
        if task_rows.locked_by_trigger(self._tx, wait.trigger_id) is None:
            waits.end(self._tx, wait)  # a user has cleared or marked the task, or its timeout was over
            return None
        page = self._page(wait)
        wanted = None if wait.value is None else msgspec.json.decode(wait.value)
        for version in page:
            if version.dag_run_id not in (None, wait.dag_run_id):
                continue
            if wait.value is None or _is_equal(version.value, wait.value, wanted):
                return version
        is_all = len(page) < PAGE_VERSIONS_MAX
        waits.move(self._tx, wait, max(wait.last_version, wait.seen_version) if is_all else page[-1].version)
        return None

    def _page(self, wait: OpenWait) -> list[_Version]:
        """Return versions of a key from a place on, no newer than what the wait knows of."""
        place = (wait.namespace, wait.key, wait.seen_version)
        if place not in self._pages:
            where = {"namespace": wait.namespace, "key": wait.key, "after": wait.seen_version}
            rows = _PAGE.run(self._tx.connection, **where, limit=PAGE_VERSIONS_MAX).fetchall()
            self._pages[place] = [_Version(row[0], bytes(row[1]), row[2]) for row in rows]
        return self._pages[place]


def _is_equal(value: bytes, wanted_bytes: bytes, wanted: Any) -> bool:
    """Whether two values are equal, whatever the order of the keys in their dicts; no type of a user's is made."""
    return value == wanted_bytes or bool(msgspec.json.decode(value) == wanted)


def _event(wait: OpenWait, met: _Version) -> FiredEvent:
    """Return the event that ends the task of a wait: its value becomes that of the task, encoded as it is."""
    xcoms = b'"version":%d' % met.version
    if met.value != b"null":
        xcoms += b',"return_value":' + met.value
    run = f"signal {wait.trigger_id}"
    return FiredEvent(wait.trigger_id, run, 0, 0, b'{"xcoms":{' + xcoms + b"}}", kind="success", is_last=True)
