"""The values over which instances are expanded, given to workers with their steps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.store import ends
from tests.store.harness import Query
from tests.store.scheduling.test_elements import Emitting, values
from tests.store.scheduling.test_expansion import OF_SOURCE, Maps
from tests.store.scheduling.test_maps_in_triggers import fire, listed, start, triggers_of
from tests.supervisor.tasks_harness import Tasks, clear

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.maps import MapSpec, Output, OwnValue, Source, Values, Zip, digest_of
from headgate.protocol.messages.steps import Emitted, StepSucceeded
from headgate.protocol.values import decode_value, encode_value
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


# --- the values that stand in the file -----------------------------------------------------------


def edit(maps: Maps, digest: str) -> None:
    """Have the values of ``each`` in the file be others."""
    source, each, total = maps.spec.tasks
    assert each.map is not None
    changed = msgspec.structs.replace(each, map=msgspec.structs.replace(each.map, given_digest=digest))
    maps.store.tasks.save_file(maps.epoch, "etl.py", [DagSpec("etl", tasks=(source, changed, total))])


def test_each_step_is_told_which_values_stood_in_the_file_when_its_task_was_expanded(
    store: Store, query: Query
) -> None:
    maps = Maps(store, query, Values(4), spec={"given_digest": "old", "window": 2})
    maps.source_leaves(None)
    edit(maps, "new")
    given = [task.given_digest for task in maps.dispatch()]
    assert given == ["old", "old"]
    for task in store.tasks.owned_running(maps.epoch):
        assert task.given_digest == "old"
        ends.fail(store.tasks, maps.epoch, task.id, task.token, "boom")
    maps.plan()
    assert [task.given_digest for task in maps.dispatch()] == ["old", "old"], "those that are made later, too"


@pytest.mark.parametrize("what", ["each", "each[0]"])
def test_what_a_user_clears_takes_the_values_that_stand_in_the_file_when_it_begins(
    store: Store, query: Query, what: str
) -> None:
    maps = Maps(store, query, Values(2), spec={"given_digest": "old"}, retries=1, retry_delay_s=0.0)
    maps.source_leaves(None)
    maps.run_all()
    edit(maps, "new")
    clear(store, maps.run, what)
    maps.plan()
    begun = maps.dispatch()
    assert {task.given_digest for task in begun} == {"new"}
    edit(maps, "newer")
    for task in begun:
        ends.fail(store.tasks, maps.epoch, task.id, task.token, "boom")
    store.tasks.retry_due(maps.epoch)
    assert {task.given_digest for task in maps.dispatch()} == {"new"}, "and keeps them"


@pytest.mark.parametrize("how", ["one", "only failed"])
def test_what_a_user_has_not_cleared_keeps_its_values(store: Store, query: Query, how: str) -> None:
    maps = Maps(store, query, Values(4), spec={"given_digest": "old", "window": 2})
    maps.source_leaves(None)
    for task in maps.dispatch():
        ends.succeed(store.tasks, maps.epoch, task.id, task.token)
    edit(maps, "new")
    if how == "one":
        clear(store, maps.run, "each[0]")
    else:
        store.tasks.clear_many(maps.run, (), only_failed=True)
    maps.plan()
    given = {task.map_index: task.given_digest for task in maps.dispatch()}
    assert given == ({0: "new", 2: "old"} if how == "one" else {2: "old", 3: "old"})


def test_what_is_expanded_anew_takes_its_values_though_it_was_cleared_alone_before(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(2), spec={"given_digest": "old"})
    maps.source_leaves(None)
    maps.run_all()
    clear(store, maps.run, "each[0]")
    edit(maps, "new")
    clear(store, maps.run, "each")
    maps.plan()
    edit(maps, "newer")
    assert {task.given_digest for task in maps.dispatch()} == {"new"}


def test_no_instance_begins_in_its_trigger_with_a_value_that_another_one_had(store: Store, query: Query) -> None:
    def each(*given: str) -> TaskSpec:
        digest = digest_of([encode_value(list(given), where="values")])
        spec = MapSpec(Values(2), window=1, given_digest=digest)
        return TaskSpec("each", "Op", upstream=("source",), map=spec, start_trigger=start(listed(*given)))

    around = TaskSpec("source", "Op"), TaskSpec("total", "Op", upstream=("each",))
    maps = Tasks(store, query, tasks=(around[0], each("a", "b"), around[1]))
    maps.plan()
    (task,) = maps.dispatch()
    ends.succeed(store.tasks, maps.epoch, task.id, task.token)
    maps.plan()
    assert triggers_of(maps) == {0: {"path": "x", "user": "a"}}
    store.tasks.save_file(maps.epoch, "etl.py", [DagSpec("etl", tasks=(around[0], each("new", "a"), around[1]))])
    fire(maps, 0)
    (task,) = maps.dispatch()
    ends.succeed(store.tasks, maps.epoch, task.id, task.token)
    maps.plan()
    (task,) = maps.dispatch()
    assert task.map_index == 1
    assert task.given_digest == digest_of([b'["a","b"]']), "a worker says what has become of the values"
