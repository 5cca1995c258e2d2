"""The commands for variables, connections and pools, called as a user calls them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from cryptography.fernet import Fernet
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks


def test_variables_are_set_read_listed_and_deleted(
    call_database: Any, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call_database("variables", "set", "city", "Köln", "--description", "where").out == "set variable city\n"
    assert call_database("variables", "get", "city").out == "Köln\n"
    (row,) = call_database("variables", "list", "--json").rows()
    assert (row["name"], row["description"]) == ("city", "where")
    assert "Köln" not in call_database("variables", "list").out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    assert call_database("variables", "set", "city", "-").code == 0
    assert json.loads(call_database("variables", "get", "city", "--json").out)["value"] == "two\nlines"
    unknown = call_database("variables", "get", "citi")
    assert (unknown.code, "did you mean city?" in unknown.err) == (1, True)
    assert call_database("variables", "delete", "city").out == "deleted variable city\n"
    assert call_database("variables", "delete", "city").code == 1


def test_a_value_that_is_too_long_or_no_text_is_refused(call_database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for data, problem in ((b"x" * 100_000, "the limit is 65,536"), (b"\xff", "not text in UTF-8")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        called = call_database("variables", "set", "v", "-")
        assert called.code != 0
        assert problem in called.err
    for kind, value in (("variables", "v\udcff"), ("connections", "redis://h/\udcff")):  # as a shell's bytes come in
        called = call_database(kind, "set", "v", value)
        assert (called.code, called.err) == (2, "headgate: the value is not text in UTF-8\n")
    assert call_database("variables", "list", "--json").rows() == []


def test_a_closed_standard_input_is_said_and_nothing_is_stored(
    call_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    called = call_database("variables", "set", "v", "-")
    assert (called.code, "standard input is closed" in called.err) == (2, True)
    assert call_database("variables", "get", "v").code == 1


def test_a_home_without_a_name_is_not_the_current_folder(call: Any) -> None:
    called = call("--home", "", "variables", "list")
    assert (called.code, "home: expected" in called.err) == (2, True)


def test_a_connection_shows_its_password_only_when_asked_to(call_database: Any) -> None:
    uri = "postgresql://me:s3cret@db:5432/shop?token=hidden"

    assert call_database("connections", "set", "shop", uri).code == 0

    assert call_database("connections", "get", "shop").out == "postgresql://me:***@db:5432/shop?token=***\n"
    assert call_database("connections", "get", "shop", "--reveal").out == f"{uri}\n"
    assert "s3cret" not in call_database("connections", "list").out
    bad = call_database("connections", "set", "shop", "me:s3cret@db:x")
    assert call_database("connections", "set", "bad", "//me:s3cret@db").code == 2
    assert "s3cret" not in bad.err
    assert call_database("connections", "delete", "shop").code == 0


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("localhost:6379", "it must begin with a scheme and ://"),
        ("redis://reader:p@s3cret/w#rd@localhost:6379/0", "a '#' in a password must be written %23"),
        (
            "redis://reader:p@s3cret/w@localhost:6379/0",
            "a '/' or '@' in a password, or in a path, must be percent-encoded",
        ),
        ("redis://host:s3cret", "its host and port cannot be read"),
    ],
)
def test_a_connection_that_cannot_be_read_is_not_stored(call_database: Any, uri: str, problem: str) -> None:
    refused = call_database("connections", "set", "shop", uri)
    assert refused.code == 2
    assert refused.err.startswith("headgate: the connection shop cannot be read: ")
    assert problem in refused.err
    assert "s3cret" not in refused.err
    assert call_database("connections", "list", "--json").rows() == []


@pytest.mark.parametrize(("name", "whose"), [("default_pool", "every task that names no pool"), ("gpu", "its tasks")])
def test_a_pool_without_slots_is_warned_of(call_database: Any, etl: Tasks, name: str, whose: str) -> None:
    called = call_database("pools", "set", name, "0")
    assert (called.code, called.out) == (0, f"the pool {name} has 0 slots\n")
    assert called.err == f"with 0 slots none of its tasks starts: this stops {whose}\n"


def test_pools_are_made_changed_and_listed(call_database: Any, etl: Tasks) -> None:
    assert call_database("pools", "set", "gpu", "2").out == "the pool gpu has 2 slots\n"
    assert call_database("pools", "set", "gpu", "3").code == 0
    rows = call_database("pools", "list", "--json").rows()
    assert [(row["name"], row["slots"]) for row in rows] == [("default_pool", 128), ("gpu", 3)]
    assert call_database("pools", "set", "gpu", "-1").code != 0


def test_a_pool_is_deleted_unless_tasks_are_in_it(call_database: Any, etl: Tasks) -> None:
    call_database("pools", "set", "gpu", "2")

    assert call_database("pools", "delete", "gpu").out == "deleted pool gpu\n"
    assert "there is no pool named 'gpu'" in call_database("pools", "delete", "gpu").err
    assert "tasks that name no pool are in it" in call_database("pools", "delete", "default_pool").err
    etl.query("UPDATE task_instance SET pool = 'gpu' WHERE task_id = 'a'")
    assert "there is no pool named 'gpu'" in call_database("pools", "delete", "gpu").err, "though a task names it"
    call_database("pools", "set", "gpu", "2")
    assert "1 unfinished task is in it" in call_database("pools", "delete", "gpu").err


def test_no_slots_in_the_default_pool_is_warned_of(call_database: Any) -> None:
    called = call_database("pools", "set", "default_pool", "0")

    assert called.code == 0
    assert "this stops every task that names no pool" in called.err


def test_a_value_of_another_key_names_the_value_and_the_setting(call_database: Any, query: Query) -> None:
    call_database("variables", "set", "city", "x")
    query("UPDATE variable SET value = :value", value=Fernet(Fernet.generate_key()).encrypt(b"x").decode())

    called = call_database("variables", "get", "city")

    assert called.code == 1
    assert "the variable 'city' was encrypted with a key that is not among the keys used here" in called.err
    assert "fernet_keys" in called.err


@pytest.mark.parametrize("group", ["variables", "connections"])
@pytest.mark.parametrize(
    "value",
    [["-----BEGIN PRIVATE KEY-----\nMIIhunter2"], ["-hunter2"], ["my", "hunter2"], ["--hunter2=x"]],
)
def test_a_malformed_call_with_a_secret_is_an_error_that_does_not_show_it(
    call: Any, group: str, value: list[str]
) -> None:
    called = call(group, "set", "pem", *value)

    assert (called.code, called.out) == (2, "")
    assert "hunter2" not in called.err
    assert "BEGIN" not in called.err
    assert "write `--` before the name if the value begins with `-`" in called.err


def test_an_error_of_a_command_with_a_secret_still_says_what_is_missing(call: Any) -> None:
    assert "Missing argument 'VALUE'" in call("variables", "set", "pem").err


def test_a_global_option_after_a_command_is_refused_without_its_value(call: Any) -> None:
    called = call("events", "--db", "postgresql://u:hunter2@h/d", "list")

    assert called.err == "headgate: --db goes before the command: headgate --db URL events list ...\n"
