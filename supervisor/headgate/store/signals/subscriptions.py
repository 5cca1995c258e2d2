"""The rules of a run's tasks about signals, as rows that are held against them: one for each rule of each task (I29).

They are made when the run is evaluated for the first time, and changed with the DAG. Which versions count is known
from the creation of the run (`headgate.store.signals.waits`). Who considers signals writes what has met a rule into its
row; who evaluates the run has that act, and takes it from the row, in the transaction in which it acts.

Rows by hand stand for what a user asks for: a start, a restart, or a stop of one task. They act in the same way.

**Locks.** Rows are locked before tasks. An evaluation has its run locked already, so it waits for no row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Integer,
    and_,
    bindparam,
    case,
    delete,
    exists,
    false,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)

from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.queries import StartSignal, StartSignals
from headgate.protocol.messages.rules import Action, ClockRule, Rule, SignalRule, encode_predicate, rule_name
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE
from headgate.protocol.values import encode_value
from headgate.store.db.bulk import Kind, chunks, insert_into, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound
from headgate.store.db.times import read as read_moment
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.signals import waits
from headgate.store.tables import signal, signal_key, signal_wait, task_instance

BY_HAND: Final[dict[str, Action]] = {f"by hand {action}": action for action in ("START", "RESTART", "STOP")}
_BY_HAND_OF: Final = {action: name for name, action in BY_HAND.items()}
NO_KEY: Final = ""  # of rows that are about no signal; those about a task have its id in place of a namespace
CLOCK: Final = "every"  # the same of those about the time

_W = signal_wait.c


class RuleRow(NamedTuple):
    """The row of a rule. ``met_at`` is when the version was sent that has met it, and has done nothing yet."""

    id: int
    instance: TaskInstanceId
    rule: str
    seen_version: int
    is_held: bool
    takes_each: bool
    met_version: int | None
    met_at: datetime | None
    met_id: int | None


class Followed(NamedTuple):
    """Whether any rules of a run are others now; and whether that is all: other transactions may have rows locked."""

    has_changed: bool
    is_done: bool = True


_COLUMNS = tuple(_W[{"instance": "task_instance_id"}.get(name, name)] for name in RuleRow._fields)
_IS_RULE = and_(_W.dag_run_id == bindparam("of_run"), _W.rule.is_not(None))
_OF_RUN = Prepared(select(*_COLUMNS).where(_IS_RULE).order_by(_W.id))
_OF_TASK = Prepared(select(*_COLUMNS).where(_W.task_instance_id == bindparam("of_task")).order_by(_W.id))
_LOCK = Prepared(
    select(*_COLUMNS)
    .where(_W.task_instance_id == bindparam("of_task"))
    .order_by(_W.id)
    .with_for_update(skip_locked=True)
)


def read(tx: Tx, run: DagRunId) -> list[RuleRow]:
    """Return the rows of a run."""
    return [_row(tx, found) for found in _OF_RUN.run(tx.connection, of_run=run).fetchall()]


def lock(tx: Tx, instance: TaskInstanceId) -> list[RuleRow] | None:
    """Lock the rows of a task and return them; None if another transaction has one of them locked."""
    rows = [_row(tx, found) for found in _LOCK.run(tx.connection, of_task=instance).fetchall()]
    return rows if len(rows) == len(_OF_TASK.run(tx.connection, of_task=instance).fetchall()) else None


def _row(tx: Tx, found: Sequence[Any]) -> RuleRow:
    row = RuleRow._make(found)
    return row if row.met_at is None else row._replace(met_at=read_moment(tx.connection, row.met_at))


# --- as the DAG has them -------------------------------------------------------------------------

_NEW = Kind(
    signal_wait,
    (
        *("dag_run_id", "task_instance_id", "rule", "namespace", "key", "predicate", "seen_version", "is_fresh"),
        *("takes_each", "every_s", "due_at", "met_version", "met_value", "met_at"),
    ),
)
_T = task_instance.c
_NUMBER_OF_END = func.coalesce(
    select(_T.try_number + 1)
    .where(_T.dag_run_id == _W.dag_run_id, _T.task_id == _W.namespace, _T.map_index == literal_column("-1"))
    .scalar_subquery(),
    _W.seen_version,
)
_LAST = func.coalesce(select(signal_key.c.last_version).where(waits.SAME_KEY).scalar_subquery(), _W.seen_version)


def follow(tx: Tx, run: DagRunId, rows: Sequence[RuleRow], tasks: Mapping[TaskInstanceId, TaskSpec]) -> Followed:
    """Make, change and delete rows of a run as its tasks have rules now, by their instances."""
    wanted = {
        (instance, rule_name(rule)): (task, rule)
        for instance, task in tasks.items()
        if task.signals is not None
        for rule in task.signals.rules
    }
    known = {(row.instance, row.rule) for row in rows}
    gone = [row.id for row in rows if (row.instance, row.rule) not in wanted and row.rule not in BY_HAND]
    changed = [
        row.id
        for row in rows
        if (of := wanted.get((row.instance, row.rule))) is not None
        and isinstance(of[1], SignalRule)
        and _takes_each(of[0]) is not bool(row.takes_each)
    ]
    free = _unless_busy(tx, [*gone, *changed])
    for some in chunks(sorted(free.intersection(gone))):
        tx.connection.execute(delete(signal_wait).where(_W.id.in_(some)))
    for some in chunks(sorted(free.intersection(changed))):
        tx.connection.execute(update(signal_wait).where(_W.id.in_(some)).values(takes_each=~_W.takes_each))
    new = {place: of for place, of in wanted.items() if place not in known}
    for (instance, name), (task, rule) in new.items():
        _make(tx, run, instance, name, rule, takes_each=_takes_each(task))
    return Followed(bool(free or new), is_done=len(free) == len(gone) + len(changed))


def _takes_each(task: TaskSpec) -> bool:
    return task.signals is not None and task.signals.overlap == "each"


def _unless_busy(tx: Tx, ids: Sequence[int]) -> set[int]:
    """Lock rows, and return those that no other transaction has locked: who considers signals waits for the run."""
    found: set[int] = set()
    for some in chunks(sorted(ids)):
        free = select(_W.id).where(_W.id.in_(some)).order_by(_W.id).with_for_update(skip_locked=True)
        found.update(tx.connection.execute(free).scalars())
    return found


def _make(tx: Tx, run: DagRunId, instance: TaskInstanceId, name: str, rule: Rule, *, takes_each: bool) -> None:
    of_clock: tuple[Any, ...] = (None,) * 5
    if isinstance(rule, SignalRule):
        seen = waits.seen_before(tx, run, rule.namespace, rule.key, rule.since)
        about = (rule.namespace, rule.key, encode_predicate(rule.predicate), seen, True, takes_each)
    elif isinstance(rule, ClockRule):
        about = (CLOCK, NO_KEY, None, 1, False, False)
        # It starts the task now, with the run.
        now, next_at = bound(tx.connection, tx.now), bound(tx.connection, tx.now + timedelta(seconds=rule.every_s))
        of_clock = (rule.every_s, next_at, 1, _moment(tx.now), now)
    else:
        about = (rule.task_id, NO_KEY, None, 0, False, False)
    insert_new(tx.connection, _NEW, [(run, instance, name, *about, *of_clock)], returning=("id",))


_IS_PENDING = or_(_W.is_fresh, exists().where(waits.SAME_KEY, signal_key.c.last_version > _W.seen_version))
_PENDING = Prepared(select(exists().where(_IS_RULE, _W.is_held.is_(False), _IS_PENDING)))


def is_pending(tx: Tx, run: DagRunId) -> bool:
    """Whether signals were sent that were not held against the rules of a run."""
    return bool(_PENDING.run(tx.connection, of_run=run).fetchone()[0])


def close(tx: Tx, run: DagRunId) -> bool:
    """Have the rules of a run act no more, which is ending; return False if they may still.

    Another transaction has a row locked, to hold signals against it: then the run goes on.
    """
    ids = select(_W.id).where(_W.dag_run_id == run, _W.rule.is_not(None)).order_by(_W.id)
    every = list(tx.connection.execute(ids).scalars())
    if not every:
        return True
    locked = list(tx.connection.execute(ids.with_for_update(skip_locked=True)).scalars())
    if len(locked) < len(every):
        return False
    nothing = dict.fromkeys(("met_version", "met_value", "met_at", "met_id"), null())
    held = update(signal_wait).where(_W.id.in_(ids)).values(is_held=true(), is_fresh=false(), due_at=null(), **nothing)
    tx.connection.execute(held)
    # All tasks have ended: these are no ends to come, should the run go on.
    of_run = (_W.dag_run_id == run, _W.rule.is_not(None))
    about_tasks = (*of_run, _W.key == NO_KEY, _W.namespace != NO_KEY, _W.every_s.is_(None))
    tx.connection.execute(update(signal_wait).where(*about_tasks).values(seen_version=_NUMBER_OF_END))
    return True


def open_again(tx: Tx, run: DagRunId) -> None:
    """Have the rules of a run act again, which had ended and goes on: by what is sent, and what ends, from now on.

    Its row is locked by the caller. Nobody else locks rows that are closed, except for the rows by hand.
    """
    closed = (_W.is_held, _W.met_version.is_(None), _W.rule.not_in(list(BY_HAND)))
    next_at = case((_W.every_s.is_not(None), literal(tx.now, UtcDateTime())))
    again = {"seen_version": _LAST, "is_held": false(), "is_fresh": _W.key != NO_KEY, "due_at": next_at}
    tx.connection.execute(update(signal_wait).where(_W.dag_run_id == run, _W.rule.is_not(None), *closed).values(again))


# --- what has met them ---------------------------------------------------------------------------

_MEET = Prepared(
    update(signal_wait)
    .where(_W.id == bindparam("of_id"))
    .values({name: bindparam(name) for name in ("seen_version", "met_version", "met_value", "met_at")})
)
_SEE = Prepared(update(signal_wait).where(_W.id == bindparam("of_id")).values(seen_version=bindparam("seen_version")))


def see_end(tx: Tx, row: RuleRow, number: int) -> None:
    """Record that the ends of a task up to this one were held against a rule about it."""
    _SEE.run(tx.connection, of_id=row.id, seen_version=number)


def meet_by_end(tx: Tx, row: RuleRow, number: int, state: TaskState) -> None:
    """Record that the end ``number`` of a task, in this state, has met a rule about it."""
    value = encode_value(state.value, where="the state of a task")
    at = bound(tx.connection, tx.now)
    _MEET.run(tx.connection, of_id=row.id, seen_version=number, met_version=number, met_value=value, met_at=at)


_DUE = Prepared(
    select(_W.id, _W.dag_run_id, _W.seen_version, _W.every_s, _W.due_at)
    .where(_W.due_at.is_not(None), _W.due_at <= bindparam("now", type_=UtcDateTime()))
    .order_by(_W.due_at, _W.id)
    .limit(bindparam("limit", type_=Integer()))
    .with_for_update(skip_locked=True)
)
_TICK = Prepared(
    update(signal_wait)
    .where(_W.id == bindparam("of_id"))
    .values({name: bindparam(name) for name in ("seen_version", "due_at", "met_version", "met_value", "met_at")})
)


def tick(tx: Tx, limit: int) -> int:
    """Record that the time has met up to ``limit`` rules that are due; return how many. Several missed ones are one."""
    now = bound(tx.connection, tx.now)
    rows = _DUE.run(tx.connection, now=now, limit=limit).fetchall()
    for id_, run, seen, every_s, due in rows:
        due_at = read_moment(tx.connection, due)
        missed = (tx.now - due_at).total_seconds() // every_s
        next_at = bound(tx.connection, due_at + timedelta(seconds=every_s * (missed + 1)))
        met = {"seen_version": seen + 1, "met_version": seen + 1, "met_value": _moment(due_at), "met_at": now}
        _TICK.run(tx.connection, of_id=id_, due_at=next_at, **met)
        tx.mark_run_dirty(run)
    return len(rows)


def _moment(moment: datetime) -> bytes:
    return encode_value(moment, where="the time of a start")


def ask(tx: Tx, run: DagRunId, instance: TaskInstanceId, action: Action) -> None:
    """Record that a user wants a task to start, to restart, or to stop."""
    name = _BY_HAND_OF[action]
    met = {"met_version": 1, "met_value": None, "met_at": tx.now, "is_held": False}
    values = {"dag_run_id": run, "task_instance_id": instance, "rule": name, "namespace": "", "key": NO_KEY}
    new = insert_into(tx.connection, signal_wait).values(**values, seen_version=0, is_fresh=False, **met)
    tx.connection.execute(new.on_conflict_do_update(index_elements=[_W.task_instance_id, _W.rule], set_=met))
    tx.mark_run_dirty(run)


def take_back(tx: Tx, instance: TaskInstanceId, action: Action) -> None:
    """Take back what a user has asked for."""
    asked = (_W.task_instance_id == instance, _W.rule == _BY_HAND_OF[action])
    tx.connection.execute(update(signal_wait).where(*asked).values(_FORGET))


_FORGET = {name: null() for name in ("met_version", "met_value", "met_at", "met_id")}
# One that takes each version goes on with the next.
_FREE = {"is_fresh": _W.is_held, "is_held": false()}
_DROP = Prepared(update(signal_wait).where(_W.id == bindparam("of_id")).values(**_FORGET, **_FREE))
_START = Prepared(
    update(signal_wait)
    .where(_W.id == bindparam("of_id"))
    .values(
        previous_version=_W.start_version,
        previous_value=_W.start_value,
        start_version=_W.met_version,
        start_value=_W.met_value,
        **_FORGET,
        **_FREE,
    )
)
_PUT_OFF = Prepared(
    update(signal_wait)
    .where(_W.id == bindparam("of_id"))
    .values(previous_version=_W.start_version, previous_value=_W.start_value, start_version=null(), start_value=null())
)
_JOIN = Prepared(
    update(signal_wait)
    .where(_W.task_instance_id == bindparam("of_task"), _W.met_version.is_not(None))
    .values(start_version=_W.met_version, start_value=_W.met_value, **_FORGET, **_FREE)
)


_IS_BEFORE = or_(
    signal.c.sent_at < bindparam("at", type_=UtcDateTime()),
    and_(signal.c.sent_at == bindparam("at", type_=UtcDateTime()), signal.c.id <= bindparam("signal_id")),
)
_LAST_BEFORE = (
    select(signal.c.version)
    .select_from(signal.join(signal_key).join(signal_wait, waits.SAME_KEY))
    .where(_W.id == bindparam("of_wait"), signal.c.version > _W.seen_version, _IS_BEFORE)
    .order_by(signal.c.version.desc())
    .limit(literal_column("1"))
    .correlate(None)
    .scalar_subquery()
)
_PASS_OVER = Prepared(
    update(signal_wait)
    .where(_W.id == bindparam("of_id"))
    .values(seen_version=func.coalesce(_LAST_BEFORE, _W.seen_version))
)


def drop(tx: Tx, rows: Sequence[RuleRow]) -> None:
    """Record that what has met these rules has acted, or is not to."""
    for row in rows:
        if row.met_version is not None:
            _DROP.run(tx.connection, of_id=row.id)


def pass_over(tx: Tx, rows: Sequence[RuleRow], moment: tuple[datetime, int]) -> None:
    """Record that what was sent up to a stop is not to act any more, also if it was not held against these rules."""
    for row in rows:
        _PASS_OVER.run(
            tx.connection, of_id=row.id, of_wait=row.id, at=bound(tx.connection, moment[0]), signal_id=moment[1]
        )


def start(tx: Tx, rows: Sequence[RuleRow], put_off: Collection[str]) -> None:
    """Record that a task starts with what has met its rules, without those that are ``put_off``.

    The signals of its last start become the previous ones.
    """
    for row in rows:
        (_PUT_OFF if row.rule in put_off else _START).run(tx.connection, of_id=row.id)


def join(tx: Tx, instance: TaskInstanceId) -> None:
    """Record that what has met the rules of a task since its start is for this start as well."""
    _JOIN.run(tx.connection, of_task=instance)


_STARTED = Prepared(
    select(
        *(_W.namespace, _W.key),
        *(_W.start_version, _W.start_value, _W.previous_version, _W.previous_value),
    )
    .where(_W.task_instance_id == bindparam("of_task"))
    .order_by(_W.id)
)


def started(tx: Tx, instance: TaskInstanceId) -> StartSignals:
    """Return the signals with which a task was started, and those of its start before."""
    signals: list[StartSignal] = []
    previous: list[StartSignal] = []
    for namespace, key, *found in _STARTED.run(tx.connection, of_task=instance).fetchall():
        of: tuple[str, str] = (namespace, DEFAULT_NAMESPACE) if key == NO_KEY else (key, namespace)
        for version, value, to in ((*found[:2], signals), (*found[2:], previous)):
            if version is not None and value is not None:  # without a value it was by hand
                to.append(StartSignal(*of, version, bytes(value)))
    return StartSignals(tuple(signals), tuple(previous))


def has_asked(run: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a user asks for something about a task of a run, of which this is the id."""
    by_hand = or_(*(_W.rule == name for name in BY_HAND))
    return exists().where(_W.dag_run_id == run, _W.rule.is_not(None), by_hand, _W.met_version.is_not(None))
