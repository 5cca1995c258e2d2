"""The room in the streams of tasks, by which triggers get credit, and who is told that there is more of it (I22)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import Query, register
from tests.store.tasks.streams_harness import Streams, handled, stream_wait

from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.maps import Elements, MapSpec
from headgate.protocol.messages.steps import Emitted, StepHandled
from headgate.protocol.messages.task_streams import StreamOptions
from headgate.store.db import changes
from headgate.store.store import Store
from headgate.store.tasks.stream_steps import Room


def test_the_room_is_counted_by_the_events_that_are_stored_and_not_handled(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions(count=2, ahead=5)))
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(5, 0)}
    tasks.fire(1, 2, 3)
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(5, 3)}
    assert tasks.handle() is TaskState.SCHEDULED
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(5, 1)}
    tasks.fire(*range(10))
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(5, 5)}, "no more are counted"


def test_a_trigger_that_feeds_no_stream_has_no_room(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    watcher = store.add_watcher("w", "a.B", {})
    tasks.stream_it()
    assert store.tasks.stream_rooms([watcher, 4711]) == {}


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_another_owner_of_the_trigger_is_told_whenever_a_quarter_of_what_may_wait_is_handled(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("each", count=1, ahead=8)))
    owner = tasks.epoch
    if is_elsewhere:
        store.release_triggers(tasks.epoch, [tasks.trigger_id])
        owner = register(store)
        assert tasks.claim(owner) == [tasks.trigger_id]
    tasks.fire(*range(6), epoch=owner)
    told: list[bool] = []
    for _ in range(6):
        task, part = tasks.take()
        with monkeypatch.context() as patched:
            patched.setattr(changes, "notify", lambda _, rings: told.append("changes" in rings))
            tasks.end(task.token, StepHandled(handled(part)))
    assert told == [is_elsewhere and number % 2 == 0 for number in range(1, 7)]


def test_the_room_says_that_a_step_takes_only_the_newest_event(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("latest", count=1, ahead=5)))
    tasks.fire(1, 2, 3)
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(5, 3, is_latest=True)}
    tasks.handle()
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(5, 0, is_latest=True)}


def test_the_room_says_how_long_a_batch_is(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("batch", count=4, ahead=5)))
    tasks.fire(1)
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(5, 1, 4)}


def emitting(store: Store, query: Query, **each: Any) -> Streams:
    """A task with a stream of ``ahead=9``, whose handler has emitted five elements; ``each`` is expanded over them."""
    over = TaskSpec("each", "Op", upstream=("a",), map=MapSpec(Elements("a"), window=2), **each)
    tasks = Streams(store, query, tasks=(TaskSpec("a", "Op", emits=True), over))
    tasks.stream_it(stream_wait(StreamOptions(count=2, ahead=9)))
    tasks.fire(1)
    task, part = tasks.take()
    tasks.end(task.token, StepHandled(handled(part), emitted=Emitted(0, (b"1", b"2", b"3", b"4", b"5"))))
    return tasks


def test_elements_take_room_until_instances_of_them_are_made(store: Store, query: Query) -> None:
    tasks = emitting(store, query)
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(9, 0, elements=5)}
    tasks.plan()
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(9, 0, elements=3)}
    for _ in range(2):
        for task in tasks.dispatch(limit=2):
            assert ends.succeed(store.tasks, tasks.epoch, task.id, task.token)
        tasks.plan()
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(9, 0)}


def test_elements_over_which_nothing_is_expanded_before_the_end_take_none(store: Store, query: Query) -> None:
    """Its trigger would stand, and the end never come."""
    tasks = emitting(store, query, trigger_rule="one_success")
    tasks.plan()
    assert store.tasks.stream_rooms([tasks.trigger_id]) == {tasks.trigger_id: Room(9, 0)}
