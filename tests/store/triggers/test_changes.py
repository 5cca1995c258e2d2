"""Watchers that are changed or restarted: their trigger stays, and whoever owns it reads what it is now."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, update
from tests.store.harness import QUEUES, OpenStore, Query, add, register, wait_until_blocked
from tests.waiting import WITHIN_S

from headgate.protocol.errors import ValueNotSerializable
from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger, FiredEvent
from headgate.protocol.values import decode_value
from headgate.store.db.engine import open_engine
from headgate.store.errors import BadName, LeaseLost, NoSuchWatcher, ValueRefused, WatcherHeld
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tables import stream, trigger
from headgate.store.triggers.changes import ChangedWatcher

FAST = ("fast",)


def claim(store: Store, epoch: Epoch, queues: tuple[str, ...] = QUEUES) -> list[int]:
    return [claimed.id for claimed in store.claim_triggers(epoch, limit=100, queues=queues)]


def describe(store: Store, epoch: Epoch, digest: str, *ids: int) -> None:
    described = tuple(DescribedTrigger(id_, f"run-of-{id_}", digest, f"name of {digest}") for id_ in ids)
    store.store_slice(epoch, described=described)


def stream_row(store: Store) -> tuple[str, int | None]:
    with store.database.reading() as tx:
        row = tx.connection.execute(select(stream.c.queue, stream.c.triggerer_id)).one()
        return row.queue, row.triggerer_id


def test_the_owner_of_a_changed_watcher_reads_its_new_values_once(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch = register(store)
    claim(store, epoch)
    assert store.poll(epoch, QUEUES).changed == []
    changed = store.change_watcher("a", classpath="c.D", kwargs={"size": 2}, max_deliveries=7)
    assert changed == ChangedWatcher(hold=None, is_finished=False)
    assert store.poll(epoch, QUEUES).changed == [trigger_id]
    (now,) = store.take_changes(epoch, [trigger_id])
    assert now.kwargs is not None
    assert (now.id, now.name, now.classpath, decode_value(now.kwargs)) == (trigger_id, "a", "c.D", {"size": 2})
    assert store.inspect.watchers()[0].max_deliveries == 7
    assert store.poll(epoch, QUEUES).changed == []
    assert [again.kwargs for again in store.take_changes(epoch, [trigger_id])] == [now.kwargs], "it may be repeated"


def test_what_is_not_given_stays_and_so_do_events_and_keys(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch = register(store)
    claim(store, epoch)
    event = FiredEvent(trigger_id, "run", 0, 1, b"1", key="k")
    store.store_slice(epoch, events=[event])
    store.change_watcher("a", max_deliveries=9)
    (now,) = store.take_changes(epoch, [trigger_id])
    assert now.kwargs is not None
    assert (now.classpath, decode_value(now.kwargs), now.queue) == ("a.B", {"name": "a"}, "default")
    last = store.last_event(trigger_id)
    assert last is not None
    assert last.key == "k"
    again = FiredEvent(trigger_id, "later-run", 0, 1, b"1", key="k")
    assert store.store_slice(epoch, events=[again]).redelivered == 1


def test_a_change_that_nobody_has_read_is_read_by_whoever_claims_the_trigger(store: Store) -> None:
    add(store, "a")
    dead, epoch = register(store), register(store)
    claim(store, dead)
    store.change_watcher("a", kwargs={"size": 2})
    store.release_triggerer(dead)
    (claimed,) = store.claim_triggers(epoch, limit=1, queues=QUEUES)
    assert claimed.kwargs is not None
    assert decode_value(claimed.kwargs) == {"size": 2}
    assert store.poll(epoch, QUEUES).changed == []


def test_a_changed_trigger_of_a_stream_is_claimed_with_its_stream_as_changed(store: Store) -> None:
    ids = add(store, "a", "b")
    dead, epoch = register(store), register(store)
    claim(store, dead)
    describe(store, dead, "d1", *ids)
    store.change_watcher("a", kwargs={"size": 2})
    store.release_triggerer(dead)
    claimed = store.claim_triggers(epoch, limit=10, queues=QUEUES)
    assert [(one.id, one.stream) for one in claimed] == [(ids[0], "d1"), (ids[1], "d1")]
    assert decode_value(claimed[0].kwargs or b"") == {"size": 2}
    assert store.poll(epoch, QUEUES).changed == []


def test_changes_are_told_to_their_owner_alone_and_not_of_what_is_over(store: Store) -> None:
    one, _ = add(store, "a", "b")
    epoch, other = register(store), register(store)
    claim(store, epoch)
    store.restart_watcher("a")
    store.restart_watcher("b")
    store.remove_watcher("b")
    assert store.poll(other, QUEUES).changed == []
    assert store.poll(epoch, QUEUES).changed == [one]
    assert store.take_changes(other, [one]) == []
    assert store.poll(epoch, QUEUES).changed == [one], "another epoch has read nothing"


def test_a_fenced_owner_reads_no_change(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch, other = register(store), register(store)
    claim(store, epoch)
    store.restart_watcher("a")
    store.fence_triggerers(other, dead=[epoch])
    with pytest.raises(LeaseLost):
        store.take_changes(epoch, [trigger_id])


def test_a_restarted_watcher_that_had_returned_can_be_claimed_with_its_last_event(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch = register(store)
    claim(store, epoch)
    event = FiredEvent(trigger_id, "run", 0, 1, b"1")
    store.store_slice(epoch, events=[event], finished=[FinishedTrigger(trigger_id, "run", "returned", 1)])
    assert store.change_watcher("a", kwargs={"size": 2}) == ChangedWatcher(hold=None, is_finished=True)
    assert claim(store, epoch) == []
    assert store.restart_watcher("a") is True
    (claimed,) = store.claim_triggers(epoch, limit=1, queues=QUEUES)
    assert (claimed.id, decode_value(claimed.kwargs or b"")) == (trigger_id, {"size": 2})
    assert store.last_event(trigger_id) is not None
    assert store.restart_watcher("a") is False
    assert store.poll(epoch, QUEUES).changed == [trigger_id]


def test_a_return_does_not_end_a_watcher_whose_change_was_not_read(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch, other = register(store), register(store)
    claim(store, epoch)
    store.restart_watcher("a")
    ended = FinishedTrigger(trigger_id, "run", "returned", 0)
    store.store_slice(epoch, finished=[ended])
    store.store_slice(epoch, finished=[ended])
    assert store.poll(epoch, QUEUES).changed == []
    assert claim(store, other) == [trigger_id]
    store.store_slice(epoch, finished=[ended])
    store.store_slice(other, finished=[ended])
    assert claim(store, epoch) == [], "the restart counts once"


def test_a_held_watcher_stays_held_and_is_not_restarted(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch = register(store)
    claim(store, epoch)
    store.pause_watcher("a")
    assert store.change_watcher("a", kwargs={"size": 2}).hold == "paused"
    poll = store.poll(epoch, QUEUES)
    assert (poll.held, poll.changed) == ({trigger_id: "paused"}, [trigger_id])
    with pytest.raises(WatcherHeld, match="headgate watchers resume a"):
        store.restart_watcher("a")


def test_bad_values_and_unknown_names_are_refused_and_change_nothing(store: Store, query: Query) -> None:
    add(store, "a")
    before = query('SELECT * FROM "trigger"')
    with pytest.raises(BadName):
        store.change_watcher("a", classpath="")
    with pytest.raises(BadName):
        store.change_watcher("a", queue="a,b")
    with pytest.raises(ValueRefused, match="max_deliveries"):
        store.change_watcher("a", max_deliveries=-1)
    with pytest.raises(ValueNotSerializable):
        store.change_watcher("a", kwargs={"it": object()})
    for change in (store.change_watcher, store.restart_watcher):
        with pytest.raises(NoSuchWatcher, match="'nobody'"):
            change("nobody")
    assert query('SELECT * FROM "trigger"') == before


# --- queues --------------------------------------------------------------------------------------


def test_a_watcher_without_a_stream_is_moved_to_another_queue(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch, fast = register(store), register(store, queues=FAST)
    claim(store, epoch)
    store.change_watcher("a", queue="fast")
    assert claim(store, fast, FAST) == [], "it still runs"
    assert [now.queue for now in store.take_changes(epoch, [trigger_id])] == ["fast"]
    store.release_triggers(epoch, [trigger_id])
    assert claim(store, epoch) == []
    assert claim(store, fast, FAST) == [trigger_id]


def test_a_stream_moves_with_its_only_watcher(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch, fast = register(store), register(store, queues=FAST)
    claim(store, epoch)
    describe(store, epoch, "d1", trigger_id)
    store.change_watcher("a", queue="fast")
    assert stream_row(store) == ("fast", epoch), "its owner still runs it"
    assert claim(store, fast, FAST) == []
    store.release_triggers(epoch, [trigger_id])
    assert stream_row(store) == ("fast", None)
    assert claim(store, fast, FAST) == [trigger_id]
    assert stream_row(store) == ("fast", fast)


def test_a_stream_whose_only_watcher_is_not_owned_can_be_claimed_in_its_new_queue(store: Store) -> None:
    (trigger_id,) = add(store, "a")
    epoch, fast = register(store), register(store, queues=FAST)
    claim(store, epoch)
    describe(store, epoch, "d1", trigger_id)
    store.store_slice(epoch, finished=[FinishedTrigger(trigger_id, "run", "returned", 1)])
    assert stream_row(store) == ("default", epoch)
    store.change_watcher("a", queue="fast")
    store.restart_watcher("a")
    assert claim(store, epoch) == []
    assert claim(store, fast, FAST) == [trigger_id]


def test_a_watcher_that_shares_its_stream_is_not_moved(store: Store) -> None:
    ids = add(store, "a", "b")
    epoch = register(store)
    claim(store, epoch)
    describe(store, epoch, "d1", *ids)
    with pytest.raises(ValueRefused, match=r"shares its stream with others \('b'\).*one queue, 'default'"):
        store.change_watcher("a", queue="fast")
    assert store.poll(epoch, QUEUES).changed == []
    store.change_watcher("a", queue="default", max_deliveries=2)
    store.remove_watcher("b")
    with pytest.raises(ValueRefused, match="one that is ending"):
        store.change_watcher("a", queue="fast")
    store.release_triggers(epoch, [ids[1]])
    assert stream_row(store) == ("default", epoch), "the stream is still used"
    store.change_watcher("a", queue="fast")
    assert stream_row(store) == ("fast", epoch)


def test_a_newcomer_of_the_old_queue_does_not_join_a_stream_that_was_moved(store: Store) -> None:
    (one,) = add(store, "a")
    epoch = register(store)
    claim(store, epoch)
    describe(store, epoch, "d1", one)
    store.change_watcher("a", queue="fast")
    (two,) = add(store, "b")
    assert claim(store, epoch) == [two]
    described = DescribedTrigger(two, "run-of-b", "d1", "orders")
    (refused,) = store.store_slice(epoch, described=(described,)).placed.refused
    assert "is served in the queue 'fast', but its own queue is 'default'" in refused.error
    assert "headgate watchers set NAME --queue fast" in refused.error


# --- at the same moment --------------------------------------------------------------------------


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_change_while_its_owner_reads_is_found_by_the_next_poll(open_store: OpenStore, database_url: str) -> None:
    owner, user = open_store(), open_store()
    (trigger_id,) = add(owner, "a")
    epoch = register(owner)
    claim(owner, epoch)
    owner.restart_watcher("a")
    with ThreadPoolExecutor(1) as pool:
        with owner.database.leased(epoch) as tx:
            # As `take_changes` does in its first statement.
            tx.connection.execute(update(trigger).where(trigger.c.id == trigger_id).values(changed_at=None))
            changing = pool.submit(user.change_watcher, "a", kwargs={"size": 2})
            wait_until_blocked(open_engine(database_url))
        changing.result(WITHIN_S)
    assert owner.poll(epoch, QUEUES).changed == [trigger_id]
    assert decode_value(owner.take_changes(epoch, [trigger_id])[0].kwargs or b"") == {"size": 2}
