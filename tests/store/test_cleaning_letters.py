"""A clean keeps whatever the redrive of a dead letter needs: without it, events would be stored once more, or never."""

from __future__ import annotations

import pytest
from tests.store.harness import Clock, Query, register
from tests.store.tasks.streams_harness import Streams, stream_wait
from tests.store.tasks.test_poison import SKIP, work
from tests.store.test_cleaning import claim_watcher, clean, fired

from headgate.client import Client
from headgate.protocol.values import decode_value
from headgate.store.cleaning import KINDS, UNASKED, Kind
from headgate.store.ids import Epoch
from headgate.store.store import Store

BY = "ada"
NOT_LETTERS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in ("dead_letters", "open_dead_letters"))


def letter_ids(store: Store) -> list[int]:
    return [letter.id for letter in store.inspect.dead_letters()]


def grow_old(store: Store, epoch: Epoch, clock: Clock) -> None:
    """Let 40 days pass, through which the supervisor has lived."""
    clock.pass_days(40)
    store.heartbeat(epoch)


def follow_watcher_with_letter(store: Store) -> tuple[Epoch, int]:
    """Bury a message of a watcher, and put another one of the same name in its place; return the trigger of that."""
    epoch = register(store)
    trigger = claim_watcher(store, epoch)
    store.dead_letter_event(epoch, fired(trigger, 0, key="k"), "refused")
    store.remove_watcher("w")
    store.release_triggers(epoch, [trigger])
    return epoch, claim_watcher(store, epoch)


def test_the_letter_of_a_removed_watcher_is_redriven_to_the_next_of_its_name(old: Store, clock: Clock) -> None:
    epoch, following = follow_watcher_with_letter(old)
    grow_old(old, epoch, clock)

    assert clean(old, 30, kinds=NOT_LETTERS) == {}
    (letter,) = letter_ids(old)
    assert old.letters.redrive(letter, by=BY).state == "redriven"
    assert [event.trigger_id for event in old.inspect.events()] == [following]
    grow_old(old, epoch, clock)
    assert clean(old, 30, kinds=NOT_LETTERS) == {"asset_watcher": 1, "trigger": 1}, "nothing is to be done any more"


@pytest.mark.parametrize(("run", "key"), [("later", "k"), ("run", None)], ids=["of its message", "of its name"])
def test_an_event_that_the_redrive_of_a_letter_would_find_stays(
    old: Store, clock: Clock, query: Query, run: str, key: str | None
) -> None:
    epoch = register(old)
    trigger = claim_watcher(old, epoch)
    old.dead_letter_event(epoch, fired(trigger, 0, key=key), "refused")
    old.store_slice(
        epoch, events=[fired(trigger, 0, key=key, run=run), fired(trigger, 1, key=key and "other", run=run)]
    )
    grow_old(old, epoch, clock)

    assert clean(old, 30, kinds=NOT_LETTERS) == {}
    (letter,) = letter_ids(old)
    assert old.letters.redrive(letter, by=BY).state == "stored_meanwhile"
    assert len(query("SELECT id FROM trigger_event")) == 2
    assert clean(old, 30, kinds=NOT_LETTERS) == {"trigger_event": 1}


def test_what_the_next_watcher_has_stored_of_the_message_stays_too(old: Store, clock: Clock) -> None:
    epoch, following = follow_watcher_with_letter(old)
    old.store_slice(epoch, events=[fired(following, 0, key="k"), fired(following, 1, key="other")])
    grow_old(old, epoch, clock)

    assert clean(old, 30, kinds=NOT_LETTERS) == {}
    (letter,) = letter_ids(old)
    assert old.letters.redrive(letter, by=BY).state == "stored_meanwhile"


def test_a_reader_goes_on_though_only_older_events_of_a_removed_watcher_are_kept(old: Store, clock: Clock) -> None:
    epoch = register(old)
    trigger = claim_watcher(old, epoch)
    old.dead_letter_event(epoch, fired(trigger, 0, key="k"), "refused")
    old.store_slice(epoch, events=[fired(trigger, 0, key="k"), fired(trigger, 1), fired(trigger, 2)])
    client = Client(old.database)
    at = client.newest("w")
    old.remove_watcher("w")
    old.release_triggers(epoch, [trigger])
    old.store_slice(epoch, events=[fired(claim_watcher(old, epoch), 0)])
    grow_old(old, epoch, clock)

    assert clean(old, 30, kinds=NOT_LETTERS) == {"trigger_event": 2}
    assert len(client.events("w", after=at)) == 1


def test_an_event_that_a_stream_has_passed_over_keeps_its_place_until_it_is_redriven(
    old: Store, clock: Clock, query: Query
) -> None:
    tasks = Streams(old, query, retries=0)
    tasks.stream_it(stream_wait(SKIP))
    for payload in ("bad", "new"):
        tasks.fire(payload)
        work(tasks, "bad")
    grow_old(old, tasks.epoch, clock)
    clean(old, 30, kinds=UNASKED)

    (letter,) = letter_ids(old)
    assert old.letters.redrive(letter, by=BY).state == "redriven"
    assert work(tasks, "nothing") == [["bad"]]
    for _ in range(2):
        last = old.last_event(tasks.trigger_id)
        assert last is not None
        assert decode_value(last.payload) == "new", "the trigger goes on behind it"
        grow_old(old, tasks.epoch, clock)
        clean(old, 30, kinds=UNASKED)
