"""Events read by a cursor: in commit order, over removed triggers too, and no cursor of something else is taken."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.client.harness import Watched, payloads
from tests.store.harness import Query, add, register

from headgate.client import (
    BATCH_EVENTS_MAX,
    START,
    Client,
    Cursor,
    CursorRefused,
    DatabaseFault,
    NoSuchWatcher,
    SchemaOutOfDate,
    open_client,
)
from headgate.store.db.engine import open_engine
from headgate.store.errors import UnsupportedDatabase, ValueRefused


def test_events_are_read_in_parts_by_the_cursor_of_the_last_one(watched: Watched, client: Client) -> None:
    watched.store_events(*range(7))
    read, cursor = [], START
    while events := client.events("orders", after=cursor, limit=3):
        assert len(events) <= 3
        read += payloads(events)
        cursor = events[-1].cursor
    assert read == list(range(7))
    assert client.newest("orders") == cursor == Cursor.parse(str(cursor))
    watched.store_events("more")
    assert payloads(client.events("orders", after=cursor)) == ["more"]


def test_an_event_has_all_that_was_stored_and_cannot_be_changed(watched: Watched, client: Client) -> None:
    watched.store_events({"order": 1})
    (event,) = client.events("orders")
    assert (event.watcher, event.trigger_id, event.key, event.position) == ("orders", watched.trigger_id, "key 0", 0)
    assert (event.kind, event.payload, event.is_last) == ("event", {"order": 1}, False)
    assert event.stored_at.tzinfo is UTC
    assert event.cursor == Cursor(watched.trigger_id, event.id)
    with pytest.raises(AttributeError):
        event.key = "other"  # type: ignore[misc]
    assert msgspec.structs.replace(event, key=None).payload == {"order": 1}


def test_of_a_watcher_that_was_added_again_the_events_of_both_are_read(watched: Watched, client: Client) -> None:
    first = watched.trigger_id
    watched.store_events("a", "b")
    second = watched.add_again()
    watched.store_events("d", trigger_id=second)
    # The supervisor still runs the removed one, and may store more of its events: those of the new one wait.
    assert payloads(client.events("orders")) == ["a", "b"]
    watched.store_events("c", trigger_id=first)
    cursor = client.events("orders")[-1].cursor
    assert client.events("orders", after=cursor) == []
    watched.store.release_triggers(watched.epoch, [first])
    assert payloads(client.events("orders", after=cursor)) == ["d"]
    assert payloads(client.events("orders")) == ["a", "b", "c", "d"]
    assert payloads(client.events("orders", limit=3)) == ["a", "b", "c"]


@pytest.mark.parametrize("end", ["fenced", "stopped"])
def test_a_removed_trigger_is_left_when_the_lease_of_its_owner_is_over(
    watched: Watched, client: Client, end: str
) -> None:
    watched.store_events("a")
    watched.store.remove_watcher("orders")
    other = register(watched.store)
    if end == "fenced":
        watched.store.fence_triggerers(other, dead=[watched.epoch])
    else:
        watched.store.release_triggerer(watched.epoch)
    watched.epoch = other
    (watched.trigger_id,) = add(watched.store, "orders")
    watched.store_events("b")
    assert payloads(client.events("orders")) == ["a", "b"]


def test_a_watcher_that_was_removed_for_good_is_read_to_its_end(watched: Watched, client: Client) -> None:
    watched.store_events("a")
    watched.store.remove_watcher("orders")
    watched.store.release_triggers(watched.epoch, [watched.trigger_id])
    (event,) = client.events("orders")
    assert client.events("orders", after=event.cursor) == []


def test_a_watcher_that_nobody_has_added_is_unknown(client: Client) -> None:
    with pytest.raises(NoSuchWatcher, match="'ordres'"):
        client.events("ordres")
    with pytest.raises(NoSuchWatcher, match="'ordres'"):
        client.newest("ordres")


def test_a_cursor_that_is_not_of_these_events_is_refused(watched: Watched, client: Client) -> None:
    (other,) = add(watched.store, "others")
    watched.store_events("a", "b")
    newest = client.newest("orders")
    refused = {
        Cursor(watched.trigger_id, -1): "no id is negative",
        Cursor(-1, 0): "no id is negative",
        Cursor(0, 1): "it has an event, but no trigger",
        Cursor.parse(f"{2**63}:1"): "no id is that large",
        Cursor(watched.trigger_id, newest.event_id + 1): f"is {newest.event_id}, so it is beyond the end",
        Cursor(other, 0): "its trigger is that of the watcher 'others', not of 'orders'",
        Cursor(other + 1, 0): f"the newest trigger is {other}, so it is beyond the end; is it of another database",
    }
    for cursor, reason in refused.items():
        with pytest.raises(CursorRefused, match=reason):
            client.events("orders", after=cursor)
    with pytest.raises(CursorRefused, match="beyond the end"):
        client.events("others", after=Cursor(other, newest.event_id))


@pytest.mark.parametrize("after", ["11:5", None, 5])
def test_what_is_no_cursor_at_all_is_refused(client: Client, watched: Watched, after: Any) -> None:
    says = f"of type {type(after).__name__}; Cursor.parse makes one"
    with pytest.raises(CursorRefused, match=says):
        client.events("orders", after=after)
    with pytest.raises(CursorRefused, match=says):
        client.follow("orders", after=after)
    client.add_consumer("mine", "orders")
    with pytest.raises(CursorRefused, match=says):
        client.add_consumer("mine", "orders", after=after)


@pytest.mark.parametrize("text", ["", "3", ":", "3:", "3:x", "-1:2", "3:4:5", "٣:٤"])
def test_a_text_that_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(CursorRefused, match="TRIGGER_ID:EVENT_ID"):
        Cursor.parse(text)


def test_a_cursor_whose_trigger_was_cleaned_away_goes_on_with_the_next_one(
    watched: Watched, client: Client, query: Query
) -> None:
    first = watched.trigger_id
    watched.store_events("a")
    (event,) = client.events("orders")
    watched.add_again()
    watched.store_events("b")
    for table, column in (("trigger_event", "trigger_id"), ("asset_watcher", "trigger_id"), ("trigger", "id")):
        query(f"DELETE FROM {table} WHERE {column} = :id", id=first)
    assert payloads(client.events("orders", after=event.cursor)) == ["b"]


@pytest.mark.parametrize("limit", [0, -1, BATCH_EVENTS_MAX + 1])
def test_a_limit_out_of_range_is_refused(client: Client, limit: int) -> None:
    with pytest.raises(ValueRefused, match="limit must be from 1 to 1,000"):
        client.events("orders", limit=limit)


def test_a_database_that_is_not_there_or_has_no_tables_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseFault, match="there is no such file"), open_client(f"sqlite:///{tmp_path}/no.db"):
        pass
    assert not (tmp_path / "no.db").exists()
    with open_engine(f"sqlite:///{tmp_path}/empty.db").connect():
        pass
    with pytest.raises(SchemaOutOfDate, match="db upgrade"), open_client(f"sqlite:///{tmp_path}/empty.db"):
        pass
    with pytest.raises(UnsupportedDatabase), open_client("mysql://here/x"):
        pass
