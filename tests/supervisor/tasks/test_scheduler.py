"""The scheduler role: what it does when, and what it costs while nothing happens."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from tests.store import ends
from tests.store.harness import Clock, OpenStore, Query
from tests.store.scheduling.test_planning import Planned, chain
from tests.supervisor.tasks_harness import WAIT, S, Tasks, task_states

from headgate.protocol.messages.dags import CronSchedule, DagSpec, SignalSchedule, TaskSpec
from headgate.protocol.messages.rules import Rules, SignalRule
from headgate.store.errors import DatabaseAway, LeaseLost
from headgate.store.ids import Epoch
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.tasks.scheduler import ASK_AGAIN_S, ASK_INTERVAL_S, LATE_S, Scheduler


class Driven:
    """A scheduler and a clock that moves with it."""

    def __init__(self, run: Tasks, clock: Clock) -> None:
        self.run, self.clock = run, clock
        self.scheduler = Scheduler(run.store, retry=DatabaseRetry("scheduling", 0.1, 1.0))
        self.now = 100.0
        self.steps = 0

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.clock.advance(seconds)

    def settle(self) -> list[Any]:
        """Step until nothing is due; return the news."""
        news = []
        while self.scheduler.wake_at() <= self.now:
            news.append(self.scheduler.step(self.run.epoch, self.now))
            self.steps += 1
            assert self.steps < 1000, "it does not come to rest"
        return news


@pytest.fixture
def driven(open_store: OpenStore, query: Query) -> Driven:
    clock = Clock()
    return Driven(Planned(open_store(clock=clock), query, tasks=chain("a", "b", retries=1, retry_delay_s=30.0)), clock)


def test_a_run_is_planned_when_it_is_noticed_and_found_when_it_is_not(driven: Driven) -> None:
    assert any(news.may_dispatch for news in driven.settle())  # the first question finds it
    run = driven.run
    assert isinstance(run, Planned)
    assert run.do() == ["a"]
    assert driven.settle() == []
    driven.scheduler.notify()
    assert any(news.may_dispatch for news in driven.settle())
    run.do()
    driven.advance(ASK_INTERVAL_S)  # nobody has noticed
    (ended,) = [news.ended for news in driven.settle() if news.ended]
    assert ended == {run.run: "success"}


def test_a_run_is_looked_at_once_for_each_thing_that_happens_to_it(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.settle()
    run = driven.run
    assert isinstance(run, Planned)
    run.do()
    driven.scheduler.notify()
    scheduled: list[int] = []
    plan = run.store.scheduling.plan

    def noted(epoch: Epoch, **after: Any) -> Any:
        planned = plan(epoch, **after)
        scheduled.append(planned.scheduled)
        return planned

    monkeypatch.setattr(run.store.scheduling, "plan", noted)
    driven.settle()
    assert scheduled == [1]


def test_the_end_of_a_task_has_no_events_looked_at_and_that_of_a_run_has(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.settle()
    run, looks = driven.run, list[Epoch]()
    assert isinstance(run, Planned)
    look = run.store.scheduling.create_event_runs

    def noted(epoch: Epoch) -> Any:
        looks.append(epoch)
        return look(epoch)

    monkeypatch.setattr(run.store.scheduling, "create_event_runs", noted)
    assert run.do() == ["a"]
    driven.scheduler.notify_ended()
    assert any(news.may_dispatch for news in driven.settle())
    assert not looks
    assert run.do() == ["b"]
    driven.scheduler.notify_ended()
    assert any(news.ended for news in driven.settle())
    assert looks


def test_runs_that_waited_begin_without_another_notice(driven: Driven) -> None:
    """More than one look takes in: it looks again by itself as long as there is more."""
    run, store = driven.run, driven.run.store
    spec = DagSpec("many", max_active_runs=50, tasks=(TaskSpec("only", "Op"),))
    store.tasks.save_file(run.epoch, "many.py", [spec])
    ids = [store.tasks.create_run("many", f"r{number}") for number in range(60)]
    driven.settle()
    states = [task_states(store, id_)["only"] for id_ in ids if id_ is not None]
    assert (states.count(S.SCHEDULED), states.count(S.NONE)) == (50, 10)
    for id_ in ids[:50]:
        assert id_ is not None
        store.tasks.cancel_run(id_)
    driven.scheduler.notify()
    driven.settle()
    assert {task_states(store, id_)["only"] for id_ in ids[50:] if id_ is not None} == {S.SCHEDULED}


def test_it_wakes_when_a_retry_is_due_and_not_before(driven: Driven) -> None:
    driven.settle()
    run = driven.run
    assert isinstance(run, Planned)
    run.do(a="failed")
    driven.scheduler.notify()
    driven.advance(0.2)
    assert not any(news.may_dispatch for news in driven.settle())
    while run.state() is S.UP_FOR_RETRY:
        wait_s = driven.scheduler.wake_at() - driven.now
        assert 0 < wait_s <= ASK_INTERVAL_S
        driven.advance(wait_s)
        driven.settle()
    assert driven.now == pytest.approx(130.0, abs=0.5)
    assert run.do() == ["a"]


def test_a_deferral_times_out(driven: Driven) -> None:
    driven.settle()
    run = driven.run
    (task,) = run.dispatch()

    ends.defer(run.store.tasks, run.epoch, task.id, task.token, msgspec.structs.replace(WAIT, timeout_s=3.0))
    driven.scheduler.notify()
    driven.advance(0.2)
    driven.settle()
    driven.advance(driven.scheduler.wake_at() - driven.now)
    assert [news.timed_out for news in driven.settle() if news.timed_out] == [[task.id]]
    assert run.state() is S.SCHEDULED


@pytest.mark.parametrize("rules", [0, 1000])
def test_while_nothing_happens_one_statement_is_asked_now_and_then(driven: Driven, rules: int) -> None:
    """However many rules about signals are open."""
    keys = [Rules(tuple(SignalRule(f"{task} {number}") for number in range(50))) for task in range(rules // 50)]
    tasks = tuple(TaskSpec(f"t{number}", "Op", signals=of_task) for number, of_task in enumerate(keys))
    store = driven.run.store
    ruled = DagSpec(
        "ruled", SignalSchedule((SignalRule("starts"),)), tasks=tasks, end_on=(SignalRule("end", action="STOP"),)
    )
    store.tasks.save_file(driven.run.epoch, "ruled.py", [ruled] if rules else [])
    if rules:
        store.tasks.create_run("ruled", "r")
        driven.scheduler.notify()
    driven.settle()
    assert len(driven.run.query("SELECT id FROM signal_wait WHERE NOT is_fresh")) == (rules + 2 if rules else 0)
    driven.advance(ASK_INTERVAL_S)
    driven.settle()
    statements: list[str] = []
    connection = driven.run.store.database._connection
    assert connection is not None
    driver = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        driver.set_trace_callback(statements.append)  # type: ignore[union-attr]
    asked = 0
    for _ in range(12):
        driven.advance(1.0)
        asked += len(driven.settle())
    assert asked == 2
    if connection.dialect.name == "sqlite":
        assert len(statements) == 2
        assert all(statement.startswith("SELECT 'now'") for statement in statements)


def test_what_is_due_and_cannot_be_done_is_not_tried_again_and_again(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    run = Tasks(open_store(clock=clock), query)
    spec = DagSpec("minutely", CronSchedule("* * * * *"), max_active_runs=1, tasks=(TaskSpec("a", "Op"),))
    run.store.tasks.save_file(run.epoch, "m.py", [spec])
    driven = Driven(run, clock)
    driven.settle()
    driven.advance(61)
    driven.settle()
    assert len(query("SELECT * FROM dag_run WHERE run_type = 'scheduled'")) == 1
    driven.advance(600)
    driven.steps = 0
    driven.settle()
    assert driven.steps < 12
    assert driven.scheduler.wake_at() - driven.now == pytest.approx(ASK_INTERVAL_S)
    assert len(query("SELECT * FROM dag_run WHERE run_type = 'scheduled'")) == 1
    driven.scheduler.notify()
    driven.advance(1)
    driven.settle()
    assert driven.steps < 24


def test_a_database_that_is_away_is_asked_again_later(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(epoch: Epoch) -> None:
        raise DatabaseAway("db", "it is gone")

    with monkeypatch.context() as patched:
        patched.setattr(driven.run.store.scheduling, "next_due", away)
        driven.scheduler.step(driven.run.epoch, driven.now)
        assert driven.now < driven.scheduler.wake_at() < driven.now + 1
    driven.advance(1)
    assert any(news.may_dispatch for news in driven.settle())


def test_what_a_commit_that_nobody_heard_of_has_done_is_told_with_the_next_one(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = driven.run.store.scheduling.plan

    def plan_and_fail(epoch: Epoch, **after: Any) -> None:
        plan(epoch, **after)
        raise DatabaseAway("db", "it went away behind the commit")

    with monkeypatch.context() as patched:
        patched.setattr(driven.run.store.scheduling, "plan", plan_and_fail)
        while driven.run.state() is S.NONE:
            news = driven.scheduler.step(driven.run.epoch, driven.now)
            assert (news.may_dispatch, news.may_have_taken) == (False, False)
    driven.advance(1)
    first, *others = driven.settle()
    assert first.may_dispatch
    assert first.may_have_taken
    assert first.changes_triggers
    assert first.instances == 1
    assert not any(news.may_have_taken for news in others)


def test_a_lease_that_is_lost_is_told(driven: Driven) -> None:
    other = driven.run.register()
    driven.run.store.fence_triggerers(other, dead=[driven.run.epoch])
    with pytest.raises(LeaseLost):
        driven.settle()


def test_tasks_of_a_supervisor_that_is_gone_are_adopted(driven: Driven) -> None:
    driven.settle()
    run = driven.run
    run.dispatch()
    other = run.register()
    run.store.fence_triggerers(other, dead=[run.epoch])
    run.epoch = other
    driven.scheduler.notify_fenced()
    (adopted,) = [news.adopted for news in driven.settle() if news.adopted]
    assert [(task.id, task.state) for task in adopted] == [(run.a, S.UP_FOR_RETRY)]


def test_the_deadline_of_a_running_task_is_told(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    run = Tasks(open_store(clock=clock), query, execution_timeout_s=2.0)
    driven = Driven(run, clock)
    driven.settle()
    assert driven.scheduler.deadline_at == math.inf
    run.dispatch()
    driven.scheduler.notify()
    driven.advance(0.5)
    driven.settle()
    assert driven.scheduler.deadline_at == pytest.approx(driven.now + 1.5)


def test_a_dag_that_may_have_no_further_run_holds_up_nothing(open_store: OpenStore, query: Query) -> None:
    """Its next run is due for as long as the last one goes on, which may be days: retries, timeouts and runs of others.

    They come at their time, and not with a later look.
    """
    clock = Clock()
    run = Tasks(open_store(clock=clock), query, retries=1, retry_delay_s=12.0)
    tasks = (TaskSpec("a", "Op"),)
    run.store.tasks.save_file(
        run.epoch, "m.py", [DagSpec("minutely", CronSchedule("* * * * *"), max_active_runs=1, tasks=tasks)]
    )
    driven = Driven(run, clock)
    for seconds in (0, 61, 600):
        driven.advance(seconds)
        driven.settle()
    run.store.tasks.save_file(
        run.epoch, "o.py", [DagSpec("other", CronSchedule("* * * * *"), max_active_runs=100, tasks=tasks)]
    )
    first, second = run.dispatch(limit=2)
    ends.fail(run.store.tasks, run.epoch, first.id, first.token, "boom")
    ends.defer(run.store.tasks, run.epoch, second.id, second.token, msgspec.structs.replace(WAIT, timeout_s=23.0))
    driven.scheduler.notify()
    driven.advance(0.2)
    driven.settle()
    came: dict[str, float] = {}
    begun_at = driven.now
    while driven.now < begun_at + 125:
        driven.advance(driven.scheduler.wake_at() - driven.now)
        for news in driven.settle():
            at = driven.now - begun_at
            if news.timed_out:
                came["timeout"] = at
            if run.state() is S.SCHEDULED:
                came.setdefault("retry", at)
    assert came["retry"] == pytest.approx(12, abs=0.5)
    assert came["timeout"] == pytest.approx(23, abs=0.5)
    assert len(query("SELECT r.id FROM dag_run r JOIN dag d ON d.id = r.dag_id WHERE d.name = 'other'")) == 2


def test_what_is_due_comes_in_time_however_much_else_goes_on(open_store: OpenStore, query: Query) -> None:
    """A supervisor that stores an outcome in each of its steps has runs to evaluate in each of them."""
    clock = Clock()
    run = Tasks(open_store(clock=clock), query, retries=1, retry_delay_s=2.0)
    driven = Driven(run, clock)
    driven.settle()
    (task,) = run.dispatch()
    ends.fail(run.store.tasks, run.epoch, task.id, task.token, "boom")
    steps = 0
    while run.state() is not S.SCHEDULED:
        driven.scheduler.notify()
        driven.scheduler.step(run.epoch, driven.now)
        driven.advance(0.01)
        steps += 1
        assert steps < 1000
    assert steps * 0.01 == pytest.approx(2.0, abs=6 * LATE_S)


def test_a_query_that_was_late_is_repeated_after_the_others(driven: Driven) -> None:
    """It saw nothing of what the more urgent duties do after it, as to start a task that has a timeout."""
    driven.settle()
    asked_at = driven.scheduler._asked_at
    steps = 0
    while driven.scheduler._asked_at == asked_at:
        driven.advance(LATE_S / 2)
        driven.scheduler.notify()
        driven.scheduler.step(driven.run.epoch, driven.now)
        steps += 1
        assert steps < 100
    driven.settle()
    assert driven.scheduler.wake_at() == driven.now + ASK_AGAIN_S


def test_no_retry_begins_in_a_paused_dag(open_store: OpenStore, query: Query) -> None:
    """One that begins in its trigger would run. It is not due meanwhile, and begins when the DAG is unpaused."""
    clock = Clock()
    run = Tasks(open_store(clock=clock), query, retries=1, retry_delay_s=2.0)
    driven = Driven(run, clock)
    driven.settle()
    (task,) = run.dispatch()
    ends.fail(run.store.tasks, run.epoch, task.id, task.token, "boom")
    run.store.tasks.set_paused("etl", is_paused=True)
    driven.scheduler.notify()
    for _ in range(10):
        driven.advance(1.0)
        driven.settle()
    assert run.state() is S.UP_FOR_RETRY
    assert run.store.tasks.retry_due(run.epoch) == []
    assert run.store.scheduling.next_due(run.epoch).in_s is None
    run.store.tasks.set_paused("etl", is_paused=False)
    driven.scheduler.notify()
    driven.advance(ASK_AGAIN_S)
    driven.settle()
    assert run.state() is S.SCHEDULED
