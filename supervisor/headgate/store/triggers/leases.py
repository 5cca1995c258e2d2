"""Leases of supervisors, and the claims on triggers that rest on them (I10).

**Epochs.** A supervisor registers and gets an epoch: the id of a row of ``triggerer``, which no other ever had or
will have. The row is its lease. A supervisor owns triggers by writing its epoch into their ``triggerer_id``, and
everything it writes later, it writes under that epoch. A supervisor that lost its lease registers again, under a new
epoch.

**Fencing.** Another supervisor may take a lease away if it has seen the same heartbeat for too long
(`headgate.supervisor.triggers.leases.Silences`), or if its process is known to be gone. It sets ``fenced_at``, and the
epoch is over for good. A process that was only suspended may wake up later, in the middle of anything, and must not
write one row more. A check before the transaction would not ensure that, because the fencing can come between the check
and the commit. So the check is a lock, held until the commit::

    writing:  SELECT ... FROM triggerer WHERE id = 7 AND alive FOR SHARE    (`lock_lease`, first statement)
              ... INSERT, UPDATE ...
              COMMIT                                                        releases it

    fencing:  SELECT latest_heartbeat ... FOR NO KEY UPDATE SKIP LOCKED     passes over 7 while it writes
              UPDATE triggerer SET fenced_at = ...  if it is the one seen   from its commit on, `lock_lease` finds
              COMMIT                                                        no row, and raises `LeaseLost`

The two locks exclude each other, so a transaction under an epoch is either committed before the epoch is fenced, or
refused. There is nothing in between. A heartbeat is a single UPDATE with the same condition, and needs no lock
before.

**Which locks.** FOR SHARE, since it conflicts with the UPDATE of a fencing, but not with itself: several transactions
of one epoch may run at once. FOR KEY SHARE, which foreign keys take, would not conflict with that UPDATE. FOR NO KEY
UPDATE in the fencing, since FOR UPDATE would wait for foreign keys too. SQLite has one writer at a time, and needs
none of them.

**No supervisor waits for another.** A fencing passes over rows that are locked: that supervisor is alive, or its
transaction is ended by the server within `IDLE_IN_TRANSACTION_MAX_S`, and the next look finds it. So a supervisor
that is stopped in the middle of a transaction holds up no other, and two that suspect each other cannot deadlock.
Claims pass over triggers that another supervisor is claiming. Two waits are deliberate: `fence_silent`, for a user,
waits until such a transaction is over, and `wait_for_inflight` waits for transactions of its own epoch. After an
ambiguous COMMIT it takes the stronger lock on its own row, and has it when no transaction is left whose rows could
still appear.

**Take-over.** A trigger can be claimed if it has no owner, or if its owner is fenced or has ended; one of a shared
stream only with all others of the stream (`headgate.store.triggers.streams`). Rows need no change when that happens::

    free --claim--> owned by 7 --fenced or ended--> free --claim--> owned by 9
                       |
                       +--release, or its run returned--> free, or finished

**Clocks.** Only the database's clock counts for every stored time, because the clocks of two machines differ. No clock
that can be set decides about a lease. A supervisor *stops* relying on its own by its monotonic clock, from the moment
before it wrote its heartbeat. Another one fences it by its own monotonic clock, from a moment after it had read that
heartbeat, which is later, and waits for longer (see `headgate.supervisor.triggers.leases`). The age of a heartbeat by
the database's clock is for people, and for `fence_silent`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Integer,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    insert,
    literal_column,
    not_,
    null,
    or_,
    select,
    union_all,
    update,
)

from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import DatabaseNow, UtcDateTime, bound, read
from headgate.store.db.transaction import LeasedTx, Tx, is_alive, wait_for_inflight
from headgate.store.db.verbs import leased, single_statement, writing
from headgate.store.errors import LeaseLost
from headgate.store.facts import drift, supervisor_status
from headgate.store.ids import HOLDS, Epoch, Hold, TriggerId
from headgate.store.tables import asset_watcher, dead_letter, stream, trigger, triggerer
from headgate.store.triggers import reopening, streams, strikes, waiting_tasks, watchers
from headgate.store.triggers.claimed import ClaimedTrigger as ClaimedTrigger
from headgate.store.triggers.claimed import OwnedTrigger, TriggerVerbs, decrypted

SILENCE_MAX_S = 30.0  # a triggerer whose heartbeat is older is shown as silent
NO_SILENCE: Mapping[Epoch, datetime] = MappingProxyType({})


class TriggererRow(msgspec.Struct, frozen=True):
    """One supervisor's lease. ``id`` is its epoch; ``heartbeat_age_s`` is by the database's clock."""

    id: Epoch
    hostname: str
    pid: int
    machine: str
    process_started: float
    capacity: int
    queues: tuple[str, ...]
    started_at: datetime
    latest_heartbeat: datetime
    heartbeat_age_s: float
    stopped_at: datetime | None = None
    fenced_at: datetime | None = None
    workers: int = 0
    endless_workers: int = 0


class Poll(msgspec.Struct, frozen=True):
    """What changed for a supervisor: its triggers that a user removed, and whether any trigger can be claimed.

    ``ended`` are its triggers for which nothing waits any more, though nobody has removed them: their task has gone on,
    or has timed out. Those that have just fired, and whose own end is on its way here, are among them. ``held`` are its
    open triggers that are not to run until their hold is released. ``changed`` are those that a user has changed, and
    that the supervisor has not read since (`headgate.store.triggers.changes`); some may be held as well.
    ``redriving`` are those that are to get a message again (`headgate.store.triggers.redrives`). ``describe`` are the
    digests of its streams whose brokers are to be asked (`headgate.store.facts.drift`).
    """

    removed: list[int]
    claimable: bool
    ended: list[int] = []
    held: dict[int, Hold] = {}
    changed: list[int] = []
    redriving: list[int] = []
    describe: list[str] = []


class LeaseVerbs(TriggerVerbs):
    """The verbs for leases, and for the claims that rest on them."""

    @writing
    def register_triggerer(
        self,
        tx: Tx,
        *,
        hostname: str,
        pid: int,
        machine: str,
        process_started: float,
        capacity: int,
        queues: Sequence[str],
        workers: int = 0,
        endless_workers: int = 0,
    ) -> Epoch:
        """Begin a lease and return its epoch, which no other supervisor ever had or will have. Raises `BadName`.

        ``process_started`` is in clock ticks since boot. ``workers``: how many steps of tasks it can run at once; 0 if
        it runs triggers alone; ``endless_workers``: and of endless tasks beside these.
        """
        for queue in queues:
            watchers.check_queue(queue)
        lease = insert(triggerer).values(
            hostname=hostname,
            pid=pid,
            machine=machine,
            process_started=process_started,
            capacity=capacity,
            queues=",".join(queues),
            workers=workers,
            endless_workers=endless_workers,
            started_at=tx.now,
            latest_heartbeat=tx.now,
        )
        return Epoch(tx.connection.execute(lease.returning(triggerer.c.id)).scalar_one())

    def heartbeat(self, epoch: Epoch, status: str | None = None) -> None:
        """Renew the lease, by the database's clock. Raises `LeaseLost`: the statement is its own check.

        With ``status``, what the supervisor says of itself is stored in the same transaction
        (`headgate.store.facts.supervisor_status.encode_status`); without, it stays as it is.
        """
        if status is None:
            with self.database.single_statement() as tx:
                self._renew(tx, epoch)
            return
        with self.database.writing() as tx:
            self._renew(tx, epoch)
            supervisor_status.publish(tx, epoch, status)

    def _renew(self, tx: Tx, epoch: Epoch) -> None:
        now = None if tx.clock is None else bound(tx.connection, tx.clock())
        if _HEARTBEAT.run(tx.connection, epoch=epoch, now=now).rowcount != 1:
            raise LeaseLost(epoch)

    @writing
    def release_triggerer(self, tx: Tx, epoch: Epoch) -> None:
        """End the lease and release its triggers and streams. Ending it again does nothing.

        Raises `LeaseLost` if it is fenced.
        """
        tx.notify()
        statement = update(triggerer).where(triggerer.c.id == epoch, is_alive()).values(stopped_at=tx.now)
        if tx.connection.execute(statement).rowcount == 1:
            _release_owned(tx, epoch)
            return
        stopped = select(triggerer.c.id).where(triggerer.c.id == epoch, triggerer.c.stopped_at.is_not(None))
        if tx.connection.execute(stopped).first() is None:
            raise LeaseLost(epoch)

    @leased
    def release_owned(self, tx: LeasedTx) -> None:
        """Release all triggers and streams of the epoch, which runs none any more; its lease goes on."""
        tx.notify()
        _release_owned(tx, tx.epoch)

    @single_statement
    def live_triggerers(self, tx: Tx) -> list[TriggererRow]:
        """Return the leases that are neither ended nor fenced, however old their heartbeat is, by epoch."""
        found = []
        for now, *row in _LIVE.run(tx.connection).fetchall():
            fields = dict(zip(triggerer.c.keys(), row, strict=True))
            for name in ("started_at", "latest_heartbeat"):  # the other times of a live lease are null
                fields[name] = read(tx.connection, fields[name])
            found.append(
                triggerer_row(fields, read(tx.connection, now) if tx.clock is None else tx.clock().astimezone(UTC))
            )
        return found

    @leased
    def fence_triggerers(
        self, tx: LeasedTx, *, silent: Mapping[Epoch, datetime] = NO_SILENCE, dead: Collection[int] = ()
    ) -> list[Epoch]:
        """Fence those in ``silent`` whose latest heartbeat is still this one, and those in ``dead``; return which.

        ``dead`` are those whose process is known to be gone. Never fences the epoch itself, and passes over a
        triggerer that is in the middle of a transaction: ask again. A fenced epoch never writes again.
        """
        fenced = fence(tx, silent=silent, dead=dead)
        if fenced:
            tx.notify()
        return fenced

    def claim_triggers(
        self, epoch: Epoch, *, limit: int, queues: Sequence[str], room: int | None = None, is_idle: bool = False
    ) -> list[ClaimedTrigger]:
        """Take up to ``limit`` triggers without a live owner, and return them. No trigger has two owners.

        Streams come first, and are taken whole: the last of them may exceed ``limit``, but not ``room`` (by default the
        same), unless the supervisor ``is_idle``. Then come others by priority, the oldest first.
        """
        with self.database.leased(epoch) as tx:
            tx.require_key()
            rows = claim(tx, limit=limit, room=limit if room is None else room, is_idle=is_idle, queues=queues)
            tasks = waiting_tasks.of(tx, [row.id for row in rows if row.watcher is None])
            passed_over = strikes.passed_over_of(tx, {row.id for row in rows})
        self.note_claimed(rows, tasks)
        return [decrypted(row, self.database.secrets, tasks, passed_over) for row in rows]

    def claimed_triggers(self, epoch: Epoch) -> list[ClaimedTrigger]:
        """Return the triggers this epoch owns and should be running.

        No claim that was begun before can add to them: one that is still being committed is waited for.
        """
        with self.database.writing() as tx:  # it writes nothing, but the lock is a writer's
            tx.require_key()
            wait_for_inflight(tx.connection, epoch)
            rows = [OwnedTrigger._make(row) for row in _CLAIMED.run(tx.connection, epoch=epoch).fetchall()]
            tasks = waiting_tasks.of(tx, [row.id for row in rows if row.watcher is None])
            passed_over = strikes.passed_over_of(tx, {row.id for row in rows})
        self.note_claimed(rows, tasks)
        return [decrypted(row, self.database.secrets, tasks, passed_over) for row in rows]

    def has_changes(self) -> bool:
        """Whether others may have written since the last call; ask now and then even so (`Database.has_changes`)."""
        return self.database.has_changes()

    def no_bell(self) -> str | None:
        """Say why `has_changes` has to be asked every now and then, because no bell rings; None if one does."""
        return self.database.no_bell

    @single_statement
    def poll(self, tx: Tx, epoch: Epoch, queues: Sequence[str]) -> Poll:
        """Say which owned triggers a user removed, or nothing waits for, and whether any can be claimed."""
        rows = _poll(tuple(queues)).run(tx.connection, epoch=epoch).fetchall()
        owned = sorted((id_, state) for id_, state in rows if id_ is not None)
        return Poll(
            removed=[id_ for id_, state in owned if state == "removed"],
            claimable=len(owned) < len(rows),
            ended=[id_ for id_, state in owned if state == "ended"],
            held={id_: state for id_, state in owned if state in HOLDS},
            changed=[id_ for id_, state in owned if state == "changed"],
            redriving=[id_ for id_, state in owned if state == "redriving"],
            describe=[state.removeprefix(drift.ASKED) for _, state in owned if state.startswith(drift.ASKED)],
        )

    @single_statement
    def count_claimable(self, tx: Tx, epoch: Epoch, queues: Sequence[str]) -> int:
        """Return how many triggers of these queues the epoch could claim."""
        return int(_count(tuple(queues)).run(tx.connection, epoch=epoch).fetchone()[0])

    def release_triggers(self, epoch: Epoch, ids: Sequence[int]) -> list[TriggerId]:
        """Release these triggers; ids that the epoch does not own are passed over.

        Return those that are open again, because a task goes on with them.
        """
        reopened: list[TriggerId] = []
        with self.database.leased(epoch) as tx:
            for some in chunks(sorted(ids)):
                streams.release(tx, some)
                reopened += reopening.reopen(tx, some)
            tx.notify()
        self.forget(ids)
        return reopened


# --- leases --------------------------------------------------------------------------------------


def _release_owned(tx: Tx, epoch: Epoch) -> None:
    # Streams before triggers, as everybody locks them.
    streams_of_it = select(stream.c.id).where(stream.c.triggerer_id == epoch).order_by(stream.c.id)
    tx.connection.execute(streams_of_it.with_for_update(key_share=True))
    for owned in (trigger, stream):
        tx.connection.execute(update(owned).where(owned.c.triggerer_id == epoch).values(triggerer_id=None))


_HEARTBEAT = Prepared(
    update(triggerer)
    .where(triggerer.c.id == bindparam("epoch"), is_alive())
    .values(latest_heartbeat=func.coalesce(bindparam("now", type_=UtcDateTime()), DatabaseNow()))
)
_LIVE = Prepared(select(DatabaseNow(), *triggerer.c).where(is_alive()).order_by(triggerer.c.id))


def triggerer_row(fields: Mapping[str, Any], now: datetime) -> TriggererRow:
    """Return a row of the table ``triggerer`` as seen at the time ``now`` of the same clock."""
    told: dict[str, Any] = dict(fields)
    told["queues"] = tuple(queue for queue in told["queues"].split(",") if queue)
    told["heartbeat_age_s"] = (now - told["latest_heartbeat"]).total_seconds()
    return TriggererRow(**told)


def fence(tx: LeasedTx, *, silent: Mapping[Epoch, datetime], dead: Collection[int]) -> list[Epoch]:
    """Fence those in ``silent`` whose latest heartbeat is still this one, and those in ``dead``."""
    fenced: list[Epoch] = []
    for ids in chunks(sorted({*silent, *dead} - {tx.epoch})):
        candidates = (
            select(triggerer.c.id, triggerer.c.latest_heartbeat)
            .where(triggerer.c.id.in_(ids), is_alive())
            .order_by(triggerer.c.id)
            .with_for_update(skip_locked=True, key_share=True)
        )
        found = [
            id_ for id_, heartbeat in tx.connection.execute(candidates) if id_ in dead or silent.get(id_) == heartbeat
        ]
        if found:
            tx.connection.execute(update(triggerer).where(triggerer.c.id.in_(found)).values(fenced_at=tx.now))
        fenced += found
    return fenced


def fence_silent(tx: Tx, silence_max_s: float) -> list[Epoch]:
    """Fence those silent for longer than ``silence_max_s``, for a user, who has no epoch; return which.

    One that is in the middle of a transaction is waited for: whether it has renewed its lease is known then.
    """
    silent = triggerer.c.latest_heartbeat < tx.now - timedelta(seconds=silence_max_s)
    statement = update(triggerer).where(is_alive(), silent).values(fenced_at=tx.now).returning(triggerer.c.id)
    return sorted(tx.connection.execute(statement).scalars())


# --- claims --------------------------------------------------------------------------------------


def _unowned(queues: Sequence[str]) -> ColumnElement[bool]:
    return and_(
        trigger.c.finished_at.is_(None),
        trigger.c.removed_at.is_(None),
        streams.is_in(trigger.c.queue, queues),
        streams.is_gone(trigger.c.triggerer_id),
    )


def _claim_statement(queues: Sequence[str]) -> Update:
    # In a WITH of its own PostgreSQL looks for the candidates once, whatever its plan is; within the UPDATE it might
    # look again and again, and lock more than ``limit`` of them.
    candidates = (
        select(trigger.c.id)
        .where(_unowned(queues), streams.is_claimable_alone())
        .order_by(trigger.c.priority.desc(), trigger.c.id)
        .limit(bindparam("limit", type_=Integer()))
        .with_for_update(skip_locked=True, key_share=True, of=trigger)
        .cte("candidates")
    )
    mine = {"triggerer_id": bindparam("epoch"), "changed_at": null()}  # it is read afterwards, as it was changed
    return update(trigger).where(trigger.c.id.in_(select(candidates.c.id))).values(mine)


@cache
def _claim(queues: tuple[str, ...]) -> Prepared:
    return Prepared(_claim_statement(queues).returning(trigger.c.id))


# The columns of `OwnedTrigger`. Not read by the RETURNING of the claim: there SQLite takes a subquery for a constant.
_OWNED = (
    select(
        *(trigger.c.id, asset_watcher.c.name, trigger.c.classpath, trigger.c.kwargs, trigger.c.queue),
        *(trigger.c.failure_count, asset_watcher.c.asset_id, asset_watcher.c.signal_namespace),
        *(asset_watcher.c.signal_key, trigger.c.hold, stream.c.digest),
    )
    .select_from(
        trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id).outerjoin(
            stream, stream.c.id == trigger.c.stream_id
        )
    )
    .where(
        trigger.c.triggerer_id == bindparam("epoch"), trigger.c.finished_at.is_(None), trigger.c.removed_at.is_(None)
    )
    .order_by(trigger.c.id)
)
_CLAIMED = Prepared(_OWNED)
_CLAIMED_BETWEEN = Prepared(_OWNED.where(trigger.c.id.between(bindparam("first"), bindparam("last"))))


def claim(tx: LeasedTx, *, limit: int, room: int, is_idle: bool, queues: Sequence[str]) -> list[OwnedTrigger]:
    """Take claimable triggers of these queues: whole streams, then others by priority and age; return their rows."""
    ids = set(streams.claim_streams(tx, limit=limit, room=room, is_idle=is_idle, queues=queues))
    if len(ids) < limit:
        alone = _claim(tuple(queues)).run(tx.connection, epoch=tx.epoch, limit=limit - len(ids))
        ids.update(id_ for (id_,) in alone.fetchall())
    return owned_of(tx, ids)


def owned_of(tx: LeasedTx, ids: Collection[int]) -> list[OwnedTrigger]:
    """Return the rows of those of these triggers that the epoch owns and should be running."""
    if not ids:
        return []
    owned = _CLAIMED_BETWEEN.run(tx.connection, epoch=tx.epoch, first=min(ids), last=max(ids)).fetchall()
    return [row for row in map(OwnedTrigger._make, owned) if row.id in ids]


_OVER = case((trigger.c.removed_at.is_not(None), literal_column("'removed'")), else_=literal_column("'ended'"))


@cache
def _poll(queues: tuple[str, ...]) -> Prepared:
    mine = trigger.c.triggerer_id == bindparam("epoch")
    over = or_(trigger.c.removed_at.is_not(None), trigger.c.finished_at.is_not(None))
    owned = select(trigger.c.id, _OVER).where(mine, over)
    held = select(trigger.c.id, trigger.c.hold).where(mine, trigger.c.hold.is_not(None), not_(over))
    claimable = exists(select(trigger.c.id).where(_unowned(queues), streams.is_claimable()))
    is_changed = trigger.c.changed_at.is_not(None)
    changed = select(trigger.c.id, literal_column("'changed'")).where(mine, is_changed, not_(over))
    is_redriving = dead_letter.c.state == literal_column("'redriving'")  # as its index says
    letters = dead_letter.join(trigger, trigger.c.id == dead_letter.c.target_id)
    redriving = (
        select(trigger.c.id, literal_column("'redriving'")).select_from(letters).where(is_redriving, mine, not_(over))
    ).distinct()
    asked = drift.asked_of(bindparam("epoch"))
    return Prepared(union_all(owned, held, changed, redriving, asked, select(null(), null()).where(claimable)))


@cache
def _count(queues: tuple[str, ...]) -> Prepared:
    return Prepared(select(func.count()).select_from(trigger).where(_unowned(queues), streams.is_claimable()))
