"""One run of one trigger: its stages, and how it ended."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import AsyncGenerator, Hashable
from typing import Any, Final, NamedTuple, cast

import trio

from headgate.protocol.messages.runner import CancelReason, DescribedTrigger, EventKind, Outcome, TriggerSpec
from headgate.streams.subscription import Subscription
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

# The kinds of events. A value may be an instance of an author's subclass of str, which cannot be encoded.
EVENT_KINDS: Final[dict[str, EventKind]] = {
    "event": "event",
    "success": "success",
    "failed": "failed",
    "skipped": "skipped",
}


class ReturnedBeforeFirstEvent(Exception):
    """A trigger returned without having fired an event, now or earlier: a task would wait for it for ever."""


class FiredAfterLast(Exception):
    """A trigger fired an event after the one that it said was its last; the event is not stored."""


class EventNotStorable(ValueError):
    """A trigger of a task's stream fired an event that cannot be stored; nothing behind it may be in the stream (I20).

    There is no dead letter of it: the trigger fires it again in the next try, and from a letter it would come twice.
    """


class NotATriggerEvent(TypeError):
    """A trigger yielded or returned something other than trigger events."""


class CancelledByItself(RuntimeError):
    """A trigger raised trio's cancellation although it was not cancelled: a scope of its own leaked."""


class Ending(NamedTuple):
    """How a run ended. Decided once, when its generator has ended; a cancellation during the hooks changes nothing.

    ``error`` of a run that returned is an exception that its generator raised after the last event.
    """

    outcome: Outcome
    reason: CancelReason | None
    error: BaseException | None
    message_key: str | None = None  # of the shared stream's message that its filter was working on

    @property
    def is_done(self) -> bool:
        """Whether the event that it was working on counts as done (I13)."""
        return self.outcome == "returned" or (self.error is None and self.reason == "user")


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
        "description",
        "events",
        "forced",
        "is_fulfilled",
        "is_interrupted",
        "is_stuck",
        "key",
        "not_joined",
        "pause_at",
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
        self.description: DescribedTrigger | None = None  # it reads another stream than expected, and is not run
        self.forced: Exception | None = None  # why its shared stream failed it
        self.key: Hashable = None
        self.subscription: Subscription | None = None
        self.events = 0
        self.pause_at = 0  # the number of events after which it lets other tasks run, or waits for credit
        self.is_fulfilled = False  # its last event is fired
        self.is_interrupted = False  # its scope is cancelled; asking the scope would read the clock
        self.is_stuck = False

    def open_generator(self) -> AsyncGenerator[Any, None]:
        """Begin the trigger's run, or its filter if it reads a shared stream. Raises `NotATriggerEvent`."""
        events: Any
        if self.subscription is not None:
            assert isinstance(self.trigger, BaseEventTrigger)
            events = self.trigger.filter_shared_stream(self.subscription)
        else:
            events = self.trigger.run()
        if inspect.isasyncgen(events):
            return cast(AsyncGenerator[Any, None], events)
        if inspect.iscoroutine(events):
            events.close()
        raise NotATriggerEvent(
            f"{self.spec.classpath} must be an async generator (async def with yield), but returned {events!r:.200}"
        )

    @property
    def has_no_credit(self) -> bool:
        """Whether it may fire nothing now, because its task has not handled enough of the events before (I22)."""
        credit = self.spec.credit
        return credit is not None and self.events >= credit

    def pause_after(self, events: int) -> None:
        """Pause after this number of further events, or where the credit ends."""
        credit = self.spec.credit
        self.pause_at = self.events + events if credit is None else min(self.events + events, credit)

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


def check_event(run: TriggerRun, event: object) -> tuple[TriggerEvent, EventKind]:
    """Return what the run's trigger yielded, as an event, and its kind. Raises `NotATriggerEvent`."""
    if not isinstance(event, TriggerEvent):
        raise NotATriggerEvent(f"{run.spec.classpath} yielded {type(event).__name__}, not a TriggerEvent")
    kind = EVENT_KINDS.get(event.kind)
    if kind is None:  # a subclass of the author's may have changed it
        raise NotATriggerEvent(f"{run.spec.classpath} yielded an event of kind {event.kind!r}")
    if type(event.is_last) is not bool:
        raise NotATriggerEvent(f"{run.spec.classpath} yielded an event whose is_last is no bool")
    return event, kind


def judge(run: TriggerRun, error: BaseException | None) -> Ending:
    """Decide how a run ended, from its trigger's exception and the requests to cancel it."""
    reason = run.cancel_reason
    if run.is_fulfilled and reason != "user":
        # What its generator raised when it was closed, or why it was to be cancelled, concerns no task any more.
        return Ending("returned", None, error)
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
