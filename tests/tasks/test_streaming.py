"""The handler's side of a stream: what it is called with, how far its step has come, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headgate.protocol.messages.steps import (
    StepDeferred,
    StepFailed,
    StepHandled,
    StepOutcome,
    StepSkipped,
    StepSucceeded,
    XCom,
)
from headgate.protocol.messages.task_streams import Handled, StreamEvent, StreamOptions, StreamPart
from headgate.protocol.values import decode_value, encode_value
from headgate.tasks import (
    DAG,
    Asset,
    BaseOperator,
    Batch,
    Each,
    Latest,
    PythonOperator,
    TaskDeferred,
    TaskFailed,
    TaskSkipped,
)
from headgate.tasks.context import TaskStream, make_context
from headgate.tasks.errors import FAIL_METHOD
from headgate.tasks.execution import Resumption, run_step
from headgate.tasks.streaming import StreamedEvent, StreamMisused
from headgate.triggers.temporal import TimeDeltaTrigger

HANDLER = "handle_trigger_events"
SECOND = timedelta(seconds=1)


def part(*payloads: Any, handled: int = 0, state: Any = None, is_over: bool = False) -> StreamPart:
    """A part whose events have the ids 101, 102, ... of the positions 1, 2, ..."""
    events = tuple(
        StreamEvent(100 + handled + number, "run-1", number - 1, encode_value(payload, where="p"), None, False, 60.0)
        for number, payload in enumerate(payloads, start=1)
    )
    encoded = None if state is None else encode_value(state, where="state")
    return StreamPart(handled, len(events), encoded, events, is_over)


def step(
    operator: BaseOperator, given: StreamPart | None = None, method: str | None = HANDLER, kwargs: bytes = b"{}"
) -> StepOutcome:
    context = make_context(operator, run_id="r", stream=TaskStream.of(given))
    return run_step(operator, context, None if method is None else Resumption(method, kwargs), given)


def come(outcome: StepOutcome) -> tuple[int, int, Any] | None:
    """How far a step has come: the id of the last event that is handled, their number, the state."""
    handled = outcome.handled
    return None if handled is None else (handled.event_id, handled.count, decode_value(handled.state))


class Sums(BaseOperator):
    """Adds numbers up; a negative one ends the stream, None is skipped, and a text fails."""

    def execute(self, context: Any) -> None:
        self.defer(trigger=TimeDeltaTrigger(SECOND), stream=True, kwargs={"total": 0}, timeout=SECOND)

    def handle_trigger_events(self, events: Any, context: Any, total: int) -> dict[str, Any]:
        for event in events:
            if event.payload is None:
                raise TaskSkipped("nothing to add")
            total += event.payload
            if event.payload < 0:
                self.end_stream()
            self.handled(event, total=total)
        return {"total": total}

    def stream_ended(self, context: Any, total: int) -> int:
        return total


# --- the deferral --------------------------------------------------------------------------------


def test_a_deferral_with_a_stream_resumes_in_the_handler_with_its_kwargs() -> None:
    outcome = step(Sums(task_id="t"), method=None)
    assert isinstance(outcome, StepDeferred)
    assert (outcome.next_method, decode_value(outcome.next_kwargs)) == (HANDLER, {"total": 0})
    assert (outcome.timeout_s, outcome.stream, outcome.handled) == (1.0, StreamOptions(), None)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"stream": True}, StreamOptions("available", 100, None, 1000, "fail")),
        ({"stream": True, "ahead": 10}, StreamOptions("available", 10, None, 10, "fail")),
        ({"stream": Each()}, StreamOptions("each", 1, None, 1000, "fail")),
        ({"stream": Batch(count=50, seconds=2)}, StreamOptions("batch", 50, 2.0, 1000, "fail")),
        ({"stream": Latest(), "ahead": 5, "poison": "skip"}, StreamOptions("latest", 1, None, 5, "skip")),
    ],
)
def test_the_words_of_asset_schedules_say_how_a_stream_is_taken(given: Any, options: StreamOptions) -> None:
    assert TaskDeferred(trigger=TimeDeltaTrigger(SECOND), **given).stream == options


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "a deferral needs method_name, the method to resume in"),
        ({"stream": False}, r"stream must be None, True, Each\(\), Batch\(count=, seconds=\) or Latest\(\), not False"),
        ({"stream": Each}, r"stream must be None, True, Each\(\).*, not <class"),
        ({"stream": Each(Asset("a"))}, r"the events of a stream are those of its trigger: Each\(\) has no assets here"),
        ({"stream": Batch(seconds=2)}, "the count of a Batch must be an int, not None"),
        ({"stream": Batch(count=2, seconds=0)}, "the seconds of a batch must be more than 0"),
        ({"stream": Batch(count=2000)}, r"count must be in 1..1,000, not 2,000"),
        ({"stream": True, "ahead": "5"}, "ahead must be an int, not '5'"),
        ({"stream": True, "ahead": 0}, r"ahead must be in 1 \(the events of a step\)..100,000, not 0"),
        ({"stream": Batch(count=50), "ahead": 49}, r"ahead must be in 50 \(the events of a step\)..100,000, not 49"),
        ({"stream": True, "poison": "drop"}, "poison must be 'fail' or 'skip', not 'drop'"),
        ({"method_name": "m", "ahead": 5}, "ahead and poison are options of a stream, and stream is None"),
        ({"method_name": "m", "poison": "skip"}, "ahead and poison are options of a stream, and stream is None"),
        ({"stream": True, "kwargs": {"events": 1}}, "kwargs may not have events"),
        ({"stream": True, "method_name": "m", "kwargs": {"event": 1}}, "kwargs may not have event"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_the_authors_line(given: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        TaskDeferred(trigger=TimeDeltaTrigger(SECOND), **given)


class _NoState(Sums):
    def handle_trigger_events(self, events: Any, context: Any) -> None:  # type: ignore[override]
        """Take no state."""


class _Async(Sums):
    async def handle_trigger_events(self, events: Any, context: Any, total: int) -> None:  # type: ignore[override]
        """Return a coroutine."""


class _OtherEnd(Sums):
    def stream_ended(self, context: Any) -> None:  # type: ignore[override]
        """Take no state."""


class _NoHandler(BaseOperator):
    def execute(self, context: Any) -> None:
        self.defer(trigger=TimeDeltaTrigger(SECOND), stream=True)


@pytest.mark.parametrize(
    ("operator", "problem"),
    [
        (_NoState, r"_NoState.handle_trigger_events cannot be called with \(events, context, \*\*state\): .*'total'"),
        (_Async, "_Async.handle_trigger_events must be a plain method: tasks are synchronous"),
        (_OtherEnd, r"_OtherEnd.stream_ended cannot be called with \(context, \*\*state\): .*'total'"),
        (_NoHandler, "_NoHandler has no method 'handle_trigger_events' to resume in"),
    ],
)
def test_a_handler_that_cannot_be_called_is_refused_when_the_task_defers(operator: Any, problem: str) -> None:
    with DAG("d"):
        outcome = step(operator(task_id="t"), method=None)
    assert isinstance(outcome, StepFailed)
    with pytest.raises(AssertionError, match=f"DAG 'd', task 't': .*{problem}"):
        raise AssertionError(outcome.error)


# --- a step with events --------------------------------------------------------------------------


def test_a_handler_gets_its_events_in_order_with_all_that_is_known_of_each() -> None:
    got: list[Any] = []

    class Keeps(BaseOperator):
        def handle_trigger_events(self, events: Any, context: Any, **state: Any) -> None:
            got.extend([events, context["stream"], state])

    events = (
        StreamEvent(7, "e.1.2.3", 4, b'"a"', "key", False, 60.0),
        StreamEvent(9, "e.1.2.3", 5, b'{"$":"tuple","v":[1]}', None, True, 61.0),
    )
    outcome = step(Keeps(task_id="t"), StreamPart(10, 30, b'{"n":1}', events))
    moment = datetime(1970, 1, 1, 0, 1, tzinfo=UTC)
    assert got == [
        (
            StreamedEvent("a", "key", "e.1.2.3", 4, 10, False, moment),
            StreamedEvent((1,), None, "e.1.2.3", 5, 11, True, moment + SECOND),
        ),
        TaskStream(10, 30, {"n": 1}),
        {"n": 1},
    ]
    assert outcome == StepHandled(Handled(9, 2, b'{"n":1}'))


def test_the_state_that_a_handler_returns_is_stored_with_all_its_events_and_given_to_the_next_call() -> None:
    first = step(Sums(task_id="t"), part(1, 2), kwargs=b'{"total":5}')
    assert isinstance(first, StepHandled)
    assert come(first) == (102, 2, {"total": 8})
    second = step(Sums(task_id="t"), part(3, handled=2, state={"total": 8}), kwargs=b'{"total":5}')
    assert come(second) == (103, 1, {"total": 11})


def test_a_step_that_fails_in_the_middle_has_handled_what_it_said_and_nothing_behind_it() -> None:
    outcome = step(Sums(task_id="t"), part(1, 2, "three", 4), kwargs=b'{"total":0}')
    assert isinstance(outcome, StepFailed)
    assert "TypeError" in outcome.error
    assert outcome.may_retry
    assert come(outcome) == (102, 2, {"total": 3})
    nothing = step(Sums(task_id="t"), part("one", 2), kwargs=b'{"total":0}')
    assert (type(nothing), nothing.handled) == (StepFailed, None)


def test_a_step_that_skips_in_the_middle_has_handled_what_it_said() -> None:
    outcome = step(Sums(task_id="t"), part(1, None, 3), kwargs=b'{"total":0}')
    assert isinstance(outcome, StepSkipped)
    assert (outcome.reason, come(outcome)) == ("nothing to add", (101, 1, {"total": 1}))


def test_a_failure_without_another_try_keeps_what_is_handled() -> None:
    class Gives(BaseOperator):
        def handle_trigger_events(self, events: Any, context: Any) -> None:
            self.handled(events[0])
            raise TaskFailed("no more")

    outcome = step(Gives(task_id="t"), part(1, 2))
    assert isinstance(outcome, StepFailed)
    assert (outcome.may_retry, come(outcome)) == (False, (101, 1, {}))


def test_the_last_events_are_handled_before_the_end_in_the_same_step() -> None:
    outcome = step(Sums(task_id="t"), part(1, 2, is_over=True), kwargs=b'{"total":0}')
    assert isinstance(outcome, StepSucceeded)
    assert (outcome.xcoms, come(outcome)) == ((XCom("return_value", b"3"),), (102, 2, {"total": 3}))


def test_a_stream_that_ends_without_an_event_more_ends_its_task_with_the_state() -> None:
    outcome = step(Sums(task_id="t"), part(handled=9, state={"total": 45}, is_over=True))
    assert outcome == StepSucceeded(xcoms=(XCom("return_value", b"45"),))


def test_a_handler_ends_its_stream() -> None:
    outcome = step(Sums(task_id="t"), part(5, -1), kwargs=b'{"total":0}')
    assert isinstance(outcome, StepSucceeded)
    assert (outcome.xcoms, come(outcome)) == ((XCom("return_value", b"4"),), (102, 2, {"total": 4}))


def test_what_stream_ended_raises_fails_the_task_behind_its_last_event() -> None:
    class Fails(Sums):
        def stream_ended(self, context: Any, total: int) -> int:
            raise ValueError(f"{total} is too much")

    outcome = step(Fails(task_id="t"), part(1, is_over=True), kwargs=b'{"total":0}')
    assert isinstance(outcome, StepFailed)
    assert (outcome.error, come(outcome)) == ("ValueError: 1 is too much", (101, 1, {"total": 1}))


def test_stream_ended_may_defer_and_a_handler_may_not() -> None:
    class Waits(BaseOperator):
        def handle_trigger_events(self, events: Any, context: Any) -> None:
            if events[0].payload == "defer":
                self.defer(trigger=TimeDeltaTrigger(SECOND), method_name="finish")

        def stream_ended(self, context: Any) -> None:
            stream = True if context["stream"].waiting == 2 else None
            self.defer(trigger=TimeDeltaTrigger(SECOND), method_name="finish", stream=stream)  # type: ignore[arg-type]

        def finish(self, context: Any, event: Any) -> None:
            """End."""

    outcome = step(Waits(task_id="t"), part(1, is_over=True))
    assert isinstance(outcome, StepDeferred)
    assert (outcome.next_method, outcome.stream, come(outcome)) == ("finish", None, (101, 1, {}))
    in_handler = step(Waits(task_id="t"), part("defer", is_over=True))
    again = step(Waits(task_id="t"), part(1, 2, is_over=True))
    for refused, handled in ((in_handler, None), (again, (102, 2, {}))):
        assert isinstance(refused, StepFailed)
        assert "task 't': StreamMisused: a task that handles events of a stream cannot defer" in refused.error
        assert come(refused) == handled


def test_the_failure_of_a_trigger_is_raised_as_without_a_stream_and_moves_nothing() -> None:
    kwargs = encode_value({"error": "gone", "traceback": "", "reason": "trigger_failure"}, where="kwargs")
    outcome = step(Sums(task_id="t"), part(handled=3, state={"total": 6}), method=FAIL_METHOD, kwargs=kwargs)
    assert isinstance(outcome, StepFailed)
    assert (outcome.error, outcome.handled) == ("TaskDeferralError: gone", None)


class Some(BaseOperator):
    """Takes so many events, and ends the stream in the middle of a call."""

    def __init__(self, *, tells: bool, **options: Any) -> None:
        super().__init__(**options)
        self.tells = tells

    def execute(self, context: Any) -> None:
        self.defer(trigger=TimeDeltaTrigger(SECOND), stream=True, kwargs={"total": 0})

    def handle_trigger_events(self, events: Any, context: Any, total: int) -> dict[str, Any]:
        for event in events:
            total += event.payload
            if self.tells:
                self.handled(event)
            if total >= 3:
                self.end_stream()
                break
        return {"total": total}


@pytest.mark.parametrize(("tells", "handled"), [(True, (102, 2, {"total": 3})), (False, (104, 4, {"total": 3}))])
def test_who_ends_a_stream_has_handled_the_events_that_the_call_has_named(
    *, tells: bool, handled: tuple[int, int, Any]
) -> None:
    outcome = step(Some(task_id="t", tells=tells), part(1, 2, 3, 4), kwargs=b'{"total":0}')
    assert isinstance(outcome, StepSucceeded)
    assert come(outcome) == handled


# --- a method that takes one event ---------------------------------------------------------------


class OneByOne(BaseOperator):
    """Takes its events as the operators that know no streams."""

    def execute(self, context: Any) -> None:
        self.defer(trigger=TimeDeltaTrigger(SECOND), method_name="add", kwargs={"to": [1]}, stream=True)

    def add(self, context: Any, event: Any, to: list[int]) -> list[int] | None:
        if event == "end":
            self.end_stream()
            return None
        to.append(1 // event)
        return to


def test_a_method_for_one_event_is_called_for_each_with_the_same_kwargs() -> None:
    deferred = step(OneByOne(task_id="t"), method=None)
    assert isinstance(deferred, StepDeferred)
    assert (deferred.next_method, deferred.stream) == ("add", StreamOptions())
    outcome = step(OneByOne(task_id="t"), part(1, 2), method="add", kwargs=deferred.next_kwargs)
    assert isinstance(outcome, StepHandled)
    assert come(outcome) == (102, 2, {"to": [1]})
    assert outcome.xcoms == (XCom("return_value", b"[1,0]"),)


def test_each_event_of_such_a_method_is_handled_by_itself() -> None:
    failed = step(OneByOne(task_id="t"), part(1, 0, 1), method="add", kwargs=b'{"to":[]}')
    assert isinstance(failed, StepFailed)
    assert (come(failed), failed.xcoms) == ((101, 1, {"to": []}), (XCom("return_value", b"[1]"),))
    ended = step(OneByOne(task_id="t"), part(1, "end", 1), method="add", kwargs=b'{"to":[]}')
    assert isinstance(ended, StepSucceeded)
    assert (come(ended), ended.xcoms) == ((102, 2, {"to": []}), (XCom("return_value", b"[1]"),))


def test_a_function_takes_a_stream_by_its_parameter_event() -> None:
    def take(event: Any = None) -> Any:
        if event is None:
            raise TaskDeferred(trigger=TimeDeltaTrigger(SECOND), method_name="execute", stream=Each())
        return event * 2

    operator = PythonOperator(task_id="t", python_callable=take)
    deferred = step(operator, method=None)
    assert isinstance(deferred, StepDeferred)
    assert deferred.stream == StreamOptions("each", 1)
    outcome = step(PythonOperator(task_id="t", python_callable=take), part(4, is_over=True), method="execute")
    assert isinstance(outcome, StepSucceeded)
    assert (come(outcome), outcome.xcoms) == ((101, 1, {}), (XCom("return_value", b"8"),))


# --- misuse --------------------------------------------------------------------------------------

kept: list[StreamedEvent] = []


class Misuses(BaseOperator):
    def handle_trigger_events(self, events: Any, context: Any, **state: Any) -> Any:
        match events[0].payload:
            case "a list":
                return [1]
            case "a function":
                self.handled(events[0], n=1)
                return {"rows": {"last": print}}
            case "too long":
                return {"text": "x" * 2_000_000}
            case "no name":
                return {1: 2}
            case "backwards":
                self.handled(events[1], n=2)
                self.handled(events[0], n=1)
            case "keep":
                kept.append(events[0])
            case "foreign":
                self.handled(kept[0])
            case "a payload":
                self.handled(events[0].payload)
            case _:
                pass
        return None


class Strict(BaseOperator):
    def handle_trigger_events(self, events: Any, context: Any, n: int = 0) -> Any:
        return {"m": 1}


@pytest.mark.parametrize(
    ("operator", "payload", "problem", "handled"),
    [
        (Misuses, "a list", "Misuses.handle_trigger_events must return the state for its next call, a dict, ", None),
        (Misuses, "a function", "state['rows']['last'] is a builtin_function_or_method", (101, 1, {"n": 1})),
        (Misuses, "too long", "state needs 2,000,0", None),
        (Misuses, "no name", "state[1] is no argument: its name must be a str", None),
        (
            Misuses,
            "backwards",
            "at position 0, and 1 was handled before: events are handled in order",
            (102, 2, {"n": 2}),
        ),
        (Misuses, "foreign", "Misuses.handle_trigger_events has got, at position 0..1, not one at 7", None),
        (Misuses, "a payload", "handled() takes an event that Misuses.handle_trigger_events was called with", None),
        (Strict, "", "the state has 'm': Strict.handle_trigger_events cannot be called with (events, ", None),
    ],
)
def test_a_handler_that_breaks_a_rule_fails_its_try_and_is_named(
    operator: Any, payload: str, problem: str, handled: Any
) -> None:
    kept.clear()
    step(Misuses(task_id="t"), part("keep", 1, handled=7))
    with DAG("d"):
        outcome = step(operator(task_id="t"), part(payload, 1))
    assert isinstance(outcome, StepFailed)
    assert outcome.error.startswith("DAG 'd', task 't': ")
    assert problem in outcome.error
    assert come(outcome) == handled


def test_handled_and_end_stream_are_refused_where_there_are_no_events() -> None:
    operator = Sums(task_id="t")
    with pytest.raises(StreamMisused, match=r"handled\(\) is for the handler of a stream, while it has events"):
        operator.handled(StreamedEvent(1, None, "r", 0, 0, False, datetime.now(UTC)))

    class Late(Sums):
        def stream_ended(self, context: Any, total: int) -> int:
            self.end_stream()
            return total

    outcome = step(Late(task_id="t"), part(handled=1, state={"total": 1}, is_over=True))
    assert isinstance(outcome, StepFailed)
    assert "end_stream() is for the handler of a stream" in outcome.error


def test_a_handler_that_the_file_no_longer_has_fails_the_try() -> None:
    outcome = step(_NoHandler(task_id="t"), part(1))
    assert isinstance(outcome, StepFailed)
    assert "_NoHandler has no method 'handle_trigger_events' to resume in" in outcome.error


def test_a_part_that_says_nothing_fails_the_try() -> None:
    outcome = step(Sums(task_id="t"), part(state={"total": 1}))
    assert isinstance(outcome, StepFailed)
    assert "the step has got no events, and its stream is not over" in outcome.error
