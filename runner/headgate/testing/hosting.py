"""The runner's own host and shared streams, with dicts in place of a supervisor and a database.

Events are stored and confirmed as by the real pair, round by round: deduplicated by key and position (I2), and
confirmed to their shared stream only after they are stored (I1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext

import trio
import trio.testing

from headgate.child import queries
from headgate.protocol.messages.queries import StoredEvent
from headgate.protocol.messages.runner import (
    CancelReason,
    CancelTrigger,
    EventKind,
    FinishedTrigger,
    FiredEvent,
    RefusedEvent,
    RunnerSettings,
    StateChanges,
    TriggerSpec,
)
from headgate.protocol.values import decode_value, encode_value
from headgate.runner.black_box import BlackBox
from headgate.runner.host import Host
from headgate.runner.outbox import Outbox
from headgate.runner.trigger_run import Ending
from headgate.streams.manager import SharedStreamManager
from headgate.testing.clock import SkippingClock, wait_nothing_but_time
from headgate.testing.failures import Misbehaved
from headgate.testing.leftovers import Snapshot
from headgate.testing.stubs import Stubs
from headgate.triggers.base import TaskFailedEvent, TaskSkippedEvent, TaskSuccessEvent, TriggerEvent

# How long, in skipped seconds, a cancelled trigger and its hooks may take: more than the sum of their own limits.
END_S_MAX = 120.0
DOES_NOT_END = "a trigger does not end when it is cancelled"
_ENDS_OF_TASK = {"success": TaskSuccessEvent, "failed": TaskFailedEvent, "skipped": TaskSkippedEvent}


class _RecordingHost(Host):
    """A host that keeps the exceptions of triggers, of which the real one keeps only the text."""

    errors: dict[int, BaseException | None]

    def _report(self, spec: TriggerSpec, ending: Ending, *, events: int) -> None:
        self.errors[spec.trigger_id] = ending.error
        super()._report(spec, ending, events=events)


class HostedTriggers:
    """Running triggers, the events they fired, and how they ended. While ``is_held``, nothing is confirmed."""

    def __init__(self, *, clock: SkippingClock, host: _RecordingHost, streams: SharedStreamManager, outbox: Outbox):
        self.clock = clock
        self.is_held = False
        self.finished: dict[int, FinishedTrigger] = {}
        self.fired: defaultdict[int, list[FiredEvent]] = defaultdict(list)  # without duplicates
        self.letters: list[RefusedEvent] = []  # dead letters, whole or not
        self.redelivered = 0
        self.restarts = 0
        self.progress = trio.lowlevel.ParkingLot()
        self._host = host
        self._streams = streams
        self._outbox = outbox
        self.main = trio.lowlevel.current_task()
        self._known: set[tuple[int, str, int]] = set()
        self._unconfirmed: list[int] = []
        self._runs: defaultdict[int, int] = defaultdict(int)
        self.snapshot = Snapshot()

    @property
    def errors(self) -> dict[int, BaseException | None]:
        """The exceptions of triggers that have ended, None for one that raised nothing."""
        return self._host.errors

    @property
    def outstanding(self) -> int:
        """The messages of shared streams that are handed out, and not resolved."""
        return self._streams.statistics().outstanding_events

    async def start(self, specs: tuple[TriggerSpec, ...]) -> None:
        """Start triggers as one assignment, so that those that share a stream start together."""
        self._streams.pause_starts()
        await self._host.start(specs)
        self._streams.resume_starts()

    def cancel(self, trigger_id: int, reason: CancelReason = "user") -> None:
        """Cancel a trigger."""
        self._host.cancel(CancelTrigger(trigger_id, reason))

    def events(self, trigger_id: int) -> list[TriggerEvent]:
        """Return the events of a trigger, decoded as from the database."""
        return [event_of(event) for event in self.fired[trigger_id]]

    def last_event(self, trigger_id: int) -> StoredEvent | None:
        """Return the newest stored event of a trigger."""
        fired = self.fired[trigger_id]
        if not fired:
            return None
        last = fired[-1]
        return StoredEvent(last.trigger_run_id, last.sequence_index, last.payload, last.key)

    def confirm(self) -> None:
        """Confirm everything that is stored and not yet confirmed."""
        waiting, self._unconfirmed = self._unconfirmed, []
        self._streams.confirm_persisted(waiting)

    async def settle(self) -> None:
        """Wait until all tasks only wait for time."""
        await wait_nothing_but_time(self.main)

    async def skip(self, seconds: float) -> None:
        """Let time pass, wait by wait."""
        await self.clock.skip_waits(trio.current_time() + seconds, of=self.main)
        await self.settle()

    async def end(self) -> list[str]:
        """Cancel the triggers that still run, wait for them, and return descriptions of all that is left behind.

        Raises `Misbehaved` for a trigger that does not end.
        """
        self._host.cancel_all("shutdown")
        # A trigger that is ending may still be in its hooks, for as long as these may take.
        async with trio.open_nursery() as nursery:
            until = trio.current_time() + END_S_MAX
            nursery.start_soon(self._skip_until_ended, nursery.cancel_scope, until)
            await self._host.wait_all_ended()
            nursery.cancel_scope.cancel()
        if len(self._host):
            raise Misbehaved(f"{DOES_NOT_END}: not within {END_S_MAX:g} s")
        await self._streams.stop_all()
        await self.settle()
        return self.snapshot.left_behind()

    async def _skip_until_ended(self, waiting: trio.CancelScope, until: float) -> None:
        await self.clock.skip_waits(until, of=self.main)
        waiting.cancel()

    async def serve(self) -> None:
        """Store round by round, for ever."""
        number = 0
        while True:
            await self._outbox.wait_not_empty()
            number += 1
            self._take(self._outbox.take_round(number))
            if not self.is_held:
                self.confirm()
            self.progress.unpark_all()

    def _take(self, changes: StateChanges) -> None:
        for event in changes.events:
            name = None if event.key is None else (event.trigger_id, event.key, event.position)
            if name is not None and name in self._known:
                self.redelivered += 1
            else:
                self.fired[event.trigger_id].append(event)
            if name is not None:
                self._known.add(name)
            if event.seq:
                self._unconfirmed.append(event.seq)
        self.letters += changes.refused
        # A whole dead letter is stored like an event; of any other only the broker has the message.
        self._unconfirmed += [refused.seq for refused in changes.refused if refused.seq and refused.is_whole]
        self._streams.confirm_refused([refused.seq for refused in changes.refused if not refused.is_whole])
        for finished in changes.finished:
            self.finished[finished.trigger_id] = finished


@asynccontextmanager
async def hosted_triggers(
    clock: SkippingClock,
    settings: RunnerSettings,
    last_events: dict[int, TriggerEvent],
    *,
    has_streams: bool,
    stubs: Stubs | None = None,
) -> AsyncGenerator[HostedTriggers]:
    """Open a host. ``last_events`` are stored before a trigger starts; ``stubs`` answer its queries.

    Without ``has_streams`` ack timeouts are not checked; the checks would cut every wait into seconds.
    """
    outbox = Outbox(events_max=settings.outbox_events_max, round_events_max=settings.round_events_max)
    hosted: HostedTriggers

    async def ask_last_event(trigger_id: int) -> StoredEvent | None:
        await trio.lowlevel.checkpoint()
        stored = hosted.last_event(trigger_id)
        if stored is None and trigger_id in last_events:
            before = last_events[trigger_id]
            stored = StoredEvent("an earlier run", 0, encode_value(before.payload, where="payload"), before.key)
        return stored

    streams = SharedStreamManager(
        max_subscriber_queue=settings.subscriber_queue_max,
        ack_timeout=settings.ack_timeout_s,
        advance_timeout=settings.advance_timeout_s,
        overflow="pause",
    )
    # Inherited by the tasks of all triggers, as in the runner.
    with queries.trigger_queries_handled_by((stubs or Stubs()).answer_trigger):
        async with streams if has_streams else nullcontext(), trio.open_nursery() as nursery:
            host = _RecordingHost(
                settings=settings,
                streams=streams,
                outbox=outbox,
                nursery=nursery,
                ask_last_event=ask_last_event,
                box=BlackBox(),
            )
            host.errors = {}
            hosted = HostedTriggers(clock=clock, host=host, streams=streams, outbox=outbox)
            nursery.start_soon(hosted.serve)
            await trio.testing.wait_all_tasks_blocked()
            hosted.snapshot = Snapshot()
            try:
                yield hosted
            finally:
                host.cancel_all("shutdown")
                nursery.cancel_scope.cancel()


def event_of(event: FiredEvent) -> TriggerEvent:
    """Return the trigger event of a stored event, its payload decoded."""
    payload = decode_value(event.payload)
    kind: EventKind = event.kind
    if kind == "event":
        return TriggerEvent(payload, key=event.key, is_last=event.is_last)
    return _ENDS_OF_TASK[kind](xcoms=None if payload is None else payload["xcoms"], key=event.key)
