"""The transitions of a deferral in docs/deferral.md, with real processes: rows of the database and the log of the try.

A pool with one slot makes ``scheduled`` a state that can be looked at: while another task has the slot, what is resumed
waits there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.integration.station import Run, Station
from tests.supervisor.tasks_harness import clear

DAGS = """
from datetime import timedelta
from headgate.tasks import DAG
from users_tasks import Holds, Waits

with DAG("waits"):
    Waits(task_id="a", pool="narrow", holds=True)

with DAG("waits_twice"):
    Waits(task_id="a", times=2)

with DAG("waits_briefly"):
    Waits(task_id="a", pool="narrow", wait=timedelta(seconds=0.3))

with DAG("takes_the_slot"):
    Holds(task_id="b", pool="narrow", priority_weight=1)
"""


@pytest.fixture
def narrow(station: Station) -> Station:
    station.store.tasks.set_pool("narrow", 1)
    station.write("transitions.py", DAGS)
    station.wait_dag("takes_the_slot")
    return station


@contextmanager
def slot_taken(station: Station) -> Iterator[None]:
    """Have the slot of the pool taken meanwhile."""
    other = station.run("takes_the_slot")
    other.wait(b="running")
    yield
    other.say("b.go")
    other.wait_end()


def columns(run: Run, *names: str) -> tuple[Any, ...]:
    row = run.row("a")
    return tuple(row[name] for name in names)


def deferred(station: Station, dag: str) -> tuple[Run, int]:
    run = station.run(dag).wait(a="deferred")
    trigger_id = int(run.row("a")["trigger_id"])
    run.wait_told("a waits")
    return run, trigger_id


def test_running_defer_deferred(narrow: Station) -> None:
    run, trigger_id = deferred(narrow, "waits")
    assert columns(run, "state", "next_method", "triggerer_id", "event_id") == ("deferred", "resumed", None, None)
    trigger = run.trigger(trigger_id)
    assert trigger["classpath"] == "users_tasks.Gate"
    assert str(run.folder) not in trigger["kwargs"], "encrypted"
    assert trigger["finished_at"] is trigger["removed_at"] is None
    told = run.wait_logged("a", "deferred")
    assert (told["state"], told["trigger"], told["goes_on_in"]) == ("deferred", "users_tasks.Gate", "resumed")
    # The worker and its slot are free: another task has them while this one waits.
    with slot_taken(narrow):
        assert run.state("a") == "deferred"
    run.say("a.1")
    run.say("a.go")
    assert run.wait_end() == {"a": "success"}


def test_deferred_trigger_fires_scheduled_then_running_then_success(narrow: Station) -> None:
    run, trigger_id = deferred(narrow, "waits")
    deferral = run.row("a")["token"]
    with slot_taken(narrow):
        run.say("a.1", "hello")
        run.wait(a="scheduled")
        names = ("trigger_id", "next_method", "token", "triggerer_id", "trigger_timeout")
        assert columns(run, *names) == (None, "resumed", None, None, None)
        assert run.row("a")["event_id"] is not None
        assert run.trigger(trigger_id)["finished_at"] is not None
        assert "a 1 resumed hello" not in run.journal()
    run.wait(a="running").wait_told("a 1 resumed hello")
    assert columns(run, "trigger_id", "next_method") == (None, "resumed")
    assert columns(run, "token", "triggerer_id")[0] not in (None, deferral)
    run.say("a.go")
    assert run.wait_end() == {"a": "success"}
    assert run.xcom("a") == ["hello"]
    assert run.journal().count("a 1 execute") == 1
    assert [record["method"] for record in run.logged("a", "begun")] == ["execute", "resumed"]
    assert run.wait_logged("a", "succeeded")["state"] == "success"


def test_deferred_timeout_scheduled_to_fail(narrow: Station) -> None:
    run = narrow.run("waits_briefly").wait(a="deferred")
    trigger_id = run.row("a")["trigger_id"]
    with slot_taken(narrow):
        run.wait(a="scheduled")
        assert columns(run, "trigger_id", "next_method", "event_id") == (None, "__fail__", None)
        assert run.trigger(trigger_id)["finished_at"] is not None
    assert run.wait_end() == {"a": "failed"}
    assert "had not come when the timeout of the deferral was over" in run.wait_logged("a", "failed")["error"]


def test_deferred_trigger_fails_scheduled_to_fail(narrow: Station) -> None:
    run, trigger_id = deferred(narrow, "waits")
    with slot_taken(narrow):
        run.say("a.1", "raise")
        run.wait(a="scheduled")
        assert columns(run, "trigger_id", "next_method", "event_id") == (None, "__fail__", None)
        assert run.trigger(trigger_id)["finished_at"] is not None
    assert run.wait_end() == {"a": "failed"}
    assert "on fire" in run.row("a")["last_error"]


def test_deferred_cleared_none(narrow: Station) -> None:
    run, trigger_id = deferred(narrow, "waits")
    narrow.store.tasks.set_paused("waits", is_paused=True)
    clear(narrow.store, run.id, "a")
    assert columns(run, "state", "trigger_id", "next_method", "next_kwargs", "token") == ("none", *[None] * 4)
    assert run.trigger(trigger_id)["removed_at"] is not None
    run.wait_told("a on_kill-of-trigger")
    run.wait_told("a cleanup")
    narrow.store.tasks.set_paused("waits", is_paused=False)
    run.wait_told("a 2 execute")
    run.say("a.1")
    run.say("a.go")
    assert run.wait_end() == {"a": "success"}


def test_running_callback_fails_failed(narrow: Station) -> None:
    run, _ = deferred(narrow, "waits")
    run.say("a.1", "bad")
    assert run.wait_end() == {"a": "failed"}
    told = run.wait_logged("a", "failed")
    assert "the callback has failed" in told["error"]
    assert 'raise ValueError("the callback has failed")' in told["traceback"]
    assert columns(run, "trigger_id", "token", "triggerer_id") == (None, None, None)


def test_running_callback_defers_again(narrow: Station) -> None:
    run, first = deferred(narrow, "waits_twice")
    run.say("a.1", "one")
    run.wait_told("a waits", 2)
    run.wait(a="deferred")
    second = run.row("a")["trigger_id"]
    assert second not in (None, first)
    assert run.trigger(first)["finished_at"] is not None
    assert run.trigger(second)["finished_at"] is None
    run.say("a.2", "two")
    assert run.wait_end() == {"a": "success"}
    assert run.xcom("a") == ["one", "two"]
    assert run.row("a")["try_number"] == 1
