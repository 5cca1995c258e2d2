"""The host of the triggers: one task each, started and cancelled as the supervisor says.

A trigger fails alone (I9): whatever it raises, at import, in its constructor, while it runs or in its hooks,
ends its own run, is reported with its traceback, and touches nobody else. It leaves its shared stream in one
of two ways (I13): a filter that returned, or whose trigger a user removed, is done with the event it sits on;
one that raised, or was cancelled for any other reason, is cut short, and the broker delivers that event again.
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

STARTS_A_STEP = 100  # triggers constructed between two looks at the rest of the loop
EVENTS_A_STEP = 100  # events of one trigger that awaits nothing, between two looks at the rest of the loop
# How long a shared stream takes to close at the worst, which its last subscriber waits for.
STREAM_END_S = DRAIN_TIMEOUT_S + STREAM_CLOSE_TIMEOUT_S + PRODUCER_CLOSE_TIMEOUT_S
# What a trigger may fire. A value may be of an author's subclass of str, which has no form on the wire.
EVENT_KINDS: dict[str, EventKind] = {"event": "event", "success": "success", "failed": "failed", "skipped": "skipped"}


class ReturnedBeforeFirstEvent(Exception):
    """A trigger returned without having fired an event, which nobody could ever notice (seed 002)."""


class NotATriggerEvent(TypeError):
    """A trigger yielded or returned something else than trigger events."""


class CancelledByItself(RuntimeError):
    """A trigger raised trio's cancellation although nobody had cancelled it: a scope of its own leaked."""


class Ending(NamedTuple):
    """How a run ended, judged once, when its trigger has: what comes during the hooks changes nothing."""

    outcome: Outcome
    reason: CancelReason | None
    error: BaseException | None
    message_key: str | None = None  # of the shared stream's message that its filter was working on

    @property
    def is_done(self) -> bool:
        """Whether the event it sat on counts as done (I13)."""
        return self.error is None and self.reason in (None, "user")


class Stage(enum.IntEnum):
    """How far a run has come."""

    DRIVING = 0
    DRIVEN = 1  # its generator has ended; the stream and the hooks are still to come
    ENDED = 2


class TriggerRun:
    """One run of one trigger, from its start to its report.

    There may be a hundred thousand of them that only wait, so it holds nothing that few of them need.
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
        self.stage_changed: trio.Event | None = None  # there while somebody waits for the end
        self.cancel_reason: CancelReason | None = None
        self.not_joined: BaseException | None = None  # why it is in no shared stream, though it should be
        self.forced: Exception | None = None  # why its shared stream has thrown it out
        self.key: Hashable = None
        self.subscription: Subscription | None = None
        self.events = 0
        self.is_interrupted = False  # its scope is cancelled; the scope itself would look at the clock to say so
        self.is_stuck = False

    def reach(self, stage: Stage) -> None:
        """Note that it has come so far."""
        self.stage = stage
        if self.stage_changed is not None:
            self.stage_changed.set()
            self.stage_changed = None

    async def wait_for(self, stage: Stage) -> None:
        """Wait until it has come so far."""
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

    # --- what the supervisor says -----------------------------------------------------------------

    async def start(self, specs: tuple[TriggerSpec, ...]) -> None:
        """Start triggers. The caller holds the shared streams meanwhile, so that all of them join in time."""
        for number, spec in enumerate(specs, start=1):
            self._start(spec)
            if number % STARTS_A_STEP == 0:
                await trio.lowlevel.checkpoint()

    def cancel(self, cancel: CancelTrigger) -> None:
        """Cancel one trigger. It need not run: a shared stream may be waiting for it to come back."""
        self._streams.cancel_rejoin(cancel.trigger_id)
        run = self._runs.get(cancel.trigger_id)
        if run is not None:
            self._cancel(run, cancel.reason)

    def cancel_standalone(self, reason: CancelReason) -> None:
        """Cancel the triggers that are in no shared stream."""
        for run in list(self._runs.values()):
            if run.subscription is None:
                self._cancel(run, reason)

    def cancel_all(self, reason: CancelReason) -> None:
        """Cancel every trigger."""
        for run in list(self._runs.values()):
            self._cancel(run, reason)

    async def wait_all_ended(self) -> None:
        """Wait until no trigger runs, except those of which nobody knows whether they will ever end."""
        while not all(run.is_stuck for run in self._runs.values()):
            await self._waiting_for_end.park()

    # --- the beginning of a run -------------------------------------------------------------------

    def _start(self, spec: TriggerSpec) -> None:
        if spec.trigger_id in self._runs:
            # The supervisor starts a trigger anew only after its end was reported: this is a bug of ours.
            log.error("a trigger was to be started twice", **SpecNames(spec))
            return
        # What is kept of it for as long as the trigger runs.
        kept = msgspec.structs.replace(spec, classpath=sys.intern(spec.classpath), kwargs=b"")
        with naming_trigger(SpecNames(kept)):
            try:
                trigger = load_trigger(spec)
            except BaseException as exc:  # a constructor may raise anything at all, even SystemExit
                self._report(kept, Ending("failed", None, exc), events=0)
                return
            # Past a __setattr__ of the author's own, such as that of a frozen dataclass.
            object.__setattr__(trigger, "_ask_last_event", partial(self._ask_last_event, spec.trigger_id))
            run = self._runs[spec.trigger_id] = TriggerRun(kept, trigger)
            try:
                self._join_stream(run)
            except BaseException as exc:  # raised by its task: there is an object now, which wants its cleanup
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

    # --- its premature end ------------------------------------------------------------------------

    def _fail_by_stream(self, run: TriggerRun, error: Exception) -> None:
        """The shared stream failed this subscriber, which may never pull again: cancel it.

        Where the whole stream ended, the filter first gets what it has waiting, and then the error.
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
        """A trigger that swallows its cancellation cannot be ended from here: say so, to have the process replaced."""
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
        """The whole life of a run. Raises nothing, since that would end all others."""
        error: BaseException | None = None
        try:
            with run.scope:
                await self._drive(run)
        except BaseException as exc:
            error = exc
        ending = _judge(run, error)
        run.reach(Stage.DRIVEN)
        # Shielded, because the stream counts on this subscriber's leaving, and cleanup() on being called. The
        # hooks come last: nothing that users wrote may keep the stream waiting.
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
        """Iterate the trigger. One task does all of it, and awaits nothing between two events but room."""
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
                f"{run.spec.classpath} must be an async generator (async def with yield): it returned {events!r:.200}"
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
        """Let the others run, and wait for room, for as long as nobody wants the trigger to end."""
        # Shielded: the trigger may have yielded inside a cancel scope of its own, which must not see its
        # deadline delivered to an await that is not its own.
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
            while self._outbox.is_full and not run.is_interrupted:
                if run.subscription is not None:
                    run.subscription.waits_for_store = True
                await self._outbox.wait_room()
            if run.subscription is not None:
                run.subscription.waits_for_store = False

    def _fire(self, run: TriggerRun, event: object) -> EventKind:
        """Bind the event to the message it derives from, and put it in the outbox, with no await in between."""
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
        envelope = (spec.trigger_id, spec.trigger_run_id, index, binding.seq or 0)
        if problem:
            problem = storable(problem)[:ERROR_CHARS_MAX]
            log.error("an event is refused", reason=problem, sequence_index=index, **SpecNames(spec))
            self._outbox.enqueue(
                RefusedEvent(*envelope, problem, payload_bytes, payload, None if key is None else _shown(key), position)
            )
        else:
            marks.reach("host.event_bound")
            self._outbox.enqueue(FiredEvent(*envelope, payload, key, position, kind, kind != "event"))
            marks.reach("host.event_queued")
        return kind

    # --- its end ----------------------------------------------------------------------------------

    async def _leave_stream(self, run: TriggerRun, ending: Ending) -> None:
        if run.subscription is None:
            return
        if ending.outcome == "failed":
            # It is started again in a moment; until then the others wait, or it would miss what they get.
            self._streams.expect_rejoin(trigger_id=run.spec.trigger_id, key=run.key)
        self._watch_rest(run, STREAM_END_S)
        try:
            await self._streams.unsubscribe(run.spec.trigger_id, run.key, cut_short=not ending.is_done)
        except BaseException:  # the key is the author's object: it may even have changed its hash meanwhile
            log.exception("a trigger could not leave its shared stream", **SpecNames(run.spec))

    async def _call_hooks(self, run: TriggerRun, ending: Ending) -> None:
        """`on_kill` where a user acted, `cleanup` always (I14); each bounded, neither able to fail anything."""
        names = ("on_kill", "cleanup") if ending.reason == "user" else ("cleanup",)
        timeout_s = self._settings.hook_timeout_s
        for name in names:
            if name not in vars(run.trigger) and getattr(type(run.trigger), name) is getattr(BaseTrigger, name):
                continue  # the one that does nothing
            self._watch_rest(run, len(names) * timeout_s)
            scope = trio.CancelScope(deadline=trio.current_time() + timeout_s, shield=True)
            try:
                with scope:
                    await getattr(run.trigger, name)()
            except BaseException:  # even SystemExit: a hook ends nothing but itself
                log.exception("a hook failed", hook=name, **SpecNames(run.spec))
            if scope.cancelled_caught:
                log.error("a hook took too long", hook=name, timeout_s=timeout_s, **SpecNames(run.spec))

    async def _close_leaked_nurseries(self, run: TriggerRun) -> None:
        """Close what the trigger has opened and not left: trio would end the task, and with it all, with an error."""
        for nursery in reversed(trio.lowlevel.current_task().child_nurseries):
            self._watch_rest(run, 0.0)
            log.error("a trigger left a nursery open", **SpecNames(run.spec))
            nursery.cancel_scope.cancel()
            # What `async with` awaits at its end. What the tasks in there raise has nobody to go to.
            await nursery._nested_child_finished(None)

    def _watch_rest(self, run: TriggerRun, bound_s: float) -> None:
        """What is left to do ends within ``bound_s``, unless users' code in it swallows its cancellation."""
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
    """Say how a run ended, from what its trigger raised and what others wanted of it."""
    reason = run.cancel_reason
    if error is not None and _is_cancellation(error):
        if trio.current_effective_deadline() == -math.inf:
            # The whole runner is being taken down.
            reason, error = reason or "shutdown", None
        else:
            # Nobody cancelled this task from outside, so its own code did, and lost the scope that it did it with.
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
    """Whether there is nothing in the exception but trio's cancellation."""
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
    """A key that may be unfit to be one, as text that shows what it was."""
    text = key if isinstance(key, str) else f"<{type(key).__name__}>"
    return storable(text[:KEY_CHARS_MAX])[:KEY_CHARS_MAX]
