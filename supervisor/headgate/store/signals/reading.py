"""Signals that were sent, in the order of their versions, and their keys."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, and_, func, or_, select

from headgate.protocol.messages.signals import (
    DEFAULT_NAMESPACE,
    SIGNALS_PER_PAGE_MAX,
    address_problem,
    version_problem,
)
from headgate.protocol.values import decode_value
from headgate.store.db.bulk import Kind, find
from headgate.store.db.transaction import Tx
from headgate.store.errors import NoSuchRow, ValueRefused
from headgate.store.ids import DagRunId
from headgate.store.signals.conditions import is_waiting
from headgate.store.tables import dag, dag_run, signal, signal_key, signal_wait, task_instance

PAGE_BYTES_MAX = 1024 * 1024  # of the values that a page is read for; it ends with the one that exceeds this


class Signal(msgspec.Struct, frozen=True):
    """One version of a key. ``sender`` is text for people; ``sent_at`` is aware, by the database's clock.

    ``dag`` and ``run_id`` name the run that it is for, if it is for one alone; both are "" once that run was cleaned.
    ``data`` is the encoded value, which `value` decodes.
    """

    namespace: str
    key: str
    version: int
    data: bytes
    sender: str
    sent_at: datetime
    dedup: str
    dag: str | None = None
    run_id: str | None = None

    @property
    def value(self) -> Any:
        """The value, decoded anew at each access.

        Raises `headgate.protocol.errors.ValueMalformed` for a type that is not registered in this process.
        """
        return decode_value(self.data)


class SignalPage(msgspec.Struct, frozen=True):
    """Versions of a key in their order. ``key_id`` is None if nothing was ever sent under the key."""

    signals: tuple[Signal, ...]
    key_id: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there were no versions."""
        return not self.signals

    @property
    def is_held_up(self) -> bool:
        """Never: whoever sends a signal reports it."""
        return False

    def concerns(self, key_id: int) -> bool:
        """Whether new versions of this key may belong to the next page."""
        return self.key_id is None or key_id == self.key_id


class Heard(msgspec.Struct, frozen=True):
    """Versions of a key that a run listens for, in their order; the next ones are above ``seen``."""

    signals: tuple[Signal, ...]
    seen: int


class KeyRow(msgspec.Struct, frozen=True):
    """One key. ``last_version`` is the number of its newest version, which was sent at ``sent_at``."""

    id: int
    namespace: str
    key: str
    last_version: int
    created_date: datetime
    sent_at: datetime | None = None


class WaitingTask(msgspec.Struct, frozen=True):
    """A task that waits for signals under a key, and was held against all versions up to ``seen_version``.

    A sensor waits for one; a task with a rule about the key waits for them until its run ends. ``waits`` is False if
    the rule takes each version for a start of its own, and has one that has not started the task yet. ``is_asked`` is
    True while users' code is to decide about the next version, and ``error`` is why it could not decide about one.
    Without a ``task_id`` it is a run that a signal is to end, and without a ``run_id`` a DAG that has runs for them.
    """

    dag: str
    run_id: str | None
    task_id: str | None
    seen_version: int
    has_rule: bool = False
    waits: bool = True
    is_asked: bool = False
    error: str | None = None


_ADDRESS = Kind(signal_key, ("namespace", "key"))
_NEWEST = and_(signal.c.key_id == signal_key.c.id, signal.c.version == signal_key.c.last_version)
_KEYS = select(
    *(signal_key.c[name] for name in KeyRow.__struct_fields__ if name in signal_key.c), signal.c.sent_at
).select_from(signal_key.outerjoin(signal, _NEWEST))
_SIGNALS = select(
    *(signal_key.c.namespace, signal_key.c.key, signal.c.version, signal.c.value.label("data"), signal.c.sender),
    *(signal.c.sent_at, signal.c.dedup, signal.c.dag_run_id, dag.c.name.label("dag"), dag_run.c.run_id),
).select_from(
    signal.join(signal_key)
    .outerjoin(dag_run, dag_run.c.id == signal.c.dag_run_id)
    .outerjoin(dag, dag.c.id == dag_run.c.dag_id)
)


def check_address(key: str, namespace: str) -> None:
    """Raise `ValueRefused` for a key or a namespace that none can be sent under."""
    if (problem := address_problem(key, namespace)) is not None:
        raise ValueRefused(problem)


def check_version(name: str, number: int) -> None:
    """Raise `ValueRefused` for what is no number of a version, nor 0."""
    if (problem := version_problem(name, number)) is not None:
        raise ValueRefused(problem)


def check_limit(limit: int) -> int:
    """Return ``limit``; raise `ValueRefused` unless it is from 1 to `SIGNALS_PER_PAGE_MAX`."""
    if not 1 <= limit <= SIGNALS_PER_PAGE_MAX:
        raise ValueRefused(f"limit must be from 1 to {SIGNALS_PER_PAGE_MAX:,}: {limit}")
    return limit


def key_row(tx: Tx, key: str, namespace: str) -> KeyRow:
    """Return a key. Raises `NoSuchRow`."""
    row = tx.connection.execute(_KEYS.where(_is_named(key, namespace))).first()
    if row is None:
        where = "" if namespace == DEFAULT_NAMESPACE else f"the namespace {namespace!r}"
        raise NoSuchRow("key of signals", key, of=where)
    return KeyRow(**row._mapping)


def keys(tx: Tx, namespace: str | None, beyond_id: int, limit: int) -> list[KeyRow]:
    """Return keys by their ids, those of a namespace or all."""
    which = [signal_key.c.id > beyond_id]
    if namespace is not None:
        which.append(signal_key.c.namespace == namespace)
    rows = tx.connection.execute(_KEYS.where(*which).order_by(signal_key.c.id).limit(limit))
    return [KeyRow(**row._mapping) for row in rows]


def read_page(
    tx: Tx, key: str, namespace: str, *, after: int, limit: int, dag_run: DagRunId | None = None
) -> SignalPage:
    """Return the versions of a key above ``after``, the oldest first; at most ``limit``, and not many bytes.

    With ``dag_run`` only those that this run may consider.
    """
    key_id = tx.connection.execute(select(signal_key.c.id).where(_is_named(key, namespace))).scalar_one_or_none()
    if key_id is None:
        return SignalPage(())
    page, _ = _page_of(tx, key_id, after, limit, PAGE_BYTES_MAX, dag_run)
    return SignalPage(tuple(page), key_id)


def hear(tx: Tx, key: str, namespace: str, *, after: int | None, dag_run: DagRunId, bytes_max: int) -> Heard:
    """Return the versions of a key above ``after`` that a run may consider, and up to which there are no others.

    At most `SIGNALS_PER_PAGE_MAX`, and about ``bytes_max`` of values. Without ``after`` none, only where the key is.
    """
    columns = (signal_key.c.id, signal_key.c.last_version)
    row = tx.connection.execute(select(*columns).where(_is_named(key, namespace))).first()
    if row is None or after is None or row.last_version <= after:
        return Heard((), (0 if row is None else int(row.last_version)) if after is None else after)
    # Read after the newest version: all up to that one are there (I25).
    page, may_have_more = _page_of(tx, row.id, after, SIGNALS_PER_PAGE_MAX, bytes_max, dag_run)
    newest = page[-1].version if page else 0
    return Heard(tuple(page), newest if may_have_more else max(newest, int(row.last_version)))


def newest_versions(tx: Tx, addresses: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the newest version of each key that there is, by its namespace and name."""
    found = find(tx.connection, _ADDRESS, sorted(addresses), returning=(*_ADDRESS.columns, "last_version"))
    return {(namespace, key): version for namespace, key, version in found}


def _page_of(
    tx: Tx, key_id: int, after: int, limit: int, bytes_max: int, dag_run: DagRunId | None
) -> tuple[list[Signal], bool]:
    """Return versions of a key, and whether they end at a limit."""
    statement = _SIGNALS.where(signal.c.key_id == key_id, signal.c.version > after).order_by(signal.c.version)
    page: list[Signal] = []
    for found in _read(tx, statement.limit(limit), dag_run):
        page.append(found)
        bytes_max -= len(found.data)
        if bytes_max <= 0:
            return page, True
    return page, len(page) == limit


def newest(tx: Tx, key: str, namespace: str, limit: int) -> list[Signal]:
    """Return the newest versions of a key, the oldest of them first."""
    statement = _SIGNALS.where(_is_named(key, namespace)).order_by(signal.c.version.desc()).limit(limit)
    return _read(tx, statement, None)[::-1]


def version_of(tx: Tx, key: str, namespace: str, version: int, dag_run: DagRunId | None) -> Signal | None:
    """Return one version of a key; None if it was not sent yet, or is not kept any more."""
    found = _read(tx, _SIGNALS.where(_is_named(key, namespace), signal.c.version == version), dag_run)
    return found[0] if found else None


def waiting(tx: Tx, key: str, namespace: str, limit: int) -> list[WaitingTask]:
    """Return tasks, runs and DAGs that wait for a key, those that have waited longest first."""
    of_task = or_(
        task_instance.c.trigger_id == signal_wait.c.trigger_id, task_instance.c.id == signal_wait.c.task_instance_id
    )
    statement = (
        select(
            *(dag.c.name.label("dag"), dag_run.c.run_id, task_instance.c.task_id, signal_wait.c.seen_version),
            *(signal_wait.c.rule.is_not(None).label("has_rule"), (~signal_wait.c.is_held).label("waits")),
            *(signal_wait.c.ask_at.is_not(None).label("is_asked"), signal_wait.c.decision_error.label("error")),
        )
        .select_from(
            signal_wait.outerjoin(task_instance, of_task)
            .outerjoin(dag_run, dag_run.c.id == signal_wait.c.dag_run_id)
            .join(dag, dag.c.id == func.coalesce(dag_run.c.dag_id, signal_wait.c.dag_id))
        )
        .where(signal_wait.c.namespace == namespace, signal_wait.c.key == key, is_waiting())
        .where(or_(task_instance.c.id.is_not(None), signal_wait.c.trigger_id.is_(None)))
        .where(or_(signal_wait.c.dag_id.is_(None), dag.c.removed_at.is_(None)))
        .order_by(signal_wait.c.id)
        .limit(limit)
    )
    return [WaitingTask(**row._mapping) for row in tx.connection.execute(statement)]


def _is_named(key: str, namespace: str) -> ColumnElement[bool]:
    return and_(signal_key.c.namespace == namespace, signal_key.c.key == key)


def _read(tx: Tx, statement: Select[*tuple[Any, ...]], run: DagRunId | None) -> list[Signal]:
    if run is not None:
        statement = statement.where(or_(signal.c.dag_run_id.is_(None), signal.c.dag_run_id == run))
    signals = []
    for row in tx.connection.execute(statement).mappings():
        fields = dict(row)
        if fields.pop("dag_run_id") is not None and fields["run_id"] is None:
            fields |= {"dag": "", "run_id": ""}
        signals.append(Signal(**fields))
    return signals
