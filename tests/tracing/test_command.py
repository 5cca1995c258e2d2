"""``headgate traces send`` as a process, beside a real ``headgate up``: what a task is told is a span that arrives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.integration.station import Run, Station
from tests.tracing.conftest import CollectorServer
from tests.waiting import WITHIN_S, wait_until

DAGS = """
from datetime import timedelta
from headgate.tasks import DAG, BaseOperator
from headgate.triggers.temporal import TimeDeltaTrigger

class Told(BaseOperator):
    def execute(self, context):
        context["ti"].xcom_push("first", context["traceparent"])
        self.defer(trigger=TimeDeltaTrigger(timedelta(seconds=0.01)), method_name="again")

    def again(self, context, event):
        return context["traceparent"]

with DAG("traced"):
    Told(task_id="a")
"""


def send(station: Station, url: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADGATE_", "OTEL_"))}
    environment["HEADGATE_DATABASE_URL"] = station._engine.url.render_as_string(hide_password=False)
    environment["HEADGATE_HOME"] = str(station.home)
    environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_SERVICE_NAME": "shop"}
    command = [sys.executable, "-m", "headgate.cli", "traces", "send", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names_of(server: CollectorServer, run: Run) -> list[str]:
    """The spans of a run that came, below its root."""
    root = next((each for each in server.spans if each.name == run.dag and run.run_id in str(each.attributes)), None)
    return [] if root is None else [each.name for each in server.spans if each.trace_id == root.trace_id]


def test_a_run_is_sent_when_it_ends(station: Station, server: CollectorServer) -> None:
    station.write("traced.py", DAGS)
    sender = send(station, server.url)
    assert sender.stdout is not None
    assert sender.stdout.readline() == f"sending traces to {server.url}/v1/traces\n"
    run = station.run("traced")
    assert run.wait_end() == {"a": "success"}
    wait_until(lambda: names_of(server, run), "its trace has come")
    sender.terminate()
    sender.communicate(timeout=WITHIN_S)
    assert sender.returncode == -signal.SIGTERM

    assert names_of(server, run)[:2] == ["traced", "a"]
    assert {"running", "deferred"} <= set(names_of(server, run))
    (of_try,) = [each for each in server.spans if each.name == "a" and run.run_id in str(each.attributes)]
    told = f"00-{of_try.trace_id.hex()}-{of_try.span_id.hex()}-01"
    assert (run.xcom("a", "first"), run.xcom("a")) == (told, told)
    assert {resource["service.name"] for resource in server.resources} == {"shop"}

    server.requests.clear()
    again = send(station, server.url, "--once", "--since", "1h")
    out, err = again.communicate(timeout=WITHIN_S)
    assert (again.returncode, err) == (0, "")
    assert out.startswith("sent ")
    assert out.endswith(f" to {server.url}/v1/traces\n")
    assert names_of(server, run)[:2] == ["traced", "a"]


def test_a_collector_that_is_not_there_is_told(station: Station, server: CollectorServer) -> None:
    station.write("traced.py", DAGS)
    station.run("traced").wait_end()
    server.refuses, server.code = b"traced", 401
    sender = send(station, server.url, "--once")
    _, err = sender.communicate(timeout=WITHIN_S)
    assert sender.returncode == 1
    assert err.startswith(f"headgate: {server.url}/v1/traces takes no traces: 401 ")
    assert len(err.splitlines()) == 1
