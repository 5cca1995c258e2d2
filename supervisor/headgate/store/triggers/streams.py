"""Shared streams: one owner each, so that no stream is ever split over supervisors.

A message of a stream may be acknowledged only after all its subscribers have handled it (I1). Its subscribers are those
of one runner, so all triggers of a stream have to be in the same one. That is so by construction:

- A trigger whose stream is not known (``stream_id`` is null) is claimed singly, but its runner does not let it join a
  stream. It computes the key of the stream and reports it, and `describe` records it.
- A trigger whose stream is known can only be claimed by the owner of its stream, or together with the whole stream if
  the stream has no live owner. So the owner of a stream owns all its open triggers that are owned at all.

::

    free ──claimed with all its triggers──▶ owned by 7 ──7 is fenced or ended──▶ free
                                               ▲
    in use by no trigger ──a trigger of 9 is described──▶ owned by 9

The row of a stream needs no change if its owner's lease ends, as that of a trigger does not.

**Locks.** Rows of streams are locked before rows of triggers, in the order of their digests or ids, and a claim passes
over streams that are locked. So two supervisors never wait for each other. `headgate.store.cleaning` locks the rows of
streams, too, before it looks whether they are in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, and_, bindparam, false, func, null, or_, select, update

from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger
from headgate.store.db.bulk import Kind, chunks, find, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import LeasedTx
from headgate.store.tables import OPEN_TRIGGER, stream, trigger, triggerer

# Open triggers that one stream may have: they are claimed in one transaction, and started in one step.
STREAM_TRIGGERS_MAX = 10_000
FREE_STREAMS_AT_ONCE = 500  # looked at for a claim; then come the next ones

_NEW_STREAM = Kind(stream, ("digest", "name", "queue", "triggerer_id", "created_date"))
_DESCRIBED = Kind(trigger, ("id", "triggerer_id"))


class Placed(msgspec.Struct, frozen=True):
    """The result of describing triggers.

    ``here`` are the triggers that may be started with the stream of their description, ``elsewhere`` those that are not
    owned any more, because only the owner of their stream may run them. ``refused`` are those that cannot be started,
    as failed runs, whose errors say why. A trigger in none of them has to be described once more.
    """

    here: dict[int, str] = {}
    elsewhere: frozenset[int] = frozenset()
    refused: tuple[FinishedTrigger, ...] = ()


NOTHING_PLACED = Placed()


# --- conditions of claims ------------------------------------------------------------------------


def is_gone(owner: ColumnElement[int]) -> ColumnElement[bool]:
    """Return the condition that a row with this owner has no live one.

    "Its owner is known to be gone", never "its owner is not among the living": PostgreSQL looks at a row again when
    another claim got ahead of this one, and an owner that registered meanwhile is unknown to the snapshot. Unknown must
    mean alive.
    """
    gone = select(triggerer.c.id).where(or_(triggerer.c.fenced_at.is_not(None), triggerer.c.stopped_at.is_not(None)))
    return or_(owner.is_(None), owner.in_(gone))


def is_in(column: ColumnElement[str], queues: Sequence[str]) -> ColumnElement[bool]:
    """Return the condition that a column is one of these queues; for a `Prepared` statement."""
    return or_(false(), *[column == queue for queue in queues])


def is_claimable_alone() -> ColumnElement[bool]:
    """Return the condition that a trigger may be claimed without others: it has no stream, or ``epoch`` has that."""
    mine = select(stream.c.id).where(stream.c.triggerer_id == bindparam("epoch"))
    return or_(trigger.c.stream_id.is_(None), trigger.c.stream_id.in_(mine))


def is_claimable() -> ColumnElement[bool]:
    """Return the condition that ``epoch`` may claim a trigger, if necessary with its whole stream."""
    free = select(stream.c.id).where(or_(stream.c.triggerer_id == bindparam("epoch"), is_gone(stream.c.triggerer_id)))
    return or_(trigger.c.stream_id.is_(None), trigger.c.stream_id.in_(free))


# --- claims --------------------------------------------------------------------------------------


@cache
def _free(queues: tuple[str, ...]) -> Prepared:
    free = select(stream.c.id).where(
        is_in(stream.c.queue, queues), is_gone(stream.c.triggerer_id), stream.c.id > bindparam("after")
    )
    return Prepared(free.order_by(stream.c.id).limit(FREE_STREAMS_AT_ONCE))


def _sizes(tx: LeasedTx, stream_ids: Sequence[int]) -> dict[int, int]:
    """Return how many open triggers these streams have, those without any left out.

    Not joined to `_free`: for that PostgreSQL would read all triggers, although few streams are free.
    """
    sizes: dict[int, int] = {}
    for ids in chunks(stream_ids):
        counted = select(trigger.c.stream_id, func.count()).where(trigger.c.stream_id.in_(ids), OPEN_TRIGGER)
        sizes.update((id_, size) for id_, size in tx.connection.execute(counted.group_by(trigger.c.stream_id)))
    return sizes


def claim_streams(tx: LeasedTx, *, limit: int, room: int, is_idle: bool, queues: Sequence[str]) -> list[int]:
    """Claim streams without a live owner, the oldest first; return their open triggers, all owned now.

    Whole streams are claimed until there are ``limit`` triggers or more, as long as they fit into ``room``. With
    ``is_idle``, the caller owns no trigger yet, and takes one stream that is larger than that.
    """
    claimed: list[int] = []
    after = 0
    while len(claimed) < limit:
        found = [id_ for (id_,) in _free(tuple(queues)).run(tx.connection, after=after).fetchall()]
        if not found:
            break
        sizes = _sizes(tx, found)
        chosen, total = [], len(claimed)
        for after in found:
            size = sizes.get(after, 0)
            if size and (total + size <= room or (is_idle and total == 0)):
                chosen.append(after)
                total += size
            if total >= limit:
                break
        claimed += _take(tx, chosen)  # less than that if another claims these at this moment: then come the next ones
    return claimed


def _take(tx: LeasedTx, chosen: Sequence[int]) -> list[int]:
    claimed: list[int] = []
    for ids in chunks(chosen):
        free = select(stream.c.id).where(stream.c.id.in_(ids), is_gone(stream.c.triggerer_id))
        locked = free.order_by(stream.c.id).with_for_update(skip_locked=True, key_share=True)
        mine = list(tx.connection.execute(locked).scalars())
        if not mine:
            continue
        tx.connection.execute(update(stream).where(stream.c.id.in_(mine)).values(triggerer_id=tx.epoch))
        mine_now = {"triggerer_id": tx.epoch, "changed_at": None}  # the rows are read afterwards, as they were changed
        # No SKIP LOCKED here: a row that a user is changing is waited for, so that the stream is claimed whole.
        whole = update(trigger).where(trigger.c.stream_id.in_(mine), OPEN_TRIGGER).values(mine_now)
        claimed += tx.connection.execute(whole.returning(trigger.c.id)).scalars()
    return claimed


def release(tx: LeasedTx, trigger_ids: Sequence[int]) -> None:
    """Release triggers of this epoch; others are passed over.

    The stream of an open one is released, too, if this epoch has no other trigger of it: a user has moved it to a queue
    that this supervisor does not serve.
    """
    mine = and_(trigger.c.id.in_(trigger_ids), trigger.c.triggerer_id == tx.epoch)
    of_open = select(trigger.c.stream_id).where(mine, OPEN_TRIGGER, trigger.c.stream_id.is_not(None)).distinct()
    left = sorted(tx.connection.execute(of_open).scalars())
    if left:
        locked = select(stream.c.id).where(stream.c.id.in_(left)).order_by(stream.c.id)
        tx.connection.execute(locked.with_for_update(key_share=True))
    tx.connection.execute(update(trigger).where(mine).values(triggerer_id=None))
    if left:
        others = select(trigger.c.stream_id).where(trigger.c.stream_id.in_(left), trigger.c.triggerer_id == tx.epoch)
        unused = and_(stream.c.id.in_(left), stream.c.triggerer_id == tx.epoch, stream.c.id.not_in(others))
        tx.connection.execute(update(stream).where(unused).values(triggerer_id=None))


# --- descriptions --------------------------------------------------------------------------------

_SET_STREAM = Prepared(
    update(trigger)
    .where(trigger.c.id == bindparam("id_"), trigger.c.triggerer_id == bindparam("epoch"))
    .values(stream_id=bindparam("of_stream"))
)
_LEAVE_TO_OWNER = Prepared(
    update(trigger)
    .where(trigger.c.id == bindparam("id_"), trigger.c.triggerer_id == bindparam("epoch"))
    .values(stream_id=bindparam("of_stream"), triggerer_id=null())
)
_ADOPT = Prepared(
    update(stream)
    .where(stream.c.id == bindparam("id_"))
    .values(triggerer_id=bindparam("epoch"), queue=bindparam("of_queue"))
)


_Parameters = dict[str, Any]  # of one of these statements


class _Stream(msgspec.Struct):
    """A locked row of ``stream``. ``triggers`` counts the triggers that use it, without those being described."""

    id: int
    queue: str
    is_mine: bool
    triggers: int = 0


def describe(tx: LeasedTx, described: Iterable[DescribedTrigger]) -> Placed:
    """Record the streams of triggers that this epoch owns, and decide which of them it may run.

    A stream that no trigger uses is adopted, with the queue of the trigger. Repeating it changes nothing.
    """
    by_id = {one.trigger_id: one for one in described}
    mine = _mine(tx, by_id)
    streamed = {id_: by_id[id_] for id_ in sorted(mine) if by_id[id_].stream}
    streams = _locked_streams(tx, streamed, mine)
    queues = _locked_queues(tx, list(streamed))
    here = {id_: "" for id_ in mine if id_ not in streamed}
    kept = [_row(tx, id_, None) for id_ in here]
    left: list[_Parameters] = []
    adopted: list[_Parameters] = []
    refused: list[FinishedTrigger] = []
    for id_, one in streamed.items():
        found = streams.get(one.stream)
        if found is None or queues.get(id_) != mine[id_]:  # it was cleaned away at this moment, or a user has moved it
            continue
        if found.triggers == 0:
            found.queue, found.is_mine = mine[id_], True
            adopted.append({"id_": found.id, "epoch": tx.epoch, "of_queue": found.queue})
        error = _misfit(found, mine[id_], one)
        if error:
            refused.append(FinishedTrigger(id_, one.trigger_run_id, "failed", 0, error))
            kept.append(_row(tx, id_, None))
            continue
        found.triggers += 1
        if found.is_mine:
            here[id_] = one.stream
            kept.append(_row(tx, id_, found.id))
        else:
            left.append(_row(tx, id_, found.id))
    for statement, rows in ((_ADOPT, adopted), (_SET_STREAM, kept), (_LEAVE_TO_OWNER, left)):
        if rows:
            statement.run_many(tx.connection, rows)
    if left:
        tx.notify()
    elsewhere = {row["id_"] for row in left} | (by_id.keys() - mine.keys())
    return Placed(here, frozenset(elsewhere), tuple(refused))


def _row(tx: LeasedTx, trigger_id: int, stream_id: int | None) -> _Parameters:
    return {"id_": trigger_id, "epoch": tx.epoch, "of_stream": stream_id}


def _mine(tx: LeasedTx, ids: Iterable[int]) -> dict[int, str]:
    """Return the queues of those triggers that this epoch owns, and that are open, by id."""
    pairs = [(trigger_id, tx.epoch) for trigger_id in sorted(ids)]
    columns = ("id", "queue", "finished_at", "removed_at")
    rows = find(tx.connection, _DESCRIBED, pairs, returning=columns)
    return {id_: queue for id_, queue, finished_at, removed_at in rows if finished_at is None and removed_at is None}


def _locked_queues(tx: LeasedTx, ids: Sequence[int]) -> dict[int, str]:
    """Lock triggers of this epoch, after their streams; return their queues, which a user may just have changed."""
    found: dict[int, str] = {}
    for some in chunks(sorted(ids)):
        rows = select(trigger.c.id, trigger.c.queue).where(trigger.c.id.in_(some), trigger.c.triggerer_id == tx.epoch)
        locked = rows.order_by(trigger.c.id).with_for_update(key_share=True)
        found |= {row.id: row.queue for row in tx.connection.execute(locked)}
    return found


def _locked_streams(tx: LeasedTx, described: dict[int, DescribedTrigger], queues: dict[int, str]) -> dict[str, _Stream]:
    """Make the streams that do not exist yet, owned by this epoch; lock all of them, and return them by digest."""
    first: dict[str, int] = {}  # the trigger that names a new one
    for id_, one in described.items():
        first.setdefault(one.stream, id_)
    now = bound(tx.connection, tx.now)
    new = [(digest, described[id_].stream_name, queues[id_], tx.epoch, now) for digest, id_ in sorted(first.items())]
    insert_new(tx.connection, _NEW_STREAM, new, returning=("id",))
    streams: dict[str, _Stream] = {}
    for digests in chunks(sorted(first)):
        rows = select(stream.c.digest, stream.c.id, stream.c.queue, stream.c.triggerer_id)
        locked = rows.where(stream.c.digest.in_(digests)).order_by(stream.c.digest).with_for_update(key_share=True)
        for digest, id_, queue, owner in tx.connection.execute(locked):
            streams[digest] = _Stream(id_, queue, owner == tx.epoch)
    by_id = {found.id: found for found in streams.values()}
    for some in chunks(sorted(by_id)):
        # Asked after the locks were taken, so that nothing committed before is overlooked.
        for row in tx.connection.execute(uses(some, list(described))):
            by_id[row.stream_id].triggers = row.triggers
    return streams


def uses(stream_ids: Sequence[int], but: Sequence[int]) -> Select[Any, int]:
    """Return the statement that counts the triggers of streams that are open, or still run somewhere."""
    runs = ~is_gone(trigger.c.triggerer_id)
    return (
        select(trigger.c.stream_id, func.count().label("triggers"))
        .where(trigger.c.stream_id.in_(stream_ids), or_(OPEN_TRIGGER, runs), trigger.c.id.not_in(but))
        .group_by(trigger.c.stream_id)
    )


def _misfit(found: _Stream, queue: str, one: DescribedTrigger) -> str:
    """Return why a trigger cannot be a subscriber of a stream, as an error for people; "" if it can."""
    if queue != found.queue:
        return (
            f"its stream {one.stream_name} is served in the queue {found.queue!r}, but its own queue is {queue!r}, and "
            "all triggers of a stream run on one supervisor; "
            f"`headgate watchers set NAME --queue {found.queue}` moves it there"
        )
    if found.triggers >= STREAM_TRIGGERS_MAX:
        return f"its stream {one.stream_name} has {found.triggers:,} triggers already, as many as a stream may have"
    return ""
