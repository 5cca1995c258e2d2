"""Streams as users see them: who reads and runs each, and for whom it waits."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from tests.store.harness import QUEUES, Clock, OpenStore, add, register

from headgate.presentation.streams import lag_text
from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger, FiredEvent
from headgate.store.errors import NoSuchRow
from headgate.store.facts.supervisor_status import StreamStatus, SupervisorStatus, encode_status
from headgate.store.ids import Epoch
from headgate.store.inspect.status_facts import AWAY_S
from headgate.store.inspect.streams import LiveStream
from headgate.store.store import Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(open_store: OpenStore, clock: Clock) -> Store:
    """Two watchers of one stream, one of another, and one that reads none."""
    store = open_store(clock=clock)
    epoch = register(store)
    raw, big, alone, _ = add(store, "raw", "big", "alone", "none")
    store.claim_triggers(epoch, limit=10, queues=QUEUES)
    of_log = [DescribedTrigger(id_, f"described {id_}", "d", "the log") for id_ in (raw, big)]
    store.store_slice(epoch, described=(*of_log, DescribedTrigger(alone, "described", "e", "the queue")))
    store.store_slice(epoch, events=[FiredEvent(raw, "run 1", 0, 1, b"\x01")])
    return store


def fail(store: Store, name: str) -> None:
    (lease,) = store.inspect.triggerers()
    error = ("KeyError: 'a'", "Traceback (most recent call last):\nKeyError: 'a'")
    run = FinishedTrigger(store.inspect.find_trigger(name), "run 2", "failed", 0, *error)
    store.store_slice(lease.id, finished=[run])


def test_a_stream_has_a_supervisor_and_subscribers(store: Store, clock: Clock) -> None:
    log, queue = store.inspect.streams()
    (lease,) = store.inspect.triggerers()
    assert (log.name, log.queue, log.subscribers, log.missing) == ("the log", "default", 2, 0)
    assert (log.triggerer_id, log.supervisor) == (lease.id, "h, process 1, alive")
    assert (queue.name, queue.subscribers, queue.stored_at, queue.last_error) == ("the queue", 1, None, None)
    assert log.stored_at is not None
    assert store.inspect.streams(beyond_id=log.id) == [queue]
    assert store.inspect.streams(limit=1) == [log]
    clock.advance(timedelta(days=1).total_seconds())
    assert store.inspect.streams()[0].supervisor == "h, process 1, silent"


def test_a_subscriber_that_has_failed_is_the_one_that_its_stream_waits_for(store: Store, clock: Clock) -> None:
    fail(store, "big")
    clock.advance(5)
    (lease,) = store.inspect.triggerers()
    store.hold_trigger(lease.id, store.inspect.find_trigger("alone"), "quarantine", "it blocked the loop")
    log, queue = store.inspect.streams()
    assert (log.missing, queue.missing) == (1, 1)
    assert log.last_error is not None
    assert log.last_error.startswith("KeyError: 'a'")
    line, (raw, big) = store.inspect.stream(store.inspect.find_stream("big"))
    assert line == log
    assert (raw.name, raw.missing, raw.newest_event_id is not None) == ("raw", None, True)
    assert big.missing == "it has failed once, the last time 5.0 s ago: KeyError: 'a'"
    _, (alone,) = store.inspect.stream(queue.id)
    assert (alone.hold, alone.missing) == ("quarantine", "quarantine for 0.0 s: it blocked the loop")


def test_the_error_of_a_subscriber_that_is_back_is_not_one_of_its_stream(store: Store, clock: Clock) -> None:
    fail(store, "big")
    assert store.inspect.streams()[0].last_error is not None
    clock.advance(5)
    (lease,) = store.inspect.triggerers()
    store.store_slice(lease.id, events=[FiredEvent(store.inspect.find_trigger("big"), "run 3", 0, 1, b"\x01")])
    line, (_, big) = store.inspect.stream(store.inspect.streams()[0].id)
    assert (line.missing, line.last_failed_at, line.last_error) == (0, None, None)
    assert big.last_error is not None
    clock.advance(5)
    store.hold_trigger(lease.id, big.trigger_id, "quarantine", "it blocked the loop")  # its last error was why
    assert store.inspect.streams()[0].last_error == big.last_error


def test_what_its_supervisor_says_of_a_stream_is_true_as_of_its_last_heartbeat(store: Store, clock: Clock) -> None:
    (lease,) = store.inspect.triggerers()
    assert store.inspect.streams()[0].live is None
    raw, big = store.inspect.find_trigger("raw"), store.inspect.find_trigger("big")
    at = clock()
    said = StreamStatus(
        *("d", 3, 4, 2, 1, 1, 70, "bytes", "absent subscriber", 1.5, (big, raw, 99), 2.5, 5, 6, 7, 8, "OSError: gone"),
        last_error_at=3.5,
    )
    store.heartbeat(lease.id, encode_status(SupervisorStatus(streams=(said,), streams_in_all=1)))
    clock.advance(5)
    store.heartbeat(lease.id)
    log, queue = store.inspect.streams()
    assert queue.live is None
    moments = {number: datetime.fromtimestamp(number, UTC) for number in (1.5, 2.5, 3.5)}
    assert log.live == LiveStream(
        *(at + timedelta(seconds=5), 70, "bytes", 3, 4, 2, 1, 1, "absent subscriber", moments[1.5]),
        *(("big", "raw", "trigger-99"), moments[2.5], 5, 6, 7, 8, moments[3.5], "OSError: gone"),
    )
    assert store.inspect.stream(log.id)[0] == log


def test_a_supervisor_that_cannot_do_all_of_its_duties_is_told(store: Store) -> None:
    epoch = publish(store, encode_status(SupervisorStatus(trouble="tasks: its keys are wrong")))
    told = [one.text for one in store.inspect.status() if one.reason == "supervisor_impeded"]
    assert len(told) == 1
    assert told[0].startswith(f"supervisor {epoch} (")
    assert told[0].endswith("cannot use the database for tasks: its keys are wrong")
    store.release_triggerer(Epoch(epoch))
    assert [one.text for one in store.inspect.status() if one.reason == "supervisor_impeded"] == []


def test_a_supervisor_that_cannot_write_logs_is_told(store: Store) -> None:
    publish(store, encode_status(SupervisorStatus(logs_trouble="[Errno 28] No space left on device")))
    (told,) = [one for one in store.inspect.status() if one.reason == "logs_unwritten"]
    assert (told.severity, told.text.endswith("cannot write logs of tasks: [Errno 28] No space left on device")) == (
        "attention",
        True,
    )


def publish(store: Store, text: str) -> int:
    (lease,) = store.inspect.triggerers()
    store.heartbeat(lease.id, text)
    return lease.id


def test_what_a_newer_supervisor_says_is_read_as_far_as_it_is_known(store: Store) -> None:
    said = {
        "runner": "resting",
        "owned": 3,
        "moons": [1],
        "streams": [{"stream": "d", "lag": 7, "lag_unit": "pages", "held": "full moon", "tide": {"high": True}}],
    }
    epoch = publish(store, json.dumps(said))
    found = store.inspect.supervisor_statuses([epoch])[epoch]
    assert (found.status.runner, found.status.owned, found.unreadable) == ("resting", 3, None)
    live = store.inspect.streams()[0].live
    assert live is not None
    assert (live.lag, live.lag_unit, live.held, lag_text(live)) == (
        7,
        "pages",
        "full moon",
        "7 pages",
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"streams": 5}', '{"streams": [{"stream": "d", "held_by": "all"}]}'])
def test_what_cannot_be_read_of_a_supervisor_is_said_and_the_rest_is_shown(store: Store, text: str) -> None:
    epoch = publish(store, text)
    found = store.inspect.supervisor_statuses([epoch])[epoch]
    assert found.unreadable is not None
    assert found.unreadable.startswith(f"the figures of supervisor {epoch} cannot be read (")
    assert "another version of headgate" in found.unreadable
    log = store.inspect.streams()[0]
    assert (log.name, log.subscribers, log.live, log.unreadable) == ("the log", 2, None, found.unreadable)


def test_a_broker_that_is_away_is_told_with_the_reason_once_it_lasts(store: Store, clock: Clock) -> None:
    at = clock().timestamp()
    away = StreamStatus("d", held="broker away", held_since=at, last_error="OSError: refused")
    (lease,) = store.inspect.triggerers()
    store.heartbeat(lease.id, encode_status(SupervisorStatus(streams=(away,), streams_in_all=1)))
    store.hold_trigger(lease.id, store.inspect.find_trigger("big"), "paused", "")

    def told() -> list[str]:
        return [one.text for one in store.inspect.status() if one.reason == "broker_away"]

    clock.advance(AWAY_S - 1)
    assert told() == []
    clock.advance(1)
    assert told() == ["the broker of the log has been away for 10 s: OSError: refused"]
    answer = store.inspect.why_trigger(store.inspect.find_trigger("raw"))
    assert (answer.reason, "OSError: refused" in answer.headline) == ("broker_away", True)
    store.heartbeat(lease.id, encode_status(SupervisorStatus()))
    assert told() == []


def test_a_stream_that_nobody_reads_any_more_is_not_listed(store: Store) -> None:
    store.remove_watcher("alone")
    assert [line.name for line in store.inspect.streams()] == ["the log"]


@pytest.mark.parametrize("name", ["none", "nobody", "99", "9" * 30])
def test_what_is_no_stream_is_said_to_be_none(store: Store, name: str) -> None:
    with pytest.raises(NoSuchRow, match=name):
        store.inspect.find_stream(name)
    with pytest.raises(NoSuchRow):
        store.inspect.stream(99)
