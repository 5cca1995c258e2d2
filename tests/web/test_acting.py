"""What users do on pages: by role, with the row of the audit, and the same as the commands do."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, get_args

import pytest
from sqlalchemy import insert, update
from starlette.testclient import TestClient
from tests.cli.test_audit import refuse
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks, task_states
from tests.web.conftest import OURS, token_of
from tests.web.test_guard import path_of

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.values import encode_value
from headgate.store.access.audit import Action, Actor, Role
from headgate.store.access.users import (
    EVERYONE,
    GUESS_WAIT_S_MAX,
    GUESSES_FREE,
    GUESSES_OF_ADDRESS_FREE,
    LOCAL_NAME,
    SESSION_NOTED_S,
    wait_s,
)
from headgate.store.errors import ValueRefused
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store
from headgate.store.tables import audit, web_guess, web_session, xcom
from headgate.supervisor.logs import task_log_files
from headgate.web.acts import ACTS, RANKS, act_path, may, of_task
from headgate.web.app import ACT_SHOWN_S_MAX
from headgate.web.routes import ROUTES
from headgate.web.views import Site
from headgate.web.writing import WRITERS_MAX

ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
SECRET = "of operators alone"
SECRET_RUN = "/dags/etl/runs/r2"  # of the fixture `hidden`
SECRET_TASK = f"{SECRET_RUN}/tasks/a"
PAGES_MAX = 200  # that a viewer comes to from the overview; there are fewer


Browser = Callable[[], TestClient]


def log_in(client: TestClient, name: str, password: str) -> TestClient:
    answer = client.post("/login", headers=OURS, data={"name": name, "password": password})
    assert answer.status_code == 303, answer.text
    return client


@pytest.fixture
def users(browser: Browser, store: Store) -> dict[str, TestClient]:
    """A browser of a user of each role, who has the role's name."""
    return {role: log_in(browser(), role, store.access.add_user(role, role)) for role in ROLES}


def act(client: TestClient, action: Action, **form: str) -> Any:
    return client.post(act_path(action), headers=OURS, data={"token": token_of(client), **form})


def acts_of(query: Query) -> list[tuple[str, ...]]:
    rows = query("SELECT * FROM audit WHERE action <> 'users log in' ORDER BY id")
    return [(row["actor"], row["role"], row["via"], row["action"], row["object"], row["outcome"]) for row in rows]


def test_each_role_may_call_its_routes_and_no_others(browser: Browser, users: dict[str, TestClient]) -> None:
    stranger = browser()
    for route in sorted(ROUTES, key=lambda route: route.path == "/logout"):
        for role in get_args(Role):
            client = users.get(role, stranger)
            data = {"token": token_of(client)} if role != "nobody" and route.method == "POST" else None
            answer = client.request(route.method, path_of(route), headers=OURS, data=data)
            if route.role == "nobody":
                assert answer.status_code in (200, 303, 403), (role, route)
            elif role == "nobody":
                assert answer.status_code == 303, route
                assert answer.headers["location"].startswith("/login")
            else:
                is_refused = answer.status_code == 403 and "This is for the role" in answer.text
                assert is_refused == (RANKS[role] < RANKS[route.role]), (role, route, answer.status_code)
    acting = [route for route in ROUTES if route.action and not route.path.startswith("/account/")]
    assert {route.action for route in acting} == set(ACTS)
    assert all(route.method == "POST" and may(route.role, "operator") for route in acting)


def test_a_user_acts_on_tasks_and_the_audit_says_who(users: dict[str, TestClient], etl: Tasks, query: Query) -> None:
    client, run = users["operator"], {"dag": "etl", "run": "r1"}
    paused = act(client, "dags pause", dag="etl")
    assert paused.status_code == 303
    shown = client.get(paused.headers["location"]).text
    assert "dags pause, DAG etl: is_paused: no, now yes" in shown
    assert ">Unpause<" in shown
    assert ">Unpause<" not in users["viewer"].get("/dags/etl").text
    assert "dags pause" not in users["viewer"].get(paused.headers["location"]).text, "the audit is for operators"
    assert "dags pause, DAG etl" not in users["admin"].get(paused.headers["location"]).text, "it has not done it"
    (repeated,) = re.findall('hx-get="([^"]*)"', shown)
    assert repeated == "/dags/etl"
    with etl.store.database.writing() as tx:
        tx.connection.execute(update(audit).values(at=tx.now - timedelta(seconds=ACT_SHOWN_S_MAX + 1)))
    assert "dags pause, DAG etl" not in client.get(paused.headers["location"]).text, "it was told long ago"
    assert act(client, "dags trigger", dag="etl", run_id="mine", conf='{"a": "' + SECRET + '"}').status_code == 303
    assert act(client, "dags trigger", dag="etl", conf="[1]").status_code == 400
    assert act(client, "tasks mark-failed", **run, task="a").status_code == 303

    asked = act(client, "tasks clear", **run, which="failed")
    assert (asked.status_code, "a begins again" in asked.text) == (200, True)
    assert task_states(etl.store, etl.run)["a"].value == "failed", "it was only asked"
    assert act(client, "tasks clear", **run, which="failed", confirmed="1").status_code == 303
    assert task_states(etl.store, etl.run)["a"].value == "none"
    assert act(client, "runs cancel", **run).status_code == 303
    assert act(client, "runs cancel", dag="etl", run="none").status_code == 404
    assert [row[3:] for row in acts_of(query) if row[0] == "operator"] == [
        ("dags pause", "DAG etl", "done"),
        ("dags trigger", "run etl mine", "done"),
        ("tasks mark-failed", "task etl r1 a", "done"),
        ("tasks clear", "run etl r1", "done"),
        ("runs cancel", "run etl r1", "done"),
    ]
    assert {row[:3] for row in acts_of(query) if row[0] == "operator"} == {("operator", "operator", "web")}
    assert SECRET in client.get("/dags/etl/runs/mine").text
    assert SECRET not in users["viewer"].get("/dags/etl/runs/mine").text
    assert "mark-failed" in users["operator"].get("/audit").text
    assert json.loads(client.get("/audit.json?object=DAG+etl").text)["rows"][0]["after"] == {"is_paused": True}


def test_a_run_whose_name_is_taken_is_not_started(users: dict[str, TestClient], etl: Tasks) -> None:
    client = users["operator"]
    refused = act(client, "dags trigger", dag="etl", run_id="r1", conf='{"a": 1}')
    assert (refused.status_code, "has a run named &#39;r1&#39; already" in refused.text) == (409, True)
    assert etl.store.inspect.run("etl", "r1").conf is None
    (row,) = client.get("/audit.json?object=run+etl+r1").json()["rows"]
    assert (row["outcome"], row["before"], row["after"]) == ("unchanged", None, None)


def test_a_form_that_is_sent_twice_does_once_what_it_is_for(users: dict[str, TestClient], etl: Tasks) -> None:
    client = users["operator"]

    def sent(place: str, action: Action, **typed: str) -> list[int]:
        (form,) = re.findall(f'<form[^>]*action="{act_path(action)}".*?</form>', client.get(place).text, re.DOTALL)
        hidden = dict(re.findall('type="hidden" name="([^"]*)" value="([^"]*)"', form))
        return [act(client, action, **hidden, **typed).status_code for _ in range(2)]

    assert sent("/dags/etl", "dags trigger") == [303, 409]
    assert sent("/dags/etl", "dags trigger") == [303, 409], "another page starts another run"
    assert len(etl.store.inspect.runs(dag="etl")) == 3
    assert sent("/signals", "signals send", key="k") == [303, 303]
    key = etl.store.signals.key("k")
    assert sent(f"/signals/{key.id}", "signals send") == [303, 303]
    assert [one.version for one in etl.store.signals.page("k").signals] == [1, 2]


@pytest.mark.parametrize("name", ["latest", "a b", "r1/tasks/a", "a\nb", "é", ".", ".."])
def test_a_run_has_a_name_that_commands_take(users: dict[str, TestClient], etl: Tasks, name: str) -> None:
    refused = act(users["operator"], "dags trigger", dag="etl", run_id=name)
    assert refused.status_code == 400
    assert "the name of the run: " in refused.text
    assert [run.run_id for run in etl.store.inspect.runs()] == ["r1"]


def test_a_user_acts_on_triggers_letters_and_pools(users: dict[str, TestClient], etl: Tasks, query: Query) -> None:
    client, store = users["admin"], etl.store
    trigger_id = store.add_watcher("w", "a.B", {})
    store.claim_triggers(etl.epoch, limit=1, queues=("default",))
    letters = refuse(etl, trigger_id, 5)
    holds: list[tuple[Action, str | None]] = [("watchers pause", "paused"), ("watchers resume", None)]
    holds.append(("watchers restart", None))
    for action, hold in holds:
        assert act(client, action, watcher="w").status_code == 303
        assert store.inspect.trigger_line(trigger_id).hold == hold
    assert act(client, "watchers pause", watcher="none").status_code == 404
    act(client, "watchers pause", watcher="w")
    assert act(users["operator"], "triggers release", trigger=str(trigger_id)).status_code == 409
    assert store.inspect.trigger_line(trigger_id).hold == "paused", "only an admin resumes a watcher"
    assert act(client, "triggers release", trigger=str(trigger_id)).status_code == 303
    assert act(client, "pools set", pool="wide", slots="7").status_code == 303
    assert act(client, "pools set", pool="wide", slots="-1").status_code == 400

    assert act(client, "dlq redrive", letter=str(letters[0]), note="again").status_code == 303
    refused = act(client, "dlq redrive", letter=str(letters[0]))
    assert (refused.status_code, "redriven already, by admin" in refused.text) == (409, True)
    assert act(client, "dlq discard").status_code == 400, "no filter"
    asked = act(client, "dlq discard", watcher="w")
    assert (asked.status_code, "4 event letters of w" in asked.text) == (200, True)
    form = {"watcher": "w", "confirmed": "1", "up_to": str(letters[3]), "after": "0", "done": "0", "failed": "0"}
    assert act(client, "dlq discard", **form).status_code == 303
    assert [row["state"] for row in query("SELECT state FROM dead_letter ORDER BY id")] == [
        "redriven",
        *["discarded"] * 3,
        "open",
    ]
    asked = act(client, "watchers remove", watcher="w")
    assert (asked.status_code, "Remove the watcher w?" in asked.text) == (200, True)
    assert act(client, "watchers remove", watcher="w", confirmed="1").status_code == 303
    mine = [row[3:5] for row in acts_of(query) if row[0] == "admin"]
    assert mine.count(("dlq discard", "dead letters")) == 1
    assert mine[-1] == ("watchers remove", "watcher w")
    payload = encode_value("big", where="p").decode()
    assert payload in users["operator"].get("/dead-letters.json?state=any").text.replace('\\"', '"')
    assert "payload_head" not in users["viewer"].get("/dead-letters.json?state=any").text
    assert "Operators can see it." in users["viewer"].get(f"/dead-letters/{letters[4]}").text


def test_users_log_in_slower_and_slower_and_are_told_nothing(browser: Browser, store: Store, query: Query) -> None:
    password, client = store.access.add_user("ada", "viewer"), browser()

    def try_in(name: str, password: str) -> tuple[int, str]:
        answer = client.post("/login", headers=OURS, data={"name": name, "password": password})
        return answer.status_code, answer.text

    def guessed(failures: int, ago: timedelta) -> None:
        with store.database.writing() as tx:
            tx.connection.execute(update(web_guess).values(failures=failures, last_at=tx.now - ago))

    wrong = try_in("ada", "wrong")
    assert wrong[0] == 403
    assert try_in("nobody", "wrong") == wrong, "whether there is such a user is not told"
    assert [row["failures"] for row in query('SELECT * FROM web_guess ORDER BY "user"')] == [2, 1, 1]
    guessed(GUESSES_FREE + 20, timedelta(seconds=GUESS_WAIT_S_MAX - 60))
    assert try_in("ada", password) == wrong, "it is too early"
    refused = query("SELECT actor, role FROM audit WHERE outcome = 'refused' ORDER BY id")
    assert [tuple(row.values()) for row in refused] == [("ada", "nobody"), ("nobody", "nobody")]
    guessed(GUESSES_FREE + 20, timedelta(seconds=GUESS_WAIT_S_MAX + 60))
    assert try_in("ada", password) == (303, "")
    assert [row["user"] for row in query("SELECT * FROM web_guess")] == ["nobody"]
    assert store.access.log_in("eve", "wrong", "127.0.0.1") is None
    with store.database.writing() as tx:
        everyone = update(web_guess).where(web_guess.c.user == EVERYONE)
        tx.connection.execute(everyone.values(failures=GUESSES_OF_ADDRESS_FREE + 9, last_at=tx.now))
    for number in range(5):  # from other addresses of this machine
        assert store.access.log_in(f"other{number}", "wrong", f"127.0.0.{number + 2}") is None
        assert store.access.log_in("eve", "wrong", "::1") is None
    rows = query('SELECT "user", failures FROM web_guess WHERE address <> \'testclient\' ORDER BY "user"')
    assert [tuple(row.values()) for row in rows] == [("", GUESSES_OF_ADDRESS_FREE + 9), ("eve", 1)]
    waits = [wait_s(failures) for failures in (0, 1, 2, 9, 10, 10_000)]
    assert waits == [1, 2, 4, 512, GUESS_WAIT_S_MAX, GUESS_WAIT_S_MAX]


def test_a_session_ends_with_its_user_and_has_the_role_of_now(browser: Browser, store: Store, query: Query) -> None:
    password = store.access.add_user("ada", "viewer")
    client = log_in(browser(), "ada", password)
    assert client.get("/audit").status_code == 403
    store.access.set_user("ada", role="operator")
    assert client.get("/audit").status_code == 200
    session = client.cookies["headgate-8780"]
    assert session not in json.dumps([dict(row) for row in query("SELECT * FROM web_session")], default=str)
    assert password not in json.dumps([dict(row) for row in query("SELECT * FROM web_user")], default=str)
    assert store.access.users()[0].sessions == 1
    assert store.access.revoke_sessions("ada") == 1
    assert client.get("/runs").status_code == 303
    again = log_in(browser(), "ada", password)
    new = store.access.set_user("ada", makes_password=True)
    assert again.get("/runs").status_code == 303
    assert new is not None
    last = log_in(browser(), "ada", new)
    store.access.remove_user("ada")
    assert last.get("/runs").status_code == 303


def test_sessions_by_links_can_be_ended_and_need_nothing_that_writes(
    client: TestClient, site: Site, store: Store
) -> None:
    with store.database.writing() as tx:
        tx.connection.execute(update(web_session).values(used_at=tx.now - timedelta(seconds=2 * SESSION_NOTED_S)))
    assert site.writer is not None
    with ExitStack() as busy:
        for _ in range(WRITERS_MAX):
            busy.enter_context(site.writer.store(None))
        assert client.get("/runs").status_code == 200
    with pytest.raises(ValueRefused, match="choose another name"):
        store.access.add_user(LOCAL_NAME, "viewer")
    assert store.access.revoke_sessions(LOCAL_NAME) == 1
    assert client.get("/runs").status_code == 303


Row = dict[str, Any]


def test_a_form_names_what_it_acts_on_as_it_is(users: dict[str, TestClient], etl: Tasks) -> None:
    """A name that looks like a URL with a password is masked in what is shown, and not in what is sent."""
    client, key = users["admin"], "redis://u:secret@host"
    etl.store.signals.send([NewSignal(key, b"1", "d", "ada")])
    found = re.search(r'href="(/signals/[^"?]+)"', client.get("/signals").text)
    assert found is not None
    text = client.get(html.unescape(found[1])).text
    forms = re.findall(r'<input type="hidden" name="key" value="([^"]*)">', text)
    assert forms
    assert {html.unescape(value) for value in forms} == {key}
    assert "redis://u:***@host" in text


def test_spaces_around_a_key_of_signals_count_unless_somebody_types_them(
    users: dict[str, TestClient], etl: Tasks
) -> None:
    client, signals = users["admin"], etl.store.signals

    def versions() -> dict[str, int]:
        return {row.key: row.last_version for row in signals.keys(limit=10)}

    signals.send([NewSignal("model ", b"1", "a", "ada"), NewSignal("model", b"1", "b", "ada")])
    assert act(client, "signals send", key="model ", value="2", is_known="yes").status_code == 303
    assert act(client, "signals send", key=" model", value="2").status_code == 303, "typed"
    assert versions() == {"model ": 2, "model": 2}
    for status in (303, 404):  # the second time from an older page
        answer = act(client, "signals forget", key="model ", is_known="yes", confirmed="1")
        assert (answer.status_code, versions()) == (status, {"model": 2})


def test_a_page_and_its_command_leave_the_same_row(users: dict[str, TestClient], etl: Tasks, query: Query) -> None:
    client, store = users["admin"], etl.store
    trigger_id = store.add_watcher("w", "a.B", {})
    store.claim_triggers(etl.epoch, limit=1, queues=("default",))
    letter = refuse(etl, trigger_id, 1)[0]
    as_command = Actor("ada", "admin", "cli")
    by_command = Store(store.database.engine, secrets=store.database.secrets, actor=as_command)
    task, named = {"dag": "etl", "run": "r1", "task": "b"}, store.inspect.find_task("etl", "r1", "b").id

    def newest() -> Row:
        kept = ("action", "object", "before", "after", "outcome")
        row = query("SELECT * FROM audit ORDER BY id DESC LIMIT 1")[0]
        return {name: row[name] for name in kept}

    def send(number: int) -> Any:
        return by_command.signals.send([NewSignal("k", b"1", f"d{number}", "ada")])

    def same(action: Action, verb: Callable[[], object], **form: str) -> None:
        answer = act(client, action, **form)
        assert answer.status_code == 303, answer.text
        by_page = newest()
        assert by_page["action"] == action
        verb()
        assert newest() == by_page

    with by_command:
        same("tasks start", lambda: by_command.signals.ask(named, "START"), **task)
        same("tasks restart", lambda: by_command.signals.ask(named, "RESTART"), **task)
        same("tasks stop", lambda: by_command.signals.ask(named, "STOP"), **task)
        payload = '{"price": 2}'
        edit = partial(by_command.letters.edit, letter, payload.encode(), by="ada")
        same("dlq edit", edit, letter=str(letter), payload=payload)
        assert '"price": 2' in client.get(f"/dead-letters/{letter}").text.replace("&#34;", '"')
        assert act(client, "dlq edit", letter=str(letter), payload="{").status_code == 400
        assert act(client, "signals send", key="k", value="1").status_code == 303
        by_page = newest()
        send(1)
        assert (newest()["action"], newest()["object"]) == (by_page["action"], by_page["object"])
        assert act(client, "signals send", key="k", value="nan").status_code == 400
        asked = act(client, "signals forget", key="k")
        assert (asked.status_code, "Forget the key k of default?" in asked.text) == (200, True)
        assert act(client, "signals forget", key="k", confirmed="1").status_code == 303
        assert client.get("/signals.json").json()["rows"] == []
        by_page = newest()
        send(2)
        by_command.signals.forget("k")
        assert (newest()["action"], newest()["object"]) == (by_page["action"], by_page["object"])
        by_command.tasks.set_pool("wide", 4)
        asked = act(client, "pools delete", pool="wide")
        assert (asked.status_code, "Delete the pool wide?" in asked.text) == (200, True)
        assert act(client, "pools delete", pool="wide", confirmed="1").status_code == 303
        by_page = newest()
        by_command.tasks.set_pool("wide", 4)
        by_command.tasks.delete_pool("wide")
        assert newest() == by_page


# --- what viewers do not see ---


@pytest.fixture
def hidden(etl: Tasks, site: Site) -> None:
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


@pytest.mark.usefixtures("hidden")
def test_a_page_tells_a_viewer_what_only_operators_see(users: dict[str, TestClient]) -> None:
    for client, is_told in ((users["viewer"], True), (users["operator"], False)):
        run, task = client.get(SECRET_RUN).text, client.get(SECRET_TASK).text
        assert (run.count("Operators can see it."), SECRET in run) == ((1, False) if is_told else (0, True))
        assert ("Operators can see them." in task, "Operators can see it." in task) == (is_told, is_told)
        assert task.count(SECRET) == (0 if is_told else 2)
        assert "There is no log" not in task
    other = users["viewer"].get("/dags/etl/runs/r1").text
    assert "Operators can see" not in other, "it has no conf"


@pytest.mark.usefixtures("hidden")
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
    assert {SECRET_TASK, "/signals", "/account"} <= known
    assert "/audit" not in known
    operators = users["operator"].get("/").text
    assert 'href="/audit"' in operators
    assert users["operator"].get("/search?q=news").headers["location"].startswith("/signals/")


def test_an_act_of_an_older_page_on_what_has_ended_is_refused(
    users: dict[str, TestClient], etl: Tasks, query: Query
) -> None:
    client, run = users["operator"], {"dag": "etl", "run": "r1"}
    assert act(client, "runs cancel", **run).status_code == 303
    acts: list[tuple[Action, dict[str, str], str]] = [
        ("tasks mark-failed", {"task": "a"}, "a of run r1 of etl has ended already: failed"),
        ("tasks stop", {"task": "a"}, "a of run r1 of etl has ended already: failed"),
        ("runs cancel", {}, "the run r1 of etl has ended already: failed"),
        ("runs end", {}, "the run r1 of etl has ended already: failed"),
    ]
    for action, about, state in acts:
        answer = act(client, action, **run, **about)
        assert (answer.status_code, state in html.unescape(answer.text)) == (409, True), answer.text
    (stop,) = query("SELECT outcome FROM audit WHERE action = 'tasks stop'")
    assert stop["outcome"] == "unchanged"


@pytest.mark.parametrize(
    ("state", "is_mapped", "marks"),
    [
        (TaskState.RUNNING, True, ["tasks mark-success", "tasks mark-failed"]),
        (TaskState.FAILED, False, ["tasks mark-success"]),
        (TaskState.UPSTREAM_FAILED, False, ["tasks mark-success"]),
        (TaskState.FAILED, True, []),
        (TaskState.SUCCESS, False, []),
    ],
)
def test_a_task_is_marked_as_long_as_that_changes_something(
    state: TaskState, is_mapped: bool, marks: list[str]
) -> None:
    offered = of_task("etl", "r1", "a", state=state, is_mapped=is_mapped)
    assert [act.action for act in offered if act.action.startswith("tasks mark")] == marks
