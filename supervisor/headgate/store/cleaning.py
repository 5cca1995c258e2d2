"""Deletion of old rows that are not needed, in small transactions, while supervisors run.

Rows are read in the order of their ids, which is roughly that of their age, so that a batch reads a bounded number and
ends at the first rows that are too young. Rows that other transactions have locked are skipped. They stay until the
next time, and so do rows that a kept row refers to; foreign keys ensure that as well.

These rows are kept at any age:

- of an open trigger its newest event, because `last_event` returns it in the next run, and every event with a key,
  because the key identifies a message that is delivered again (I2); the latter unless ``keyed_events`` are asked for;
- an event of a task's stream that the task has not handled, and the stream's trigger, as long as the task exists;
- an event that resumed a task, or for which a run was created, as long as the task or the run exists;
- an event that still waits for a run of a DAG, that a consumer has yet to get, or that one has set aside;
- a trigger that is open, waited for, that of a watcher, or owned by a supervisor that is not known to have ended;
- a stream that a trigger refers to;
- the newest version of each key of signals, and those that a task which waits has not been held against, and the key.

A run with more rows than one transaction may delete goes in pieces. The first of them marks it as removed
(``removed_at``), and from then on no command finds it, and no clear opens it again, whatever is left of it. If the
process dies between two pieces, the next clean goes on.

A message that a trigger was passed over can be delivered again at any age. After its strikes are deleted, it counts as
a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from sqlalchemy import Column, ColumnElement, Table, and_, delete, exists, func, or_, select, update

from headgate.store.consuming import consumers
from headgate.store.db.bulk import chunks
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs
from headgate.store.ids import Epoch
from headgate.store.signals import conditions
from headgate.store.tables import (
    asset_subscription,
    asset_watcher,
    consumer_letter,
    dag,
    dag_run,
    dag_run_event,
    dead_letter,
    element,
    emitter,
    letter_action,
    redelivery,
    signal,
    signal_start,
    signal_wait,
    stream,
    strike,
    task_instance,
    task_stream,
    trigger,
    trigger_event,
    triggerer,
    waiting_event,
    xcom,
)
from headgate.store.triggers import leases
from headgate.store.triggers.streams import is_gone

# Rows read per transaction, and tasks or elements of runs deleted: that takes some tens of milliseconds, and others can
# write between two.
CLEAN_ROWS_MAX = 1000
# Younger rows are not deleted: a supervisor that does not know whether its commit arrived reports an event again, and
# the event must still exist to be recognised. While it renews its lease, it reports within seconds. If it is cut off or
# suspended, it may report after days, so a clean fences it first.
CLEAN_AGE_MIN_S = 3600.0
# A supervisor may not know the outcome of commits that it made up to this long before it last renewed its lease: far
# more than the waits between its tries. It is fenced if its silence is longer than the age of deleted rows minus this.
IN_DOUBT_MAX_S = 900.0

Kind = Literal[
    "runs",
    "events",
    "keyed_events",
    "strikes",
    "triggers",
    "streams",
    "dags",
    "triggerers",
    "dead_letters",
    "open_dead_letters",
    "consumer_letters",
    "signals",
]
# In this order, because rows of an earlier kind may refer to rows of a later one.
KINDS: tuple[Kind, ...] = get_args(Kind)
# Only the user can know whether these are still needed. Dead letters are those that are resolved, open ones all others.
ASKED: tuple[Kind, ...] = ("keyed_events", "dead_letters", "open_dead_letters")
UNASKED: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in ASKED)


class Cleaned(msgspec.Struct, frozen=True):
    """Result of one batch: the number of rows deleted by table, and the deleted runs, as (dag_id, run_id).

    ``next_id``: the next batch begins after this id; None after the last. ``fenced``: epochs that lost their leases.
    """

    rows: dict[str, int]
    next_id: int | None
    runs: tuple[tuple[str, str], ...] = ()
    fenced: tuple[Epoch, ...] = ()


# --- conditions ----------------------------------------------------------------------------------


def _ended_runs(before: datetime) -> ColumnElement[bool]:
    return or_(dag_run.c.removed_at.is_not(None), and_(dag_run.c.ended_at.is_not(None), dag_run.c.ended_at < before))


def _event_is_free() -> ColumnElement[bool]:
    """Return the condition that no task was or will be resumed by it, no run created, and no consumer needs it."""
    return and_(
        ~consumers.is_needed(),
        ~exists().where(task_instance.c.event_id == trigger_event.c.id),
        ~exists().where(
            task_stream.c.trigger_id == trigger_event.c.trigger_id, task_stream.c.handled_to < trigger_event.c.id
        ),
        ~exists().where(dag_run_event.c.trigger_event_id == trigger_event.c.id),
        ~exists().where(waiting_event.c.trigger_event_id == trigger_event.c.id),
    )


def _trigger_is_closed(before: datetime) -> ColumnElement[bool]:
    """Return the condition that it ended before then, and has no owner, no task, and no watcher that is not removed.

    The stream of a task may go on, and open its trigger again.
    """
    present = exists().where(asset_watcher.c.trigger_id == trigger.c.id, asset_watcher.c.removed_at.is_(None))
    return and_(
        or_(trigger.c.finished_at.is_not(None), trigger.c.removed_at.is_not(None)),
        func.coalesce(trigger.c.removed_at, trigger.c.finished_at) < before,
        is_gone(trigger.c.triggerer_id),
        ~exists().where(task_instance.c.trigger_id == trigger.c.id),
        ~exists().where(task_stream.c.trigger_id == trigger.c.id),
        ~present,
    )


def _has_newer() -> ColumnElement[bool]:
    newer = trigger_event.alias()
    return exists().where(newer.c.trigger_id == trigger_event.c.trigger_id, newer.c.id > trigger_event.c.id)


def _old_keyed_events(before: datetime) -> ColumnElement[bool]:
    return and_(trigger_event.c.stored_at < before, trigger_event.c.key.is_not(None), _event_is_free(), _has_newer())


def _old_events(before: datetime) -> ColumnElement[bool]:
    is_closed = exists().where(trigger.c.id == trigger_event.c.trigger_id, _trigger_is_closed(before))
    return and_(
        trigger_event.c.stored_at < before,
        _event_is_free(),
        or_(is_closed, and_(trigger_event.c.key.is_(None), _has_newer())),
    )


def _old_triggers(before: datetime) -> ColumnElement[bool]:
    return and_(_trigger_is_closed(before), ~exists().where(trigger_event.c.trigger_id == trigger.c.id))


def _old_dags(before: datetime) -> ColumnElement[bool]:
    return and_(
        dag.c.removed_at.is_not(None),
        dag.c.removed_at < before,
        ~exists().where(dag_run.c.dag_id == dag.c.id),
    )


def _old_triggerers(before: datetime) -> ColumnElement[bool]:
    return and_(
        func.coalesce(triggerer.c.stopped_at, triggerer.c.fenced_at) < before,
        ~exists().where(trigger.c.triggerer_id == triggerer.c.id),
        ~exists().where(task_instance.c.triggerer_id == triggerer.c.id),
        ~exists().where(stream.c.triggerer_id == triggerer.c.id),
    )


def _old_streams(before: datetime) -> ColumnElement[bool]:
    return and_(stream.c.created_date < before, ~exists().where(trigger.c.stream_id == stream.c.id))


def _old_letters(before: datetime) -> ColumnElement[bool]:
    return dead_letter.c.resolved_at < before


def _old_open_letters(before: datetime) -> ColumnElement[bool]:
    is_open = and_(dead_letter.c.resolved_at.is_(None), dead_letter.c.state != "redriving")
    return and_(is_open, dead_letter.c.stored_at < before)


def _old_consumer_letters(before: datetime) -> ColumnElement[bool]:
    return consumer_letter.c.resolved_at < before


# --- deleting ------------------------------------------------------------------------------------


def clean_batch(
    tx: Tx, kind: Kind, before: datetime, *, after_id: int, rows_max: int, is_tried_only: bool = False
) -> Cleaned:
    """Read ``rows_max`` rows of a kind after an id; delete those that are free, and the rows that belong to them.

    ``is_tried_only``: the caller rolls this back, so that of a run which goes in pieces all rows are counted instead.
    """
    if kind == "strikes":
        return _clean_strikes(tx, before, after_id)
    table, born, condition, remove = _KINDS[kind]
    if kind == "runs" and is_tried_only:
        remove = _count_runs
    window = tx.connection.execute(
        select(table.c.id, born).where(table.c.id > after_id).order_by(table.c.id).limit(rows_max)
    ).all()
    if not window:
        return Cleaned({}, None)
    last = window[-1][0]
    candidates = (
        select(table.c.id)
        .where(table.c.id.between(window[0][0], last), condition(before))
        .order_by(table.c.id)
        .with_for_update(skip_locked=True, of=table)
    )
    ids = list(tx.connection.execute(candidates).scalars())
    is_all_young = window[0][1] >= before
    if not ids:
        return Cleaned({}, None if is_all_young else last)
    removed = remove(tx, ids)
    rows = {name: count for name, count in removed.rows.items() if count}
    return Cleaned(rows, last if removed.next_id == ids[-1] else removed.next_id, removed.runs)


def _clean_strikes(tx: Tx, before: datetime, after_id: int) -> Cleaned:
    """Delete the old strikes of one trigger, the next one after an id that has any."""
    following = select(func.min(strike.c.trigger_id)).where(strike.c.trigger_id > after_id)
    trigger_id = tx.connection.execute(following).scalar_one()
    if trigger_id is None:
        return Cleaned({}, None)
    old = delete(strike).where(strike.c.trigger_id == trigger_id, strike.c.last_at < before)
    deleted = tx.connection.execute(old).rowcount
    return Cleaned({"strike": deleted} if deleted else {}, trigger_id)


def _delete(tx: Tx, table: Table, column: ColumnElement[Any], ids: Sequence[int]) -> int:
    return sum(tx.connection.execute(delete(table).where(column.in_(part))).rowcount for part in chunks(ids))


# The rows that belong to a task, in the order in which they are deleted, before the task itself.
_OF_TASK = (xcom, element, emitter, task_stream, signal_wait)
_OF_RUN = (dag_run_event, signal_start)  # and of a run


def _remove_runs(tx: Tx, ids: Sequence[int]) -> Cleaned:
    """Delete runs with all their tasks. The runs are locked already; a task that is locked by others keeps its run.

    It deletes as many runs as have `CLEAN_ROWS_MAX` tasks in total. If the first has more, or as many elements, it
    deletes a piece of that one.
    """
    chosen, tasks = _small_runs(tx, ids)
    if not chosen:
        return _remove_piece(tx, ids[0])
    locked = set(_lock_tasks(tx, [task_id for task_ids in tasks.values() for task_id in task_ids]))
    whole = [run for run in chosen if locked.issuperset(tasks[run])]
    names = _names_of(tx, whole)
    rows = _delete_tasks(tx, [task_id for run in whole for task_id in tasks[run]])
    for table in _OF_RUN:
        rows[str(table.name)] = _delete(tx, table, table.c.dag_run_id, whole)
    rows["dag_run"] = _delete(tx, dag_run, dag_run.c.id, whole)
    return Cleaned(rows, chosen[-1], names)


def _small_runs(tx: Tx, ids: Sequence[int]) -> tuple[list[int], dict[int, list[int]]]:
    """Return the first of these runs that go in one transaction, and their tasks; none if the first is too large."""
    of_runs = select(task_instance.c.id, task_instance.c.dag_run_id).where(task_instance.c.dag_run_id.in_(ids))
    rows = tx.connection.execute(of_runs.order_by(task_instance.c.dag_run_id).limit(CLEAN_ROWS_MAX + 1)).all()
    is_cut = len(rows) > CLEAN_ROWS_MAX
    chosen = [run for run in ids if not is_cut or run < rows[-1].dag_run_id]
    tasks: dict[int, list[int]] = {run: [] for run in chosen}
    for task_id, run in rows:
        if run in tasks:
            tasks[run].append(task_id)
    while chosen and _has_too_many_elements(tx, [task_id for run in chosen for task_id in tasks[run]]):
        chosen = chosen[: len(chosen) // 2]
    return chosen, tasks


def _has_too_many_elements(tx: Tx, tasks: Sequence[int]) -> bool:
    return len(_first_elements(tx, tasks, limit=CLEAN_ROWS_MAX + 1)) > CLEAN_ROWS_MAX


def _remove_piece(tx: Tx, run: int) -> Cleaned:
    """Mark a run as removed, and delete some of its elements, or of its tasks, or what is left of it."""
    tx.connection.execute(
        update(dag_run).where(dag_run.c.id == run, dag_run.c.removed_at.is_(None)).values(removed_at=tx.now)
    )
    of_run = select(task_instance.c.id).where(task_instance.c.dag_run_id == run)
    first = of_run.order_by(task_instance.c.map_index, task_instance.c.id).limit(CLEAN_ROWS_MAX)
    tasks = _lock_tasks(tx, list(tx.connection.execute(first).scalars()))
    elements = _first_elements(tx, tasks, limit=CLEAN_ROWS_MAX)
    if len(elements) == CLEAN_ROWS_MAX:
        deleted = sum(_delete_elements(tx, task_id, upto) for task_id, upto in _last_of_each(elements).items())
        return Cleaned({"element": deleted}, run - 1)
    # A task that another transaction has locked stays, and with it the rest of its run, until the next clean.
    return Cleaned(_delete_tasks(tx, tasks), run - 1 if tasks else run)


def _first_elements(tx: Tx, tasks: Sequence[int], *, limit: int) -> list[tuple[int, int]]:
    """Return the first elements of these tasks, in the order of the primary key."""
    found: list[tuple[int, int]] = []
    for some in chunks(sorted(tasks)):
        statement = select(element.c.task_instance_id, element.c.position).where(element.c.task_instance_id.in_(some))
        in_order = statement.order_by(element.c.task_instance_id, element.c.position).limit(limit - len(found))
        found += [(task_id, position) for task_id, position in tx.connection.execute(in_order)]
    return found


def _last_of_each(elements: Sequence[tuple[int, int]]) -> dict[int, int]:
    return dict(sorted(elements))


def _delete_elements(tx: Tx, task_id: int, upto: int) -> int:
    of_task = delete(element).where(element.c.task_instance_id == task_id, element.c.position <= upto)
    return tx.connection.execute(of_task).rowcount


def _lock_tasks(tx: Tx, ids: Sequence[int]) -> list[int]:
    """Lock those of these tasks that no other transaction has locked; return their ids."""
    locked: list[int] = []
    for some in chunks(ids):
        free = select(task_instance.c.id).where(task_instance.c.id.in_(some)).with_for_update(skip_locked=True)
        locked += tx.connection.execute(free).scalars()
    return locked


def _delete_tasks(tx: Tx, ids: Sequence[int]) -> dict[str, int]:
    rows = {str(table.name): _delete(tx, table, table.c.task_instance_id, ids) for table in _OF_TASK}
    return rows | {"task_instance": _delete(tx, task_instance, task_instance.c.id, ids)}


def _names_of(tx: Tx, runs: Sequence[int]) -> tuple[tuple[str, str], ...]:
    names = select(dag.c.name, dag_run.c.run_id).join(dag).where(dag_run.c.id.in_(runs)).order_by(dag_run.c.id)
    return tuple((name, run_id) for name, run_id in tx.connection.execute(names))


def _count_runs(tx: Tx, ids: Sequence[int]) -> Cleaned:
    """Count what `_remove_runs` deletes of the first of these runs, in however many transactions."""
    chosen = _small_runs(tx, ids)[0] or [ids[0]]
    tasks = select(task_instance.c.id).where(task_instance.c.dag_run_id.in_(chosen))
    counted = {str(table.name): table.c.task_instance_id.in_(tasks) for table in _OF_TASK}
    counted |= {str(table.name): table.c.dag_run_id.in_(chosen) for table in (task_instance, *_OF_RUN)}
    rows = {
        name: tx.connection.execute(select(func.count()).where(condition)).scalar_one()
        for name, condition in counted.items()
    }
    return Cleaned(rows | {"dag_run": len(chosen)}, chosen[-1], _names_of(tx, chosen))


def _remove_events(tx: Tx, ids: Sequence[int]) -> Cleaned:
    rows = {
        "redelivery": _delete(tx, redelivery, redelivery.c.trigger_event_id, ids),
        "trigger_event": _delete(tx, trigger_event, trigger_event.c.id, ids),
    }
    return Cleaned(rows, ids[-1])


def _remove_triggers(tx: Tx, ids: Sequence[int]) -> Cleaned:
    rows = {
        "strike": _delete(tx, strike, strike.c.trigger_id, ids),
        "signal_wait": _delete(tx, signal_wait, signal_wait.c.trigger_id, ids),
        "asset_watcher": _delete(tx, asset_watcher, asset_watcher.c.trigger_id, ids),
        "trigger": _delete(tx, trigger, trigger.c.id, ids),
    }
    return Cleaned(rows, ids[-1])


def _remove_streams(tx: Tx, ids: Sequence[int]) -> Cleaned:
    """Delete streams without triggers. They are locked already; a trigger may have got one right before that."""
    unused = select(stream.c.id).where(stream.c.id.in_(ids), ~exists().where(trigger.c.stream_id == stream.c.id))
    return Cleaned({"stream": _delete(tx, stream, stream.c.id, list(tx.connection.execute(unused).scalars()))}, ids[-1])


def _remove_dags(tx: Tx, ids: Sequence[int]) -> Cleaned:
    rows = {
        "waiting_event": _delete(tx, waiting_event, waiting_event.c.dag_id, ids),
        "asset_subscription": _delete(tx, asset_subscription, asset_subscription.c.dag_id, ids),
        "dag": _delete(tx, dag, dag.c.id, ids),
    }
    return Cleaned(rows, ids[-1])


def _remove_triggerers(tx: Tx, ids: Sequence[int]) -> Cleaned:
    return Cleaned({"triggerer": _delete(tx, triggerer, triggerer.c.id, ids)}, ids[-1])


def _remove_letters(tx: Tx, ids: Sequence[int]) -> Cleaned:
    rows = {
        "letter_action": _delete(tx, letter_action, letter_action.c.letter_id, ids),
        "dead_letter": _delete(tx, dead_letter, dead_letter.c.id, ids),
    }
    return Cleaned(rows, ids[-1])


def _remove_consumer_letters(tx: Tx, ids: Sequence[int]) -> Cleaned:
    return Cleaned({"consumer_letter": _delete(tx, consumer_letter, consumer_letter.c.id, ids)}, ids[-1])


def _remove_signals(tx: Tx, ids: Sequence[int]) -> Cleaned:
    return Cleaned({"signal": _delete(tx, signal, signal.c.id, ids)}, ids[-1])


class _Rows(NamedTuple):
    """The table of a kind, the column with the age of a row, the condition to delete it, and the deletion."""

    table: Table
    born: Column[datetime]
    may_go: Callable[[datetime], ColumnElement[bool]]
    remove: Callable[[Tx, Sequence[int]], Cleaned]


_KINDS: dict[Kind, _Rows] = {  # and strikes, which have no ids
    "runs": _Rows(dag_run, dag_run.c.created_date, _ended_runs, _remove_runs),
    "events": _Rows(trigger_event, trigger_event.c.stored_at, _old_events, _remove_events),
    "keyed_events": _Rows(trigger_event, trigger_event.c.stored_at, _old_keyed_events, _remove_events),
    "triggers": _Rows(trigger, trigger.c.created_date, _old_triggers, _remove_triggers),
    "streams": _Rows(stream, stream.c.created_date, _old_streams, _remove_streams),
    "dags": _Rows(dag, dag.c.created_date, _old_dags, _remove_dags),
    "triggerers": _Rows(triggerer, triggerer.c.started_at, _old_triggerers, _remove_triggerers),
    "dead_letters": _Rows(dead_letter, dead_letter.c.stored_at, _old_letters, _remove_letters),
    "open_dead_letters": _Rows(dead_letter, dead_letter.c.stored_at, _old_open_letters, _remove_letters),
    "consumer_letters": _Rows(
        consumer_letter, consumer_letter.c.set_aside_at, _old_consumer_letters, _remove_consumer_letters
    ),
    "signals": _Rows(signal, signal.c.sent_at, conditions.is_old, _remove_signals),
}


# --- the verb ------------------------------------------------------------------------------------


class _RollBack(Exception):
    """Ends a transaction that was only a trial."""


class CleaningVerbs(Verbs):
    """The verb that deletes old rows."""

    def clean(
        self,
        older_than_s: float,
        *,
        kinds: Sequence[Kind] = UNASKED,
        rows_max: int = CLEAN_ROWS_MAX,
        is_tried_only: bool = False,
    ) -> Iterator[tuple[Kind, Cleaned]]:
        """Delete rows older than this by the database's clock; yield the result of each transaction.

        Supervisors that have been silent for about as long are fenced first. Otherwise, if one does not know whether a
        commit arrived, it would store the event again after it is deleted. Keeping all rows that are younger than the
        silence is not an alternative, because a supervisor that died may never be fenced by another.

        ``is_tried_only``: every transaction is rolled back. Rows that only become free when an earlier kind is deleted
        are not counted then.
        """
        silence_max_s = max(older_than_s, CLEAN_AGE_MIN_S) - IN_DOUBT_MAX_S
        with self._trying(is_tried_only) as tx:
            fenced = leases.fence_silent(tx, silence_max_s)
            if fenced:
                tx.notify()
        if fenced:
            yield "triggerers", Cleaned({}, 0, fenced=tuple(fenced))
        before = tx.now - timedelta(seconds=older_than_s)
        for kind in kinds:
            after_id: int | None = 0
            while after_id is not None:
                with self._trying(is_tried_only) as tx:
                    cleaned = clean_batch(
                        tx, kind, before, after_id=after_id, rows_max=rows_max, is_tried_only=is_tried_only
                    )
                yield kind, cleaned
                after_id = cleaned.next_id

    @contextmanager
    def _trying(self, is_tried_only: bool) -> Generator[Tx]:
        try:
            with self.database.writing() as tx:
                yield tx
                if is_tried_only:
                    raise _RollBack
        except _RollBack:
            pass
