"""How a wait for signals begins, and which versions it has still to be held against (I28): a sensor's, or a rule's.

**Since the run was created.** The transaction that creates a run reads the newest version of each key that its tasks
wait for. The versions of a key are committed in their order, so whatever is committed after that has a greater one:
no lock is needed for it. What was sent before does not count, unless the author says ``since="latest"``.

**Nothing in between.** A wait begins without a lock on its key, so a version may be committed between the look at the
key and the commit of the wait. Therefore a wait is *fresh* until it was looked at after its commit; and whoever sends
marks the key *unseen*. Of a wait and a version the later commit leaves a mark, and whoever finds that sees both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from sqlalchemy import (
    Integer,
    and_,
    bindparam,
    delete,
    exists,
    false,
    func,
    literal_column,
    or_,
    select,
    text,
    tuple_,
    update,
)

from headgate.protocol.messages.dags import DagSpec
from headgate.protocol.messages.rules import SignalRule, encode_predicate
from headgate.protocol.messages.signals import Predicate, SignalWait, Since
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import ROWS_PER_STATEMENT_MAX, Kind, chunks, find, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRowId, DagRunId, TriggerId
from headgate.store.signals.conditions import IS_OPEN
from headgate.store.tables import dag_run, signal, signal_key, signal_start, signal_wait, task_instance

QUEUE = ",signals"  # of the triggers of waits: lists of queues are separated by commas, so no supervisor has it

Address: TypeAlias = tuple[str, str]  # namespace and key

_W = signal_wait.c


class OpenWait(NamedTuple):
    """A wait that is to be looked at. ``last_version`` is the newest of its key, 0 if nothing was ever sent.

    ``trigger_id`` is None for that of a rule; of a rule of a DAG ``dag_id`` is set in place of ``dag_run_id``. One that
    ``takes_each`` takes one version for each start of its task. Of one that ``asks`` users' code decides what its
    versions do.
    """

    id: int
    trigger_id: TriggerId | None
    dag_run_id: DagRunId | None
    dag_id: DagRowId | None
    namespace: str
    key: str
    predicate: bytes | None
    seen_version: int
    takes_each: bool
    asks: bool
    last_version: int


# --- its begin -----------------------------------------------------------------------------------

_KEY = Kind(signal_key, ("namespace", "key"))
_START = Kind(signal_start, ("dag_run_id", "namespace", "key", "version"))
_START_OF = Prepared(
    select(signal_start.c.version).where(
        signal_start.c.dag_run_id == bindparam("of_run"),
        signal_start.c.namespace == bindparam("namespace"),
        signal_start.c.key == bindparam("key"),
    )
)
_OF_KEY = signal.join(signal_key)
_IS_NAMED = (signal_key.c.namespace == bindparam("namespace"), signal_key.c.key == bindparam("key"))
_CREATED = select(dag_run.c.created_date).where(dag_run.c.id == bindparam("of_run")).scalar_subquery()
_SENT_BEFORE = Prepared(
    select(func.max(signal.c.version)).select_from(_OF_KEY).where(*_IS_NAMED, signal.c.sent_at < _CREATED)
)
_NEWEST_UP_TO = Prepared(
    select(func.max(signal.c.version))
    .select_from(_OF_KEY)
    .where(
        *_IS_NAMED,
        signal.c.version <= bindparam("version"),
        or_(signal.c.dag_run_id.is_(None), signal.c.dag_run_id == bindparam("of_run")),
    )
)
_BEFORE = dag_run.alias("before")
_OTHER = task_instance.alias("other")
# Where a rule of the newest run before this one stood, if that run has ended.
_STOOD = Prepared(
    select(_W.seen_version)
    .select_from(signal_wait.outerjoin(_OTHER, _OTHER.c.id == _W.task_instance_id))
    .where(
        _W.dag_run_id
        == select(func.max(_BEFORE.c.id))
        .where(
            _BEFORE.c.id < bindparam("of_run"),
            _BEFORE.c.dag_id == select(dag_run.c.dag_id).where(dag_run.c.id == bindparam("of_run")).scalar_subquery(),
            _BEFORE.c.removed_at.is_(None),
        )
        .scalar_subquery(),
        exists(ONE).where(dag_run.c.id == _W.dag_run_id, dag_run.c.ended_at.is_not(None)),
        _W.rule == bindparam("of_rule"),
        func.coalesce(_OTHER.c.task_id, "") == bindparam("of_task"),
    )
)
_NEW = Kind(signal_wait, ("dag_run_id", "trigger_id", "namespace", "key", "predicate", "seen_version"))


def note_starts(tx: Tx, run: DagRunId, spec: DagSpec) -> None:
    """Record for a run that is being created which versions the keys have that it and its tasks wait for."""
    tasks = spec.tasks
    signals = [task.start_trigger.signal for task in tasks if task.start_trigger is not None]
    rules = [rule for task in tasks if task.signals is not None for rule in task.signals.rules]
    keys = [one for one in (*signals, *rules, *spec.end_on) if isinstance(one, SignalWait | SignalRule)]
    wanted = sorted({(one.namespace, one.key) for one in keys})
    if not wanted:
        return
    # A key that is being forgotten begins anew with version 1: that is waited for, and one is not forgotten meanwhile.
    for some in chunks(wanted, ROWS_PER_STATEMENT_MAX):
        of_keys = tuple_(signal_key.c.namespace, signal_key.c.key).in_(some)
        tx.connection.execute(select(signal_key.c.id).where(of_keys).with_for_update(read=True, key_share=True)).all()
    found = find(tx.connection, _KEY, wanted, returning=("namespace", "key", "last_version"))
    versions = {(namespace, key): version for namespace, key, version in found}
    rows = [(run, *address, versions.get(address, 0)) for address in wanted]
    insert_new(tx.connection, _START, rows, returning=("version",))


def begin_before(tx: Tx, run: DagRunId, versions: Mapping[Address, int]) -> None:
    """Have what was sent behind these versions count for a run that is being created, by namespace and key."""
    start = signal_start.c
    for (namespace, key), version in sorted(versions.items()):
        of_key = (start.dag_run_id == run, start.namespace == namespace, start.key == key)
        tx.connection.execute(update(signal_start).where(*of_key).values(version=version))


def begin(tx: Tx, run: DagRunId, trigger_id: TriggerId, wait: SignalWait) -> None:
    """Record that a task of a run waits for a signal, by this trigger."""
    predicate = wait.predicate if wait.value is None else Predicate("equal", wait.value)
    seen = seen_before(tx, run, wait.namespace, wait.key, wait.since)
    rows = [(run, trigger_id, wait.namespace, wait.key, encode_predicate(predicate), seen)]
    insert_new(tx.connection, _NEW, rows, returning=("id",))


def seen_before(
    tx: Tx, run: DagRunId, namespace: str, key: str, since: Since, *, rule: str = "", task_id: str | None = None
) -> int:
    """Return up to which version of a key nothing counts for a run; ``task_id`` has the ``rule``, or the run itself.

    With ``since="last_run"`` it is the place of the same rule of the run before. If that has not ended, what is sent
    meanwhile is for it, and signals count since this run was created.
    """
    of_run = {"of_run": run, "namespace": namespace, "key": key}
    row = _START_OF.run(tx.connection, **of_run).fetchone()
    if row is None:  # the DAG had no such task, or rule, when the run was created
        row = _SENT_BEFORE.run(tx.connection, **of_run).fetchone()
    seen = int(row[0] or 0)
    if since == "latest":
        return _before_newest(tx, namespace, key, seen, run)
    if since == "last_run":
        before = _STOOD.run(tx.connection, of_run=run, of_rule=rule, of_task=task_id or "").fetchone()
        return seen if before is None else min(seen, int(before[0]))
    return seen


def _before_newest(tx: Tx, namespace: str, key: str, seen: int, run: DagRunId | None) -> int:
    """Return the version before the newest one that counts, of those up to ``seen``."""
    of = {"of_run": run, "namespace": namespace, "key": key}
    newest = _NEWEST_UP_TO.run(tx.connection, version=seen, **of).fetchone()[0]
    return seen if newest is None else int(newest) - 1


_VERSION_OF = Prepared(select(signal_key.c.last_version).where(*_IS_NAMED))


def newest(tx: Tx, rule: SignalRule) -> int:
    """Return up to which version of its key nothing counts for a rule that a DAG has from now on."""
    row = _VERSION_OF.run(tx.connection, namespace=rule.namespace, key=rule.key).fetchone()
    seen = 0 if row is None else int(row[0])
    return _before_newest(tx, rule.namespace, rule.key, seen, None) if rule.since == "latest" else seen


# --- what is to be looked at ---------------------------------------------------------------------

_COLUMNS = tuple(_W[name] for name in OpenWait._fields[:-1])
SAME_KEY = and_(signal_key.c.namespace == _W.namespace, signal_key.c.key == _W.key)
_LAST = func.coalesce(select(signal_key.c.last_version).where(SAME_KEY).scalar_subquery(), 0)
# As text, as the partial indexes say it.
_IS_FRESH, _IS_UNSEEN = text("signal_wait.is_fresh"), text("signal_key.is_unseen")
_LIMIT = bindparam("limit", type_=Integer())
# One that is held, or about which users' code is to be asked, is not fresh, and is not looked at if more is sent.
_IS_BEHIND = and_(IS_OPEN, _W.seen_version < signal_key.c.last_version, _W.is_held.is_(False), _W.ask_at.is_(None))
# Those that another supervisor looks at are passed over.
_FRESH = Prepared(
    select(*_COLUMNS, _LAST)
    .where(_IS_FRESH)
    .order_by(_W.id)
    .limit(_LIMIT)
    .with_for_update(skip_locked=True, of=signal_wait)
)
_PENDING = Prepared(
    select(*_COLUMNS, signal_key.c.last_version)
    .select_from(signal_key.join(signal_wait, SAME_KEY))
    .where(_IS_UNSEEN, _IS_BEHIND)
    .order_by(_W.id + literal_column("0"))  # else SQLite reads all rows in the order of their ids
    .limit(_LIMIT)
    .with_for_update(skip_locked=True, of=signal_wait)
)
_UNSEEN = Prepared(
    select(signal_key.c.id)
    .where(_IS_UNSEEN)
    .order_by(signal_key.c.id)
    .limit(_LIMIT)
    .with_for_update(skip_locked=True, key_share=True)
)
_IS_PENDING = exists(ONE).where(SAME_KEY, _IS_BEHIND)
_UNMARK = Prepared(
    update(signal_key).where(signal_key.c.id == bindparam("of_id"), ~_IS_PENDING).values(is_unseen=false())
)
_OF_WAIT = _W.id == bindparam("of_wait")
_MOVE = Prepared(
    update(signal_wait).where(_OF_WAIT).values(seen_version=bindparam("version"), is_fresh=bindparam("is_left"))
)
_MEET = Prepared(
    update(signal_wait)
    .where(_OF_WAIT)
    .values({name: bindparam(name) for name in ("met_version", "met_value", "met_at", "met_id", "is_held")})
)
_ASK = Prepared(
    update(signal_wait)
    .where(_OF_WAIT)
    .values(seen_version=bindparam("version"), is_fresh=false(), ask_at=bindparam("now", type_=UtcDateTime()))
)
_END = Prepared(delete(signal_wait).where(_OF_WAIT))
# There are waits, or keys, to be looked at.
WORK = (exists(select(_W.id).where(_IS_FRESH)), exists(select(signal_key.c.id).where(_IS_UNSEEN)))
_HAS_WORK = Prepared(select(or_(*WORK)))


def has_work(tx: Tx) -> bool:
    """Whether there are waits, or keys, to be looked at."""
    return bool(_HAS_WORK.run(tx.connection).fetchone()[0])


def to_look_at(tx: Tx, limit: int) -> list[OpenWait]:
    """Lock and return up to ``limit`` waits that are fresh, or have not seen the newest version of their key.

    Those that are passed over are left out.
    """
    found = [OpenWait._make(row) for row in tx.passed_over.read("rule", limit, partial(_FRESH.run, tx.connection))]
    if len(found) < limit:
        known = {wait.id for wait in found}
        pending = tx.passed_over.read("rule", limit - len(found), partial(_PENDING.run, tx.connection))
        found += [OpenWait._make(row) for row in pending if row[0] not in known]
    return sorted(found, key=lambda wait: wait.id)


def move(tx: Tx, wait: OpenWait, version: int, *, is_held: bool = False) -> None:
    """Record that a wait was held against all versions up to this one."""
    # If there are more, it is looked at again, whether its key is marked or not.
    is_left = version < wait.last_version and not is_held
    _MOVE.run(tx.connection, of_wait=wait.id, version=version, is_left=is_left)


def meet(tx: Tx, wait: OpenWait, version: int, value: bytes, sent_at: object, signal_id: int) -> None:
    """Record that a version has met a rule, which is to act; ``sent_at`` is as the driver returned it."""
    met = {"met_version": version, "met_value": value, "met_at": sent_at, "met_id": signal_id}
    met["is_held"] = wait.takes_each
    _MEET.run(tx.connection, of_wait=wait.id, **met)


def ask(tx: Tx, wait: OpenWait, version: int) -> None:
    """Record that users' code is to be asked what this version does, the first that fits, before any after it."""
    _ASK.run(tx.connection, of_wait=wait.id, version=version - 1, now=bound(tx.connection, tx.now))


def end(tx: Tx, wait: OpenWait) -> None:
    """Forget a wait, which has ended."""
    _END.run(tx.connection, of_wait=wait.id)


def unmark_keys(tx: Tx, limit: int) -> bool:
    """Unmark keys whose newest versions all waits have seen; return whether there may be more.

    A key that is being sent to is passed over: it will be marked again, and a supervisor notified. A key is unmarked
    only while it is locked, so no version is overlooked that is committed meanwhile.
    """
    locked = [{"of_id": row[0]} for row in _UNSEEN.run(tx.connection, limit=limit).fetchall()]
    if locked:
        _UNMARK.run_many(tx.connection, locked)
    return len(locked) == limit
