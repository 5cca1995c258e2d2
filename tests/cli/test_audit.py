"""Every command of a user that changes something leaves a row of the audit, and a command that does not is known."""

from __future__ import annotations

import ast
import json
import os
import pwd
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.cli.conftest import Called
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks
from tests.test_documents import commands

import headgate.store
from headgate.protocol.messages.runner import RefusedEvent
from headgate.protocol.values import encode_value
from headgate.store.access.audit import Action, Actor, Unaudited
from headgate.store.consuming.reading import START
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import acting
from headgate.store.store import Store
from headgate.store.triggers.watchers import WatcherVerbs

# Programs add consumers, and pages log in; there is no command for it.
BY_PROGRAMS = {"consumers add", "users log in"}
READ = {
    *("audit list", "brokers check", "config show", "connections get", "connections list", "consumers letters"),
    *("consumers list", "dags list", "dags show", "dlq list", "dlq show", "events list", "events tail", "frames show"),
    *("frames verify", "health", "help", "keys list", "metrics list", "metrics rules", "pools list", "runs list"),
    *("runs show", "signals list", "signals listen", "signals show", "status", "streams list", "streams show"),
    *("tasks list", "tasks logs", "tasks show", "triggerers list", "triggers list", "triggers show", "triggers slow"),
    *("top", "users list", "variables get", "variables list", "watchers list", "why"),
}
# They run something that acts by itself, or write files, or another database; `db upgrade` may have no audit yet.
RUN = {
    *("demo", "examples", "frames replay", "metrics dashboards", "service install", "signals serve", "traces send"),
    *("triggerer", "up", "web", "db roles", "db upgrade"),
}


def script(letters: list[int]) -> list[tuple[str, ...]]:
    """Calls of every other command, in an order in which each can do something."""
    task = ("etl", "r1", "a")
    return [
        ("dags", "pause", "etl"),
        ("dags", "unpause", "etl"),
        ("dags", "trigger", "etl", "--run-id", "mine", "--conf", '{"password": "secret-value"}'),
        *[("tasks", verb, *task) for verb in ("mark-success", "clear", "start", "restart", "stop", "mark-failed")],
        ("runs", "end", "etl", "r1"),
        ("runs", "cancel", "etl", "mine"),
        ("variables", "set", "v", "secret-value"),
        ("variables", "delete", "v"),
        ("connections", "set", "c", "http://ada:secret-value@host"),
        ("connections", "delete", "c"),
        ("pools", "set", "wide", "4"),
        ("pools", "delete", "wide"),
        ("watchers", "add", "w2", "a.B", "--no-check", "--kwargs", '{"token": "secret-value"}'),
        ("watchers", "set", "w2", "--no-check", "--kwargs", '{"token": "secret-value"}', "--max-deliveries", "7"),
        *[("watchers", verb, "w2") for verb in ("restart", "pause", "resume", "remove")],
        ("triggers", "release", "w"),
        ("triggers", "orphans", "--remove"),
        ("events", "put", "w", '"secret-value"'),
        ("consumers", "set", "bill", "--max-deliveries", "3"),
        ("consumers", "redeliver", "bill", "--all"),
        ("consumers", "discard", "bill", "--all"),
        ("consumers", "remove", "bill"),
        ("signals", "send", "k", '"secret-value"'),
        ("signals", "forget", "k"),
        ("dlq", "edit", str(letters[0]), "--payload", '"secret-value"'),
        ("dlq", "redrive", str(letters[0])),
        ("dlq", "discard", "--all"),
        ("db", "clean", "--older-than", "30d"),
        ("users", "add", "ada", "--role", "viewer"),
        ("users", "set", "ada", "--role", "admin", "--password"),
        ("users", "revoke", "ada"),
        ("users", "remove", "ada"),
        ("keys", "add"),
        ("keys", "rotate"),
        ("streams", "drift"),
    ]


def rows_of(query: Query) -> list[dict[str, Any]]:
    return [dict(row) for row in query("SELECT * FROM audit ORDER BY id")]


def refuse(tasks: Tasks, trigger_id: int, count: int) -> list[int]:
    payload = encode_value("big", where="p")
    refused = [
        RefusedEvent(trigger_id, "run", at, at, "too big", len(payload), payload, is_whole=True) for at in range(count)
    ]
    tasks.store.store_slice(tasks.epoch, refused=refused)
    return sorted(letter.id for letter in tasks.store.inspect.dead_letters(count))


def test_every_command_that_changes_something_leaves_a_row(
    call_database: Any, etl: Tasks, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger_id = etl.store.add_watcher("w", "a.B", {})
    etl.store.consumers.add("bill", "w", START, 2)
    etl.store.claim_triggers(etl.epoch, limit=1, queues=("default",))
    calls = script(refuse(etl, trigger_id, 4))
    monkeypatch.setenv("LOGNAME", "eve")  # which says nothing of who it is
    me = pwd.getpwuid(os.getuid()).pw_name

    told = {" ".join(call[:2]) for call in calls}
    assert told == commands() - READ - RUN, "a command is neither known to read nor called here"
    assert told == set(get_args(Action)) - BY_PROGRAMS

    assert rows_of(query) == [], "supervisors and programs leave none"
    for arguments in calls:
        before = len(rows_of(query))
        called: Called = call_database(*arguments)
        new = rows_of(query)[before:]
        assert (called.code, called.err.count("\n") > 1) == (0, False), f"{arguments}: {called.err}"
        assert [row["action"] for row in new] == [" ".join(arguments[:2])], arguments
        assert new[0]["actor"].startswith(f"unix:{me}@")
        assert (new[0]["role"], new[0]["via"]) == ("admin", "cli")
    rows = rows_of(query)
    assert len({row["request_id"] for row in rows}) == len(calls)
    assert "secret-value" not in json.dumps(rows, default=str)
    by_action = {row["action"]: row for row in rows}
    assert json.loads(by_action["dags unpause"]["before"]) == {"is_paused": True}
    assert by_action["tasks clear"]["object"] == "run etl r1"
    assert by_action["tasks stop"]["object"] == "task etl r1 a"
    assert by_action["triggers orphans"]["outcome"] == "unchanged"
    assert (by_action["dlq redrive"]["after"], by_action["dlq discard"]["after"]) == (
        '{"redriven": 1}',
        '{"discarded": 3}',
    )
    assert by_action["dlq discard"]["object"] == "dead letters"
    of_rows = query("SELECT audit_id FROM letter_action WHERE action = 'discarded'")
    assert {row["audit_id"] for row in of_rows} == {by_action["dlq discard"]["id"]}, "letters refer to the act"

    (shown,) = call_database("audit", "list", "--object", "DAG etl", "--action", "dags pause", "--json").rows()
    assert (shown["before"], shown["after"], shown["outcome"]) == ({"is_paused": False}, {"is_paused": True}, "done")
    table = call_database("audit", "list", "--since", "1h").out
    assert "is_paused: no, now yes" in table
    assert call_database("audit", "list", "--by", "unix:nobody@else").out == "none\n"
    wrong = call_database("audit", "list", "--action", "dags")
    assert (wrong.code, "'dags' is none of: consumers add" in wrong.err) == (2, True)


SESSIONS = {"note_use", "end_session"}  # of the pages: nobody asks for it


class Careless(WatcherVerbs):
    @acting
    def forget_to_tell(self, tx: Tx) -> None:
        tx.connection.exec_driver_sql("DELETE FROM pool")


def test_a_store_of_a_user_writes_nothing_without_a_row(users_store: Store, query: Query) -> None:
    users_store.tasks.set_pool("p", 1)
    pools = query("SELECT * FROM pool")
    database = users_store.database
    for_user = Store(database.engine, secrets=database.secrets, actor=Actor("ada", "operator", "web"))
    with for_user:
        with pytest.raises(Unaudited, match="without a row"):
            Careless(for_user.database).forget_to_tell()
        with pytest.raises(Unaudited, match="leave a row"), for_user.database.writing():
            pass
    assert query("SELECT * FROM pool") == pools


def test_no_verb_writes_past_the_audit_but_those_of_supervisors() -> None:
    found = set()
    (folder,) = headgate.store.__path__
    for path in Path(folder).rglob("*.py"):
        if path.parent.name == "db":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = [one.id for one in node.decorator_list if isinstance(one, ast.Name)]
                opens = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr == "writing"]
                if "writing" in names or opens:
                    found.add(node.name)
    assert (
        found
        == {"register_triggerer", "release_triggerer", "claimed_triggers", "heartbeat", "owned_running"} | SESSIONS
    )
