"""Failures of deferred tasks (timeout, error, dead triggerer, clear) and users' actions, with real processes.

Also who is asked to stop its work (I14).
"""

from __future__ import annotations

from functools import partial

import pytest
from tests.integration.conftest import StartStation
from tests.integration.station import Run, Station
from tests.supervisor.tasks_harness import clear
from tests.waiting import wait_until

DAGS = """
from datetime import timedelta
from headgate.tasks import DAG
from users_tasks import Holds, Waits

with DAG("fragile", max_active_runs=20):
    Waits(task_id="a")

with DAG("fragile_again"):
    Waits(task_id="a", retries=1, retry_delay=timedelta(0))

with DAG("impatient"):
    Waits(task_id="a", wait=timedelta(seconds=0.2), retries=1, retry_delay=timedelta(0))

with DAG("busy"):
    Holds(task_id="a", retries=1, retry_delay=timedelta(0))

with DAG("limited"):
    Waits(task_id="a", execution_timeout=timedelta(seconds=0.4))

with DAG("limited_in_all"):
    Waits(task_id="a", execution_timeout=timedelta(seconds=1), holds=True)
"""

HOOKS = ("a on_kill-of-trigger", "a on_kill-of-task")


@pytest.fixture
def fragile(station: Station) -> Station:
    station.write("fragile.py", DAGS)
    station.wait_dag("limited_in_all")
    return station


def wait_deferred(station: Station, dag: str) -> Run:
    run = station.run(dag)
    run.wait_told("a waits")
    return run.wait(a="deferred")


def hooks_called(run: Run) -> list[str]:
    return [line for line in run.journal() if line in HOOKS]


def has_cleaned_up(run: Run) -> bool:
    """Whether each trigger that ran has done so."""
    return run.told("a cleanup") >= run.told("a waits")


# --- a deferral that ends badly ------------------------------------------------------------------


def test_a_trigger_that_does_not_fire_in_time_fails_the_try_and_is_cancelled_without_on_kill(fragile: Station) -> None:
    run, limited = fragile.run("impatient"), fragile.run("limited")
    assert run.wait_end() == limited.wait_end() == {"a": "failed"}
    assert run.row("a")["try_number"] == 2, "its retries count"
    for number in (1, 2):
        failure = run.wait_logged("a", "failed", number)
        assert "what it waited for had not come when the timeout of the deferral was over" in failure["error"]
        assert "TriggerTimeout" in failure["error"]
    # execution_timeout counts while a task is deferred, too.
    assert "its execution_timeout is over" in limited.wait_logged("a", "failed")["error"]
    for each in (run, limited):
        # On a machine that is busy the time may be over before the runner has begun the trigger.
        wait_until(partial(has_cleaned_up, each), "each trigger that ran has cleaned up")
        assert hooks_called(each) == []


def test_the_traceback_of_a_trigger_that_raises_is_in_the_log_of_its_task(fragile: Station) -> None:
    run = wait_deferred(fragile, "fragile")
    run.say("a.1", "raise")
    assert run.wait_end() == {"a": "failed"}
    failure = run.wait_logged("a", "failed")
    assert "ConnectionError: the upstream is on fire" in failure["error"]
    assert "in raise_it" in failure["traceback"]
    assert "the upstream is on fire" in run.row("a")["last_error"]
    assert not any("resumed" in line for line in run.journal())


def test_a_trigger_that_ends_without_an_event_fails_its_task(fragile: Station) -> None:
    run = wait_deferred(fragile, "fragile")
    run.say("a.1", "return")
    assert run.wait_end() == {"a": "failed"}
    assert "returned before its first event" in run.wait_logged("a", "failed")["error"]


def test_a_trigger_that_failed_is_tried_again_with_its_task(fragile: Station) -> None:
    run = wait_deferred(fragile, "fragile_again")
    run.say("a.1", "raise")
    run.wait_told("a waits", 2)
    run.wait_told("a cleanup", 2)  # the second one raised as well: the file still says so
    assert run.wait_end() == {"a": "failed"}
    assert [line for line in run.journal() if "execute" in line] == ["a 1 execute", "a 2 execute"]


# --- execution_timeout ---------------------------------------------------------------------------


def test_execution_timeout_ends_a_task_that_runs_after_a_deferral(fragile: Station) -> None:
    run = wait_deferred(fragile, "limited_in_all")
    deadline = run.row("a")["deadline"]
    run.say("a.1")
    run.wait_told("a 1 resumed ")
    assert run.row("a")["deadline"] == deadline, "counted from the beginning of the try"
    assert run.wait_end() == {"a": "failed"}
    assert "execution_timeout" in run.row("a")["last_error"]
    assert hooks_called(run) == [], "a limit of time is no wish of a user"


# --- users ---------------------------------------------------------------------------------------


def test_a_task_cleared_while_deferred_begins_anew_and_the_old_trigger_changes_nothing(fragile: Station) -> None:
    run = wait_deferred(fragile, "fragile")
    old = run.row("a")["trigger_id"]
    clear(fragile.store, run.id, "a")
    run.wait_told("a on_kill-of-trigger")
    run.wait_told("a cleanup")
    run.wait_told("a waits", 2)
    new = run.row("a")["trigger_id"]
    assert new not in (None, old)
    assert fragile.query("SELECT id FROM trigger_event WHERE trigger_id = :id", id=old) == []
    wait_until(lambda: run.trigger(old)["triggerer_id"] is None, "the old trigger's row to be let go")
    run.say("a.1", "once")
    assert run.wait_end() == {"a": "success"}
    assert run.told("a 2 resumed once") == 1
    assert len([line for line in run.journal() if "resumed" in line]) == 1
    assert hooks_called(run) == ["a on_kill-of-trigger"], "the new one was not killed"


@pytest.mark.parametrize("mark", ["success", "failed"])
def test_a_deferred_task_that_is_marked_ends_at_once_and_its_trigger_is_killed(fragile: Station, mark: str) -> None:
    run = wait_deferred(fragile, "fragile_again")
    assert fragile.store.tasks.mark(run.task("a"), mark)  # type: ignore[arg-type]
    assert run.wait_end() == {"a": mark}
    run.wait_told("a on_kill-of-trigger")
    run.wait_told("a cleanup")
    assert run.journal() == ["a 1 execute", "a waits", "a on_kill-of-trigger", "a cleanup"]


@pytest.mark.parametrize("mark", ["success", "failed"])
def test_a_running_task_that_is_marked_ends_at_once_and_its_worker_is_killed(fragile: Station, mark: str) -> None:
    run = fragile.run("busy").wait(a="running")
    run.wait_told("a 1 execute")
    assert fragile.store.tasks.mark(run.task("a"), mark)  # type: ignore[arg-type]
    assert run.wait_end() == {"a": mark}
    run.wait_told("a 1 ends")
    assert run.journal() == ["a 1 execute", "a on_kill-of-task", "a 1 ends"]
    run.wait_logged("a", "the task was ended by a user or a signal")
    assert run.state("a") == mark, "what its worker said at its end came too late"


def test_a_running_task_that_is_cleared_begins_anew_when_its_worker_is_gone(fragile: Station) -> None:
    run = fragile.run("busy").wait(a="running")
    run.wait_told("a 1 execute")
    clear(fragile.store, run.id, "a")
    run.wait_told("a 2 execute")
    assert run.journal() == ["a 1 execute", "a on_kill-of-task", "a 1 ends", "a 2 execute"]
    run.say("a.go")
    assert run.wait_end() == {"a": "success"}


# --- a triggerer that crashes --------------------------------------------------------------------


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_another_triggerer_resumes_the_tasks_of_one_that_is_killed_each_once(start_station: StartStation) -> None:
    one = start_station(workers="6")
    one.write("fragile.py", DAGS)
    waiting = [one.run("fragile") for _ in range(20)]
    running = [one.run("busy") for _ in range(4)]
    for run in waiting:
        run.wait_told("a waits")
    for run in running:
        run.wait_told("a 1 execute")
    other = start_station(home=one.home)
    other.wait_ready()
    one.kill()
    for run in waiting:
        run.wait_told("a waits", 2)
        run.say("a.1", "hello")
    for run in running:
        run.say("a.go")
    for run in waiting:
        assert run.wait_end() == {"a": "success"}
        assert run.told("a 1 execute") == run.told("a 1 resumed hello") == 1
        assert hooks_called(run) == []
    for run in running:
        assert run.wait_end() == {"a": "success"}
        assert (run.told("a 1 execute"), run.told("a 2 execute")) == (1, 1), "a try that was lost is a try"
        assert "is gone" in run.wait_logged("a", "the worker was lost", 1)["error"]
    assert other.stop() == 0
