"""Which tasks are upstream of a task, and which downstream; and what becomes of tasks with many instances."""

from __future__ import annotations

from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState, TriggerRule
from headgate.scheduling.planning import Decisions, Graph, decide, related

#  a ─▶ b ─▶ d
#  └──▶ c ─▶─┘    e
DIAMOND = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ()}


def test_relatives_are_found_at_any_distance_in_the_direction_that_was_asked_for() -> None:
    assert related(DIAMOND, ["b"], upstream=False, downstream=False) == {"b"}
    assert related(DIAMOND, ["b"], upstream=True, downstream=False) == {"a", "b"}
    assert related(DIAMOND, ["b"], upstream=False, downstream=True) == {"b", "d"}
    assert related(DIAMOND, ["a"], upstream=False, downstream=True) == {"a", "b", "c", "d"}


def test_what_is_reached_upward_is_not_followed_downward() -> None:
    assert related(DIAMOND, ["b"], upstream=True, downstream=True) == {"a", "b", "d"}


def test_a_task_that_the_dag_no_longer_has_stands_alone() -> None:
    assert related(DIAMOND, ["old"], upstream=True, downstream=True) == {"old"}


def test_a_chain_may_be_as_long_as_a_dag() -> None:
    chain = {str(n): () if n == 0 else (str(n - 1),) for n in range(10_000)}
    assert len(related(chain, ["0"], upstream=False, downstream=True)) == 10_000


# --- instances of mapped tasks -------------------------------------------------------------------


def decided(*, rule: TriggerRule = "all_success", **now: str) -> Decisions:
    """Decide about ``source`` ─▶ ``each`` ─▶ ``total``, of which any has instances in several states."""
    tasks = (
        TaskSpec("source", "Op"),
        TaskSpec("each", "Op", upstream=("source",), trigger_rule=rule),
        TaskSpec("total", "Op", upstream=("each",)),
    )
    graph = Graph(DagSpec("etl", tasks=tasks))
    return decide(graph, {name: frozenset(map(TaskState, some.split())) for name, some in now.items()})


def test_instances_that_have_not_begun_begin_whatever_became_of_the_others() -> None:
    assert decided(source="success", each="none", total="none") == Decisions(scheduled=("each",))
    for others in ("success", "running", "failed", "skipped", "deferred up_for_retry success"):
        assert decided(source="success", each=f"none {others}", total="none").scheduled == ("each",)


def test_what_is_downstream_waits_for_all_instances_as_its_rule_says() -> None:
    assert decided(source="success", each="success running", total="none") == Decisions()
    assert decided(source="success", each="success", total="none") == Decisions(scheduled=("total",))
    skipped = decided(source="success", each="success skipped", total="none")
    assert (skipped.upstream_skipped, skipped.end) == (("total",), "success")


def test_the_failure_of_one_instance_goes_downstream_at_once_and_the_run_ends_with_the_last() -> None:
    failed = decided(source="success", each="success failed running", total="none")
    assert failed == Decisions(upstream_failed=("total",))
    failed = decided(source="success", each="success failed", total="none")
    assert failed == Decisions(upstream_failed=("total",), end="failed")


def test_all_instances_that_have_not_begun_fail_with_what_is_upstream_of_them() -> None:
    failed = decided(source="failed", each="none", total="none")
    assert failed == Decisions(upstream_failed=("each", "total"), end="failed")
    still = decided(source="failed", each="none running", total="none")
    assert still == Decisions(upstream_failed=("each", "total"))


def test_a_run_fails_with_one_instance_of_a_task_that_nothing_is_downstream_of() -> None:
    assert decided(source="success", each="success", total="success failed").end == "failed"
    assert decided(source="success", each="success", total="success skipped").end == "success"
    assert decided(source="success", each="success", total="success scheduled").end is None
