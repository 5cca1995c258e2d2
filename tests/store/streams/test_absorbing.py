"""Streams whose events are elements of their task, without a step (I20, I24)."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from tests.store.harness import Clock, OpenStore, Query
from tests.store.tasks.streams_harness import Streams, stream_wait

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.steps import StepFailed
from headgate.protocol.messages.task_streams import ElementsOf, StreamOptions
from headgate.protocol.values import decode_value
from headgate.store.store import Store
from headgate.store.streams import absorbing

S = TaskState


class Absorbing(Streams):
    """A task that waits for events which are elements."""

    def wait(self, of: ElementsOf = "each", **options: Any) -> TaskState | None:
        return self.stream_it(stream_wait(StreamOptions(elements=of, **options), timeout_s=60.0))

    def elements(self) -> list[Any]:
        rows = self.query(
            "SELECT position, value FROM element WHERE task_instance_id = :id ORDER BY position", id=self.a
        )
        assert [row["position"] for row in rows] == list(range(len(rows)))
        return [decode_value(bytes(row["value"])) for row in rows]


def page(*rows: Any) -> dict[str, Any]:
    return {"page": 0, "rows": list(rows), "next": None}


def test_events_become_elements_in_the_transaction_that_stores_them(store: Store, query: Query) -> None:
    tasks = Absorbing(store, query)
    assert tasks.wait() is S.DEFERRED
    assert tasks.fire([1, 2], (), page({"id": 3})).moved_tasks
    assert (tasks.state(), tasks.elements(), tasks.place()) == (S.DEFERRED, [1, 2, {"id": 3}], (3, {}))
    assert tasks.dispatch() == [], "no worker has to do anything"
    again = msgspec.structs.replace(tasks.events(4)[0], sequence_index=2)
    assert store.store_slice(tasks.epoch, events=[again]).stored == 0
    assert tasks.fire(("four",), is_last=True).stored == 1
    assert (tasks.state(), tasks.elements()) == (S.SUCCESS, [1, 2, {"id": 3}, "four"])
    assert not tasks.is_open()
    assert query("SELECT count(*) AS n FROM task_instance WHERE token IS NOT NULL") == [{"n": 0}]


def test_a_payload_is_an_element_and_the_end_of_the_trigger_that_of_the_task(store: Store, query: Query) -> None:
    tasks = Absorbing(store, query)
    tasks.wait("event")
    tasks.fire("a", [1, 2])
    assert tasks.finish().moved_tasks
    assert (tasks.state(), tasks.elements()) == (S.SUCCESS, ["a", [1, 2]])


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ("x", "DAG 'etl', task 'a': .* event 1 of its trigger is neither: it is a str"),
        (["x" * 60_000], "element 2 needs 60,002 bytes; the limit is 49,152"),
    ],
)
def test_another_payload_fails_the_task_at_once(store: Store, query: Query, payload: Any, problem: str) -> None:
    tasks = Absorbing(store, query)
    tasks.wait()
    tasks.fire([1, 2])
    tasks.fire(payload)
    assert (tasks.state(), tasks.elements(), tasks.place()[0]) == (S.FAILED, [1, 2], 1)
    assert re.search(problem, str(tasks.row()["last_error"]))
    assert not tasks.is_open()


def test_what_comes_between_two_tries_is_taken_by_the_next_one_which_goes_on(store: Store, query: Query) -> None:
    tasks = Absorbing(store, query)
    tasks.wait()
    tasks.fire([1])
    tasks.finish("failed", error="the API is down")
    (task,) = tasks.dispatch()
    assert task.next_method == "__fail__"
    tasks.fire([2])  # of the old run, and late
    assert tasks.elements() == [1]
    tasks.end(task.token, StepFailed("the API is down"))
    tasks.let_go()
    tasks.retry()
    assert tasks.wait() is S.DEFERRED
    assert tasks.elements() == [1, 2]
    tasks.fire([3], is_last=True)
    assert (tasks.state(), tasks.elements()) == (S.SUCCESS, [1, 2, 3])


def test_many_events_are_taken_in_several_transactions(
    open_store: OpenStore, query: Query, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbing, "ELEMENTS_MAX", 4)
    with open_store(clock=clock) as store:
        tasks = Absorbing(store, query)
        tasks.wait()
        tasks.fire([1, 2, 3], [4], [5, 6, 7, 8, 9], [10], is_last=True)
        for so_far in (4, 9, 10):
            assert (tasks.elements(), tasks.state()) == (
                list(range(1, so_far + 1)),
                S.SUCCESS if so_far == 10 else S.DEFERRED,
            )
            assert store.tasks.begin_due_batches(tasks.epoch) == ([tasks.a] if so_far < 10 else [])


def test_a_page_takes_room_as_its_elements_do(store: Store, query: Query) -> None:
    tasks = Absorbing(store, query)
    tasks.wait(ahead=1000)
    room = store.tasks.stream_rooms([tasks.trigger_id])[tasks.trigger_id]
    assert (room.ahead, room.waiting, room.elements) == (1, 0, 0), "nobody knows yet how long a page is"
    tasks.fire(list(range(150)), list(range(50)))
    room = store.tasks.stream_rooms([tasks.trigger_id])[tasks.trigger_id]
    assert (room.ahead, room.waiting, room.elements) == (10, 0, 0)
