"""What viewers see: pages say what they leave out, and have no links to what only operators may see."""

from __future__ import annotations

import html
import re

import pytest
from sqlalchemy import insert
from starlette.testclient import TestClient
from tests.supervisor.tasks_harness import Tasks
from tests.web.test_acting import users as users

from headgate.store.signals.sending import NewSignal
from headgate.store.tables import xcom
from headgate.supervisor.logs import task_log_files
from headgate.web.views import Site

SECRET = "of operators alone"
RUN = "/dags/etl/runs/r2"
TASK = f"{RUN}/tasks/a"
PAGES_MAX = 200


@pytest.fixture
def secrets(etl: Tasks, site: Site) -> None:
    """A run with a conf, a task of it with an XCom and a log, and a signal; all have `SECRET`."""
    store, value = etl.store, f'{{"x":"{SECRET}"}}'.encode()
    store.tasks.create_run("etl", "r2", conf=value)
    task = store.inspect.find_task("etl", "r2", "a")
    with store.database.writing() as tx:
        row = {"task_instance_id": task.id, "key": "k", "value": value, "stored_at": tx.now}
        tx.connection.execute(insert(xcom).values(row))
    folder = task_log_files.folder_of_task(site.log_folder, "etl", "r2", "a") / "1"
    folder.mkdir(parents=True)
    (folder / "4.jsonl").write_text(f'{{"timestamp":"2026-01-01T00:00:00Z","level":"info","event":"{SECRET}"}}\n')
    store.signals.send([NewSignal("news", value, "d", "ada")])


@pytest.mark.usefixtures("secrets")
def test_a_page_tells_a_viewer_what_only_operators_see(users: dict[str, TestClient]) -> None:
    for client, is_told in ((users["viewer"], True), (users["operator"], False)):
        run, task = client.get(RUN).text, client.get(TASK).text
        assert (run.count("Operators can see it."), SECRET in run) == ((1, False) if is_told else (0, True))
        assert ("Operators can see them." in task, "Operators can see it." in task) == (is_told, is_told)
        assert task.count(SECRET) == (0 if is_told else 2)
        assert "There is no log" not in task
    other = users["viewer"].get("/dags/etl/runs/r1").text
    assert "Operators can see" not in other, "it has no conf"


@pytest.mark.usefixtures("secrets")
def test_a_viewer_may_follow_each_link_that_is_shown(users: dict[str, TestClient]) -> None:
    client = users["viewer"]
    left, known = ["/", "/search?q=news", "/search?q=r2"], set[str]()
    while left and len(known) < PAGES_MAX:
        place = left.pop()
        known.add(place)
        answer = client.get(place)
        assert answer.status_code in (200, 303), place
        found = [html.unescape(one) for one in re.findall(r'href="(/[^"]*)"', answer.text)]
        found += [answer.headers["location"]] if answer.status_code == 303 else []
        left += [one for one in dict.fromkeys(found) if one not in known and one not in left]
    assert not left
    assert {TASK, "/signals", "/account"} <= known
    assert "/audit" not in known
    operators = users["operator"].get("/").text
    assert 'href="/audit"' in operators
    assert users["operator"].get("/search?q=news").headers["location"].startswith("/signals/")
