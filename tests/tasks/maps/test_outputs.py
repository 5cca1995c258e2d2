"""`MappedOutput`: what is below a mapped task gets the values of its instances as a sequence that is read by pages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from headgate.protocol.messages.queries import GetXComs, XComPage
from headgate.protocol.values import encode_value
from headgate.tasks import DAG, task
from headgate.tasks.maps.outputs import MappedOutput
from headgate.testing import run_task
from headgate.triggers.temporal import TimeDeltaTrigger

PAGE = 3


class Pages:
    """The XComs of a task with instances 1, 3, 5 and so on that have succeeded: the others have not."""

    def __init__(self, values: Sequence[Any], key: str = "k") -> None:
        encoded = [None if value is None else encode_value(value, where="value") for value in values]
        self.rows = [(2 * index + 1, value) for index, value in enumerate(encoded)]
        self.key = key
        self.asked: list[tuple[int, int]] = []
        self.counted = 0

    def __call__(self, query: GetXComs) -> XComPage:
        assert query.task_id == "each"
        self.asked.append((query.after, query.offset))
        self.counted += query.is_counted
        rows = [(index, value if query.key == self.key else None) for index, value in self.rows if index > query.after]
        count = len(self.rows) if query.is_counted else 0
        return XComPage(tuple(rows[query.offset :][: min(query.limit, PAGE)]), count, count)


def test_iteration_reads_a_page_after_the_other_and_gives_none_for_what_left_nothing() -> None:
    pages = Pages([10, None, {"a": (1,)}, 40, 50, 60, 70])
    values = MappedOutput("each", "k", pages)
    assert list(values) == [10, None, {"a": (1,)}, 40, 50, 60, 70]
    length, *asked = pages.asked
    assert (length, asked) == ((-1, 0), [(-1, 0), (5, 0), (11, 0), (13, 0)]), "a list asks for the length first"
    assert list(values) == [10, None, {"a": (1,)}, 40, 50, 60, 70], "a second time as well"
    assert (sum(MappedOutput("each", "k", Pages(range(10)))), 40 in values, 80 in values) == (45, True, False)


def test_its_length_is_asked_for_and_costs_no_value() -> None:
    pages = Pages(range(5))
    values = MappedOutput("each", "k", pages)
    assert (len(values), bool(values), repr(values)) == (5, True, "<5 values 'k' of 'each'>")
    assert not MappedOutput("each", "k", Pages([]))
    assert {asked for asked in pages.asked} == {(-1, 0)}


@pytest.mark.parametrize("index", [0, 2, 3, 6, -1, -7, -4])
def test_a_value_is_read_by_its_place(index: int) -> None:
    assert MappedOutput("each", "k", Pages(range(7)))[index] == range(7)[index]


@pytest.mark.parametrize("index", [7, -8, 100])
def test_a_place_beyond_the_values_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"<7 values 'k' of 'each'> has no value {index}"):
        MappedOutput("each", "k", Pages(range(7)))[index]


@pytest.mark.parametrize(
    "part",
    [slice(2, 5), slice(None), slice(None, None, 2), slice(-2, None), slice(5, 1, -2), slice(3, 100), slice(5, 2)],
)
def test_a_slice_is_a_list(part: slice) -> None:
    found = MappedOutput("each", "k", Pages(range(7)))[part]
    assert isinstance(found, list)
    assert found == list(range(7)[part])


def test_places_one_after_the_other_are_read_by_pages() -> None:
    pages = Pages(range(7))
    values = MappedOutput("each", "k", pages)
    assert [values[index] for index in range(7)] == list(range(7))
    assert len(pages.asked) == 4, "of 1, 3 and 3 values; the first twice, because others are missing before it"
    assert pages.counted == 2, "those of the first"


def test_not_all_instances_are_counted_for_each_page() -> None:
    pages = Pages(range(100))
    values = MappedOutput("each", "k", pages)
    assert [sum(values), len(list(values)), len(values[:]), len(values.missing)] == [4950, 100, 100, 100]
    assert len(pages.asked) > 100
    assert pages.counted == 5, "for the lengths of the list and of the slice, for its first value, for what is missing"


def test_instances_without_a_value_are_missing() -> None:
    assert MappedOutput("each", "k", Pages(range(4))).missing == [0, 2, 4, 6]
    assert MappedOutput("each", "k", Pages([])).missing == []


# --- in a task -----------------------------------------------------------------------------------


def reduced(function: Any, values: list[Any]) -> Any:
    with DAG("d"):
        each = task(lambda x: x).override(task_id="each").expand(x=[1, 2, 3])
        output = task(function).override(task_id="reduce")(each)
    return run_task(output, xcoms={"each": values})


def test_a_task_below_gets_the_values_and_none_of_an_instance_that_returned_none() -> None:
    assert reduced(lambda values: [len(values), values[1], list(values)], [1, None, 3]).value == [3, None, [1, None, 3]]


def test_what_is_pulled_of_a_mapped_task_is_the_same() -> None:
    def pull(values: Any, ti: Any) -> Any:
        pulled = ti.xcom_pull("each")
        return [isinstance(pulled, MappedOutput), list(pulled), list(ti.xcom_pull("each", "other"))]

    assert reduced(pull, [4, 5]).value == [True, [4, 5], []]


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda values: values, "xcom 'return_value' is"),
        (lambda values: {"all": [values]}, "xcom 'return_value'['all'][0] is"),
        (lambda values, ti: ti.xcom_push("k", values), "xcom 'k' is"),
    ],
)
def test_values_that_are_returned_by_mistake_fail_with_what_to_return(function: Any, place: str) -> None:
    result = reduced(function, [1, 2])
    assert result.state == "failed"
    assert f"{place} a <class 'headgate.tasks.maps.outputs.MappedOutput'>, which is read by pages: " in result.error
    assert result.error.endswith("give list(values)")


def test_so_do_values_that_a_deferral_is_to_keep() -> None:
    def wait(values: Any, task: Any) -> None:
        task.defer(trigger=TimeDeltaTrigger(timedelta(hours=1)), method_name="execute", kwargs={"values": values})

    result = reduced(wait, [1, 2])
    assert (result.state, result.error.endswith("give list(values)")) == ("failed", True)
