"""The pages about DAGs and runs."""

from __future__ import annotations

from collections.abc import Callable

from starlette.testclient import TestClient
from tests.supervisor.tasks_harness import Tasks

Get = Callable[..., str]


def test_runs_are_listed(page: Get, client: TestClient, etl: Tasks) -> None:
    text = page("/runs")
    assert '<a href="/dags/etl/runs/r1" class="code">r1</a>' in text
    (row,) = client.get("/runs.json").json()["rows"]
    assert (row["dag"], row["run_id"], row["state"]) == ("etl", "r1", "running")
    assert "There are no such runs" in page("/runs", state="failed")
    assert "r1" in page("/runs", state="running", dag="etl", since="1h")


def test_dags_are_listed(page: Get, client: TestClient, etl: Tasks) -> None:
    assert '<a href="/dags/etl">etl</a>' in page("/dags")
    assert [row["name"] for row in client.get("/dags.json").json()["rows"]] == ["etl"]
    assert client.get("/dags.json", params={"state": "paused"}).json()["rows"] == []
    assert client.get("/dags.json", params={"name": "ET"}).json()["rows"] != []


def test_the_overview_says_what_is_wrong(page: Get, etl: Tasks) -> None:
    assert "Everything is well." in page("/")
    etl.store.add_watcher("elsewhere", "a.B", {}, queue="gpu")
    text = page("/")
    assert "Everything is well." not in text
    assert "gpu" in text


def test_a_list_is_read_page_by_page(page: Get, client: TestClient, etl: Tasks) -> None:
    for number in range(60):
        etl.store.tasks.create_run("etl", f"more-{number:02}")
    first = client.get("/runs.json").json()
    assert len(first["rows"]) == 50
    second = client.get("/runs.json", params={"beyond": first["next_beyond"]}).json()
    assert second["next_beyond"] is None
    names = [row["run_id"] for row in first["rows"] + second["rows"]]
    assert names == [f"more-{number:02}" for number in reversed(range(60))] + ["r1"]
    assert f'href="/runs?dag=etl&amp;beyond={first["next_beyond"]}"' in page("/runs", dag="etl")
