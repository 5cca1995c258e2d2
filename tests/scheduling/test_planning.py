"""Which tasks are upstream of a task, and which downstream."""

from __future__ import annotations

from headgate.scheduling.planning import related

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
