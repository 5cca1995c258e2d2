"""All shared streams of one runner, by key.

The invariant (I5): a key is in the table only while its poll is alive and accepts subscribers. Whatever ends a group
removes its key in the same step, so a subscriber that arrives at that moment gets a new group and not a dead one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import structlog
import trio

from headgate.protocol.messages.runner import DescribedStream, RunnerFigures
from headgate.streams.absence import AbsentSubscribers
from headgate.streams.descriptions import describe_stream
from headgate.streams.end_deadlines import EndDeadlines
from headgate.streams.figures import StreamRecords
from headgate.streams.flow import FlowControl
from headgate.streams.group import Group
from headgate.streams.group_settings import GroupSettings, Source
from headgate.streams.lease import Lease
from headgate.streams.ledger import SeqTable
from headgate.streams.redelivery import RedeliveredMessage
from headgate.streams.stalls import Stall, StallReports
from headgate.streams.subscription import Subscription
from headgate.triggers.base import BaseEventTrigger

# The scan for ack timeouts runs at least this often, because its clock may be another one than trio's; and at most this
# often, because a deadline may be closer than the resolution of the clock.
ACK_SCAN_INTERVAL_S_MAX = 1.0
ACK_SCAN_INTERVAL_S_MIN = 0.001
DESCRIBED_AT_ONCE_MAX = 4  # streams: each may have a thread that hangs, and a connection


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """The contents of a manager at one moment."""

    groups: int  # streams that accept subscribers
    groups_ending: int  # streams that drain and close
    subscribers: int
    queued_events: int  # raw events waiting, over all subscribers
    outstanding_events: int  # broadcast and not yet advanced
    unconfirmed_seqs: int  # fired and not yet confirmed persisted
    stalls: tuple[Stall, ...] = ()  # the streams that pull nothing at this moment, and why


class SharedStreamManager:
    """Coordinates the triggers that share an upstream; ``async with`` it, leaving it is `stop_all`.

    - ``max_subscriber_queue``: raw events that may wait in the queue of one subscriber.
    - ``ack_timeout``: seconds by ``_now``. A subscriber is failed if (a) it has not resolved an event within this time
      after its broadcast, (b) its stream failed, and for that long it neither pulled nor saw the failure, or (c) it saw
      the failure and has not unsubscribed within this time.
    - ``cohort_grace_period``: seconds from the first subscriber to the start of the poll, so that others can join
      before the first broadcast.
    - ``advance_timeout``: seconds that one advance of a producer may take; a stream ends if it takes longer.
    - ``overflow``: the effect of a full queue: ``"fail"`` its subscriber, or ``"pause"`` the poll for all until there
      is room again (bounded by the ack timeout).
    - ``lease``: advances begin only while it is held.

    Belongs to one trio run; not thread-safe. Raises `ValueError` for a limit that is not positive.
    """

    def __init__(
        self,
        *,
        log: structlog.typing.FilteringBoundLogger | None = None,
        max_subscriber_queue: int = 1024,
        ack_timeout: float = 300.0,
        cohort_grace_period: float = 0.0,
        advance_timeout: float = 60.0,
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
        if not advance_timeout > 0:
            raise ValueError(f"advance_timeout must be more than 0 s, not {advance_timeout}")
        if overflow not in ("fail", "pause"):
            raise ValueError(f"overflow must be 'fail' or 'pause', not {overflow!r}")
        self._flow = FlowControl()
        self._progress = trio.lowlevel.ParkingLot()
        self._log = structlog.get_logger("headgate.streams") if log is None else log
        self._absent = AbsentSubscribers()
        self.advances_cut_off = 0  # calls of advance that did not return in time
        self._end_deadlines = EndDeadlines(timeout_s=ack_timeout, now=_now, is_awaited=self._is_awaited)
        self._records = StreamRecords(_now, self._absent, ack_timeout_s=ack_timeout)
        self._stall_reports = StallReports(self._log)
        self._seqs = SeqTable(on_empty=self._progress.unpark_all)
        self._settings = GroupSettings(
            log=self._log,
            absent=self._absent,
            advance_timeout_s=advance_timeout,
            on_advance_cut=self._count_cut_advance,
            queue_events_max=max_subscriber_queue,
            ack_timeout_s=ack_timeout,
            cohort_grace_s=cohort_grace_period,
            overflow=overflow,
            now=_now,
            flow=self._flow,
            seqs=self._seqs,
            lease=lease,
            end_deadlines=self._end_deadlines,
        )
        self._groups: dict[Hashable, Group] = {}
        self._running: dict[Group, None] = {}  # in order; the groups of the table and those that drain and close
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery, bool | None] = trio.open_nursery()
        self._nursery: trio.Nursery | None = None
        self._is_closed = False
        self._describing = trio.CapacityLimiter(DESCRIBED_AT_ONCE_MAX)

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
        # This ends the scan; the groups are shielded, and end within their time limits.
        self._nursery.cancel_scope.cancel()
        try:
            return await self._nursery_manager.__aexit__(exc_type, exc, traceback)
        except BaseExceptionGroup as group:
            # The nursery is an implementation detail: the exception of the body leaves unchanged, not in a group of
            # one.
            if group.exceptions == (exc,):
                return False
            raise

    async def stop_all(self) -> None:
        """End every stream: resolved events are advanced, the others are left to redelivery.

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

        If nobody reads a stream, because all have failed or were changed, and those of the trigger that has opened it
        are others now, it is opened anew.
        Raises `RuntimeError` outside ``async with``, `ValueError` if ``key`` is None or the trigger is subscribed to it
        already, and whatever ``trigger.serialize()`` raises; no stream is left behind then. An exception of the factory
        is raised as the cause of `PollTerminated` at the first pull.
        """
        if self._nursery is None or self._is_closed:
            raise RuntimeError("the SharedStreamManager is closed" if self._is_closed else "use `async with` first")
        if key is None:
            raise ValueError(
                "the key of a shared stream cannot be None, which means that the trigger has a run() of its own"
            )
        group = self._groups.get(key)
        if group is None or group.subscribers == 0:
            group = self._open(trigger_id, Source(type(trigger), trigger.serialize()[1]), key, before=group)
        subscription = group.join(trigger_id)
        self.cancel_rejoin(trigger_id)
        if group.opened_by != trigger_id:
            self._warn_of_others(group, trigger_id, trigger)
        return subscription

    def _warn_of_others(self, group: Group, trigger_id: int, trigger: BaseEventTrigger) -> None:
        """Warn of a trigger that would have opened its stream with other arguments: it gets what these give."""
        opened, differs = group.record.source, dict[str, str]()
        with contextlib.suppress(BaseException):  # an author's code
            own = Source(type(trigger), trigger.serialize()[1])
            differs = {} if opened is None else opened.differences(own)
        if differs:
            self._log.warning("its stream was opened with other arguments", trigger_id=trigger_id, differs=differs)

    async def unsubscribe(self, trigger_id: int, key: Hashable, *, cut_short: bool = False) -> None:
        """Remove a subscriber; do nothing if it is not subscribed.

        The event it is working on and those it moved past resolve through the persist gate; those it never pulled
        fail, and with ``cut_short`` the one it is working on as well (I13). All of this is done before the first
        await. With the last subscriber the stream ends, if none is waited for, and this waits until it is closed.
        """
        self._end_deadlines.cancel(trigger_id)
        group = self._groups.get(key)
        if group is not None:
            group.leave(trigger_id, cut_short=cut_short)
            if self._groups.get(key) is not group:
                await group.done.wait()
        await trio.lowlevel.checkpoint()

    def expect_rejoin(self, *, trigger_id: int, key: Hashable) -> None:
        """Wait for a subscriber that failed, or is not started yet; until it joins nothing is broadcast.

        There is no time limit: only `subscribe` and `cancel_rejoin` end the wait (see `headgate.streams.absence`).
        """
        self._absent.add(key, trigger_id)

    def cancel_rejoin(self, trigger_id: int) -> None:
        """Stop waiting for this trigger: it has joined, or never will."""
        for key in self._absent.remove(trigger_id):
            group = self._groups.get(key)
            if group is not None:
                group.go_on_or_end()

    def redeliver(
        self, raw_event: Any, *, trigger_id: int, key: Hashable, message_key: str, message: RedeliveredMessage
    ) -> None:
        """Give a message to one subscriber of the stream of ``key`` (`headgate.streams.redelivery`).

        Does nothing if it is not subscribed any more. Raises `ValueError` on the fast path, where nothing is acked.
        """
        group = self._groups.get(key)
        subscription = None if group is None else group.find(trigger_id)
        if subscription is None:
            return
        if subscription.account is None:
            raise ValueError(f"shared stream {key!r} has no producer that acknowledges messages")
        subscription.redeliver(raw_event, message_key, message, self._settings.now() + self._settings.ack_timeout_s)

    # --- persist gate ----------------------------------------------------------------------------

    def bind_pending_event(self, *, trigger_id: int, key: Hashable) -> int | None:
        """Bind an event the subscriber just fired; return the seq to be confirmed once it is stored.

        None if nothing is gated: the stream has ended or is on the fast path, or no binding window is open.
        See `Subscription.bind`.
        """
        group = self._groups.get(key)
        subscription = None if group is None else group.find(trigger_id)
        return None if subscription is None else subscription.bind().seq

    def confirm_persisted(self, seqs: Iterable[int]) -> None:
        """Confirm that the events of ``seqs`` are durable (I1). Unknown and late seqs are ignored."""
        self._seqs.confirm(seqs)

    def confirm_kept(self, seqs: Iterable[int]) -> None:
        """Confirm that dead letters hold the events of ``seqs``, whole.

        Their raw events count as handled, but a message that a user has redriven as rejected: its letter was not to
        become another one.
        """
        self._seqs.confirm_kept(seqs)

    def confirm_refused(self, seqs: Iterable[int]) -> None:
        """Confirm that the events of ``seqs`` will never be stored: their raw events resolve as rejected, not acked."""
        self._seqs.confirm(seqs, refused=True)

    # --- flow ------------------------------------------------------------------------------------

    def pause_starts(self) -> None:
        """Let no new stream begin until `resume_starts`; counted. Streams that have begun continue."""
        self._flow.pause_starts()

    def resume_starts(self) -> None:
        """Undo one `pause_starts`. Raises `RuntimeError` if there is none."""
        self._flow.resume_starts()

    def stop_pulling(self) -> None:
        """For the drain, for good: pull no more from producers, hand no more to subscribers, continue to advance.

        A subscriber that pulls its next event has moved past its last one, and waits.
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
        """Return the contents of the manager at this moment."""
        return StreamStatistics(
            groups=len(self._groups),
            groups_ending=len(self._running) - len(self._groups),
            subscribers=sum(group.subscribers for group in self._running),
            queued_events=sum(group.queued for group in self._running),
            outstanding_events=sum(group.outstanding for group in self._running),
            unconfirmed_seqs=len(self._seqs),
            stalls=tuple(self._stalls()),
        )

    def figures(self) -> RunnerFigures:
        """Return what people are told of the streams (`headgate.streams.figures`)."""
        return self._records.figures(self._groups.values(), self._stall_reports.lasting())

    async def describe(self, digest: str) -> DescribedStream:
        """Ask the broker of a stream how far it is, also if that is not open (`headgate.streams.descriptions`).

        A few streams are asked at the same moment; the others wait.
        """
        async with self._describing:
            found = self._records.find(digest)
            if found is None:
                return DescribedStream(digest, error="the runner has not opened the stream since it started")
            key, record = found
            group = partial(self._groups.get, key)
            return await describe_stream(digest, record, group, self._records.wall, self._settings)

    # --- inside ----------------------------------------------------------------------------------

    def _open(self, trigger_id: int, source: Source, key: Hashable, before: Group | None) -> Group:
        """Return a group for a trigger: the one ``before``, or a new one, which begins when that is closed."""
        assert self._nursery is not None
        if before is not None:
            is_of_another = before.opened_by != trigger_id and before.opened_by in self._absent.of(key)
            if is_of_another or source.is_like(before.record.source):
                return before
        record = self._records.of(key)
        record.source = source
        group = Group(
            key=key,
            opened_by=trigger_id,
            trigger_class=source.trigger_class,
            kwargs=source.kwargs,
            settings=self._settings,
            record=record,
            evict=self._evict,
            on_progress=self._progress.unpark_all,
        )
        if before is not None:
            before.stop()
        self._groups[key] = group
        self._running[group] = None
        self._nursery.start_soon(self._run_group, group, before, name=f"shared stream {key!r}")
        return group

    def _stalls(self) -> Iterator[Stall]:
        for group in self._groups.values():
            # The key is the author's object: if its hash has begun to fail, this must not end all other streams.
            stall = None
            with contextlib.suppress(BaseException):
                stall = group.stall_reason()
            if stall is not None:
                yield stall

    def _is_awaited(self, key: Hashable, trigger_id: int) -> bool:
        with contextlib.suppress(Exception):  # see `_stalls`
            return key in self._groups and trigger_id in self._absent.of(key)
        return False

    def _evict(self, group: Group) -> None:
        if self._groups.get(group.key) is group:
            del self._groups[group.key]

    def _stop_groups(self) -> None:
        groups = list(self._groups.values())
        self._groups.clear()
        for group in groups:
            group.stop()

    def _count_cut_advance(self) -> None:
        self.advances_cut_off += 1

    async def _run_group(self, group: Group, before: Group | None) -> None:
        try:
            if before is not None:
                with trio.CancelScope(shield=True):  # it is stopped, and its end is bounded
                    await before.done.wait()
            await group.run()
        finally:
            self._running.pop(group, None)
            self._progress.unpark_all()

    async def _scan_ack_timeouts(self) -> None:
        while True:
            now = self._settings.now()
            # Events broadcast during the sleep are due after its end.
            due = now + self._settings.ack_timeout_s
            next_dues = [group.expire(now) for group in list(self._groups.values())]
            for next_due in (*next_dues, self._end_deadlines.expire(now)):
                if next_due is not None:
                    due = min(due, next_due)
            self._stall_reports.update(self._stalls(), now)
            await trio.sleep(min(max(due - now, ACK_SCAN_INTERVAL_S_MIN), ACK_SCAN_INTERVAL_S_MAX))
