"""Streams of tasks with real processes: a hundred events of one trigger, while runner and workers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import StartStation
from tests.integration.station import Run, Station
from tests.waiting import WITHIN_S, wait_until

NUMBERS = list(range(1, 101))
DAGS = """
from datetime import timedelta
from headgate.tasks import DAG
from users_streams import Sums

with DAG("hundred", max_active_runs=20):
    Sums(task_id="a", retries=1, retry_delay=timedelta(0), trigger_stops=[41, 71], stops=[55, 85])

with DAG("slow"):
    Sums(task_id="a", upto=40, stops=[3], ahead=8)

with DAG("unsound"):
    Sums(task_id="a", upto=9, unsound=5, retries=1, retry_delay=timedelta(0))
"""


@pytest.fixture
def streaming(station: Station) -> Station:
    station.write("streaming.py", DAGS)
    station.wait_dag("hundred")
    return station


def handled(run: Run) -> int:
    """How many events of its stream the task ``a`` has handled."""
    rows = run.station.query("SELECT handled FROM task_stream WHERE task_instance_id = :id", id=run.task("a"))
    return int(rows[0]["handled"]) if rows else 0


def wait_handled(run: Run, number: int) -> None:
    wait_until(lambda: handled(run) == number, lambda: f"{number} events handled, which are {handled(run)}")


def kill_who_told(run: Run, line: str) -> None:
    """SIGKILL to the process that has told a line of the journal, as its last word."""
    told: list[str] = wait_until(
        lambda: [told for told in run.journal() if told.startswith(line)], lambda: f"{line!r} in {run.journal()}"
    )
    os.kill(int(told[-1].split()[-1]), signal.SIGKILL)


def clear(run: Run) -> None:
    run.station.store.tasks.clear_many(run.id, ["a"])
    run.wait_told("numbers on_kill")


def check(run: Run) -> None:
    """Check that the task has seen each event once, in order, and that none was stored twice."""
    assert run.wait_end() == {"a": "success"}
    assert run.xcom("a") == NUMBERS
    (stored,) = run.station.query(
        "SELECT count(*) AS events, count(DISTINCT trigger_id) AS triggers, max(handled) AS handled "
        "FROM trigger_event JOIN task_stream USING (trigger_id) WHERE task_instance_id = :id",
        id=run.task("a"),
    )
    assert stored == {"events": 100, "triggers": 1, "handled": 100}


def go_to_end(run: Run) -> None:
    """Let trigger and worker go on wherever they stop, and check what has come of it."""
    for file in ("trigger.41", "worker.55", "worker.85", "trigger.71"):
        run.say(file)
    check(run)


def test_a_hundred_events_are_handled_once_though_runner_and_worker_are_killed(start_station: StartStation) -> None:
    station = start_station()
    station.write("streaming.py", DAGS)
    run = station.run("hundred")
    wait_handled(run, 40)
    kill_who_told(run, "numbers from 1 in")
    run.say("trigger.41")
    kill_who_told(run, "worker stops at 55 in")
    run.wait_told("execute 2 handled 40")
    run.say("worker.55")
    wait_handled(run, 70)
    run.say("trigger.71")
    # Its one retry was used at event 55: a place that is passed has all its tries again.
    kill_who_told(run, "worker stops at 85 in")
    wait_until(lambda: any(line.startswith("execute 3") for line in run.journal()), "the third try")
    run.say("worker.85")
    check(run)
    assert run.row("a")["try_number"] == 3
    assert run.told("numbers on_kill") == 0, "nobody acted on the task"


def test_a_supervisor_killed_in_the_middle_of_a_stream_leaves_the_rest_to_the_next_one(
    start_station: StartStation,
) -> None:
    station = start_station()
    station.write("streaming.py", DAGS)
    run = station.run("hundred")
    wait_handled(run, 40)
    station.kill()
    again = start_station()
    run.station = again
    go_to_end(run)


def test_a_task_cleared_in_the_middle_of_its_stream_goes_on_and_its_trigger_is_told(streaming: Station) -> None:
    run = streaming.run("hundred")
    wait_handled(run, 40)
    clear(run)
    go_to_end(run)
    assert [line for line in run.journal() if line.startswith("execute")] == [
        "execute 1 handled 0",
        "execute 2 handled 40",
    ]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_trigger_goes_no_further_ahead_of_its_task_than_it_may_also_in_a_new_runner(
    streaming: Station, is_killed: bool
) -> None:
    run = streaming.run("slow")
    wait_handled(run, 2)

    def stored() -> int:
        (row,) = run.station.query(
            "SELECT count(*) AS events FROM trigger_event JOIN task_stream USING (trigger_id) "
            "WHERE task_instance_id = :id",
            id=run.task("a"),
        )
        return int(row["events"])

    wait_until(lambda: stored() == 10, lambda: f"two events handled and eight ahead, which are {stored()}")
    if is_killed:
        kill_who_told(run, "numbers from 1 in")
    run.say("worker.3")
    assert run.wait_end() == {"a": "success"}
    assert run.xcom("a") == list(range(1, 41))
    assert stored() == 40
    waiting = [int(line.split()[-1]) for line in run.journal() if line.startswith("waiting")]
    assert max(waiting) == 8


def test_an_event_that_cannot_be_stored_is_met_again_by_the_next_try_and_not_passed_over(streaming: Station) -> None:
    run = streaming.run("unsound")
    assert run.wait_end() == {"a": "success"}
    assert run.xcom("a") == list(range(1, 10))
    begun = [line.rpartition(" in ")[0] for line in run.journal() if line.startswith("numbers from")]
    assert begun == ["numbers from 1", "numbers from 5"]
    assert run.station.query("SELECT id FROM dead_letter") == []


def test_the_frames_of_a_stream_that_is_cut_short_and_goes_on_can_be_replayed(
    start_station: StartStation, tmp_path: Path
) -> None:
    capture = tmp_path / "frames"
    station = start_station("--capture", str(capture))
    station.write("streaming.py", DAGS)
    run = station.run("hundred")
    wait_handled(run, 40)
    clear(run)
    go_to_end(run)
    station.stop()
    replayed = subprocess.run(
        [sys.executable, "-m", "headgate.cli", "frames", "replay", str(capture), "--json"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
