"""Where the time of a run has gone, and the runs of watchers' triggers that have ended."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from tests.store.harness import QUEUES, Clock, Query, add, register
from tests.supervisor.tasks_harness import WAIT, Tasks

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.runner import FinishedTrigger, FiredEvent
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSucceeded
from headgate.store.errors import NoSuchRow
from headgate.store.facts import spans, trigger_runs
from headgate.store.facts.spans import StepSpan
from headgate.store.inspect import spans as inspect_spans
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd, WorkerLost


@pytest.fixture
def store(old: Store) -> Store:
    return old


class Timed:
    """A task whose steps last as long as the test says, and the moment at which it all began."""

    def __init__(self, tasks: Tasks, clock: Clock) -> None:
        self.tasks = tasks
        self.clock = clock
        self.began = clock()

    def run_step(self, outcome: StepOutcome | WorkerLost, *, queued_s: float, ran_s: float) -> None:
        self.clock.advance(queued_s)
        (task,) = self.tasks.dispatch(limit=1)
        self.clock.advance(ran_s)
        took_s = None if isinstance(outcome, WorkerLost) else ran_s
        span = StepSpan(task.try_number, task.ready_at, took_s)
        (state,) = self.tasks.store.tasks.store_ends(
            self.tasks.epoch, [StepEnd(task.id, task.token, outcome, span=span)]
        )
        assert state is not None

    def phases(self) -> list[tuple[object, ...]]:
        """The phases of the first task, with seconds since the beginning."""

        def since(moment: datetime | None) -> float | None:
            return None if moment is None else (moment - self.began) / timedelta(seconds=1)

        found = [phase for phase in self.tasks.store.inspect.spans("etl", "r1") if phase.task_id == "a"]
        return [(p.try_number, p.phase, since(p.began_at), since(p.ended_at), p.outcome) for p in found]


def test_the_time_of_a_task_that_fails_defers_and_succeeds(store: Store, query: Query, clock: Clock) -> None:
    timed = Timed(Tasks(store, query, retries=1, retry_delay_s=10.0), clock)
    tasks = timed.tasks
    assert timed.phases() == []
    tasks.plan()
    clock.advance(1)
    assert timed.phases() == [(1, "queued", 0, None, None)]
    timed.run_step(StepFailed("no"), queued_s=1, ran_s=3)  # until 5
    first = [(1, "queued", 0, 2, None), (1, "running", 2, 5, "failed")]
    assert timed.phases() == [*first, (1, "retry wait", 5, None, None)]
    clock.advance(10)
    assert store.tasks.retry_due(tasks.epoch)
    clock.advance(1)
    (task,) = tasks.dispatch(limit=1)
    waited = [*first, (1, "retry wait", 5, 15, None)]
    assert timed.phases() == [*waited, (2, "queued", 15, 16, None), (2, "running", 16, None, None)]
    clock.advance(4)
    outcome = StepDeferred(WAIT.classpath, WAIT.kwargs, WAIT.next_method, WAIT.next_kwargs)
    end = StepEnd(task.id, task.token, outcome, span=StepSpan(2, task.ready_at, 4.0))
    store.tasks.store_ends(tasks.epoch, [end])
    deferred = [*waited, (2, "queued", 15, 16, None), (2, "running", 16, 20, "deferred")]
    assert timed.phases() == [*deferred, (2, "deferred", 20, None, None)]
    clock.advance(100)
    (trigger,) = store.claim_triggers(tasks.epoch, limit=10, queues=QUEUES)
    store.store_slice(tasks.epoch, events=[FiredEvent(trigger.id, "run", 0, 1, b"1")])
    timed.run_step(StepSucceeded(), queued_s=2, ran_s=1)
    assert timed.phases() == [
        *deferred,
        (2, "deferred", 20, 120, None),
        (2, "queued", 120, 122, None),
        (2, "running", 122, 123, "succeeded"),
    ]


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("outcome", [StepFailed("no"), WorkerLost("killed")])
@pytest.mark.parametrize("act", ["clear", "mark"])
def test_only_a_task_that_has_a_retry_waits_for_it(
    store: Store, query: Query, clock: Clock, act: str, outcome: StepOutcome | WorkerLost, retries: int
) -> None:
    tasks = Tasks(store, query, tasks=(TaskSpec("a", "Op", retries=retries, retry_delay_s=3600.0), TaskSpec("b", "Op")))
    timed = Timed(tasks, clock)
    tasks.plan()
    timed.run_step(outcome, queued_s=0, ran_s=3)
    clock.advance(100)
    if act == "clear":
        tasks.clear_it()
        tasks.plan()
    else:
        assert store.tasks.mark(tasks.a, "success")
    phases = timed.phases()
    assert phases[0] == (1, "running", 0, 3, "failed" if isinstance(outcome, StepFailed) else "lost")
    assert [phase[1] for phase in phases[1:]] == ["retry wait"] * retries + ["queued"] * (act == "clear")


@pytest.mark.parametrize("by", ["its supervisor", "another one"])
def test_a_task_that_is_begun_anew_while_it_runs_has_not_lost_its_worker(
    store: Store, query: Query, clock: Clock, by: str
) -> None:
    timed = Timed(Tasks(store, query, retries=1), clock)
    timed.tasks.plan()
    (task,) = timed.tasks.dispatch(limit=1)
    clock.advance(4)
    timed.tasks.clear_it()
    if by == "its supervisor":
        end = StepEnd(task.id, task.token, WorkerLost("ended"), span=StepSpan(1, task.ready_at, 4.0))
        store.tasks.store_ends(timed.tasks.epoch, [end])
    else:
        other = register(store, pid=2)
        store.fence_triggerers(other, dead=[timed.tasks.epoch])
        assert store.tasks.adopt(other)
    clock.advance(6)
    assert timed.phases() == [(1, "running", 0, 4, "stopped")]


def test_a_step_of_which_little_is_known_is_told_as_far_as_it_is(store: Store, query: Query, clock: Clock) -> None:
    timed = Timed(Tasks(store, query, tasks=(TaskSpec("a", "Op"), TaskSpec("b", "Op"))), clock)
    timed.tasks.plan()
    timed.run_step(WorkerLost("killed"), queued_s=1, ran_s=3)
    assert timed.phases() == [(1, "running", 0, 4, "lost")]
    assert {phase.task_id for phase in store.inspect.spans("etl", "r1")} == {"a", "b"}
    with pytest.raises(NoSuchRow):
        store.inspect.spans("etl", "r2")


def test_of_a_task_with_more_steps_than_are_read_nothing_is_made_up(
    store: Store, query: Query, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(Tasks(store, query), clock)
    timed.tasks.plan()
    outcome = StepDeferred(WAIT.classpath, WAIT.kwargs, WAIT.next_method, WAIT.next_kwargs)
    timed.run_step(outcome, queued_s=1, ran_s=1)
    clock.advance(3)
    (trigger,) = store.claim_triggers(timed.tasks.epoch, limit=10, queues=QUEUES)
    store.store_slice(timed.tasks.epoch, events=[FiredEvent(trigger.id, "run", 0, 1, b"1")])
    timed.run_step(StepSucceeded(), queued_s=1, ran_s=500)
    whole = timed.phases()
    assert len(whole) == 5
    monkeypatch.setattr(inspect_spans, "SPANS_READ_MAX", 1)
    assert timed.phases() == whole[:2]


def test_a_step_whose_supervisor_is_gone_is_lost_when_it_is_adopted(store: Store, query: Query, clock: Clock) -> None:
    timed = Timed(Tasks(store, query, retries=1, retry_delay_s=10.0), clock)
    timed.tasks.plan()
    clock.advance(1)
    timed.tasks.dispatch(limit=1)
    clock.advance(4)
    other = register(store, pid=2)
    assert store.fence_triggerers(other, dead=[timed.tasks.epoch]) == [timed.tasks.epoch]
    assert store.tasks.adopt(other)
    assert timed.phases() == [(1, "running", 1, 5, "lost"), (1, "retry wait", 5, None, None)]


@pytest.mark.parametrize(
    ("outcome", "is_new_try"), [("deferred", False), ("lost", False), ("failed", True), ("succeeded", True)]
)
def test_a_task_keeps_the_newest_of_its_spans(
    store: Store,
    query: Query,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    outcome: spans.StepEndName,
    is_new_try: bool,
) -> None:
    monkeypatch.setattr(spans, "PRUNED_EVERY", 1)
    tasks = Tasks(store, query)
    for number in range(spans.SPANS_KEPT + 5):
        clock.advance(1)
        span = StepSpan(number + 1 if is_new_try else 1)
        with store.database.leased(tasks.epoch) as tx:
            spans.write(tx, [(tasks.a, span, outcome)])
            spans.write(tx, [(tasks.a, span, outcome)])  # repeated, it changes nothing
    (counted,) = query("SELECT count(*) AS n, max(ended_at) AS newest FROM task_span")
    assert counted["n"] == spans.SPANS_KEPT
    assert str(clock().replace(tzinfo=None)) in str(counted["newest"])


def test_the_newest_runs_of_a_watcher_are_kept_and_a_run_is_written_once(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trigger_runs, "RUNS_KEPT", 2)
    epoch = register(store)
    (id_,) = add(store, "orders")
    store.claim_triggers(epoch, limit=10, queues=QUEUES)
    moved = FinishedTrigger(id_, "run 0", "cancelled", 1, reason="shutdown")
    for run in (moved, *(FinishedTrigger(id_, f"run {n}", "failed", n, error=f"No {n}\nmore") for n in (1, 2, 2, 3))):
        clock.advance(1)
        store.store_slice(epoch, finished=[run])
    third, second = store.inspect.trigger_runs(id_)[:2]
    assert (third.trigger_run_id, third.outcome, third.events, third.error) == ("run 3", "failed", 3, "No 3")
    assert (third.ended_at, second.trigger_run_id) == (clock(), "run 2")
    with store.database.reading() as tx:
        assert len(trigger_runs.newest(tx, id_, limit=10)) == 2


def test_a_run_whose_names_no_database_takes_is_written_down_all_the_same(store: Store) -> None:
    epoch = register(store)
    (id_,) = add(store, "orders")
    store.claim_triggers(epoch, limit=10, queues=QUEUES)
    store.store_slice(epoch, finished=[FinishedTrigger(id_, "ru\0n", "failed", events=0, error="a\0b")])
    (run,) = store.inspect.trigger_runs(id_)
    assert (run.trigger_run_id, run.error) == (r"ru\x00n", r"a\x00b")
