"""The pages of a DAG's runs and graph, of assets and signals, and the search."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.store.harness import add, register
from tests.supervisor.tasks_harness import Tasks
from tests.web.test_events import fire

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.schedules import AssetSchedule
from headgate.protocol.values import encode_value
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store
from headgate.supervisor.logs import task_log_files
from headgate.web.views import Site

Get = Callable[..., str]
TASK = "/dags/etl/runs/r1/tasks/a"
LONG = {"none": None, "yes": True, "text": "it's", "long": "x" * 300 + "the end"}  # a value of a signal


def test_the_grid_has_each_task_of_each_run(page: Get, etl: Tasks) -> None:
    etl.store.tasks.create_run("etl", "r2")
    text = page("/dags/etl")
    assert text.count('class="badge') >= 6
    assert 'href="/dags/etl/runs/r2/tasks/c"' in text
    assert text.index("/dags/etl/runs/r1") < text.index("/dags/etl/runs/r2"), "the newest is at the right"


def test_the_grid_has_pages_of_runs_and_tasks(page: Get, store: Store) -> None:
    epoch = register(store)
    tasks = tuple(TaskSpec(f"t{i}", "Op") for i in range(61))
    store.tasks.save_file(epoch, "wide.py", [DagSpec("wide", tasks=tasks)])
    for number in range(26):
        store.tasks.create_run("wide", f"r{number}")
    text = page("/dags/wide")
    assert "Older runs" in text
    assert "/tasks/t60" not in text
    assert "/tasks/t60" in page("/dags/wide", **{"from": "60"})


def test_the_graph_has_the_states_of_a_run(page: Get, client: TestClient, etl: Tasks) -> None:
    text = page("/dags/etl/graph")
    assert 'href="/dags/etl/runs/r1/tasks/a"' in text
    assert "a: scheduled" in text
    assert "a: scheduled" in page("/dags/etl/graph", run="r1")
    assert client.get("/dags/etl/graph", params={"run": "r9"}).status_code == 404
    near = page("/dags/etl/graph", around="a")
    assert "c: none" in near


def test_a_graph_with_too_many_lines_says_what_is_not_drawn(page: Get, store: Store) -> None:
    epoch = register(store)
    names = [f"t{i:03}" for i in range(290)]
    dense = tuple(TaskSpec(name, "Op", upstream=tuple(names[:i])) for i, name in enumerate(names))
    sinks = tuple(TaskSpec(f"sink{i:03}", "Op", upstream=tuple(names[:145])) for i in range(145))
    wide = (*(TaskSpec(name, "Op") for name in names[:145]), *sinks)
    store.tasks.save_file(epoch, "many.py", [DagSpec("dense", tasks=dense), DagSpec("wide", tasks=wide)])
    text = page("/dags/dense/graph")
    assert "one that a longer way over other tasks implies is not drawn" in text
    assert text.count("<path") == 289
    assert "t018, t019, and 269 more" in text
    assert len(text) < 500_000
    text = page("/dags/wide/graph")
    assert "only those of <code>t000</code> are drawn" in text
    assert 'href="/dags/wide/graph?around=sink007"' in text
    assert len(text) < 500_000
    text = page("/dags/wide/graph", around="sink007")
    assert "only those of <code>sink007</code> are drawn" in text
    assert text.count("<path") == 145


def test_a_run_shows_where_the_time_went(page: Get, etl: Tasks) -> None:
    assert 'aria-label="queued ' in page("/dags/etl/runs/r1")
    etl.dispatch()
    assert "running " in page("/dags/etl/runs/r1").partition("Where the time went")[2]


def test_the_log_of_a_task_is_shown_and_followed(page: Get, client: TestClient, etl: Tasks, site: Site) -> None:
    assert "There is no log" in page(TASK)
    folder = task_log_files.folder_of_task(site.log_folder, "etl", "r1", "a") / "1"
    folder.mkdir(parents=True)
    file = folder / "4.jsonl"
    line = b'{"timestamp":"2026-01-01T00:00:00Z","level":"info","event":"<b>%d at redis://u:s3cret@h</b>"}\n'
    file.write_bytes(b"".join(line % number for number in range(3)))
    for text in (page(TASK), page(f"{TASK}/log")):
        assert "&lt;b&gt;2 at redis://u:***@h" in text
        assert "s3cret" not in text
    first = client.get(f"{TASK}/log.json").json()
    assert len(first["rows"]) == 3
    after = {"beyond": first["next_beyond"]}
    assert client.get(f"{TASK}/log.json", params=after).json()["rows"] == []
    with file.open("ab") as log:
        log.write(line % 3 + b'{"torn')
    (row,) = client.get(f"{TASK}/log.json", params=after).json()["rows"]
    assert row["text"].startswith("<b>3 ")
    for bad in ("../../x=1", "1/4.jsonl=x", "1/../../4.jsonl=0", "x"):
        assert client.get(f"{TASK}/log.json", params={"beyond": bad}).status_code == 400


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    from headgate.store.ids import TryName

    name = TryName("d", "r", "t", 1)
    file = task_log_files.file_of(tmp_path, name, 7)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"".join(b'{"event":"%06d"}\n' % number for number in range(1000)))
    records, cursor = task_log_files.read_on(tmp_path, name, None, bytes_max=100)
    assert [record["event"] for record in records] == [f"{number:06d}" for number in range(995, 1000)]
    assert task_log_files.read_on(tmp_path, name, cursor, bytes_max=100) == ([], cursor)


def test_assets_say_who_makes_and_who_uses_their_events(page: Get, client: TestClient, store: Store) -> None:
    epoch = register(store)
    spec = DagSpec("billing", schedule=AssetSchedule(("orders",), contract="each"), tasks=(TaskSpec("a", "Op"),))
    store.tasks.save_file(epoch, "billing.py", [spec])
    trigger_id = store.add_watcher("shop", "a.B", {}, asset="orders")
    fire(store, epoch, trigger_id)
    (row,) = client.get("/assets.json").json()["rows"]
    assert (row["name"], row["watchers"], row["dags"], row["waiting"]) == ("orders", 1, 1, 1)
    text = page(f"/assets/{row['id']}")
    assert "shop" in text
    assert "billing" in text
    assert client.get("/assets/99").status_code == 404
    assert "There are no such assets" in page("/assets", name="none")
    store.scheduling.create_event_runs(epoch)
    event = client.get("/events.json").json()["rows"][0]
    assert 'href="/dags/billing/runs/' in page(f"/events/{event['id']}")


def test_signals_say_who_listens(page: Get, client: TestClient, store: Store) -> None:
    store.signals.send([NewSignal("prices", encode_value({"eur": 3}, where="value"), "d1", "a test")])
    (row,) = client.get("/signals.json").json()["rows"]
    text = page(f"/signals/{row['id']}")
    assert "eur" in text
    assert "a test" in text
    assert "No task, run or DAG waits" in text
    assert client.get("/signals/99").status_code == 404


def codes(text: str) -> list[str]:
    return [html.unescape(one) for one in re.findall(r"<code[^>]*>(.*?)</code>", text)]


def whole(text: str) -> str:
    (found,) = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
    return html.unescape(found)


def test_values_are_json_and_the_whole_value_of_a_version_is_shown(page: Get, client: TestClient, store: Store) -> None:
    values = [json.dumps(value).encode() for value in (LONG, {"a": None}, "plain")]
    store.signals.send([NewSignal("k", value, f"d{number}", "ada") for number, value in enumerate(values)])
    (key,) = client.get("/signals.json").json()["rows"]
    place = f"/signals/{key['id']}"
    text = page(place)
    assert "Value of version 3" in text
    assert whole(text) == "plain"
    assert codes(text)[:2] == ['"plain"', '{"a":null}']
    assert codes(text)[2] == json.dumps(LONG, separators=(",", ":"))[:199] + "…"
    assert f'href="{place}?version=1"' in text
    text = page(place, version="1")
    assert "Value of version 1" in text
    assert json.loads(whole(text)) == LONG
    for none in ("0", "4", "9" * 18):
        assert client.get(place, params={"version": none}).status_code == 404


def test_a_password_is_masked_where_a_value_is_cut(page: Get, client: TestClient, store: Store) -> None:
    value = json.dumps("x" * 170 + " redis://u:" + "s3cret" * 20 + "@h").encode()
    store.signals.send([NewSignal("k", value, "d", "ada")])
    (key,) = client.get("/signals.json").json()["rows"]
    assert "s3cret" not in page(f"/signals/{key['id']}")


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ("et", "/dags/etl"),
        ("r1", "/dags/etl/runs/r1"),
        ("big-or", "/triggers/{trigger}"),
        ("big-orders k1", "/events/{event}"),
        ("trigger-{trigger}", "/triggers/{trigger}"),
    ],
)
def test_what_alone_is_meant_is_shown_at_once(
    client: TestClient, etl: Tasks, store: Store, asked: str, place: str
) -> None:
    (trigger_id,) = add(store, "big-orders")
    fire(store, etl.epoch, trigger_id, 2)
    event = client.get("/events.json").json()["rows"][0]["id"]
    ids = {"trigger": trigger_id, "event": event}
    rows = client.get("/search.json", params={"q": asked.format(**ids)}).json()["rows"]
    answer = client.get("/search", params={"q": asked.format(**ids)})
    if len(rows) == 1:
        assert answer.headers["location"] == place.format(**ids)
    else:
        assert f'href="{place.format(**ids)}"' in answer.text


def test_a_search_says_what_may_be_written(page: Get, client: TestClient, etl: Tasks) -> None:
    assert "Nothing was found" in page("/search", q="none of it")
    assert "beginning of the name" in page("/search")
    found = client.get("/search.json", params={"q": "b"}).json()["rows"]
    assert [(row["kind"], row["name"], row["dag"]) for row in found] == [("task", "b", "etl")]
    assert client.get("/search.json", params={"q": "%"}).json()["rows"] == []
