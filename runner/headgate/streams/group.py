"""One shared stream: its poll, its subscribers, and the pump that advances the broker.

Two tasks. The *poll* pulls from the producer and broadcasts; the *pump* hands resolved events to ``producer.advance``,
one call at a time (I4). The group ends in one synchronous step, `Group._end`: its key leaves the manager's table and
its subscribers get their failure before any other task can run (I5). Then the poll ends, the pump advances the events
that were already resolved, within a time limit, and the producer is closed.

Both tasks run in a shielded scope. Only `Group.stop` ends the group, and the manager calls it on every way out, so a
cancellation from outside can never hit the group between two of its steps. The package's docstring has the theory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

import trio

from headgate.protocol import marks
from headgate.streams import checks
from headgate.streams.contract import (
    AckTimeout,
    AdvanceItem,
    AdvanceTimeout,
    PollTerminated,
    SharedStreamProducer,
    SubscriberOverflow,
)
from headgate.streams.group_settings import (
    ADVANCE_BATCH_EVENTS_MAX,
    BROADCASTS_PER_CHECKPOINT_MAX,
    DESERTED_S_MAX,
    DRAIN_TIMEOUT_S,
    LEASE_WAIT_S,
    OUTSTANDING_EVENTS_MAX,
    PRODUCER_CLOSE_TIMEOUT_S,
    STREAM_CLOSE_TIMEOUT_S,
    GroupSettings,
    StreamRecord,
)
from headgate.streams.lease import Lease
from headgate.streams.ledger import Ledger, Share
from headgate.streams.redelivery import RedeliveredMessage
from headgate.streams.stalls import Stall, find_stall
from headgate.streams.subscription import Subscription, account_of
from headgate.triggers.base import BaseEventTrigger


class Group:
    """The subscribers of one key and the poll they share. Made and run by the manager."""

    def __init__(
        self,
        *,
        key: Hashable,
        opened_by: int,
        trigger_class: type[BaseEventTrigger],
        kwargs: dict[str, Any],
        settings: GroupSettings,
        record: StreamRecord,
        evict: Callable[[Group], None],
        on_progress: Callable[[], object],
    ) -> None:
        self.key = key
        self.opened_by = opened_by  # the trigger whose class and kwargs these are
        self.done = trio.Event()
        self._trigger_class = trigger_class
        self._kwargs = kwargs
        self._settings = settings
        self._evict = evict
        self._on_progress = on_progress
        self.name = repr(key)
        self.record = record
        self._log = settings.log.bind(stream=self.name)
        self._pump_work = trio.lowlevel.ParkingLot()
        self._ledger = Ledger(settings.seqs, self._pump_work.unpark_all) if checks.has_producer(trigger_class) else None
        self._online: dict[int, Subscription] = {}
        self.producer: SharedStreamProducer | None = None  # once it is open
        self._has_ended = False
        self._poll_is_over = False
        self._advancing_since: float | None = None
        self._deserted_since: float | None = None  # nobody was online, and nothing was broadcast since
        self._broadcasts = 0
        self._fullest = 0  # raw events in the fullest queue at the last broadcast; it can only have shrunk since
        self._poll_scope = trio.CancelScope()
        self._close_scope = trio.CancelScope()
        self._pump_scope = trio.CancelScope()
        self._lease_scope = trio.CancelScope()
        self._advance_scope = trio.CancelScope()
        self._pump_is_done = trio.Event()
        self._room = trio.lowlevel.ParkingLot()

    # --- what the manager calls ------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Events broadcast and not yet handed to an advance."""
        return 0 if self._ledger is None else self._ledger.outstanding

    @property
    def queued(self) -> int:
        """Raw events waiting in the queues of all subscribers."""
        return sum(subscription.queued for subscription in self._online.values())

    @property
    def subscribers(self) -> int:
        """Subscribers online."""
        return len(self._online)

    @property
    def ledger(self) -> Ledger | None:
        """The records of its events; None on the fast path."""
        return self._ledger

    @property
    def has_work(self) -> bool:
        """Whether resolved events are being advanced, or could be now; a lease that is not held may stay so."""
        may_advance = self._settings.lease is None or self._settings.lease.is_held
        return self._advancing_since is not None or (may_advance and self._ledger is not None and self._ledger.is_ready)

    def join(self, trigger_id: int) -> Subscription:
        """Add a subscriber, which gets the events broadcast from now on. Raises `ValueError` if it is one already."""
        assert not self._has_ended
        if trigger_id in self._online:
            raise ValueError(f"trigger {trigger_id} is already subscribed to shared stream {self.key!r}")
        subscription = Subscription(
            trigger_id=trigger_id,
            account=None if self._ledger is None else self._ledger.join(),
            flow=self._settings.flow,
            queue_events_max=self._settings.queue_events_max,
            on_room=self._room.unpark_all,
            log=self._log,
        )
        self._online[trigger_id] = subscription
        return subscription

    def find(self, trigger_id: int) -> Subscription | None:
        """Return the subscriber, if it is online."""
        return self._online.get(trigger_id)

    def leave(self, trigger_id: int, *, cut_short: bool) -> None:
        """Remove a subscriber, if it is online; the group ends with the last of them, unless one is waited for."""
        if (subscription := self._online.pop(trigger_id, None)) is None:
            return
        subscription.leave()
        if self._ledger is not None:
            self._ledger.leave(account_of(subscription), cut_short=cut_short)
        self.go_on_or_end()

    def go_on_or_end(self) -> None:
        """Let the poll check again whether it may continue; end the group if nobody is online, nor waited for.

        If one is waited for, the group ends after `DESERTED_S_MAX`: a new connection costs a delivery of each message
        that was handed out. On the fast path there is none, and a stream begins as its author has it begin.
        """
        self._room.unpark_all()
        if not self._online and (self._ledger is None or not self._settings.absent.of(self.key)):
            self.stop()
        elif not self._online:
            self._deserted_since = self._settings.now()

    def stop(self) -> None:
        """End the group without a failure: cancel the poll; resolved events are still advanced."""
        self._end(None)
        self._poll_scope.cancel()

    def expire(self, now: float) -> float | None:
        """Fail every subscriber whose oldest event is due, or whose full queue stalled the group for as long.

        End the group if its advance does not return. Returns the next deadline; None if there is none.
        """
        timeout_s = self._settings.ack_timeout_s
        deadlines = [self._expire_advance(now), None if self._ledger is None else self._ledger.expire_departed(now)]
        if (since := self._deserted_since) is not None and not self._online:
            deadlines.append(since + DESERTED_S_MAX)
            if since + DESERTED_S_MAX <= now:
                self.stop()
        # A full queue is harmless if all are full, and not the subscriber's fault while nothing is handed out.
        stalls = not self._settings.flow.is_stopped and not all(each.is_full for each in self._online.values())
        for subscription in list(self._online.values()):
            if subscription.waits_for_store:
                subscription.full_since = None
            elif subscription.full_since is None and subscription.is_full:
                self._note_full([subscription])
            due_at, overflow_at = subscription.deadlines(now, timeout_s, stalls=stalls)
            if due_at is not None and due_at <= now:
                oldest = next(iter(account_of(subscription).shares))
                # It may be an earlier one that is not confirmed: then the store is slow, not the filter.
                subscription.is_window_blameless = not subscription.is_kept_waiting_by_filter(oldest)
                self._fail(subscription, AckTimeout(self.key, timeout_s))
            elif overflow_at is not None and overflow_at <= now:
                # On the fast path no event has a deadline, but one dead subscriber must not stall the others for ever.
                overflow = SubscriberOverflow(self.key, self._settings.queue_events_max, held_s=timeout_s)
                self._fail(subscription, overflow)
            else:
                deadlines += [due_at, overflow_at]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def stall_reason(self) -> Stall | None:
        """Return why nothing is pulled at this moment; None if it is, or if the drain has stopped everything."""
        if self._has_ended or self._settings.flow.is_stopped:
            return None
        absent = self._settings.absent.of(self.key)
        is_at_limit, trouble = self.outstanding >= OUTSTANDING_EVENTS_MAX, checks.trouble_of(self.producer)
        return find_stall(self.name, absent, self._online, is_at_limit=is_at_limit, trouble=trouble)

    async def run(self) -> None:
        """Run the group until it is closed. Raises nothing, whatever the producer does."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                if self._ledger is not None:
                    nursery.start_soon(self._pump, self._ledger)
                await self._poll()
        self.done.set()
        self._on_progress()

    # --- the end ---------------------------------------------------------------------------------

    def _end(self, cause: BaseException | None) -> None:
        """End in one step without an await; later calls do nothing. ``cause``: the exception of the poll or pump."""
        if self._has_ended:
            return
        self._has_ended = True
        self._evict(self)
        if self._ledger is not None:
            self._ledger.close()
        self._pump_scope.deadline = trio.current_time() + DRAIN_TIMEOUT_S
        self._lease_scope.deadline = trio.current_time() + LEASE_WAIT_S
        subscriptions = list(self._online.values())
        self._online.clear()
        if cause is not None:
            self.record.note_end(cause, self._settings.now())
            self._log.error("shared stream terminated", subscribers=len(subscriptions), exc_info=cause)
        for subscription in subscriptions:
            # One exception object each: they are raised in different tasks, and each collects its own traceback.
            failure = PollTerminated(self.key)
            failure.__cause__ = cause
            if cause is None:
                subscription.stop(failure)
            else:
                subscription.terminate(failure)
                self._settings.end_deadlines.start(subscription, self.key)

    def _fail(self, subscription: Subscription, failure: Exception) -> None:
        """Fail one subscriber. The others do not notice."""
        if self._online.get(subscription.trigger_id) is not subscription:
            return
        del self._online[subscription.trigger_id]
        if self._ledger is not None:
            self._ledger.fail(account_of(subscription))
        subscription.fail(failure)  # whoever drives it says now that it is waited for
        self.go_on_or_end()

    # --- the poll --------------------------------------------------------------------------------

    async def _poll(self) -> None:
        """Pull until the group ends, wait for the pump, close the producer: all in one task and one nesting of scopes.

        If a producer opens a nursery in open_stream and closes it there or in aclose, trio ties it to this task and to
        the scopes around it. So both scopes are entered here, before the producer runs, and never around a single call.
        """
        with self._poll_scope, self._close_scope:
            try:
                await self._pull_until_end()
            finally:
                self._close_scope.shield = True  # from the poll scope, which `stop` has cancelled
                self._poll_is_over = True
                self._pump_work.unpark_all()
                if self._ledger is not None:
                    # A nursery that the producer left open has been cancelled with the poll, hence this shield.
                    with trio.CancelScope(shield=True):
                        await self._pump_is_done.wait()
                await self._close_producer()
        if self._close_scope.cancelled_caught:
            self._log.warning("closing the producer took too long", timeout_s=PRODUCER_CLOSE_TIMEOUT_S)

    async def _pull_until_end(self) -> None:
        """Raises nothing but trio's cancellation, and that only after `stop`."""
        stream: AsyncIterator[Any] | None = None
        try:
            await self._settings.flow.wait_resumed()
            await trio.sleep(self._settings.cohort_grace_s)
            stream = self._open_stream()
            await self._pull_all(stream)
        except BaseException as raised:
            failure, cancelled = checks.split_cancelled(raised)
            if cancelled is not None and not self._poll_scope.cancel_called:
                # This scope was not cancelled. A nursery inside open_stream was, because one of its tasks failed while
                # the stream was suspended at a yield; its error surfaces when the stream is closed.
                failure, cancelled = failure or checks.leaked(cancelled), None
            if failure is not None and self._has_ended:
                self._log.warning("the producer failed while its stream was being stopped", exc_info=failure)
            elif failure is not None:
                self._end(failure)
            await self._close_stream(stream)
            if cancelled is not None:
                raise cancelled from None

    def _open_stream(self) -> AsyncIterator[Any]:
        """Get the stream from the first subscriber's class; in ack mode through its producer."""
        if self._ledger is None:
            name = f"{self._trigger_class.__name__}.open_shared_stream"
            return checks.iterator(self._trigger_class.open_shared_stream(self._kwargs), name)
        self.producer = producer = checks.new_producer(self._trigger_class, self._kwargs)
        self._ledger.broker_keeps_rejected = producer.keeps_rejected
        return checks.iterator(producer.open_stream(), f"{type(producer).__name__}.open_stream")

    async def _pull_all(self, stream: AsyncIterator[Any]) -> None:
        while True:
            await self._wait_for_room()
            try:
                item = await stream.__anext__()
            except StopAsyncIteration:
                raise RuntimeError("the stream returned; it must yield for ever, or raise") from None
            failed = self.record.failed
            # Wait for absent subscribers: some may have left since the pull began, or leave again meanwhile.
            while self._settings.absent.of(self.key) or self._deserted_since is not None:
                if self._settings.absent.of(self.key):
                    await self._room.park()
                elif await self._has_failed(failed):
                    self._enter(item, [])  # nobody has accepted it: it comes again, behind what is before it
                    break
            else:
                self._broadcast(item)

    async def _has_failed(self, before: int) -> bool:
        """Whether more than ``before`` messages have failed, with nobody left: those that come again are in order."""
        assert self._ledger is not None
        while self._ledger.outstanding or self._advancing_since is not None:
            await self._room.park()
        self._deserted_since = None
        return self.record.failed != before

    async def _wait_for_room(self) -> None:
        self._broadcasts += 1
        if (
            self._fullest >= min(BROADCASTS_PER_CHECKPOINT_MAX, self._settings.queue_events_max)
            or self._broadcasts % BROADCASTS_PER_CHECKPOINT_MAX == 0
        ):
            # Twice: trio runs the tasks of one scheduler round in random order, so after one checkpoint a subscriber
            # that the last broadcast woke may not have run yet.
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while self._must_wait():
            await self._room.park()

    def _must_wait(self) -> bool:
        if self._settings.flow.is_stopped or self.outstanding >= OUTSTANDING_EVENTS_MAX:
            return True
        if self._settings.overflow != "pause" or self._fullest < self._settings.queue_events_max:
            return False
        return any(subscription.is_full for subscription in self._online.values())

    def _broadcast(self, item: Any) -> None:
        """Queue the event for each subscriber online at this moment; fail those that have no room left."""
        subscriptions = list(self._online.values())
        shares: Sequence[Share | None]
        if self._ledger is None:
            raw_event, shares = item, [None] * len(subscriptions)
        else:
            raw_event, shares = self._enter(item, subscriptions)
        overflowing, fullest = [], 0
        for subscription, share in zip(subscriptions, shares, strict=True):
            queued = subscription.enqueue(raw_event, share)
            if not queued:
                overflowing.append(subscription)
            elif queued > fullest:
                fullest = queued
        self._fullest = fullest
        if fullest >= self._settings.queue_events_max:
            self._note_full(subscriptions)
        # Only after all queues have the event, because failing the last subscriber ends the group.
        for subscription in overflowing:
            self._fail(subscription, SubscriberOverflow(self.key, self._settings.queue_events_max))

    def _note_full(self, subscriptions: list[Subscription]) -> None:
        """Record that the full queues among these stall the group from now on, if a full queue does (``overflow``)."""
        if self._settings.overflow == "pause":
            for subscription in subscriptions:
                if subscription.is_full and not subscription.waits_for_store:
                    subscription.full_since = self._settings.now()

    def _enter(self, item: Any, subscriptions: list[Subscription]) -> tuple[Any, list[Share]]:
        """Add an event of ack mode to the ledger. Raises whatever the producer raises for it."""
        assert self._ledger is not None
        producer = self.producer
        assert producer is not None
        raw_event, broker_payload = checks.pair(item, producer)
        lane = checks.hashable(producer.get_advance_lane(broker_payload), producer)
        key = checks.message_key(producer.event_key(broker_payload), producer)
        deadline = self._settings.now() + self._settings.ack_timeout_s
        accounts = [account_of(subscription) for subscription in subscriptions]
        return raw_event, self._ledger.add_event(broker_payload, lane, key, deadline, accounts)

    async def _close_stream(self, stream: AsyncIterator[Any] | None) -> None:
        """Close open_stream in the scope in which it was entered: its nurseries can be closed in no other."""
        aclose = getattr(stream, "aclose", None)
        if aclose is None:
            return
        self._poll_scope.deadline = trio.current_time() + STREAM_CLOSE_TIMEOUT_S
        await checks.close(aclose, self._poll_scope, self._log, "closing the stream failed")

    # --- the pump --------------------------------------------------------------------------------

    async def _pump(self, ledger: Ledger) -> None:
        try:
            with self._pump_scope, self._advance_scope:
                await self._advance_until_end(ledger)
            if self._pump_scope.cancelled_caught:
                self._log.warning("advancing the resolved events took too long", timeout_s=DRAIN_TIMEOUT_S)
        except Exception as failure:  # of an author's object, such as a lane whose hash is another one by now
            self._end(failure)
            self._poll_scope.cancel()
        finally:
            self._pump_is_done.set()

    async def _advance_until_end(self, ledger: Ledger) -> None:
        """Return when the poll has ended and no resolved event is left, or when nothing more may be advanced."""
        lease = self._settings.lease
        while True:
            if lease is not None and ledger.is_ready and not lease.is_held and not await self._wait_for(lease):
                return  # resolved events are redelivered, to this supervisor or to the one that has the lease now
            # No await from here to the advance, so that it begins while the lease is held (I10).
            batch = ledger.take_batch(ADVANCE_BATCH_EVENTS_MAX)
            if batch and type(batch[0].broker_payload) is RedeliveredMessage:  # alone in its lane
                batch[0].broker_payload.settle(batch[0].outcome)
                self._room.unpark_all()
                self._on_progress()
            elif batch:
                self._advancing_since = self._settings.now()
                try:
                    if not await self._advance(batch):
                        return
                finally:
                    self._advancing_since = None
                    self._room.unpark_all()
                    self._on_progress()
            elif self._poll_is_over:
                return
            else:
                await self._pump_work.park()

    async def _wait_for(self, lease: Lease) -> bool:
        """Wait until an advance may begin; False if none ever may. After the end of the group: only `LEASE_WAIT_S`."""
        with trio.CancelScope() as self._lease_scope:
            if self._has_ended:
                self._lease_scope.deadline = trio.current_time() + LEASE_WAIT_S
            return await lease.wait()
        return False

    async def _advance(self, batch: list[AdvanceItem]) -> bool:
        """Hand one batch to the producer. If that fails, the group ends and nothing more may be advanced."""
        assert self.producer is not None
        try:
            marks.reach("group.before_advance")
            await self.producer.advance(batch)
            marks.reach("group.after_advance")
            self.record.note_advanced(batch)
            await trio.lowlevel.checkpoint()  # an advance need not await anything
        except BaseException as raised:
            failure, cancelled = checks.split_cancelled(raised)
            is_cut_off = self._pump_scope.cancel_called or self._advance_scope.cancel_called
            if cancelled is not None and not is_cut_off:
                failure, cancelled = failure or checks.leaked(cancelled), None
            if failure is not None:
                self._log.error("advance failed", events=len(batch), exc_info=failure)
                self._end(failure)
                self._poll_scope.cancel()
            if cancelled is not None:
                if not self._advance_scope.cancel_called:
                    self._settings.on_advance_cut()
                raise cancelled from None
            return False
        return True

    def _expire_advance(self, now: float) -> float | None:
        """End the group if the advance in flight has not returned in time; return its deadline, None if none flies.

        What it was to advance is redelivered. The error reaches the subscribers, and with them the database.
        """
        if self._advancing_since is None:
            return None
        due_at = self._advancing_since + self._settings.advance_timeout_s
        if due_at > now:
            return due_at
        self._settings.on_advance_cut()
        self._end(AdvanceTimeout(self.key, type(self.producer).__name__, self._settings.advance_timeout_s))
        self._poll_scope.cancel()
        self._advance_scope.cancel()
        return None

    async def _close_producer(self) -> None:
        if self.producer is None:
            return
        self._close_scope.deadline = trio.current_time() + PRODUCER_CLOSE_TIMEOUT_S
        await checks.close(self.producer.aclose, self._close_scope, self._log, "closing the producer failed")
