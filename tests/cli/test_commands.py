"""The commands that work on a database and on captures, called as a user calls them."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.store.harness import register

from headgate.cli.commands import events as reading
from headgate.protocol.framelog.log import FrameLogWriter
from headgate.protocol.link.runner_dialect import Direction
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import PROTOCOL_VERSION, FiredEvent, Hello, RefusedEvent
from headgate.protocol.values import encode_value
from headgate.store.db import schema
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.supervisor.serve import this_process

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def watched(call_database: Any) -> Any:
    """The command line, with one watcher added."""
    called = call_database(
        "watchers", "add", "--no-check", "orders", "my.triggers.Orders", "--kwargs", '{"path": "/x"}'
    )
    assert (called.code, called.err) == (0, "")
    return call_database


def store_events(
    database_url: str, home: Path, events: list[FiredEvent], refused: list[RefusedEvent] | None = None
) -> None:
    """Store events of the one trigger there is, as a supervisor does."""
    engine = open_engine(database_url)
    with Store(engine, secrets=Secrets.open(home, None, makes_file=True)) as store:
        epoch = store.register_triggerer(
            hostname="h", pid=1, machine="m", process_started=0.0, capacity=1, queues=("default",)
        )
        (trigger,) = store.claim_triggers(epoch, limit=1, queues=("default",))
        store.store_slice(
            epoch,
            events=[msgspec.structs.replace(event, trigger_id=trigger.id) for event in events],
            refused=[msgspec.structs.replace(event, trigger_id=trigger.id) for event in refused or []],
            finished=[],
        )


def fired(index: int, payload: Any, key: str | None = None) -> FiredEvent:
    return FiredEvent(0, "1.1.1.1", index, index, encode_value(payload, where="payload"), key=key)


# --- the database --------------------------------------------------------------------------------


def test_a_database_is_upgraded_and_its_revision_printed(call: Any, home: Path) -> None:
    first, again = call("db", "upgrade"), call("db", "upgrade")

    assert first.code == again.code == 0
    assert "is at revision" in first.out
    assert first.out == again.out
    assert (home / "headgate.db").exists()
    assert call("events", "list").code == 0


def test_an_upgrade_under_supervisors_that_run_warns_of_them(call: Any, home: Path, own_database_url: str) -> None:
    keys, engine = Secrets.open(home, None, makes_file=True), open_engine(own_database_url)
    upgrade = ("--db", own_database_url, "db", "upgrade")
    with Store(engine, secrets=keys) as store:
        assert call(*upgrade).err == ""
        epoch = register(store)
        assert call(*upgrade).err == "", "nothing was upgraded"
        schema.downgrade(engine, "0036")
        warned = call(*upgrade)
        assert warned.code == 0
        assert f"seem to run that are of the version before: {epoch} on " in warned.err
        store.release_triggerer(epoch)
        schema.downgrade(engine, "0036")
        assert call(*upgrade).err == ""
        here = this_process()
        register(store, pid=here.pid, machine=here.machine, process_started=here.process_started - 1)
        schema.downgrade(engine, "0036")
        assert call(*upgrade).err == "", "its process on this machine has ended"


def test_a_database_without_tables_tells_what_to_run(call: Any, empty_database_url: str) -> None:
    for command in (["events", "list"], ["watchers", "add", "a", "b.C"], ["triggerer"]):
        called = call("--db", empty_database_url, *command)

        assert called.code == 1
        assert "headgate db upgrade" in called.err


def test_looking_at_a_database_that_does_not_exist_makes_none(call: Any, home: Path) -> None:
    called = call("events", "list")

    assert called.code == 1
    assert "headgate db upgrade" in called.err
    assert not home.exists()


# --- watchers ------------------------------------------------------------------------------------


def test_a_watcher_is_listed_until_it_is_removed(watched: Any) -> None:
    (row,) = watched("watchers", "list", "--json").rows()
    assert (row["name"], row["classpath"], row["queue"]) == ("orders", "my.triggers.Orders", "default")
    assert "orders" in watched("watchers", "list").out
    assert [row["name"] for row in watched("triggers", "list", "--json").rows()] == ["orders"]

    assert watched("watchers", "remove", "orders").code == 0

    assert watched("watchers", "list", "--json").rows() == []
    assert watched("triggers", "list", "--json").rows() == []


def test_a_watcher_is_paused_and_resumed_and_its_hold_is_listed(watched: Any) -> None:
    assert watched("watchers", "pause", "orders").code == 0
    assert [row["hold"] for row in watched("watchers", "list", "--json").rows()] == ["paused"]
    assert "paused" in watched("triggers", "list").out
    assert "a user has paused it" in watched("triggers", "show", "orders").out
    assert watched("why", "orders").out.startswith("a user has paused it")
    assert watched("watchers", "resume", "orders").out == "resumed watcher orders (it was held: paused)\n"
    assert watched("watchers", "resume", "orders").out == "watcher orders is not held\n"
    assert [row["hold"] for row in watched("watchers", "list", "--json").rows()] == [None]


def test_triggers_are_released_by_id_and_by_name(watched: Any) -> None:
    watched("watchers", "add", "--no-check", "bills", "my.triggers.Bills")
    watched("watchers", "pause", "orders")
    bills = max(row["id"] for row in watched("triggers", "list", "--json").rows())
    released = watched("triggers", "release", "orders", str(bills))
    assert released.out == f"released orders (it was held: paused)\n{bills} is not held\n"
    unknown = watched("triggers", "release", "nobody")
    assert (unknown.code, "nobody" in unknown.err) == (1, True)


def test_a_name_is_taken_or_unknown_and_the_error_says_so(watched: Any) -> None:
    taken = watched("watchers", "add", "--no-check", "orders", "a.B")
    unknown = watched("watchers", "remove", "nobody")

    assert (taken.code, unknown.code) == (1, 1)
    assert "orders" in taken.err
    assert "nobody" in unknown.err


def test_kwargs_may_hold_values_that_json_lacks(call_database: Any, database_url: str, home: Path) -> None:
    kwargs = '{"delta": {"$": "timedelta", "v": [0, 5, 0]}, "raw": {"$": "bytes", "v": "aGk="}, "n": 1}'

    assert call_database("watchers", "add", "--no-check", "a", "b.C", "--kwargs", kwargs, "--queue", "q").code == 0

    with Store(open_engine(database_url), secrets=Secrets.open(home, None, makes_file=True)) as store:
        epoch = store.register_triggerer(
            hostname="h", pid=1, machine="m", process_started=0.0, capacity=1, queues=("q",)
        )
        (claimed,) = store.claim_triggers(epoch, limit=1, queues=("q",))
    expected = {"delta": timedelta(seconds=5), "raw": b"hi", "n": 1}
    assert claimed.kwargs == encode_value(expected, where="kwargs")


def test_a_watcher_can_send_its_events_as_signals(call_database: Any, database_url: str, home: Path) -> None:
    add = ("watchers", "add", "--no-check", "w", "a.B")
    alone = call_database(*add, "--namespace", "models")
    assert (alone.code, "--namespace is that of --signal, which is not given" in alone.err) == (2, True)
    assert call_database(*add, "--signal", "").code == 1
    assert call_database(*add, "--signal", "model", "--namespace", "models").code == 0
    row = json.loads(call_database("watchers", "list", "--json").out)
    assert (row["signal"], row["signal_namespace"]) == ("model", "models")
    assert call_database("events", "put", "w", '{"auc": 0.9}').code == 0
    sent = json.loads(call_database("signals", "list", "model", "--namespace", "models", "--json").out)
    assert (sent["version"], sent["value"], sent["sender"]) == (1, {"auc": 0.9}, "watcher w")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["b.C", "--kwargs", '{"a":'], "--kwargs: Expecting value: line 1 column 6"),
        (["b.C", "--kwargs", "[1]"], "--kwargs: expected a JSON object"),
        (["b.C", "--kwargs", '{"$": "tuple", "v": []}'], "--kwargs: expected a JSON object"),
        (["b.C", "--kwargs", '{"a": {"$": "nope", "v": 1}}'], "--kwargs: "),
        (["b.C", "--kwargs", '{"not a name": 1}'], "--kwargs: 'not a name' cannot be the name of an argument"),
        (["Class"], "'Class' is not a classpath"),
        (["a..B"], "'a..B' is not a classpath"),
        (["a/b.py:C"], "is not a classpath"),
        (["a.class"], "is not a classpath"),
    ],
)
def test_what_cannot_be_a_watcher_is_refused_before_the_database_is_asked(
    call: Any, arguments: list[str], problem: str
) -> None:
    called = call("watchers", "add", "w", *arguments)

    assert called.code == 2
    assert called.err.startswith("headgate: ")
    assert problem in called.err


def test_a_class_of_a_user_is_not_imported_into_the_command_and_without_a_check_nowhere(
    call_database: Any, tmp_path: Path
) -> None:
    source = (
        "import pathlib\npathlib.Path('imported').touch()\nfrom headgate.brokers.filelog import FileLogTrigger as T"
    )
    (tmp_path / "users_module_of_a_test.py").write_text(source)
    added = ("watchers", "add", "w", "users_module_of_a_test.T", "--kwargs", '{"path": "log", "group": "g"}')

    assert call_database(*added, "--no-check").code == 0
    assert not (tmp_path / "imported").exists()
    call_database("watchers", "remove", "w")
    assert call_database(*added).code == 0
    assert (tmp_path / "imported").exists()
    assert "users_module_of_a_test" not in sys.modules


def test_watchers_that_would_read_one_source_in_different_ways_are_told_of(call_database: Any) -> None:
    def add(name: str, body: str, group: str = "g", **more: object) -> Any:
        kwargs = json.dumps({"connection": "red", "stream": "orders", "group": group, "body": body, **more})
        classpath = "headgate.brokers.redis_streams.RedisStreamTrigger"
        return call_database("watchers", "add", name, classpath, "--kwargs", kwargs)

    assert add("first", "json:order").code == 0
    assert "reads the same stream" not in add("same", "json:order").err
    assert "reads the same stream" not in add("apart", "fields", group="other").err
    told = add("second", "fields")
    assert told.code == 0
    for name in ("first", "same"):
        said = f"headgate: the watcher {name} reads the same stream, with body='json:order', not 'fields': the first"
        assert said in told.err
    assert "apart" not in told.err
    refused = add("third", "fields", create="no")
    assert (refused.code, "create must be a bool, not str" in refused.err) == (1, True)


# --- events and dead letters ---------------------------------------------------------------------


def test_an_event_is_listed_with_exactly_the_documented_fields(watched: Any, database_url: str, home: Path) -> None:
    store_events(database_url, home, [fired(0, {"id": 1, "at": MOMENT, "raw": b"hi"}, key="k:0")])

    (row,) = watched("events", "list", "--json").rows()

    assert list(row) == list(reading.EVENT_COLUMNS)
    assert row["payload"] == {"id": 1, "at": "2026-01-02T03:04:05+00:00", "raw": "hi"}
    assert datetime.fromisoformat(row["stored_at"]).tzinfo is not None
    (trigger,) = watched("triggers", "list", "--json").rows()
    del row["id"], row["stored_at"], row["payload"]
    assert row == {
        "watcher": "orders",
        "trigger_id": trigger["id"],
        "trigger_run_id": "1.1.1.1",
        "sequence_index": 0,
        "key": "k:0",
        "is_last": False,
        "redelivered": 0,
    }


def test_events_come_in_order_of_one_watcher_and_as_many_as_asked(watched: Any, database_url: str, home: Path) -> None:
    store_events(database_url, home, [fired(index, index) for index in range(250)])

    def payloads(*arguments: str) -> list[Any]:
        return [row["payload"] for row in watched("events", "list", "--json", *arguments).rows()]

    assert payloads() == list(range(250))
    assert payloads("--limit", "3", "--watcher", "orders") == [0, 1, 2]
    unknown = watched("events", "list", "--json", "--watcher", "nobody")
    assert (unknown.code, unknown.out) == (1, "")
    assert "nobody" in unknown.err


def test_a_table_says_when_it_does_not_show_everything(
    watched: Any, database_url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.cli.tables.ROWS_SHOWN_MAX", 2)
    monkeypatch.setattr("headgate.cli.commands.events.ROWS_SHOWN_MAX", 2)
    store_events(database_url, home, [fired(index, f"<{index}>") for index in range(3)])

    everything = watched("events", "list").out
    assert "<1>" in everything
    assert "<2>" not in everything
    assert "There are more than 2" in everything
    assert "There are more" not in watched("events", "list", "--limit", "2").out


def test_dead_letters_are_listed_with_their_reason(watched: Any, database_url: str, home: Path) -> None:
    store_events(database_url, home, [], [RefusedEvent(0, "1.1.1.1", 0, 1, "too long", 5_000_000, b'"head')])

    (row,) = watched("dlq", "list", "--json").rows()

    assert (row["reason"], row["payload_bytes"], row["payload_head"]) == ("too long", 5_000_000, '"head')
    assert "too long" in watched("dlq", "list").out


def test_triggerers_are_listed(watched: Any, database_url: str, home: Path) -> None:
    store_events(database_url, home, [])

    (row,) = watched("triggerers", "list", "--json").rows()

    assert (row["hostname"], row["pid"], row["queues"]) == ("h", 1, ["default"])
    assert (row["triggers"], row["capacity"], row["tasks"]) == (1, 1, 0)


def test_an_empty_list_prints_no_json(call_database: Any) -> None:
    for command in ("watchers", "triggers", "triggerers", "events", "dlq"):
        called = call_database(command, "list", "--json")

        assert (called.code, called.out, called.err) == (0, "", "")


# --- the triggerer -------------------------------------------------------------------------------


def test_the_triggerer_serves_with_the_settings_of_its_flags(
    call_database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.supervisor import serve

    served: list[Any] = []

    def serve_nothing(settings: Any, *, capture: Path | None = None) -> int:
        served.append((settings.capacity, settings.queues, capture))
        return 3

    monkeypatch.setattr(serve, "serve", serve_nothing)

    called = call_database("triggerer", "--capacity", "5", "--queues", "a,b", "--capture", "frames")

    assert called.code == 3
    assert served == [(5, ("a", "b"), tmp_path / "frames")]


# --- captures ------------------------------------------------------------------------------------


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A folder with one frame log that holds the first half of a handshake."""
    folder = tmp_path / "frames"
    writer = FrameLogWriter(folder)
    hello = Hello(PROTOCOL_VERSION, 1, 4242, "0.1.0")
    writer.record(Direction.FROM_RUNNER, 1, hello, encode_message(hello))
    writer.close()
    return folder


def test_frames_are_shown_from_a_file_and_from_a_folder(call: Any, capture: Path) -> None:
    (file,) = capture.iterdir()

    for path in (file, capture):
        called = call("frames", "show", str(path))
        assert called.code == 0
        assert "Hello" in called.out
        assert "4242" in called.out
    (row,) = call("frames", "show", "--json", str(capture)).rows()
    assert (row["file"], row["incarnation"]) == (str(file), 1)
    assert call("frames", "show", "--limit", "1", str(capture)).out.count("\n") == 1


def test_a_capture_cut_while_it_was_written_is_reported_and_is_no_error(call: Any, capture: Path) -> None:
    (file,) = capture.iterdir()
    file.write_bytes(file.read_bytes()[:-3])

    called = call("frames", "verify", str(capture))

    assert called.code == 0
    assert "torn" in called.out
    assert "torn" in call("frames", "show", str(capture)).out


def test_a_capture_with_a_flipped_byte_is_an_error(call: Any, capture: Path) -> None:
    (file,) = capture.iterdir()
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(bytes(data))

    called = call("frames", "verify", str(capture))

    assert called.code == 1
    assert "BAD" in called.out
    (row,) = call("frames", "verify", "--json", str(capture)).rows()
    assert row["ok"] is False


def test_a_whole_capture_verifies(call: Any, capture: Path) -> None:
    called = call("frames", "verify", str(capture))

    assert called.code == 0
    assert called.out.endswith("1 frames, incarnations 1: ok\n")


def test_what_is_no_frame_log_is_an_error_in_one_line(call: Any, tmp_path: Path) -> None:
    (tmp_path / "x.hgframe").write_text("hello")
    (tmp_path / "empty").mkdir()

    assert "not a frame log" in call("frames", "verify", str(tmp_path)).err
    nothing = call("frames", "show", str(tmp_path / "empty"))
    assert nothing.code == 1
    assert "there is no frame log" in nothing.err
