"""``headgate watchers set`` and ``restart``, called as a user calls them."""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from headgate.brokers.broker_trigger import BrokerTrigger
from headgate.cli.sources import SOURCES


@pytest.fixture
def watched(call_database: Any) -> Any:
    """The command line, with one watcher added."""
    added = call_database("watchers", "add", "--no-check", "orders", "my.triggers.Orders", "--kwargs", '{"path": "/x"}')
    assert (added.code, added.err) == (0, "")
    return call_database


def row_of(call: Any) -> Any:
    (row,) = call("watchers", "list", "--json").rows()
    return row


def test_a_watcher_is_changed_and_keeps_what_is_not_given(watched: Any) -> None:
    before = row_of(watched)
    called = watched(
        "watchers", "set", "--no-check", "orders", "--classpath", "my.other.Orders", "--max-deliveries", "9"
    )
    assert (called.code, called.err) == (0, "")
    assert "changed watcher orders" in called.out
    after = row_of(watched)
    assert (after["classpath"], after["max_deliveries"]) == ("my.other.Orders", 9)
    assert (after["trigger_id"], after["queue"]) == (before["trigger_id"], "default")
    assert watched("watchers", "set", "--no-check", "orders", "--queue", "fast", "--kwargs", '{"path": "/y"}').code == 0
    assert row_of(watched)["queue"] == "fast"
    source = "redis://shop/orders?group=accounting&in_flight_max=7"
    assert watched("watchers", "set", "--no-check", "orders", "--from", source).code == 0
    assert row_of(watched)["classpath"] == "headgate.brokers.redis_streams.RedisStreamTrigger"
    shown = watched("triggers", "show", "orders", "--kwargs", "--json").rows()[0]["kwargs"]
    assert shown == {"connection": "shop", "stream": "orders", "group": "accounting", "in_flight_max": 7}


def test_a_connection_that_is_not_there_is_told(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ("--no-check", "--from", "redis://Shop/orders?group=accounting")
    missing = "no connection 'Shop' is stored: until `headgate connections set Shop`, or HEADGATE_CONN_SHOP in the"
    added = watched("watchers", "add", "one", *source)
    assert added.code == 0
    assert missing in added.err
    assert missing in watched("watchers", "set", "one", *source).err
    assert watched("watchers", "set", "one", "--no-check", "--kwargs", '{"connection": "Shop"}').err.startswith(
        "no con"
    )
    assert watched("watchers", "set", "orders", "--no-check", "--kwargs", '{"connection": "Shop"}').err == "", "its own"
    monkeypatch.setenv("HEADGATE_CONN_SHOP", "redis://127.0.0.1")
    assert watched("watchers", "set", "one", *source).err == ""
    monkeypatch.delenv("HEADGATE_CONN_SHOP")
    assert watched("connections", "set", "Shop", "redis://127.0.0.1").code == 0
    assert watched("watchers", "set", "one", *source).err == ""


def test_a_restart_says_what_it_does(watched: Any) -> None:
    called = watched("watchers", "restart", "orders")
    assert (called.code, called.out) == (0, "watcher orders is started again\n")
    watched("watchers", "pause", "orders")
    called = watched("watchers", "restart", "orders")
    assert called.code == 1
    assert "is held (paused): `headgate watchers resume orders`" in called.err
    changed = watched("watchers", "set", "--no-check", "orders", "--kwargs", "{}")
    assert "which is held (paused); `headgate watchers resume orders` starts it" in changed.out


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["set", "orders"], 2, "nothing to change"),
        (["set", "orders", "--kwargs", "[1]"], 2, "--kwargs"),
        (["set", "orders", "--classpath", "nodots"], 2, "is not a classpath"),
        (["set", "orders", "--queue", "a,b"], 1, "must not contain ','"),
        (["set", "orders", "--max-deliveries", "-1"], 1, "max_deliveries must be from 1 to 1,000, or 0"),
        (
            ["set", "orders", "--from", "redis://shop/orders?group=g", "--kwargs", "{}"],
            2,
            "--from names class and kwargs",
        ),
        (["set", "orders", "--from", "amqp://shop/orders"], 2, "did you mean rabbitmq://?"),
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
    called = watched("watchers", "add", "--no-check", "orders", "my.triggers.Orders")
    assert called.code == 1
    assert "`headgate watchers set orders` changes it" in called.err


# --- the check of the class ----------------------------------------------------------------------

SOURCE = """
from headgate.brokers.filelog import FileLogTrigger


class Orders(FileLogTrigger):
    def __init__(self, path, group, least=0):
        if least < 0:
            raise ValueError("least is negative")
        super().__init__(path, group)
"""
GOOD = '{"path": "log", "group": "g"}'


@pytest.fixture
def shop(call_database: Any, tmp_path: Path) -> Any:
    """The command line in a folder with a module of triggers, and with modules that cannot be imported."""
    (tmp_path / "shop.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import os\nimport no_such_library\n")
    (tmp_path / "dies.py").write_text("import os\nprint('good bye', flush=True)\nos._exit(3)\n")
    return call_database


def test_a_class_that_loads_and_takes_its_kwargs_is_added_and_changed(shop: Any) -> None:
    assert shop("watchers", "add", "orders", "shop.Orders", "--kwargs", GOOD).code == 0
    assert shop("watchers", "set", "orders", "--kwargs", '{"path": "log", "group": "g", "least": 5}').code == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("classpath", "kwargs", "problems"),
    [
        ("shop.Order", GOOD, ["did you mean shop.Orders?"]),
        ("shp.Orders", GOOD, ["there is no module 'shp'", "did you mean shop.Orders?"]),
        ("broken.Orders", GOOD, ["ModuleNotFoundError: No module named 'no_such_library'", "broken.py, line 2"]),
        ("dies.Orders", GOOD, ["exited with code 3; its last output was: good bye"]),
        ("shop.GOOD", GOOD, ["shop has no GOOD"]),
        ("shop.Orders", '{"path": "log", "groups": "g"}', ["has no argument 'groups'; did you mean 'group'?"]),
        ("shop.Orders", '{"path": "log"}', ["needs the argument 'group' (it takes path, group, least)"]),
        (
            "shop.Orders",
            '{"path": "log", "group": "g", "least": -1}',
            ["ValueError: least is negative", "shop.py, line 8"],
        ),
    ],
)
def test_a_class_that_cannot_be_started_is_refused_with_the_reason(
    shop: Any, classpath: str, kwargs: str, problems: list[str]
) -> None:
    called = shop("watchers", "add", "orders", classpath, "--kwargs", kwargs)
    assert called.code == 1
    for problem in problems:
        assert problem in " ".join(called.err.split())
    assert "--no-check" in called.err
    assert shop("watchers", "list", "--json").rows() == []


def test_a_change_that_could_not_be_started_changes_nothing(shop: Any) -> None:
    shop("watchers", "add", "orders", "shop.Orders", "--kwargs", GOOD)
    for given in (("--classpath", "shop.Order"), ("--kwargs", "{}")):
        called = shop("watchers", "set", "orders", *given)
        assert (called.code, "Nothing was changed" in called.err) == (1, True)
    assert row_of(shop)["classpath"] == "shop.Orders"
    assert shop("watchers", "set", "orders", "--kwargs", "{}", "--no-check").code == 0


# --- add --from -----------------------------------------------------------------------------------


def test_a_source_is_added_without_python_and_tried_as_any_other(call_database: Any) -> None:
    for connection in ("the shop", "shop"):
        assert call_database("connections", "set", connection, "redis://127.0.0.1").code == 0
    source = "redis://the%20shop/orders/eu?group=accounting&create=true&claim_idle_s=60&in_flight_max=10&body=json%3Ax"
    added = call_database("watchers", "add", "orders", "--from", source)
    assert (added.code, added.err) == (0, "")
    assert row_of(call_database)["classpath"] == "headgate.brokers.redis_streams.RedisStreamTrigger"
    fifo = call_database("watchers", "add", "eu", "--from", "sqs://shop/orders.fifo?visibility_s=30&accept_drop=true")
    assert (fifo.code, fifo.err) == (0, "")
    kafka = call_database("watchers", "add", "k", "--from", "kafka://shop/orders?group=g&on_offset_lost=earliest")
    assert (kafka.code, kafka.err) == (0, "")
    wrong = call_database("watchers", "add", "others", "--from", "redis://shop/orders?group=g&lane=none")
    assert wrong.code == 1
    assert 'lane must be "stream", "message" or "field:FIELD", not \'none\'' in wrong.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["redis://shop/orders?group=g", "my.Trigger"], "give either it or these"),
        (["redis://shop/orders?group=g", "--kwargs", "{}"], "give either it or these"),
        (["redis://shop/orders"], "it needs the argument 'group'"),
        (["redis://shop/?group=g"], "it must be SCHEME://CONNECTION/NAME"),
        (["redis:///orders?group=g"], "it must be SCHEME://CONNECTION/NAME"),
        (
            ["pulsar://shop/orders?group=g"],
            "there is no source pulsar://; there are redis://, nats://, kafka://, postgres://",
        ),
        (["redis://me:hunter22@host/orders?group=g"], "it names a stored connection, not an address"),
        (["redis://shop/orders?group=g&lanes=x"], "the unknown argument 'lanes'; did you mean 'lane'?"),
        (["redis://shop/orders?group=g&group=h"], "it has 'group' twice"),
        (["redis://shop/orders?group=g&stream=h"], "it has 'stream' twice"),
        (["redis://shop/orders?group=g&create=yes"], "the value of 'create' cannot be used: it must be true or false"),
        (["redis://shop/orders?group=g&in_flight_max=x"], "the value of 'in_flight_max' cannot be used"),
    ],
)
def test_what_is_no_source_is_refused_by_what_is_wrong(call_database: Any, arguments: list[str], error: str) -> None:
    called = call_database("watchers", "add", "orders", "--from", *arguments)
    assert called.code == 2
    assert error in called.err
    assert "hunter22" not in called.err + called.out


def test_without_class_and_source_there_is_nothing_to_add(call_database: Any) -> None:
    called = call_database("watchers", "add", "orders")
    assert (called.code, "give the class of the trigger, or --from" in called.err) == (2, True)


@pytest.mark.parametrize(("scheme", "source"), SOURCES.items(), ids=list(SOURCES))
def test_a_source_has_every_argument_of_its_trigger(scheme: str, source: Any) -> None:
    cls = pkgutil.resolve_name(source.classpath)
    assert issubclass(cls, BrokerTrigger)
    assert cls.scheme == scheme
    assert {"connection", source.path, *source.arguments} == set(inspect.signature(cls).parameters)
