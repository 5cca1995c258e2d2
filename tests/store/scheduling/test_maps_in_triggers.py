"""Mapped tasks whose instances begin in their triggers, each with its own value, and without a worker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Query
from tests.store.scheduling.test_elements import Emitting
from tests.store.scheduling.test_expansion import OF_SOURCE, Maps
from tests.supervisor.tasks_harness import WAIT, Tasks, clear, event_of

from headgate.protocol.messages.dags import StartTrigger
from headgate.protocol.messages.maps import Elements, Values
from headgate.protocol.messages.runner import FinishedTrigger
from headgate.protocol.messages.start_triggers import Listed, OwnArguments, OwnSource
from headgate.protocol.messages.steps import StepSucceeded
from headgate.protocol.values import decode_value, encode_value
from headgate.store.store import Store

OF_ELEMENTS = Elements("source")


def start(source: OwnSource, *names: str) -> StartTrigger:
    """Return the start trigger of instances whose value has these names."""
    own = OwnArguments(names or ("user",), source)
    return StartTrigger(WAIT.classpath, WAIT.kwargs, WAIT.next_method, WAIT.next_kwargs, 60.0, own=own)


def listed(*values: Any) -> Listed:
    return Listed(tuple(encode_value(value, where="value") for value in values))


class Waits(Maps):
    """A run in which the instances of ``each`` begin in their triggers."""

    def __init__(self, store: Store, query: Query, start: StartTrigger, **how: Any) -> None:
        over = Values(len(start.own.source.values)) if start.own and isinstance(start.own.source, Listed) else OF_SOURCE
        super().__init__(store, query, over, start_trigger=start, **how)


def triggers_of(maps: Tasks) -> dict[int, dict[str, Any]]:
    """Return the arguments of the triggers that instances wait for, by index."""
    maps.store.claim_triggers(maps.epoch, limit=100, queues=QUEUES)
    rows = maps.query("SELECT map_index, trigger_id FROM task_instance WHERE state = 'deferred'")
    kwargs = {one.id: decode_value(one.kwargs or b"") for one in maps.store.claimed_triggers(maps.epoch)}
    return {row["map_index"]: kwargs[row["trigger_id"]] for row in rows}


def fire(maps: Tasks, index: int) -> None:
    (row,) = maps.query("SELECT trigger_id FROM task_instance WHERE map_index = :index", index=index)
    maps.store.store_slice(maps.epoch, events=[event_of(row["trigger_id"])])


@pytest.mark.parametrize("left", [["a", {"b": (1,)}, None], ("a", {"b": (1,)}, None)])
def test_each_instance_begins_in_a_trigger_with_its_item_of_a_list(store: Store, query: Query, left: Any) -> None:
    maps = Waits(store, query, start(OF_SOURCE))
    maps.source_leaves(left)
    assert maps.instances() == ["deferred"] * 3
    assert triggers_of(maps) == {index: {"path": "x", "user": value} for index, value in enumerate(left)}
    assert maps.dispatch() == [], "no worker is needed"


def test_each_instance_begins_with_a_pair_of_a_dict(store: Store, query: Query) -> None:
    maps = Waits(store, query, start(OF_SOURCE, "user", "path"))
    maps.source_leaves({"a": 1, "b": {2}})
    pairs = [("a", 1), ("b", {2})]
    assert triggers_of(maps) == {index: {"path": pair, "user": pair} for index, pair in enumerate(pairs)}


def test_each_instance_begins_with_its_value_of_the_file(store: Store, query: Query) -> None:
    maps = Waits(store, query, start(listed("a", 2)))
    maps.source_leaves(None)
    assert triggers_of(maps) == {0: {"path": "x", "user": "a"}, 1: {"path": "x", "user": 2}}


def test_instances_begin_with_elements_as_they_come(store: Store, query: Query) -> None:
    maps = Emitting(store, query, start_trigger=start(OF_ELEMENTS))
    source = maps.begin()
    maps.emit(source, 0, 10)
    assert triggers_of(maps) == {0: {"path": "x", "user": 10}}
    maps.emit(source, 1, 11, 12)
    assert triggers_of(maps) == {index: {"path": "x", "user": index + 10} for index in range(3)}
    maps.end(source, StepSucceeded())
    for index in range(3):
        fire(maps, index)
    assert maps.run_some(9) == [0, 1, 2]
    maps.run_all()
    assert maps.ended() == "success"


def test_without_arguments_of_their_own_all_begin_in_the_same_trigger(store: Store, query: Query) -> None:
    maps = Waits(store, query, msgspec.structs.replace(start(OF_SOURCE), own=None))
    maps.source_leaves([1, 2])
    assert triggers_of(maps) == {0: {"path": "x"}, 1: {"path": "x"}}


def test_an_event_of_its_trigger_has_an_instance_resumed_and_no_other(store: Store, query: Query) -> None:
    maps = Waits(store, query, start(OF_SOURCE))
    maps.source_leaves(["a", "b"])
    triggers_of(maps)
    fire(maps, 1)
    (task,) = maps.dispatch()
    assert (task.map_index, task.next_method, task.try_number) == (1, WAIT.next_method, 1)
    assert maps.instances() == ["deferred", "running"]


def test_no_more_than_the_window_wait_at_once(store: Store, query: Query) -> None:
    maps = Waits(store, query, start(OF_SOURCE), spec={"window": 2})
    maps.source_leaves(["a", "b", "c"])
    assert maps.instances() == ["deferred", "deferred"]
    triggers_of(maps)
    fire(maps, 0)
    maps.run_some()
    assert maps.instances() == ["success", "deferred", "deferred"]
    assert triggers_of(maps)[2] == {"path": "x", "user": "c"}


def test_the_next_try_of_an_instance_begins_in_its_trigger_as_well(store: Store, query: Query) -> None:
    maps = Waits(store, query, start(OF_SOURCE), retries=1, retry_delay_s=0.0)
    maps.source_leaves(["a", "b"])
    first = triggers_of(maps)
    (row,) = maps.query("SELECT trigger_id FROM task_instance WHERE map_index = 1")
    maps.store.store_slice(maps.epoch, finished=[FinishedTrigger(row["trigger_id"], "run", "failed", 0, "boom")])
    assert maps.run_some(fails=(1,)) == [1]
    assert len(store.tasks.retry_due(maps.epoch)) == 1
    assert triggers_of(maps) == first
    (again,) = maps.query("SELECT try_number, trigger_id FROM task_instance WHERE map_index = 1")
    assert again["trigger_id"] != row["trigger_id"]


@pytest.mark.parametrize("left", [["c"], ["c", "d", "e"], 3, None])
def test_an_instance_without_its_value_gets_a_worker_that_says_so(store: Store, query: Query, left: Any) -> None:
    # The task that left the list has run again, and the mapped one has not.
    maps = Waits(store, query, start(OF_SOURCE), retries=1, retry_delay_s=0.0)
    maps.source_leaves(["a", "b"])
    triggers_of(maps)
    fire(maps, 1)
    (task,) = maps.dispatch()
    clear(store, maps.run, "source")
    if left is not None:
        maps.source_leaves(left)
    ends.fail(store.tasks, maps.epoch, task.id, task.token, "boom")
    assert len(store.tasks.retry_due(maps.epoch)) == 1
    assert maps.instances()[1] == "scheduled"
    (again,) = [one for one in maps.dispatch() if one.task_id == "each"]
    assert (again.map_index, again.next_method, again.try_number) == (1, None, 2)


def test_an_instance_that_is_cleared_begins_with_its_value_again(store: Store, query: Query) -> None:
    maps = Waits(store, query, start(OF_SOURCE))
    maps.source_leaves(["a", "b"])
    triggers_of(maps)
    for index in (0, 1):
        fire(maps, index)
    maps.run_some(9)
    maps.run_all()
    clear(store, maps.run, "source", "each", "total")
    maps.source_leaves(["c", "d"])
    assert triggers_of(maps) == {0: {"path": "x", "user": "c"}, 1: {"path": "x", "user": "d"}}
