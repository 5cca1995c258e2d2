"""Holds in the database: who may begin and end them, and that claims and polls report them."""

from __future__ import annotations

import pytest
from tests.store.harness import QUEUES, OpenStore, add, register

from headgate.store.errors import NoSuchRow, NoSuchWatcher
from headgate.store.ids import Hold
from headgate.store.store import Store


def test_a_pause_is_reported_to_the_owner_until_the_watcher_is_resumed(store: Store) -> None:
    paused, _ = add(store, "a", "b")
    epoch = register(store)
    assert [claimed.hold for claimed in store.claim_triggers(epoch, limit=9, queues=QUEUES)] == [None, None]
    assert store.poll(epoch, QUEUES).held == {}
    store.pause_watcher("a")
    store.pause_watcher("a")
    assert store.poll(epoch, QUEUES).held == {paused: "paused"}
    assert store.resume_watcher("a") == "paused"
    assert store.resume_watcher("a") is None
    assert store.poll(epoch, QUEUES).held == {}


def test_a_claim_returns_the_hold_with_the_trigger(store: Store) -> None:
    add(store, "a", "b")
    store.pause_watcher("b")
    epoch = register(store)
    claimed = store.claim_triggers(epoch, limit=9, queues=QUEUES)
    assert [(trigger.name, trigger.hold) for trigger in claimed] == [("a", None), ("b", "paused")]
    assert store.claimed_triggers(epoch) == claimed


def test_the_holds_of_others_and_of_removed_watchers_are_not_reported(open_store: OpenStore) -> None:
    store = open_store()
    add(store, "a", "b")
    mine, other = register(store), register(store)
    (first,) = store.claim_triggers(mine, limit=1, queues=QUEUES)
    store.claim_triggers(other, limit=1, queues=QUEUES)
    store.pause_watcher("a")
    store.pause_watcher("b")
    assert store.poll(mine, QUEUES).held == {first.id: "paused"}
    store.remove_watcher("a")
    poll = store.poll(mine, QUEUES)
    assert (poll.held, poll.removed) == ({}, [first.id])


@pytest.mark.parametrize("hold", ["brake", "quarantine"])
def test_a_supervisor_holds_its_own_triggers_alone_with_the_reason(store: Store, hold: Hold) -> None:
    mine, free = add(store, "a", "b")
    epoch = register(store)
    store.claim_triggers(epoch, limit=1, queues=QUEUES)
    assert store.hold_trigger(epoch, mine, hold, "it ended its runner")
    assert store.hold_trigger(epoch, mine, hold, "repeated"), "a repetition changes nothing"
    assert not store.hold_trigger(epoch, free, hold, "it is not ours")
    held, other = store.inspect.watchers()
    assert (held.hold, held.hold_reason, other.hold) == (hold, "it ended its runner", None)
    assert store.release_trigger(mine) == hold
    row = store.inspect.watchers()[0]
    assert (row.hold, row.hold_reason, row.held_at) == (None, None, None)


def test_a_users_pause_takes_the_place_of_any_hold_and_no_hold_that_of_a_pause(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch = register(store)
    store.claim_triggers(epoch, limit=1, queues=QUEUES)
    store.hold_trigger(epoch, trigger_id, "quarantine", "it harms")
    store.pause_watcher("a")
    assert store.poll(epoch, QUEUES).held == {trigger_id: "paused"}
    store.hold_trigger(epoch, trigger_id, "quarantine", "it harms")
    assert store.poll(epoch, QUEUES).held == {trigger_id: "paused"}


def test_unknown_names_are_refused(store: Store) -> None:
    with pytest.raises(NoSuchWatcher):
        store.pause_watcher("nobody")
    with pytest.raises(NoSuchWatcher):
        store.resume_watcher("nobody")
    with pytest.raises(NoSuchRow):
        store.release_trigger(99)


def test_a_hold_is_what_why_says_first(store: Store) -> None:
    (trigger_id,) = add(store, "orders")
    epoch = register(store)
    store.claim_triggers(epoch, limit=1, queues=QUEUES)
    store.hold_trigger(epoch, trigger_id, "quarantine", "it ended its runner 3 times")
    answer = store.inspect.why_trigger(trigger_id)
    assert answer.reason == "quarantine"
    assert "it ended its runner 3 times" in answer.headline
    assert "headgate triggers release orders" in answer.next
    store.pause_watcher("orders")
    answer = store.inspect.why_trigger(trigger_id)
    assert (answer.reason, "headgate watchers resume orders" in answer.next) == ("paused", True)
