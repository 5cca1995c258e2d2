"""Why tasks of groups, loops and worklists wait: the sentences for their states, from real rows."""

from __future__ import annotations

from typing import Any

from tests.store.harness import Query
from tests.store.scheduling.test_groups import Grouped
from tests.store.scheduling.test_worklists import Crawl, Looped
from tests.supervisor.tasks_harness import clear

from headgate.protocol.messages.maps import Values
from headgate.protocol.messages.steps import StepSucceeded
from headgate.scheduling.why import Answer
from headgate.store.store import Store


def why(maps: Any, name: str) -> Answer:
    answer: Answer = maps.store.inspect.why_task(maps.store.inspect.find_task("etl", "r1", name))
    return answer


def headline(maps: Any, name: str) -> str:
    return why(maps, name).headline


# --- groups --------------------------------------------------------------------------------------


def test_a_group_that_has_not_begun_waits_for_what_it_is_expanded_over(store: Store, query: Query) -> None:
    maps = Grouped(store, query, above_b=("other",))
    maps.plan()
    text = "the group g waits for source, over whose output it is expanded"
    assert [headline(maps, name) for name in ("a", "b")] == [text, text]
    assert "`headgate why etl r1 source`" in why(maps, "b").next


def test_a_group_that_has_not_begun_waits_for_the_tasks_above_its_first_ones(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(3), above_b=("other",))
    maps.plan()
    assert headline(maps, "b") == "the group g waits for source (scheduled), other (scheduled)"


def test_a_group_says_how_far_it_is_expanded_and_which_indexes_are_open(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(40), window=3)
    maps.source_leaves(None)
    maps.go("a", 0)
    text = "expanded 3 of 40; window 3 full: the indexes 0, 1, 2 of the group g are open"
    assert [headline(maps, name) for name in ("a", "b")] == [text, text]
    assert why(maps, "b").next.startswith("the next index begins when one of these has ended in all tasks of the group")
    # Of the task that is asked about, if it has not ended there.
    assert "why etl r1 'b[0]'" in why(maps, "a").next
    maps.go("b", 0)
    assert headline(maps, "a") == "expanded 4 of 40; window 3 full: the indexes 1, 2, 3 of the group g are open"
    assert ("group", "g") in why(maps, "a").facts
    assert ("instances", "1 success, 3 open of 40") in why(maps, "a").facts


def test_many_open_indexes_are_counted(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(40), window=9)
    maps.source_leaves(None)
    assert headline(maps, "a").endswith("window 9 full: the indexes 0, 1, 2, 3, 4 and 4 more of the group g are open")


def test_an_instance_waits_for_those_at_its_own_index(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(2))
    maps.source_leaves(None)
    answer = why(maps, "b[1]")
    assert answer.headline == "it waits for 1 of 1 upstream tasks: a[1] (scheduled)"
    assert "`headgate why etl r1 'a[1]'` says" in answer.next
    assert ("upstream", "a[1] (scheduled), rule all_success") in answer.facts
    maps.go("a", 0, "fail")
    answer = why(maps, "b[0]")
    assert answer.headline.startswith("it could not run: a[0] failed, and its rule is all_success; that was decided ")
    assert "`headgate tasks clear etl r1 'a[0]' --downstream`" in answer.next
    assert headline(maps, "b[1]") == "it waits for 1 of 1 upstream tasks: a[1] (running)"


def test_an_instance_waits_for_whole_tasks_outside_of_the_group(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(2), above_b=("other",))
    maps.plan()
    maps.go("source", -1)
    maps.go("a", 0)
    assert headline(maps, "b[0]") == "it waits for 1 of 2 upstream tasks: other (running)"
    assert headline(maps, "b[1]") == "it waits for 2 of 2 upstream tasks: a[1] (running), other (running)"
    maps.go("a", 1)
    assert headline(maps, "b") == "at each index it waits for other (running)"
    maps.go("other", -1)
    assert headline(maps, "b") == "expanded 2 of 2: the indexes 0, 1 of the group g are open"
    assert why(maps, "b").next.startswith("it ends when these have ended; `headgate why etl r1 'b[0]'`")


def test_an_index_that_was_cleared_waits_for_the_window(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(4), window=2)
    maps.source_leaves(None)
    maps.run_all()
    clear(store, maps.run, "b")
    maps.plan()
    begun = [name for name, state in enumerate(maps.instances("b")) if state == "scheduled"]
    assert begun == [0, 1]
    assert headline(maps, "b[3]") == "expanded 4 of 4; window 2 full: the indexes 0, 1 of the group g are open"
    assert headline(maps, "b") == "expanded 4 of 4: the indexes 0, 1, 2, 3 of the group g are open"


def test_a_group_that_was_stopped_says_so(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(5), window=2, fail_fast=True)
    maps.source_leaves(None)
    maps.go("a", 0, "fail")
    maps.go("a", 1)
    maps.go("b", 1)
    assert headline(maps, "a") == ("it waits for nothing: stopped by fail_fast after 2 of 5, 1 success, 1 failed")


# --- loops ---------------------------------------------------------------------------------------


def test_a_loop_says_in_which_iteration_it_is_and_which_task_is_its_gate(store: Store, query: Query) -> None:
    loop = Looped(store, query)
    loop.iterate(0)
    for name in ("body", "gate"):
        answer = why(loop, name)
        assert (answer.reason, answer.headline) == ("iteration", "iteration 1, from 0, of at most 9: body is scheduled")
        assert answer.next.startswith("behind it the gate gate decides whether there is another one; `headgate why etl")
        assert ("instances", "1 success, 1 open so far") in answer.facts
    assert headline(loop, "gate[1]") == "it waits for 1 of 1 upstream tasks: body[1] (scheduled)"
    assert ("iteration", "1, from 0, of at most 9") in why(loop, "gate[1]").facts
    loop.end(loop.take(), StepSucceeded())
    assert headline(loop, "body") == "iteration 1, from 0, of at most 9: gate is scheduled"
    loop.gate(is_last=True)
    assert headline(loop, "gate") == "it waits for nothing: 2 iterations are made, of at most 9, 2 success"


# --- worklists -----------------------------------------------------------------------------------


def test_a_worklist_says_how_many_values_it_has_and_when_it_ends(store: Store, query: Query) -> None:
    crawl = Crawl(store, query, spec={"window": 2})
    assert headline(crawl, "each") == "expanded 1 of 1 so far, of which 0 are appended: 1 scheduled"
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append("b", "c", "d")))
    assert headline(crawl, "each") == "expanded 3 of 4 so far, of which 3 are appended; window 2 full: 2 scheduled"
    assert ("worklist", "1 given, 3 appended, at most 100") in why(crawl, "each").facts
    crawl.end(crawl.take(), StepSucceeded())
    crawl.end(crawl.take(), StepSucceeded())
    answer = why(crawl, "each")
    assert (answer.reason, answer.headline) == (
        "worklist",
        "expanded 4 of 4 so far, of which 3 are appended: 1 scheduled",
    )
    assert answer.next.startswith("it ends when none of these is left, which could append more")
    assert ("instances", "3 success, 1 open so far") in answer.facts
    crawl.end(crawl.take(), StepSucceeded())
    assert headline(crawl, "each") == "it waits for nothing: 4 instances are made, 4 success"
