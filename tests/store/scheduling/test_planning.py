"""The evaluation of runs: which tasks begin, when a run ends, and that no change is missed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.supervisor.tasks_harness import WAIT, S, Tasks, clear, event_of, task_states

from headgate.protocol.messages.dags import DagSpec, StartTrigger, TaskSpec
from headgate.protocol.messages.steps import StepSucceeded
from headgate.protocol.values import encode_value
from headgate.store.store import Store
from headgate.store.tasks import task_rows
from headgate.store.tasks.outcomes import StepEnd


class Planned(Tasks):
    """A run that is planned by the scheduler's own verb."""

    def plan(self) -> Any:
        return self.store.scheduling.plan(self.epoch)

    def states(self, run: int | None = None) -> dict[str, str]:
        found = task_states(self.store, run or self.run)
        return {name: state.value for name, state in sorted(found.items())}

    def do(self, **outcomes: str) -> list[str]:
        """Dispatch what may run and end it as said, well if nothing is; return the names."""
        given = self.dispatch()
        for task in given:
            how = outcomes.get(task.task_id, "success")
            verbs = self.store.tasks
            if how == "success":
                assert ends.succeed(verbs, self.epoch, task.id, task.token)
            elif how == "skipped":
                assert ends.succeed(verbs, self.epoch, task.id, task.token, end="skipped")
            else:
                assert ends.fail(verbs, self.epoch, task.id, task.token, "error")
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
        assert run.plan().evaluated == 0
        assert run.do() == [name]
    planned = run.plan()
    assert planned.ended == {run.run: "success"}
    assert run.run_state() == "success"
    assert not run.is_marked()
    assert run.plan().evaluated == 0


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
    ends.succeed(store.tasks, run.epoch, first.id, first.token)
    assert run.plan().scheduled == 0
    ends.succeed(store.tasks, run.epoch, second.id, second.token)
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
    assert ends.succeed(store.tasks, run.epoch, task.id, task.token, skips=("no", "nobody", "branch"))
    assert run.states() == {"after_no": "none", "branch": "success", "join": "none", "no": "skipped", "yes": "none"}
    run.plan()
    assert run.do() == ["yes"]
    run.plan()
    assert run.do() == ["join"]
    assert run.plan().ended == {run.run: "success"}
    assert run.states()["after_no"] == "skipped"


def test_branches_that_end_together_skip_in_the_order_of_rows(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two supervisors that skip the same tasks so wait for each other in one order."""
    names = ("x", "y", "z")
    specs = (
        *(TaskSpec(name, "Op") for name in ("b1", "b2")),
        *(TaskSpec(n, "Op", upstream=("b1", "b2")) for n in names),
    )
    run = Planned(store, query, tasks=specs)
    run.plan()
    first, second = sorted(run.dispatch(), key=lambda task: task.task_id)
    changed: list[int] = []
    real = task_rows.changed

    def note(tx: Any, row: Any, by: Any, *more: Any, **changes: Any) -> Any:
        changed.append(by["id"])
        return real(tx, row, by, *more, **changes)

    monkeypatch.setattr(task_rows, "changed", note)
    stored = [
        StepEnd(first.id, first.token, StepSucceeded((), ("z", "y"))),
        StepEnd(second.id, second.token, StepSucceeded((), ("x", "y"))),
    ]
    assert store.tasks.store_ends(run.epoch, stored) == [S.SUCCESS, S.SUCCESS]
    ids = {row["task_id"]: row["id"] for row in query("SELECT id, task_id FROM task_instance")}
    assert changed == sorted(ids[name] for name in names)
    assert {run.states()[name] for name in names} == {"skipped"}


def test_a_late_answer_skips_nothing(store: Store, query: Query) -> None:
    run = Planned(store, query, tasks=chain("a", "b"))
    run.plan()
    (task,) = run.dispatch()
    store.tasks.mark(task.id, "failed")
    assert not ends.succeed(store.tasks, run.epoch, task.id, task.token, skips=("b",))
    assert run.states() == {"a": "failed", "b": "none"}


def test_a_short_circuit_skips_what_has_not_begun_and_nothing_else(store: Store, query: Query) -> None:
    specs = (*chain("gate", "a", "b"), TaskSpec("always", "Op", upstream=("gate",), trigger_rule="always"))
    run = Planned(store, query, tasks=specs)
    run.plan()  # "always" need not wait for the gate
    given = {task.task_id: task for task in run.dispatch()}
    assert sorted(given) == ["always", "gate"]
    gate = given["gate"]
    assert ends.succeed(store.tasks, run.epoch, gate.id, gate.token, skips=("a", "b", "always"))
    assert run.states() == {"a": "skipped", "always": "running", "b": "skipped", "gate": "success"}
    always = given["always"]
    ends.succeed(store.tasks, run.epoch, always.id, always.token)
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


# --- limits of an evaluation ---------------------------------------------------------------------


def test_a_task_that_is_cleared_in_the_middle_runs_again_and_so_does_what_is_not_done(
    store: Store, query: Query
) -> None:
    run = Planned(store, query, tasks=chain("a", "b", "c"))
    run.plan()
    run.do()
    run.plan()
    run.do(b="failed")
    assert run.plan().ended == {run.run: "failed"}
    clear(store, run.run, "b", "c")
    assert run.run_state() == "running"
    assert run.plan().scheduled == 1
    assert run.do() == ["b"]
    run.plan()
    assert run.do() == ["c"]
    assert run.plan().ended == {run.run: "success"}


@pytest.mark.parametrize("how", ["pause", "remove"])
def test_nothing_begins_in_a_dag_that_is_paused_or_gone_and_goes_on_when_it_does(
    store: Store, query: Query, how: str
) -> None:
    run = Planned(store, query, tasks=chain("a", "b"))
    run.plan()
    (task,) = run.dispatch()
    if how == "pause":
        store.tasks.set_paused("etl", is_paused=True)
    else:
        store.tasks.save_file(run.epoch, "etl.py", [])
    second = None if how == "remove" else store.tasks.create_run("etl", "r2")
    ends.succeed(store.tasks, run.epoch, task.id, task.token)
    assert run.plan().scheduled == 0
    assert run.plan().evaluated == 0
    assert run.run_state() == "running"
    assert second is None or run.run_state(second) == "queued"
    if how == "pause":
        store.tasks.set_paused("etl", is_paused=False)
    else:
        store.tasks.save_file(run.epoch, "etl.py", [run.spec])
    assert run.plan().scheduled == (1 if second is None else 2)
    assert "b" in run.do()


def test_a_run_follows_its_dag_when_the_file_has_changed(store: Store, query: Query) -> None:
    run = Planned(store, query, tasks=chain("a", "b", "c"))
    run.plan()
    run.do()
    store.tasks.save_file(run.epoch, "etl.py", [DagSpec("etl", tasks=chain("a", "new", "c"))])
    assert run.is_marked()
    run.plan()
    assert run.states() == {"a": "success", "b": "removed", "c": "none", "new": "scheduled"}
    assert run.do() == ["new"]
    run.plan()
    assert run.do() == ["c"]
    assert run.plan().ended == {run.run: "success"}


def test_a_file_that_is_parsed_again_unchanged_marks_no_run(store: Store, query: Query) -> None:
    run = Planned(store, query)
    run.plan()
    store.tasks.save_file(run.epoch, "etl.py", [run.spec])
    assert not run.is_marked()


START = StartTrigger("a.Trigger", encode_value({"n": 1}, where="k"), "resume", encode_value({}, where="k"), 60.0)


def test_a_task_with_a_start_trigger_begins_in_it_each_try_and_never_on_a_worker(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    spec = TaskSpec("a", "Op", start_trigger=START, retries=1, retry_delay_s=10.0)
    run = Planned(open_store(clock=clock), query, tasks=(spec,))
    for _ in range(2):
        assert run.state() in (S.NONE, S.UP_FOR_RETRY)
        planned = run.plan()
        if run.state() is S.UP_FOR_RETRY:
            clock.advance(10)
            assert run.store.tasks.retry_due(run.epoch) == [run.a]
        else:
            assert (planned.scheduled, planned.in_triggers) == (0, 1)
        assert run.dispatch() == []
        assert run.state() is S.DEFERRED
        (trigger,) = run.store.claim_triggers(run.epoch, limit=9, queues=QUEUES)
        assert (trigger.classpath, trigger.kwargs) == (START.classpath, START.kwargs)
        run.store.store_slice(run.epoch, events=[event_of(trigger.id, kind="failed")])
    assert run.state() is S.FAILED
    assert run.plan().ended == {run.run: "failed"}


def test_a_run_without_tasks_succeeds_at_once(store: Store, query: Query) -> None:
    run = Planned(store, query)
    store.tasks.save_file(run.epoch, "e.py", [DagSpec("empty")])
    empty = store.tasks.create_run("empty", "r")
    assert empty is not None
    assert run.plan().ended == {empty: "success"}


def test_a_wide_run_is_begun_in_pieces(store: Store, query: Query) -> None:
    run = Planned(store, query, tasks=tuple(TaskSpec(f"t{number}", "Op") for number in range(1200)))
    counts = []
    while (planned := run.plan()).evaluated:
        counts.append(planned.scheduled)
    assert counts == [500, 500, 200]


def test_a_worker_that_is_lost_and_a_restart_mark_the_run(store: Store, query: Query) -> None:
    run = Planned(store, query)
    run.plan()
    (task,) = run.dispatch()
    run.clear_it()
    assert run.plan().scheduled == 0
    ends.lose_worker(store.tasks, run.epoch, task.id, task.token, "killed")
    assert run.plan().scheduled == 1
    (task,) = run.dispatch()
    ends.lose_worker(store.tasks, run.epoch, task.id, task.token, "killed")
    assert run.plan().ended == {run.run: "failed"}


def test_a_trigger_that_ends_its_task_marks_the_run(store: Store, query: Query) -> None:
    run = Planned(store, query, tasks=chain("a", "b"))
    _, trigger_id = run.defer_it(WAIT)
    run.plan()
    store.store_slice(run.epoch, events=[event_of(trigger_id, kind="success")])
    assert run.plan().scheduled == 1
    assert run.do() == ["b"]


# --- max_active_runs -----------------------------------------------------------------------------


def many_runs(run: Planned, count: int, *, runs_max: int) -> list[int]:
    spec = DagSpec("many", max_active_runs=runs_max, tasks=(TaskSpec("a", "Op"),))
    run.store.tasks.save_file(run.epoch, "many.py", [spec])
    made = [
        run.store.tasks.create_run("many", f"m{number}", logical_date=Clock().now.replace(year=2020 - number))
        for number in range(count)
    ]
    return [one for one in made if one is not None]


def test_runs_beyond_the_limit_wait_and_the_oldest_date_goes_first(store: Store, query: Query) -> None:
    run = Planned(store, query)
    ids = many_runs(run, 5, runs_max=2)
    run.plan()
    assert [run.run_state(id_) for id_ in ids] == ["queued", "queued", "queued", "running", "running"]
    while given := run.dispatch(limit=1):
        assert ends.succeed(store.tasks, run.epoch, given[0].id, given[0].token)
        run.plan()
        run.plan()
        states = [run.run_state(id_) for id_ in ids]
        assert states.count("running") == min(2, 5 - states.count("success"))
        assert "queued" not in states[states.count("queued") :], "those that wait are the newest"
    assert [run.run_state(id_) for id_ in ids] == ["success"] * 5


def test_more_may_run_at_once_when_the_file_says_so(store: Store, query: Query) -> None:
    run = Planned(store, query)
    ids = many_runs(run, 3, runs_max=1)
    run.plan()
    assert [run.run_state(id_) for id_ in ids].count("running") == 1
    spec = DagSpec("many", max_active_runs=3, tasks=(TaskSpec("a", "Op"),))
    store.tasks.save_file(run.epoch, "many.py", [spec])
    run.plan()
    assert [run.run_state(id_) for id_ in ids] == ["running"] * 3
