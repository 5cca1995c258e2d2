"""Endless tasks by a real ``headgate up``: beside the pool, moved when a process is gone, ended by a signal."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
from tests.integration.conftest import StartStation
from tests.integration.station import Run
from tests.waiting import wait_until

from headgate.store.signals.sending import NewSignal

DAGS = """
import os
import time

from headgate.signals import STOP, On
from headgate.tasks import DAG, BaseOperator, task
from users_streams import Numbers
from users_tasks import note

DRAIN = On("drain", action=STOP)

class Job(BaseOperator):
    def execute(self, context):
        self.folder = context["params"]["folder"]
        note(self.folder, self.task_id, "begins")
        note(self.folder, self.task_id, "is", os.getpid())
        try:
            while True:
                time.sleep(60)
        finally:
            note(self.folder, self.task_id, "finally")

    def on_kill(self):
        note(self.folder, self.task_id, "on_kill")

with DAG("jobs"):
    Job(task_id="ingest", endless=True, signals=[DRAIN])
    Job(task_id="late", endless=True, signals=[DRAIN, On("late")])

    @task
    def plain(params):
        note(params["folder"], "plain")

    plain()

class Follows(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Numbers(context["params"]["folder"], 3, [3]), stream=True)

    def handle_trigger_events(self, events, context):
        note(context["params"]["folder"], self.task_id, "handled", *(event.payload for event in events))

with DAG("streams"):
    Follows(task_id="pool", signals=[DRAIN], stopped_as="success")
    Follows(task_id="beside", endless=True, signals=[DRAIN])

    @task(endless=True)
    def returns():
        return "done"

    @task(endless=True, retries=1, retry_delay=__import__("datetime").timedelta(0))
    def fails():
        raise RuntimeError("of its own")

    returns(), fails()
"""


def process_of(run: Run, task: str, times: int) -> int:
    """Wait until a task has begun so often; return the process that has it now."""
    run.wait_told(f"{task} begins", times=times)
    told = f"{task} is "
    lines = wait_until(lambda: x if len(x := [y for y in run.journal() if y.startswith(told)]) == times else None, told)
    return int(lines[-1].removeprefix(told))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # the crash tests of signals have both
def test_an_endless_job_outlives_its_processes_and_holds_up_nobody(start_station: StartStation) -> None:
    start = partial(start_station, workers="1", endless_workers_max="1", drain_s="600")
    station = start()
    station.write("jobs.py", DAGS)
    run = station.run("jobs")
    run.wait(plain="success", ingest="running", late="none")
    os.kill(process_of(run, "ingest", 1), signal.SIGKILL)
    process_of(run, "ingest", 2)
    assert run.told("ingest finally") == 0

    began_at = time.monotonic()
    assert station.stop() == 0
    assert time.monotonic() - began_at < 300, "the drain has not waited for it"
    assert (run.told("ingest finally"), run.told("ingest on_kill")) == (1, 0)
    station = start()
    process_of(run, "ingest", 3)
    station.kill()
    station = start()
    process_of(run, "ingest", 4)
    assert (run.row("ingest")["try_number"], run.row("ingest")["tries_max"]) == (1, 1)

    station.store.signals.send([NewSignal("late", b"null", "1", "a test")])
    run.wait(late="scheduled")
    why = station.store.inspect.why_task(station.store.inspect.find_task("jobs", run.run_id, "late"))
    assert why.reason == "no_endless_worker"
    station.store.signals.send([NewSignal("drain", b"null", "1", "a test")])
    assert run.wait_end() == {"ingest": "success", "late": "success", "plain": "success"}
    run.wait_told("ingest on_kill")
    assert run.told("late begins") == 0
    wait_until(lambda: station.store.inspect.run("jobs", run.run_id).line.state == "success", "the end of the run")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_stop_ends_the_trigger_of_an_endless_stream_and_other_ends_are_those_of_any_task(
    start_station: StartStation,
) -> None:
    station = start_station()
    station.write("jobs.py", DAGS)
    run = station.run("streams")
    run.wait(returns="success", fails="failed", pool="deferred", beside="deferred")
    assert run.xcom("returns") == "done"
    assert run.row("fails")["try_number"] == 2
    wait_until(lambda: {"pool handled 1 2", "beside handled 1 2"} <= handled(run), lambda: f"{run.journal()}")
    station.store.signals.end_run(run.id)
    run.wait(beside="success")
    station.store.signals.send([NewSignal("drain", b"null", "1", "a test")])
    ended = run.wait_end()
    assert (ended["pool"], ended["beside"]) == ("success", "success")
    run.wait_told("numbers on_kill", times=2)


def handled(run: Run) -> set[str]:
    """Return what the two tasks have handled, each in one line whatever its steps were."""
    found: dict[str, list[str]] = {}
    for line in run.journal():
        name, _, payloads = line.partition(" handled ")
        found.setdefault(name, []).append(payloads)
    return {f"{name} handled {' '.join(lines)}" for name, lines in found.items()}
