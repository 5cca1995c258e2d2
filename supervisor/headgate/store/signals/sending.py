"""Sending: each signal gets the next version of its key, in the transaction that stores it (I25).

Whoever sends locks the row of the key until the commit, so the versions of a key are given in the order in which they
are committed: a reader who has seen one has seen, or can see, all before it. Nothing is promised over several keys.

**Locks.** Keys are locked in the order of their namespaces and names, so that two who send to the same keys do not wait
for each other; after the rows of tasks, and before those of runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import bindparam, delete, func, select, true, update

from headgate.protocol import marks
from headgate.protocol.encoded_values import encoding_problem
from headgate.protocol.messages.signals import (
    DEFAULT_NAMESPACE,
    KEYS_MAX,
    SENDS_MAX,
    VERSIONS_KEPT_MAX,
    SentSignal,
    SignalSend,
    signal_problem,
)
from headgate.store.db.bulk import Kind, find, insert_into, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import DatabaseNow, bound, read
from headgate.store.db.transaction import Tx
from headgate.store.errors import ValueRefused
from headgate.store.ids import DagRunId
from headgate.store.signals.conditions import is_waiting
from headgate.store.tables import signal, signal_key, signal_wait

SENDER_CHARS_MAX = 1000  # three ids and some words

Address = tuple[str, str]  # namespace and key


class NewSignal(msgspec.Struct, frozen=True):
    """A signal to be sent. ``value`` is encoded; ``dag_run`` is set if it is for that run alone."""

    key: str
    value: bytes
    dedup: str
    sender: str
    namespace: str = DEFAULT_NAMESPACE
    dag_run: DagRunId | None = None

    @classmethod
    def of(cls, said: SignalSend, sender: str, dag_run: DagRunId | None) -> NewSignal:
        """Return what a child asks for, which ``sender`` is; ``dag_run`` is its run, if it has one.

        Raises `ValueRefused` for a malformed one.
        """
        if (problem := signal_problem(said)) is not None:
            raise ValueRefused(problem)
        if (problem := encoding_problem(said.value)) is not None:
            raise ValueRefused(f"the value of the signal {said.key!a:.60} {problem}")
        if said.is_of_run and dag_run is None:
            raise ValueRefused(f"the signal {said.key!a:.60} is for its sender's run alone, and the sender has none")
        run = dag_run if said.is_of_run else None
        return cls(said.key, said.value, said.dedup, sender[:SENDER_CHARS_MAX], said.namespace, run)


def check_count(count: int) -> None:
    """Raise `ValueRefused` for more signals than one call, or one step, may send."""
    if count > SENDS_MAX:
        raise ValueRefused(f"{count:,} signals are sent at once; the limit is {SENDS_MAX:,}")


def news_of(said: Sequence[SignalSend], sender: str, dag_run: DagRunId | None) -> list[NewSignal]:
    """Return what one step, or one trigger, asks for. Raises `ValueRefused` for what it may not send."""
    check_count(len(said))
    return [NewSignal.of(one, sender, dag_run) for one in said]


class _Key(msgspec.Struct):
    """A key whose row is locked."""

    id: int
    namespace: str
    key: str
    last_version: int


_OF_KEY = signal_key.c.id == bindparam("of_id")
_LOCK = Prepared(
    select(signal_key.c.id, signal_key.c.last_version)
    .where(signal_key.c.namespace == bindparam("namespace"), signal_key.c.key == bindparam("key"))
    .with_for_update(key_share=True)
)
_MOVE = Prepared(update(signal_key).where(_OF_KEY).values(last_version=bindparam("version"), is_unseen=true()))
_TRIM = Prepared(delete(signal).where(signal.c.key_id == bindparam("of_id"), signal.c.version <= bindparam("to")))
_SEEN = Prepared(
    select(func.min(signal_wait.c.seen_version)).where(
        signal_wait.c.namespace == bindparam("namespace"), signal_wait.c.key == bindparam("key"), is_waiting()
    )
)
_NEWEST_AT = (
    select(signal.c.sent_at)
    .where(signal.c.key_id == bindparam("of_id"), signal.c.version == bindparam("version"))
    .scalar_subquery()
)
_FIRST = (
    select(signal.c.version)
    .where(signal.c.key_id == bindparam("of_id"), signal.c.dedup == bindparam("dedup"))
    .scalar_subquery()
)
_LOOK = Prepared(select(DatabaseNow(), _NEWEST_AT, _FIRST))
_DEDUP = Kind(signal, ("key_id", "dedup"))
_NEW = Kind(signal, ("key_id", "version", "value", "dedup", "dag_run_id", "sender", "sent_at"))


def send(tx: Tx, signals: Sequence[NewSignal], *, is_limited: bool = True) -> list[SentSignal]:
    """Send signals; return what each has become, in the same order. They act in this order, whatever their keys are.

    May be repeated: one whose dedup the key has had is not sent again, and has the version of the first. Only versions
    that are kept are known by their dedup. Raises `ValueRefused` for one key too many, if that ``is_limited``.
    """
    by_address: dict[Address, list[int]] = {}
    for index, one in enumerate(signals):
        by_address.setdefault((one.namespace, one.key), []).append(index)
    sent: dict[int, SentSignal] = {}
    keys: dict[Address, _Key] = {}
    moments: list[datetime] = []
    for address, indexes in sorted(by_address.items()):
        keys[address] = key = _locked(tx, address, is_limited=is_limited)
        moment, versions = _look(tx, key, sorted({signals[index].dedup for index in indexes}))
        moments.append(moment)
        sent |= _versions(key, versions, {index: signals[index] for index in indexes})
    new = [(one, sent[index].version) for index, one in enumerate(signals) if sent[index].is_new]
    if new:
        now = bound(tx.connection, max(moments))
        rows = [
            (keys[one.namespace, one.key].id, version, one.value, one.dedup, one.dag_run, one.sender, now)
            for one, version in new
        ]
        inserted = insert_new(tx.connection, _NEW, rows, returning=("id",))
        assert len(inserted) == len(rows), "the keys are locked"
        for key in keys.values():
            _move(tx, key, max(sent[index].version for index in by_address[key.namespace, key.key]))
        marks.reach("signals.sent_written")
        tx.notify()
        tx.notify_listeners([key.id for key in keys.values()])
    return [sent[index] for index in range(len(signals))]


def note_committed() -> None:
    """Say that signals were sent: the end of each verb that sends some at once."""
    marks.reach("signals.sent_committed")


def _locked(tx: Tx, address: Address, *, is_limited: bool) -> _Key:
    """Lock a key, which is made if there is none. Raises `ValueRefused` if there are too many."""
    namespace, key = address
    while (row := _LOCK.run(tx.connection, namespace=namespace, key=key).fetchone()) is None:
        _make(tx, address, is_limited=is_limited)
    return _Key(int(row[0]), namespace, key, int(row[1]))


def lock(tx: Tx, key_id: int) -> None:
    """Keep everyone from sending under a key until the transaction ends."""
    tx.connection.execute(select(signal_key.c.id).where(signal_key.c.id == key_id).with_for_update())


def _make(tx: Tx, address: Address, *, is_limited: bool) -> None:
    new = insert_into(tx.connection, signal_key).values(namespace=address[0], key=address[1], created_date=tx.now)
    made = tx.connection.execute(new.on_conflict_do_nothing().returning(signal_key.c.id)).scalar_one_or_none()
    # There are never more keys than the newest id says, and they are counted only if that is too high.
    if is_limited and made is not None and made > KEYS_MAX and _count_keys(tx) > KEYS_MAX:
        raise ValueRefused(
            f"there are {KEYS_MAX:,} keys of signals already: "
            f"`headgate signals forget KEY` forgets one that is not needed any more"
        )


def _count_keys(tx: Tx) -> int:
    return int(tx.connection.execute(select(func.count()).select_from(signal_key)).scalar_one())


def _look(tx: Tx, key: _Key, dedups: Sequence[str]) -> tuple[datetime, dict[str, int]]:
    """Return when the next version of a locked key is sent, and which of these dedups it has had, with their versions.

    Later versions never have earlier times: what rules meet acts in the order of these times. So it is not the time of
    the transaction, which may have waited for the key; and it is none before that of the newest version, should the
    clock have been set back.
    """
    first, *others = dedups
    looked = _LOOK.run(tx.connection, of_id=key.id, version=key.last_version, dedup=first)
    now, newest, version = looked.fetchone()
    moment = read(tx.connection, now) if tx.clock is None else tx.clock()
    if newest is not None:
        moment = max(moment, read(tx.connection, newest))
    versions = {} if version is None else {first: int(version)}
    wanted = [(key.id, dedup) for dedup in others]
    return moment, versions | dict(find(tx.connection, _DEDUP, wanted, returning=("dedup", "version")))


def _versions(key: _Key, versions: dict[str, int], signals: Mapping[int, NewSignal]) -> dict[int, SentSignal]:
    """Return which version of a locked key each of these signals is; ``versions`` are those of dedups it has had."""
    sent: dict[int, SentSignal] = {}
    version = key.last_version
    for index, one in signals.items():
        is_new = one.dedup not in versions
        if is_new:
            version += 1
            versions[one.dedup] = version
        sent[index] = SentSignal(versions[one.dedup], is_new)
    return sent


def _move(tx: Tx, key: _Key, version: int) -> None:
    """Store the newest version of a locked key, if it is newer, and delete the oldest ones."""
    if version <= key.last_version:
        return
    _MOVE.run(tx.connection, of_id=key.id, version=version)
    if version > VERSIONS_KEPT_MAX:
        _trim(tx, key, version - VERSIONS_KEPT_MAX)


def _trim(tx: Tx, key: _Key, to: int) -> None:
    """Delete old versions of a locked key, but none that a task which waits has not been held against."""
    (seen,) = _SEEN.run(tx.connection, namespace=key.namespace, key=key.key).fetchone()
    _TRIM.run(tx.connection, of_id=key.id, to=to if seen is None else min(to, seen))
