"""One trigger's end of a shared stream: its queue, its binding window, and the rejection of a raw event.

The binding window opens when a raw event is handed out and closes when the subscriber *pulls* the next one (or leaves).
Every event that the trigger fires within the window derives from that raw event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import msgspec
import structlog
import trio

from headgate.streams.contract import PollTerminated, Undecodable
from headgate.streams.flow import FlowControl
from headgate.streams.ledger import OPEN, PASSED, Account, Share
from headgate.streams.redelivery import RedeliveredMessage

# A pull that finds an event in the queue does not visit the scheduler, which would cost more than all the rest; but one
# in this many does, because otherwise one subscriber with a full queue would keep every other task waiting.
PULLS_PER_CHECKPOINT_MAX = 32

# The subscription whose raw event the current task is working on, or worked on last. Whether its window is open, and
# whether this task opened it, is known to the subscription. Setting the variable for every event would cost more than
# the event.
_window_owner: ContextVar[Subscription | None] = ContextVar("headgate_window_owner", default=None)


# A struct, because making a named tuple costs four times as much, and one is made for every event.
class Binding(msgspec.Struct, frozen=True, gc=False):
    """The raw event that an event about to be fired derives from.

    ``seq`` has to be confirmed once the event is stored; None if nothing waits for it. ``key`` is the
    producer's name for the raw event and ``position`` counts the events derived from it (0, 1, 2, ...):
    together they identify the event after a redelivery (I2), so they are set even if ``seq`` is None because the
    subscriber was failed in the meantime. If no window is open, or there is no producer: (None, None, 0).
    """

    seq: int | None
    key: str | None
    position: int


NOTHING_BOUND = Binding(None, None, 0)


class PassOver(Protocol):
    """The messages that a subscriber does not get: those that its producer cannot decode, and those in ``keys``.

    The latter are those that it has failed on too often.

    Each is reported instead, and its share is acked when the report is stored. While there is no room for a report
    (``is_full``), the subscriber pulls nothing. A message that a user has redriven is given to it whatever its key is.
    A message that the subscriber rejects is reported too, with ``rejection``, if its broker has no place for it.
    """

    keys: frozenset[str]

    @property
    def is_full(self) -> bool: ...

    async def wait_room(self) -> None: ...

    def report(self, raw_event: Any, key: str | None, seq: int | None, *, rejection: str | None = None) -> None: ...


class Subscription:
    """An async iterator over the raw events of a shared stream, for one trigger and one task at a time.

    Pulling raises what the manager failed the subscriber with (`AckTimeout`, `SubscriberOverflow`,
    `PollTerminated`), and ends after the subscriber was unsubscribed. ``account`` is None on the fast path.
    ``on_failed`` is called synchronously at the moment of such a failure, so that a trigger that never pulls
    again can be cancelled.
    """

    def __init__(
        self,
        *,
        trigger_id: int,
        account: Account | None,
        flow: FlowControl,
        queue_events_max: int,
        on_room: Callable[[], object],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self.trigger_id = trigger_id
        self.account = account
        self.on_failed: Callable[[Exception], None] | None = None
        self.pass_over: PassOver | None = None
        self._has_reported = False  # a message since the last pull
        self.may_pass_over = False  # whether the first of the queue may not be what the subscriber gets next
        self.is_window_blameless = False  # was failed, but not because of the open window
        self.raw_event: Any = None  # the one that the filter is working on, while the window is open
        # By the group's clock: when the queue became full, if nothing was pulled from it since. None while there is
        # room, and while the trigger waits for the store (`Host`), which is not its own fault.
        self.full_since: float | None = None
        self.waits_for_store = False
        self.waits_for_credit = False  # it may fire nothing for now (I22), which is not its own fault either
        self._excused_until = -math.inf
        self._flow = flow
        self._queue_events_max = queue_events_max
        self._on_room = on_room
        self._log = log
        self._queue: deque[tuple[Any, Share | None]] = deque()
        # In turns with the queue, and not counted in its limit: they are few, and come from the supervisor.
        self._redelivered: deque[tuple[Any, Share]] = deque()
        self._is_turn_of_queue = False  # the last one given was redelivered, so a message that waits goes before others
        self._arrivals = trio.lowlevel.ParkingLot()
        self._window: Share | None = None
        self._window_task: trio.lowlevel.Task | None = None
        self._rejected: Share | None = None  # the last one that was rejected; maybe its window is open yet
        self._has_told_of_rejected = False
        self._failure: Exception | None = None
        self._has_left = False
        self._is_pulling = False
        self.note_message: Callable[[str | None], None] | None = None  # called with the key of each that is given
        self.has_seen_end = False  # the end of the stream was raised at its pull
        self.pulls = 0

    # --- the trigger's side ----------------------------------------------------------------------

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Any:
        """Move past the current raw event and return the next one."""
        if self._is_pulling:
            raise trio.BusyResourceError("another task is already pulling from this subscription")
        share = self._window
        if share is not None:  # its binding window closes
            self._window = self._window_task = self.raw_event = None
            share.account.ledger.move_past(share)
        self._is_pulling = True
        try:
            self.pulls += 1
            if self.pulls % PULLS_PER_CHECKPOINT_MAX:
                await trio.lowlevel.checkpoint_if_cancelled()
            else:
                await trio.lowlevel.checkpoint()
            if self._has_reported:
                self._has_reported = False
                while self.pass_over is not None and self.pass_over.is_full:
                    await self._wait_for_room(self.pass_over)
            if not self._queue or self._flow.is_stopped:
                await self._wait_for_event()
            if self.may_pass_over:
                await self._put_due_first()
        finally:
            self._is_pulling = False
        # No checkpoint from here on: an event taken off the queue is always handed out.
        was_full = len(self._queue) >= self._queue_events_max
        raw_event, share = self._queue.popleft()
        if share is not None:  # its binding window opens
            share.account.ledger.hand_out(share)
            self._window = share
            self._window_task = trio.lowlevel.current_task()
            self.raw_event = raw_event
            if self.note_message is not None:
                self.note_message(share.event.key)
            if _window_owner.get() is not self:
                _window_owner.set(self)
        if was_full:
            self.full_since = None
            self._on_room()
        return raw_event

    def bind(self) -> Binding:
        """Bind an event about to be fired to the raw event it derives from.

        Synchronous and O(1). Call it between taking the event off the trigger and queueing it outbound,
        with no await in between (I1).
        """
        share = self._window
        if share is None:
            return NOTHING_BOUND
        if share is self._rejected and not self._has_told_of_rejected:
            self._has_told_of_rejected = True  # once for each start of a trigger: it does so with each message
            self._log.warning(
                "a trigger fires an event for a message that it has rejected, and both count: go on with the next "
                "message after reject_shared_stream_event(), which does not raise",
                trigger_id=self.trigger_id,
                key=share.event.key,
            )
        position = share.derived
        return Binding(share.account.ledger.bind(share), share.event.key, position)

    @property
    def is_window_open(self) -> bool:
        """Whether the filter is working on a raw event of ack mode."""
        return self._window is not None

    @property
    def message_key(self) -> str | None:
        """The producer's name for the raw event that the filter is working on; None if there is none.

        None as well if the subscriber was failed for something else: the raw event is not at fault then.
        """
        return None if self._window is None or self.is_window_blameless else self._window.event.key

    def is_kept_waiting_by_filter(self, share: Share) -> bool:
        """Whether an unresolved share waits for the filter, and not for the store.

        The filter works on it, or on another that it was given first: a redriven message may be younger.
        """
        return share.state is not PASSED and not self.waits_for_store

    # --- the group's side ------------------------------------------------------------------------

    def deadlines(self, now: float, timeout_s: float, *, stalls: bool) -> tuple[float | None, float | None]:
        """Return when its oldest event is due, and when its queue is that is full, which ``stalls`` the others.

        None each if there is none. Neither comes before ``timeout_s`` seconds after a wait for credit.
        """
        if self.waits_for_credit:
            self._excused_until = now + timeout_s
        due_at = None if self.account is None else self.account.earliest_deadline()
        overflow_at = self.full_since + timeout_s if stalls and self.full_since is not None else None
        return (
            None if due_at is None else max(due_at, self._excused_until),
            None if overflow_at is None else max(overflow_at, self._excused_until),
        )

    @property
    def is_full(self) -> bool:
        """Whether the queue has no room for another raw event."""
        return len(self._queue) >= self._queue_events_max

    @property
    def queued(self) -> int:
        """Raw events waiting, without the one being worked on."""
        return len(self._queue)

    def enqueue(self, raw_event: Any, share: Share | None) -> int:
        """Queue a raw event; return the new length of the queue. If there is no room, do nothing and return 0."""
        if len(self._queue) >= self._queue_events_max:
            return 0
        self._queue.append((raw_event, share))
        if type(raw_event) is Undecodable:
            self.may_pass_over = True
        if self._arrivals:
            self._arrivals.unpark()
        return len(self._queue)

    def redeliver(self, raw_event: Any, key: str, message: RedeliveredMessage, deadline: float) -> None:
        """Queue a message that a user has redriven: it and those of the queue are given in turns, it first."""
        account = account_of(self)
        [share] = account.ledger.add_event(message, message, key, deadline, [account])  # in a lane of its own
        self._redelivered.append((raw_event, share))
        self.may_pass_over = True
        self._arrivals.unpark_all()

    def fail(self, failure: Exception) -> None:
        """Raise ``failure`` at the next pull, in place of what is queued."""
        self.is_window_blameless |= self.waits_for_credit
        self._clear()
        self._end_with(failure)

    def terminate(self, failure: PollTerminated) -> None:
        """Raise ``failure`` after what is queued: the events of a stream come before its end."""
        self._end_with(failure)

    def stop(self, failure: PollTerminated) -> None:
        """Raise ``failure`` at the next pull, without a report: the owner of the manager stopped the stream."""
        self._clear()
        self._failure = failure
        self._arrivals.unpark_all()

    def leave(self) -> None:
        """End the iteration. The caller settles the shares, the open one included."""
        self._has_left = True
        self._clear()
        self._window = self._window_task = self.raw_event = None
        self._arrivals.unpark_all()

    def reject(self, reason: str = "") -> bool:
        """Reject the raw event of the open window; False if no window is open, or if another task opened it."""
        share = self._window
        if share is None or self._window_task is not _current_task():
            return False
        ledger = share.account.ledger
        is_redriven = type(share.event.broker_payload) is RedeliveredMessage  # its letter stays the place for it
        if ledger.broker_keeps_rejected or self.pass_over is None or is_redriven:
            is_rejected = ledger.reject(share)
            self._rejected = share if is_rejected else self._rejected
            return is_rejected
        if share.state is not OPEN or not share.account.is_online:
            return False
        # It is acked once the report is stored, like a message from which one event derives (I1, I16).
        self.pass_over.report(self.raw_event, share.event.key, ledger.bind(share), rejection=reason)
        self._has_reported = True
        self._rejected = share
        ledger.move_past(share)
        return True

    # --- inside ----------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._queue.clear()
        self._redelivered.clear()

    async def _wait_for_event(self) -> None:
        while True:
            if self._has_left:
                self.has_seen_end = True
                raise StopAsyncIteration
            if self._failure is not None and (not self._queue or self._flow.is_stopped):
                self.has_seen_end = True
                raise self._failure
            if (self._queue or self._redelivered) and not self._flow.is_stopped:
                return
            if self.note_message is not None:
                self.note_message(None)
            await self._arrivals.park()

    async def _put_due_first(self) -> None:
        """Make the event that the subscriber gets the first of the queue: a redriven one if it is not the queue's turn.

        However many are redriven, none of the broker's waits for more than one of them: each has its ack timeout.
        Those of the queue that the subscriber does not get are taken off and reported.
        """
        pass_over = self.pass_over
        while True:
            if self._redelivered and not self._flow.is_stopped and not (self._is_turn_of_queue and self._queue):
                self._queue.appendleft(self._redelivered.popleft())
                self._is_turn_of_queue = True
                return
            if not self._queue or self._flow.is_stopped:
                await self._wait_for_event()
                continue
            raw_event, share = self._queue[0]
            if share is None:
                return
            if type(raw_event) is not Undecodable and (pass_over is None or share.event.key not in pass_over.keys):
                self._is_turn_of_queue = False
                return
            if pass_over is not None and pass_over.is_full:
                await self._wait_for_room(pass_over)
                continue
            was_full = self.is_full
            self._queue.popleft()
            ledger = share.account.ledger
            ledger.hand_out(share)
            if pass_over is None:
                ledger.reject(share)
            else:
                # It is acked once the report is stored, like a message from which one event derives (I1).
                pass_over.report(raw_event, share.event.key, ledger.bind(share))
            ledger.move_past(share)
            if was_full:
                self.full_since = None
                self._on_room()
            await trio.lowlevel.checkpoint()

    async def _wait_for_room(self, pass_over: PassOver) -> None:
        """Wait for room in the outbox: a report of a message has all of it (I11)."""
        self.waits_for_store = True
        try:
            await pass_over.wait_room()
        finally:
            self.waits_for_store = False

    def _end_with(self, failure: Exception) -> None:
        self._failure = failure
        self._arrivals.unpark_all()
        if self.on_failed is None:
            return
        try:
            self.on_failed(failure)
        except Exception:
            # The other subscribers must still get their failure, and the poll that is failing this one must continue.
            self._log.exception("on_failed raised", trigger_id=self.trigger_id)


def account_of(subscription: Subscription) -> Account:
    """Return the account of a subscriber of ack mode."""
    assert subscription.account is not None
    return subscription.account


def reject_shared_stream_event(reason: str = "") -> None:
    """Reject the raw event that the calling filter is working on: the broker should dead-letter it.

    It resolves at once as *rejected*; there is nothing to persist. If the broker has no place for it
    (`SharedStreamProducer.keeps_rejected`), it becomes a dead letter of headgate with ``reason``, and is acked when
    that is stored.

    It raises nothing: go on with the next raw event (``continue``). An event that is yielded for this one all the same
    is stored as well, with a warning in the log. Outside a binding window of an ack-mode stream (the fast path, a
    standalone ``run()``, between two raw events, another task than the one that drives the filter) it logs a warning
    and does nothing.
    """
    owner = _window_owner.get()
    if owner is None or not owner.reject(reason):
        structlog.get_logger(__name__).warning(
            "reject_shared_stream_event() had no effect: the calling task has no raw event of an ack-mode stream open"
        )


def _current_task() -> trio.lowlevel.Task | None:
    try:
        return trio.lowlevel.current_task()
    except RuntimeError:
        return None  # a thread that inherited the context of a task
