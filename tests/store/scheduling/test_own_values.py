"""The values over which instances are expanded, given to workers with their steps."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.scheduling.test_elements import Emitting, values
from tests.store.scheduling.test_expansion import OF_SOURCE, Maps
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.maps import MapSpec, Output, OwnValue, Source, Values, Zip
from headgate.protocol.messages.steps import Emitted, StepSucceeded
from headgate.protocol.values import decode_value
from headgate.store.store import Store


def own(maps: Tasks) -> list[tuple[str, str | None, int, Any] | None]:
    """Return the own values of the instances that are dispatched now, decoded, by index."""
    given = sorted(maps.dispatch(limit=9), key=lambda task: task.map_index)
    found = [task.own for task in given]
    return [None if one is None else (one.task_id, one.key, one.length, decode_value(one.value)) for one in found]


@pytest.mark.parametrize(
    ("over", "left", "found"),
    [
        (OF_SOURCE, ["a", None], [("source", "return_value", 2, "a"), ("source", "return_value", 2, None)]),
        (OF_SOURCE, ("a",), [("source", "return_value", 1, "a")]),
        (OF_SOURCE, {"a": 1}, [("source", "return_value", 1, ("a", 1))]),
        (Zip((OF_SOURCE, Values(1))), ["a"], [None]),
        (Values(1), ["a"], [None]),
    ],
)
def test_an_instance_takes_its_item_of_what_a_task_has_left(
    store: Store, query: Query, over: Source, left: Any, found: Any
) -> None:
    maps = Maps(store, query, over)
    maps.source_leaves(left)
    assert own(maps) == found


def test_an_instance_takes_its_element(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.emit(source, 0, 10, 11)
    assert own(maps) == [("source", None, 2, 10), ("source", None, 2, 11)]
    maps.end(source, StepSucceeded(emitted=Emitted(2, values(12))))
    assert own(maps) == [("source", None, 3, 12)]


def test_the_steps_of_a_dispatch_in_doubt_have_their_values_too(store: Store, query: Query) -> None:
    maps = Maps(store, query, OF_SOURCE)
    maps.source_leaves(["a"])
    assert own(maps) == [("source", "return_value", 1, "a")]
    (task,) = store.tasks.owned_running(maps.epoch)
    assert task.own == OwnValue("source", "return_value", 1, b'"a"')


@pytest.mark.parametrize(
    ("fails", "left", "found"),
    [
        ((), lambda index: 10 + index, [("each", "return_value", 2, 10), ("each", "return_value", 2, 11)]),
        ((), None, [("each", "return_value", 2, None), ("each", "return_value", 2, None)]),
        # The first value is that of the second instance: a worker finds it.
        ((0,), lambda index: 10 + index, [None]),
    ],
)
def test_over_a_map_of_which_none_is_missing_it_is_what_its_instance_has_left(
    store: Store, query: Query, fails: tuple[int, ...], left: Any, found: Any
) -> None:
    maps = Maps.__new__(Maps)
    over = MapSpec(Output("each", "return_value"))
    tasks = (
        TaskSpec("source", "Op"),
        TaskSpec("each", "Op", upstream=("source",), map=MapSpec(OF_SOURCE)),
        TaskSpec("then", "Op", upstream=("each",), trigger_rule="all_done", map=over),
    )
    Tasks.__init__(maps, store, query, tasks=tasks)
    maps.source_leaves(["a", "b"])
    maps.run_some(2, fails=fails, value=left)
    maps.plan()
    assert own(maps) == found


def test_a_list_that_is_not_the_one_that_was_counted_is_left_to_the_worker(store: Store, query: Query) -> None:
    maps = Maps(store, query, OF_SOURCE)
    maps.source_leaves(["a", "b"])
    query("UPDATE xcom SET value = :value", value=b'["c"]')
    assert own(maps) == [None, None]
