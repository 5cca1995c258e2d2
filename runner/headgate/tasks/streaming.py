"""Streams of tasks: the words by which an author asks for one, and the part of it that one step handles (I20).

A task that defers with ``stream=`` takes many events of its trigger. Each step gets the next ones, in order, and calls
``handle_trigger_events(events, context, **state)`` once, which returns the state for the next call; or, if the deferral
names a method, that method once for each event. The outcome of the step says how far it has come, and has the state:
both are stored in one transaction. When no more events will come, ``stream_ended(context, **state)`` is called, if the
operator has it, and its return value is the task's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.messages.task_streams import (
    AHEAD,
    EVENTS_PER_STEP,
    HANDLER_METHOD,
    Handled,
    PoisonRule,
    StreamEvent,
    StreamOptions,
    StreamPart,
    stream_problem,
)
from headgate.protocol.values import decode_value, encode_value
from headgate.tasks.context import RETURN_VALUE, Context
from headgate.tasks.schedule import Batch, Each, Latest, batch_limits

if TYPE_CHECKING:
    from headgate.tasks.operator import BaseOperator

ENDED_METHOD: Final = "stream_ended"  # called once, after the last event, if the operator has it
WAITS: Final = object()  # what a step returns whose stream goes on

Stream: TypeAlias = Literal[True] | Each | Batch | Latest | None


class StreamMisused(Exception):
    """A task used its stream in a way that cannot be stored or continued; the try fails."""


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """One event of a task's stream, as its handler gets it.

    ``position`` counts the events of the stream from 0, over all steps, tries and runs of the trigger; with `Latest`,
    those that a newer one has replaced are counted as well. ``sequence_index`` counts those of the trigger's run
    ``trigger_run_id``. ``is_last``: the trigger has said that it is its last. ``stored_at`` is aware, in UTC, by the
    database's clock.
    """

    payload: Any
    key: str | None
    trigger_run_id: str
    sequence_index: int
    position: int
    is_last: bool
    stored_at: datetime


def read_stream(stream: Stream, *, ahead: int | None = None, poison: PoisonRule = "fail") -> StreamOptions | None:
    """Return the options of a stream as they are stored; None if there is none. Raises TypeError or ValueError."""
    if stream is None:
        if ahead is not None or poison != "fail":
            raise ValueError("ahead and poison are options of a stream, and stream is None")
        return None
    if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool)):
        raise TypeError(f"ahead must be an int, not {ahead!r:.100}")
    if poison not in ("fail", "skip"):
        raise ValueError(f"poison must be 'fail' or 'skip', not {poison!r:.100}")
    bound = AHEAD if ahead is None else ahead
    if stream is True:
        options = StreamOptions(count=max(1, min(EVENTS_PER_STEP, bound)), ahead=bound, poison=poison)
    elif isinstance(stream, Each | Batch | Latest):
        if stream.assets is not None:
            name = type(stream).__name__
            raise ValueError(f"the events of a stream are those of its trigger: {name}() has no assets here")
        if isinstance(stream, Batch):
            count, seconds = batch_limits(stream)
            options = StreamOptions("batch", count, seconds, bound, poison)
        else:
            options = StreamOptions("each" if isinstance(stream, Each) else "latest", 1, None, bound, poison)
    else:
        raise TypeError(f"stream must be None, True, Each(), Batch(count=, seconds=) or Latest(), not {stream!r:.100}")
    if (problem := stream_problem(options)) is not None:
        raise ValueError(problem)
    return options


class StreamStep:
    """The part of a stream that one step handles, and how far the step has come.

    ``state`` is the encoded dict that the handler is called with.
    """

    def __init__(self, operator: BaseOperator, method: str, state: bytes, part: StreamPart) -> None:
        self._operator = operator
        self._method = method
        self._part = part
        self._state = state
        self._events = tuple(_event_of(event, part.handled + index) for index, event in enumerate(part.events))
        self._done = 0
        self._ends_early = False
        self.is_handling = False

    @property
    def handled(self) -> Handled | None:
        """How far the step has come; None if it has handled no event."""
        return Handled(self._part.events[self._done - 1].id, self._done, self._state) if self._done else None

    def run(self, context: Context) -> Any:
        """Handle the events; return `WAITS`, or if the stream is over, the task's result. Raises the author's errors.

        Raises `StreamMisused`, and what `encode_value` raises for the state.
        """
        if not self._events and not self._part.is_over:
            raise StreamMisused("the step has got no events, and its stream is not over")
        self.is_handling = True
        if self._events and self._method == HANDLER_METHOD:
            self._handle_together(context)
        else:
            self._handle_each(context)
        self.is_handling = False
        if not self._part.is_over and not self._ends_early:
            return WAITS
        ended = getattr(self._operator, ENDED_METHOD, None)
        return None if ended is None else ended(context, **decode_value(self._state))

    def _handle_together(self, context: Context) -> None:
        handler = getattr(self._operator, self._method)
        state = handler(self._events, context, **decode_value(self._state))
        if state is not None and not isinstance(state, dict):
            raise StreamMisused(
                f"{self._name} must return the state for its next call, a dict, or None if it is unchanged, "
                f"not {state!r:.100}"
            )
        # One that ends the stream says with `handled` how far it has come; what lies behind is nobody's doing.
        self._move(self._done if self._ends_early and self._done else len(self._events), state)

    def _handle_each(self, context: Context) -> None:
        """Call a method that takes one event for each, which counts as handled as soon as the method returns."""
        for number, event in enumerate(self._events, start=1):
            kwargs = decode_value(self._state)
            value = self._operator.resume_execution(self._method, kwargs, event.payload, context)
            if value is not None:
                context["ti"].xcom_push(RETURN_VALUE, value)
            self._move(number, None)
            if self._ends_early:
                return

    # --- what a handler calls ---------------------------------------------------------------------

    def mark_handled(self, event: StreamedEvent, state: dict[str, Any] | None) -> None:
        """Count all events up to ``event`` as handled; None if the state is unchanged. Raises as `run`."""
        if not isinstance(event, StreamedEvent):
            raise StreamMisused(f"handled() takes an event that {self._name} was called with, not {event!r:.100}")
        index = event.position - self._part.handled
        if not (0 <= index < len(self._events) and self._events[index] is event):
            raise StreamMisused(
                f"handled() takes an event that this call of {self._name} has got, at position "
                f"{self._part.handled}..{self._part.handled + len(self._events) - 1}, not one at {event.position}"
            )
        if index < self._done:
            raise StreamMisused(
                f"handled() was called with the event at position {event.position}, and "
                f"{self._part.handled + self._done - 1} was handled before: events are handled in order"
            )
        self._move(index + 1, state)

    def end(self) -> None:
        """End the stream with this step."""
        self._ends_early = True

    def _move(self, done: int, state: dict[str, Any] | None) -> None:
        if state is not None:
            encoded = encode_value(state, where="state", bytes_max=KWARGS_BYTES_MAX)
            for name in state:
                if not isinstance(name, str):
                    raise StreamMisused(f"state[{name!r:.100}] is no argument: its name must be a str")
            if (problem := self._operator.method_problem(self._method, state, of_stream=True)) is not None:
                raise StreamMisused(f"the state has {', '.join(map(repr, state)) or 'no names'}: {problem}")
            self._state = encoded
        self._done = done
        if self._operator._emissions is not None:
            self._operator._emissions.keep()

    @property
    def _name(self) -> str:
        return f"{type(self._operator).__name__}.{self._method}"


def _event_of(event: StreamEvent, position: int) -> StreamedEvent:
    return StreamedEvent(
        payload=decode_value(event.payload),
        key=event.key,
        trigger_run_id=event.trigger_run_id,
        sequence_index=event.sequence_index,
        position=position,
        is_last=event.is_last,
        stored_at=datetime.fromtimestamp(event.stored_at_s, UTC),
    )
