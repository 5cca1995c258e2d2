"""Shared streams: one owner each, and no claim, description or take-over that splits one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update
from tests.store.harness import QUEUES, OpenStore, Query, add, register, wait_until_blocked
from tests.waiting import WITHIN_S

from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger
from headgate.store.db.engine import open_engine
from headgate.store.errors import LeaseLost
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tables import stream, trigger
from headgate.store.triggers import changes, streams
from headgate.store.triggers.events import StoredSlice
from headgate.store.triggers.streams import Placed


def claim(
    store: Store,
    epoch: Epoch,
    *,
    limit: int = 100,
    room: int | None = None,
    is_idle: bool = False,
    queues: tuple[str, ...] = QUEUES,
) -> list[int]:
    found = store.claim_triggers(epoch, limit=limit, room=room, is_idle=is_idle, queues=queues)
    return [claimed.id for claimed in found]


def describe(store: Store, epoch: Epoch, digest: str, *ids: int) -> StoredSlice:
    described = tuple(DescribedTrigger(id_, f"run-of-{id_}", digest, f"name of {digest}") for id_ in ids)
    return store.store_slice(epoch, described=described)


def end(store: Store, epoch: Epoch) -> None:
    store.release_triggerer(epoch)


def owners(store: Store) -> dict[str, set[int | None]]:
    """Return the owners of the open triggers of each stream."""
    found: dict[str, set[int | None]] = {}
    with store.database.reading() as tx:
        for digest, owner in tx.connection.execute(
            select(stream.c.digest, trigger.c.triggerer_id)
            .join_from(stream, trigger, trigger.c.stream_id == stream.c.id)
            .where(trigger.c.removed_at.is_(None), trigger.c.finished_at.is_(None))
        ):
            found.setdefault(digest, set()).add(owner)
    return found


def stream_rows(store: Store) -> dict[str, tuple[str, str, int | None]]:
    with store.database.reading() as tx:
        rows = tx.connection.execute(select(stream))
        return {row.digest: (row.name, row.queue, row.triggerer_id) for row in rows}


# --- descriptions --------------------------------------------------------------------------------


def test_the_first_trigger_of_a_stream_gives_it_its_owner_and_its_queue(store: Store) -> None:
    epoch = register(store, queues=("big",))
    (one,) = add(store, "one", queue="big")
    assert claim(store, epoch, queues=("big",)) == [one]
    assert describe(store, epoch, "d1", one).placed.here == {one: "d1"}
    assert stream_rows(store) == {"d1": ("name of d1", "big", epoch)}
    assert [claimed.stream for claimed in store.claimed_triggers(epoch)] == ["d1"]


def test_a_described_trigger_whose_stream_another_supervisor_owns_is_left_to_that_one(store: Store) -> None:
    owner, other = register(store), register(store)
    (one,) = add(store, "one")
    assert claim(store, owner) == [one]
    describe(store, owner, "d1", one)
    (two,) = add(store, "two")
    assert claim(store, other) == [two]
    placed = describe(store, other, "d1", two).placed
    assert placed == Placed(elsewhere=frozenset({two}))
    assert store.poll(owner, QUEUES).claimable
    assert not store.poll(other, QUEUES).claimable
    assert (store.count_claimable(owner, QUEUES), store.count_claimable(other, QUEUES)) == (1, 0)
    assert claim(store, other) == []
    assert claim(store, owner) == [two]


def test_a_description_of_a_stream_without_a_live_owner_leaves_the_trigger_to_whoever_claims_the_stream(
    store: Store,
) -> None:
    dead, epoch = register(store), register(store)
    ids = add(store, "one", "two")
    assert claim(store, dead) == ids
    describe(store, dead, "d1", *ids)
    end(store, dead)
    (three,) = add(store, "three")
    # Streams come first, so this claims another trigger alone: as if the stream was locked at that moment.
    with store.database.leased(epoch) as tx:
        tx.connection.execute(update(trigger).where(trigger.c.id == three).values(triggerer_id=epoch))
    assert describe(store, epoch, "d1", three).placed.elsewhere == {three}
    assert sorted(claim(store, epoch)) == [*ids, three]


def test_describing_again_changes_nothing(store: Store) -> None:
    owner, other = register(store), register(store)
    one, two = add(store, "one", "two")
    assert claim(store, owner, limit=1) == [one]
    assert claim(store, other) == [two]
    first = [describe(store, owner, "d1", one).placed, describe(store, other, "d1", two).placed]
    rows = stream_rows(store)
    assert [describe(store, owner, "d1", one).placed, describe(store, other, "d1", two).placed] == first
    assert stream_rows(store) == rows


def test_a_trigger_that_reads_no_stream_any_more_may_be_claimed_alone(store: Store) -> None:
    epoch, other = register(store), register(store)
    one, two = add(store, "one", "two")
    assert claim(store, epoch) == [one, two]
    describe(store, epoch, "d1", one, two)
    assert describe(store, epoch, "", two).placed.here == {two: ""}
    store.release_triggers(epoch, [two])
    assert claim(store, other) == [two]
    assert owners(store) == {"d1": {epoch}}


def test_a_trigger_that_never_read_a_stream_costs_no_write(store: Store) -> None:
    epoch = register(store)
    (one,) = add(store, "one")
    assert claim(store, epoch) == [one]
    assert describe(store, epoch, "", one).placed == streams.NOTHING_PLACED


def test_a_trigger_whose_key_changes_moves_to_the_owner_of_its_new_stream(store: Store) -> None:
    first, second = register(store), register(store)
    one, two = add(store, "one", "two")
    assert claim(store, first, limit=1) == [one]
    describe(store, first, "d1", one)
    assert claim(store, second) == [two]
    describe(store, second, "d2", two)
    assert describe(store, first, "d2", one).placed.elsewhere == {one}
    assert claim(store, first) == []
    assert claim(store, second) == [one]
    assert owners(store) == {"d2": {second}}


def test_a_stream_that_no_trigger_uses_is_adopted_with_the_queue_of_the_next(store: Store) -> None:
    first, second = register(store), register(store, queues=("big",))
    (one,) = add(store, "one")
    assert claim(store, first) == [one]
    describe(store, first, "d1", one)
    store.remove_watcher("one")
    (two,) = add(store, "two", queue="big")
    assert claim(store, second, queues=("big",)) == [two]
    # It may still run there.
    assert "served in the queue 'default'" in describe(store, second, "d1", two).placed.refused[0].error
    store.release_triggers(first, [one])
    assert describe(store, second, "d1", two).placed.here == {two: "d1"}
    assert stream_rows(store)["d1"][1:] == ("big", second)


def test_a_trigger_of_another_queue_than_its_stream_fails_with_an_error_that_names_the_queue(store: Store) -> None:
    first, second = register(store), register(store, queues=("big",))
    (one,) = add(store, "one")
    (two,) = add(store, "two", queue="big")
    assert claim(store, first) == [one]
    describe(store, first, "d1", one)
    assert claim(store, second, queues=("big",)) == [two]
    result = describe(store, second, "d1", two)
    assert (result.placed.here, result.placed.elsewhere) == ({}, frozenset())
    assert result.failure_counts == {two: 1}
    line = store.inspect.trigger(two).line
    assert line.last_error is not None
    assert "name of d1 is served in the queue 'default', but its own queue is 'big'" in line.last_error
    assert "`headgate watchers set NAME --queue default` moves it there" in line.last_error
    assert line.triggerer_id == second
    assert owners(store) == {"d1": {first}}


def test_triggers_of_two_queues_that_are_described_together_are_not_one_stream(store: Store) -> None:
    epoch = register(store, queues=("a", "b"))
    (one,) = add(store, "one", queue="a")
    (two,) = add(store, "two", queue="b")
    assert claim(store, epoch, queues=("a", "b")) == [one, two]
    placed = describe(store, epoch, "d1", one, two).placed
    assert placed.here == {one: "d1"}
    assert [run.trigger_id for run in placed.refused] == [two]


def test_a_stream_does_not_get_more_triggers_than_one_claim_may_take(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STREAM_TRIGGERS_MAX", 2)
    epoch = register(store)
    ids = add(store, "one", "two", "three")
    assert claim(store, epoch) == ids
    placed = describe(store, epoch, "d1", *ids).placed
    assert sorted(placed.here) == ids[:2]
    assert "has 2 triggers already" in placed.refused[0].error


def test_a_trigger_that_was_removed_meanwhile_is_not_placed(store: Store) -> None:
    epoch = register(store)
    (one,) = add(store, "one")
    assert claim(store, epoch) == [one]
    store.remove_watcher("one")
    assert describe(store, epoch, "d1", one).placed.elsewhere == {one}
    assert store.poll(epoch, QUEUES).removed == [one]


def test_a_supervisor_without_its_lease_describes_nothing(store: Store) -> None:
    epoch, other = register(store), register(store)
    (one,) = add(store, "one")
    assert claim(store, epoch) == [one]
    store.fence_triggerers(other, dead=[epoch])
    with pytest.raises(LeaseLost):
        describe(store, epoch, "d1", one)
    assert stream_rows(store) == {}


# --- claims --------------------------------------------------------------------------------------


def described_by(store: Store, *streams_of: tuple[str, int]) -> dict[str, list[int]]:
    """Make streams with so many triggers each, described by a supervisor that has ended."""
    dead = register(store)
    made = {}
    for digest, count in streams_of:
        ids = add(store, *[f"{digest}-{number}" for number in range(count)])
        assert claim(store, dead) == ids
        describe(store, dead, digest, *ids)
        made[digest] = ids
    end(store, dead)
    return made


def test_a_stream_is_claimed_whole_even_if_that_is_more_than_the_limit(store: Store) -> None:
    ids = described_by(store, ("d1", 4), ("d2", 2))
    first, second = register(store), register(store)
    assert sorted(claim(store, first, limit=2, room=10)) == ids["d1"]
    assert sorted(claim(store, second, limit=2, room=10)) == ids["d2"]
    assert owners(store) == {"d1": {first}, "d2": {second}}
    assert [row[2] for row in stream_rows(store).values()] == [first, second]


def test_a_stream_that_does_not_fit_is_passed_over_for_one_that_does(store: Store) -> None:
    ids = described_by(store, ("d1", 4), ("d2", 2))
    epoch = register(store)
    assert sorted(claim(store, epoch, limit=3, room=3)) == ids["d2"]
    assert owners(store)["d1"].isdisjoint({epoch})


def test_a_stream_larger_than_a_whole_capacity_is_claimed_by_a_supervisor_that_owns_nothing(store: Store) -> None:
    ids = described_by(store, ("d1", 4), ("d2", 4))
    epoch = register(store)
    assert claim(store, epoch, limit=3, room=3) == []
    assert sorted(claim(store, epoch, limit=3, room=3, is_idle=True)) == ids["d1"]


def test_other_triggers_are_claimed_with_the_room_that_streams_leave(store: Store) -> None:
    ids = described_by(store, ("d1", 2))
    alone = add(store, "a", "b")
    epoch = register(store)
    assert sorted(claim(store, epoch, limit=3)) == [*ids["d1"], alone[0]]


def test_a_stream_of_a_queue_that_is_not_served_is_not_claimed(store: Store) -> None:
    described_by(store, ("d1", 2))
    epoch = register(store, queues=("big",))
    assert not store.poll(epoch, ("big",)).claimable
    assert claim(store, epoch, queues=("big",)) == []


def test_removed_triggers_do_not_move_with_their_stream(store: Store) -> None:
    ids = described_by(store, ("d1", 3))["d1"]
    store.remove_watcher("d1-1")
    epoch = register(store)
    assert sorted(claim(store, epoch)) == [ids[0], ids[2]]


def test_the_stream_of_a_fenced_supervisor_is_claimed_whole(store: Store) -> None:
    first, second = register(store), register(store)
    ids = add(store, "one", "two", "three", "four")
    assert claim(store, first) == ids
    describe(store, first, "d1", *ids)
    assert not store.poll(second, QUEUES).claimable
    store.fence_triggerers(second, dead=[first])
    assert sorted(claim(store, second, limit=2, room=10)) == ids


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_sequence_of_claims_descriptions_and_ends_splits_a_stream(store: Store, data: st.DataObject) -> None:
    """On both databases; the owner of a stream and those of its triggers are compared after every step."""
    epochs = [register(store, capacity=100) for _ in range(3)]
    known: dict[int, str] = {}
    names = iter(range(1000))
    for _ in range(data.draw(st.integers(4, 14))):
        number = data.draw(st.integers(0, 2))
        match data.draw(st.sampled_from(["add", "claim", "describe", "end", "remove", "release"])):
            case "add":
                (id_,) = add(store, f"{epochs[0]}-{next(names)}")
                known[id_] = data.draw(st.sampled_from(["d1", "d2", ""]))
            case "claim":
                limit = data.draw(st.integers(1, 4))
                claim(store, epochs[number], limit=limit, room=data.draw(st.integers(limit, 6)))
            case "describe":
                mine = [found for found in store.claimed_triggers(epochs[number]) if found.id in known]
                for found in mine[: data.draw(st.integers(0, 4))]:
                    describe(store, epochs[number], known[found.id], found.id)
            case "end":
                end(store, epochs[number])
                epochs[number] = register(store, capacity=100)
            case "remove":
                for line in store.inspect.triggers()[: data.draw(st.integers(0, 1))]:
                    store.remove_watcher(line.name)
            case _:  # release
                owned = [found.id for found in store.claimed_triggers(epochs[number])]
                store.release_triggers(epochs[number], owned[:1])
        assert_whole(store)
    for epoch in epochs:
        end(store, epoch)
    for line in store.inspect.triggers():
        store.remove_watcher(line.name)


def assert_whole(store: Store) -> None:
    live = {row.id for row in store.live_triggerers()}
    rows = stream_rows(store)
    for digest, found in owners(store).items():
        assert found & live <= {rows[digest][2]}, (digest, found, rows[digest])


@pytest.mark.usefixtures("patient_sqlite")
def test_claims_at_the_same_moment_share_whole_streams(store: Store, open_store: OpenStore) -> None:
    described_by(store, *[(f"d{number}", 5) for number in range(8)])
    barrier = Barrier(4)

    def run() -> int:
        mine = open_store()
        epoch = register(mine, capacity=100)
        claimed = 0
        for _ in range(6):
            barrier.wait(WITHIN_S)
            claimed += len(claim(mine, epoch, limit=5, room=100))
        return claimed

    with ThreadPoolExecutor(4) as pool:
        counts = [future.result() for future in [pool.submit(run) for _ in range(4)]]
    assert sum(counts) == 40
    assert all(count % 5 == 0 for count in counts)
    assert all(len(found) == 1 for found in owners(store).values())


@pytest.mark.usefixtures("patient_sqlite")
def test_descriptions_at_the_same_moment_choose_one_owner(store: Store, open_store: OpenStore) -> None:
    add(store, *[f"w{number}" for number in range(8)])
    barrier = Barrier(4)

    def run(number: int) -> tuple[int, int]:
        mine = open_store()
        epoch = register(mine)
        barrier.wait(WITHIN_S)
        ids = claim(mine, epoch, limit=2)
        barrier.wait(WITHIN_S)
        described = [DescribedTrigger(id_, "r", f"d{index}", "s") for index, id_ in enumerate(ids)]
        placed = mine.store_slice(epoch, described=described if number % 2 else described[::-1]).placed
        return len(placed.here), len(placed.elsewhere)

    with ThreadPoolExecutor(4) as pool:
        placed = [future.result() for future in [pool.submit(run, number) for number in range(4)]]
    assert_whole(store)
    assert sum(here for here, _ in placed) >= 2
    assert sum(here + there for here, there in placed) == 8


# --- cost ----------------------------------------------------------------------------------------

MANY, OF_ONE = 20_000, 50  # triggers, and how many of them a stream has
_SCANS = "SELECT seq_scan, idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'trigger'"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_claims_and_descriptions_of_streams_read_no_triggers_but_those_of_the_streams(
    store: Store, query: Query
) -> None:
    alive, gone, epoch = (register(store, capacity=MANY) for _ in range(3))
    sizes = {"alive": alive, "gone": gone, "streams": MANY // OF_ONE, "triggers": MANY}
    query(
        "INSERT INTO stream (digest, name, queue, triggerer_id, created_date) SELECT 'd' || n, 'name', 'default', "
        "CASE WHEN n % 100 = 0 THEN :gone ELSE :alive END, now() FROM generate_series(1, :streams) AS n",
        **sizes,
    )
    query(
        "INSERT INTO trigger (classpath, kwargs, created_date, triggerer_id, stream_id) SELECT 'a.B', '', now(), "
        "s.triggerer_id, s.id FROM stream s, generate_series(1, :triggers / :streams)",
        **sizes,
    )
    query("ANALYZE trigger, stream, triggerer")
    store.fence_triggerers(epoch, dead=[gone])
    with store.database.leased(epoch) as tx:
        # They count what the session has not yet told the server as well.
        before = tx.connection.exec_driver_sql(_SCANS).one()
        claimed = streams.claim_streams(tx, limit=4 * OF_ONE, room=MANY, is_idle=True, queues=QUEUES)
        described = [DescribedTrigger(id_, "run", "d100", "name") for id_ in sorted(claimed)[:10]]
        assert len(streams.describe(tx, described).here) == 10
        after = tx.connection.exec_driver_sql(_SCANS).one()
    assert len(claimed) == 4 * OF_ONE
    assert (after[0] - before[0], after[1] > before[1]) == (0, True)


# --- shown ---------------------------------------------------------------------------------------


def test_the_stream_of_a_trigger_is_shown_with_its_owner_and_those_it_may_wait_for(store: Store) -> None:
    epoch = register(store)
    one, two, three = add(store, "one", "two", "three")
    assert claim(store, epoch) == [one, two, three]
    describe(store, epoch, "d1", one, two, three)
    store.store_slice(epoch, finished=[FinishedTrigger(two, "run", "failed", 0, "KeyError: 'x'")])
    store.pause_watcher("three")
    assert store.inspect.trigger(one).stream == "name of d1"
    answer = store.inspect.why_trigger(one)
    assert ("stream", "name of d1, 3 triggers") in answer.facts
    assert answer.reason == "stream_waits"
    assert answer.headline.startswith(
        "its stream name of d1 waits for two while that one does not run: it has failed once"
    )
    assert "KeyError" in answer.headline


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has one writer at a time
def test_a_trigger_that_is_moved_while_it_is_described_gets_no_stream_of_another_queue(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, user = open_store(), open_store()
    epoch, other = register(store, queues=("default",)), register(user, queues=("other",))
    one, two = add(store, "one", "two")
    assert claim(store, epoch, queues=("default",)) == [one, two]
    describe(store, epoch, "d1", one)
    lock = streams._locked_streams

    def moved_then(*arguments: Any) -> Any:
        found = lock(*arguments)
        user.change_watcher("two", queue="other")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(streams, "_locked_streams", moved_then)
        placed = describe(store, epoch, "d1", two).placed
    assert (dict(placed.here), placed.elsewhere) == ({}, frozenset())
    assert [changed.queue for changed in store.take_changes(epoch, store.poll(epoch, ("default",)).changed)] == [
        "other"
    ]
    store.release_triggers(epoch, [two])
    assert claim(user, other, queues=("other",)) == [two]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_sign_off_waits_for_a_user_who_moves_a_trigger_and_neither_gives_up(
    open_store: OpenStore, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user has the row of the stream, and is about to lock its trigger."""
    leaving, user = open_store(), open_store()
    epoch = register(leaving)
    add(leaving, "one")
    describe(leaving, epoch, "d1", *claim(leaving, epoch))
    lock = changes._locked
    with ThreadPoolExecutor(1) as pool:
        left: list[Future[None]] = []

        def left_meanwhile(trigger_id: int) -> Any:
            if not left:
                left.append(pool.submit(leaving.release_triggerer, epoch))
                wait_until_blocked(open_engine(database_url))
            return lock(trigger_id)

        monkeypatch.setattr(changes, "_locked", left_meanwhile)
        user.change_watcher("one", queue="other")
        left[0].result(WITHIN_S)
    assert owners(user) == {"d1": {None}}
