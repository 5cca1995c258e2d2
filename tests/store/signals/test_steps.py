"""Signals of steps: at once while the step has its task, and with its outcome exactly once (I25)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.signals.test_sending import new, versions
from tests.supervisor.tasks.core_harness import DEFER, Scene
from tests.supervisor.tasks_harness import S, Tasks

from headgate.protocol.messages.queries import ListSignals, Response, SendSignals, SignalPage, SignalsSent
from headgate.protocol.messages.signals import SentSignal, SignalSend
from headgate.protocol.messages.steps import StepFailed, StepOutcome, StepSkipped, StepSucceeded
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd
from headgate.supervisor.executors.base import StepQuery
from headgate.supervisor.queries import QueryRefused, StoreQueries

ONE = SignalSend("a", b"1", "d")


@pytest.fixture
def tasks(store: Store, query: Query) -> Tasks:
    return Tasks(store, query)


@pytest.fixture
def scene(store: Store, query: Query) -> Scene:
    return Scene(store, query)


def end(tasks: Tasks, token: str, outcome: StepOutcome, *signals: Any) -> Any:
    (state,) = tasks.store.tasks.store_ends(tasks.epoch, [StepEnd(tasks.a, token, outcome, signals=signals)])
    return state


def test_a_running_step_sends_at_once_and_an_old_one_does_not(tasks: Tasks) -> None:
    token = tasks.run_it()
    send = tasks.store.tasks.send_signals
    assert send(tasks.epoch, tasks.a, token, [new("a", 1, "d")]) == [SentSignal(1, True)]
    assert send(tasks.epoch, tasks.a, token, [new("a", 1, "d")]) == [SentSignal(1, False)]
    assert send(tasks.epoch, tasks.a, "another", [new("a", 2)]) is None
    tasks.clear_it()
    assert send(tasks.epoch, tasks.a, token, [new("a", 3)]) is None
    assert versions(tasks.store, "a") == [(1, 1)]


@pytest.mark.parametrize("outcome", [StepSucceeded(), StepSkipped(), DEFER])
def test_signals_are_stored_with_the_outcome_and_once(tasks: Tasks, outcome: StepOutcome) -> None:
    token = tasks.run_it()
    assert end(tasks, token, outcome, new("a", 1), new("b", 2), new("a", 3)) is not None
    assert end(tasks, token, outcome, new("a", 1)) is None  # it is repeated, and comes too late
    assert (versions(tasks.store, "a"), versions(tasks.store, "b")) == ([(1, 1), (2, 3)], [(1, 2)])


def test_an_outcome_that_comes_too_late_sends_nothing(tasks: Tasks) -> None:
    token = tasks.run_it()
    tasks.clear_it()
    assert end(tasks, token, StepSucceeded(), new("a", 1)) is None
    assert tasks.store.signals.keys(limit=9) == []


def test_a_core_sends_what_a_step_asks_for_and_says_who_it_is(scene: Scene) -> None:
    token = scene.begin()
    scene.executor.pending.append(StepQuery(token, 3, SendSignals((ONE, SignalSend("a", b"2", "e", is_of_run=True)))))
    scene.step()
    sent = SignalsSent((SentSignal(1, True), SentSignal(2, True)))
    assert scene.executor.answers == [(token, Response(3, sent))]
    assert scene.scheduler.signals == 1
    first, second = scene.store.store.signals.page("a").signals
    assert (first.sender, first.run_id, second.run_id) == ("task etl.r1.a, try 1", None, "r1")


@pytest.mark.parametrize("is_done_first", [False, True])
def test_a_query_whose_commit_is_in_doubt_is_repeated_and_sends_once(scene: Scene, is_done_first: bool) -> None:
    token = scene.begin()
    scene.store.fails, scene.store.is_done_first = "send_signals", is_done_first
    scene.executor.pending.append(StepQuery(token, 3, SendSignals((ONE,))))
    scene.step()
    assert scene.executor.answers == []
    scene.step(5.0)
    assert scene.executor.answers == [(token, Response(3, SignalsSent((SentSignal(1, not is_done_first),))))]
    assert versions(scene.store.store, "a") == [(1, 1)]


def test_a_step_is_told_what_cannot_be_sent(scene: Scene) -> None:
    token = scene.begin()
    asked = [SendSignals((SignalSend("", b"1", "d"),)), SendSignals((ONE,) * 1001)]
    scene.executor.pending += [StepQuery(token, number, query) for number, query in enumerate(asked)]
    scene.step()
    errors = [answer.error for _, answer in scene.executor.answers]
    assert "the key of a signal '' must have" in errors[0]
    assert errors[1] == "1,001 signals are sent at once; the limit is 1,000"


@pytest.mark.parametrize("is_done_first", [False, True])
def test_the_signals_of_an_outcome_whose_commit_is_in_doubt_are_sent_once(scene: Scene, is_done_first: bool) -> None:
    scene.begin()
    scene.store.fails, scene.store.is_done_first = "store_ends", is_done_first
    scene.executor.finish(StepSucceeded(signals=(ONE, SignalSend("a", b"2", "e"))))
    scene.step()
    scene.step(5.0)
    assert versions(scene.store.store, "a") == [(1, 1), (2, 2)]
    assert scene.tasks.state() is S.SUCCESS


def test_a_bad_signal_fails_its_task_and_no_other(store: Store, query: Query) -> None:
    scene = Scene(store, query, "a", "b")
    scene.step()
    bad, good = list(scene.executor.steps)
    scene.executor.finish(StepSucceeded(signals=(SignalSend("k" * 513, b"1", "d"),)), bad)
    scene.executor.finish(StepSucceeded(signals=(ONE,)), good)
    for now in range(3):
        scene.step(float(now))
    states = {row["task_id"]: row["state"] for row in query("SELECT task_id, state FROM task_instance")}
    assert sorted(states.values()) == ["failed", "success"]
    assert versions(store, "a") == [(1, 1)]


def test_a_failed_step_has_no_signals(scene: Scene) -> None:
    scene.begin()
    scene.executor.finish(StepFailed("no"))
    scene.step()
    assert scene.store.store.signals.keys(limit=9) == []


def test_triggers_send_and_list_but_not_for_one_run(tasks: Tasks) -> None:
    store = tasks.store
    answers = StoreQueries(store, {})
    assert answers.answer(SendSignals((ONE,), "a.B"), dag_run_id=None) == SignalsSent((SentSignal(1, True),))
    store.signals.send([new("a", "for the run", dag_run=tasks.run)])
    page = answers.answer(ListSignals("a"), dag_run_id=None)
    assert isinstance(page, SignalPage)
    assert [(one.version, one.sender) for one in page.signals] == [(1, "trigger a.B")]
    of_run = answers.answer(ListSignals("a", after=1), dag_run_id=tasks.run)
    assert isinstance(of_run, SignalPage)
    assert [(one.version, one.is_of_run) for one in of_run.signals] == [(2, True)]
    assert answers.answer(ListSignals("a", version=1), dag_run_id=None) == page
    assert answers.answer(ListSignals("a", version=2), dag_run_id=None) == SignalPage(())
    with pytest.raises(QueryRefused, match="is for its sender's run alone, and the sender has none"):
        answers.answer(SendSignals((SignalSend("a", b"1", "e", is_of_run=True),)), dag_run_id=None)
    with pytest.raises(QueryRefused, match="the signals of a step are sent for its task"):
        answers.answer(SendSignals((ONE,)), dag_run_id=tasks.run)
    with pytest.raises(QueryRefused, match="limit must be from 1 to"):
        answers.answer(ListSignals("a", limit=0), dag_run_id=None)
    with pytest.raises(QueryRefused, match="after must be a version, from 0 to"):
        answers.answer(ListSignals("a", after=2**63), dag_run_id=None)
