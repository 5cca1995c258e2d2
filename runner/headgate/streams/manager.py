"""All shared streams of one runner, by key.

The invariant (seed 000, I5): a key is in the table only while its poll is alive and accepting subscribers.
Whatever ends a group takes its key out in the same step, so a subscriber that comes at that very moment gets
a fresh group instead of a dead one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import structlog
import trio

from headgate.streams.farewells import Farewells
from headgate.streams.flow import FlowControl
from headgate.streams.group import Group, GroupSettings
from headgate.streams.holds import Hold, HoldReports
from headgate.streams.lease import Lease
from headgate.streams.ledger import SeqTable
from headgate.streams.seats import Seats
from headgate.streams.subscription import Subscription
from headgate.triggers.base import BaseEventTrigger

# The scan for ack timeouts looks at least this often, because the clock it goes by may be another one than
# trio's; and at most this often, because a deadline may lie closer than the clock can tell.
ACK_SCAN_INTERVAL_S_MAX = 1.0
ACK_SCAN_INTERVAL_S_MIN = 0.001


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """What a manager holds at one moment."""

    groups: int  # streams that accept subscribers
    groups_ending: int  # streams that drain and close
    subscribers: int
    queued_events: int  # raw events waiting, over all subscribers
    outstanding_events: int  # broadcast and not yet advanced
    unconfirmed_seqs: int  # fired and not yet confirmed persisted
    holds: tuple[Hold, ...] = ()  # who holds whom: the streams that pull nothing at this moment


class SharedStreamManager:
    """Coordinates the triggers that share an upstream; ``async with`` it, leaving it is `stop_all`.

    ``max_subscriber_queue``: raw events a subscriber may have waiting. ``ack_timeout``: seconds by ``_now``
    from broadcast until a subscriber that has not finished an event is failed, and, once a stream has failed, from its
    end or a later pull until one that has not come to that end is, or from then until one that does not leave.
    ``cohort_grace_period``: seconds from the first
    subscriber until the poll begins, so that others can join before the first broadcast. ``rejoin_wait``: seconds a
    stream waits for a subscriber for which a seat is kept (`keep_seat`).
    ``overflow``: what a full queue does: ``"fail"`` its subscriber, or ``"pause"`` the poll for
    all until there is room again (the ack timeout bounds how long). ``lease``: advances begin only while it is held.

    Belongs to one trio run; not thread-safe. Raises `ValueError` for a limit that is not positive.
    """

    def __init__(
        self,
        *,
        log: structlog.typing.FilteringBoundLogger | None = None,
        max_subscriber_queue: int = 1024,
        ack_timeout: float = 300.0,
        cohort_grace_period: float = 0.0,
        rejoin_wait: float = 0.0,
        overflow: Literal["fail", "pause"] = "fail",
        lease: Lease | None = None,
        _now: Callable[[], float] = trio.current_time,
    ) -> None:
        if max_subscriber_queue < 1:
            raise ValueError(f"max_subscriber_queue must be at least 1, not {max_subscriber_queue}")
        if not ack_timeout > 0:
            raise ValueError(f"ack_timeout must be more than 0 s, not {ack_timeout}")
        if not cohort_grace_period >= 0:
            raise ValueError(f"cohort_grace_period must not be negative, but it is {cohort_grace_period}")
        if not rejoin_wait >= 0:
            raise ValueError(f"rejoin_wait must not be negative, but it is {rejoin_wait}")
        if overflow not in ("fail", "pause"):
            raise ValueError(f"overflow must be 'fail' or 'pause', not {overflow!r}")
        self._flow = FlowControl()
        self._progress = trio.lowlevel.ParkingLot()
        self._log = structlog.get_logger("headgate.streams") if log is None else log
        self._seats = Seats(rejoin_wait_s=rejoin_wait, now=_now, log=self._log)
        self._farewells = Farewells(timeout_s=ack_timeout, now=_now, is_awaited=self._is_awaited)
        self._seqs = SeqTable(on_empty=self._progress.unpark_all)
        self._settings = GroupSettings(
            log=self._log,
            seats=self._seats,
            queue_events_max=max_subscriber_queue,
            ack_timeout_s=ack_timeout,
            cohort_grace_s=cohort_grace_period,
            overflow=overflow,
            now=_now,
            flow=self._flow,
            seqs=self._seqs,
            lease=lease,
            farewells=self._farewells,
        )
        self._groups: dict[Hashable, Group] = {}
        self._running: dict[Group, None] = {}  # in order; the groups of the table and those that drain and close
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery, bool | None] = trio.open_nursery()
        self._nursery: trio.Nursery | None = None
        self._is_closed = False

    # --- lifetime --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._nursery = await self._nursery_manager.__aenter__()
        self._nursery.start_soon(self._scan_ack_timeouts)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._nursery is not None
        self._is_closed = True
        self._stop_groups()
        # This ends the scan; the groups are shielded and end by themselves, each within its time limits.
        self._nursery.cancel_scope.cancel()
        try:
            return await self._nursery_manager.__aexit__(exc_type, exc, traceback)
        except BaseExceptionGroup as group:
            # The nursery is our affair: what the body raised leaves us as it was, not in a group of one.
            if group.exceptions == (exc,):
                return False
            raise

    async def stop_all(self) -> None:
        """End every stream: what is resolved is advanced, the rest abandoned to redelivery.

        The table is empty before the first await. A subscriber that pulls afterwards gets `PollTerminated`.
        Bounded by the time limits of `headgate.streams.group`.
        """
        self._stop_groups()
        for group in list(self._running):
            await group.done.wait()
        await trio.lowlevel.checkpoint()

    # --- subscribers -----------------------------------------------------------------------------

    def subscribe(self, *, trigger_id: int, trigger: BaseEventTrigger, key: Hashable) -> Subscription:
        """Subscribe a trigger to the stream of ``key``; the first one's class and kwargs open it.

        Raises `RuntimeError` outside ``async with``, `ValueError` where ``key`` is None or the trigger is
        subscribed to it already, and whatever ``trigger.serialize()`` raises; no stream is left behind then.
        What the factory raises comes as `PollTerminated` at the first pull.
        """
        if self._nursery is None or self._is_closed:
            raise RuntimeError("the SharedStreamManager is closed" if self._is_closed else "use `async with` first")
        if key is None:
            raise ValueError("None is no key of a shared stream: the trigger wants its own run()")
        group = self._groups.get(key)
        if group is None:
            _, kwargs = trigger.serialize()
            group = Group(
                key=key,
                trigger_class=type(trigger),
                kwargs=kwargs,
                settings=self._settings,
                evict=self._evict,
                on_progress=self._progress.unpark_all,
            )
            self._groups[key] = group
            self._running[group] = None
            self._nursery.start_soon(self._run_group, group, name=f"shared stream {key!r}")
        subscription = group.join(trigger_id)
        self.give_up_seat(trigger_id)
        return subscription

    async def unsubscribe(self, trigger_id: int, key: Hashable, *, cut_short: bool = False) -> None:
        """Remove a subscriber; nothing happens where it is not subscribed.

        The event it sits on and those it moved past resolve through the persist gate; those it never pulled
        fail, and with ``cut_short`` the one it sits on as well (I13). All of this is done before the first
        await. With the last subscriber the stream ends, and this waits until it is closed.
        """
        self._farewells.forget(trigger_id)
        group = self._groups.get(key)
        if group is not None:
            group.leave(trigger_id, cut_short=cut_short)
            if self._groups.get(key) is not group:
                await group.done.wait()
        await trio.lowlevel.checkpoint()

    def keep_seat(self, *, trigger_id: int, key: Hashable) -> None:
        """Expect a subscriber that failed to be back; until then nothing is broadcast (see `start_seat_clock`).

        Ours, not of seed 000: the audience of an event is frozen when it is broadcast, so without this a
        subscriber that is restarted would miss, and the broker forget, what comes meanwhile.
        """
        self._seats.keep(key, trigger_id)

    def start_seat_clock(self, trigger_id: int) -> None:
        """From now on wait ``rejoin_wait`` seconds for this trigger: it can be started again."""
        self._wake_polls(self._seats.start_clock(trigger_id))

    def give_up_seat(self, trigger_id: int) -> None:
        """Wait for this trigger no longer: it is back, or will not come."""
        self._wake_polls(self._seats.give_up(trigger_id))

    def _wake_polls(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            group = self._groups.get(key)
            if group is not None:
                group.wake_poll()

    # --- persist gate ----------------------------------------------------------------------------

    def bind_pending_event(self, *, trigger_id: int, key: Hashable) -> int | None:
        """Bind an event the subscriber just fired; return the seq to be confirmed once it is stored.

        None where nothing is gated: the stream is gone or on the fast path, or no binding window is open.
        `Subscription.bind` says more.
        """
        group = self._groups.get(key)
        subscription = None if group is None else group.find(trigger_id)
        return None if subscription is None else subscription.bind().seq

    def confirm_persisted(self, seqs: Iterable[int]) -> None:
        """The events behind ``seqs`` are durable (I1). Unknown and late seqs are ignored."""
        self._seqs.confirm(seqs)

    def confirm_refused(self, seqs: Iterable[int]) -> None:
        """The events behind ``seqs`` will never be stored: their raw events resolve as rejected, not acked."""
        self._seqs.confirm(seqs, refused=True)

    # --- flow ------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep new streams from beginning until `release`; counted. Streams that have begun go on."""
        self._flow.hold()

    def release(self) -> None:
        """Undo one `hold`. Raises `RuntimeError` where there is none."""
        self._flow.release()

    def stop_pulling(self) -> None:
        """For the drain, for good: pull no more from producers, hand no more to subscribers, go on advancing.

        A subscriber that asks for its next event has moved past its last one, and waits.
        """
        self._flow.stop()

    async def settled(self) -> None:
        """Return when every event fired is confirmed and everything that can be advanced is advanced.

        Events still queued, or being worked on without having fired, do not count.
        """
        while self._seqs or any(group.has_work for group in self._running):
            await self._progress.park()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> StreamStatistics:
        """Return what the manager holds now."""
        return StreamStatistics(
            groups=len(self._groups),
            groups_ending=len(self._running) - len(self._groups),
            subscribers=sum(group.subscribers for group in self._running),
            queued_events=sum(group.queued for group in self._running),
            outstanding_events=sum(group.outstanding for group in self._running),
            unconfirmed_seqs=len(self._seqs),
            holds=tuple(self._holds()),
        )

    # --- inside ----------------------------------------------------------------------------------

    def _holds(self) -> Iterator[Hold]:
        for group in self._groups.values():
            # The key is the author's object: where its hash fails by now, this must not end all other streams.
            with contextlib.suppress(Exception):
                if (hold := group.hold()) is not None:
                    yield hold

    def _is_awaited(self, key: Hashable, trigger_id: int) -> bool:
        with contextlib.suppress(Exception):  # see `_holds`
            return key in self._groups and trigger_id in self._seats.absent(key)
        return False

    def _evict(self, group: Group) -> None:
        if self._groups.get(group.key) is group:
            del self._groups[group.key]

    def _stop_groups(self) -> None:
        groups = list(self._groups.values())
        self._groups.clear()
        for group in groups:
            group.stop()

    async def _run_group(self, group: Group) -> None:
        try:
            await group.run()
        finally:
            self._running.pop(group, None)
            self._progress.unpark_all()

    async def _scan_ack_timeouts(self) -> None:
        reports = HoldReports(self._log)
        while True:
            now = self._settings.now()
            # What is broadcast while we sleep is due later than we wake.
            due = now + self._settings.ack_timeout_s
            next_dues = [group.expire(now) for group in list(self._groups.values())]
            for next_due in (*next_dues, self._farewells.expire(now)):
                if next_due is not None:
                    due = min(due, next_due)
            reports.note(self._holds(), now)
            await trio.sleep(min(max(due - now, ACK_SCAN_INTERVAL_S_MIN), ACK_SCAN_INTERVAL_S_MAX))
