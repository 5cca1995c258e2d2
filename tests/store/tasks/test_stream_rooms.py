"""The room in the streams of tasks, by which triggers get credit, and who is told that there is more of it (I22)."""

from __future__ import annotations

import pytest
from tests.store.harness import Query, register
from tests.store.tasks.streams_harness import Streams, handled, stream_wait

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.steps import StepHandled
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
        notified: list[object] = []
        with monkeypatch.context() as patched:
            patched.setattr(changes, "notify", notified.append)
            tasks.end(task.token, StepHandled(handled(part)))
        told.append(bool(notified))
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
