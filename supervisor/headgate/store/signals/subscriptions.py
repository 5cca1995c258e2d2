"""The rules of a run's tasks about signals, as rows that are held against them: one for each rule of each task (I29).

They are made when the run is evaluated for the first time, and changed with the DAG. Which versions count is known
from the creation of the run (`headgate.store.signals.waits`). Who considers signals writes what has met a rule into its
row; who evaluates the run has that act, and takes it from the row, in the transaction in which it acts.

Rows by hand stand for what a user asks for: a start, a restart, or a stop of one task. They act in the same way.

**Locks.** Rows are locked before tasks, and runs after both. An evaluation has its run locked already, so it waits for
no row. Rows by hand are locked after their run, by everybody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from sqlalchemy import (
    ColumnElement,
    and_,
    bindparam,
    delete,
    exists,
    false,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)

from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.queries import StartSignal, StartSignals
from headgate.protocol.messages.rules import (
    STARTING,
    Action,
    Rule,
    SignalRule,
    TaskRule,
    encode_predicate,
    rule_name,
)
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE
from headgate.protocol.values import encode_value
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import Kind, chunks, insert_into, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound
from headgate.store.db.times import read as read_moment
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.signals import dag_signals, ticks, waits
from headgate.store.tables import signal, signal_key, signal_wait, task_instance

BY_HAND: Final[dict[str, Action]] = {f"by hand {action}": action for action in ("START", "RESTART", "STOP")}
_BY_HAND_OF: Final = {action: name for name, action in BY_HAND.items()}
_Place: TypeAlias = tuple[TaskInstanceId | None, str]  # of a rule: its task, None for the run, and its name
NEW_MAX: Final = 5000  # made in one transaction: some tenths of a second
NO_KEY: Final = ""  # of rows that are about no signal; those about a task have its id in place of a namespace
CLOCK: Final = "every"  # the same of those about the time

_W = signal_wait.c


class RuleRow(NamedTuple):
    """The row of a rule. ``met_at`` is when the version was sent that has met it, and has done nothing yet.

    If users' code has ``decided`` what that version does, it does this, and not what the rule says, behind the stop of
    a version that was sent at ``stop_at``. ``instance`` is None for a rule of the run itself, which ends it.
    """

    id: int
    instance: TaskInstanceId | None
    rule: str
    seen_version: int
    is_held: bool
    takes_each: bool
    met_version: int | None
    met_at: datetime | None
    met_id: int | None
    asks: bool
    decided: Action | None
    stop_at: datetime | None
    stop_id: int | None


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


def may_move(tx: Tx, instance: TaskInstanceId) -> bool:
    """Return whether a rule of a task is met and has done nothing yet, or may be by what was sent already."""
    may = or_(_W.met_version.is_not(None), _W.is_fresh, _W.asks)
    return bool(tx.connection.execute(select(exists(ONE).where(_W.task_instance_id == instance, may))).scalar_one())


def _row(tx: Tx, found: Sequence[Any]) -> RuleRow:
    row = RuleRow._make(found)
    if row.stop_at is not None:
        row = row._replace(stop_at=read_moment(tx.connection, row.stop_at))
    return row if row.met_at is None else row._replace(met_at=read_moment(tx.connection, row.met_at))


# --- as the DAG has them -------------------------------------------------------------------------

_NEW = Kind(
    signal_wait,
    (
        *("dag_run_id", "task_instance_id", "rule", "namespace", "key", "predicate", "seen_version", "is_fresh"),
        *("takes_each", "every_s", "due_at", "met_version", "met_value", "met_at", "asks", "cron", "timezone"),
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


def follow(
    tx: Tx,
    run: DagRunId,
    rows: Sequence[RuleRow],
    tasks: Mapping[TaskInstanceId, TaskSpec],
    end_on: Sequence[SignalRule] = (),
) -> Followed:
    """Make, change and delete rows of a run as its tasks have rules now, by their instances, and as it has to end."""
    wanted: dict[_Place, tuple[TaskSpec | None, Rule]] = {
        (instance, rule_name(rule)): (task, rule)
        for instance, task in tasks.items()
        if task.signals is not None
        for rule in task.signals.rules
    }
    wanted |= {(None, rule_name(rule)): (None, rule) for rule in end_on}
    known = {(row.instance, row.rule) for row in rows}
    gone = [row.id for row in rows if (row.instance, row.rule) not in wanted and row.rule not in BY_HAND]
    changed = {
        row.id: of[0]
        for row in rows
        if (of := wanted.get((row.instance, row.rule))) is not None
        and isinstance(of[1], SignalRule)
        and _how(of[0]) != (bool(row.takes_each), bool(row.asks))
    }
    free = unless_busy(tx, [*gone, *changed])
    new = {place: of for place, of in wanted.items() if place not in known}
    for id_ in sorted(free.intersection(changed)):
        _change(tx, id_, changed[id_])
    going_on = _going_on(tx, gone, new)
    for id_, place in going_on.items():
        task, rule = new.pop(place)
        assert isinstance(rule, SignalRule)
        if id_ in free:  # else at the next evaluation
            _change(tx, id_, task, rule=place[1], predicate=encode_predicate(rule.predicate))
    for some in chunks(sorted(free.intersection(gone) - going_on.keys())):
        tx.connection.execute(delete(signal_wait).where(_W.id.in_(some)))
    made = dict(list(new.items())[:NEW_MAX])
    _make(tx, run, made)
    return Followed(bool(free or made), is_done=len(free) == len(gone) + len(changed) and len(made) == len(new))


def _going_on(tx: Tx, gone: Collection[int], new: Mapping[_Place, tuple[TaskSpec | None, Rule]]) -> dict[int, _Place]:
    """Return the rows of rules that are gone with which new ones go on: of the same task, and about the same key.

    So a rule whose predicate is another one in the file is not held against the same signals again, and what it has
    remembered is not forgotten.
    """
    left: dict[tuple[object, ...], list[int]] = {}
    columns = (_W.id, _W.task_instance_id, _W.namespace, _W.key)
    for some in chunks(sorted(gone)):
        rows = select(*columns).where(_W.id.in_(some), _W.key != NO_KEY).order_by(_W.id)
        for id_, *about in tx.connection.execute(rows):
            left.setdefault(tuple(about), []).append(id_)
    found: dict[int, _Place] = {}
    for place, (_, rule) in new.items():
        if isinstance(rule, SignalRule) and (ids := left.get((place[0], rule.namespace, rule.key))):
            found[ids.pop(0)] = place
    return found


def _change(tx: Tx, row: int, task: TaskSpec | None, **rule: object) -> None:
    takes_each, asks = _how(task)
    # What was to be decided is looked at again: the code that would decide it may be gone.
    again = {"is_fresh": _W.is_held.is_(False), **_UNASKED}
    terms = {"takes_each": takes_each, "asks": asks} | again | rule
    tx.connection.execute(update(signal_wait).where(_W.id == row).values(terms))


def _how(task: TaskSpec | None) -> tuple[bool, bool]:
    """Return whether rules of a task about keys take one version for each start, and whether users' code decides."""
    rules = None if task is None else task.signals
    return (rules is not None and rules.overlap == "each", rules is not None and rules.asks)


def unless_busy(tx: Tx, ids: Sequence[int]) -> set[int]:
    """Lock rows, and return those that no other transaction has locked: who considers signals waits for the run."""
    found: set[int] = set()
    for some in chunks(sorted(ids)):
        free = select(_W.id).where(_W.id.in_(some)).order_by(_W.id).with_for_update(skip_locked=True)
        found.update(tx.connection.execute(free).scalars())
    return found


def _make(tx: Tx, run: DagRunId, new: Mapping[_Place, tuple[TaskSpec | None, Rule]]) -> None:
    rows: list[tuple[Any, ...]] = []
    known: dict[tuple[str | None, ...], int] = {}  # many rules are about few keys
    for (instance, name), (task, rule) in new.items():
        about: tuple[Any, ...]
        takes_each, asks = False, False
        of_clock = ticks.NEVER
        if isinstance(rule, SignalRule):
            of = (name, None if task is None else task.task_id) if rule.since == "last_run" else ("", None)
            place = (rule.namespace, rule.key, rule.since, *of)
            if place not in known:
                since = (rule.namespace, rule.key, rule.since)
                known[place] = waits.seen_before(tx, run, *since, rule=of[0], task_id=of[1])
            about = (rule.namespace, rule.key, encode_predicate(rule.predicate), known[place], True)
            takes_each, asks = _how(task)
        elif isinstance(rule, TaskRule):
            about = (rule.task_id, NO_KEY, None, 0, False)
        else:
            of_clock = ticks.first(tx, rule)
            about = (CLOCK, NO_KEY, None, of_clock.met_version or 0, False)
        rows.append((run, instance, name, *about, takes_each, *of_clock[:5], asks, *of_clock[5:]))
    if rows:
        insert_new(tx.connection, _NEW, rows, returning=("id",))


_IS_PENDING = or_(_W.is_fresh, exists(ONE).where(waits.SAME_KEY, signal_key.c.last_version > _W.seen_version))
_PENDING = Prepared(select(exists(ONE).where(_IS_RULE, _W.is_held.is_(False), _W.ask_at.is_(None), _IS_PENDING)))
_ASKED = Prepared(select(exists(ONE).where(_IS_RULE, _W.ask_at.is_not(None))))


def is_pending(tx: Tx, run: DagRunId) -> bool:
    """Whether signals were sent that were not held against the rules of a run."""
    return bool(_PENDING.run(tx.connection, of_run=run).fetchone()[0])


def is_asked(tx: Tx, run: DagRunId) -> bool:
    """Whether users' code is to decide about signals for a run, which is flagged again once it has."""
    return bool(_ASKED.run(tx.connection, of_run=run).fetchone()[0])


# Users' code is not to be asked about a rule, or not any more about the signal that it was.
_UNASKED = {"ask_at": null(), "asked_by": null(), "asked_tries": 0}


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
    nothing = {"is_fresh": false(), "due_at": null(), **_FORGET, **_UNASKED}
    tx.connection.execute(update(signal_wait).where(_W.id.in_(ids)).values(is_held=true(), **nothing))
    # All tasks have ended: these are no ends to come, should the run go on.
    of_run = (_W.dag_run_id == run, _W.rule.is_not(None))
    about_tasks = (*of_run, _W.key == NO_KEY, _W.namespace != NO_KEY, _W.every_s.is_(None), _W.cron.is_(None))
    tx.connection.execute(update(signal_wait).where(*about_tasks).values(seen_version=_NUMBER_OF_END))
    return True


def open_again(tx: Tx, run: DagRunId) -> None:
    """Have the rules of a run act again, which had ended and goes on: by what is sent, and what ends, from now on.

    Its row is locked by the caller. Nobody else locks rows that are closed, except for the rows by hand.
    """
    closed = (_W.is_held, _W.met_version.is_(None), _W.rule.not_in(list(BY_HAND)))
    of_run = (_W.dag_run_id == run, _W.rule.is_not(None), *closed)
    ticks.go_on(tx, *of_run)
    again = {"seen_version": _LAST, "is_held": false(), "is_fresh": _W.key != NO_KEY}
    tx.connection.execute(update(signal_wait).where(*of_run).values(again))


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


def meet_by_end(tx: Tx, row: RuleRow, number: int, state: TaskState, ended_at: datetime) -> None:
    """Record that the end ``number`` of a task, in this state and at this moment, has met a rule about it."""
    value = encode_value(state.value, where="the state of a task")
    at = bound(tx.connection, ended_at)
    _MEET.run(tx.connection, of_id=row.id, seen_version=number, met_version=number, met_value=value, met_at=at)


def ask(tx: Tx, run: DagRunId, instance: TaskInstanceId, action: Action) -> None:
    """Record that a user wants a task to start, to restart, or to stop. The caller has locked the run."""
    name = _BY_HAND_OF[action]
    met = {"met_version": 1, "met_value": None, "met_at": tx.now, "is_held": False}
    values = {"dag_run_id": run, "task_instance_id": instance, "rule": name, "namespace": "", "key": NO_KEY}
    new = insert_into(tx.connection, signal_wait).values(**values, seen_version=0, is_fresh=False, **met)
    tx.connection.execute(new.on_conflict_do_update(index_elements=[_W.task_instance_id, _W.rule], set_=met))
    tx.mark_run_dirty(run)


def note_begun(tx: Tx, instances: Sequence[TaskInstanceId]) -> None:
    """Record that tasks have begun by themselves, which users had asked to start: they do not start once more by that.

    In a run that is to end nothing starts by rules, but what is still to begin in it does.
    """
    started = [name for name, action in BY_HAND.items() if action in STARTING]
    for some in chunks(instances):
        asked = (_W.task_instance_id.in_(some), _W.rule.in_(started), _W.met_version.is_not(None))
        tx.connection.execute(update(signal_wait).where(*asked).values(_FORGET))


_STOP = ("stop_at", "stop_id")
_FORGET = {name: null() for name in ("met_version", "met_value", "met_at", "met_id", "decided", *_STOP)}
# One that takes each version goes on with the next, and one that was not looked at, or not to the end, still is to be.
_FREE = {"is_fresh": or_(_W.is_held, _W.is_fresh), "is_held": false()}
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
    .values(seen_version=func.coalesce(_LAST_BEFORE, _W.seen_version), **dict.fromkeys(_STOP, null()))
)


def drop(tx: Tx, rows: Sequence[RuleRow]) -> None:
    """Record that what has met these rules has acted, or is not to."""
    for row in rows:
        if row.met_version is not None:
            _DROP.run(tx.connection, of_id=row.id)


def pass_over(tx: Tx, rows: Sequence[RuleRow], moment: tuple[datetime, int]) -> None:
    """Record that what was sent up to a stop is not to act any more, also if it was not held against these rules.

    It is the last one, so none acts that was decided.
    """
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


_NOTE_FAILED = Prepared(
    update(signal_wait)
    .where(_W.id == bindparam("of_id"))
    .values(
        failed_starts=_W.failed_starts + 1,
        failed_at=bindparam("at", type_=UtcDateTime),
        failed_error=select(_T.last_error).where(_T.id == bindparam("of_task")).scalar_subquery(),
    )
)


def note_failed_start(tx: Tx, rows: Sequence[RuleRow], instance: TaskInstanceId) -> None:
    """Record that a task has failed which its rules start once more; not if a user does, who has seen that."""
    row = next((row for row in rows if row.met_version is not None), None)
    if row is not None and row.rule not in BY_HAND:
        _NOTE_FAILED.run(tx.connection, of_id=row.id, at=bound(tx.connection, tx.now), of_task=instance)


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
    """Return the signals with which a task was started, those of its start before, and those of its run."""
    signals: list[StartSignal] = []
    previous: list[StartSignal] = []
    for namespace, key, *found in _STARTED.run(tx.connection, of_task=instance).fetchall():
        of: tuple[str, str] = (namespace, DEFAULT_NAMESPACE) if key == NO_KEY else (key, namespace)
        for version, value, to in ((*found[:2], signals), (*found[2:], previous)):
            if version is not None and value is not None:  # without a value it was by hand
                to.append(StartSignal(*of, version, bytes(value)))
    run = tx.connection.execute(select(_T.dag_run_id).where(_T.id == instance)).scalar_one()
    return StartSignals(tuple(signals), tuple(previous), dag_signals.of_run(tx, run))


def has_asked(run: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a user asks for something about a task of a run, of which this is the id."""
    by_hand = or_(*(_W.rule == name for name in BY_HAND))
    return exists(ONE).where(_W.dag_run_id == run, _W.rule.is_not(None), by_hand, _W.met_version.is_not(None))
