"""One state, and one line, for a mapped task: never that of its own row alone."""

from __future__ import annotations

import pytest

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import Batch, Concat, Elements, Output, Product, Source, Values, Worklist, Zip
from headgate.scheduling.map_states import _FIRST, counts_text, source_text, state_of, state_with
from headgate.scheduling.states import UNFINISHED


def test_every_state_has_its_place_and_those_that_are_unfinished_come_first() -> None:
    assert sorted(_FIRST) == sorted(TaskState)
    assert set(_FIRST[: len(UNFINISHED)]) == UNFINISHED
    for state in TaskState:
        assert state_of([state]) is state


@pytest.mark.parametrize(
    ("own", "instances", "state"),
    [
        ("none", "", "none"),
        ("none", "success", "none"),  # more are to be made
        ("none", "scheduled running success failed", "running"),
        ("success", "scheduled success failed", "scheduled"),
        ("success", "up_for_retry failed", "up_for_retry"),
        ("success", "success", "success"),
        ("success", "success failed upstream_failed skipped", "failed"),
        ("success", "success upstream_failed skipped", "upstream_failed"),
        ("success", "success skipped removed", "success"),
        ("success", "skipped removed", "skipped"),
        ("success", "", "success"),  # a user has marked it
        ("success", "removed", "success"),
        ("skipped", "removed", "skipped"),  # it has no values any more
        ("skipped", "", "skipped"),
        ("failed", "", "failed"),
        ("failed", "success", "failed"),  # a user has cancelled its run, and the rest is not made
        ("upstream_failed", "", "upstream_failed"),
    ],
)
def test_a_mapped_task_has_the_state_that_matters_of_all_its_rows(own: str, instances: str, state: str) -> None:
    assert state_with(TaskState(own), map(TaskState, instances.split())).value == state


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Values(1), "1 value"),
        (Values(3000), "3,000 values"),
        (Output("days", "return_value"), "days"),
        (Output("days", "k"), "days (k)"),
        (Elements("reads"), "elements of reads"),
        (Worklist("each", 2, 1000), "a worklist of 2, at most 1,000"),
        (Worklist("gate", 1, 9, is_loop=True), "a loop, at most 9 iterations"),
        (Product((Values(2), Zip((Values(1), Output("a", "return_value"))))), "2 values x zip(1 value, a)"),
        (Batch(Concat((Values(2), Elements("b"))), 5), "batches of 5 of 2 values + elements of b"),
    ],
)
def test_what_a_task_is_expanded_over_is_told_as_text(source: Source, text: str) -> None:
    assert source_text(source) == text


@pytest.mark.parametrize(
    ("counts", "length", "text"),
    [
        ({"success": 9000, "failed": 3, "scheduled": 250, "running": 6}, 12345, "9,000 success, 3 failed, 256 open"),
        ({"none": 2}, None, "2 open"),
        ({}, 7, "0"),
        ({}, None, "0"),
        ({"success": 2, "removed": 1}, 2, "2 success, 1 removed"),
    ],
)
def test_the_instances_are_told_in_one_line(counts: dict[str, int], length: int | None, text: str) -> None:
    assert counts_text(counts, length) == text + ("" if length is None else f" of {length:,}")
