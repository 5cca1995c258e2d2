"""The options of a task's stream: their limits, and what is said about each that is broken."""

from __future__ import annotations

import pytest

from headgate.protocol.messages.task_streams import AHEAD_MAX, EVENTS_PER_STEP_MAX, StreamOptions, stream_problem


@pytest.mark.parametrize(
    "options",
    [
        StreamOptions(),
        StreamOptions("each", count=1, ahead=1),
        StreamOptions("latest", count=1),
        StreamOptions("batch", count=EVENTS_PER_STEP_MAX, seconds=0.5, ahead=AHEAD_MAX, poison="skip"),
        StreamOptions("batch", count=5, ahead=5),
    ],
)
def test_options_within_their_limits_have_no_problem(options: StreamOptions) -> None:
    assert stream_problem(options) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (StreamOptions(count=0), "count must be in 1..1,000, not 0"),
        (StreamOptions(count=EVENTS_PER_STEP_MAX + 1), "count must be in 1..1,000, not 1,001"),
        (StreamOptions("each", count=2), "takes one event under the contract 'each', not 2"),
        (StreamOptions("latest"), "takes one event under the contract 'latest', not 100"),
        (StreamOptions(seconds=1.0), "only a batch has seconds, not 'available'"),
        (StreamOptions("batch", seconds=0.0), "more than 0 and at most 315360000, not 0.0"),
        (StreamOptions("batch", seconds=float("nan")), "more than 0 and at most 315360000, not nan"),
        (StreamOptions(count=50, ahead=49), "ahead must be in 50 (the events of a step)..100,000, not 49"),
        (StreamOptions("each", count=1, elements="each"), "no step handles events that are elements"),
        (StreamOptions(ahead=AHEAD_MAX + 1), "..100,000, not 100,001"),
    ],
)
def test_the_problem_names_the_option_its_limits_and_its_value(options: StreamOptions, problem: str) -> None:
    assert problem in (stream_problem(options) or "")
