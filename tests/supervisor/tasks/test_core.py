"""The supervisor's part for tasks: a real store, and an executor that does what the test says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.supervisor.tasks.core_harness import (
    DEFER,
    Scene,
)
from tests.supervisor.tasks_harness import S, body, clear, event_of, task_states

from headgate.protocol.messages.dags import XCOM_BYTES_MAX
from headgate.protocol.messages.queries import EncodedValue, GetXCom, Response
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.messages.steps import StepFailed, StepOutcome, StepSkipped, StepSucceeded, XCom
from headgate.protocol.messages.task_streams import StreamEvent, StreamPart
from headgate.store.errors import LeaseLost, RowsRefused
from headgate.store.ids import Epoch, TryName
from headgate.store.store import Store
from headgate.store.tasks.outcomes import Adopted, StepEnd
from headgate.supervisor.executors.base import StepQuery
from headgate.supervisor.tasks.scheduler import SchedulerStep


@pytest.fixture
def scene(store: Store, query: Query) -> Scene:
    return Scene(store, query)


def test_a_scheduled_task_is_given_to_a_worker_with_all_it_takes(scene: Scene) -> None:
    token = scene.begin()
    step = scene.executor.steps[token]
    assert (step.dag_id, step.run_id, step.task_id, step.try_number) == ("etl", "r1", "a", 1)
    assert step.file == "etl.py"
    assert scene.tasks.state() is S.RUNNING
    assert scene.logs.events() == [], "the executor says when it has begun"


def test_no_more_is_given_out_than_there_is_room_for(store: Store, query: Query) -> None:
    scene = Scene(store, query, "a", "b", "c", workers=2)
    scene.step()
    assert len(scene.executor.steps) == 2
    scene.executor.finish(StepSucceeded())
    scene.step()
    scene.step()
    assert {step.task_id for step in scene.executor.steps.values()} == {"b", "c"}


def test_no_more_outcomes_wait_than_there_are_workers(store: Store, query: Query) -> None:
    """A worker whose outcome is not stored yet counts as taken, however much faster than the database workers are."""
    scene = Scene(store, query, *(f"t{number}" for number in range(12)), workers=3)
    finished: list[str] = []
    for _ in range(12):
        while scene.executor.steps:
            finished.append(scene.executor.finish(StepSucceeded()))
        states = task_states(store, scene.tasks.run).values()
        assert list(states).count(S.RUNNING) <= 3
        assert len(finished) - list(states).count(S.SUCCESS) <= 3
        scene.step()
    scene.step()
    assert len(finished) == 12
    assert set(task_states(store, scene.tasks.run).values()) == {S.SUCCESS}


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (StepSucceeded(xcoms=(XCom("return_value", b"1"),)), S.SUCCESS),
        (StepSkipped(reason="nothing to do"), S.SKIPPED),
        (StepFailed("boom"), S.FAILED),
        (DEFER, S.DEFERRED),
    ],
)
def test_an_outcome_is_stored(scene: Scene, outcome: StepOutcome, state: S) -> None:
    scene.begin()
    scene.executor.finish(outcome)
    changed_triggers = scene.step()
    assert scene.tasks.state() is state
    assert changed_triggers is (state is S.DEFERRED)
    assert scene.scheduler.notices == 1


def test_a_failed_try_is_tried_again_as_often_as_the_task_says(store: Store, query: Query) -> None:
    scene = Scene(store, query, retries=1)
    scene.begin()
    scene.executor.finish(StepFailed("boom"))
    scene.step()
    assert scene.tasks.state() is S.UP_FOR_RETRY


def test_an_xcom_over_the_limit_fails_the_task_and_says_which(scene: Scene) -> None:
    scene.begin()
    scene.executor.finish(StepSucceeded(xcoms=(XCom("big", b"x" * (XCOM_BYTES_MAX + 1)),)))
    scene.step()
    assert scene.tasks.state() is S.FAILED
    assert "the XCom 'big'" in scene.tasks.row()["last_error"]


def test_a_lost_worker_fails_its_try_with_the_reason(scene: Scene) -> None:
    token = scene.begin()
    scene.executor.lose(token, "killed by SIGKILL")
    scene.step()
    assert scene.tasks.state() is S.FAILED
    assert scene.tasks.row()["last_error"] == "killed by SIGKILL"


def test_a_deferred_task_is_resumed_with_its_event(scene: Scene) -> None:
    scene.begin()
    scene.executor.finish(DEFER)
    scene.step()
    store, epoch = scene.tasks.store, scene.tasks.epoch
    (trigger,) = store.claim_triggers(epoch, limit=1, queues=QUEUES)
    store.store_slice(epoch, events=[event_of(trigger.id, {"found": 7})])
    scene.core.notify()
    step = scene.executor.steps[scene.begin(1.0)]
    assert (step.next_method, step.next_kwargs, step.event) == ("resume", DEFER.next_kwargs, b'{"found":7}')
    assert step.try_number == 1


def test_an_outcome_waits_for_a_database_that_is_away_and_nothing_else_is_given_out(store: Store, query: Query) -> None:
    scene = Scene(store, query, "a", "b", workers=1)
    scene.begin()
    scene.executor.finish(StepSucceeded())
    scene.store.fails = "store_ends"
    scene.step(1.0)
    assert scene.executor.steps == {}
    assert scene.core.wake_at() > 1.0
    scene.step(1.0)  # too early to ask again
    assert scene.tasks.state() is S.RUNNING
    scene.step(scene.core.wake_at())
    assert scene.tasks.state() is S.SUCCESS
    assert [step.task_id for step in scene.executor.steps.values()] == ["b"]


def test_an_outcome_whose_commit_nobody_heard_of_is_stored_once(scene: Scene) -> None:
    scene.begin()
    scene.executor.finish(StepFailed("boom"))
    scene.store.fails, scene.store.is_done_first = "store_ends", True
    scene.step(1.0)
    scene.step(scene.core.wake_at())
    assert scene.tasks.state() is S.FAILED
    assert scene.logs.events()[-1].startswith("failed, which came too late")


def test_a_dispatch_whose_commit_nobody_heard_of_loses_no_task(scene: Scene) -> None:
    scene.store.fails, scene.store.is_done_first = "dispatch", True
    scene.step()
    assert scene.tasks.state() is S.RUNNING
    assert scene.executor.steps == {}
    scene.step(scene.core.wake_at())
    assert [step.task_id for step in scene.executor.steps.values()] == ["a"]
    scene.executor.finish(StepSucceeded())
    scene.step(100.0)
    assert scene.tasks.state() is S.SUCCESS


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("act", [None, "clear"])
def test_a_dispatch_is_in_doubt_until_the_server_is_done_with_its_commit(
    scene: Scene, open_store: OpenStore, act: str | None
) -> None:
    """The link was cut during the COMMIT, which waits for a disk or a standby; then it succeeds after all."""
    epoch, other = scene.tasks.epoch, open_store()
    with scene.store.store.database.writing() as tx:
        tx.connection.execute(text("SET lock_timeout = '10ms'"))
    with other.database.leased(epoch) as slow:
        given = body(other.tasks.dispatch)(slow, limit=1, queues=QUEUES)
        scene.store.fails = "dispatch"
        scene.step()
        scene.step(10.0)  # asks what it was given, and is not told yet
        assert scene.core.wake_at() > 10.0
    assert scene.executor.steps == {}
    assert scene.tasks.state() is S.RUNNING

    if act == "clear":
        clear(other, scene.tasks.run, "a")
    scene.step(scene.core.wake_at())

    if act == "clear":
        assert scene.tasks.state() is S.NONE
    else:
        assert list(scene.executor.steps) == [task.token for task in given.tasks]


@pytest.mark.parametrize("act", ["clear", "mark"])
def test_a_user_who_acts_on_a_running_task_ends_its_worker(scene: Scene, act: str) -> None:
    token = scene.begin()
    if act == "clear":
        scene.tasks.clear_it()
    else:
        scene.tasks.store.tasks.mark(scene.tasks.a, "success")
    scene.step(0.1)
    assert scene.executor.ended == []  # nobody has told
    scene.core.notify()
    scene.step(0.2)
    assert scene.executor.ended == [(token, "user")]
    scene.step(0.3)
    assert scene.tasks.state() is (S.NONE if act == "clear" else S.SUCCESS)
    assert [(level, event) for _, level, event, _ in scene.logs.said] == [
        ("info", "the task was ended by a user or a signal: its worker is ended")
    ]
    assert scene.steps_ended("stopped", "lost") == [1, 0]


def test_a_worker_that_is_lost_before_it_is_told_to_end_is_told_as_lost(scene: Scene) -> None:
    token = scene.begin()
    scene.tasks.clear_it()
    scene.executor.lose(token, "the worker process was killed by SIGKILL")
    scene.step(0.1)
    ((_, level, event, fields),) = scene.logs.said
    assert (level, event, fields["state"]) == ("error", "the worker was lost", "none")
    assert scene.steps_ended("stopped", "lost") == [0, 1]


def test_a_supervisor_that_has_ended_a_task_itself_ends_its_worker(scene: Scene) -> None:
    token = scene.begin()
    scene.tasks.clear_it()
    scene.scheduler.news = SchedulerStep(may_have_taken=True)
    scene.step(0.1)
    assert scene.core.wake_at() <= 0.1
    scene.step(0.1)
    assert scene.executor.ended == [(token, "user")]


def test_a_user_s_action_is_seen_in_the_end_even_if_nobody_tells(scene: Scene) -> None:
    token = scene.begin()
    scene.tasks.clear_it()
    scene.step(scene.core.wake_at())
    assert scene.executor.ended == [(token, "user")]


def test_a_late_outcome_of_a_cleared_task_changes_nothing(scene: Scene) -> None:
    scene.begin()
    scene.tasks.clear_it()
    scene.executor.finish(StepSucceeded(xcoms=(XCom("return_value", b"1"),)))
    scene.step()
    assert scene.tasks.state() is S.NONE
    assert scene.tasks.store.tasks.pull_xcom(scene.tasks.run, "a", "return_value") is None


def test_a_user_who_ends_a_task_over_its_time_has_its_on_kill_called(store: Store, query: Query) -> None:
    """The step takes its grace, and I14 holds for it as for any other."""
    scene = Scene(store, query, execution_timeout_s=30.0)
    told: list[str] = []
    scene.executor.end = lambda token, why, text: told.append(why)  # type: ignore[method-assign]
    scene.step(1.0)
    scene.step(31.5)
    assert told == ["timeout"]
    clear(store, scene.tasks.run, "a")
    for now in (32.0, 60.0, 90.0):
        scene.core.notify()
        scene.step(now)
    assert told == ["timeout", "user"]


def test_a_task_over_its_execution_timeout_is_ended(store: Store, query: Query) -> None:
    scene = Scene(store, query, execution_timeout_s=30.0)
    token = scene.begin()
    late = scene.core.wake_at()
    while late < 29.0:  # looks at what users do come first
        scene.step(late)
        late = scene.core.wake_at()
    assert scene.executor.ended == []
    scene.step(30.5)
    assert scene.executor.ended == [(token, "timeout")]
    scene.step(30.6)
    assert scene.tasks.state() is S.FAILED
    assert "execution_timeout" in scene.tasks.row()["last_error"]


def test_a_task_whose_time_was_over_while_it_was_deferred_has_time_to_say_so(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    scene = Scene(open_store(clock=clock), query, execution_timeout_s=30.0)
    scene.begin()
    scene.executor.finish(DEFER)
    scene.step()
    clock.advance(31.0)
    assert scene.tasks.store.tasks.time_out(scene.tasks.epoch) == [scene.tasks.a]
    scene.core.notify()
    scene.step(31.0)
    (step,) = scene.executor.steps.values()
    assert step.next_method == "__fail__"
    scene.step(40.0)
    assert scene.executor.ended == []


def test_no_worker_gets_a_step_of_a_try_whose_time_was_over_while_it_waited_for_a_worker(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    scene = Scene(open_store(clock=clock), query, execution_timeout_s=30.0)
    step = scene.executor.steps[scene.begin(now=7.0)]
    assert step.ends_at_s == 37.0
    scene.executor.finish(DEFER)
    scene.step(8.0)
    store, epoch = scene.tasks.store, scene.tasks.epoch
    (trigger,) = store.claim_triggers(epoch, limit=1, queues=QUEUES)
    clock.advance(29.0)
    store.store_slice(epoch, events=[event_of(trigger.id)])
    clock.advance(1.0)
    scene.core.notify()
    scene.step(38.0)
    assert scene.executor.steps == {}
    scene.step(38.0)
    assert (scene.tasks.state(), scene.tasks.row()["last_error"]) == (S.FAILED, "its execution_timeout is over")


def test_triggers_are_looked_for_when_tasks_that_waited_for_them_are_removed(scene: Scene) -> None:
    assert not scene.step()
    scene.scheduler.news = SchedulerStep(removed=1)
    assert scene.step()


def test_the_log_of_a_try_says_that_its_supervisor_is_gone(scene: Scene) -> None:
    lost = Adopted(scene.tasks.a, TryName("etl", "r1", "a", 1), S.UP_FOR_RETRY, "its supervisor (epoch 3) is gone")
    handed = Adopted(scene.tasks.a, TryName("etl", "r1", "b", 1), S.SCHEDULED)
    scene.scheduler.news = SchedulerStep(adopted=[lost, handed])
    scene.step()
    told = {"state": "up_for_retry", "error": lost.error}
    assert (lost.name, "error", "the worker was lost", told) in scene.logs.said
    assert handed.name not in [name for name, *_ in scene.logs.said]


def test_a_query_is_answered_and_the_step_goes_on(scene: Scene) -> None:
    token = scene.begin()
    scene.executor.pending.append(StepQuery(token, 3, GetXCom("b", "return_value")))
    scene.step()
    assert scene.executor.answers == [(token, Response(3, EncodedValue(b"1")))]
    assert token in scene.executor.steps


def test_draining_gives_out_nothing_and_waits_for_what_runs(store: Store, query: Query) -> None:
    scene = Scene(store, query, "a", "b", workers=1)
    scene.begin()
    assert not scene.core.drain(1.0)
    scene.executor.finish(StepSucceeded())
    scene.step(1.0)
    assert scene.core.drain(1.0)
    assert scene.executor.steps == {}


def test_what_does_not_end_in_time_is_ended_and_its_try_failed(scene: Scene) -> None:
    token = scene.begin()
    scene.core.drain(1.0)
    scene.core.end_all("leaving")
    scene.step(1.0)
    assert scene.executor.ended == [(token, "lost")]
    assert scene.tasks.state() is S.FAILED
    assert scene.core.drain(1.0)


@pytest.mark.parametrize("is_shut_down", [True, False])
def test_no_event_is_to_blame_for_a_step_that_a_shutdown_has_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_shut_down: bool
) -> None:
    token = scene.begin()
    run = scene.core._running[token]
    event = StreamEvent(7, "run", 0, b"1", None, False, 0.0)
    run.task = msgspec.structs.replace(run.task, stream=StreamPart(waiting=1, events=(event,)))
    stored: list[StepEnd] = []
    verb = scene.tasks.store.tasks.store_ends

    def store_ends(epoch: Epoch, ends: Sequence[StepEnd], **more: Any) -> list[Any]:
        stored.extend(ends)
        return verb(epoch, ends)

    monkeypatch.setattr(scene.tasks.store.tasks, "store_ends", store_ends)
    if is_shut_down:
        scene.core.drain(1.0)
        scene.core.end_all("leaving")
    else:
        scene.executor.lose(token, "killed")
    scene.step(1.0)
    assert [end.events for end in stored] == [() if is_shut_down else (7,)]


def test_a_lost_lease_stores_nothing_more(scene: Scene) -> None:
    scene.begin()
    tasks = scene.tasks
    tasks.store.fence_triggerers(tasks.register(), dead=[tasks.epoch])
    scene.executor.finish(StepSucceeded())
    with pytest.raises(LeaseLost):
        scene.step()
    scene.core.abandon()
    assert scene.executor.is_closed
    assert tasks.state() is S.RUNNING


def test_a_task_cleared_before_its_dispatch_was_heard_of_begins_anew(scene: Scene) -> None:
    """No worker ever had it, so none will say that it is done with it."""
    scene.store.fails, scene.store.is_done_first = "dispatch", True
    scene.step()
    scene.tasks.clear_it()
    assert scene.tasks.state() is S.RESTARTING
    for _ in range(3):
        scene.step(scene.core.wake_at())
    assert scene.executor.steps == {}
    assert scene.tasks.state() is S.NONE


def test_a_dispatch_that_failed_while_another_task_runs_keeps_nobody_busy(store: Store, query: Query) -> None:
    scene = Scene(store, query, "a", "b", workers=1)
    scene.begin(0.0)
    scene.executor.workers = 2
    scene.core._dispatch_at = 0.0
    scene.store.fails = "dispatch"
    scene.step(1.0)
    now = scene.core.wake_at()
    assert now > 1.0
    scene.step(now)
    assert len(scene.executor.steps) == 2
    assert scene.core.wake_at() > now


@pytest.mark.parametrize(
    "outcome",
    [
        msgspec.structs.replace(DEFER, timeout_s=timedelta.max.total_seconds()),
        msgspec.structs.replace(DEFER, timeout_s=math.inf),
        msgspec.structs.replace(DEFER, timeout_s=math.nan),
        msgspec.structs.replace(DEFER, timeout_s=9000 * 365 * 86_400.0),
        msgspec.structs.replace(DEFER, classpath="a\0b"),
        msgspec.structs.replace(DEFER, next_method="a\0b"),
        msgspec.structs.replace(DEFER, classpath="x" * 5000),
        msgspec.structs.replace(DEFER, kwargs=b"x" * (KWARGS_BYTES_MAX + 1)),
        msgspec.structs.replace(DEFER, next_kwargs=b"x" * (KWARGS_BYTES_MAX + 1)),
        StepSucceeded(skips=("a\0b",)),
        StepFailed("boom\0", traceback="\0"),
        StepSucceeded(xcoms=(XCom("a\0b", b"1"),)),
    ],
    ids=[
        "longest",
        "inf",
        "nan",
        "9000_years",
        "classpath",
        "method",
        "long_classpath",
        "kwargs",
        "next_kwargs",
        "skips",
        "error",
        "xcom",
    ],
)
def test_an_outcome_that_no_database_can_hold_fails_its_task_alone(
    store: Store, query: Query, outcome: StepOutcome
) -> None:
    scene = Scene(store, query, "a", "b")
    scene.begin()
    (first,) = [token for token, step in scene.executor.steps.items() if step.task_id == "a"]
    scene.executor.finish(outcome, first)
    scene.step(1.0)
    assert scene.tasks.state() is S.FAILED or isinstance(outcome, StepSucceeded)
    scene.executor.finish(StepSucceeded())
    scene.step(2.0)
    scene.step(2.0)
    assert task_states(store, scene.tasks.run)["b"] is S.SUCCESS


def test_rows_that_the_database_refuses_where_no_task_is_to_blame_end_no_supervisor(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RowsRefused("the test says so")

    with monkeypatch.context() as patch:
        patch.setattr(type(scene.tasks.store.tasks), "dispatch", refuse)
        scene.step()
    assert scene.tasks.state() is S.SCHEDULED
    scene.step(scene.core.wake_at())
    assert scene.tasks.state() is S.RUNNING
