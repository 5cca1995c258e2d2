"""Scenarios of streams that are not drawn: for promises about a moment, which random ones meet by chance at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.proof.simulation.tasks import records
from tests.proof.simulation.tasks.directed import TASK, judged
from tests.proof.simulation.tasks.faults import Act
from tests.proof.simulation.tasks.scenario import Leg, Task
from tests.proof.simulation.tasks.streams.plans import Call, Stream


def _streaming(stream: Stream, **options: Any) -> Task:
    return Task("a", attempts=((Leg("defer", streams=True), Leg()),), stream=stream, **options)


def a_batch_that_is_not_whole_begins_when_it_is_due() -> list[str]:
    """A trigger fires three events of five, and nothing more."""
    stream = Stream("batch", 5, batch_s=1.0, total=3, ending="never", timeout_s=20.0)
    found, history = judged(_streaming(stream))
    if not any(isinstance(record, records.StepGot) and len(record.rows) == 3 for record in history):
        found.append("never resumed: no step got the three")
    return found


def what_an_earlier_try_has_left_shortens_no_wait() -> list[str]:
    """A batch is never whole, and what there is of it is older than the second try."""
    stream = Stream("batch", 3, total=2, keyed=True, ending="never", timeout_s=3.0)
    found, history = judged(_streaming(stream, retries=1, retry_delay_s=1.5))
    waits = sum(isinstance(record, records.Moved) and record.by == "time_out" for record in history)
    if waits != 2:
        found.append(f"it has waited {waits} times")
    return found


def the_outcome_of_a_step_that_was_cleared_moves_no_place() -> list[str]:
    """A user has a task begin anew behind what is handled, and its old worker answers before it is stopped."""
    stream = Stream("each", 1, total=2, seconds=1.2, calls=(Call(trouble="stubborn"),))
    found, history = judged(_streaming(stream), Act(0.6, TASK, "clear", "running", 0.5, streams="go_on"))
    states = [record.state for record in history if isinstance(record, records.Moved)]
    if "restarting" not in states or states[-1] != "success":
        found.append(f"it was {states}")
    return found


def a_run_begins_when_the_one_before_it_has_ended() -> list[str]:
    """A handler fails while its trigger fires, and the next try begins before the runner has heard of it."""
    stream = Stream(total=2, gap_s=0.15, calls=(Call("fails"), Call("fails")))
    found, history = judged(_streaming(stream, retries=3), latency_s=0.2)
    runs = sum(isinstance(record, records.SourceBegan) for record in history)
    if runs < 2:
        found.append(f"there were {runs} runs")
    return found


def a_try_goes_on_behind_what_the_one_before_has_handled() -> list[str]:
    """A trigger fails in the middle of a batch, and its handler in the middle of what there is of it."""
    stream = Stream("batch", 5, total=6, gap_s=0.1, breaks=(3,), calls=(Call("fails_late"),))
    found, history = judged(_streaming(stream, retries=1))
    got = [record.numbers for record in history if isinstance(record, records.StepGot)]
    if got != [(0, 1, 2), (1, 2, 3, 4, 5)]:
        found.append(f"its steps got {got}")
    return found


def an_event_that_is_poison_is_passed_over_alone() -> list[str]:
    """All events wait when the first of them is handled; the second one fails whoever takes it."""
    stream = Stream("each", 1, poison="skip", total=4, seconds=0.3, unfit=(1,))
    found, history = judged(_streaming(stream))
    letters = [record.number for record in history if isinstance(record, records.LetterStored)]
    ends = [record for record in history if isinstance(record, records.StepRan) and record.has_ended]
    if letters != [1] or len(ends) != 1:
        found.append(f"there are letters of {letters}, and {len(ends)} ends")
    return found


def a_last_event_that_comes_too_late_opens_no_trigger() -> list[str]:
    """A wait times out while the last event of its trigger is on its way; the next try handles it."""
    stream = Stream(total=1, keyed=True, gap_s=0.5, ending="is_last", rest_s=0.5, timeout_s=0.6)
    found, history = judged(_streaming(stream, retries=1, retry_delay_s=1.5), latency_s=0.2)
    ways = [record.by for record in history if isinstance(record, records.Moved) and record.old == "deferred"]
    if ways[:1] != ["time_out"] or not any(isinstance(record, records.StepGot) for record in history):
        found.append(f"it went on by {ways}")
    return found


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "batch": a_batch_that_is_not_whole_begins_when_it_is_due,
    "old events": what_an_earlier_try_has_left_shortens_no_wait,
    "cleared step": the_outcome_of_a_step_that_was_cleared_moves_no_place,
    "two tries": a_try_goes_on_behind_what_the_one_before_has_handled,
    "poison": an_event_that_is_poison_is_passed_over_alone,
    "late end": a_last_event_that_comes_too_late_opens_no_trigger,
    "two runs": a_run_begins_when_the_one_before_it_has_ended,
}
