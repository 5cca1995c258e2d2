"""Which subscriber still has to handle which event: the records of one stream in ack mode; no I/O, clock or tasks.

The problem. One message of a broker is broadcast to many subscribers. Each may derive any number of events from it, and
each of these is stored some time later, in another process. The broker may forget the message only when all of that has
happened (I1), and, in a lane, only after every message before it (I3). Subscribers join, leave, hang and fail at any
moment, and a confirmation may arrive for something that nothing waits for any more.

The idea. Count, per message, instead of asking. When an event is broadcast, each subscriber online at that moment gets
one *share* in it; later subscribers have none (snapshot at fan-out). Every share is resolved exactly once, and the
event is resolved when its counter of pending shares reaches zero. A share moves like this::

               hand_out            move_past           last confirmation
    QUEUED ------------->  OPEN  ------------> PASSED ------------------> ACKED | REJECTED (if refused)
      |                     |  \\                |  (at once if nothing is unconfirmed)
      |                     |   `-- reject ------+----------------------> REJECTED
      `------- fail --------+------- fail -------+----------------------> FAILED

OPEN is the *binding window*: an event that the subscriber fires now derives from this raw event, and puts a persist seq
on the share. PASSED means that the subscriber asked for its next event, so it can derive nothing more from this one.
ACKED therefore means moved past *and* every seq confirmed (I1). An event that was never fired needs no confirmation:
most filters skip most events, and then the share goes from OPEN to ACKED in one step.

Who resolves a share: the subscriber by pulling on (PASSED) or by rejecting; a confirmation, through the `SeqTable`; the
manager, by failing a subscriber that took too long; the subscriber's leaving, which fails what it never pulled, and the
event it was working on too if it was cut short (I13). FAILED and REJECTED end the wait for confirmations: their seqs
are dropped from the table, and late ones are ignored.

What may be advanced. A *lane* keeps its events in fan-out order. Its contiguous resolved prefix is taken as one batch;
lanes do not wait for one another, and take turns. The outcome of an event counts how its shares were resolved: a
producer must not commit past one that has failed shares.

The end. `Ledger.close` abandons everything unresolved: the broker redelivers it, and I2 recognises what was already
stored. Resolved events can still be taken and advanced.

Limits: the group bounds `outstanding`; every operation is O(1) for one share.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from headgate.streams.contract import AdvanceItem, AdvanceOutcome
from headgate.streams.redelivery import RedeliveredMessage

LANES_LOOKED_AT_MAX = 1_000  # for the oldest event; lanes are in the order in which they came


class ShareState(enum.Enum):
    """The state of a share; see the drawing in the module's docstring."""

    QUEUED = "queued"
    OPEN = "open"
    PASSED = "passed"
    ACKED = "acked"
    FAILED = "failed"
    REJECTED = "rejected"


# Module names, because looking a member up on its class costs as much as the rest of a transition.
QUEUED, OPEN, PASSED = ShareState.QUEUED, ShareState.OPEN, ShareState.PASSED
ACKED, FAILED, REJECTED = ShareState.ACKED, ShareState.FAILED, ShareState.REJECTED
_UNRESOLVED = (PASSED, OPEN, QUEUED)  # no set, because hashing a member of an enum calls a function of Python


@lru_cache(maxsize=64)
def _outcome(acked: int, failed: int, rejected: int) -> AdvanceOutcome:
    # Most outcomes of a stream are equal, and they are immutable: one object serves them all.
    return AdvanceOutcome(acked=acked, failed=failed, rejected=rejected)


class Lane:
    """The events of one lane that are not yet advanced, in fan-out order."""

    __slots__ = ("events", "is_ready", "value")

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self.events: deque[BroadcastEvent] = deque()
        self.is_ready = False  # is in the ledger's queue of lanes whose first event is resolved


class BroadcastEvent:
    """One event, and how many of its shares were resolved in which way. ``deadline``: the end of its ack timeout."""

    __slots__ = ("acked", "broker_payload", "deadline", "failed", "key", "lane", "pending", "rejected")

    def __init__(self, broker_payload: Any, lane: Lane, key: str | None, deadline: float, pending: int) -> None:
        self.broker_payload = broker_payload
        self.lane = lane
        self.key = key
        self.deadline = deadline
        self.pending = pending
        self.acked = 0
        self.failed = 0
        self.rejected = 0


class Share:
    """The part of one subscriber in one event.

    ``derived`` counts the events fired within the binding window, whatever the state: it is the position by which a
    redelivered event is recognised (I2), so it continues to count after the share is resolved.
    """

    __slots__ = ("account", "derived", "event", "is_refused", "state", "unconfirmed")

    def __init__(self, event: BroadcastEvent, account: Account) -> None:
        self.event = event
        self.account = account
        self.state = QUEUED
        self.derived = 0
        self.is_refused = False
        self.unconfirmed: set[int] | None = None  # created with the first seq, because most filters skip most events


class Account:
    """All unresolved shares of one subscriber, oldest first."""

    __slots__ = ("is_online", "ledger", "shares")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.is_online = True
        # A dict for its order and its O(1) removal from anywhere. A deque would keep resolved shares behind an
        # unresolved head, with their broker payloads, for as long as an ack timeout.
        self.shares: dict[Share, None] = {}

    def earliest_deadline(self) -> float | None:
        """The end of the ack timeout of the oldest unresolved share; None if there is none."""
        for share in self.shares:
            return share.event.deadline
        return None


class SeqTable:
    """Which share waits for which persist seq, over all streams of one manager.

    One table for all streams, so that a confirmation costs one look-up. Seqs begin at 1 (on the wire, 0 means that
    nothing waits) and are never reused. ``on_empty`` is called when the last seq is confirmed or dropped.
    """

    def __init__(self, on_empty: Callable[[], object]) -> None:
        self._on_empty = on_empty
        self._last = 0
        self._shares: dict[int, Share] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def assign(self, share: Share) -> int:
        """Return the next seq, which ``share`` waits for from now on."""
        self._last += 1
        self._shares[self._last] = share
        return self._last

    def drop(self, seqs: Iterable[int]) -> None:
        """Forget seqs whose share no longer waits; late confirmations of them are ignored."""
        had_some = bool(self._shares)
        for seq in seqs:
            self._shares.pop(seq, None)
        if had_some and not self._shares:
            self._on_empty()

    def confirm(self, seqs: Iterable[int], *, refused: bool = False) -> None:
        """Confirm ``seqs``, and resolve the shares that waited for nothing else. Unknown seqs are ignored."""
        had_some = bool(self._shares)
        for seq in seqs:
            share = self._shares.pop(seq, None)
            if share is not None:
                share.account.ledger.confirm(share, seq, refused=refused)
        if had_some and not self._shares:
            self._on_empty()

    def confirm_kept(self, seqs: Iterable[int]) -> None:
        """Confirm events that a dead letter holds whole: for a broker they are handled, for a redriven message not."""
        for seq in seqs:
            share = self._shares.get(seq)
            if share is not None:
                self.confirm((seq,), refused=type(share.event.broker_payload) is RedeliveredMessage)


class Ledger:
    """The records of one stream. ``on_ready`` is called when a lane has something to advance."""

    def __init__(self, seqs: SeqTable, on_ready: Callable[[], object]) -> None:
        self._seqs = seqs
        self._on_ready = on_ready
        self._lanes: dict[Hashable, Lane] = {}
        self._ready: deque[Lane] = deque()
        # Dicts for their order: a set's would differ from run to run, and with it the order of the advances.
        self._departed: dict[Account, None] = {}  # have left, but an event they fired is not confirmed yet
        self._online: dict[Account, None] = {}
        self._is_closed = False
        self.outstanding = 0  # events broadcast and not yet taken for an advance
        self.broker_keeps_rejected = True  # `SharedStreamProducer.keeps_rejected`

    @property
    def is_ready(self) -> bool:
        """Whether `take_batch` would return something."""
        return bool(self._ready)

    @property
    def lanes(self) -> int:
        """Lanes with events that are not taken for an advance."""
        return len(self._lanes)

    def oldest_deadline(self) -> float | None:
        """Return the deadline of the oldest event not taken for an advance, of the first lanes; None if none is."""
        lanes = islice(self._lanes.values(), LANES_LOOKED_AT_MAX)
        return min((lane.events[0].deadline for lane in lanes), default=None)

    def oldest_events(self) -> Iterator[tuple[Hashable, BroadcastEvent]]:
        """Yield the oldest event not taken for an advance of each lane, of the first lanes."""
        for lane in islice(self._lanes.values(), LANES_LOOKED_AT_MAX):
            yield lane.value, lane.events[0]

    # --- subscribers -----------------------------------------------------------------------------

    def join(self) -> Account:
        """Open an account; the subscriber has a share in every event broadcast from now on."""
        account = Account(self)
        self._online[account] = None
        return account

    def leave(self, account: Account, *, cut_short: bool) -> None:
        """Settle the shares of a subscriber that unsubscribes.

        Events that it moved past still wait for their confirmations, and events that it never pulled fail. The event
        that it is working on counts as moved past, unless it was ``cut_short`` (I13): then that one fails too.
        """
        self._online.pop(account, None)
        account.is_online = False
        for share in list(account.shares):
            if share.state is QUEUED or (cut_short and share.state is OPEN):
                self._resolve(share, FAILED)
            elif share.state is OPEN:
                self.move_past(share)
        if account.shares:
            self._departed[account] = None

    def fail(self, account: Account) -> None:
        """Fail a subscriber: all its unresolved shares fail, and it gets no more."""
        self._online.pop(account, None)
        self._departed.pop(account, None)
        account.is_online = False
        for share in list(account.shares):
            self._resolve(share, FAILED)

    def expire_departed(self, now: float) -> float | None:
        """Fail the shares of departed subscribers that are due at ``now``; return the next deadline, None if none."""
        next_deadline: float | None = None
        for account in list(self._departed):
            for share in list(account.shares):
                if share.event.deadline > now:
                    if next_deadline is None or share.event.deadline < next_deadline:
                        next_deadline = share.event.deadline
                    break
                self._resolve(share, FAILED)
        return next_deadline

    # --- one event -------------------------------------------------------------------------------

    def add_event(
        self, broker_payload: Any, lane_value: Hashable, key: str | None, deadline: float, accounts: Sequence[Account]
    ) -> list[Share]:
        """Add an event that is being broadcast; return one share per account, in their order."""
        lane = self._lanes.get(lane_value)
        if lane is None:
            lane = self._lanes[lane_value] = Lane(lane_value)
        event = BroadcastEvent(broker_payload, lane, key, deadline, len(accounts))
        lane.events.append(event)
        self.outstanding += 1
        shares = []
        for account in accounts:
            assert account.is_online
            share = Share(event, account)
            account.shares[share] = None
            shares.append(share)
        if not accounts:
            event.failed = 1  # a producer that asks for failures alone must not forget what nobody has accepted
            self._event_resolved(event)
        return shares

    def hand_out(self, share: Share) -> None:
        """The subscriber pulled the event: its binding window opens."""
        assert share.state is QUEUED
        share.state = OPEN

    def bind(self, share: Share) -> int | None:
        """Let the share wait for one more derived event; return its seq, None if the share or the stream has ended."""
        share.derived += 1
        if share.state is not OPEN or self._is_closed:
            return None
        seq = self._seqs.assign(share)
        if share.unconfirmed is None:
            share.unconfirmed = set()
        share.unconfirmed.add(seq)
        return seq

    def move_past(self, share: Share) -> None:
        """Close the binding window: the share resolves as soon as nothing is unconfirmed, possibly at once."""
        if share.state is not OPEN:
            return  # rejected or failed within the window
        share.state = PASSED
        if not share.unconfirmed:
            self._resolve(share, REJECTED if share.is_refused else ACKED)

    def confirm(self, share: Share, seq: int, *, refused: bool) -> None:
        """Record that one derived event is stored, or ``refused`` for good; called by the `SeqTable` of ``seq``."""
        assert share.unconfirmed is not None
        share.unconfirmed.remove(seq)
        share.is_refused = share.is_refused or refused
        if share.state is PASSED and not share.unconfirmed:
            self._resolve(share, REJECTED if share.is_refused else ACKED)

    def reject(self, share: Share) -> bool:
        """Resolve as rejected, whatever was derived before; False if the share is no longer open."""
        if share.state is not OPEN or self._is_closed:
            return False
        self._resolve(share, REJECTED)
        return True

    # --- advancing -------------------------------------------------------------------------------

    def take_batch(self, batch_events_max: int) -> list[AdvanceItem]:
        """Take the contiguous resolved prefix of one lane; empty if there is none. Ready lanes take turns."""
        if not self._ready:
            return []
        lane = self._ready.popleft()
        lane.is_ready = False
        batch: list[AdvanceItem] = []
        while lane.events and lane.events[0].pending == 0 and len(batch) < batch_events_max:
            event = lane.events.popleft()
            batch.append(AdvanceItem(event.broker_payload, _outcome(event.acked, event.failed, event.rejected)))
        self.outstanding -= len(batch)
        if not lane.events:
            # A lane may be as short-lived as one message: without this the table would grow without bound.
            del self._lanes[lane.value]
        elif lane.events[0].pending == 0:
            self._mark_ready(lane)
        return batch

    def close(self) -> None:
        """Abandon unresolved events (the broker redelivers them); resolved ones can still be taken."""
        self._is_closed = True
        for account in self._online | self._departed:
            account.is_online = False
            for share in account.shares:
                if share.unconfirmed:
                    self._seqs.drop(share.unconfirmed)
        self._online.clear()
        self._departed.clear()

    # --- inside ----------------------------------------------------------------------------------

    def _resolve(self, share: Share, outcome: ShareState) -> None:
        assert share.state in _UNRESOLVED
        if self._is_closed:
            return
        account = share.account
        del account.shares[share]
        if not account.shares and not account.is_online:
            self._departed.pop(account, None)
        if share.unconfirmed:
            self._seqs.drop(share.unconfirmed)
            share.unconfirmed = None
        share.state = outcome
        event = share.event
        if outcome is ACKED:
            event.acked += 1
        elif outcome is FAILED:
            event.failed += 1
        else:
            event.rejected += 1
        event.pending -= 1
        if event.pending == 0:
            self._event_resolved(event)

    def _event_resolved(self, event: BroadcastEvent) -> None:
        if event.lane.events[0] is event:
            self._mark_ready(event.lane)

    def _mark_ready(self, lane: Lane) -> None:
        if not lane.is_ready:
            lane.is_ready = True
            self._ready.append(lane)
            self._on_ready()
