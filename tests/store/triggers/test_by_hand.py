"""Events written by hand: they wait for the owner's slice, and the ids of a trigger stay in commit order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest
from sqlalchemy import select, update
from tests.store.harness import QUEUES, OpenStore, add, register, wait_until_blocked
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import AssetSchedule, DagSpec, TaskSpec
from headgate.protocol.messages.runner import FiredEvent
from headgate.store.db.engine import open_engine
from headgate.store.db.transaction import is_alive
from headgate.store.errors import NoSuchRow, OwnerUnsettled, RowsRefused, StoreError, TriggerRemoved
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tables import trigger, trigger_event, triggerer
from headgate.store.triggers import by_hand, leases
from headgate.store.triggers.by_hand import OWNER_TRIES_MAX, writing_by_hand
from headgate.store.triggers.events import insert_events


def fired(trigger_id: int, run: str, index: int = 0) -> FiredEvent:
    return FiredEvent(trigger_id, run, index, index + 1, b"payload")


def put(store: Store, trigger_id: int, run: str = "by hand", index: int = 0) -> None:
    with writing_by_hand(store.database, trigger_id) as tx:
        insert_events(tx, [fired(trigger_id, run, index)], {})


def runs_in_order(store: Store) -> list[str]:
    with store.database.reading() as tx:
        return list(
            tx.connection.execute(select(trigger_event.c.trigger_run_id).order_by(trigger_event.c.id)).scalars()
        )


def holds_lease(store: Store, epoch: Epoch) -> bool:
    with store.database.reading() as tx:
        found = tx.connection.execute(select(triggerer.c.id).where(triggerer.c.id == epoch, is_alive()))
        return found.first() is not None


def test_an_event_of_a_trigger_is_stored_whoever_owns_it(store: Store) -> None:
    owner, gone = register(store), register(store)
    free, owned, left = add(store, "free", "owned", "left")
    with store.database.writing() as tx:
        for id_, epoch in ((owned, owner), (left, gone)):
            tx.connection.execute(update(trigger).where(trigger.c.id == id_).values(triggerer_id=epoch))
    store.fence_triggerers(owner, dead=[gone])
    for id_ in (free, owned, left):
        put(store, id_, f"of {id_}")
    assert runs_in_order(store) == [f"of {id_}" for id_ in (free, owned, left)]


def test_a_trigger_that_does_not_exist_or_was_removed_gets_no_event(store: Store) -> None:
    (id_,) = add(store, "a")
    with pytest.raises(NoSuchRow, match=f"no trigger named '{id_ + 1}'"):
        put(store, id_ + 1)
    store.remove_watcher("a")
    with pytest.raises(TriggerRemoved, match=f"trigger {id_} was removed"):
        put(store, id_)
    assert runs_in_order(store) == []


def test_what_is_done_by_hand_is_undone_by_an_exception(store: Store) -> None:
    (id_,) = add(store, "a")

    def give_up() -> None:
        with writing_by_hand(store.database, id_) as tx:
            insert_events(tx, [fired(id_, "by hand")], {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert runs_in_order(store) == []


def test_an_owner_that_changes_again_and_again_is_not_waited_for_without_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (id_,) = add(store, "a")
    owners = [register(store) for _ in range(OWNER_TRIES_MAX)]
    look = by_hand._look
    tries: list[int] = []

    def changing(tx: Any, trigger_id: int, *, locks: bool) -> by_hand._Trigger:
        if locks:  # as if a claim had been committed between the two looks
            tx.connection.execute(update(trigger).values(triggerer_id=owners[len(tries)]))
            tries.append(trigger_id)
        return look(tx, trigger_id, locks=locks)

    monkeypatch.setattr(by_hand, "_look", changing)
    with pytest.raises(OwnerUnsettled, match=f"trigger {id_} changed during each of {OWNER_TRIES_MAX} tries"):
        put(store, id_)
    assert tries == [id_] * OWNER_TRIES_MAX
    assert runs_in_order(store) == []


# --- PostgreSQL: two connections -----------------------------------------------------------------


class Two:
    """A supervisor that owns a trigger, and a user, on two connections."""

    def __init__(self, url: str, owner: Store, user: Store) -> None:
        self.url, self.owner, self.user = url, owner, user
        self.epoch = register(owner)
        (self.trigger_id,) = add(owner, "a")

    def claim(self) -> None:
        (claimed,) = self.owner.claim_triggers(self.epoch, limit=1, queues=QUEUES)
        assert claimed.id == self.trigger_id

    def blocks(self, pool: ThreadPoolExecutor, second: Callable[[], None]) -> Future[None]:
        future = pool.submit(second)
        wait_until_blocked(open_engine(self.url))
        return future


@pytest.fixture
def two(postgres_url: str, secrets: Any) -> Any:
    owner, user = (Store(open_engine(postgres_url), secrets=secrets) for _ in range(2))
    with owner, user:
        yield Two(postgres_url, owner, user)


def test_a_slice_in_flight_is_waited_for_and_has_the_smaller_ids(two: Two) -> None:
    two.claim()
    with ThreadPoolExecutor(1) as pool:
        with two.owner.database.leased(two.epoch) as tx:  # no event yet: the hand must not get ahead of it either
            waits = two.blocks(pool, lambda: put(two.user, two.trigger_id))
            insert_events(tx, [fired(two.trigger_id, "slice")], {})
        waits.result(WITHIN_S)
    assert runs_in_order(two.user) == ["slice", "by hand"]


def test_a_slice_waits_for_what_is_written_by_hand(two: Two) -> None:
    two.claim()
    with ThreadPoolExecutor(1) as pool:
        with writing_by_hand(two.user.database, two.trigger_id) as tx:
            insert_events(tx, [fired(two.trigger_id, "by hand")], {})
            waits = two.blocks(pool, lambda: store_slice(two, fired(two.trigger_id, "slice")))
        waits.result(WITHIN_S)
    assert runs_in_order(two.user) == ["by hand", "slice"]


def store_slice(two: Two, event: FiredEvent) -> None:
    assert two.owner.store_slice(two.epoch, events=[event]).stored == 1


def test_after_a_claim_in_flight_the_slices_of_the_new_owner_wait(two: Two) -> None:
    inserted, goes_on = Event(), Event()

    def by_hand() -> None:
        with writing_by_hand(two.user.database, two.trigger_id) as tx:
            insert_events(tx, [fired(two.trigger_id, "by hand")], {})
            inserted.set()
            assert goes_on.wait(WITHIN_S)

    with ThreadPoolExecutor(2) as pool:
        with two.owner.database.leased(two.epoch) as tx:
            (row,) = leases.claim(tx, limit=1, room=1, is_idle=False, queues=QUEUES)
            assert row.id == two.trigger_id
            hand = two.blocks(pool, by_hand)
        assert inserted.wait(WITHIN_S)
        waits = two.blocks(pool, lambda: store_slice(two, fired(two.trigger_id, "slice")))
        goes_on.set()
        hand.result(WITHIN_S)
        waits.result(WITHIN_S)
    assert runs_in_order(two.user) == ["by hand", "slice"]


def test_a_claim_passes_over_a_trigger_that_is_written_for_by_hand(two: Two) -> None:
    with writing_by_hand(two.user.database, two.trigger_id):
        assert two.owner.claim_triggers(two.epoch, limit=1, queues=QUEUES) == []
    two.claim()


def test_writers_by_hand_of_a_trigger_without_owner_wait_for_each_other(two: Two) -> None:
    with ThreadPoolExecutor(1) as pool:
        with writing_by_hand(two.user.database, two.trigger_id) as tx:
            waits = two.blocks(pool, lambda: put(two.owner, two.trigger_id, "second"))
            insert_events(tx, [fired(two.trigger_id, "first")], {})
        waits.result(WITHIN_S)
    assert runs_in_order(two.user) == ["first", "second"]


# --- all at once ---------------------------------------------------------------------------------

EVENTS = 15  # of each writer
WRITERS = 2  # by hand


@pytest.mark.usefixtures("patient_sqlite")
def test_owners_that_change_and_writers_by_hand_never_deadlock_and_a_reader_misses_nothing(
    open_store: OpenStore,
) -> None:
    """A reader that follows the ids of a trigger sees all of its events, in an order that never changes."""
    setup = open_store()
    (id_,) = add(setup, "a")
    start, over = Barrier(WRITERS + 3), Event()

    def owner(name: str) -> int:
        store, stored = open_store(), 0
        start.wait(WITHIN_S)
        while stored < EVENTS:
            epoch = register(store)
            if store.claim_triggers(epoch, limit=1, queues=QUEUES):
                for index in range(stored, min(stored + 5, EVENTS)):
                    stored += store.store_slice(epoch, events=[fired(id_, name, index)]).stored
            end(store, epoch, stored)
        return stored

    def end(store: Store, epoch: Epoch, stored: int) -> None:
        if stored % 2:
            store.release_triggerer(epoch)
        else:
            fencer = register(store)
            while holds_lease(store, epoch):  # a fencing passes over a row that a writer by hand has locked
                store.fence_triggerers(fencer, dead=[epoch])
            store.release_triggerer(fencer)

    def hand(name: str) -> int:
        store, stored = open_store(), 0
        start.wait(WITHIN_S)
        while stored < EVENTS:
            try:
                put(store, id_, name, stored)
            except OwnerUnsettled:
                continue
            stored += 1
        return stored

    def reader() -> list[int]:
        store, seen = open_store(), [0]
        start.wait(WITHIN_S)
        while True:
            is_last = over.is_set()
            found = select(trigger_event.c.id).where(trigger_event.c.trigger_id == id_, trigger_event.c.id > seen[-1])
            with store.database.reading() as tx:
                seen += tx.connection.execute(found.order_by(trigger_event.c.id)).scalars()
            if is_last:
                return seen[1:]

    with ThreadPoolExecutor(WRITERS + 3) as pool:
        reads = pool.submit(reader)
        writes = [pool.submit(owner, f"owner {number}") for number in range(2)]
        writes += [pool.submit(hand, f"hand {number}") for number in range(WRITERS)]
        errors: list[BaseException | None] = [write.exception(WITHIN_S) for write in writes]
        over.set()
        assert not any(isinstance(error, StoreError) for error in errors), errors  # a deadlock is `DatabaseAway`
        assert [write.result() for write in writes] == [EVENTS] * len(writes)
        seen = reads.result(WITHIN_S)
    with setup.database.reading() as tx:
        stored = list(tx.connection.execute(select(trigger_event.c.id).order_by(trigger_event.c.id)).scalars())
    assert seen == stored
    assert len(stored) == EVENTS * len(writes)


# --- an event put by hand ------------------------------------------------------------------------


def test_an_event_put_by_hand_has_a_run_made_for_it_like_any_other(store: Store) -> None:
    epoch = register(store)
    store.add_watcher("orders", "a.B", {}, asset="orders")
    spec = DagSpec("d", AssetSchedule(("orders",), "each"), tasks=(TaskSpec("a", "Op"),))
    store.tasks.save_file(epoch, "d.py", [spec])
    put_id = store.put_event("orders", b'{"order":1}', key="1")
    (made,) = store.scheduling.create_event_runs(epoch).made
    assert made[0] == "d"
    (row,) = store.inspect.events()
    assert (row.id, row.watcher, row.key, row.payload) == (put_id, "orders", "1", b'{"order":1}')


def test_a_key_with_a_character_that_no_database_takes_is_refused(store: Store) -> None:
    add(store, "a")
    with pytest.raises(RowsRefused, match="NUL"):
        store.put_event("a", b"1", key="a\0b")
    assert runs_in_order(store) == []
