"""Deliberate bugs in the hand-over of events to consumers, and in the cleaning of what they have yet to get."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from sqlalchemy import bindparam, false, select

from headgate.client.consumer import Batch, Consumer
from headgate.protocol import marks
from headgate.store.consuming import consumers, failures, places, reading, set_aside
from headgate.store.consuming.places import Place
from headgate.store.consuming.reading import Page
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.tables import asset_watcher, trigger

Patch = tuple[Any, str, Any]


def _read(consumer: Consumer, tx: Tx, limit: int) -> tuple[Place, Page]:
    place = places.lock(tx, consumer.name)
    return place, reading.read_page(tx, place.watcher, place.cursor, limit)


def _batches(*, place_first: bool) -> Sequence[Patch]:
    """Commit the place and the user's rows in two transactions."""

    @contextmanager
    def batch(self: Consumer, limit: int) -> Generator[Batch]:
        with self._database.writing() as tx:
            place, page = _read(self, tx, limit)
            if place_first:
                places.move(tx, place, page)
        with self._database.writing() as tx:
            yield Batch(page.events, tx.connection, page.cursor)
        marks.reach("consumer.block_done")
        if not place_first:
            with self._database.writing() as tx:
                places.move(tx, place, page)

    return [(Consumer, "batch", batch)]


def place_is_committed_before_the_rows() -> Sequence[Patch]:
    return _batches(place_first=True)


def place_is_committed_after_the_rows() -> Sequence[Patch]:
    return _batches(place_first=False)


def worker_remembers_its_place() -> Sequence[Patch]:
    lock, move = Consumer._lock, places.move
    remembered: WeakKeyDictionary[Consumer, Place] = WeakKeyDictionary()

    def lock_and_remember(self: Consumer, tx: Tx) -> Place:
        return remembered.setdefault(self, lock(self, tx))

    def move_and_remember(tx: Tx, place: Place, page: Page) -> None:
        move(tx, place, page)
        for consumer, known in list(remembered.items()):
            if known is place:
                remembered[consumer] = replace(place, cursor=page.cursor)

    return [(Consumer, "_lock", lock_and_remember), (places, "move", move_and_remember)]


def batch_is_moved_past_though_it_failed() -> Sequence[Patch]:
    original = Consumer.batch

    @contextmanager
    def batch(self: Consumer, limit: int) -> Generator[Batch]:
        try:
            with original(self, limit) as batch:
                yield batch
        except Exception:
            with self._database.writing() as tx:
                places.move(tx, *_read(self, tx, limit))
            raise

    return [(Consumer, "batch", batch)]


def removed_trigger_is_left_at_once() -> Sequence[Patch]:
    newest = reading._NEWEST_TRIGGER
    triggers = Prepared(
        select(asset_watcher.c.trigger_id, asset_watcher.c.removed_at.is_not(None), newest)
        .join(trigger, trigger.c.id == asset_watcher.c.trigger_id)
        .where(asset_watcher.c.name == bindparam("of_name"))
        .where(asset_watcher.c.trigger_id >= bindparam("first"))
        .order_by(asset_watcher.c.trigger_id)
    )
    return [(reading, "_TRIGGERS", triggers)]


def cleaner_does_not_ask_consumers() -> Sequence[Patch]:
    return [(consumers, "is_unread", false)]


def bad_event_is_passed_over_without_a_letter() -> Sequence[Patch]:
    return [(set_aside, "add", lambda *arguments: None)]


def event_is_set_aside_at_once() -> Sequence[Patch]:
    original = failures.count

    def count(tx: Tx, place: Place, *failure: Any) -> None:
        original(tx, replace(place, max_deliveries=1), *failure)

    return [(failures, "count", count)]


def failures_are_not_counted() -> Sequence[Patch]:
    original = failures.count

    def count(tx: Tx, place: Place, *failure: Any) -> None:
        original(tx, replace(place, failures=0, max_deliveries=0), *failure)

    return [(failures, "count", count)]


def letter_stays_open_after_its_event_is_taken() -> Sequence[Patch]:
    return [(set_aside, "hand_over", lambda tx, place, redelivery: None)]


def cleaner_does_not_ask_letters_of_consumers() -> Sequence[Patch]:
    return [(consumers, "is_needed", consumers.is_unread)]
