"""Mapped tasks that are skipped, stopped or cleared midway: what has no value does not begin, and none is forgotten."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Query
from tests.store.scheduling.test_elements import Emitting
from tests.store.scheduling.test_expansion import Maps
from tests.supervisor.tasks_harness import WAIT, Tasks, clear, event_of, instance_of, task_states

from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState
from headgate.protocol.messages.maps import MapSpec, Output, Values
from headgate.protocol.messages.steps import Emitted, StepSucceeded
from headgate.store.errors import ValueRefused
from headgate.store.store import Store

# --- skipped -------------------------------------------------------------------------------------


def test_a_skipped_task_beside_the_one_that_emits_does_not_skip_what_a_success_would_let_run(
    store: Store, query: Query
) -> None:
    maps = Emitting(store, query, has_other=True, trigger_rule="none_failed_min_one_success")
    source = maps.begin()
    (other,) = maps.dispatch()
    ends.succeed(store.tasks, maps.epoch, other.id, other.token, end="skipped")
    maps.emit(source, 0, 1)
    assert maps.instances() == ["scheduled"]
    maps.end(source, StepSucceeded(emitted=Emitted(1, ())))
    assert (maps.own()["state"], maps.instances()) == ("success", ["scheduled"])


def test_instances_that_are_cleared_do_not_begin_if_their_values_cannot_be_counted_any_more(
    store: Store, query: Query
) -> None:
    maps = Maps(store, query)
    maps.source_leaves([1, 2, 3])
    maps.run_all()
    clear(store, maps.run, "source", "each", "total")
    store.tasks.mark(instance_of(store, maps.run, "source"), "success")
    maps.plan()
    assert (maps.own()["state"], maps.instances()) == ("failed", ["upstream_failed"] * 3)
    assert (task_states(store, maps.run)["total"], maps.ended()) == (TaskState.UPSTREAM_FAILED, "failed")


# --- stopped -------------------------------------------------------------------------------------


def test_after_as_many_failures_as_may_be_no_more_begin_again(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(10), spec={"window": 2, "failures_max": 1})
    maps.source_leaves(None)
    maps.run_all()
    clear(store, maps.run, "each", "total")
    maps.plan()
    assert Counter(maps.instances()) == {"scheduled": 2, "none": 8}
    maps.run_some(1, fails=(0,))
    assert Counter(maps.instances()) == {"failed": 1, "scheduled": 1, "upstream_failed": 8}
    assert "no instance is made" in maps.own()["last_error"]
    maps.run_all()
    assert maps.ended() == "failed"
    store.tasks.clear_many(maps.run, ["each"], downstream=True, only_failed=True)
    maps.plan()
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 10, "success")


def test_with_fail_fast_an_instance_that_has_waited_for_its_trigger_goes_on(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(3), spec={"fail_fast": True})
    maps.source_leaves(None)
    waits, fails = maps.dispatch(limit=2)
    assert ends.defer(store.tasks, maps.epoch, waits.id, waits.token, WAIT)
    store.claim_triggers(maps.epoch, limit=10, queues=QUEUES)
    store.store_slice(maps.epoch, events=[event_of(maps.row(waits.id)["trigger_id"])])
    ends.fail(store.tasks, maps.epoch, fails.id, fails.token, "boom")
    maps.plan()
    assert maps.instances() == ["scheduled", "failed", "upstream_failed"]
    assert maps.run_some(9) == [0]
    assert (maps.instances(), maps.ended()) == (["success", "failed", "upstream_failed"], "failed")


def test_with_fail_fast_the_retry_of_one_that_has_begun_does_not_depend_on_when_the_run_is_looked_at(
    store: Store, query: Query
) -> None:
    maps = Maps(store, query, Values(3), spec={"fail_fast": True}, retries=1, retry_delay_s=0.0)
    maps.source_leaves(None)
    first, second, _ = maps.dispatch(limit=3)
    ends.fail(store.tasks, maps.epoch, first.id, first.token, "boom")
    assert len(store.tasks.retry_due(maps.epoch)) == 1
    ends.fail(store.tasks, maps.epoch, second.id, second.token, "boom", may_retry=False)
    maps.plan()
    assert maps.instances() == ["scheduled", "failed", "running"]


# --- cleared above -------------------------------------------------------------------------------


def test_instances_that_have_not_begun_wait_for_the_elements_of_a_source_that_is_cleared_alone(
    store: Store, query: Query
) -> None:
    maps = Emitting(store, query, spec={"window": 2})
    source = maps.begin()
    maps.end(source, StepSucceeded(emitted=Emitted(0, (b"1", b"2", b"3", b"4"))))
    assert maps.instances() == ["scheduled"] * 2
    clear(store, maps.run, "source")
    again = maps.begin()
    assert maps.run_some(2) == [0, 1]
    assert maps.instances() == ["success"] * 2, "the third has no value yet"
    maps.emit(again, 0, 1, 2, 3)
    assert maps.instances() == ["success", "success", "scheduled"]
    maps.end(again, StepSucceeded(emitted=Emitted(3, ())))
    assert (maps.own()["state"], maps.own()["map_length"]) == ("success", 3)
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 3, "success")


def test_what_fail_fast_has_kept_from_beginning_is_cleared_with_what_has_failed(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(4), spec={"window": 3, "fail_fast": True})
    maps.source_leaves(None)
    maps.run_some(2, fails=(1,))
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success", "failed", "upstream_failed"], "failed")
    store.tasks.clear_many(maps.run, only_failed=True)
    maps.plan()
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 4, "success")


@pytest.mark.parametrize("below", ["a sequence", "expanded"])
def test_a_task_that_is_mapped_after_it_has_succeeded_has_no_values_and_says_so(
    store: Store, query: Query, below: str
) -> None:
    over_each = MapSpec(Output("each", "return_value")) if below == "expanded" else None
    plain = (TaskSpec("each", "Op"), TaskSpec("total", "Op", upstream=("each",)))
    maps = Maps.__new__(Maps)
    Tasks.__init__(maps, store, query, tasks=plain)
    mapped = msgspec.structs.replace(plain[0], map=MapSpec(Values(3)))
    total = msgspec.structs.replace(plain[1], map=over_each)
    maps.source_leaves("what each leaves")
    store.tasks.save_file(maps.epoch, "etl.py", [DagSpec("etl", tasks=(mapped, total))])
    maps.plan()
    reason = "the task 'each' has succeeded in this run before it was mapped, and so has no instances: "
    if below == "expanded":
        query("UPDATE task_instance SET state = 'none' WHERE task_id = 'total'")
        query("UPDATE dag_run SET needs_look = :yes", yes=True)
        maps.plan()
        assert maps.own("total")["state"] == "failed"
        assert maps.own("total")["last_error"].startswith(reason)
        return
    where: Any = {"after": -1, "offset": 0, "limit": 9, "bytes_max": 9}
    with pytest.raises(ValueRefused, match=reason):
        store.tasks.pull_xcoms(maps.run, "each", "return_value", **where)
    store.tasks.clear_many(maps.run, ["each"])
    maps.plan()
    maps.run_all()
    assert store.tasks.pull_xcoms(maps.run, "each", "return_value", **where).count == 3
