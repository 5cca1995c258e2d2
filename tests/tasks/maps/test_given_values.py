"""The values that stand in the DAG file: an instance runs over those that its task was expanded over, or not at all."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.tasks.maps.test_instances import error_of, f, source

from headgate.protocol.messages import maps
from headgate.protocol.messages.steps import StepSucceeded
from headgate.protocol.values import encode_value
from headgate.tasks import DAG, BaseOperator, task
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step
from headgate.tasks.maps.sources import source_digest

MOMENT = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def digest_of_spec(operator: BaseOperator) -> str:
    assert operator.dag is not None
    (spec,) = (one.map for one in operator.dag.to_spec().tasks if one.task_id == operator.task_id)
    assert spec is not None
    return spec.given_digest


class _Formless:
    """Has no stored form, and another address in each process."""


def shops(*names: str) -> Any:
    """Dicts that have the output of a task in them as well."""
    return lambda: [{"shop": name, "to": source()} for name in names]


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        ((1, 2), [1, 2], True),
        (range(3), range(3), True),
        (range(3), [0, 1, 2], True),
        (range(3), range(1, 4), False),
        ([1, 2], [1, 3], False),
        (["12", "3"], ["1", "23"], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ([{3, 1, 2}], [{2, 3, 1}], True),
        ([_Formless(), 1], [_Formless(), 1], True),
        ([_Formless(), 1], [_Formless(), 2], False),
        ([_Formless()], [object()], False),
        (shops("a", "b"), shops("a", "b"), True),
        (shops("a", "b"), shops("b", "a"), False),
        ([[(_Formless(), 1)]], [[(_Formless(), 2)]], False),
    ],
)
def test_an_instance_runs_only_over_the_values_in_the_file_that_its_task_was_expanded_over(
    before: Any, after: Any, *, is_same: bool
) -> None:
    """Of another file; of the same one see below."""
    told, now = digest_over(before, "old text"), digest_over(after, "new text")
    assert outcome_with(told, over=after, text="new text") is is_same
    assert (told.partition(".")[0] == now.partition(".")[0]) is is_same


@pytest.mark.parametrize(
    ("before", "after", "is_refused"),
    [
        (["a", "b", "c"], ["c", "a", "b"], True),  # of a set
        ([MOMENT, MOMENT + DAY], [MOMENT + DAY, MOMENT + 2 * DAY], False),  # the last two days, a day later
        (list(range(2000)), list(range(1, 2001)), True),  # too many to be compared in any order
    ],
)
def test_a_file_that_was_not_changed_may_follow_the_calendar_and_no_set(
    before: Any, after: Any, *, is_refused: bool
) -> None:
    assert outcome_with(digest_over(before, "text"), over=after, text="text") is not is_refused


def test_a_range_has_the_digest_of_the_values_that_triggers_begin_with() -> None:
    values = [encode_value(value, where="v") for value in range(3)]
    assert digest_over(range(3), "text").partition(".")[0] == maps.digest_of([b"[" + b",".join(values) + b"]"])


@task(task_id="f")
def takes(a: Any, b: str) -> None:
    pass


def expanded(over: Any, text: str) -> BaseOperator:
    """Return a task of a file with this text."""
    token = source_digest.set(text.replace(" ", ""))
    try:
        with DAG("d"):
            values = over() if callable(over) else over
            operator: BaseOperator = takes.expand(a=values, b=source().map(str)).operator
    finally:
        source_digest.reset(token)
    return operator


def digest_over(over: Any, text: str) -> str:
    return digest_of_spec(expanded(over, text))


def outcome_with(told: str, *, over: Any, text: str) -> bool:
    """Whether an instance runs whose task was expanded over values with this digest."""
    now = expanded(over, text)
    context = make_context(now, run_id="r", map_index=0, given_digest=told, read_xcom=lambda *_: b"[1]")
    outcome = run_step(now, context)
    if isinstance(outcome, StepSucceeded):
        return True
    assert error_of(outcome).startswith(
        "RuntimeError: the values for the task 'f' in the DAG file are not those that it was expanded over"
    )
    return False


def test_without_values_in_the_file_there_is_nothing_to_compare() -> None:
    with DAG("d"):
        assert digest_of_spec(f.expand(a=source()).operator) == ""
