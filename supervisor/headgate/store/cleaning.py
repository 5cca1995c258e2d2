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

from sqlalchemy import Column, ColumnElement, Table, and_, delete, exists, func, or_, select

from headgate.store.access.audit import Detail
from headgate.store.access.tables import ONE
from headgate.store.consuming import consumers
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs
from headgate.store.removal.runs import CLEAN_ROWS_MAX as CLEAN_ROWS_MAX
from headgate.store.removal.runs import Cleaned as Cleaned
from headgate.store.removal.runs import count_runs, delete_rows, remove_runs
from headgate.store.signals import conditions
from headgate.store.tables import (
    asset_subscription,
    asset_watcher,
    audit,
    consumer_letter,
    dag,
    dag_run,
    dag_run_event,
    dag_signal,
    dead_letter,
    letter_action,
    redelivery,
    signal,
    signal_wait,
    stream,
    stream_drift,
    strike,
    supervisor_status,
    task_instance,
    task_stream,
    trigger,
    trigger_event,
    trigger_run,
    triggerer,
    waiting_event,
)
from headgate.store.triggers import leases
from headgate.store.triggers.events import REDRIVEN_RUN
from headgate.store.triggers.streams import is_gone

# Younger rows are not deleted: a supervisor that does not know whether its commit arrived reports an event again, and
# the event must still exist to be recognised. While it renews its lease, it reports within seconds. If it is cut off or
# suspended, it may report after days, so a clean fences it first.
CLEAN_AGE_MIN_S = 3600.0
# A supervisor may not know the outcome of commits that it made up to this long before it last renewed its lease: far
# more than the waits between its tries. It is fenced if its silence is longer than the age of deleted rows minus this.
IN_DOUBT_MAX_S = 900.0
AUDIT_AGE_MIN_S = 400 * 86_400.0  # a year and a month: younger rows of the audit stay, whatever else is deleted

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
    "audit",
]
# In this order, because rows of an earlier kind may refer to rows of a later one.
KINDS: tuple[Kind, ...] = get_args(Kind)
# Only the user can know whether these are still needed. Dead letters are those that are resolved, open ones all others.
ASKED: tuple[Kind, ...] = ("keyed_events", "dead_letters", "open_dead_letters")
UNASKED: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in ASKED)


# --- conditions ----------------------------------------------------------------------------------


def _ended_runs(before: datetime) -> ColumnElement[bool]:
    return or_(dag_run.c.removed_at.is_not(None), and_(dag_run.c.ended_at.is_not(None), dag_run.c.ended_at < before))


def _event_is_free() -> ColumnElement[bool]:
    """Return the condition that no task was or will be resumed by it, no run created, and nothing else needs it."""
    return and_(
        ~consumers.is_needed(),
        ~_has_open_letter(),
        ~exists(ONE).where(task_instance.c.event_id == trigger_event.c.id),
        ~exists(ONE).where(
            task_stream.c.trigger_id == trigger_event.c.trigger_id, task_stream.c.handled_to < trigger_event.c.id
        ),
        ~exists(ONE).where(dag_run_event.c.trigger_event_id == trigger_event.c.id),
        ~exists(ONE).where(waiting_event.c.trigger_event_id == trigger_event.c.id),
    )


def _has_open_letter() -> ColumnElement[bool]:
    """Return the condition that a redrive may still look for it: by its own name, or by the key of its message.

    Without it the redrive would store the event once more, perhaps for the next watcher of the same name.
    """
    c, letter = trigger_event.c, dead_letter.c
    is_open, has_key = letter.resolved_at.is_(None), and_(letter.key.is_not(None), letter.key == c.key)
    of_letter, of_event = asset_watcher.alias(), asset_watcher.alias()
    is_namesake = and_(
        of_event.c.trigger_id == c.trigger_id,
        of_letter.c.name == of_event.c.name,
        letter.trigger_id == of_letter.c.trigger_id,
    )
    return or_(  # each with indexes of its own
        exists(ONE).where(
            is_open, letter.trigger_run_id == c.trigger_run_id, letter.sequence_index == c.sequence_index
        ),
        exists(ONE).where(is_open, has_key, letter.trigger_id == c.trigger_id),
        exists(ONE).where(is_open, has_key, is_namesake),
    )


def _trigger_is_closed(before: datetime) -> ColumnElement[bool]:
    """Return the condition that it ended before then, and has no owner, no task, and no watcher that is not removed.

    The stream of a task may go on, and open its trigger again.
    """
    present = exists(ONE).where(asset_watcher.c.trigger_id == trigger.c.id, asset_watcher.c.removed_at.is_(None))
    return and_(
        or_(trigger.c.finished_at.is_not(None), trigger.c.removed_at.is_not(None)),
        func.coalesce(trigger.c.removed_at, trigger.c.finished_at) < before,
        is_gone(trigger.c.triggerer_id),
        ~exists(ONE).where(task_instance.c.trigger_id == trigger.c.id),
        ~exists(ONE).where(task_stream.c.trigger_id == trigger.c.id),
        ~present,
    )


def _has_newer() -> ColumnElement[bool]:
    """Return the condition that it is not what `EventVerbs.last_event` returns."""
    newer = trigger_event.alias()
    return exists(ONE).where(
        newer.c.trigger_id == trigger_event.c.trigger_id,
        newer.c.id > trigger_event.c.id,
        ~newer.c.trigger_run_id.startswith(REDRIVEN_RUN),
    )


def _old_keyed_events(before: datetime) -> ColumnElement[bool]:
    return and_(trigger_event.c.stored_at < before, trigger_event.c.key.is_not(None), _event_is_free(), _has_newer())


def _old_events(before: datetime) -> ColumnElement[bool]:
    is_closed = exists(ONE).where(trigger.c.id == trigger_event.c.trigger_id, _trigger_is_closed(before))
    return and_(
        trigger_event.c.stored_at < before,
        _event_is_free(),
        or_(is_closed, and_(trigger_event.c.key.is_(None), _has_newer())),
    )


def _old_triggers(before: datetime) -> ColumnElement[bool]:
    """Return the condition that it is closed, and nothing refers to it: a letter finds the next watcher by it."""
    with_letters = select(dead_letter.c.trigger_id).where(dead_letter.c.resolved_at.is_(None))
    return and_(
        _trigger_is_closed(before),
        ~exists(ONE).where(trigger_event.c.trigger_id == trigger.c.id),
        trigger.c.id.not_in(with_letters),  # read once for all triggers
    )


def _old_dags(before: datetime) -> ColumnElement[bool]:
    return and_(
        dag.c.removed_at.is_not(None),
        dag.c.removed_at < before,
        ~exists(ONE).where(dag_run.c.dag_id == dag.c.id),
    )


def _old_triggerers(before: datetime) -> ColumnElement[bool]:
    return and_(
        func.coalesce(triggerer.c.stopped_at, triggerer.c.fenced_at) < before,
        ~exists(ONE).where(trigger.c.triggerer_id == triggerer.c.id),
        ~exists(ONE).where(task_instance.c.triggerer_id == triggerer.c.id),
        ~exists(ONE).where(stream.c.triggerer_id == triggerer.c.id),
    )


def _old_streams(before: datetime) -> ColumnElement[bool]:
    return and_(stream.c.created_date < before, ~exists(ONE).where(trigger.c.stream_id == stream.c.id))


def _old_letters(before: datetime) -> ColumnElement[bool]:
    return dead_letter.c.resolved_at < before


def _old_acts(before: datetime) -> ColumnElement[bool]:
    return audit.c.at < before


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
        remove = count_runs
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


def _deleting(*columns: Column[Any]) -> Callable[[Tx, Sequence[int]], Cleaned]:
    """Return how to delete rows by the ids in the last of these columns, after those that have them in the others."""

    def delete_by_ids(tx: Tx, ids: Sequence[int]) -> Cleaned:
        return Cleaned({str(column.table.name): delete_rows(tx, column, ids) for column in columns}, ids[-1])

    return delete_by_ids


def _remove_streams(tx: Tx, ids: Sequence[int]) -> Cleaned:
    """Delete streams without triggers. They are locked already; a trigger may have got one right before that."""
    unused = select(stream.c.id).where(stream.c.id.in_(ids), ~exists(ONE).where(trigger.c.stream_id == stream.c.id))
    old = list(tx.connection.execute(unused).scalars())
    rows = {
        "stream_drift": delete_rows(tx, stream_drift.c.stream_id, old),
        "stream": delete_rows(tx, stream.c.id, old),
    }
    return Cleaned(rows, ids[-1])


_remove_events = _deleting(redelivery.c.trigger_event_id, trigger_event.c.id)
_remove_letters = _deleting(letter_action.c.letter_id, dead_letter.c.id)
_remove_triggers = _deleting(
    *(strike.c.trigger_id, trigger_run.c.trigger_id, signal_wait.c.trigger_id, asset_watcher.c.trigger_id),
    trigger.c.id,
)
_remove_dags = _deleting(
    *(waiting_event.c.dag_id, dag_signal.c.dag_id, signal_wait.c.dag_id, asset_subscription.c.dag_id),
    dag.c.id,
)
_remove_triggerers = _deleting(supervisor_status.c.triggerer_id, triggerer.c.id)


class _Rows(NamedTuple):
    """The table of a kind, the column with the age of a row, the condition to delete it, and the deletion."""

    table: Table
    born: Column[datetime]
    may_go: Callable[[datetime], ColumnElement[bool]]
    remove: Callable[[Tx, Sequence[int]], Cleaned]


_KINDS: dict[Kind, _Rows] = {  # and strikes, which have no ids
    "runs": _Rows(dag_run, dag_run.c.created_date, _ended_runs, remove_runs),
    "events": _Rows(trigger_event, trigger_event.c.stored_at, _old_events, _remove_events),
    "keyed_events": _Rows(trigger_event, trigger_event.c.stored_at, _old_keyed_events, _remove_events),
    "triggers": _Rows(trigger, trigger.c.created_date, _old_triggers, _remove_triggers),
    "streams": _Rows(stream, stream.c.created_date, _old_streams, _remove_streams),
    "dags": _Rows(dag, dag.c.created_date, _old_dags, _remove_dags),
    "triggerers": _Rows(triggerer, triggerer.c.started_at, _old_triggerers, _remove_triggerers),
    "dead_letters": _Rows(dead_letter, dead_letter.c.stored_at, _old_letters, _remove_letters),
    "open_dead_letters": _Rows(dead_letter, dead_letter.c.stored_at, _old_open_letters, _remove_letters),
    "consumer_letters": _Rows(
        consumer_letter, consumer_letter.c.set_aside_at, _old_consumer_letters, _deleting(consumer_letter.c.id)
    ),
    "signals": _Rows(signal, signal.c.sent_at, conditions.is_old, _deleting(signal.c.id)),
    "audit": _Rows(audit, audit.c.at, _old_acts, _deleting(audit.c.id)),
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
        told: Detail = {"older_than_s": older_than_s, "kinds": list(kinds)}
        with self._trying(is_tried_only) as tx:
            fenced = leases.fence_silent(tx, silence_max_s)
            tx.act("db clean", "old rows", before=told, counts={"fenced": len(fenced)})
            if fenced:
                tx.notify()
        if fenced:
            yield "triggerers", Cleaned({}, 0, fenced=tuple(fenced))
        now = tx.now
        for kind in kinds:
            age_s = max(older_than_s, AUDIT_AGE_MIN_S) if kind == "audit" else older_than_s
            before = now - timedelta(seconds=age_s)
            after_id: int | None = 0
            while after_id is not None:
                with self._trying(is_tried_only) as tx:
                    cleaned = clean_batch(
                        tx, kind, before, after_id=after_id, rows_max=rows_max, is_tried_only=is_tried_only
                    )
                    if cleaned.rows:
                        tx.act("db clean", "old rows", before=told, counts=cleaned.rows)
                    else:
                        tx.act_nothing()
                yield kind, cleaned
                after_id = cleaned.next_id

    @contextmanager
    def _trying(self, is_tried_only: bool) -> Generator[Tx]:
        try:
            with self.database.acting() as tx:
                yield tx
                if is_tried_only:
                    raise _RollBack
        except _RollBack:
            pass
