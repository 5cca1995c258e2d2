"""Streams of tasks: the parts of messages by which a task takes many events of one trigger, in order (I20, I21).

A task that defers with `StreamOptions` keeps one trigger over all of its steps and tries. The events of the trigger
are its stream, in the order of their ids. A step gets the next ones as a `StreamPart`, and its outcome says by
`Handled` how far it has come, with the state for the next step. Both are stored in one transaction.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from headgate.protocol.messages import WireStruct

EVENTS_PER_STEP_MAX: Final = 1000  # handed to one step
EVENT_BYTES_PER_STEP_MAX: Final = 8 * 1024 * 1024  # of their payloads together: half of a frame; one may exceed it
EVENTS_PER_STEP: Final = 100  # if the author does not say
AHEAD_MAX: Final = 100_000  # events of a stream that are stored and not handled
AHEAD: Final = 1000  # if the author does not say
BATCH_SECONDS_MAX: Final = 10 * 365 * 86_400.0  # as any other delay

PAGE_ROWS: Final = "rows"  # of the dict that a page is, the payload of a `PagedTrigger`
HANDLER_METHOD: Final = "handle_trigger_events"  # gets several events at once; any other method gets one at a time

StreamContract: TypeAlias = Literal["available", "each", "batch", "latest"]
PoisonRule: TypeAlias = Literal["fail", "skip"]
ElementsOf: TypeAlias = Literal["event", "each"]


class StreamOptions(WireStruct, frozen=True):
    """How a task takes the events of its trigger; part of `StepDeferred` and of `StartTrigger`.

    ``contract`` says when a step begins, and with which of the waiting events. ``available``: as soon as one waits,
    with up to ``count``. ``each``: with one. ``batch``: when ``count`` wait, or ``seconds`` after the first of them was
    stored, or when no more will come. ``latest``: with the newest; those before it count as handled. ``ahead`` bounds
    the events that are stored and not handled. ``poison`` says what happens to an event on which the last try of the
    task fails: ``fail``, the task fails; ``skip``, the event becomes a dead letter and the task goes on behind it.

    With ``elements`` no step handles the events. Who stores them stores what they give as elements of the task, in the
    same transaction. ``event``: its payload is one. ``each``: the items of the payload are, which is a list or a tuple,
    or the dict of a page, with a list as its ``rows``.
    """

    contract: StreamContract = "available"
    count: int = EVENTS_PER_STEP
    seconds: float | None = None
    ahead: int = AHEAD
    poison: PoisonRule = "fail"
    elements: ElementsOf | None = None


class StreamEvent(WireStruct, frozen=True):
    """One event of a stream; part of `StreamPart`. ``id`` is the stored event's; ``payload`` is encoded."""

    id: int
    trigger_run_id: str
    sequence_index: int
    payload: bytes
    key: str | None
    is_last: bool
    stored_at_s: float


class StreamPart(WireStruct, frozen=True):
    """The part of its stream that a step gets; part of `Step`.

    ``handled`` is the number of events that earlier steps have handled, ``waiting`` the number of those that wait,
    ``events`` included. ``state`` is the encoded dict that the last of these steps has left: the kwargs of the handler;
    None before the first. If ``is_over``, no event will come behind ``events``: the step ends the stream with
    ``stream_ended``. A step that begins with ``execute`` gets no events.
    """

    handled: int = 0
    waiting: int = 0
    state: bytes | None = None
    events: tuple[StreamEvent, ...] = ()
    is_over: bool = False


class Handled(WireStruct, frozen=True):
    """How far a step has come in its stream; part of its outcome.

    All events of its part up to and including ``event_id`` are handled, ``count`` of them, at least one. ``state`` is
    the encoded dict for the next step.
    """

    event_id: int
    count: int
    state: bytes


def stream_problem(options: StreamOptions) -> str | None:
    """Return the problem with the options of a stream, or None."""
    if not 1 <= options.count <= EVENTS_PER_STEP_MAX:
        return f"count must be in 1..{EVENTS_PER_STEP_MAX:,}, not {options.count:,}"
    if options.contract in ("each", "latest") and options.count != 1:
        return f"a step takes one event under the contract {options.contract!r}, not {options.count:,}"
    if options.seconds is not None:
        if options.contract != "batch":
            return f"only a batch has seconds, not {options.contract!r}"
        if not 0 < options.seconds <= BATCH_SECONDS_MAX:
            return (
                f"the seconds of a batch must be more than 0 and at most {BATCH_SECONDS_MAX:.0f}, not {options.seconds}"
            )
    if options.elements is not None and (options.contract, options.poison) != ("available", "fail"):
        return "no step handles events that are elements, so they are taken as they come, and none is passed over"
    if not options.count <= options.ahead <= AHEAD_MAX:
        return f"ahead must be in {options.count:,} (the events of a step)..{AHEAD_MAX:,}, not {options.ahead:,}"
    return None
