"""DAG files that break and change under tasks that wait, and a supervisor that is stopped and started anew."""

from __future__ import annotations

import signal

from tests.integration.conftest import StartStation
from tests.integration.station import Station
from tests.supervisor.tasks_harness import import_errors
from tests.waiting import WITHIN_S, wait_until

WAITS = """
from headgate.tasks import DAG
from users_tasks import {kind}

with DAG("{dag}", max_active_runs=20):
    {kind}(task_id="a"{options})
"""


def wait_error(station: Station, file: str) -> str:
    """Wait until a DAG file has an import error; return it."""

    def found() -> list[str]:
        return [error for path, error in import_errors(station.store).items() if path.endswith(file)]

    errors: list[str] = wait_until(found, f"the import error of {file}")
    return errors[0]


# --- DAG files -----------------------------------------------------------------------------------


def test_a_broken_file_is_an_import_error_and_no_other_dag_notices(station: Station) -> None:
    station.write("broken.py", "from headgate.tasks import DAG\n\nDAG('cracked'\n")
    station.write("raises.py", "def deep():\n    raise KeyError('no such thing')\n\ndeep()\n")
    station.write("exits.py", "import sys\n\nsys.exit(3)\n")
    station.write("sound.py", WAITS.format(kind="Waits", dag="sound", options=""))
    run = station.run("sound")
    assert "SyntaxError" in wait_error(station, "broken.py")
    assert "in deep" in wait_error(station, "raises.py")
    assert "no such thing" in wait_error(station, "raises.py")
    assert "SystemExit" in wait_error(station, "exits.py")
    run.wait_told("a waits")
    run.say("a.1")
    assert run.wait_end() == {"a": "success"}
    station.write("broken.py", WAITS.format(kind="Waits", dag="cracked", options=""))
    station.wait_dag("cracked")
    assert not any(path.endswith("broken.py") for path in import_errors(station.store))


def test_a_task_whose_method_is_gone_when_it_is_resumed_fails_with_a_word_about_it(station: Station) -> None:
    station.write("shifty.py", WAITS.format(kind="Waits", dag="shifty", options=", retries=1"))
    run = station.run("shifty")
    run.wait_told("a waits")
    before = station.query("SELECT parsed_at FROM dag WHERE name = 'shifty'")
    station.write("shifty.py", WAITS.format(kind="Holds", dag="shifty", options=", retries=1"))
    wait_until(lambda: station.query("SELECT parsed_at FROM dag WHERE name = 'shifty'") != before, "the changed file")
    run.say("a.1")
    told = run.wait_logged("a", "failed")
    assert "'resumed'" in told["error"]
    assert "Holds" in told["error"]
    assert run.journal().count("a 1 execute") == 1


def test_a_deferred_task_that_is_gone_from_its_dag_is_removed_with_its_trigger(station: Station) -> None:
    station.write("shrinks.py", WAITS.format(kind="Waits", dag="shrinks", options=""))
    run = station.run("shrinks")
    run.wait_told("a waits")
    trigger_id = run.row("a")["trigger_id"]
    source = WAITS.format(kind="Holds", dag="shrinks", options="").replace('"a"', '"b"')
    station.write("shrinks.py", source)
    run.wait(a="removed", b="running")
    assert run.row("a")["trigger_id"] is None
    assert run.trigger(trigger_id)["finished_at"] is not None
    run.say("b.go")
    assert run.wait_end() == {"a": "removed", "b": "success"}


# --- stopping and starting -----------------------------------------------------------------------


def write_dags(station: Station) -> None:
    station.write("waits.py", WAITS.format(kind="Waits", dag="waits", options=""))
    station.write("holds.py", WAITS.format(kind="Holds", dag="holds", options=", retries=1, retry_delay=timedelta(0)"))
    path = station.dags / "holds.py"
    station.write("holds.py", f"from datetime import timedelta\n{path.read_text()}")


def test_sigterm_lets_running_tasks_end_and_deferred_ones_wait_for_the_next_supervisor(
    start_station: StartStation,
) -> None:
    station = start_station()
    write_dags(station)
    waits, holds = station.run("waits"), station.run("holds")
    waits.wait_told("a waits")
    holds.wait_told("a 1 execute")
    station.process.send_signal(signal.SIGTERM)
    station.wait_log("draining")
    late = station.run("holds")
    holds.say("a.go", "in peace")
    assert station.process.wait(WITHIN_S) == 0
    assert holds.state("a") == "success"
    assert holds.xcom("a") == "in peace"
    assert (waits.state("a"), late.state("a")) == ("deferred", "none")
    assert waits.journal() == ["a 1 execute", "a waits", "a cleanup"], "no on_kill: nobody acted on the task"
    waits.say("a.1", "meanwhile")
    late.say("a.go")
    other = start_station(home=station.home)
    assert waits.wait_end() == late.wait_end() == {"a": "success"}
    assert waits.told("a 1 resumed meanwhile") == 1
    assert other.stop() == 0


def test_a_second_sigterm_does_not_wait_and_what_ran_is_tried_again(start_station: StartStation) -> None:
    station = start_station()
    write_dags(station)
    waits, holds = station.run("waits"), station.run("holds")
    waits.wait_told("a waits")
    holds.wait_told("a 1 execute")
    station.process.send_signal(signal.SIGTERM)
    station.wait_log("draining")
    station.process.send_signal(signal.SIGTERM)
    assert station.process.wait(WITHIN_S) != 0
    assert "a on_kill-of-task" not in holds.journal()
    other = start_station(home=station.home)
    holds.wait_told("a 2 execute")
    holds.say("a.go")
    waits.say("a.1")
    assert holds.wait_end() == waits.wait_end() == {"a": "success"}
    assert waits.told("a 1 execute") == waits.told("a 1 resumed ") == 1
    assert "is gone" in holds.wait_logged("a", "the worker was lost")["error"]
    assert other.stop() == 0


def test_a_supervisor_killed_in_the_middle_of_everything_loses_and_doubles_nothing(start_station: StartStation) -> None:
    station = start_station()
    write_dags(station)
    waits = [station.run("waits") for _ in range(10)]
    for _ in range(3):
        wait_until(lambda: any(run.journal() for run in waits), "something to happen")
        station.kill()
        for run in waits[::3]:
            run.say("a.1", "x")
        station = start_station(home=station.home)
        station.wait_ready()
    for run in waits:
        run.say("a.1", "x")
    for run in waits:
        # A try whose worker died with its supervisor is a failed try; what was deferred goes on. None is stuck.
        state = run.wait_end()["a"]
        tries = run.told("a 1 execute")
        assert (state, tries) in {("success", 1), ("failed", 0), ("failed", 1)}
        assert run.told("a 1 resumed x") <= 1
        if state == "failed":
            assert "is gone" in run.row("a")["last_error"]
    assert station.stop() == 0
