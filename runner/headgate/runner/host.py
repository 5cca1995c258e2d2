"""The host of the triggers: one task each, started and cancelled on the supervisor's request.

A trigger fails alone (I9): whatever it raises, at import, in its constructor, while it runs or in its hooks, ends its
own run, with its traceback. It leaves its shared stream in one of two ways (I13): a filter that returned, or whose
trigger a user removed, is done with its event; another one is cut short, and the broker delivers that event again.

A trigger of which a task takes one event has fulfilled its purpose with its first, and any trigger with an event that
ends a task, or that it says is its last: its generator is ended, and its run has returned, whatever happens meanwhile
(I8).
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

import msgspec
import structlog
import trio

from headgate.child.error_text import describe_error, storable
from headgate.child.keys import is_storable_key, storable_key
from headgate.child.logs import SpecNames, naming_trigger, trigger_names
from headgate.child.output import end_lines
from headgate.child.queries import secrets
from headgate.protocol import marks
from headgate.protocol.errors import ValueNotSerializable, ValueTooLong
from headgate.protocol.messages.queries import StoredEvent
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    LETTER_BYTES_MAX,
    STREAM_NAME_CHARS_MAX,
    AbsentSubscriber,
    CancelReason,
    CancelTrigger,
    Credit,
    DescribedTrigger,
    EventKind,
    FinishedTrigger,
    FiredEvent,
    Redelivery,
    RedeliveryEnd,
    RedeliveryOutcome,
    RefusedEvent,
    RunnerSettings,
    TriggerSpec,
)
from headgate.protocol.values import decode_value, encode_value
from headgate.runner.black_box import BlackBox
from headgate.runner.letters import Content, PassedOver, fill, message_content
from headgate.runner.loading import load_trigger
from headgate.runner.outbox import Outbox
from headgate.runner.pauses import EVENTS_A_STEP, Pauses
from headgate.runner.trigger_run import (
    Ending,
    EventNotStorable,
    FiredAfterLast,
    ReturnedBeforeFirstEvent,
    Stage,
    TriggerRun,
    check_event,
    judge,
)
from headgate.streams.contract import AdvanceOutcome, PollTerminated
from headgate.streams.group_settings import DRAIN_TIMEOUT_S, PRODUCER_CLOSE_TIMEOUT_S, STREAM_CLOSE_TIMEOUT_S
from headgate.streams.identity import StreamIdentity, stream_of
from headgate.streams.manager import SharedStreamManager
from headgate.streams.redelivery import RedeliveredMessage
from headgate.streams.subscription import NOTHING_BOUND
from headgate.triggers.base import BaseEventTrigger, BaseTrigger

log = structlog.get_logger(__name__)

STARTS_A_STEP = 100  # triggers constructed between two checkpoints
# The longest time that a shared stream takes to close; its last subscriber waits for it.
STREAM_END_S = DRAIN_TIMEOUT_S + STREAM_CLOSE_TIMEOUT_S + PRODUCER_CLOSE_TIMEOUT_S


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
        box: BlackBox,
    ) -> None:
        self._settings = settings
        self._streams = streams
        self._outbox = outbox
        self._nursery = nursery
        self._ask_last_event = ask_last_event
        self._box = box
        # Of a payload: up to the limit of a dead letter, which keeps an event that is too long.
        self._kept_bytes_max = max(settings.event_bytes_max, LETTER_BYTES_MAX)
        self._runs: dict[int, TriggerRun] = {}
        self._pauses = Pauses(outbox)
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

    def expect_absent(self, absent: tuple[AbsentSubscriber, ...]) -> None:
        """Have streams wait for subscribers that are not started: until they are, or are cancelled."""
        for subscriber in absent:  # its run may still be ending: the wait begins before it leaves
            self._expect(subscriber)

    def _expect(self, subscriber: AbsentSubscriber | TriggerSpec) -> None:
        """Have its stream, if it has one that is known, wait for a trigger that is started later."""
        if subscriber.stream:
            key = StreamIdentity(subscriber.stream, "")
            self._streams.expect_rejoin(trigger_id=subscriber.trigger_id, key=key)

    def redeliver(self, redelivery: Redelivery) -> None:
        """Give a trigger a message of its shared stream that a user has redriven, and report what it does with it.

        Nothing is reported if the run is over, or ends before that: the supervisor gives it to the next run.
        """
        run = self._runs.get(redelivery.trigger_id)
        if run is None or run.spec.trigger_run_id != redelivery.trigger_run_id or run.stage is not Stage.DRIVING:
            return
        if run.description is not None or run.not_joined is not None:
            return
        names = SpecNames(run.spec)
        with naming_trigger(names), self._box.executing(names):
            try:
                if run.subscription is None:
                    raise ValueError(f"{run.spec.name} reads no shared stream")
                self._streams.redeliver(
                    decode_value(redelivery.message),
                    trigger_id=run.spec.trigger_id,
                    key=run.key,
                    message_key=redelivery.key,
                    message=RedeliveredMessage(partial(self._settle, redelivery)),
                )
            except BaseException as exc:  # the decoding of an author's own type may raise anything
                log.error("a message cannot be redriven", letter_id=redelivery.letter_id, exc_info=exc, **names)
                self._end_redelivery(redelivery, "failed", describe_error(exc)[0])
            else:
                marks.reach("redelivery.given")

    def _settle(self, redelivery: Redelivery, outcome: AdvanceOutcome) -> None:
        if outcome.rejected:
            self._end_redelivery(redelivery, "rejected")
        elif outcome.acked:
            self._end_redelivery(redelivery, "handled")
        # Failed with its subscriber: the end of the run, which is reported, says whether the message was at fault.

    def _end_redelivery(self, redelivery: Redelivery, outcome: RedeliveryOutcome, error: str = "") -> None:
        end = RedeliveryEnd(redelivery.letter_id, redelivery.trigger_id, redelivery.trigger_run_id, outcome, error)
        self._outbox.enqueue(end)
        marks.reach("redelivery.settled")

    def extend(self, credit: Credit) -> None:
        """Let a run go further that feeds the stream of a task, if it still goes on."""
        run = self._runs.get(credit.trigger_id)
        if run is None or run.spec.trigger_run_id != credit.trigger_run_id or credit.events <= (run.spec.credit or 0):
            return
        run.spec = msgspec.structs.replace(run.spec, credit=credit.events)
        self._pauses.end(run)

    def cancel(self, cancel: CancelTrigger) -> None:
        """Cancel one trigger. It need not be running: a shared stream may be waiting for it."""
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
        names = SpecNames(kept)
        with naming_trigger(names), self._box.executing(names):
            try:
                trigger = load_trigger(spec)
            except BaseException as exc:  # a constructor may raise anything, even SystemExit
                self._expect(kept)
                self._report(kept, Ending("failed", None, exc), events=0)
                return
            # Bypasses a __setattr__ of the author's, such as that of a frozen dataclass.
            object.__setattr__(trigger, "_ask_last_event", partial(self._ask_last_event, spec.trigger_id))
            run = self._runs[spec.trigger_id] = TriggerRun(kept, trigger)
            try:
                self._join_stream(run, names)
            except BaseException as exc:  # raised again by its task: the object exists now and needs its cleanup()
                self._expect(kept)
                run.not_joined = exc
            # The task inherits the context, and with it the names that its log records carry.
            self._nursery.start_soon(self._run, run, name=f"trigger {spec.trigger_id}")

    def _join_stream(self, run: TriggerRun, names: SpecNames) -> None:
        """Join the shared stream of a trigger, if it is the one that the supervisor expects; else report it.

        Only the supervisor knows who may run a stream, so a trigger with another one than expected is not run.
        """
        spec, stream = run.spec, stream_of(run.trigger)
        if spec.stream != ("" if stream is None else stream.digest):
            description = describe(spec, stream)
            if stream is not None or spec.stream is not None:
                run.description = description
                self._streams.cancel_rejoin(spec.trigger_id)  # it left that stream, if it was in one
                return
            self._outbox.enqueue(description)  # it reads no stream, so it may run anywhere
        if stream is None:
            return
        assert isinstance(run.trigger, BaseEventTrigger)
        run.key = stream
        run.subscription = self._streams.subscribe(trigger_id=run.spec.trigger_id, trigger=run.trigger, key=run.key)
        run.subscription.on_failed = lambda error: self._fail_by_stream(run, error)
        run.subscription.note_message = self._box.messages_of(names)
        run.subscription.pass_over = PassedOver(run.spec, self._outbox, self._settings.frame_bytes_max)
        run.subscription.may_pass_over = bool(run.spec.passed_over)

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
        self._pauses.end(run)
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
        ending = judge(run, error)
        run.reach(Stage.DRIVEN)
        # Shielded, because the stream relies on this subscriber leaving, and cleanup() has to be called. The hooks are
        # last: user code must not keep the stream waiting.
        with trio.CancelScope(shield=True):
            await self._leave_stream(run, ending)
            await self._call_hooks(run, ending)
            await self._close_leaked_nurseries(run)
        end_lines(trigger_names.get())
        if run.description is not None and ending.outcome == "returned":
            self._outbox.enqueue(run.description)
        else:
            self._report(run.spec, ending, events=run.events)
        del self._runs[run.spec.trigger_id]
        run.reach(Stage.ENDED)
        self._waiting_for_end.unpark_all()

    async def _drive(self, run: TriggerRun) -> None:
        """Iterate the trigger in one task, which between two events awaits nothing but room in the outbox."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if run.not_joined is not None:
            raise run.not_joined
        if run.description is not None:
            return
        run.pause_after(EVENTS_A_STEP)
        if run.has_no_credit:
            await self._pauses.pause(run)
            await trio.lowlevel.checkpoint_if_cancelled()
        async with aclosing(run.open_generator()) as events:
            async for event in events:
                if run.is_fulfilled:
                    raise FiredAfterLast(f"{run.spec.classpath} fired an event after the one with is_last=True")
                kind, is_last = self._fire(run, event)
                if is_last or run.spec.takes_one_event:
                    self._fulfil(run)
                    # After an event with is_last=True the code behind its yield still runs, except a filter's, which
                    # would pull the next message.
                    if kind != "event" or run.spec.takes_one_event or run.subscription is not None:
                        return
                elif self._outbox.is_full or run.events >= run.pause_at:
                    await self._pauses.pause(run)
                if run.is_interrupted:
                    return
        if run.events == 0 and run.spec.credit is None:
            # If an earlier run has fired, this one may have nothing to add.
            may_add_nothing = not run.spec.takes_one_event and run.subscription is None
            if not may_add_nothing or await self._ask_last_event(run.spec.trigger_id) is None:
                raise ReturnedBeforeFirstEvent(f"{run.spec.classpath} returned before its first event")

    def _fulfil(self, run: TriggerRun) -> None:
        """End a run after its last event. Closing its generator has the time of a cancellation, and then it is one."""
        run.is_fulfilled = True
        grace_s = self._settings.cancel_grace_s
        run.scope.deadline = trio.current_time() + grace_s
        self._nursery.start_soon(self._watch_end, run, Stage.DRIVEN, 2 * grace_s)
        marks.reach("host.fulfilled")

    def _fire(self, run: TriggerRun, event: object) -> tuple[EventKind, bool]:
        """Bind the event to the message it derives from, and append it to the outbox, with no await in between.

        Return its kind, and whether it is the last of its run. Raises `EventNotStorable`.
        """
        event, kind = check_event(run, event)
        is_last = kind != "event" or event.is_last
        spec, limit = run.spec, self._settings.event_bytes_max
        payload, payload_bytes, problem = b"", 0, ""
        try:
            payload = encode_value(event.payload, where="payload", bytes_max=self._kept_bytes_max)
            payload_bytes = len(payload)
        except ValueNotSerializable as exc:
            problem = f"an event of {spec.name} cannot be stored: {exc}"
        except ValueTooLong as exc:
            payload, payload_bytes = exc.head, exc.value_bytes
        if payload_bytes > limit:
            problem = f"an event of {spec.name} has {payload_bytes:,} bytes; the limit is {limit:,}"
        binding = NOTHING_BOUND if run.subscription is None else run.subscription.bind()
        key, position = (event.key, 0) if binding.key is None else (binding.key, binding.position)
        if isinstance(key, str):
            key = str.__str__(key)
        if not problem and not is_storable_key(key):
            problem = f"the key of an event of {spec.name} is not storable text of at most {KEY_CHARS_MAX} characters"
        if problem and spec.credit is not None and run.subscription is None:
            raise EventNotStorable(problem)
        index, run.events = run.events, run.events + 1
        if problem:
            letter = RefusedEvent(
                trigger_id=spec.trigger_id,
                trigger_run_id=spec.trigger_run_id,
                sequence_index=index,
                seq=binding.seq or 0,
                reason=storable(problem)[:ERROR_CHARS_MAX],
                payload_bytes=0,
                payload_head=b"",
                key=storable_key(key),
                position=position,
                kind=kind,
                is_last=is_last,
            )
            self._refuse(run, letter, Content("event", payload, payload_bytes))
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
                    is_last=is_last,
                )
            )
            marks.reach("host.event_queued")
        return kind, is_last

    def _refuse(self, run: TriggerRun, letter: RefusedEvent, event: Content) -> None:
        """Report an event that cannot be stored as a dead letter, whole if that is possible."""
        contents = [event]
        if not event.is_whole and run.subscription is not None and run.subscription.is_window_open:
            contents.append(message_content(run.subscription.raw_event))
        letter = fill(letter, contents, self._settings.frame_bytes_max)
        log.error(
            "an event is refused",
            reason=letter.reason,
            sequence_index=letter.sequence_index,
            kept=letter.content if letter.is_whole else None,
            **SpecNames(run.spec),
        )
        self._outbox.enqueue(letter)

    # --- its end ----------------------------------------------------------------------------------

    async def _leave_stream(self, run: TriggerRun, ending: Ending) -> None:
        if run.subscription is None:
            return
        if ending.outcome == "failed":
            # It is restarted soon; until then the other subscribers wait, because it would miss their events.
            self._streams.expect_rejoin(trigger_id=run.spec.trigger_id, key=run.key)
        elif ending.outcome == "returned":  # its stream may have failed, and it was expected to join the next one
            if not run.is_fulfilled and run.spec.credit is None:  # the stream of a task may end in this way
                log.warning("a trigger returned, and gets no more of its shared stream", **SpecNames(run.spec))
            self._streams.cancel_rejoin(trigger_id=run.spec.trigger_id)
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
            scope = trio.CancelScope(deadline=trio.current_time() + timeout_s, shield=True)
            try:
                if name not in vars(run.trigger) and getattr(type(run.trigger), name) is getattr(BaseTrigger, name):
                    continue  # the base class's, which does nothing
                self._watch_rest(run, len(names) * timeout_s)
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
            event = "a trigger failed" if ending.outcome != "returned" else "a trigger failed after its last event"
            message = {} if ending.message_key is None else {"message_key": ending.message_key}
            level(event, error=text, traceback=trace, outcome=ending.outcome, **message, **SpecNames(spec))
        of_run = (spec.trigger_id, spec.trigger_run_id, ending.outcome, events)
        self._outbox.enqueue(
            FinishedTrigger(*of_run, error=text, traceback=trace, reason=ending.reason, message_key=ending.message_key)
        )


def describe(spec: TriggerSpec, stream: StreamIdentity | None) -> DescribedTrigger:
    """Return the report of the stream of a trigger. Its name is stored and shown, so secrets in it are masked (I12)."""
    if stream is None:
        return DescribedTrigger(spec.trigger_id, spec.trigger_run_id, "", "")
    name = secrets.hide(stream.name)[:STREAM_NAME_CHARS_MAX]
    return DescribedTrigger(spec.trigger_id, spec.trigger_run_id, stream.digest, name)
