"""The pages about DAGs and runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote

import pytest
from sqlalchemy import Text, cast, update
from starlette.testclient import TestClient
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks, instance_of

from headgate.protocol.messages.dags import DagSpec, SignalSchedule, TaskSpec
from headgate.protocol.messages.maps import MapSpec, Values
from headgate.protocol.messages.rules import SignalRule
from headgate.scheduling.words import command
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store
from headgate.store.tables import task_instance
from headgate.web.pages.overview import place_of

Get = Callable[..., str]


def test_runs_are_listed(page: Get, client: TestClient, etl: Tasks) -> None:
    text = page("/runs")
    assert '<a href="/dags/etl/runs/r1" class="code">r1</a>' in text
    (row,) = client.get("/runs.json").json()["rows"]
    assert (row["dag"], row["run_id"], row["state"]) == ("etl", "r1", "running")
    assert "There are no such runs" in page("/runs", state="failed")
    assert "r1" in page("/runs", state="running", dag="etl", since="1h")


def test_dags_are_listed(page: Get, client: TestClient, etl: Tasks) -> None:
    assert '<a href="/dags/etl" class="short">etl</a>' in page("/dags")
    assert [row["name"] for row in client.get("/dags.json").json()["rows"]] == ["etl"]
    assert client.get("/dags.json", params={"state": "paused"}).json()["rows"] == []
    assert client.get("/dags.json", params={"name": "ET"}).json()["rows"] != []


def test_the_files_that_cannot_be_parsed_go_over_pages(client: TestClient, etl: Tasks) -> None:
    for number in range(70):
        etl.store.tasks.save_import_error(etl.epoch, f"/srv/dags/{number:02}.py", "SyntaxError: no")
    first = client.get("/dags.json").json()
    second = client.get("/dags.json", params={"beyond": first["next_beyond"]}).json()
    shown = [row["file"] for row in first["rows"] + second["rows"]]
    assert second["next_beyond"] is None
    assert shown == ["etl.py", *(f"/srv/dags/{number:02}.py" for number in range(70))]
    found = client.get("/dags.json", params={"state": "broken"}).json()
    assert (len(found["rows"]), found["next_beyond"]) == (50, "file:/srv/dags/49.py")


def test_the_overview_says_what_is_wrong(page: Get, etl: Tasks) -> None:
    assert "Everything is well." in page("/")
    etl.store.add_watcher("elsewhere", "a.B", {}, queue="gpu")
    text = page("/")
    assert "Everything is well." not in text
    assert "gpu" in text


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("why", "big orders"), "/search?q=big+orders"),
        (("why", "my dag", "r 1", "a"), "/dags/my%20dag/runs/r%201/tasks/a"),
        (("why", "it's", "r1", "a"), "/dags/it%27s/runs/r1/tasks/a"),
        (("triggers", "list", "--queue", "a b"), "/triggers?queue=a+b"),
        (("pools", "set", "my pool", "SLOTS"), "/pools"),
        (("streams", "show", "3"), "/streams/3"),
        (("dlq", "list"), "/dead-letters"),
        (("db", "upgrade"), None),
    ],
)
def test_the_command_of_a_problem_has_its_page_whatever_names_are_in_it(
    words: tuple[str, ...], place: str | None
) -> None:
    assert place_of(command(*words)) == place


def test_what_is_no_command_has_no_page() -> None:
    assert place_of("look at the machine's clock") is None
    assert place_of("") is None


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


def test_a_dag_a_run_and_a_task_are_shown(page: Get, client: TestClient, etl: Tasks) -> None:
    dag = page("/dags/etl")
    assert 'href="/dags/etl/runs/r1/tasks/b"' in dag
    run = page("/dags/etl/runs/r1")
    assert [f'<a href="/dags/etl/runs/r1/tasks/{name}" class="short">{name}</a>' in run for name in "abc"] == [True] * 3
    task = page("/dags/etl/runs/r1/tasks/b")
    assert 'aria-label="Why"' in task
    assert '<a href="/dags/etl/runs/r1/tasks/a" class="short">a (' in task, "what it waits for"
    assert "There is no log of it: it has not begun yet." in task
    etl.store.tasks.mark(instance_of(etl.store, etl.run, "b"), "failed")
    assert "There is no log of it: it has ended without having begun." in page("/dags/etl/runs/r1/tasks/b")
    etl.dispatch()
    assert "headgate tasks logs etl r1 a" in page("/dags/etl/runs/r1/tasks/a")
    for missing in ("/dags/no", "/dags/etl/runs/no", "/dags/etl/runs/r1/tasks/no", "/dags/etl/runs/r1/tasks/a[3]"):
        assert client.get(missing).status_code == 404, missing


def test_a_run_says_for_which_signals_it_was_created(page: Get, etl: Tasks) -> None:
    on_model = DagSpec("eval", SignalSchedule((SignalRule("model"),), "batch", 2), tasks=(TaskSpec("a", "Op"),))
    etl.store.tasks.save_file(etl.epoch, "eval.py", [on_model])
    etl.store.signals.send([NewSignal("model", b"1", f"d{number}", "ada") for number in (1, 2)])
    while etl.store.scheduling.consider_signals(etl.epoch).has_more:
        pass
    etl.store.scheduling.create_event_runs(etl.epoch)
    (run,) = etl.store.inspect.runs(dag="eval", limit=2)
    shown = page(f"/dags/eval/runs/{run.run_id}")
    assert "version 1 of model" in shown
    assert "version 2 of model" in shown


def test_a_run_whose_name_has_slashes_has_all_its_pages(page: Get, client: TestClient, etl: Tasks) -> None:
    etl.store.tasks.create_run("etl", "2026/01/b")
    (run,) = re.findall('href="(/dags/etl/runs/2026[^"]*)"', page("/runs"))
    text = page(run)
    assert "<h1>etl 2026/01/b</h1>" in text
    (asked,) = re.findall('hx-get="([^"]*)"', text)
    assert "<h1>etl 2026/01/b</h1>" in page(asked), "it asks for itself"
    tasks = re.findall(r'href="(/dags/etl/runs/2026[^"]*/tasks/[abc])"', text)
    assert len(set(tasks)) == 3
    text = page(tasks[0])
    assert "<h1>etl a</h1>" in text
    assert f'href="{run}"' in text
    (log,) = re.findall(r'href="([^"]*/log\.json)"', text)
    assert client.get(log).json()["rows"] == []
    assert page(f"{tasks[0]}/log")
    assert client.get("/dags/etl/runs/2026/01").status_code == 404
    assert client.get("/dags/etl/runs/").status_code == 404


def test_a_run_that_is_named_like_a_task_of_another_has_its_own_pages(
    page: Get, client: TestClient, browser: Callable[[], TestClient], etl: Tasks
) -> None:
    name = "r1/tasks/a"
    etl.store.tasks.create_run("etl", name)
    (run,) = re.findall('href="(/dags/etl/runs/r1%2F[^"]*)"', page("/runs"))
    text = page(run)
    assert f"<h1>etl {name}</h1>" in text
    (asked,) = re.findall('hx-get="([^"]*)"', text)
    assert asked == run, "it asks for itself"
    tasks = sorted(set(re.findall(r'href="([^"]*/tasks/[abc])"', text)))
    assert tasks == [f"{run}/tasks/{task}" for task in "abc"]
    text = page(tasks[0])
    assert "<h1>etl a</h1>" in text
    assert f'href="{run}"' in text
    (log,) = re.findall(r'href="([^"]*/log\.json)"', text)
    assert client.get(log).json()["rows"] == []
    assert page(f"{tasks[0]}/instances")
    of_another = page("/dags/etl/runs/r1/tasks/a")
    assert "<h1>etl a</h1>" in of_another
    assert 'href="/dags/etl/runs/r1"' in of_another
    login = browser().get(run).headers["location"]
    assert unquote(login).endswith(f"next={run}"), "one comes back to it from the login"


def test_a_run_with_many_tasks_is_read_page_by_page(page: Get, store: Store, query: Query) -> None:
    Tasks(store, query, tasks=tuple(TaskSpec(f"t{number:02}", "Op") for number in range(60)))
    first = page("/dags/etl/runs/r1")
    assert "t49" in first
    assert "t50" not in first
    (beyond,) = re.findall(r'href="/dags/etl/runs/r1\?beyond=([0-9]+)"', first)
    assert "t59" in page("/dags/etl/runs/r1", beyond=beyond)


def test_a_page_asks_again_for_itself_and_a_cursor_is_of_files(client: TestClient, etl: Tasks) -> None:
    etl.store.tasks.create_run("etl", "50%25")
    quoted = "/dags/etl/runs/50%2525"
    answer = client.get(quoted.replace("%", "%25"))  # this client takes one more quoting off than a server
    assert answer.status_code == 200
    assert f'hx-get="{quoted}"' in answer.text
    log = "/dags/etl/runs/r1/tasks/a/log.json"
    assert client.get(log, params={"beyond": "1/4.jsonl=1200"}).status_code == 200
    for cursor in (f"1/4.jsonl={'9' * 19}", "1/../../x.jsonl=1", "1=1"):
        assert client.get(log, params={"beyond": cursor}).status_code == 400, cursor


def test_the_few_instances_that_failed_of_very_many_are_listed(
    page: Get, client: TestClient, store: Store, query: Query
) -> None:
    count, failed = 120, (7, 70, 117)
    each = TaskSpec("each", "Op", map=MapSpec(Values(count), window=count))
    tasks = Tasks(store, query, tasks=(each, TaskSpec("then", "Op", upstream=("each",))))
    tasks.plan()
    with store.database.writing() as tx:
        of_it = update(task_instance).where(task_instance.c.map_index >= 0)
        tx.connection.execute(of_it.values(state="success", map_name="of " + cast(task_instance.c.map_index, Text)))
        tx.connection.execute(of_it.where(task_instance.c.map_index.in_(failed)).values(state="failed"))
    place = "/dags/etl/runs/r1/tasks/each"
    assert f'href="{place}/instances?state=failed"' in page("/dags/etl/runs/r1"), "in the list of tasks"
    assert f'href="{place}/instances?state=failed"' in page(place), "on the page of the task"

    def listed(**filters: str) -> list[int]:
        found, beyond = list[int](), dict[str, str]()
        while True:
            told = client.get(f"{place}/instances.json", params=filters | beyond).json()
            found += [row["map_index"] for row in told["rows"]]
            if told["next_beyond"] is None:
                return found
            beyond = {"beyond": str(told["next_beyond"])}

    assert listed() == list(range(count))
    assert listed(state="failed") == list(failed)
    assert listed(name="OF 7") == [7, *range(70, 80)]
    assert listed(name="of 7", state="failed") == [7, 70]
    text = page(f"{place}/instances", state="failed")
    assert re.findall(r'href="([^"]*)" class="short">each\[', text) == [f"{place}%5B{index}%5D" for index in failed]
    assert f'href="{place}"' in page(f"{place}[7]"), "it leads back to the whole"
    assert "It has no such instances." in page("/dags/etl/runs/r1/tasks/then/instances")
    assert client.get(f"{place}/instances", params={"state": "odd"}).status_code == 400
    assert client.get("/dags/etl/runs/r1/tasks/no/instances").status_code == 404
