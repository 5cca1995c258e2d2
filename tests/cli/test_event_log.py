"""Events in the order they were stored, by hand, and the consumers that read them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.harness import Watched, payloads
from tests.store.harness import Query

from headgate.cli.commands import event_log
from headgate.client import Client
from headgate.store.store import Store


@pytest.fixture
def watched(users_store: Store) -> Watched:
    return Watched(users_store)


def shown(called: Any) -> list[Any]:
    assert called.code == 0, called.err
    return [row["payload"] for row in called.rows()]


def test_the_newest_events_and_those_after_an_id_or_a_moment_are_listed(
    watched: Watched, call_database: Any, query: Query
) -> None:
    watched.store_events(*range(10))
    ids = [event.id for event in watched.store.inspect.events()]
    listed = ("events", "list", "--json")
    assert shown(call_database(*listed, "--newest", "3")) == [7, 8, 9]
    assert shown(call_database(*listed, "--newest", "3", "--watcher", "orders")) == [7, 8, 9]
    assert shown(call_database(*listed, "--after", str(ids[7]))) == [8, 9]
    assert shown(call_database(*listed, "--since", "1h")) == list(range(10))
    query("UPDATE trigger_event SET stored_at = '2026-01-01 00:00:00.000000' WHERE id <= :id", id=ids[4])
    assert shown(call_database(*listed, "--since", "1h")) == [5, 6, 7, 8, 9]
    assert shown(call_database(*listed, "--since", "1h", "--after", str(ids[7]), "--limit", "1")) == [8]
    assert shown(call_database(*listed, "--since", "2099-01-01")) == []


def test_options_that_do_not_go_together_are_refused(watched: Watched, call_database: Any) -> None:
    called = call_database("events", "list", "--newest", "3", "--after", "1")
    assert (called.code, "--newest goes with none of" in called.err) == (2, True)
    assert "there is no watcher named 'no'" in call_database("events", "list", "--newest", "3", "--watcher", "no").err
    assert call_database("events", "list", "--since", "yesterday").code == 2


def test_the_tail_of_a_watcher_goes_on_after_its_last_cursor(watched: Watched, call_database: Any) -> None:
    watched.store_events(*range(event_log.TAIL_EVENTS + 5))
    rows = call_database("events", "tail", "orders", "--json").rows()
    assert [row["payload"] for row in rows] == list(range(5, event_log.TAIL_EVENTS + 5))
    assert call_database("events", "tail", "orders", "--after", rows[-1]["cursor"]).out == ""
    watched.store_events({"a": 1})
    (line,) = call_database("events", "tail", "orders", "--after", rows[-1]["cursor"]).out.splitlines()
    assert line.endswith('{"a":1}')


def test_a_tail_that_follows_prints_what_comes_until_it_is_interrupted(
    watched: Watched, call_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.store_events("old")
    real = Client.follow

    def follow(client: Client, watcher: str, *, after: Any, idle_s: float | None) -> Any:
        assert idle_s is None, "for ever"
        for count, event in enumerate(real(client, watcher, after=after, idle_s=60.0)):
            yield event
            if count == 2:
                raise KeyboardInterrupt
            watched.store_events(f"new {count}")

    monkeypatch.setattr(Client, "follow", follow)
    called = call_database("events", "tail", "orders", "--follow", "--json")
    assert (called.code, [row["payload"] for row in called.rows()]) == (130, ["old", "new 0", "new 1"])


def test_a_tail_that_follows_ends_when_nothing_has_come_in_time(
    watched: Watched, call_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.store_events("old")
    tail = ("events", "tail", "orders", "--follow", "--json", "--timeout", "0")
    called = call_database(*tail)
    assert (called.code, [row["payload"] for row in called.rows()]) == (1, ["old"])
    assert "no event of orders came within 0 s" in called.err
    # What is asked for by a cursor counts.
    assert shown(call_database(*tail, "--after", f"{called.rows()[0]['cursor'].split(':')[0]}:0")) == ["old"]
    real = Client.follow

    def follow(client: Client, watcher: str, **given: Any) -> Any:
        watched.store_events("new")
        return real(client, watcher, **given)

    monkeypatch.setattr(Client, "follow", follow)
    assert shown(call_database(*tail)) == ["old", "new"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("tail", "orders", "--timeout", "5"), "--timeout goes with --follow"),
        (("tail", "ordres"), "there is no watcher named 'ordres'"),
        (("tail", "orders", "--after", "7"), "TRIGGER_ID:EVENT_ID"),
        (("tail", "orders", "--after", "1000000:1"), "beyond the end"),
        (("put", "ordres", "1"), "there is no watcher named 'ordres'"),
        (("put", "orders", "{"), "JSON: "),
        (("put", "orders", "1", "--key", ""), "the key of an event has from 1 to"),
        (("put", "orders", "1", "--key", "k" * 513), "this one has 513"),
    ],
)
def test_what_cannot_be_done_is_told(watched: Watched, call_database: Any, arguments: Any, problem: str) -> None:
    called = call_database("events", *arguments)
    assert called.code != 0
    assert problem in called.err


def test_an_event_put_by_hand_is_read_like_any_other(watched: Watched, call_database: Any) -> None:
    watched.store_events("fired")
    called = call_database("events", "put", "orders", '{"order": 9}', "--key", "order-9")
    assert (called.code, called.err) == (0, "")
    fired, put = watched.store.inspect.events()
    assert called.out == f"stored event {put.id} of orders\n"
    assert (put.id > fired.id, put.key, put.watcher, put.kind) == (True, "order-9", "orders", "event")
    assert payloads(Client(watched.store.database).events("orders")) == ["fired", {"order": 9}]
    again = call_database("events", "put", "orders", "1", "--key", "order-9")
    assert (again.code, f"has an event with the key 'order-9' already: event {put.id}" in again.err) == (1, True)
    assert len(list(watched.store.inspect.events())) == 2
    assert list(watched.store.inspect.dead_letters()) == []


def test_consumers_are_listed_with_what_they_have_yet_to_get_and_removed(watched: Watched, call_database: Any) -> None:
    assert call_database("consumers", "list").out == "none\n"
    watched.store_events("a", "b", "c")
    consumer = Client(watched.store.database).add_consumer("billing", "orders")
    with consumer.batch(1):
        pass
    (row,) = call_database("consumers", "list", "--json").rows()
    assert (row["name"], row["watcher"], row["handed_over"], row["behind"]) == ("billing", "orders", 1, 2)
    assert f"{watched.trigger_id}:" in call_database("consumers", "list").out
    assert "removed consumer billing" in call_database("consumers", "remove", "billing").out
    gone = call_database("consumers", "remove", "billing")
    assert (gone.code, "there is no consumer named 'billing'" in gone.err) == (1, True)


def test_a_clean_tells_for_which_consumers_it_keeps_older_events(
    watched: Watched, call_database: Any, query: Query
) -> None:
    watched.store_events("a", "b")
    consumer = Client(watched.store.database).add_consumer("billing", "orders")
    query("UPDATE trigger_event SET stored_at = :then", then="2026-01-01 00:00:00.000000")
    clean = ("db", "clean", "--older-than", "30d", "--keyed-events", "--json")
    called = call_database(*clean)
    assert (called.code, called.rows()) == (0, [])
    assert "older events are kept for consumers that have yet to get them: billing (" in called.err
    with consumer.batch(10) as batch:
        assert len(list(batch)) == 2
    assert call_database(*clean).err == ""


def test_events_that_a_consumer_sets_aside_are_listed_handed_over_again_or_discarded(
    watched: Watched, call_database: Any
) -> None:
    watched.store_events("a", "b")
    consumer = Client(watched.store.database).add_consumer("billing", "orders")
    assert "changed consumer billing" in call_database("consumers", "set", "billing", "--max-deliveries", "1").out

    def refuse() -> None:
        with consumer.batch(1):
            raise ValueError("no such customer")

    for _ in range(2):
        with pytest.raises(ValueError, match="customer"):
            refuse()
    first, second = call_database("consumers", "letters", "billing", "--json").rows()
    assert (first["error"], first["deliveries"], first["state"]) == ("ValueError: no such customer", 1, "open")
    assert "no such customer" in call_database("consumers", "letters", "billing").out
    assert "in refuse" in call_database("consumers", "letters", "billing", "--traceback").out
    assert (call_database("consumers", "list", "--json").rows()[0])["set_aside"] == 2
    assert call_database("consumers", "redeliver", "billing").code == 2
    again = call_database("consumers", "redeliver", "billing", str(first["event_id"]))
    assert again.out == "billing gets 1 event again, before those that it has not got yet\n"
    assert call_database("consumers", "discard", "billing", str(second["event_id"])).out == (
        "discarded 1 event of billing\n"
    )
    with consumer.batch() as batch:
        assert payloads(batch) == ["a"]
    assert call_database("consumers", "letters", "billing").out == "none\n"
    assert len(call_database("consumers", "letters", "billing", "--all", "--json").rows()) == 2
    gone = call_database("consumers", "discard", "billing", str(first["event_id"]))
    assert (gone.code, "it was handed over before" in gone.err) == (1, True)
