"""Loops in the store: when there is another iteration, and when there is none, whatever becomes of one."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from tests.store.harness import Query
from tests.store.scheduling.test_groups import group
from tests.store.scheduling.test_worklists import Crawl
from tests.supervisor.tasks_harness import Tasks, task_states

from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.maps import Worklist
from headgate.protocol.messages.steps import Appended, StepFailed, StepOutcome, StepSkipped, StepSucceeded
from headgate.store.ids import Instances
from headgate.store.store import Store

S = TaskState
SUCCEEDED = StepSucceeded()


class Loop(Crawl):
    """A run in which ``body`` and, beside it, ``other`` lead to ``last``, and that to ``gate``; ``after`` is below."""

    def __init__(self, store: Store, query: Query, *, after: Any = None, **last: Any) -> None:
        tasks = (
            TaskSpec("body", "Op", retries=1, retry_delay_s=0.0),
            TaskSpec("other", "Op"),
            TaskSpec("last", "Op", upstream=("body", "other"), **last),
            TaskSpec("gate", "Op", upstream=("last",)),
        )
        loop = group("loop", Worklist("gate", 1, 9, is_loop=True), *tasks, window=1)
        Tasks.__init__(self, store, query, tasks=(*loop, TaskSpec("after", "Op", upstream=("gate",), **(after or {}))))
        self.running: dict[tuple[str, int], Any] = {}
        self.plan()

    def run_one(self, task_id: str, index: int, outcome: StepOutcome = SUCCEEDED) -> None:
        """Have a worker run one instance; it has to be scheduled. The run is evaluated then."""
        self.running |= {(task.task_id, task.map_index): task for task in self.dispatch(limit=100)}
        self.end(self.running.pop((task_id, index)), outcome)

    def go_on(self, index: int) -> StepOutcome:
        """What a gate leaves if there is to be another iteration."""
        return StepSucceeded(appended=Appended("gate", (b"null",), (str(index + 1).encode().ljust(32),), 8))

    def states(self, task_id: str = "gate") -> list[str]:
        return self.instances(task_id)

    def after(self) -> TaskState:
        return task_states(self.store, self.run)["after"]


def test_tasks_of_an_iteration_run_side_by_side(store: Store, query: Query) -> None:
    loop = Loop(store, query)
    assert (loop.states("body"), loop.states("other")) == (["scheduled"], ["scheduled"])


@pytest.mark.parametrize(
    ("outcome", "gate", "after"),
    [
        (StepFailed("boom"), "upstream_failed", S.UPSTREAM_FAILED),
        (StepSkipped("nothing to do"), "skipped", S.SKIPPED),
    ],
)
def test_a_last_task_that_fails_or_is_skipped_ends_the_loop(
    store: Store, query: Query, outcome: StepOutcome, gate: str, after: TaskState
) -> None:
    loop = Loop(store, query)
    loop.run_one("body", 0)
    loop.run_one("other", 0)
    loop.run_one("last", 0, outcome)
    assert (loop.states(), loop.states("body"), loop.after()) == ([gate], ["success"], after)


def test_a_failed_branch_ends_the_loop_unless_the_last_task_has_a_rule_for_it(store: Store, query: Query) -> None:
    loop = Loop(store, query, trigger_rule="all_done")
    loop.run_one("body", 0)
    loop.run_one("other", 0, StepFailed("boom"))
    loop.run_one("last", 0)
    loop.run_one("gate", 0, loop.go_on(0))
    assert loop.states("body") == ["success", "scheduled"]


def test_a_failed_branch_ends_the_loop(store: Store, query: Query) -> None:
    loop = Loop(store, query)
    loop.run_one("other", 0, StepFailed("boom"))
    loop.run_one("body", 0)
    assert (loop.states("last"), loop.states()) == (["upstream_failed"], ["upstream_failed"])
    assert loop.after() is S.UPSTREAM_FAILED


def test_a_retry_stays_in_its_iteration(store: Store, query: Query) -> None:
    loop = Loop(store, query)
    loop.run_one("body", 0, StepFailed("boom"))
    assert loop.states("body") == ["up_for_retry"]
    assert loop.states("last") == ["none"]


def test_a_gate_that_fails_ends_the_loop_and_what_is_below_does_not_run(store: Store, query: Query) -> None:
    loop = Loop(store, query)
    for name in ("body", "other", "last"):
        loop.run_one(name, 0)
    loop.run_one("gate", 0, StepFailed("not true after 1 iteration", may_retry=False))
    assert (loop.states(), loop.after()) == (["failed"], S.UPSTREAM_FAILED)
    assert loop.ended() == "failed"


def test_an_iteration_begins_when_all_tasks_of_the_one_before_have_ended(store: Store, query: Query) -> None:
    loop = Loop(store, query, trigger_rule="one_success")
    for name in ("body", "last"):
        loop.run_one(name, 0)
    loop.run_one("gate", 0, loop.go_on(0))
    assert loop.states("body") == ["success"], "the other branch runs"
    loop.run_one("other", 0)
    assert loop.states("body") == ["success", "scheduled"]


def test_a_gate_that_a_user_marks_ends_the_loop(store: Store, query: Query) -> None:
    loop = Loop(store, query)
    loop.run_one("body", 0)
    loop.run_one("other", 0)
    store.tasks.mark_map(loop.run, Instances("last", 0, 0), "success")
    loop.plan()
    store.tasks.mark_map(loop.run, Instances("gate", 0, 0), "success")
    loop.plan()
    assert (loop.states("body"), loop.after()) == (["success"], S.SCHEDULED)


@pytest.mark.parametrize(("rule", "state"), [("all_success", S.NONE), ("always", S.SCHEDULED)])
def test_what_is_below_waits_for_the_loop_by_its_rule(
    store: Store, query: Query, rule: Literal["all_success", "always"], state: TaskState
) -> None:
    loop = Loop(store, query, after={"trigger_rule": rule})
    assert loop.after() is state
