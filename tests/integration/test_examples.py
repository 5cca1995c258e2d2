"""The examples that come with headgate, copied by its command and run by a real ``headgate up``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.integration.conftest import StartStation
from tests.integration.station import Run, Station
from tests.tasks.test_load_pages import PAGES, loaded, serving
from tests.waiting import WITHIN_S, wait_until

from headgate.store.signals.sending import NewSignal

PORT = "8765"  # the server's, in the example
REPORT = b'{"orders": 12}\n'


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, as the command copies them."""
    folder = tmp_path_factory.mktemp("examples") / "dags"
    subprocess.run([sys.executable, "-m", "headgate.cli", "examples", str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture
def copied(examples: Path, tmp_path: Path) -> Path:
    """A folder of DAG files with the examples, for one test."""
    return shutil.copytree(examples, tmp_path / "dags")


class Endpoint(ThreadingHTTPServer):
    """A server that has its file only when told so."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.has_report = threading.Event()
        self.asked_in_vain = threading.Event()


class _Answer(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        found = self.path == "/report.json" and self.server.has_report.is_set()
        self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
        self.end_headers()
        if found:
            self.wfile.write(REPORT)
        else:
            self.server.asked_in_vain.set()

    def log_message(self, format: str, *args: object) -> None:
        """Leave standard error to the tests."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_wait_for_file(copied: Path, start_station: StartStation, tmp_path: Path) -> None:
    run = start_station().run("wait_for_file").wait(wait="deferred")
    (tmp_path / "inbox").mkdir()
    beside = tmp_path / "inbox" / "orders.new"
    beside.write_text("id,amount\n1,250\n2,1800\n")
    beside.rename(beside.with_suffix(".csv"))
    assert run.wait_end() == {"wait": "success", "count_rows": "success"}
    assert run.xcom("count_rows") == 2
    run.wait_logged("count_rows", "inbox/orders.csv has 2 rows")


def test_poll_endpoint(copied: Path, endpoint: Endpoint, start_station: StartStation) -> None:
    example = copied / "poll_endpoint.py"
    source = example.read_text()
    assert PORT in source
    example.write_text(source.replace(PORT, str(endpoint.server_port)))
    run = start_station().run("poll_endpoint")
    assert endpoint.asked_in_vain.wait(WITHIN_S)
    assert run.state("use") == "none"
    endpoint.has_report.set()
    assert run.wait_end() == {"wait": "success", "use": "success"}
    assert run.xcom("wait")["status"] == HTTPStatus.OK
    assert run.xcom("use") == '{"orders": 12}'


def test_load_pages(copied: Path, start_station: StartStation, tmp_path: Path) -> None:
    """Twelve pages of one trigger: they come within two seconds, so that one or two steps handle all of them."""
    with serving(tmp_path / "served") as example:
        (copied / "load_pages.py").write_text(example.read_text())
        station = start_station()
        run = station.run("load_pages")
        assert run.wait_end() == {"load": "success", "report": "success"}
    assert loaded(tmp_path, run.run_id) == {number: 3 for number in range(PAGES - 1)} | {PAGES - 1: 1}
    assert run.xcom("load") == 3 * (PAGES - 1) + 1
    run.wait_logged("report", f"{3 * (PAGES - 1) + 1} users on {PAGES} pages")
    assert len(station.query("SELECT id FROM trigger WHERE classpath LIKE '%.HttpPagesTrigger'")) == 1
    steps = [record["method"] for record in run.log("load") if record["event"] == "begun"]
    assert steps[0] == "execute"
    assert 1 <= steps.count("handle_trigger_events") == len(steps) - 1 < PAGES / 2


def test_expand_pages(copied: Path, start_station: StartStation, tmp_path: Path) -> None:
    users = [{"id": number} for number in range(1, PAGES) for _ in range(3)] + [{"id": PAGES}]
    with serving(tmp_path / "served", "expand_pages.py") as example:
        (copied / "expand_pages.py").write_text(example.read_text())
        station = start_station()
        run = station.run("expand_pages")
        run.wait_end()
    assert (run.xcom("users"), run.xcom("report"), run.xcom("add_up")) == (len(users), len(users), len(users))
    assert run.xcom("settle.look") is None, "its iterations have results"
    counted = station.query("SELECT task_id, count(*) AS rows FROM task_instance WHERE map_index >= 0 GROUP BY task_id")
    assert {row["task_id"]: row["rows"] for row in counted}.items() >= {
        ("follow", PAGES),
        ("settle.look", 2),
        ("settle.is_settled", 2),
    }
    rows = station.query(
        "SELECT t.map_index, x.value FROM task_instance t JOIN xcom x ON x.task_instance_id = t.id "
        "WHERE t.task_id = 'enrich' ORDER BY t.map_index"
    )
    assert [row["map_index"] for row in rows] == list(range(len(users)))
    assert [json.loads(bytes(row["value"])) for row in rows] == [{**user, "region": "north"} for user in users]
    batches = sorted((tmp_path / "expanded" / run.run_id).iterdir(), key=lambda path: int(path.stem))
    written = [json.loads(path.read_text()) for path in batches]
    assert written == [users[first : first + 10] for first in range(0, len(users), 10)]


def test_train_on_signals(copied: Path, start_station: StartStation, tmp_path: Path) -> None:
    """Epochs come faster than the training takes them, and each of its starts has the newest one."""
    example = copied / "train_on_signals.py"
    source = example.read_text()
    assert "EPOCH_S = 5.0" in source
    example.write_text(source.replace("EPOCH_S = 5.0", "EPOCH_S = 0.05"))
    station = start_station()
    run = station.run("train_on_signals")
    starts = "SELECT try_number FROM task_instance WHERE task_id = 'publish'"
    wait_until(lambda: station.query(starts)[0]["try_number"] >= 3, "the third model")
    station.store.signals.send([NewSignal("drain", b"null", "once", "a test", dag_run=run.id)])
    ended = run.wait_end()
    assert (ended["ingest"], ended["train"] in ("success", "skipped")) == ("success", True)
    wait_until(lambda: station.store.inspect.run("train_on_signals", run.run_id).line.state == "success", "its end")
    epochs = [one.value for one in station.store.signals.page("epoch").signals]
    assert epochs == list(range(1, len(epochs) + 1)), "each was sent once"
    assert run.xcom("publish") in epochs[1:]
    if ended["train"] == "success":
        model = run.xcom("train")
        assert (model["mean"], model["epoch"] > model["before"]) == (model["epoch"] * 49.5, True)


def test_daily_chain(copied: Path, start_station: StartStation, tmp_path: Path) -> None:
    station = start_station()
    run = run_by_schedule(station, "daily_chain").wait(complete="deferred")
    (begun,) = (tmp_path / "days").iterdir()
    begun.with_suffix(".done").touch()
    assert set(run.wait_end().values()) == {"success"}
    run.wait_logged("report", "twelve orders")
    assert [row["run_id"] for row in station.query("SELECT run_id FROM dag_run")] == [run.run_id], "no other day's"


def run_by_schedule(station: Station, dag: str) -> Run:
    """Wait for the run that nobody asked for."""
    statement = "SELECT id, run_id FROM dag_run WHERE run_type = 'scheduled'"
    (row,) = wait_until(lambda: station.query(statement), f"a run of {dag}")
    return Run(station, row["id"], dag, row["run_id"], station.home)
