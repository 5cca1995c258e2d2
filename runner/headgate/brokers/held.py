"""The messages that a producer holds: its broker has handed them out, and has not been told of their outcomes.

Pure and synchronous: no broker, no thread, no clock. A message goes through these states::

      take              hand out                     resolve: accepted           forget
    --------> WAITING -------------> HANDED OUT ---------------------> RESOLVED --------> gone
                 ^                       |      or rejected                |
                 |     resolve: failed   |                                 |
                 +-----------------------+---------------------------------+
                        (with all messages behind it in its lane)    not acknowledged in time, or
                                                                     refused by the place of rejected ones

Messages stay here until the broker has confirmed their acknowledgement. So a message that the broker delivers again,
for example to a connection that was made anew, is recognised by its ``ref`` and not handed out twice; and one that
failed is handed out again from memory, with those behind it in its lane, in order (I3). Those may have been handed out
already: their earlier `Delivery` becomes *stale*, and its outcome is ignored (I13).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

from headgate.brokers.broker_errors import BrokerError
from headgate.streams.contract import AdvanceOutcome

LEFT_MAX = 10_000  # refs remembered of messages that are left to the broker; beyond it the oldest are forgotten


class Received(NamedTuple):
    """One message of a broker.

    ``ref``: its name for this connection (an id, a tag, a receipt), by which it is acknowledged. ``raw_event``: what
    filters get, built of values with a stored form, or an `Undecodable`. ``key``: what the broker never changes about
    the message, at most 400 characters; None if there is no such thing. ``lane``: messages of one lane are handled in
    their order. ``size_bytes``: of the message, for the limit of memory.
    """

    ref: Any  # hashable
    raw_event: Any
    key: str | None
    lane: Hashable = None
    size_bytes: int = 0


class PlaceRefuses(Exception):
    """The broker's place for rejected messages takes none for now, though the connection is sound.

    ``messages`` are those that it does not have; of a rejection it has, and the broker has acknowledged, all others.
    """

    def __init__(self, reason: str, messages: Sequence[Received] = ()) -> None:
        super().__init__(reason)
        self.messages = messages


class Delivery:
    """A message as it was handed out once: the broker payload of the stream. A stale one is to be handed out again."""

    __slots__ = ("is_stale", "message")

    def __init__(self, message: Received) -> None:
        self.message = message
        self.is_stale = False


class _Lane:
    __slots__ = ("due_at", "held", "value")

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self.held: deque[_Held] = deque()  # unresolved, in the broker's order
        self.due_at: float | None = None  # nothing of the lane is handed out until then; None: at once


class _Held:
    __slots__ = ("delivery", "failures", "is_rejected", "lane", "message", "resolved_at", "was_handed_out")

    def __init__(self, message: Received, lane: _Lane) -> None:
        self.message = message
        self.lane = lane
        self.delivery: Delivery | None = None  # the current one; None while the message waits
        self.failures = 0
        self.resolved_at: float | None = None
        self.is_rejected = False
        self.was_handed_out = False


class HeldMessages:
    """The messages of one producer. All times are seconds of the caller's clock."""

    def __init__(self, *, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._held: dict[Hashable, _Held] = {}
        self._lanes: dict[Hashable, _Lane] = {}
        self._delayed: dict[_Lane, None] = {}
        self._resolved: deque[_Held] = deque()  # in the order in which they were resolved
        self._left: dict[Hashable, None] = {}
        self.bytes = 0
        self.redelivered = 0  # messages that were handed out again

    def __len__(self) -> int:
        return len(self._held)

    @property
    def left(self) -> int:
        """How many messages were left to the broker, as far as they are remembered."""
        return len(self._left)

    @property
    def known(self) -> int | None:
        """How many messages `take` passes over; None if it may not know all that were left to the broker."""
        return len(self._held) + len(self._left) if len(self._left) < LEFT_MAX else None

    @property
    def refs(self) -> list[Any]:
        """The refs of all messages held, in the order in which they were taken."""
        return list(self._held)

    def take(self, messages: Iterable[Received]) -> list[Delivery]:
        """Take what the broker has delivered; return what is to be handed out now. Known messages are passed over."""
        deliveries = []
        for message in messages:
            if message.ref in self._held or message.ref in self._left:
                continue
            lane = self._lanes.get(message.lane)
            if lane is None:
                lane = self._lanes[message.lane] = _Lane(message.lane)
            held = self._held[message.ref] = _Held(message, lane)
            lane.held.append(held)
            self.bytes += message.size_bytes
            if lane.due_at is None:
                deliveries.append(_hand_out(held))
        return deliveries

    def resolve(self, delivery: Delivery, outcome: AdvanceOutcome, now: float) -> None:
        """Take one outcome. Raises `BrokerError` if it is not that of the next message of its lane.

        A message has failed if a subscriber failed on it, or if it had none.
        """
        if delivery.is_stale:
            return
        held = self._held[delivery.message.ref]
        lane = held.lane
        if not lane.held or lane.held[0] is not held:
            raise BrokerError(f"an outcome of lane {lane.value!r} came before those of the messages before it")
        if outcome.failed or not (outcome.acked or outcome.rejected):
            self._delay(lane, held, now)
            return
        lane.held.popleft()
        held.resolved_at, held.is_rejected = now, bool(outcome.rejected)
        self._resolved.append(held)
        self._drop_if_empty(lane)

    def due(self, now: float) -> list[Delivery]:
        """Return what is to be handed out again now, in order."""
        deliveries = []
        for lane in [lane for lane in self._delayed if lane.due_at is not None and lane.due_at <= now]:
            del self._delayed[lane]
            lane.due_at = None
            self.redelivered += sum(held.was_handed_out for held in lane.held)
            deliveries += [_hand_out(held) for held in lane.held]
        return deliveries

    def next_due(self) -> float | None:
        """When `due` will have something; None if nothing waits."""
        return min((lane.due_at for lane in self._delayed if lane.due_at is not None), default=None)

    def settled(self, now: float, settle_s: float, count_max: int) -> tuple[list[Received], bool]:
        """Return the messages that the broker may be told of next, in order, and whether they are rejected ones.

        What was resolved more than ``settle_s`` ago is due again instead, with all that was resolved after it: the
        right to acknowledge may have passed to another process since (I10).
        """
        if self._resolved and (at := self._resolved[0].resolved_at) is not None and now - at > settle_s:
            self._reopen(now)
        is_rejected = bool(self._resolved) and self._resolved[0].is_rejected
        # Up to the first of the other kind: an offset that is committed must not pass a message that is not put aside.
        alike = takewhile(lambda held: held.is_rejected == is_rejected, islice(self._resolved, count_max))
        return [held.message for held in alike], is_rejected

    def forget(self, messages: Sequence[Received]) -> None:
        """The broker knows the outcomes of these, which `settled` has returned."""
        for message in messages:
            del self._held[message.ref]
            self.bytes -= message.size_bytes
            resolved = self._resolved.popleft()
            assert resolved.message is message, "the broker was told of another one"

    def put_back(self, rejected: Sequence[Received], now: float) -> None:
        """Have these, which `settled` has returned, fail: the broker's place takes none of them for now.

        So they keep nothing from being acknowledged but what is behind them in their lanes.
        """
        refs, lanes = {message.ref for message in rejected}, set[Hashable]()
        back, kept = list[_Held](), deque[_Held]()
        for held in self._resolved:
            if held.message.ref in refs or held.lane.value in lanes:
                lanes.add(held.lane.value)
                back.append(held)
            else:
                kept.append(held)
        self._resolved = kept
        for lane, first in self._unresolve(back).items():
            self._delay(lane, first, now)

    def leave(self, messages: Sequence[Received]) -> None:
        """Forget these, which stay with the broker: they are not handed out again by this producer."""
        self.forget(messages)
        for message in messages:
            self._left[message.ref] = None
        for ref in list(self._left)[: max(0, len(self._left) - LEFT_MAX)]:
            del self._left[ref]

    def clear(self) -> None:
        """Forget everything: the broker delivers it again, under other refs. Deliveries become stale."""
        for held in self._held.values():
            _call_back(held)
        for records in (self._held, self._lanes, self._delayed, self._left):
            records.clear()
        self._resolved.clear()
        self.bytes = 0

    def drop(self, lanes: Collection[Hashable]) -> None:
        """Forget the messages of these lanes, which another reader has now. Deliveries become stale."""
        for held in [held for held in self._held.values() if held.message.lane in lanes]:
            _call_back(held)
            del self._held[held.message.ref]
            self.bytes -= held.message.size_bytes
        self._resolved = deque(held for held in self._resolved if held.message.lane not in lanes)
        for value in lanes:
            if (lane := self._lanes.pop(value, None)) is not None:
                self._delayed.pop(lane, None)

    # --- inside ----------------------------------------------------------------------------------

    def _delay(self, lane: _Lane, failed: _Held, now: float) -> None:
        """Hand out the lane again, after a delay that doubles each time the same message fails."""
        # The exponent is bounded, because 2.0**1024 raises OverflowError.
        self._wait_until(lane, now + min(self._retry_s * 2.0 ** min(failed.failures, 64), self._retry_max_s))
        failed.failures += 1

    def _wait_until(self, lane: _Lane, due_at: float) -> None:
        for held in lane.held:
            _call_back(held)
        lane.due_at = due_at
        self._delayed[lane] = None

    def _reopen(self, now: float) -> None:
        for lane in self._unresolve(self._resolved):
            self._wait_until(lane, now if lane.due_at is None else lane.due_at)
        self._resolved.clear()

    def _unresolve(self, resolved: Sequence[_Held]) -> dict[_Lane, _Held]:
        """Put these before the rest of their lanes; return the first of each lane."""
        firsts: dict[_Lane, _Held] = {}
        for held in reversed(resolved):
            held.lane = lane = self._lanes.setdefault(held.lane.value, held.lane)
            held.resolved_at, held.is_rejected = None, False
            lane.held.appendleft(held)
            firsts[lane] = held
        return firsts

    def _drop_if_empty(self, lane: _Lane) -> None:
        # A lane may be as short-lived as one message: without this the table would grow without bound.
        if not lane.held:
            del self._lanes[lane.value]


def _hand_out(held: _Held) -> Delivery:
    held.was_handed_out = True
    held.delivery = Delivery(held.message)
    return held.delivery


def _call_back(held: _Held) -> None:
    if held.delivery is not None:
        held.delivery.is_stale = True
        held.delivery = None
