"""Who still owes what for which event: the bookkeeping of one stream in ack mode, without I/O, clock or tasks.

An event is broadcast to the subscribers online at that moment, and each of them gets one *share* in it
(snapshot at fan-out). A share moves so::

               hand_out            move_past           last confirmation
    QUEUED ------------->  OPEN  ------------> PASSED ------------------> ACKED | REJECTED (where refused)
      |                     |  \\                |  (at once where nothing is unconfirmed)
      |                     |   `-- reject ------+----------------------> REJECTED
      `------- fail --------+------- fail -------+----------------------> FAILED

OPEN is the *binding window*: events the subscriber fires now derive from this raw event and put a persist
seq on the share. ACKED therefore means moved past *and* every seq confirmed (I1). When no share of an event
is unresolved, the event is resolved; a lane's contiguous resolved prefix is what may be advanced (I3).

Every operation is O(1) for one share.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from headgate.streams.contract import AdvanceItem, AdvanceOutcome


class ShareState(enum.Enum):
    """Where a share stands; see the module's drawing."""

    QUEUED = "queued"
    OPEN = "open"
    PASSED = "passed"
    ACKED = "acked"
    FAILED = "failed"
    REJECTED = "rejected"


# Module names, because looking a member up on its class costs as much as the rest of a transition.
QUEUED, OPEN, PASSED = ShareState.QUEUED, ShareState.OPEN, ShareState.PASSED
ACKED, FAILED, REJECTED = ShareState.ACKED, ShareState.FAILED, ShareState.REJECTED
_UNRESOLVED = frozenset({QUEUED, OPEN, PASSED})


@lru_cache(maxsize=64)
def _outcome(acked: int, failed: int, rejected: int) -> AdvanceOutcome:
    # Most outcomes of a stream are equal, and they cannot be changed: one object serves them all.
    return AdvanceOutcome(acked=acked, failed=failed, rejected=rejected)


class Lane:
    """The events of one lane that are not yet advanced, in fan-out order."""

    __slots__ = ("events", "is_ready", "value")

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self.events: deque[BroadcastEvent] = deque()
        self.is_ready = False  # stands in the ledger's queue of lanes whose first event is resolved


class BroadcastEvent:
    """One event and how its shares were resolved so far. ``deadline`` is when its ack timeout runs out."""

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
    """What one subscriber owes for one event.

    ``derived`` counts the events fired within the binding window, on whatever state: it is the position by
    which a redelivered event is recognised (I2), so it goes on after the share is resolved.
    """

    __slots__ = ("account", "derived", "event", "is_refused", "state", "unconfirmed")

    def __init__(self, event: BroadcastEvent, account: Account) -> None:
        self.event = event
        self.account = account
        self.state = QUEUED
        self.derived = 0
        self.is_refused = False
        self.unconfirmed: set[int] | None = None  # made with the first seq: most filters skip most events


class Account:
    """All unresolved shares of one subscriber, oldest first."""

    __slots__ = ("is_online", "ledger", "shares")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.is_online = True
        # A dict for its order and its O(1) removal from anywhere. A deque would keep what is resolved behind
        # an unresolved head, with its broker payload, for as long as an ack timeout.
        self.shares: dict[Share, None] = {}

    def earliest_deadline(self) -> float | None:
        """When the ack timeout of the oldest unresolved share runs out; None where nothing is owed."""
        for share in self.shares:
            return share.event.deadline
        return None


class SeqTable:
    """Which share waits for which persist seq, over all streams of one manager.

    One table for all, so that a confirmation costs one look-up, however many streams there are. Seqs begin
    at 1 (0 is "nothing waits" on the wire) and are never used twice. ``on_empty`` is called when the last of
    them is confirmed or dropped.
    """

    def __init__(self, on_empty: Callable[[], object]) -> None:
        self._on_empty = on_empty
        self._last = 0
        self._shares: dict[int, Share] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def assign(self, share: Share) -> int:
        """Give the next seq and let ``share`` wait for it."""
        self._last += 1
        self._shares[self._last] = share
        return self._last

    def drop(self, seqs: Iterable[int]) -> None:
        """Forget seqs whose share no longer waits; confirmations of them are then late and ignored."""
        had_some = bool(self._shares)
        for seq in seqs:
            self._shares.pop(seq, None)
        if had_some and not self._shares:
            self._on_empty()

    def confirm(self, seqs: Iterable[int], *, refused: bool = False) -> None:
        """Resolve what ``seqs`` were the last obstacle of; seqs that nothing waits for are ignored."""
        had_some = bool(self._shares)
        for seq in seqs:
            share = self._shares.pop(seq, None)
            if share is not None:
                share.account.ledger.confirm(share, seq, refused=refused)
        if had_some and not self._shares:
            self._on_empty()


class Ledger:
    """The books of one stream. ``on_ready`` is called when a lane has something to advance."""

    def __init__(self, seqs: SeqTable, on_ready: Callable[[], object]) -> None:
        self._seqs = seqs
        self._on_ready = on_ready
        self._lanes: dict[Hashable, Lane] = {}
        self._ready: deque[Lane] = deque()
        # Dicts for their order: a set's would differ from run to run, and with it the order of the advances.
        self._departed: dict[Account, None] = {}  # gone, but something they fired is not confirmed yet
        self._online: dict[Account, None] = {}
        self._is_closed = False
        self.outstanding = 0  # events broadcast and not yet taken for an advance

    @property
    def is_ready(self) -> bool:
        """Whether `take_batch` would return something."""
        return bool(self._ready)

    # --- subscribers -----------------------------------------------------------------------------

    def join(self) -> Account:
        """Open an account; the subscriber has a share in every event broadcast from now on."""
        account = Account(self)
        self._online[account] = None
        return account

    def leave(self, account: Account, *, cut_short: bool) -> None:
        """The subscriber unsubscribes.

        What it moved past still waits for its confirmations, what it never pulled fails, and the event it
        sits on counts as moved past, unless it was ``cut_short`` (I13): then that one fails too.
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
        """Give up on a subscriber: every share it still owes fails, and it gets no more."""
        self._online.pop(account, None)
        self._departed.pop(account, None)
        account.is_online = False
        for share in list(account.shares):
            self._resolve(share, FAILED)

    def expire_departed(self, now: float) -> float | None:
        """Fail what subscribers that have left still owe at ``now``; return when the next of it is due."""
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

    def add(
        self, broker_payload: Any, lane_value: Hashable, key: str | None, deadline: float, accounts: Sequence[Account]
    ) -> list[Share]:
        """Enter an event that is being broadcast; return one share per account, in their order."""
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
            self._event_resolved(event)
        return shares

    def hand_out(self, share: Share) -> None:
        """The subscriber pulled the event: its binding window opens."""
        assert share.state is QUEUED
        share.state = OPEN

    def bind(self, share: Share) -> int | None:
        """Let the share wait for one more derived event; None where it is resolved already, or the stream gone."""
        share.derived += 1
        if share.state is not OPEN or self._is_closed:
            return None
        seq = self._seqs.assign(share)
        if share.unconfirmed is None:
            share.unconfirmed = set()
        share.unconfirmed.add(seq)
        return seq

    def move_past(self, share: Share) -> None:
        """The binding window closes: the share resolves as soon as nothing is unconfirmed, or at once."""
        if share.state is not OPEN:
            return  # rejected or failed within the window
        share.state = PASSED
        if not share.unconfirmed:
            self._resolve(share, REJECTED if share.is_refused else ACKED)

    def confirm(self, share: Share, seq: int, *, refused: bool) -> None:
        """One derived event is stored, or ``refused`` for good; called by the `SeqTable` that held ``seq``."""
        assert share.unconfirmed is not None
        share.unconfirmed.remove(seq)
        share.is_refused = share.is_refused or refused
        if share.state is PASSED and not share.unconfirmed:
            self._resolve(share, REJECTED if share.is_refused else ACKED)

    def reject(self, share: Share) -> bool:
        """Resolve as rejected, whatever was derived before; False where the share is no longer open."""
        if share.state is not OPEN or self._is_closed:
            return False
        self._resolve(share, REJECTED)
        return True

    # --- advancing -------------------------------------------------------------------------------

    def take_batch(self, batch_events_max: int) -> list[AdvanceItem]:
        """Take one lane's contiguous resolved prefix; empty where there is none. Ready lanes take turns."""
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
            # A lane may be as short-lived as one message; keeping the empty ones would never end.
            del self._lanes[lane.value]
        elif lane.events[0].pending == 0:
            self._mark_ready(lane)
        return batch

    def close(self) -> None:
        """Abandon what is unresolved (the broker redelivers it); what is resolved can still be taken."""
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
