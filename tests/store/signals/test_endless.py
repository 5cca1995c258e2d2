"""Endless tasks in the store: which of their ends cost a try, when they begin again, and how many have workers."""

from __future__ import annotations

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.store.signals.rules_harness import AGAIN, PLAIN, Jobs
from tests.store.signals.test_sending import new
from tests.supervisor.tasks_harness import S, Tasks, clear

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.rules import Rules
from headgate.protocol.messages.steps import StepSucceeded
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import HEALTHY_S, MOVE_WAIT_MAX_S, MOVE_WAIT_S, StepEnd, WorkerLost

ENDLESS = TaskSpec("job", "Op", endless=True, retries=1, retry_delay_s=5.0)


class Endless(Tasks):
    """A run with an endless task, and a supervisor that has workers for such tasks alone."""

    def __init__(self, open_store: OpenStore, query: Query) -> None:
        self.clock = Clock()
        super().__init__(open_store(clock=self.clock), query, tasks=(ENDLESS,))
        self.plan()

    def begin(self) -> str | None:
        """Have a worker begin the task; return its token, None if it may not begin yet."""
        given = self.store.tasks.dispatch(self.epoch, limit=0, queues=QUEUES, endless=1)
        return given.tasks[0].token if given.tasks else None

    def lose(self, token: str | None, *, is_blameless: bool = False) -> float | None:
        """Lose its worker; return after how many seconds it may begin again."""
        assert token is not None
        self.store.tasks.store_ends(self.epoch, [StepEnd(self.a, token, WorkerLost("gone", is_blameless))])
        given = self.store.tasks.dispatch(self.epoch, limit=0, queues=QUEUES, endless=1)
        assert is_blameless or not given.tasks
        return given.endless_in_s


def test_a_lost_worker_moves_an_endless_task_with_longer_and_longer_waits(open_store: OpenStore, query: Query) -> None:
    tasks = Endless(open_store, query)
    waits = []
    for _ in range(8):
        in_s = tasks.lose(tasks.begin())
        row = tasks.row()
        assert (row["state"], row["try_number"], row["tries_max"], row["last_error"]) == ("scheduled", 1, 2, "gone")
        assert in_s is not None
        waits.append(in_s)
        assert tasks.begin() is None, "it waits"
        tasks.clock.advance(in_s)
    assert waits == [min(MOVE_WAIT_S * 2**n, MOVE_WAIT_MAX_S) for n in range(8)]
    token = tasks.begin()
    tasks.clock.advance(HEALTHY_S)
    assert tasks.lose(token) == MOVE_WAIT_S, "it ran well"


def test_why_tells_of_lost_workers_until_an_endless_task_runs_well(open_store: OpenStore, query: Query) -> None:
    tasks = Endless(open_store, query)

    def told() -> str:
        return dict(tasks.store.inspect.why_task(tasks.store.inspect.find_task("etl", "r1", "job")).facts)["endless"]

    assert told() == "yes"
    in_s = tasks.lose(tasks.begin())
    assert in_s is not None
    tasks.clock.advance(in_s)
    tasks.begin()
    assert told() == "yes; workers lost in a row: 1"
    tasks.clock.advance(HEALTHY_S)
    assert told() == "yes"


def test_one_that_its_supervisor_ends_as_it_leaves_begins_at_once(open_store: OpenStore, query: Query) -> None:
    tasks = Endless(open_store, query)
    assert tasks.lose(tasks.begin(), is_blameless=True) is None
    assert (tasks.row()["state"], tasks.row()["moves"]) == ("running", 0), "another has it already"


def test_a_supervisor_that_dies_moves_its_endless_tasks(open_store: OpenStore, query: Query) -> None:
    tasks = Endless(open_store, query)
    first = tasks.begin()
    other = tasks.register()
    tasks.store.fence_triggerers(other, dead=[tasks.epoch])
    (adopted,) = tasks.store.tasks.adopt(other)
    assert (adopted.state, adopted.name.try_number) == (S.SCHEDULED, 1)
    tasks.epoch = other
    tasks.clock.advance(MOVE_WAIT_S)
    assert tasks.begin() not in (None, first)
    assert tasks.row()["try_number"] == 1


def test_its_own_exceptions_cost_tries_which_it_gets_back_when_it_has_run_well(
    open_store: OpenStore, query: Query
) -> None:
    tasks = Endless(open_store, query)
    verbs = tasks.store.tasks

    def fail(after_s: float) -> S | None:
        token = tasks.begin()
        assert token is not None
        tasks.clock.advance(after_s)
        state = ends.fail(verbs, tasks.epoch, tasks.a, token, "it broke")
        if state is S.UP_FOR_RETRY:
            tasks.clock.advance(5.0)
            verbs.retry_due(tasks.epoch)
        return state

    assert [fail(after_s) for after_s in (1.0, HEALTHY_S, HEALTHY_S + 1, 1.0)] == [S.UP_FOR_RETRY] * 3 + [S.FAILED]
    assert tasks.row()["try_number"] == 4


def test_endless_tasks_have_workers_of_their_own_and_no_others(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, tasks=(*(TaskSpec(f"e{n}", "Op", endless=True) for n in range(3)), PLAIN))
    tasks.plan()

    def given(limit: int, endless: int) -> list[str]:
        return [
            task.task_id
            for task in store.tasks.dispatch(tasks.epoch, limit=limit, queues=QUEUES, endless=endless).tasks
        ]

    assert given(0, 1) == ["e0"]
    assert given(4, 0) == ["plain"], "the others do not stand in its way"
    assert given(4, 1) == ["e1"]
    assert given(4, 5) == ["e2"]


@pytest.mark.parametrize(("rules", "state"), [(None, "success"), (Rules((), stopped_as="failed"), "failed")])
def test_a_stop_by_hand_and_the_end_of_the_run_end_it_well_unless_it_says_otherwise(
    store: Store, query: Query, rules: Rules | None, state: str
) -> None:
    jobs = Jobs(store, query, *(TaskSpec(name, "Op", endless=True, signals=rules) for name in ("one", "two")))
    store.tasks.dispatch(jobs.tasks.epoch, limit=0, queues=QUEUES, endless=2)
    store.signals.ask(jobs.id("one"), "STOP")
    jobs.settle()
    assert jobs.states() == {"one": S(state), "two": S.RUNNING}
    assert jobs.run_state() == "running"
    assert store.signals.end_run(jobs.tasks.run)
    jobs.settle()
    assert (jobs.state("two"), jobs.run_state()) == (S(state), state)
    assert not store.signals.end_run(jobs.tasks.run), "it has ended"


def test_the_end_of_the_run_ends_it_although_a_signal_then_asks_for_a_restart(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, TaskSpec("job", "Op", endless=True, signals=Rules((AGAIN,))))
    jobs.send("again")
    store.tasks.dispatch(jobs.tasks.epoch, limit=0, queues=QUEUES, endless=1)
    assert jobs.state() is S.RUNNING
    assert store.signals.end_run(jobs.tasks.run)
    store.signals.send([new("again")])
    assert store.scheduling.consider_signals(jobs.tasks.epoch).rules == 1
    jobs.settle()
    assert (jobs.states(), jobs.run_state()) == ({"job": S.SKIPPED}, "success")


@pytest.mark.parametrize("ends", ["its worker", "its supervisor", "nobody"])
@pytest.mark.parametrize("spec", [ENDLESS, TaskSpec("job", "Op")], ids=["endless", "any"])
def test_what_was_ended_begins_again_when_its_worker_is_gone(
    store: Store, query: Query, spec: TaskSpec, ends: str
) -> None:
    tasks = Tasks(store, query, tasks=(spec,))
    tasks.plan()
    other = tasks.register()

    def given(epoch: Epoch) -> list[TaskToRun]:
        return store.tasks.dispatch(epoch, limit=1, queues=QUEUES, endless=1).tasks

    (first,) = given(tasks.epoch)
    for _ in range(2):  # what waits for that worker may be ended as well
        store.tasks.mark(tasks.a, "success")
        assert store.tasks.owned(tasks.epoch) == []
        assert store.tasks.left(tasks.epoch) == [(tasks.a, first.token)]
        clear(store, tasks.run, "job")
        tasks.plan()
        assert (given(tasks.epoch), given(other)) == ([], [])
        (ref,) = store.inspect.find_tasks("etl", "r1", "job")
        assert store.inspect.why_task(ref).reason == "old_worker"
    if ends == "its worker":
        assert store.tasks.store_ends(tasks.epoch, [StepEnd(tasks.a, first.token, StepSucceeded())]) == [None]
    elif ends == "its supervisor":
        store.fence_triggerers(other, dead=[tasks.epoch])
    begun = given(other)
    assert [task.token != first.token for task in begun] == [True] * (ends != "nobody")
    assert store.tasks.left(tasks.epoch) == ([] if begun else [(tasks.a, first.token)])


def test_one_that_is_cleared_while_it_waits_does_not_wait_any_more(open_store: OpenStore, query: Query) -> None:
    tasks = Endless(open_store, query)
    assert tasks.lose(tasks.begin()) == MOVE_WAIT_S
    tasks.clear_it()
    tasks.plan()
    assert tasks.begin() is not None
    assert (tasks.row()["try_number"], tasks.row()["moves"]) == (2, 0)
