"""Short tasks are given to busy workers, and what no worker has begun goes back without a lost try."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.supervisor.tasks.core_harness import Scene
from tests.supervisor.tasks_harness import S, Tasks, event_of, task_states

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.steps import StepSucceeded
from headgate.scheduling.bundles import BUNDLE_S, Places, Room, StepKind, StepTimes
from headgate.store.store import Store
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import LOADED_AGAIN_S

SHORT_S = 0.001


def times_of(*names: str, took_s: float = SHORT_S) -> StepTimes:
    times = StepTimes()
    for name in names:
        times.note(StepKind("etl", name, is_resumed=False), took_s)
    return times


def running(scene: Scene) -> set[str]:
    return {step.task_id for step in scene.executor.steps.values()}


# --- the core ------------------------------------------------------------------------------------


def test_a_task_that_was_short_is_given_to_a_busy_worker_and_its_first_step_is_not(store: Store, query: Query) -> None:
    scene = Scene(store, query, "a", "b", workers=1, retries=1)
    scene.executor.behind = [Room(5, BUNDLE_S)]
    token = scene.begin()
    assert running(scene) == {"a"}, "nothing is known of b"
    scene.executor.finish(StepSucceeded(), token, took_s=SHORT_S)
    scene.step()
    scene.tasks.clear_it()
    scene.tasks.plan()
    scene.core.notify()
    scene.step()
    assert running(scene) == {"a", "b"}
    assert [scene.executor.expected[token] for token in scene.executor.steps] == [None, SHORT_S]


def test_no_busy_worker_gets_more_while_an_outcome_is_not_stored(store: Store, query: Query) -> None:
    names = [f"t{number}" for number in range(9)]
    scene = Scene(store, query, *names, workers=1, step_times=times_of(*names), retries=1)
    scene.begin()
    assert len(scene.executor.steps) == 2
    scene.executor.finish(StepSucceeded())
    scene.executor.behind = [Room(5, BUNDLE_S)]
    scene.store.fails = "store_ends"
    scene.step()
    assert scene.core._places().most == 0


def test_a_returned_step_is_given_again_in_the_same_try(store: Store, query: Query) -> None:
    scene = Scene(store, query, workers=1)
    token = scene.begin()
    scene.executor.give_back(token)
    scene.step()
    (again,) = scene.executor.steps.values()
    assert (again.task_id, again.try_number) == ("a", 1)
    assert again.token != token
    assert scene.logs.events() == []
    scene.executor.finish(StepSucceeded())
    scene.step()
    assert scene.tasks.state() is S.SUCCESS


def test_a_step_whose_dag_file_is_not_there_is_logged_and_waits(store: Store, query: Query) -> None:
    scene = Scene(store, query, workers=1)
    token = scene.begin()
    scene.executor.give_up(token, "the DAG file etl.py is not there")
    scene.step()
    assert scene.executor.steps == {}, "no worker tries again at once"
    assert (scene.tasks.state(), scene.tasks.row()["try_number"]) == (S.SCHEDULED, 1)
    assert scene.logs.events() == ["it could not begin, and is tried again, in the same try"]


def test_a_step_that_was_cleared_before_it_began_begins_anew(store: Store, query: Query) -> None:
    scene = Scene(store, query, workers=1)
    token = scene.begin()
    scene.tasks.clear_it()
    assert scene.tasks.state() is S.RESTARTING
    scene.executor.give_back(token)
    scene.step()
    assert scene.tasks.state() is S.NONE


# --- the store -----------------------------------------------------------------------------------


def test_what_was_not_begun_has_its_try_and_its_whole_time_again(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    tasks = Tasks(open_store(clock=clock), query, execution_timeout_s=60.0, retries=2)
    token = tasks.run_it()
    clock.advance(30.0)
    assert ends.give_back(tasks.store.tasks, tasks.epoch, tasks.a, token) is S.SCHEDULED
    row = tasks.row()
    assert (row["try_number"], row["tries_max"], row["token"], row["triggerer_id"]) == (1, 3, None, None)
    assert (row["started_at"], row["deadline"]) == (None, None)
    (task,) = tasks.dispatch()
    assert (task.try_number, task.remaining_s) == (1, 60.0)


def test_what_was_resumed_and_not_begun_goes_on_with_the_time_of_its_try(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    tasks = Tasks(open_store(clock=clock), query, execution_timeout_s=60.0)
    _, trigger_id = tasks.defer_it()
    tasks.store.store_slice(tasks.epoch, events=[event_of(trigger_id, "fired")])
    (task,) = tasks.dispatch()
    before = tasks.row()
    clock.advance(20.0)
    assert ends.give_back(tasks.store.tasks, tasks.epoch, tasks.a, task.token) is S.SCHEDULED
    after = tasks.row()
    assert [after[name] for name in ("started_at", "deadline", "next_method", "event_id")] == [
        before[name] for name in ("started_at", "deadline", "next_method", "event_id")
    ]
    (again,) = tasks.dispatch()
    assert (again.next_method, again.event, again.remaining_s) == (task.next_method, task.event, 40.0)


@pytest.mark.parametrize("is_endless", [False, True])
def test_what_could_not_begin_is_given_to_a_worker_again_after_a_while(
    open_store: OpenStore, query: Query, is_endless: bool
) -> None:
    clock = Clock()
    tasks = Tasks(open_store(clock=clock), query, endless=is_endless)
    why = "the DAG file etl.py is not there"

    def given() -> list[TaskToRun]:
        return tasks.store.tasks.dispatch(tasks.epoch, limit=1, queues=QUEUES, endless=1).tasks

    tasks.plan()
    since = tasks.row()["scheduled_at"]
    (task,) = given()
    for _ in range(2):
        assert ends.give_back(tasks.store.tasks, tasks.epoch, tasks.a, task.token, why) is S.SCHEDULED
        assert (tasks.row()["last_error"], tasks.row()["scheduled_at"]) == (why, since), "it has waited since then"
        clock.advance(LOADED_AGAIN_S - 1.0)
        assert given() == []
        clock.advance(1.0)
        (task,) = given()
        assert task.try_number == 1
    assert ends.succeed(tasks.store.tasks, tasks.epoch, tasks.a, task.token)
    assert tasks.row()["last_error"] is None


def test_what_was_resumed_and_could_not_begin_keeps_its_event(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    tasks = Tasks(open_store(clock=clock), query)
    _, trigger_id = tasks.defer_it()
    tasks.store.store_slice(tasks.epoch, events=[event_of(trigger_id, "fired")])
    (task,) = tasks.dispatch()
    ends.give_back(tasks.store.tasks, tasks.epoch, tasks.a, task.token, "no file")
    clock.advance(LOADED_AGAIN_S)
    (again,) = tasks.dispatch()
    assert (again.next_method, again.event) == (task.next_method, task.event)


def test_what_was_cleared_before_it_could_begin_need_not_wait(open_store: OpenStore, query: Query) -> None:
    tasks = Tasks(open_store(clock=Clock()), query)
    token = tasks.run_it()
    ends.give_back(tasks.store.tasks, tasks.epoch, tasks.a, token, "no file")
    tasks.clear_it()
    tasks.plan()
    assert len(tasks.dispatch()) == 1


def test_a_step_that_is_not_the_tasks_any_more_returns_nothing(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    token = tasks.run_it()
    assert ends.give_back(store.tasks, tasks.epoch, tasks.a, "another") is None
    assert tasks.state() is S.RUNNING
    ends.succeed(store.tasks, tasks.epoch, tasks.a, token)
    assert ends.give_back(store.tasks, tasks.epoch, tasks.a, token) is None
    assert tasks.state() is S.SUCCESS


def test_all_that_a_dead_supervisor_had_given_away_has_lost_its_try(store: Store, query: Query) -> None:
    """The database cannot say which of them had begun: a worker goes on before its outcome is stored."""
    names = ("a", "b", "c")
    tasks = Tasks(store, query, tasks=tuple(TaskSpec(name, "Op", retries=1) for name in names))
    tasks.plan()
    assert len(tasks.dispatch()) == 3
    other = tasks.register()
    store.fence_triggerers(other, dead=[tasks.epoch])
    store.tasks.adopt(other)
    assert set(task_states(store, tasks.run).values()) == {S.UP_FOR_RETRY}


@pytest.mark.parametrize(("free", "given"), [(0, []), (1, ["long"]), (2, ["long", "a", "b"])])
def test_a_long_task_is_not_passed_by_short_ones_that_are_less_urgent(
    store: Store, query: Query, free: int, given: list[str]
) -> None:
    """A worker that always gets short ones would never be free for it."""
    specs: Any = (
        TaskSpec("long", "Op", priority_weight=9, retries=1),
        TaskSpec("a", "Op", retries=1),
        TaskSpec("b", "Op", retries=1),
    )
    tasks = Tasks(store, query, tasks=specs)
    tasks.plan()
    places = Places(times_of("a", "b"), free, [])
    found = store.tasks.dispatch(tasks.epoch, limit=10, queues=QUEUES, places=places)
    assert [task.task_id for task in found.tasks] == given


def test_given_tasks_use_the_slots_of_their_pool(store: Store, query: Query) -> None:
    store.tasks.set_pool("p", 2)
    tasks = Tasks(store, query, tasks=tuple(TaskSpec(name, "Op", pool="p", retries=1) for name in "abc"))
    tasks.plan()
    places = Places(times_of(*"abc"), 1, [])
    assert len(store.tasks.dispatch(tasks.epoch, limit=10, queues=QUEUES, places=places).tasks) == 2
