"""Watchers and lists: what users add, remove and see; kwargs are never written in clear."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.store.harness import OpenStore, Query, register

from headgate.protocol.errors import ValueNotSerializable
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.values import decode_value
from headgate.store import errors
from headgate.store.errors import BadName, NoSuchWatcher, StoreError, WatcherExists
from headgate.store.ids import Epoch
from headgate.store.inspect import event_log
from headgate.store.store import Store
from headgate.store.triggers.watchers import CLASSPATH_CHARS_MAX, NAME_CHARS_MAX


def test_a_watcher_is_listed_with_its_trigger(open_store: OpenStore) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 678900, UTC)
    store = open_store(clock=lambda: now)
    second = store.add_watcher("b", "pkg.mod.Cls", {}, queue="fast", asset="orders")
    first = store.add_watcher("a", "pkg.mod.Cls", {})
    rows = store.inspect.watchers()
    assert [(row.name, row.trigger_id, row.asset, row.queue) for row in rows] == [
        ("a", first, None, "default"),
        ("b", second, "orders", "fast"),
    ]
    assert rows[0].classpath == "pkg.mod.Cls"
    assert rows[0].created_date == now
    assert [(row.id, row.name, row.created_date) for row in store.inspect.triggers()] == [
        (second, "b", now),
        (first, "a", now),
    ]


def test_watchers_share_an_asset_by_its_name(store: Store, query: Query) -> None:
    store.add_watcher("a", "a.B", {}, asset="orders")
    store.add_watcher("b", "a.B", {}, asset="orders")
    assert [row["name"] for row in query("SELECT name FROM asset")] == ["orders"]


def test_a_name_is_free_again_once_its_watcher_is_removed(store: Store) -> None:
    first = store.add_watcher("a", "a.B", {})
    with pytest.raises(WatcherExists, match="'a'"):
        store.add_watcher("a", "c.D", {}, asset="new")
    store.remove_watcher("a")
    assert store.inspect.watchers() == []
    assert store.inspect.triggers() == []
    second = store.add_watcher("a", "c.D", {})
    assert second > first
    store.remove_watcher("a")
    store.add_watcher("a", "c.D", {})


def test_a_watcher_that_was_refused_leaves_nothing_behind(store: Store, query: Query) -> None:
    store.add_watcher("a", "a.B", {})
    with pytest.raises(WatcherExists):
        store.add_watcher("a", "c.D", {}, asset="new")
    assert len(query('SELECT * FROM "trigger"')) == 1
    assert query("SELECT * FROM asset") == []


def test_removing_what_is_not_there_says_so(store: Store) -> None:
    store.add_watcher("a", "a.B", {})
    store.remove_watcher("a")
    for name in ("a", "b"):
        with pytest.raises(NoSuchWatcher, match=repr(name)):
            store.remove_watcher(name)


def test_a_removed_trigger_is_not_claimed(store: Store) -> None:
    epoch = register(store)
    store.add_watcher("a", "a.B", {})
    store.remove_watcher("a")
    assert not store.poll(epoch, ("default",)).claimable
    assert store.claim_triggers(epoch, limit=10, queues=("default",)) == []


BAD_NAMES = ["", " a", "a ", "a\nb", "a\0", "\x7f", "\ud800", "a\u2028b", "\x1b[31m", "x" * (NAME_CHARS_MAX + 1)]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_cannot_be_stored_or_shown_are_refused(store: Store, name: str) -> None:
    with pytest.raises(BadName, match="the name of a watcher"):
        store.add_watcher(name, "a.B", {})
    with pytest.raises(BadName, match="the name of an asset"):
        store.add_watcher("w", "a.B", {}, asset=name)
    with pytest.raises(BadName, match="the queue"):
        store.add_watcher("w", "a.B", {}, queue=name)
    assert store.inspect.watchers() == []


def test_other_bad_names_are_refused(store: Store) -> None:
    with pytest.raises(BadName, match="the classpath"):
        store.add_watcher("w", "", {})
    with pytest.raises(BadName, match="the classpath"):
        store.add_watcher("w", "a" * (CLASSPATH_CHARS_MAX + 1), {})
    with pytest.raises(BadName, match="the queue"):
        store.add_watcher("w", "a.B", {}, queue="a,b")


@pytest.mark.parametrize("name", ["x" * NAME_CHARS_MAX, "\U0001f9ff" * NAME_CHARS_MAX, "a b", "Ünïcode", "%s", "'; --"])
def test_all_other_names_are_fine(store: Store, name: str) -> None:
    store.add_watcher(name, "a.B", {}, queue=name, asset=name)
    assert [(row.name, row.queue, row.asset) for row in store.inspect.watchers()] == [(name, name, name)]
    store.remove_watcher(name)


def test_kwargs_without_a_form_on_the_wire_are_refused_naming_their_path(store: Store) -> None:
    with pytest.raises(ValueNotSerializable, match="callback"):
        store.add_watcher("w", "a.B", {"callback": print})
    assert store.inspect.watchers() == []


def test_kwargs_come_back_as_they_were_given(store: Store) -> None:
    kwargs: Mapping[str, Any] = {"at": datetime(2026, 1, 1, tzinfo=UTC), "raw": b"\0\xff", "deep": [{"x": None}]}
    store.add_watcher("w", "a.B", kwargs)
    (claimed,) = store.claim_triggers(register(store), limit=1, queues=("default",))
    assert claimed.kwargs is not None
    assert decode_value(claimed.kwargs) == kwargs


def test_kwargs_are_nowhere_in_the_database_in_clear(store: Store, query: Query, database_url: str) -> None:
    store.add_watcher("w", "a.B", {"password": "hunter2"})
    store.claim_triggers(register(store), limit=1, queues=("default",))
    (row,) = query('SELECT * FROM "trigger"')
    assert "hunter2" not in repr(row)
    assert row["kwargs"].startswith("gAAAA")
    if database_url.startswith("sqlite"):
        folder = Path(database_url.removeprefix("sqlite:///")).parent
        contents = [path.read_bytes() for path in folder.iterdir()]
        assert any(b"gAAAA" in content for content in contents)
        assert not any(b"hunter2" in content for content in contents)


# --- lists of events -----------------------------------------------------------------------------


def fire(store: Store, epoch: Epoch, trigger_id: int, count: int, *, run: str = "run") -> None:
    store.store_slice(epoch, events=[FiredEvent(trigger_id, run, i, 0, b"%d" % i) for i in range(count)])


def test_events_are_listed_in_the_order_they_were_fired(open_store: OpenStore) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 0, UTC)
    store = open_store(clock=lambda: now)
    epoch, trigger_id = register(store), store.add_watcher("w", "a.B", {})
    events = [
        FiredEvent(trigger_id, "run", 0, 7, b"\0\xff", key="k", position=2, kind="success"),
        FiredEvent(trigger_id, "run", 1, 8, b"", is_last=True),
    ]
    store.store_slice(epoch, events=events)
    first, second = store.inspect.events()
    assert (first.watcher, first.trigger_id, first.trigger_run_id, first.sequence_index) == ("w", trigger_id, "run", 0)
    assert (first.key, first.position, first.kind, first.payload) == ("k", 2, "success", b"\0\xff")
    assert (first.is_last, first.stored_at, first.redelivered) == (False, now, 0)
    assert (second.key, second.position, second.kind, second.payload, second.is_last) == (None, 0, "event", b"", True)
    assert second.id > first.id


def test_a_list_of_events_goes_on_where_it_was_told_and_ends_at_its_limit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "EVENTS_PER_BATCH_MAX", 3)
    epoch, trigger_id = register(store), store.add_watcher("w", "a.B", {})
    for count, run in ((6, "a"), (5, "b")):  # at a batch's end, and within one
        fire(store, epoch, trigger_id, count, run=run)
    ids = [row.id for row in store.inspect.events()]
    assert len(ids) == 11
    assert ids == sorted(set(ids))
    for limit in (0, 1, 3, 4, 6, 11, 12):
        assert [row.id for row in store.inspect.events(limit=limit)] == ids[:limit]
    assert [row.id for row in store.inspect.events(after_id=ids[4], limit=3)] == ids[5:8]
    assert list(store.inspect.events(after_id=ids[-1])) == []


def test_a_list_of_events_is_read_as_it_is_needed_and_holds_no_transaction(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "EVENTS_PER_BATCH_MAX", 2)
    store, other = open_store(), open_store()
    epoch, trigger_id = register(store), store.add_watcher("w", "a.B", {})
    fire(store, epoch, trigger_id, 3)
    rows = store.inspect.events()
    assert next(rows).payload == b"0"
    fire(other, epoch, trigger_id, 2, run="later")
    store.heartbeat(epoch)
    assert [row.payload for row in rows] == [b"1", b"2", b"0", b"1"]


def test_events_are_listed_by_watcher_removed_ones_included(store: Store) -> None:
    epoch = register(store)
    one, two = store.add_watcher("one", "a.B", {}), store.add_watcher("two", "a.B", {})
    fire(store, epoch, one, 1, run="r1")
    fire(store, epoch, two, 2, run="r2")
    store.remove_watcher("one")
    again = store.add_watcher("one", "a.B", {})
    fire(store, epoch, again, 1, run="r3")
    assert [row.trigger_id for row in store.inspect.events(watcher="one")] == [one, again]
    assert [row.trigger_id for row in store.inspect.events(watcher="two", limit=1)] == [two]
    with pytest.raises(NoSuchWatcher):
        store.inspect.events(watcher="three")


def test_every_error_of_the_store_has_one_base() -> None:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in found if kind.__module__ == errors.__name__]
    assert len(kinds) > 10
    assert all(issubclass(kind, StoreError) for kind in kinds)
