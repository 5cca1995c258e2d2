"""Streams of tasks by a real ``headgate up``: what was handled stays so, and the files of docs/streaming.md run."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.integration.conftest import StartStation
from tests.supervisor.tasks_harness import clear

NUMBERS = 8
TRIGGER = f"""
from headgate.triggers.base import BaseTrigger, TriggerEvent

class Counting(BaseTrigger):
    def serialize(self):
        return "counting.Counting", {{}}

    async def run(self):
        last = await self.last_event()
        for number in range(0 if last is None else last.payload + 1, {NUMBERS}):
            yield TriggerEvent(number, is_last=number == {NUMBERS - 1})
"""
DAGS = """
import os
from datetime import timedelta
from pathlib import Path

from counting import Counting
from headgate.tasks import DAG, BaseOperator, Each, StartTriggerArgs, TaskDeferred, task

class Adds(BaseOperator):
    def __init__(self, how, stream, **options):
        super().__init__(retries=1, retry_delay=timedelta(0), **options)
        self.how, self.stream = how, stream

    def execute(self, context):
        self.defer(trigger=Counting(), stream=self.stream or True, kwargs={"numbers": []})

    def handle_trigger_events(self, events, context, numbers):
        for event in events:
            assert event.position == event.payload
            if event.payload == 3 and context["try_number"] == 1:
                if self.how == "dies":
                    os.kill(os.getpid(), 9)
                raise ValueError("three")
            numbers = [*numbers, event.payload]
            self.handled(event, numbers=numbers)
        return {"numbers": numbers}

    def stream_ended(self, context, numbers):
        return [context["try_number"], numbers]

with DAG("streams"):
    Adds("fails", True, task_id="fails")
    Adds("fails", Each(), task_id="fails_each")
    Adds("dies", Each(), task_id="dies_each")

    Adds("fails", None, task_id="starts", start_from_trigger=True, start_trigger_args=StartTriggerArgs(
        "counting.Counting", next_kwargs={"numbers": []}, stream=Each()
    ))

    @task
    def doubled(event=None):
        if event is None:
            raise TaskDeferred(trigger=Counting(), method_name="execute", stream=True)
        return event * 2

    doubled()

with DAG("gives_up"):
    Adds("fails", True, task_id="a").retries = 0
"""


@pytest.fixture
def dags(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(TRIGGER)
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "streams.py").write_text(DAGS)


@pytest.mark.usefixtures("dags")
def test_a_retry_goes_on_behind_what_was_handled(start_station: StartStation) -> None:
    run = start_station(import_paths=".").run("streams")
    assert set(run.wait_end().values()) == {"success"}
    for task in ("fails", "fails_each", "dies_each", "starts"):
        assert run.xcom(task) == [2, list(range(NUMBERS))]
    assert run.xcom("doubled") == 2 * (NUMBERS - 1)


@pytest.mark.usefixtures("dags")
def test_a_task_that_failed_goes_on_where_it_was_when_a_user_clears_it(start_station: StartStation) -> None:
    station = start_station(import_paths=".")
    run = station.run("gives_up")
    assert run.wait_end() == {"a": "failed"}
    assert clear(station.store, run.id, "a")
    run.wait(a="success")
    assert run.xcom("a")[1] == list(range(NUMBERS))


# --- the document --------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "streaming.md"
BLOCK = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORT = "8765"  # the server's, in the document
USERS = 25
USERS_A_PAGE = 2


class Api(ThreadingHTTPServer):
    """Gives two users after another, and says once that it is out of order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[int] = []
        self.fails_after = 10


class _Answer(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        after = int(parse_qs(urlsplit(self.path).query).get("after", ["0"])[0])
        self.server.asked.append(after)
        if after == self.server.fails_after:
            self.server.fails_after = 0
            self.send_error(503)
            return
        ids = range(after + 1, min(after + USERS_A_PAGE, USERS) + 1)
        page = {"users": [{"id": id_, "name": f"user {id_}"} for id_ in ids]}
        if ids[-1] < USERS:
            page["next"] = ids[-1]  # type: ignore[assignment]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(page).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Leave standard error to the tests."""


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_examples_of_the_document_do_what_it_says(start_station: StartStation, api: Api, tmp_path: Path) -> None:
    for name, source in BLOCK.findall(DOCUMENT.read_text()):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source.replace(PORT, str(api.server_port)))
    station = start_station(import_paths=".")
    run = station.run("load_users")
    assert run.wait_end() == {"load": "success", "report": "success"}
    assert run.xcom("load") == USERS
    with sqlite3.connect(tmp_path / "users.db") as database:
        assert database.execute("SELECT count(*), max(id) FROM user").fetchone() == (USERS, USERS)
    run.wait_logged("report", f"{USERS} users")
    pages = list(range(0, USERS, USERS_A_PAGE))
    assert api.asked == sorted([*pages, 10]), "each page once, and the one that failed again"
