"""Epochs, fencing and claims: one owner for each trigger, and no write by a supervisor that lost its own (I10)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import insert, select
from tests.store.harness import QUEUES, Clock, OpenStore, Query, add, register, wait_until_blocked
from tests.waiting import WITHIN_S

from headgate.protocol.messages.runner import FiredEvent, RedeliveryEnd
from headgate.protocol.values import encode_value
from headgate.scheduling.why import RunnerEnds
from headgate.store.db import engine
from headgate.store.db.engine import open_engine
from headgate.store.db.transaction import LeasedTx
from headgate.store.errors import BadName, DatabaseAway, LeaseLost
from headgate.store.facts.supervisor_status import SupervisorStatus, encode_status
from headgate.store.ids import Epoch
from headgate.store.inspect.triggers import PAST_S
from headgate.store.inspect.why_facts import Liveness
from headgate.store.store import Store
from headgate.store.tables import trigger, triggerer
from headgate.store.triggers import leases, streams
from headgate.store.triggers.leases import SILENCE_MAX_S, Poll


def claim_ids(store: Store, epoch: Epoch, *, limit: int = 100, queues: tuple[str, ...] = QUEUES) -> list[int]:
    return [claimed.id for claimed in store.claim_triggers(epoch, limit=limit, queues=queues)]


# --- epochs --------------------------------------------------------------------------------------


def test_every_registration_gets_an_epoch_that_nobody_had(store: Store) -> None:
    first, second = register(store), register(store)
    store.release_triggerer(second)
    assert first < second < register(store)


def test_a_registration_is_seen_as_it_was_made(store: Store) -> None:
    epoch = register(store, hostname="höst", pid=2**31, machine="boot:ns", process_started=1.25, queues=("a", "b"))
    (row,) = store.live_triggerers()
    assert (row.id, row.hostname, row.pid, row.machine) == (epoch, "höst", 2**31, "boot:ns")
    assert (row.process_started, row.capacity, row.queues) == (1.25, 10, ("a", "b"))
    assert row.started_at == row.latest_heartbeat
    assert 0 <= row.heartbeat_age_s < 60
    assert (row.stopped_at, row.fenced_at) == (None, None)


def test_queue_names_that_would_not_survive_the_list_are_refused(store: Store) -> None:
    with pytest.raises(BadName, match="','"):
        register(store, queues=("a,b",))


def test_the_age_of_a_heartbeat_is_by_the_stores_clock(open_store: OpenStore) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    epoch = register(store)
    clock.advance(12.5)
    assert [row.heartbeat_age_s for row in store.live_triggerers()] == [12.5]
    store.heartbeat(epoch)
    clock.advance(1)
    assert [row.heartbeat_age_s for row in store.live_triggerers()] == [1.0]


def test_a_heartbeat_is_later_by_the_databases_own_clock(store: Store) -> None:
    epoch = register(store)
    first = store.live_triggerers()[0].latest_heartbeat
    while store.live_triggerers()[0].latest_heartbeat == first:
        store.heartbeat(epoch)
    assert store.live_triggerers()[0].latest_heartbeat > first


def test_a_released_triggerer_leaves_its_triggers_to_others_and_is_not_live(store: Store) -> None:
    epoch, other = register(store), register(store)
    ids = add(store, "a", "b")
    assert claim_ids(store, epoch) == ids
    store.release_triggerer(epoch)
    assert [row.id for row in store.live_triggerers()] == [other]
    assert claim_ids(store, other) == ids


def test_releasing_a_triggerer_again_does_nothing_but_a_fenced_one_is_told(store: Store) -> None:
    epoch, fenced = register(store), register(store)
    assert store.fence_triggerers(epoch, dead=[fenced]) == [fenced]
    store.release_triggerer(epoch)
    store.release_triggerer(epoch)
    with pytest.raises(LeaseLost):
        store.release_triggerer(fenced)
    with pytest.raises(LeaseLost):
        store.release_triggerer(Epoch(10_000))


def test_all_triggerers_are_listed_newest_first(store: Store) -> None:
    one, two, three = register(store), register(store), register(store)
    store.fence_triggerers(one, dead=[two])
    store.release_triggerer(three)
    rows = store.inspect.triggerers()
    assert [row.id for row in rows] == [three, two, one]
    assert rows[0].stopped_at is not None
    assert rows[1].fenced_at is not None
    assert [row.id for row in store.inspect.triggerers(limit=2)] == [three, two]


def test_a_triggerer_is_listed_with_its_state_and_the_past_ones_for_a_day(old: Store, clock: Clock) -> None:
    fenced, silent, gone, stopped, running = (register(old, pid=number) for number in range(1, 6))
    old.fence_triggerers(running, dead=[fenced])
    old.release_triggerer(stopped)
    clock.advance(SILENCE_MAX_S + 1)
    old.heartbeat(gone)
    ends = RunnerEnds(1, 600.0, "killed by SIGKILL")
    old.heartbeat(running, encode_status(SupervisorStatus(runner="starting", runner_ends=ends)))
    liveness = Liveness(is_gone=lambda row: row.pid == 3)

    def states(**options: Any) -> list[tuple[int, str]]:
        return [(row.id, row.state) for row in old.inspect.triggerers(liveness=liveness, **options)]

    living = [(running, "running"), (gone, "gone"), (silent, "silent")]
    assert states() == [living[0], (stopped, "stopped"), *living[1:], (fenced, "fenced")]
    row, *others = old.inspect.triggerers(liveness=liveness)
    assert (row.runner, row.runner_ends) == ("starting", ends)
    assert {(other.runner, other.runner_ends) for other in others} == {("", None)}
    clock.advance(PAST_S)
    old.heartbeat(gone)
    old.heartbeat(running)
    assert states() == living
    assert len(states(with_past=True)) == 5


# --- fencing -------------------------------------------------------------------------------------


def heartbeats(store: Store, *epochs: Epoch) -> dict[Epoch, datetime]:
    """Return the latest heartbeats of these, as a supervisor sees them that watches the others."""
    return {row.id: row.latest_heartbeat for row in store.live_triggerers() if row.id in epochs}


def test_the_silent_and_the_dead_are_fenced_and_nobody_else(store: Store) -> None:
    me, silent, beating, dead, stopped = (register(store) for _ in range(5))
    seen = heartbeats(store, me, silent, beating, stopped)
    store.release_triggerer(stopped)
    while heartbeats(store, beating) == {beating: seen[beating]}:
        store.heartbeat(beating)
    store.heartbeat(dead)
    assert store.fence_triggerers(me) == []
    assert store.fence_triggerers(me, silent=seen, dead=[dead, stopped, me]) == [silent, dead]
    assert [row.id for row in store.live_triggerers()] == [me, beating]
    assert store.fence_triggerers(me, silent=seen, dead=[dead]) == []


@pytest.mark.parametrize("seconds", [-7200.0, 7200.0])
def test_a_clock_that_is_set_makes_nobody_silent_and_hides_nobody(open_store: OpenStore, seconds: float) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    me, silent, beating = (register(store) for _ in range(3))
    seen = heartbeats(store, silent, beating)
    clock.advance(seconds)
    store.heartbeat(beating)
    assert store.fence_triggerers(me, silent=seen) == [silent]


def writes(store: Store, epoch: Epoch) -> dict[str, Callable[[], object]]:
    """Return a call of every verb that writes for an epoch."""
    event = FiredEvent(1, "run", 0, 1, b"payload")
    return {
        "heartbeat": lambda: store.heartbeat(epoch),
        "note_drift": lambda: store.note_drift(epoch, {}, {}),
        "release_triggerer": lambda: store.release_triggerer(epoch),
        "fence_triggerers": lambda: store.fence_triggerers(epoch, dead=[1, 2]),
        "claim_triggers": lambda: store.claim_triggers(epoch, limit=10, queues=QUEUES),
        "release_triggers": lambda: store.release_triggers(epoch, [1]),
        "release_owned": lambda: store.release_owned(epoch),
        "store_slice": lambda: store.store_slice(epoch, events=[event]),
        "hold_trigger": lambda: store.hold_trigger(epoch, 1, "quarantine", "why"),
        "dead_letter_event": lambda: store.dead_letter_event(epoch, event, "why"),
        "reset_failures": lambda: store.reset_failures(epoch, [1]),
        "take_changes": lambda: store.take_changes(epoch, [1]),
        "end_redeliveries": lambda: store.end_redeliveries(epoch, [RedeliveryEnd(1, 1, "run", "handled")]),
        "strike_message": lambda: store.strike_message(epoch, 1, "key", "run", "why"),
    }


READS_OF_AN_EPOCH = {"poll", "claimed_triggers", "count_claimable"}


def test_a_fenced_epoch_writes_nothing_by_any_verb(open_store: OpenStore, query: Query) -> None:
    victim, other = open_store(), open_store()
    epoch, fencer = register(victim), register(other)
    add(victim, "a", "b")
    claim_ids(victim, epoch, limit=1)
    assert other.fence_triggerers(fencer, dead=[epoch]) == [epoch]
    tables = ("triggerer", "trigger", "trigger_event", "dead_letter", "redelivery", "strike")
    before = {table: query(f'SELECT * FROM "{table}" ORDER BY 1') for table in tables}

    calls = writes(victim, epoch)
    takes_epoch = {
        name
        for name, verb in inspect.getmembers(Store, inspect.isfunction)
        if not name.startswith("_") and "epoch" in inspect.signature(verb).parameters
    }
    assert calls.keys() == takes_epoch - READS_OF_AN_EPOCH
    for call in calls.values():
        with pytest.raises(LeaseLost) as told:
            call()
        assert told.value.epoch == epoch
    assert {table: query(f'SELECT * FROM "{table}" ORDER BY 1') for table in tables} == before


def test_an_epoch_that_ended_writes_nothing_more(store: Store) -> None:
    epoch = register(store)
    add(store, "a")
    store.release_triggerer(epoch)
    for name, call in writes(store, epoch).items():
        if name != "release_triggerer":
            with pytest.raises(LeaseLost):
                call()
    assert list(store.inspect.events()) == []


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's one writer makes others wait; a test need not wait as long."""
    monkeypatch.setattr(engine, "SQLITE_BUSY_TIMEOUT_S", 0.01)


@pytest.mark.usefixtures("short_waits")
def test_a_triggerer_is_not_fenced_in_the_middle_of_a_transaction(open_store: OpenStore) -> None:
    victim, other = open_store(), open_store()
    epoch, fencer = register(victim), register(other)
    seen = heartbeats(other, epoch)
    with victim.database.leased(epoch):
        try:
            assert other.fence_triggerers(fencer, silent=seen, dead=[epoch]) == []
        except DatabaseAway:  # SQLite has one writer at a time
            assert other.database.engine.dialect.name == "sqlite"
    assert other.fence_triggerers(fencer, dead=[epoch]) == [epoch]
    with pytest.raises(LeaseLost), victim.database.leased(epoch):
        pass


@pytest.mark.parametrize(
    "verb", ["heartbeat", "store_slice", "claim_triggers", "dead_letter_event", "release_triggers"]
)
def test_a_write_that_meets_a_fencing_half_done_waits_and_is_refused(
    postgres_url: str, secrets: Any, verb: str
) -> None:
    opened = open_engine(postgres_url)
    victim, other = Store(open_engine(postgres_url), secrets=secrets), Store(opened, secrets=secrets)
    epoch, fencer = register(victim), register(other)
    add(other, "a")
    with victim, other, ThreadPoolExecutor(1) as pool:
        with other.database.leased(fencer) as tx:
            assert leases.fence(tx, silent={}, dead=[epoch]) == [epoch]
            write: Future[object] = pool.submit(writes(victim, epoch)[verb])
            wait_until_blocked(open_engine(postgres_url))
        with pytest.raises(LeaseLost):
            write.result(WITHIN_S)


def test_two_that_fence_each_other_at_once_do_not_wait_for_each_other(postgres_url: str, secrets: Any) -> None:
    one, two = (Store(open_engine(postgres_url), secrets=secrets) for _ in range(2))
    with one, two:
        first, second = register(one), register(two)
        with one.database.leased(first) as of_one, two.database.leased(second) as of_two:
            assert leases.fence(of_one, silent={}, dead=[second]) == []
            assert leases.fence(of_two, silent={}, dead=[first]) == []
        assert one.fence_triggerers(first, dead=[second]) == [second]
        with pytest.raises(LeaseLost):
            two.fence_triggerers(second, dead=[first])


# --- claims --------------------------------------------------------------------------------------


def test_a_claim_takes_the_oldest_of_its_queues_up_to_its_limit(store: Store) -> None:
    epoch = register(store)
    first = add(store, "a", "b", "c")
    other_queue = add(store, "d", queue="other")
    assert claim_ids(store, epoch, limit=2) == first[:2]
    assert claim_ids(store, epoch, limit=0) == []
    assert claim_ids(store, epoch) == first[2:]
    assert claim_ids(store, epoch) == []
    assert claim_ids(store, epoch, queues=("default", "other")) == other_queue
    assert [claimed.id for claimed in store.claimed_triggers(epoch)] == [*first, *other_queue]


def test_a_claimed_trigger_has_all_it_takes_to_run_it(store: Store, query: Query) -> None:
    epoch = register(store)
    (id_,) = add(store, "orders")
    (claimed,) = store.claim_triggers(epoch, limit=1, queues=QUEUES)
    assert (claimed.id, claimed.name, claimed.classpath, claimed.queue) == (id_, "orders", "a.B", "default")
    assert (claimed.failure_count, claimed.error) == (0, "")
    assert claimed.kwargs == encode_value({"name": "orders"}, where="kwargs")
    assert store.claimed_triggers(epoch) == [claimed]
    query("DELETE FROM asset_watcher")
    assert [claimed.name for claimed in store.claimed_triggers(epoch)] == [f"trigger-{id_}"]


def test_more_triggers_than_one_statement_takes_are_claimed_and_released(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "chunks", lambda items: [items[i : i + 2] for i in range(0, len(items), 2)])
    epoch = register(store)
    ids = add(store, *"abcde")
    assert claim_ids(store, epoch) == ids
    store.release_triggers(epoch, ids)
    assert store.claimed_triggers(epoch) == []


def test_what_a_living_triggerer_owns_cannot_be_claimed(store: Store) -> None:
    owner, other = register(store), register(store)
    ids = add(store, "a", "b")
    assert claim_ids(store, owner) == ids
    assert claim_ids(store, other) == []
    assert not store.poll(other, QUEUES).claimable
    store.fence_triggerers(other, dead=[owner])
    assert store.poll(other, QUEUES).claimable
    assert claim_ids(store, other) == ids
    with pytest.raises(LeaseLost):
        store.claimed_triggers(owner)


def test_releasing_gives_up_ones_own_triggers_only(store: Store) -> None:
    owner, other = register(store), register(store)
    ids = add(store, "a", "b", "c")
    assert claim_ids(store, owner) == ids
    store.release_triggers(other, ids)
    assert claim_ids(store, other) == []
    store.release_triggers(owner, [ids[2], ids[0], 10_000])
    assert claim_ids(store, other) == [ids[0], ids[2]]


def test_a_poll_tells_of_removed_triggers_until_they_are_released(store: Store) -> None:
    epoch, other = register(store), register(store)
    assert store.poll(epoch, QUEUES) == Poll(removed=[], claimable=False)
    ids = add(store, "a", "b", "c")
    assert store.poll(epoch, QUEUES) == Poll(removed=[], claimable=True)
    assert store.poll(epoch, ("another",)) == Poll(removed=[], claimable=False)
    assert claim_ids(store, epoch) == ids
    store.remove_watcher("c")
    store.remove_watcher("a")
    expected = Poll(removed=[ids[0], ids[2]], claimable=False)
    assert store.poll(epoch, QUEUES) == store.poll(epoch, QUEUES) == expected
    assert store.poll(other, QUEUES) == Poll(removed=[], claimable=False)
    store.release_triggers(epoch, expected.removed)
    assert store.poll(epoch, QUEUES) == Poll(removed=[], claimable=False)
    assert [claimed.id for claimed in store.claimed_triggers(epoch)] == [ids[1]]


@pytest.mark.usefixtures("patient_sqlite")
def test_supervisors_that_claim_at_once_never_get_the_same_trigger(open_store: OpenStore) -> None:
    supervisors, triggers = 4, 60
    setup = open_store()
    ids = add(setup, *(f"w{number}" for number in range(triggers)))
    # Half of them are taken over from a fenced owner, which is the way with the subtler condition.
    gone = register(setup)
    claim_ids(setup, gone, limit=triggers // 2)
    setup.fence_triggerers(register(setup), dead=[gone])
    stores = [open_store() for _ in range(supervisors)]
    epochs = [register(store) for store in stores]
    start = Barrier(supervisors)

    def claim_all(store: Store, epoch: Epoch) -> list[int]:
        mine: list[int] = []
        start.wait(WITHIN_S)
        while store.poll(epoch, QUEUES).claimable:
            mine += claim_ids(store, epoch, limit=3)
        return mine

    with ThreadPoolExecutor(supervisors) as pool:
        claimed = list(pool.map(claim_all, stores, epochs))
    assert sorted(id_ for mine in claimed for id_ in mine) == ids
    for store, epoch, mine in zip(stores, epochs, claimed, strict=True):
        assert [claimed_.id for claimed_ in store.claimed_triggers(epoch)] == sorted(mine)


def test_a_claim_passes_over_what_another_is_claiming_this_moment(postgres_url: str, secrets: Any) -> None:
    one, two = (Store(open_engine(postgres_url), secrets=secrets) for _ in range(2))
    with one, two:
        first, second = register(one), register(two)
        ids = add(one, "a", "b", "c")
        with one.database.leased(first) as tx:
            rows = leases.claim(tx, limit=2, room=2, is_idle=False, queues=QUEUES)
            assert [row.id for row in rows] == ids[:2]
            assert claim_ids(two, second) == ids[2:]
        assert [claimed.id for claimed in one.claimed_triggers(first)] == ids[:2]


def test_an_owner_unknown_to_the_claims_snapshot_is_taken_for_alive(postgres_url: str, secrets: Any) -> None:
    one, two = (Store(open_engine(postgres_url), secrets=secrets) for _ in range(2))
    with one, two:
        first = register(one)
        (id_,) = add(one, "a")
        # The snapshot of the first one's statement is older than the second one's registration and claim. The
        # row it waits for has changed when it gets it, and is looked at again: with the old snapshot.
        with ThreadPoolExecutor(1) as pool:
            with two.database.writing() as tx:
                lease = insert(triggerer).values(
                    hostname="h",
                    pid=1,
                    machine="m",
                    process_started=0.0,
                    capacity=1,
                    queues="default",
                    workers=0,
                    started_at=tx.now,
                    latest_heartbeat=tx.now,
                )
                second = tx.connection.execute(lease.returning(triggerer.c.id)).scalar_one()
                of_second = LeasedTx(tx.connection, tx.secrets, None, tx.now, tx.passed_over, second)
                claimed = leases.claim(of_second, limit=1, room=1, is_idle=False, queues=QUEUES)
                assert [row.id for row in claimed] == [id_]
                claim = pool.submit(claim_without_skipping, one, first)
                wait_until_blocked(open_engine(postgres_url))
            assert claim.result(WITHIN_S) == []
        assert [claimed.id for claimed in two.claimed_triggers(second)] == [id_]


def claim_without_skipping(store: Store, epoch: Epoch) -> list[int]:
    """Look for claimable rows as `leases.claim` does, but wait for locked ones, so that they are looked at again."""
    may_claim = leases._unowned(QUEUES), streams.is_claimable_alone()
    candidates = select(trigger.c.id).where(*may_claim).with_for_update(key_share=True, of=trigger)
    with store.database.leased(epoch) as tx:
        return list(tx.connection.execute(candidates, {"epoch": epoch}).scalars())
