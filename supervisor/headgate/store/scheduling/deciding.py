"""Users' code decides what signals do to a task whose operator has its own ``on_signal``: what is asked, and stored.

The rules of such a task about keys are held against signals as all others (`headgate.store.scheduling.considering`), up
to the first that fits. Then a worker is asked about it and those behind it, of all keys of the task, in the order in
which they were sent. What it answers is stored with the place of each rule in one transaction, and acts when the run is
evaluated, as what has met any other rule (I29). So an answer counts once, though a worker may be asked twice.

A supervisor asks, and writes its epoch into the rows; others ask only when its lease has ended. An answer counts only
for rows that stand where they stood: what was meanwhile passed over, or closed with its run, is not to act.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import Integer, Select, Subquery, and_, bindparam, func, null, or_, select, update

from headgate.protocol import marks
from headgate.protocol.messages.rules import Action, decode_predicate, is_met
from headgate.protocol.messages.worker import DECIDED_BYTES_MAX, DECIDED_MAX
from headgate.scheduling import signal_rules
from headgate.scheduling.signal_rules import Decision
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound, read
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, leased
from headgate.store.ids import DagRunId, Epoch, TaskInstanceId, TryName
from headgate.store.scheduling.considering import PAGE, Version
from headgate.store.tables import dag, dag_run, signal_wait, task_instance, triggerer
from headgate.store.tasks.outcomes import LOADED_AGAIN_S

TRIES_MAX: Final = 3  # of a decision about one signal; then it does nothing
AGAIN_S: Final = 2.0  # between two of them
ERROR_CHARS_MAX: Final = 1000  # of an error that is kept with a rule; the log of the task has all of it

_W = signal_wait.c
_IS_LIVE = and_(triggerer.c.fenced_at.is_(None), triggerer.c.stopped_at.is_(None))
# Tasks that a supervisor asks about now. A task is asked about as a whole, so that its signals keep their order.
_CLAIMED = (
    select(_W.task_instance_id).join(triggerer, triggerer.c.id == _W.asked_by).where(_W.ask_at.is_not(None), _IS_LIVE)
)
# If the DAG is in no file there is nobody to ask: the signals wait, unless the run is to end.
_MAY_BE_ASKED = and_(dag_run.c.ended_at.is_(None), or_(dag.c.removed_at.is_(None), dag_run.c.is_ending))
_FROM = signal_wait.join(dag_run, dag_run.c.id == _W.dag_run_id).join(dag, dag.c.id == dag_run.c.dag_id)


def _tasks(claimed: Select[tuple[Any]]) -> Subquery:
    """Return the tasks that are to be asked about, except those that are claimed, and from when on."""
    which = (_W.ask_at.is_not(None), _MAY_BE_ASKED, _W.task_instance_id.not_in(claimed))
    found = select(_W.task_instance_id, func.max(_W.ask_at).label("at")).select_from(_FROM).where(*which)
    return found.group_by(_W.task_instance_id).subquery()


# When a task is to be asked about next, about which nobody asks now.
NEXT_AT = select(func.min(_tasks(_CLAIMED).c.at))
# Those that this supervisor has claimed are among them: if the database was away at the commit, it does not know.
_FREE = _tasks(_CLAIMED.where(triggerer.c.id != bindparam("epoch")))
_DUE = Prepared(
    select(_FREE.c.task_instance_id)
    .where(_FREE.c.at <= bindparam("now", type_=UtcDateTime()))
    .order_by(_FREE.c.at, _FREE.c.task_instance_id)
    .limit(bindparam("limit", type_=Integer()))
)
_ROW_FIELDS = ("id", "dag_run_id", "namespace", "key", "predicate", "seen_version", "takes_each", "asked_by")
_ROWS = (
    select(*(_W[name] for name in _ROW_FIELDS), triggerer.c.id.label("owner"))
    .select_from(signal_wait.outerjoin(triggerer, and_(triggerer.c.id == _W.asked_by, _IS_LIVE)))
    .order_by(_W.id)
)
_ABOUT = (
    select(dag.c.name, dag.c.file, dag_run.c.run_id, task_instance.c.task_id, task_instance.c.try_number)
    .select_from(task_instance.join(dag_run).join(dag))
    .limit(1)
)


class Undecided(msgspec.Struct, frozen=True):
    """A version of a key that meets the rule of this row, and is to be decided; ``at`` is when it was sent.

    No version of the key has an ``at`` before that of an earlier one.
    """

    row: int
    namespace: str
    key: str
    version: int
    value: bytes
    at: datetime
    id: int


class Question(msgspec.Struct, frozen=True):
    """What the operator of a task is to be asked, in order. ``places`` are those of the rules, by their rows.

    ``name`` is that of the try in whose log the answer belongs.
    """

    instance: TaskInstanceId
    name: TryName
    file: str
    signals: tuple[Undecided, ...]
    places: dict[int, int]


class Settled(msgspec.Struct, frozen=True):
    """What was stored of an answer. ``has_given_up``: a signal could not be decided, and does nothing.

    ``tries`` are those that have failed with this signal, with the last one.
    """

    has_given_up: bool = False
    tries: int = 0


class DecidingVerbs(Verbs):
    """The verbs by which users' code decides about signals."""

    @leased
    def ask(self, tx: LeasedTx, *, limit: int, busy: Collection[TaskInstanceId] = ()) -> list[Question]:
        """Return what up to ``limit`` operators are to be asked now, except those of ``busy`` tasks."""
        now = bound(tx.connection, tx.now)
        rows = _DUE.run(tx.connection, epoch=tx.epoch, now=now, limit=limit + len(busy)).fetchall()
        questions: list[Question] = []
        for (instance,) in rows:
            if instance in busy or len(questions) == limit:
                continue
            question = _question(tx, TaskInstanceId(instance))
            if question is not None:
                questions.append(question)
        return questions

    @leased
    def settle_decisions(
        self,
        tx: LeasedTx,
        question: Question,
        actions: Sequence[Action],
        error: str = "",
        *,
        is_unloaded: bool = False,
    ) -> Settled | None:
        """Store what was decided about the first signals of a question; None if none of it counts any more.

        With an ``error`` the signal behind them could not be decided: it is asked about again, `TRIES_MAX` times, and
        then it does nothing. If the DAG file ``is_unloaded`` that is no try: the signal waits for the file.
        """
        decided: dict[int, list[Undecided]] = {}
        for undecided in question.signals[: len(actions)]:
            decided.setdefault(undecided.row, []).append(undecided)
        does = dict(zip(((one.row, one.version) for one in question.signals), actions, strict=False))
        failed = question.signals[len(actions)] if error and len(actions) < len(question.signals) else None
        rows = _locked(tx, _W.id.in_(list(question.places)))
        settled: Settled | None = None
        for row in rows:
            if row.asked_by != tx.epoch:
                continue
            if row.seen_version != question.places[row.id]:  # it was passed over; what came since may be asked about
                tx.connection.execute(update(signal_wait).where(_W.id == row.id).values(asked_by=null()))
                continue
            answered = [_decision(one, does[one.row, one.version]) for one in decided.get(row.id, ())]
            failure = None if failed is None or failed.row != row.id else _Failure(failed, error, is_unloaded)
            settled = _settle(tx, row, answered, failure, settled or Settled())
            tx.mark_run_dirty(row.dag_run_id)
        marks.reach("signals.decided_written")
        return settled


def _question(tx: LeasedTx, instance: TaskInstanceId) -> Question | None:
    """Return what the operator of a task is to be asked; None if it is nothing, or another transaction has its rows."""
    of_task = and_(_W.task_instance_id == instance, _W.ask_at.is_not(None))
    every = tx.connection.execute(select(func.count()).where(of_task)).scalar_one()
    rows = tx.connection.execute(_ROWS.where(of_task).with_for_update(skip_locked=True, of=signal_wait)).all()
    if len(rows) < every or any(row.owner not in (None, tx.epoch) for row in rows):
        return None
    found = [_fitting(tx, row) for row in rows]
    for row, fitting in zip(rows, found, strict=True):
        if not fitting:  # it was passed over, or cleaned away
            _ask_no_more(tx, row)
    signals = _some(heapq.merge(*found, key=lambda one: (one.at, one.id)), 1 if _takes_each(rows) else DECIDED_MAX)
    if not signals:
        return None
    asked = {one.row for one in signals}
    tx.connection.execute(update(signal_wait).where(_W.id.in_(asked)).values(asked_by=tx.epoch))
    of = tx.connection.execute(_ABOUT.where(task_instance.c.id == instance)).one()
    name = TryName(of.name, of.run_id, of.task_id, max(1, of.try_number))
    places = {row.id: row.seen_version for row in rows if row.id in asked}
    return Question(instance, name, of.file or "", tuple(signals), places)


def _ask_no_more(tx: Tx, row: Any) -> None:
    """Have a rule be held against what comes next: there is nothing to be asked. Its run may have waited for that."""
    again = update(signal_wait).where(_W.id == row.id)
    tx.connection.execute(again.values(is_fresh=True, ask_at=null(), asked_by=null(), asked_tries=0))
    tx.mark_run_dirty(row.dag_run_id)


def _takes_each(rows: Sequence[Any]) -> bool:
    """Whether each signal is to be a start of its own: then the next one is asked about when the first has started."""
    return any(row.takes_each for row in rows)


def _fitting(tx: Tx, row: Any) -> list[Undecided]:
    """Return the next versions of the key of a rule that meet it."""
    where = {"namespace": row.namespace, "key": row.key, "after": row.seen_version}
    predicate = decode_predicate(row.predicate)
    fitting: list[Undecided] = []
    for version in (Version._make(found) for found in PAGE.run(tx.connection, **where, limit=DECIDED_MAX).fetchall()):
        value = bytes(version.value)
        if version.dag_run_id in (None, row.dag_run_id) and is_met(predicate, value):
            sent_at = read(tx.connection, version.sent_at)
            at = max(sent_at, fitting[-1].at) if fitting else sent_at
            fitting.append(Undecided(row.id, row.namespace, row.key, version.version, value, at, version.id))
    return fitting


def _some(signals: Iterable[Undecided], limit: int) -> list[Undecided]:
    some: list[Undecided] = []
    size = 0
    for one in signals:
        size += len(one.value)
        if len(some) == limit or (some and size > DECIDED_BYTES_MAX):
            break
        some.append(one)
    return some


class _Row(NamedTuple):
    """The row of a rule, locked."""

    id: int
    dag_run_id: DagRunId
    seen_version: int
    takes_each: bool
    asked_by: Epoch | None
    asked_tries: int
    decision_error: str | None
    decided: Action | None
    stop_at: datetime | None
    stop_id: int | None
    met_version: int | None
    met_value: bytes | None
    met_at: datetime | None
    met_id: int | None


def _locked(tx: Tx, which: Any) -> list[_Row]:
    columns = [_W[name] for name in _Row._fields]
    rows = tx.connection.execute(select(*columns).where(which).order_by(_W.id).with_for_update())
    return [_Row._make(row) for row in rows]


def _decision(one: Undecided, action: Action) -> Decision:
    return Decision(action, (one.at, one.id), one.version, one.value)


class _Failure(NamedTuple):
    """Why a signal could not be decided."""

    signal: Undecided
    error: str
    is_unloaded: bool


def _settle(tx: Tx, row: _Row, answered: list[Decision], failed: _Failure | None, settled: Settled) -> Settled:
    values: dict[str, Any] = {"asked_by": null()}
    has_given_up = False
    if failed is not None:
        # The tries of another signal, which was passed over or cleaned away, are not those of this one.
        before = row.asked_tries if _is_error_about(row, failed.signal.version) else 0
        tries = before if failed.is_unloaded else before + 1
        has_given_up = tries >= TRIES_MAX
        which = "its DAG file cannot be loaded" if failed.is_unloaded else f"try {tries} of {TRIES_MAX}"
        values["decision_error"] = f"{_about(failed.signal.version)} {which}: {failed.error}"[:ERROR_CHARS_MAX]
        settled = Settled(has_given_up, tries)
        if has_given_up:
            values |= {"undecided": _W.undecided + 1, "undecided_at": tx.now}
            answered = [*answered, _decision(failed.signal, "NONE")]
        else:
            wait_s = LOADED_AGAIN_S if failed.is_unloaded else AGAIN_S
            values |= {"ask_at": tx.now + timedelta(seconds=wait_s), "asked_tries": tries}
    if answered:
        values["seen_version"] = answered[-1].version
        values |= _met(row, answered)
        if failed is None or has_given_up:
            # It is held against what comes next, unless that is for another start.
            values |= {"ask_at": null(), "asked_tries": 0, "is_fresh": not values["is_held"]}
        if failed is None and any(_is_error_about(row, one.version) for one in answered):
            values["decision_error"] = null()  # it was decided after all
    tx.connection.execute(update(signal_wait).where(_W.id == row.id).values(values))
    return settled


def _about(version: int) -> str:
    """Return how the error of a rule begins, which names the signal."""
    return f"version {version},"


def _is_error_about(row: _Row, version: int) -> bool:
    """Whether it is this signal about which the rule was asked in vain."""
    return row.decision_error is not None and row.decision_error.startswith(_about(version))


def _met(row: _Row, answered: Sequence[Decision]) -> dict[str, Any]:
    """Return the columns of a rule that say what these decisions, with the one before that has not acted, come to."""
    before: list[Decision] = []
    if row.met_version is not None and row.met_at is not None and row.decided is not None:
        value = b"null" if row.met_value is None else bytes(row.met_value)
        stopped_at = None if row.stop_at is None else (row.stop_at, row.stop_id or 0)
        before = [Decision(row.decided, (row.met_at, row.met_id or 0), row.met_version, value, stopped_at)]
    net = signal_rules.together([*before, *answered])
    assert net is not None, "there is one at least"
    met = {"met_version": net.version, "met_value": net.value, "met_at": net.at[0], "met_id": net.at[1]}
    stop_at, stop_id = net.stopped_at or (null(), null())
    met |= {"decided": net.action, "stop_at": stop_at, "stop_id": stop_id}
    return met | {"is_held": bool(row.takes_each) and net.action != "NONE"}
