"""What is stored of drift: how far streams have come, who is to ask their brokers, and what was found."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update
from tests.store.harness import QUEUES, Clock, describe_stream, register

from headgate.presentation.drift import finding_text
from headgate.protocol.messages.runner import DescribedLane, DescribedStream, FiredEvent, LaneProgress
from headgate.store.errors import LeaseLost, NoSuchRow
from headgate.store.facts.drift import StreamDrift
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tables import stream_drift


@pytest.fixture
def store(old: Store) -> Store:
    return old


@pytest.fixture
def epoch(store: Store) -> Epoch:
    return describe_stream(store)


def of(store: Store) -> StreamDrift:
    stream_id = store.inspect.find_stream("orders")
    return store.inspect.drift([stream_id])[stream_id]


def lane(at: int, began: int = 0, begun_at: float = 1.0, **fields: Any) -> LaneProgress:
    return LaneProgress("0", (began,), begun_at, advanced=(at,), asked=(at,), **fields)


def test_a_question_is_found_by_the_owner_of_the_stream_until_it_is_answered(store: Store, epoch: Epoch) -> None:
    other = register(store, pid=2)
    stream_id = store.inspect.find_stream("orders")
    assert store.poll(epoch, QUEUES).describe == []
    store.ask_drift([stream_id])
    store.ask_drift([stream_id])
    assert store.poll(epoch, QUEUES).describe == ["d"]
    assert store.poll(epoch, QUEUES).held == {}
    assert store.poll(other, QUEUES).describe == []
    answer = DescribedStream("d", (DescribedLane("0", end=(9,), committed=(7,), lag=2, oldest_key="k"),), 1)
    assert store.note_drift(other, {}, {"d": answer}) == {}
    assert of(store).report is None
    assert store.note_drift(epoch, {}, {"d": answer}) == {"d": "ok"}
    assert store.poll(epoch, QUEUES).describe == []
    drift = of(store)
    assert drift.report is not None
    assert (drift.report.verdict, drift.report.lanes[0].lag, drift.report.lanes[0].oldest_key) == ("behind", 2, "k")
    with pytest.raises(NoSuchRow):
        store.ask_drift([stream_id, 999])


def test_a_move_while_nobody_reads_is_found_once_and_accepted_by_a_user(store: Store, epoch: Epoch) -> None:
    assert store.note_drift(epoch, {"d": (lane(40),)}, {}) == {"d": "ok"}
    moved = {"d": (lane(45, began=45, begun_at=2.0, is_ours=False),)}
    assert store.note_drift(epoch, moved, {}) == {"d": "moved by others"}
    # It is not known whether the commit has arrived, so it is stored once more.
    assert store.note_drift(epoch, moved, {}) == {"d": "moved by others"}
    (found,) = of(store).found
    assert (found.was, found.now) == ((40,), (45,))
    assert store.note_drift(epoch, {"d": (lane(50, began=45, begun_at=2.0),)}, {}) == {"d": "moved by others"}
    stream_id = store.inspect.find_stream("orders")
    (problem,) = store.inspect.status()
    assert (problem.reason, problem.next) == ("drift", f"headgate streams drift {stream_id}")
    assert store.ask_drift([stream_id]) == ()
    assert store.ask_drift([stream_id], accepts=True) == (found,)
    assert of(store).found == ()
    assert store.inspect.status() == []
    assert store.note_drift(epoch, {"d": (lane(51, began=45, begun_at=2.0),)}, {}) == {"d": "ok"}


def test_a_loss_is_found_once_whoever_reads_and_the_next_one_again(store: Store, epoch: Epoch) -> None:
    def note(dropped: int, begun_at: float = 1.0, missing: int = 0) -> str:
        told = lane(40, began=40, begun_at=begun_at, dropped=(dropped,), missing=missing)
        return store.note_drift(epoch, {"d": (told,)}, {})["d"]

    assert note(5) == "ok", "it was before headgate has read it"
    assert note(7, missing=2) == "dropped unread"
    (found,) = of(store).found
    assert finding_text(found) == "lane 0: dropped unread, 2 at most"
    (problem,) = store.inspect.status()
    assert problem.reason == "drift"
    assert note(7, begun_at=2.0, missing=7) == "dropped unread"
    assert store.ask_drift([store.inspect.find_stream("orders")], accepts=True) == (found,)
    assert note(7, begun_at=3.0, missing=7) == "ok"
    answer = DescribedStream("d", (DescribedLane("0", committed=(40,), missing=7),), 1)
    assert store.note_drift(epoch, {}, {"d": answer}) == {"d": "ok"}
    report = of(store).report
    assert report is not None
    assert report.verdict == "ok"
    # While nobody reads it loses more, and the next reader is the first to see it.
    assert note(8, begun_at=4.0, missing=8) == "dropped unread"


def test_a_loss_does_not_hide_what_is_worse(store: Store, epoch: Epoch) -> None:
    store.note_drift(epoch, {"d": (lane(40),)}, {})
    store.note_drift(epoch, {"d": (lane(45, began=45, begun_at=2.0, is_ours=False),)}, {})
    lost = lane(45, began=45, begun_at=2.0, is_ours=False, dropped=(1,), missing=1)
    assert store.note_drift(epoch, {"d": (lost,)}, {}) == {"d": "moved by others"}


def test_going_on_after_a_move_does_not_look_like_going_back(store: Store, epoch: Epoch) -> None:
    """What is stored is of the reader that has told it: its own beginning is behind it for good."""
    for at in (10, 20, 30):
        assert store.note_drift(epoch, {"d": (lane(at),)}, {}) == {"d": "ok"}
    assert store.note_drift(epoch, {"d": (lane(30, began=20, begun_at=2.0),)}, {}) == {"d": "went back"}


def test_an_old_copy_of_the_database_is_told_and_a_stream_at_rest_is_none(
    store: Store, epoch: Epoch, clock: Clock
) -> None:
    store.note_drift(epoch, {"d": (lane(40),)}, {})
    # Nothing happens for an hour; then a message is committed right before the supervisor dies.
    clock.advance(3_600)
    store.heartbeat(epoch)
    again = lane(41, began=41, begun_at=2.0, is_ours=True, committed_at=clock().timestamp() + 1)
    clock.advance(60)
    successor = register(store, pid=2)
    store.fence_triggerers(successor, dead=[epoch])
    store.claim_triggers(successor, limit=10, queues=QUEUES)
    assert store.note_drift(successor, {"d": (again,)}, {}) == {"d": "ok"}
    # Headgate has gone on for an hour, and an old copy of the database is put back.
    newer = lane(90, began=90, begun_at=3.0, is_ours=True, committed_at=clock().timestamp() + 3_600)
    clock.advance(7_200)
    third = register(store, pid=3)
    store.fence_triggerers(third, dead=[successor])
    store.claim_triggers(third, limit=10, queues=QUEUES)
    assert store.note_drift(third, {"d": (newer,)}, {}) == {"d": "log newer than the database"}
    with pytest.raises(LeaseLost):
        store.note_drift(epoch, {"d": (newer,)}, {})


def test_the_newest_key_is_that_of_the_newest_event(store: Store, epoch: Epoch) -> None:
    stream_id = store.inspect.find_stream("orders")
    assert store.inspect.newest_key(stream_id) is None
    trigger_id = store.inspect.find_trigger("orders")
    events = [FiredEvent(trigger_id, "run 1", number, 1, b"1", key=f"k{number}") for number in range(3)]
    store.store_slice(epoch, events=events)
    assert store.inspect.newest_key(stream_id) == "k2"


def test_lanes_that_a_reader_has_given_up_are_forgotten(store: Store, epoch: Epoch) -> None:
    store.note_drift(epoch, {"d": (lane(40),)}, {})
    assert store.note_drift(epoch, {"d": ()}, {}) == {"d": "ok"}
    assert of(store).known == ()
    moved = lane(90, began=90, begun_at=2.0, is_ours=False)
    assert store.note_drift(epoch, {"d": (moved,)}, {}) == {"d": "ok"}


def test_a_database_in_which_the_supervisor_was_then_is_no_old_copy(store: Store, epoch: Epoch, clock: Clock) -> None:
    # A stream that was not among those told for an hour: it has gone on, and its runner begins anew.
    store.note_drift(epoch, {"d": (lane(40),)}, {})
    clock.advance(3_600)
    store.heartbeat(epoch)
    again = lane(90, began=90, begun_at=2.0, is_ours=True, committed_at=clock().timestamp() - 60)
    assert store.note_drift(epoch, {"d": (again,)}, {}) == {"d": "ok"}


def test_what_another_version_has_written_is_no_obstacle(store: Store, epoch: Epoch) -> None:
    store.note_drift(epoch, {"d": (lane(40),)}, {"d": DescribedStream("d", (DescribedLane("0"),), 1)})
    strange = {"found": '[{"lane":"0","verdict":"a new word"}]', "report": '{"verdict":7}', "progress": '[{"at":"x"}]'}
    with store.inspect.database.engine.begin() as connection:
        connection.execute(update(stream_drift).values(strange))
    assert (of(store).known, of(store).found, of(store).report) == ((), (), None)
    assert store.note_drift(epoch, {"d": (lane(41),)}, {}) == {"d": "ok"}
    assert of(store).known[0].at == (41,)
