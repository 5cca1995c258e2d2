"""Streams of tasks and what is around them: cleaning, events by hand, dead letters, keys, lists of triggers."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from sqlalchemy import delete, func, select
from tests.store.harness import Clock, OpenStore, Query
from tests.store.tasks.streams_harness import Streams, handled, payloads, stream_wait
from tests.supervisor.tasks_harness import clear, event_of

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import RefusedEvent
from headgate.protocol.messages.steps import StepFailed, StepSucceeded
from headgate.protocol.messages.task_streams import StreamOptions
from headgate.store.store import Store
from headgate.store.tables import trigger_event
from headgate.store.tasks.deferral import Deferral
from headgate.store.tasks.outcomes import WorkerLost

S = TaskState
DAY_S = 86_400.0


def clean(store: Store, days: float) -> dict[str, int]:
    rows: dict[str, int] = {}
    for _, cleaned in store.cleaning.clean(days * DAY_S):
        for table, count in cleaned.rows.items():
            rows[table] = rows.get(table, 0) + count
    return rows


# --- cleaning ------------------------------------------------------------------------------------


def test_a_clean_keeps_what_is_not_handled_and_the_newest_event_of_a_trigger_that_is_over(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1, 2, 3, 4)
    assert tasks.fail_it(number=2) is S.UP_FOR_RETRY
    tasks.let_go()
    clock.pass_days(40)
    assert clean(store, 30) == {"trigger_event": 2}
    tasks.epoch = tasks.register()
    tasks.retry()
    assert tasks.stream_it() is S.SCHEDULED
    assert payloads(tasks.take()[1]) == [3, 4]


def test_a_stream_goes_with_its_run(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1, 2, keyed=True)
    tasks.succeed_it()
    tasks.let_go()
    store.tasks.cancel_run(tasks.run)
    clock.pass_days(40)
    deleted = clean(store, 30)
    assert (deleted["task_stream"], deleted["trigger_event"], deleted["trigger"]) == (1, 2, 1)


# --- by hand -------------------------------------------------------------------------------------


def test_a_redriven_event_goes_to_the_end_of_its_stream(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    lost = tasks.events("lost")[0]
    tasks.fire("after")
    store.dead_letter_event(tasks.epoch, lost, "the database cannot take it")
    (letter,) = query("SELECT id FROM dead_letter")
    tasks.handle()
    tasks.take()
    tasks.end(str(tasks.row()["token"]), WorkerLost("killed"))
    tasks.let_go()
    store.letters.redrive(letter["id"], by="me")
    tasks.retry()
    tasks.stream_it()
    assert tasks.state() is S.SCHEDULED
    _, part = tasks.take()
    assert (payloads(part), part.handled) == (["lost"], 1)
    assert tasks.is_open(), "its trigger runs on"


def next_try_of(tasks: Streams, wait: Deferral | None = None) -> TaskState | None:
    """Have the step end that its trigger's failure has begun, and the next try begin its stream."""
    tasks.end(tasks.take()[0].token, WorkerLost("killed"))
    tasks.let_go()
    tasks.retry()
    return tasks.stream_it(wait)


@pytest.mark.parametrize("elements", [None, "event"])
def test_a_stream_does_not_go_on_before_the_letter_of_a_message_is_resolved(
    store: Store, query: Query, elements: Literal["event"] | None
) -> None:
    """The broker does not deliver the message again, so the task would end without it."""
    tasks = Streams(store, query, retries=5)
    wait = stream_wait(StreamOptions(elements=elements))
    tasks.stream_it(wait)
    store.dead_letter_event(tasks.epoch, tasks.events("lost")[0], "the database cannot take it")
    (letter,) = query("SELECT id FROM dead_letter")

    assert next_try_of(tasks, wait) is S.SCHEDULED
    assert not tasks.is_open()
    told = f"an event of its stream could not be stored, and is dead letter {letter['id']}: "
    assert str(tasks.row()["last_error"]).startswith(told)
    store.letters.discard(letter["id"], by="me")
    assert next_try_of(tasks, wait) is S.DEFERRED
    assert tasks.is_open()


def test_an_event_that_differs_from_the_stored_one_keeps_no_try_from_going_on(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    (first,) = tasks.events("x", keyed=True)
    store.store_slice(tasks.epoch, events=[first])
    tasks.handle()
    again = msgspec.structs.replace(first, sequence_index=1, payload=b'"y"')
    assert store.store_slice(tasks.epoch, events=[again]).differing
    tasks.finish("failed", error="broker away")
    assert next_try_of(tasks) is S.DEFERRED


def test_a_letter_that_holds_the_message_is_given_to_the_trigger_of_the_next_try(store: Store, query: Query) -> None:
    """It holds no event that could be put into the stream."""
    tasks = Streams(store, query)
    tasks.stream_it()
    letter = RefusedEvent(tasks.trigger_id, tasks.run_name(), 0, 1, "no form", 4, b'"m1"', "m1", 0, True, "message")
    store.store_slice(tasks.epoch, refused=[letter])
    assert next_try_of(tasks) is S.DEFERRED
    ((letter_id,),) = [tuple(row.values()) for row in query("SELECT id FROM dead_letter WHERE state = 'open'")]
    assert store.letters.redrive(letter_id, by="me").state == "redriving"


def test_a_letter_of_poison_keeps_no_try_from_going_on_when_its_event_is_cleaned(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query, retries=0)
    wait = stream_wait(StreamOptions(poison="skip"))
    tasks.stream_it(wait)
    store.store_slice(tasks.epoch, events=tasks.events("bad"))
    task, part = tasks.take()
    tasks.end(task.token, StepFailed("boom"), part)
    assert [row["state"] for row in query("SELECT state FROM dead_letter")] == ["open"]
    tasks.let_go()
    tasks.retry()
    tasks.stream_it(wait)
    store.store_slice(tasks.epoch, events=tasks.events("good"))
    tasks.handle()
    clock.pass_days(40)
    store.heartbeat(tasks.epoch)
    assert "trigger_event" not in clean(store, 30), "a redrive would need it"
    with store.database.writing() as tx:  # as a clean of an earlier version did
        oldest = select(func.min(trigger_event.c.id)).scalar_subquery()
        assert tx.connection.execute(delete(trigger_event).where(trigger_event.c.id == oldest)).rowcount == 1
    tasks.finish("failed", error="broker away")
    tasks.end(tasks.take()[0].token, WorkerLost("killed"))
    clear(store, tasks.run, "a")
    tasks.let_go()
    tasks.plan()
    assert tasks.stream_it(wait) is S.DEFERRED


def test_a_refused_event_of_no_message_has_no_letter_because_its_trigger_fires_it_again(
    store: Store, query: Query
) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    lost = msgspec.structs.replace(tasks.events("lost")[0], seq=0)
    store.dead_letter_event(tasks.epoch, lost, "the database cannot take it")
    assert query("SELECT id FROM dead_letter") == []
    assert tasks.row()["last_error"] == "the database cannot take it"
    assert next_try_of(tasks) is S.DEFERRED
    assert tasks.is_open()


def test_a_redrive_says_that_the_task_has_ended_and_a_clear_has_it_handle_the_event(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    store.dead_letter_event(tasks.epoch, tasks.events("lost")[0], "the database cannot take it")
    (letter,) = query("SELECT id FROM dead_letter")
    tasks.finish()
    tasks.end(tasks.take()[0].token, StepSucceeded())
    done = store.letters.redrive(letter["id"], by="me", note="again")
    assert done.state == "redriven"
    assert done.unhandled == (
        "the task a of run r1 of etl has ended (success): "
        "`headgate tasks clear etl r1 a --go-on` has it handle the event"
    )
    (action,) = query("SELECT note FROM letter_action")
    assert action["note"] == f"again; {done.unhandled}"
    store.tasks.clear_many(tasks.run, ["a"], streams="go_on")
    tasks.let_go()
    tasks.plan()
    tasks.stream_it()
    _, part = tasks.take()
    assert payloads(part) == ["lost"]


def test_a_redrive_to_a_task_that_waits_no_more_for_one_event_says_so(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    _, trigger = tasks.defer_it()
    lost = event_of(trigger)
    store.dead_letter_event(tasks.epoch, lost, "the database cannot take it")
    (letter,) = query("SELECT id FROM dead_letter")
    store.store_slice(tasks.epoch, events=[event_of(trigger, 1, index=1)])
    done = store.letters.redrive(letter["id"], by="me")
    assert done.unhandled == "the task that its trigger was for does not wait for it any more"


# --- what is shown -------------------------------------------------------------------------------


def test_the_trigger_of_a_stream_is_listed_with_its_task_whether_it_waits_or_not(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    for _ in range(2):
        (line,) = store.inspect.triggers()
        assert (line.dag, line.run_id, line.task_id) == ("etl", "r1", "a")
        tasks.fire(1)
    assert tasks.state() is S.SCHEDULED


def test_the_state_of_a_stream_is_encrypted_again_with_a_new_key(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    tasks.handle(secret="s3cret")
    before = tasks.stream()["state"]
    assert "s3cret" not in before
    assert store.keys.encrypt_again("task_stream.state", 0).rewritten == 1
    assert tasks.stream()["state"] != before
    assert tasks.place() == (1, {"secret": "s3cret"})


def test_why_says_how_far_a_stream_has_come_and_what_it_waits_for(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("batch", count=3)))
    tasks.fire(1, 2, 3, 4)
    tasks.handle()
    told = store.inspect.why_task(store.inspect.find_task("etl", "r1", "a"))
    assert ("stream", "3 events handled, 1 waits for a batch of 3") in told.facts
    tasks.fire(5, 6)
    tasks.fail_it()
    tasks.retry()
    tasks.stream_it(stream_wait(StreamOptions("batch", count=9)))
    told = store.inspect.why_task(store.inspect.find_task("etl", "r1", "a"))
    assert ("stream", "3 events handled, 3 wait for a batch of 9") in told.facts
    assert told.reason == "trigger_ending"


@pytest.mark.parametrize(("stored", "left"), [(3, "; 1 that are stored are handled by nobody"), (2, "")])
def test_why_says_what_a_task_that_has_ended_has_left_in_the_log(
    store: Store, query: Query, stored: int, left: str
) -> None:
    """Their messages are acknowledged, so no other run gets them."""
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(*range(stored))
    task, part = tasks.take()
    tasks.end(task.token, StepSucceeded(handled=handled(part, number=2)))
    told = store.inspect.why_task(store.inspect.find_task("etl", "r1", "a"))
    assert ("stream", f"2 events handled{left}") in told.facts
