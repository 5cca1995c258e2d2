"""The host of the triggers: one task each, started and cancelled on the supervisor's request.

A trigger fails alone (I9): whatever it raises, at import, in its constructor, while it runs or in its hooks, ends its
own run, is reported with its traceback, and affects no other trigger. It leaves its shared stream in one of two ways
(I13): a filter that returned, or whose trigger a user removed, is done with the event that it is working on; one that
raised, or was cancelled for any other reason, is cut short, and the broker delivers that event again.
"""

from __future__ import annotations

import enum
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Hashable
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import msgspec
import structlog
import trio

from headgate.child.error_text import describe_error, storable
from headgate.child.logs import SpecNames, naming_trigger, trigger_names
from headgate.child.output import end_lines
from headgate.protocol import marks
from headgate.protocol.errors import ValueNotSerializable, ValueTooLong
from headgate.protocol.messages.queries import StoredEvent
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    REFUSED_HEAD_BYTES_MAX,
    CancelReason,
    CancelTrigger,
    EventKind,
    FinishedTrigger,
    FiredEvent,
    Outcome,
    RefusedEvent,
    RunnerSettings,
    TriggerSpec,
)
from headgate.protocol.values import encode_value
from headgate.runner.loading import load_trigger
from headgate.runner.outbox import Outbox
from headgate.streams.contract import PollTerminated
from headgate.streams.group import DRAIN_TIMEOUT_S, PRODUCER_CLOSE_TIMEOUT_S, STREAM_CLOSE_TIMEOUT_S
from headgate.streams.manager import SharedStreamManager
from headgate.streams.subscription import NOTHING_BOUND, Subscription
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

log = structlog.get_logger(__name__)

STARTS_A_STEP = 100  # triggers constructed between two checkpoints
EVENTS_A_STEP = 100  # events of one trigger that awaits nothing, between two checkpoints
# The longest time that a shared stream takes to close; its last subscriber waits for it.
STREAM_END_S = DRAIN_TIMEOUT_S + STREAM_CLOSE_TIMEOUT_S + PRODUCER_CLOSE_TIMEOUT_S
# The kinds of events. A value may be an instance of an author's subclass of str, which cannot be encoded.
EVENT_KINDS: dict[str, EventKind] = {"event": "event", "success": "success", "failed": "failed", "skipped": "skipped"}


class ReturnedBeforeFirstEvent(Exception):
    """A trigger returned without having fired an event: a task that waits for it would wait for ever."""


class NotATriggerEvent(TypeError):
    """A trigger yielded or returned something other than trigger events."""


class CancelledByItself(RuntimeError):
    """A trigger raised trio's cancellation although it was not cancelled: a scope of its own leaked."""


class Ending(NamedTuple):
    """How a run ended. Decided once, when its generator has ended; a cancellation during the hooks changes nothing."""

    outcome: Outcome
    reason: CancelReason | None
    error: BaseException | None
    message_key: str | None = None  # of the shared stream's message that its filter was working on

    @property
    def is_done(self) -> bool:
        """Whether the event that it was working on counts as done (I13)."""
        return self.error is None and self.reason in (None, "user")


class Stage(enum.IntEnum):
    """The stages of a run."""

    DRIVING = 0
    DRIVEN = 1  # its generator has ended; it still has to leave its stream and to run its hooks
    ENDED = 2


class TriggerRun:
    """One run of one trigger, from its start to its report.

    A runner may host a hundred thousand idle ones, so it has no attribute that only few of them need.
    """

    __slots__ = (
        "cancel_reason",
        "events",
        "forced",
        "is_interrupted",
        "is_stuck",
        "key",
        "not_joined",
        "scope",
        "spec",
        "stage",
        "stage_changed",
        "subscription",
        "trigger",
    )

    def __init__(self, spec: TriggerSpec, trigger: BaseTrigger) -> None:
        self.spec = spec
        self.trigger = trigger
        self.scope = trio.CancelScope()
        self.stage = Stage.DRIVING
        self.stage_changed: trio.Event | None = None  # set only while a task waits for the end
        self.cancel_reason: CancelReason | None = None
        self.not_joined: BaseException | None = None  # why joining its shared stream failed
        self.forced: Exception | None = None  # why its shared stream failed it
        self.key: Hashable = None
        self.subscription: Subscription | None = None
        self.events = 0
        self.is_interrupted = False  # its scope is cancelled; asking the scope would read the clock
        self.is_stuck = False

    def reach(self, stage: Stage) -> None:
        """Enter a stage."""
        self.stage = stage
        if self.stage_changed is not None:
            self.stage_changed.set()
            self.stage_changed = None

    async def wait_for(self, stage: Stage) -> None:
        """Wait until the run has entered this stage."""
        while self.stage < stage:
            if self.stage_changed is None:
                self.stage_changed = trio.Event()
            await self.stage_changed.wait()


class Host:
    """All triggers of one runner. ``nursery`` runs their tasks, and outlives them."""

    def __init__(
        self,
        *,
        settings: RunnerSettings,
        streams: SharedStreamManager,
        outbox: Outbox,
        nursery: trio.Nursery,
        ask_last_event: Callable[[int], Awaitable[StoredEvent | None]],
    ) -> None:
        self._settings = settings
        self._streams = streams
        self._outbox = outbox
        self._nursery = nursery
        self._ask_last_event = ask_last_event
        self._runs: dict[int, TriggerRun] = {}
        self._waiting_for_end = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._runs)

    # --- requests of the supervisor ---------------------------------------------------------------

    async def start(self, specs: tuple[TriggerSpec, ...]) -> None:
        """Start triggers. The caller pauses the start of streams meanwhile, so that all of them join in time."""
        for number, spec in enumerate(specs, start=1):
            self._start(spec)
            if number % STARTS_A_STEP == 0:
                await trio.lowlevel.checkpoint()

    def cancel(self, cancel: CancelTrigger) -> None:
        """Cancel one trigger. It need not be running: a shared stream may be waiting for it to rejoin."""
        self._streams.cancel_rejoin(cancel.trigger_id)
        run = self._runs.get(cancel.trigger_id)
        if run is not None:
            self._cancel(run, cancel.reason)

    def cancel_standalone(self, reason: CancelReason) -> None:
        """Cancel the triggers outside shared streams."""
        for run in list(self._runs.values()):
            if run.subscription is None:
                self._cancel(run, reason)

    def cancel_all(self, reason: CancelReason) -> None:
        """Cancel every trigger."""
        for run in list(self._runs.values()):
            self._cancel(run, reason)

    async def wait_all_ended(self) -> None:
        """Wait until no trigger runs, except those that are stuck."""
        while not all(run.is_stuck for run in self._runs.values()):
            await self._waiting_for_end.park()

    # --- the beginning of a run -------------------------------------------------------------------

    def _start(self, spec: TriggerSpec) -> None:
        if spec.trigger_id in self._runs:
            # The supervisor restarts a trigger only after its end was reported, so this is a bug in headgate.
            log.error("a trigger that runs already was to be started", **SpecNames(spec))
            return
        # Kept in memory for as long as the trigger runs, so without the kwargs.
        kept = msgspec.structs.replace(spec, classpath=sys.intern(spec.classpath), kwargs=b"")
        with naming_trigger(SpecNames(kept)):
            try:
                trigger = load_trigger(spec)
            except BaseException as exc:  # a constructor may raise anything, even SystemExit
                self._report(kept, Ending("failed", None, exc), events=0)
                return
            # Bypasses a __setattr__ of the author's, such as that of a frozen dataclass.
            object.__setattr__(trigger, "_ask_last_event", partial(self._ask_last_event, spec.trigger_id))
            run = self._runs[spec.trigger_id] = TriggerRun(kept, trigger)
            try:
                self._join_stream(run)
            except BaseException as exc:  # raised again by its task: the object exists now and needs its cleanup()
                run.not_joined = exc
            # The task inherits the context, and with it the names that its log records carry.
            self._nursery.start_soon(self._run, run, name=f"trigger {spec.trigger_id}")

    def _join_stream(self, run: TriggerRun) -> None:
        if not isinstance(run.trigger, BaseEventTrigger):
            return
        run.key = run.trigger.shared_stream_key()
        if run.key is None:
            return
        run.subscription = self._streams.subscribe(trigger_id=run.spec.trigger_id, trigger=run.trigger, key=run.key)
        run.subscription.on_failed = lambda error: self._fail_by_stream(run, error)

    # --- cancellation -----------------------------------------------------------------------------

    def _fail_by_stream(self, run: TriggerRun, error: Exception) -> None:
        """The shared stream failed this subscriber, which may never pull again: cancel it.

        If the whole stream ended, the filter first gets the events in its queue, and then the error.
        """
        run.forced = error
        if run.cancel_reason is None:
            self._streams.expect_rejoin(trigger_id=run.spec.trigger_id, key=run.key)
        if not isinstance(error, PollTerminated):
            self._interrupt(run)

    def _cancel(self, run: TriggerRun, reason: CancelReason) -> None:
        if run.cancel_reason is None and run.stage is Stage.DRIVING:
            run.cancel_reason = reason
            self._interrupt(run)

    def _interrupt(self, run: TriggerRun) -> None:
        run.is_interrupted = True
        run.scope.cancel()
        self._outbox.wake()
        self._nursery.start_soon(self._watch_end, run, Stage.DRIVEN, self._settings.cancel_grace_s)

    async def _watch_end(self, run: TriggerRun, end: Stage, within_s: float) -> None:
        """Report a trigger that swallows its cancellation: it cannot be ended here, only by replacing the process."""
        with trio.move_on_after(within_s):
            await run.wait_for(end)
            return
        if not run.is_stuck:
            run.is_stuck = True
            self._waiting_for_end.unpark_all()
            log.error("a trigger does not end", within_s=within_s, **SpecNames(run.spec))
            self._outbox.report_stuck(run.spec.trigger_id)

    # --- the run ----------------------------------------------------------------------------------

    async def _run(self, run: TriggerRun) -> None:
        """Run one trigger from start to report. Raises nothing, because that would end all others."""
        error: BaseException | None = None
        try:
            with run.scope:
                await self._drive(run)
        except BaseException as exc:
            error = exc
        ending = _judge(run, error)
        run.reach(Stage.DRIVEN)
        # Shielded, because the stream relies on this subscriber leaving, and cleanup() has to be called. The hooks are
        # last: user code must not keep the stream waiting.
        with trio.CancelScope(shield=True):
            await self._leave_stream(run, ending)
            await self._call_hooks(run, ending)
            await self._close_leaked_nurseries(run)
        end_lines(trigger_names.get())
        self._report(run.spec, ending, events=run.events)
        del self._runs[run.spec.trigger_id]
        run.reach(Stage.ENDED)
        self._waiting_for_end.unpark_all()
        if ending.outcome == "failed" and run.subscription is not None and self._settings.rejoin_wait_s > 0:
            self._nursery.start_soon(self._start_rejoin_wait, run.spec.trigger_id)

    async def _start_rejoin_wait(self, trigger_id: int) -> None:
        await self._outbox.wait_stored()
        self._streams.start_rejoin_wait(trigger_id)

    async def _drive(self, run: TriggerRun) -> None:
        """Iterate the trigger in one task, which between two events awaits nothing but room in the outbox."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if run.not_joined is not None:
            raise run.not_joined
        events: object
        if run.subscription is not None:
            assert isinstance(run.trigger, BaseEventTrigger)
            events = run.trigger.filter_shared_stream(run.subscription)
        else:
            events = run.trigger.run()
        if not inspect.isasyncgen(events):
            if inspect.iscoroutine(events):
                events.close()
            raise NotATriggerEvent(
                f"{run.spec.classpath} must be an async generator (async def with yield), but returned {events!r:.200}"
            )
        async with aclosing(events):
            async for event in events:
                kind = self._fire(run, event)
                if kind == "event" and (self._outbox.is_full or run.events % EVENTS_A_STEP == 0):
                    await self._pause(run)
                if kind != "event" or run.is_interrupted:
                    return
        if run.events == 0:
            raise ReturnedBeforeFirstEvent(f"{run.spec.classpath} returned before its first event")

    async def _pause(self, run: TriggerRun) -> None:
        """Let other tasks run, and wait for room in the outbox unless the trigger is to end."""
        # Shielded: the trigger may have yielded inside a cancel scope of its own, whose deadline must not be delivered
        # to an await of ours.
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
            while self._outbox.is_full and not run.is_interrupted:
                if run.subscription is not None:
                    run.subscription.waits_for_store = True
                await self._outbox.wait_room()
            if run.subscription is not None:
                run.subscription.waits_for_store = False

    def _fire(self, run: TriggerRun, event: object) -> EventKind:
        """Bind the event to the message it derives from, and append it to the outbox, with no await in between."""
        if not isinstance(event, TriggerEvent):
            raise NotATriggerEvent(f"{run.spec.classpath} yielded {type(event).__name__}, not a TriggerEvent")
        kind = EVENT_KINDS.get(event.kind)
        if kind is None:  # a subclass of the author's may have changed it
            raise NotATriggerEvent(f"{run.spec.classpath} yielded an event of kind {event.kind!r}")
        spec, limit = run.spec, self._settings.event_bytes_max
        payload, payload_bytes, problem = b"", 0, ""
        try:
            payload = encode_value(event.payload, where="payload", bytes_max=limit)
            payload_bytes = len(payload)
        except ValueNotSerializable as exc:
            problem = f"an event of {spec.name} cannot be stored: {exc}"
        except ValueTooLong as exc:
            payload, payload_bytes = exc.head, exc.value_bytes
            problem = f"an event of {spec.name} has {payload_bytes:,} bytes; the limit is {limit:,}"
        binding = NOTHING_BOUND if run.subscription is None else run.subscription.bind()
        key, position = (event.key, 0) if binding.key is None else (binding.key, binding.position)
        if isinstance(key, str):
            key = str.__str__(key)
        if not problem and not _is_key(key):
            problem = f"the key of an event of {spec.name} is not storable text of at most {KEY_CHARS_MAX} characters"
            payload = payload[:REFUSED_HEAD_BYTES_MAX]
        index, run.events = run.events, run.events + 1
        if problem:
            problem = storable(problem)[:ERROR_CHARS_MAX]
            log.error("an event is refused", reason=problem, sequence_index=index, **SpecNames(spec))
            self._outbox.enqueue(
                RefusedEvent(
                    trigger_id=spec.trigger_id,
                    trigger_run_id=spec.trigger_run_id,
                    sequence_index=index,
                    seq=binding.seq or 0,
                    reason=problem,
                    payload_bytes=payload_bytes,
                    payload_head=payload,
                    key=None if key is None else _shown(key),
                    position=position,
                )
            )
        else:
            marks.reach("host.event_bound")
            self._outbox.enqueue(
                FiredEvent(
                    trigger_id=spec.trigger_id,
                    trigger_run_id=spec.trigger_run_id,
                    sequence_index=index,
                    seq=binding.seq or 0,
                    payload=payload,
                    key=key,
                    position=position,
                    kind=kind,
                    is_last=kind != "event",
                )
            )
            marks.reach("host.event_queued")
        return kind

    # --- its end ----------------------------------------------------------------------------------

    async def _leave_stream(self, run: TriggerRun, ending: Ending) -> None:
        if run.subscription is None:
            return
        if ending.outcome == "failed":
            # It is restarted soon; until then the other subscribers wait, because it would miss their events.
            self._streams.expect_rejoin(trigger_id=run.spec.trigger_id, key=run.key)
        self._watch_rest(run, STREAM_END_S)
        try:
            await self._streams.unsubscribe(run.spec.trigger_id, run.key, cut_short=not ending.is_done)
        except BaseException:  # the key is the author's object, whose hash may have changed
            log.exception("a trigger could not leave its shared stream", **SpecNames(run.spec))

    async def _call_hooks(self, run: TriggerRun, ending: Ending) -> None:
        """Call `on_kill` if a user acted, and `cleanup` always (I14). Each is bounded; a failure is only logged."""
        names = ("on_kill", "cleanup") if ending.reason == "user" else ("cleanup",)
        timeout_s = self._settings.hook_timeout_s
        for name in names:
            if name not in vars(run.trigger) and getattr(type(run.trigger), name) is getattr(BaseTrigger, name):
                continue  # the base class's, which does nothing
            self._watch_rest(run, len(names) * timeout_s)
            scope = trio.CancelScope(deadline=trio.current_time() + timeout_s, shield=True)
            try:
                with scope:
                    await getattr(run.trigger, name)()
            except BaseException:  # even SystemExit: a hook ends only itself
                log.exception("a hook failed", hook=name, **SpecNames(run.spec))
            if scope.cancelled_caught:
                log.error("a hook took too long", hook=name, timeout_s=timeout_s, **SpecNames(run.spec))

    async def _close_leaked_nurseries(self, run: TriggerRun) -> None:
        """Close nurseries that the trigger left open: trio would end the task with an error, and with it the runner."""
        for nursery in reversed(trio.lowlevel.current_task().child_nurseries):
            self._watch_rest(run, 0.0)
            log.error("a trigger left a nursery open", **SpecNames(run.spec))
            nursery.cancel_scope.cancel()
            # The same that `async with` awaits at its end. Exceptions of the tasks in it cannot be delivered anywhere.
            await nursery._nested_child_finished(None)

    def _watch_rest(self, run: TriggerRun, bound_s: float) -> None:
        """Report the run as stuck unless the rest of it ends within ``bound_s`` and the grace of a cancellation."""
        self._nursery.start_soon(self._watch_end, run, Stage.ENDED, bound_s + self._settings.cancel_grace_s)

    def _report(self, spec: TriggerSpec, ending: Ending, *, events: int) -> None:
        text = trace = ""
        if ending.error is not None:
            text, trace = describe_error(ending.error)
            if "no running event loop" in text:
                text = f"{text}: triggers are trio code, not asyncio; use trio.sleep and other libraries of trio"
            level = log.error if ending.outcome == "failed" else log.warning
            message = {} if ending.message_key is None else {"message_key": ending.message_key}
            level("a trigger failed", error=text, traceback=trace, outcome=ending.outcome, **message, **SpecNames(spec))
        self._outbox.enqueue(
            FinishedTrigger(spec.trigger_id, spec.trigger_run_id, ending.outcome, events, text, trace, ending.reason)
        )


def _judge(run: TriggerRun, error: BaseException | None) -> Ending:
    """Decide how a run ended, from its trigger's exception and the requests to cancel it."""
    reason = run.cancel_reason
    if error is not None and _is_cancellation(error):
        if trio.current_effective_deadline() == -math.inf:
            # The whole runner is being taken down.
            reason, error = reason or "shutdown", None
        else:
            # This task was not cancelled from outside, so its own code did it, with a scope that it then left.
            leaked = CancelledByItself(f"{run.spec.classpath} was cancelled by a scope of its own")
            leaked.__cause__ = error
            error = leaked
    error = error or run.forced
    if reason is not None:
        return Ending("cancelled", reason, error)
    if error is None:
        return Ending("returned", None, None)
    return Ending("failed", None, error, None if run.subscription is None else run.subscription.message_key)


def _is_cancellation(error: BaseException) -> bool:
    """Whether the exception consists of trio's cancellation only."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_cancellation(part) for part in error.exceptions)
    return isinstance(error, trio.Cancelled)


def _is_key(key: object) -> bool:
    if key is None:
        return True
    if not isinstance(key, str) or len(key) > KEY_CHARS_MAX:
        return False
    return (key.isascii() and "\0" not in key) or storable(key) == key  # the first is true of most, and cheap


def _shown(key: object) -> str:
    """Return a key that may be invalid as text that can be stored and shown."""
    text = key if isinstance(key, str) else f"<{type(key).__name__}>"
    return storable(text[:KEY_CHARS_MAX])[:KEY_CHARS_MAX]
