"""``headgate watchers set`` and ``restart``, called as a user calls them."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def watched(call_database: Any) -> Any:
    """The command line, with one watcher added."""
    added = call_database("watchers", "add", "orders", "my.triggers.Orders", "--kwargs", '{"path": "/x"}')
    assert (added.code, added.err) == (0, "")
    return call_database


def row_of(call: Any) -> Any:
    (row,) = call("watchers", "list", "--json").rows()
    return row


def test_a_watcher_is_changed_and_keeps_what_is_not_given(watched: Any) -> None:
    before = row_of(watched)
    called = watched("watchers", "set", "orders", "--classpath", "my.other.Orders", "--max-deliveries", "9")
    assert (called.code, called.err) == (0, "")
    assert "changed watcher orders" in called.out
    after = row_of(watched)
    assert (after["classpath"], after["max_deliveries"]) == ("my.other.Orders", 9)
    assert (after["trigger_id"], after["queue"]) == (before["trigger_id"], "default")
    assert watched("watchers", "set", "orders", "--queue", "fast", "--kwargs", '{"path": "/y"}').code == 0
    assert row_of(watched)["queue"] == "fast"


def test_a_restart_says_what_it_does(watched: Any) -> None:
    called = watched("watchers", "restart", "orders")
    assert (called.code, called.out) == (0, "watcher orders is started again\n")
    watched("watchers", "pause", "orders")
    called = watched("watchers", "restart", "orders")
    assert called.code == 1
    assert "is held (paused): `headgate watchers resume orders`" in called.err
    changed = watched("watchers", "set", "orders", "--kwargs", "{}")
    assert "which is held (paused); `headgate watchers resume orders` starts it" in changed.out


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["set", "orders"], 2, "nothing to change"),
        (["set", "orders", "--kwargs", "[1]"], 2, "--kwargs"),
        (["set", "orders", "--classpath", "nodots"], 2, "is not a classpath"),
        (["set", "orders", "--queue", "a,b"], 1, "must not contain ','"),
        (["set", "orders", "--max-deliveries", "-1"], 1, "max_deliveries must be from 1 to 1,000, or 0"),
        (["set", "nobody", "--kwargs", "{}"], 1, "there is no watcher named 'nobody'"),
        (["restart", "nobody"], 1, "there is no watcher named 'nobody'"),
    ],
)
def test_what_is_wrong_is_named(watched: Any, arguments: list[str], code: int, error: str) -> None:
    called = watched("watchers", *arguments)
    assert called.code == code
    assert error in called.err
    assert row_of(watched)["max_deliveries"] == 5


def test_a_name_that_is_taken_leads_to_set(watched: Any) -> None:
    called = watched("watchers", "add", "orders", "my.triggers.Orders")
    assert called.code == 1
    assert "`headgate watchers set orders` changes it" in called.err
