"""The look at runs: which tasks begin, when a run ends, and that nothing that happens is overlooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.dags import TaskSpec
from headgate.store.store import Store

OpenStore = Callable[..., Store]
Query = Callable[..., list[dict[str, Any]]]


class Planned(Tasks):
    """A run that is planned by the scheduler's own verb."""

    def plan(self) -> Any:
        return self.store.scheduling.plan(self.epoch)

    def states(self, run: int | None = None) -> dict[str, str]:
        found = self.store.tasks.task_states(run or self.run)
        return {name: state.value for name, state in sorted(found.items())}

    def do(self, **outcomes: str) -> list[str]:
        """Dispatch what may run and end it as said, well if nothing is; return the names."""
        given = self.dispatch()
        for task in given:
            how = outcomes.get(task.task_id, "success")
            verbs = self.store.tasks
            if how == "success":
                assert verbs.succeed(self.epoch, task.id, task.token)
            elif how == "skipped":
                assert verbs.succeed(self.epoch, task.id, task.token, end="skipped")
            else:
                assert verbs.fail(self.epoch, task.id, task.token, "error")
        return sorted(task.task_id for task in given)

    def run_state(self, run: int | None = None) -> str:
        (row,) = self.query("SELECT * FROM dag_run WHERE id = :id", id=run or self.run)
        if row["ended_at"] is None and row["started_at"] is None:
            return "queued"
        return str(row["state"])

    def is_marked(self, run: int | None = None) -> bool:
        (row,) = self.query("SELECT needs_look FROM dag_run WHERE id = :id", id=run or self.run)
        return bool(row["needs_look"])


def chain(*names: str, **changes: Any) -> tuple[TaskSpec, ...]:
    above = (None, *names)
    return tuple(
        TaskSpec(name, "Op", upstream=() if up is None else (up,), **changes)
        for up, name in zip(above, names, strict=False)
    )


# --- the shapes of DAGs --------------------------------------------------------------------------


def test_a_chain_runs_in_order_and_the_run_ends_with_it(store: Store, query: Query) -> None:
    run = Planned(store, query, tasks=chain("a", "b", "c"))
    assert run.run_state() == "queued"
    for name in "abc":
        assert run.plan().scheduled == 1
        assert run.plan().looked_at == 0
        assert run.do() == [name]
    planned = run.plan()
    assert planned.ended == {run.run: "success"}
    assert run.run_state() == "success"
    assert not run.is_marked()
    assert run.plan().looked_at == 0


def test_a_diamond_waits_for_both_its_sides(store: Store, query: Query) -> None:
    specs = (
        TaskSpec("top", "Op"),
        TaskSpec("left", "Op", upstream=("top",)),
        TaskSpec("right", "Op", upstream=("top",)),
        TaskSpec("end", "Op", upstream=("left", "right")),
    )
    run = Planned(store, query, tasks=specs)
    run.plan()
    assert run.do() == ["top"]
    run.plan()
    first, second = run.dispatch()
    store.tasks.succeed(run.epoch, first.id, first.token)
    assert run.plan().scheduled == 0
    store.tasks.succeed(run.epoch, second.id, second.token)
    assert run.plan().scheduled == 1
    assert run.do() == ["end"]
    assert run.plan().ended == {run.run: "success"}


def test_a_failure_goes_all_the_way_down_in_one_look_and_fails_the_run(store: Store, query: Query) -> None:
    run = Planned(store, query, tasks=(*chain("a", "b", "c", "d"), TaskSpec("alone", "Op")))
    run.plan()
    run.do(a="failed")
    assert run.plan().ended == {run.run: "failed"}
    states = {"a": "failed", "alone": "success", "b": "upstream_failed", "c": "upstream_failed", "d": "upstream_failed"}
    assert run.states() == states


def test_a_branch_skips_what_it_did_not_choose_and_goes_on_behind_it(store: Store, query: Query) -> None:
    specs = (
        TaskSpec("branch", "Op"),
        TaskSpec("yes", "Op", upstream=("branch",)),
        TaskSpec("no", "Op", upstream=("branch",)),
        TaskSpec("after_no", "Op", upstream=("no",)),
        TaskSpec("join", "Op", upstream=("yes", "after_no"), trigger_rule="none_failed_min_one_success"),
    )
    run = Planned(store, query, tasks=specs)
    run.plan()
    (task,) = run.dispatch()
    assert store.tasks.succeed(run.epoch, task.id, task.token, skips=("no", "nobody", "branch"))
    assert run.states() == {"after_no": "none", "branch": "success", "join": "none", "no": "skipped", "yes": "none"}
    run.plan()
    assert run.do() == ["yes"]
    run.plan()
    assert run.do() == ["join"]
    assert run.plan().ended == {run.run: "success"}
    assert run.states()["after_no"] == "skipped"


def test_a_late_answer_skips_nothing(store: Store, query: Query) -> None:
    run = Planned(store, query, tasks=chain("a", "b"))
    run.plan()
    (task,) = run.dispatch()
    store.tasks.mark(task.id, "failed")
    assert not store.tasks.succeed(run.epoch, task.id, task.token, skips=("b",))
    assert run.states() == {"a": "failed", "b": "none"}


def test_a_short_circuit_skips_what_has_not_begun_and_nothing_else(store: Store, query: Query) -> None:
    specs = (*chain("gate", "a", "b"), TaskSpec("always", "Op", upstream=("gate",), trigger_rule="always"))
    run = Planned(store, query, tasks=specs)
    run.plan()  # "always" need not wait for the gate
    given = {task.task_id: task for task in run.dispatch()}
    assert sorted(given) == ["always", "gate"]
    gate = given["gate"]
    assert store.tasks.succeed(run.epoch, gate.id, gate.token, skips=("a", "b", "always"))
    assert run.states() == {"a": "skipped", "always": "running", "b": "skipped", "gate": "success"}
    always = given["always"]
    store.tasks.succeed(run.epoch, always.id, always.token)
    assert run.plan().ended == {run.run: "success"}


RULES = {
    "all_success": ("upstream_failed", "success", "skipped"),
    "all_failed": ("success", "skipped", "skipped"),
    "all_done": ("success", "success", "success"),
    "all_skipped": ("skipped", "skipped", "success"),
    "one_success": ("upstream_failed", "success", "skipped"),
    "one_failed": ("success", "skipped", "skipped"),
    "one_done": ("success", "success", "skipped"),
    "none_failed": ("upstream_failed", "success", "success"),
    "none_failed_min_one_success": ("upstream_failed", "success", "skipped"),
    "none_skipped": ("success", "success", "skipped"),
    "always": ("success", "success", "success"),
}


@pytest.mark.parametrize("outcome", ["failed", "success", "skipped"])
def test_every_trigger_rule_is_evaluated(store: Store, query: Query, outcome: str) -> None:
    specs = tuple(TaskSpec(rule, "Op", upstream=("up",), trigger_rule=rule) for rule in RULES)  # type: ignore[arg-type]
    run = Planned(store, query, tasks=(TaskSpec("up", "Op"), *specs))
    while True:
        run.plan()
        if not run.do(up=outcome):
            break
    index = ["failed", "success", "skipped"].index(outcome)
    states = run.states()
    assert states.pop("up") == outcome
    assert states == {rule: expected[index] for rule, expected in RULES.items()}
    assert run.run_state() == ("failed" if "upstream_failed" in states.values() else "success")
