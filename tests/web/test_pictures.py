"""The pages of a DAG's runs and graph, of assets and signals, and the search. How graphs are laid out."""

from __future__ import annotations

import html
import json
import random
import re
import threading
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select
from starlette.testclient import TestClient
from tests.store.harness import add, register
from tests.supervisor.tasks_harness import Tasks
from tests.web.test_events import fire

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.schedules import AssetSchedule
from headgate.protocol.values import encode_value
from headgate.store.inspect.browsing.search import DAGS_AT_A_TIME
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store
from headgate.store.tables import dag
from headgate.supervisor.logs import task_log_files
from headgate.web import layout as layout_module
from headgate.web.layout import BOX_H, BOX_W, POINTS_MAX, Layout, Layouts, lay_out
from headgate.web.pages.pictures import BOXES_MAX
from headgate.web.pages.tasks import CURSOR_CHARS_MAX
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


def test_a_graph_around_a_task_has_that_task_and_those_next_to_it(page: Get, store: Store) -> None:
    roots = [f"r{number:03}" for number in range(400)]
    tasks = (
        *(TaskSpec(name, "Op") for name in roots),
        TaskSpec("join", "Op", upstream=tuple(roots)),
        TaskSpec("last", "Op", upstream=("join",)),
    )
    store.tasks.save_file(register(store), "many.py", [DagSpec("many", tasks=tasks)])

    def boxes(around: str) -> list[str]:
        return re.findall(r"<title>(\w+): no state", page("/dags/many/graph", around=around))

    for around, next_to in (("last", ["join"]), ("r399", ["join"]), ("join", ["r000", "r001"])):
        drawn = boxes(around)
        assert {around, *next_to} <= set(drawn), around
        assert len(drawn) == BOXES_MAX, "there are far more within reach"
        assert "near " + around in page("/dags/many/graph", around=around)


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


def test_of_many_tries_the_newest_are_read_and_then_all_that_follow(tmp_path: Path) -> None:
    from headgate.store.ids import TryName

    def write(numbers: Iterable[int]) -> None:
        for number in numbers:
            file = task_log_files.file_of(tmp_path, TryName("d", "r", "t", number), 1_234_567)
            file.parent.mkdir(parents=True)
            file.write_bytes(b'{"event":"of %d"}\n' % number)

    def read(cursor: str | None) -> tuple[list[str], str]:
        records, behind = task_log_files.read_on(tmp_path, TryName("d", "r", "t", 1), cursor, bytes_max=100)
        return [record["event"] for record in records], behind

    most = task_log_files.TRIES_READ_MAX
    write(range(1, 201))
    found, cursor = read(None)
    assert found == [f"of {number}" for number in range(201 - most, 201)]
    assert read(cursor) == ([], cursor)
    write(range(201, 201 + 5 * most))
    seen = list[str]()
    while found or not seen:
        found, cursor = read(cursor)
        seen += found
        assert len(found) <= 2 * most
        assert len(cursor) <= CURSOR_CHARS_MAX / 4
    assert seen == [f"of {number}" for number in range(201, 201 + 5 * most)]


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


def test_a_search_looks_at_the_runs_and_tasks_of_all_dags(client: TestClient, etl: Tasks, store: Store) -> None:
    etl.store.tasks.save_file(etl.epoch, "z.py", [DagSpec("zz", tasks=(TaskSpec("rare", "Op"),))])
    etl.store.tasks.create_run("zz", "the-last")
    columns = [column for column in dag.c if column.name not in ("id", "name")]
    names = [{"name": f"many{number:05}"} for number in range(DAGS_AT_A_TIME * 2)]
    with store.database.writing() as tx:
        row = tx.connection.execute(select(*columns).where(dag.c.name == "zz")).one()
        tx.connection.execute(insert(dag), [{**row._mapping, **name} for name in names])
    for asked, found in (("the-last", ("run", "the-last", "zz")), ("rar", ("task", "rare", "zz"))):
        rows = client.get("/search.json", params={"q": asked}).json()["rows"]
        assert [(row["kind"], row["name"], row["dag"]) for row in rows] == [found]
    etl.store.tasks.create_run("etl", "the-last")
    rows = client.get("/search.json", params={"q": "the-last"}).json()["rows"]
    assert [row["dag"] for row in rows] == ["etl", "zz"]


# --- layouts: no box lies on another, and every edge leads from the left to the right ------------


def drawn(upstream: dict[str, list[str]]) -> dict[str, tuple[float, float]]:
    """Lay a graph out, check what holds for all, and return the places of its boxes."""
    layout = lay_out(upstream)
    at = {box.name: (box.x, box.y) for box in layout.boxes}
    assert at.keys() == upstream.keys()
    for (x, y), (other_x, other_y) in combinations(at.values(), 2):
        assert abs(x - other_x) >= BOX_W or abs(y - other_y) >= BOX_H
    assert all(0 <= x <= layout.width - BOX_W and 0 <= y <= layout.height - BOX_H for x, y in at.values())
    assert len(layout.edges) == sum(map(len, upstream.values()))
    for edge in layout.edges:
        ends = [float(number) for number in re.findall(r"[\d.]+", edge)]
        assert ends[0] < ends[-2], "it ends to the right of its begin"
    for name, ups in upstream.items():
        assert all(at[up][0] < at[name][0] for up in ups)
    return at


def test_a_chain_is_straight() -> None:
    at = drawn({"a": [], "b": ["a"], "c": ["b"]})
    assert len({y for _, y in at.values()}) == 1


def test_a_task_stands_between_those_that_it_waits_for() -> None:
    at = drawn({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]})
    assert at["a"][1] == at["d"][1] == (at["b"][1] + at["c"][1]) / 2


def test_an_edge_over_layers_passes_beside_the_boxes_between() -> None:
    at = drawn({"a": [], "b": ["a"], "c": ["b", "a"]})
    (path,) = (edge for edge in lay_out({"a": [], "b": ["a"], "c": ["b", "a"]}).edges if "H" in edge)
    y = float(path.split("H")[0].split(" ")[-1])
    assert not at["b"][1] <= y <= at["b"][1] + BOX_H


def test_nothing_is_drawn_of_nothing() -> None:
    assert lay_out({}).boxes == ()


@pytest.mark.parametrize("seed", range(5))
def test_any_graph(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"t{i}" for i in range(60)]
    drawn({name: chance.sample(names[:i], min(i, chance.randrange(4))) for i, name in enumerate(names)})


def each_waits_for_all_before(count: int) -> dict[str, list[str]]:
    return {f"t{i}": [f"t{j}" for j in range(i)] for i in range(count)}


def each_waits_for_all_of_another_layer(count: int) -> dict[str, list[str]]:
    first = [f"a{i}" for i in range(count)]
    return {name: [] for name in first} | {f"b{i}": first for i in range(count)}


def behind_a_chain(count: int) -> dict[str, list[str]]:
    """Every edge of the two layers passes all tasks of a chain, and none is implied by others."""
    chain = {f"c{i}": [f"c{i - 1}"] if i else [] for i in range(count)}
    layers = each_waits_for_all_of_another_layer(count)
    return chain | {name: [*ups, f"c{count - 1}"] if ups else [] for name, ups in layers.items()}


def points(layout: Layout) -> int:
    return sum(edge.count("C") for edge in layout.edges)


def test_of_too_many_edges_those_that_others_imply_are_not_drawn() -> None:
    layout = lay_out(each_waits_for_all_before(290))
    assert (layout.lines, len(layout.boxes), points(layout)) == ("needed", 290, 289)
    assert {box.x for box in layout.boxes} == {12 + i * 224 for i in range(290)}, "each is in a layer of its own"
    few = lay_out(each_waits_for_all_before(20))
    assert (few.lines, len(few.edges)) == ("all", 190)


def test_of_far_too_many_edges_those_of_one_task_are_drawn() -> None:
    upstream = each_waits_for_all_of_another_layer(150)
    for around in ("a7", "b7"):
        layout = lay_out(upstream, around)
        assert (layout.lines, len(layout.boxes), len(layout.edges)) == ("of one", 300, 150)
    assert lay_out(upstream).edges == ()
    assert lay_out(each_waits_for_all_of_another_layer(70)).lines == "all"


def test_edges_that_would_bend_too_often_are_drawn_straight() -> None:
    layout = lay_out(behind_a_chain(70))
    assert (layout.lines, points(layout)) == ("needed", 69 + 70 * 70 + 70)
    assert len(layout.edges) == points(layout)


@pytest.mark.parametrize("seed", range(5))
def test_no_graph_has_more_points_than_the_limit(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"t{i}" for i in range(300)]
    upstream = {name: chance.sample(names[:i], chance.randrange(i + 1)) for i, name in enumerate(names)}
    assert sum(map(len, upstream.values())) > POINTS_MAX
    assert points(lay_out(upstream, "t7")) <= POINTS_MAX


class Turns:
    """A lock that says when somebody asks for it while somebody has it."""

    def __init__(self, is_waited_for: threading.Event) -> None:
        self._lock = threading.Lock()
        self._is_waited_for = is_waited_for

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_a_graph_that_is_asked_for_twice_at_a_time_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other_is_there, made, layouts = threading.Event(), [], Layouts()
    layouts._making = Turns(other_is_there)  # type: ignore[assignment]
    other = threading.Thread(target=lambda: made.append(layouts.of({"a": []})))

    def counted(*graph: Any) -> Layout:
        if other.ident is None:
            other.start()
            other_is_there.wait()
        else:
            other_is_there.set()
        return lay_out(*graph)

    monkeypatch.setattr(layout_module, "lay_out", counted)
    first = layouts.of({"a": []})
    other.join()
    assert made[0] is first


def test_a_graph_that_is_the_same_is_laid_out_once() -> None:
    layouts = Layouts()
    assert layouts.of({"a": [], "b": ["a"]}) is layouts.of({"a": [], "b": ["a"]})
    assert layouts.of({"a": []}) is not layouts.of({"b": []})
    assert layouts.of({"a": [], "b": ["a"]}, "a") is not layouts.of({"a": [], "b": ["a"]}, "b")
