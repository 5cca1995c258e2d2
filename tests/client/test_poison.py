"""Events that a program cannot take: found, counted, set aside, and handed over again; none lost, none twice."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, text
from tests.client.harness import BILLS, Watched, bills, client_of, payloads, row
from tests.store.harness import Query
from tests.waiting import WITHIN_S

from headgate.client import BatchEnded, Client, Consumer, ConsumerBusy
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.store import cleaning
from headgate.store.consuming import failures, places, set_aside
from headgate.store.consuming.failures import ASIDE_IN_A_ROW_MAX, UNFINISHED, UNFINISHED_AFTER_S
from headgate.store.consuming.set_aside import ConsumerLetter
from headgate.store.db.engine import open_engine
from headgate.store.errors import NoSuchRow, NotSetAside, ValueRefused
from headgate.store.store import Store

ROOT = Path(__file__).parents[2]
TRIES_MAX = 100  # of a loop that gets all events


class Refused(Exception):
    """Raised by the program of the user."""


@pytest.fixture
def consumer(client: Client) -> Consumer:
    return client.add_consumer("billing", "orders", max_deliveries=2)


def bill(consumer: Consumer, limit: int = 100, *, refused: str = "bad") -> list[Any]:
    """Write a bill for each event of a batch, but refuse some; return the payloads."""
    with consumer.batch(limit) as batch:
        for event in batch:
            batch.connection.execute(insert(BILLS).values(event_id=event.id, payload=event.payload))
            if event.payload.startswith(refused):
                raise Refused(event.payload)
        return payloads(batch)


def drain(consumer: Consumer, **how: Any) -> list[list[Any] | str]:
    """Go on until a batch is empty; return the batches that were taken, and the errors of the others."""
    done: list[list[Any] | str] = []
    for _ in range(TRIES_MAX):
        try:
            got = bill(consumer, **how)
        except Refused as error:
            done.append(str(error))
            continue
        if not got:
            return done
        done.append(got)
    raise AssertionError(f"no end: {done[-3:]}")


def letters(watched: Watched) -> list[ConsumerLetter]:
    return watched.store.consumers.letters("billing")


def age_record(query: Query) -> None:
    """Let a record of a batch look as old as one that nobody hands over any more."""
    query("UPDATE consumer SET taken_at = '2026-01-01 00:00:00.000000' WHERE taken_at IS NOT NULL")


# --- an exception ---------------------------------------------------------------------------------


def test_a_bad_event_is_found_tried_again_and_set_aside_and_all_others_are_taken(
    watched: Watched, consumer: Consumer
) -> None:
    watched.store_events("a", "bad", "c", "d")
    assert drain(consumer) == ["bad", ["a"], "bad", "bad", ["c"], ["d"]]
    assert bills(watched) == ["a", "c", "d"]
    (letter,) = letters(watched)
    assert (letter.deliveries, letter.error, letter.state) == (2, "Refused: bad", "open")
    assert "in bill" in letter.traceback
    found = row(watched)
    assert (found.handed_over, found.behind, found.failures, found.set_aside) == (3, 0, 0, 1)
    watched.store_events("e", "f")
    assert drain(consumer) == [["e", "f"]]


class Unspeakable(Exception):
    """Raised by the program of the user, too."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (Unspeakable(), "Unspeakable, whose text cannot be shown: its __str__ raised RuntimeError"),
        (Refused("\0\ud800" + "x" * 100_000), r"Refused: \x00\ud800xx"),
    ],
)
def test_whatever_a_block_raises_is_counted_and_stored(
    watched: Watched, consumer: Consumer, error: Exception, shown: str
) -> None:
    watched.store_events("bad")
    for _ in range(2):
        with pytest.raises(type(error)), consumer.batch(1):
            raise error
    (letter,) = letters(watched)
    assert str(letter.error).startswith(shown)
    watched.store.consumers.redeliver("billing")
    with pytest.raises(type(error)), consumer.batch(1):
        raise error
    (again,) = letters(watched)
    assert (again.deliveries, again.error) == (letter.deliveries + 1, letter.error)
    assert len(again.traceback or "") <= ERROR_CHARS_MAX


def test_after_the_events_of_the_failed_batch_batches_are_whole_again(watched: Watched, consumer: Consumer) -> None:
    watched.store_events("a", "bad", "c", *"defg")
    assert drain(consumer, limit=3) == ["bad", ["a"], "bad", "bad", ["c"], ["d", "e", "f"], ["g"]]


def test_with_no_limit_the_event_is_handed_over_again_and_again(watched: Watched, client: Client) -> None:
    consumer = client.add_consumer("billing", "orders", max_deliveries=0)
    watched.store_events("bad", "b")
    for _ in range(20):
        with pytest.raises(Refused):
            bill(consumer)
    assert letters(watched) == []
    assert row(watched).failures == 19  # the first batch had two events
    watched.store.consumers.set_max_deliveries("billing", 1)
    assert drain(consumer) == ["bad", ["b"]]
    with pytest.raises(ValueRefused, match="from 1 to 1,000, or 0 for no limit: -1"):
        watched.store.consumers.set_max_deliveries("billing", -1)


def test_if_nothing_can_be_taken_the_consumer_stays_where_it_is(watched: Watched, consumer: Consumer) -> None:
    watched.store_events(*(f"bad {number}" for number in range(ASIDE_IN_A_ROW_MAX + 5)), "good")
    for _ in range(3 * ASIDE_IN_A_ROW_MAX):
        with pytest.raises(Refused):
            bill(consumer)
    assert len(letters(watched)) == ASIDE_IN_A_ROW_MAX
    assert (row(watched).behind, row(watched).failures) == (6, 3 * ASIDE_IN_A_ROW_MAX - 1 - 2 * ASIDE_IN_A_ROW_MAX)
    assert drain(consumer, refused="never")[0] == [f"bad {ASIDE_IN_A_ROW_MAX}"]
    assert row(watched).aside_in_a_row == 0


@pytest.mark.parametrize("reason", [KeyboardInterrupt, SystemExit, BatchEnded])
def test_what_is_no_fault_of_the_event_is_not_counted(
    watched: Watched, consumer: Consumer, reason: type[BaseException]
) -> None:
    watched.store_events("a")

    def stop() -> None:
        with consumer.batch():
            raise reason

    for _ in range(5):
        with pytest.raises(reason):
            stop()
    assert (row(watched).failures, letters(watched)) == (0, [])
    assert bill(consumer) == ["a"]


def test_a_connection_that_is_cut_is_not_counted(postgres_url: str, secrets: Any) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        watched = Watched(store)
        watched.store_events("a")
        with client_of(store) as client:
            consumer = client.add_consumer("billing", "orders", max_deliveries=1)

            def cut() -> None:
                with consumer.batch() as batch:
                    batch.connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

            with pytest.raises(Exception, match="terminating connection"):
                cut()
            assert (row(watched).failures, letters(watched)) == (0, [])


def test_an_error_after_the_block_has_closed_its_connection_stays_what_it_is(
    watched: Watched, consumer: Consumer
) -> None:
    watched.store_events("a")

    def close() -> None:
        with consumer.batch() as batch:
            batch.connection.close()
            raise Refused("mine")

    with pytest.raises(Refused, match="mine"):
        close()
    assert (row(watched).failures, bill(consumer)) == (0, ["a"])


def test_a_worker_that_has_lost_its_place_counts_nothing(watched: Watched, consumer: Consumer) -> None:
    watched.store_events("a", "b")
    with watched.store.database.reading() as tx:
        before = places.look(tx, "billing")
    bill(consumer, 1)
    with watched.store.database.writing() as tx:
        failures.count_failure(tx, before, before.cursor, "late", "")
    assert (row(watched).failures, row(watched).last_error) == (0, None)


# --- the end of a process -------------------------------------------------------------------------

ENDED = 7
_PROGRAM = f"""
import os, sys
from sqlalchemy import text
from headgate.client import open_client
with open_client(os.environ["DATABASE"]) as client:
    consumer = client.consumer("billing")
    while True:
        with consumer.batch() as batch:
            if not len(batch):
                sys.exit(0)
            for event in batch:
                row = {{"event_id": event.id, "payload": event.payload}}
                batch.connection.execute(text("INSERT INTO users_bill VALUES (:event_id, :payload)"), row)
                if event.payload == "bad":
                    os._exit({ENDED})
"""


def run_program(watched: Watched) -> int:
    opened = watched.store.database.engine
    url = opened.url
    if opened.dialect.name == "postgresql":  # 5 s are too few for a process that gets no CPU while it connects
        url = url.update_query_dict({"connect_timeout": f"{WITHIN_S:.0f}"})
    environment = {**os.environ, "DATABASE": url.render_as_string(hide_password=False)}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, cwd=ROOT, check=False)
    return done.returncode


def test_an_event_that_ends_the_process_is_set_aside_too(watched: Watched, consumer: Consumer, query: Query) -> None:
    watched.store_events("a", "bad", "c")
    codes = []
    for _ in range(4):
        codes.append(run_program(watched))
        age_record(query)
    # In the batch of three; alone, which is known by then; alone again; and without it.
    assert codes == [ENDED, ENDED, ENDED, 0]
    assert bills(watched) == ["a", "c"]
    (letter,) = letters(watched)
    assert (letter.deliveries, letter.error) == (2, UNFINISHED)
    assert (row(watched).handed_over, row(watched).behind) == (2, 0)


def test_a_record_that_is_young_is_of_a_worker_that_is_about_to_begin(watched: Watched, consumer: Consumer) -> None:
    watched.store_events("a", "b")
    for is_old in (False, True):
        with watched.store.database.writing() as tx:
            place = places.lock(tx, "billing")
            later = UNFINISHED_AFTER_S + 1 if is_old else 0.0
            tx._now = tx.now + timedelta(seconds=later)
            failures.record(tx, place, 1)
        assert row(watched).failures == int(is_old)
    assert bill(consumer) == ["a"]  # alone: it may be bad
    assert bill(consumer) == ["b"]


def test_a_worker_that_cannot_begin_what_it_has_recorded_counts_no_failure(
    watched: Watched, consumer: Consumer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has waited in vain for another worker, or for the database, and tries again; the code never had the event."""
    watched.store_events("a", "b")
    monkeypatch.setattr(failures, "UNFINISHED_AFTER_S", -1.0)  # each record is old
    lock, record = places.lock, failures.record
    recorded: list[Any] = []

    def recording(*arguments: Any) -> Any:
        recorded.append(record(*arguments))
        return recorded[-1]

    def busy(tx: Any, name: str) -> Any:
        if recorded:
            recorded.clear()
            raise ConsumerBusy(name, 5.0)
        return lock(tx, name)

    with monkeypatch.context() as patched:
        patched.setattr(failures, "record", recording)
        patched.setattr(places, "lock", busy)
        for _ in range(3):
            with pytest.raises(ConsumerBusy):
                bill(consumer)
    assert (row(watched).failures, row(watched).set_aside, row(watched).handed_over) == (0, 0, 0)
    assert bill(consumer) == ["a", "b"]
    # Another process does not know that nothing has begun.
    watched.store_events("c")
    with monkeypatch.context() as patched:
        patched.setattr(failures, "record", recording)
        patched.setattr(places, "lock", busy)
        with pytest.raises(ConsumerBusy):
            bill(client.consumer("billing"))
    with client_of(watched.store) as other:
        assert bill(other.consumer("billing")) == ["c"]
    assert row(watched).handed_over == 3


def test_workers_that_are_not_killed_leave_no_record(watched: Watched, consumer: Consumer, query: Query) -> None:
    watched.store_events("a")
    assert bill(consumer) == ["a"]
    assert bill(consumer) == []
    (found,) = query("SELECT taken_to, taken_at, careful_to, failures FROM consumer")
    assert found == {"taken_to": None, "taken_at": None, "careful_to": None, "failures": 0}


# --- letters --------------------------------------------------------------------------------------


@pytest.fixture
def bad_id(watched: Watched, consumer: Consumer) -> int:
    """The id of an event that was set aside; all others are taken."""
    watched.store_events("a", "bad", "c")
    drain(consumer)
    (letter,) = letters(watched)
    return letter.event_id


def test_an_event_that_was_set_aside_is_handed_over_again_once_in_a_batch_of_its_own(
    watched: Watched, consumer: Consumer, bad_id: int
) -> None:
    place = row(watched).cursor
    watched.store_events("d")
    assert watched.store.consumers.redeliver("billing", bad_id) == 1
    assert watched.store.consumers.redeliver("billing", bad_id) == 1  # changes nothing
    assert drain(consumer, refused="never") == [["bad"], ["d"]]
    assert bills(watched) == ["a", "bad", "c", "d"]
    assert letters(watched) == []
    (letter,) = watched.store.consumers.letters("billing", resolved=True)
    assert (letter.state, letter.deliveries) == ("handed_over", 3)
    assert row(watched).handed_over == 4
    assert row(watched).cursor > place
    with pytest.raises(NotSetAside, match="it was handed over before"):
        watched.store.consumers.redeliver("billing", bad_id)


def test_a_request_is_one_try(watched: Watched, consumer: Consumer, bad_id: int) -> None:
    watched.store.consumers.redeliver("billing")
    assert consumer.wait(0.0)
    assert drain(consumer) == ["bad"]
    (letter,) = letters(watched)
    assert (letter.state, letter.deliveries) == ("open", 3)
    assert not consumer.wait(0.0)
    assert (row(watched).failures, bills(watched)) == (0, ["a", "c"])


def test_an_event_that_is_handed_over_again_moves_no_place_if_its_process_ends(
    watched: Watched, consumer: Consumer, bad_id: int
) -> None:
    place = row(watched).cursor
    watched.store.consumers.redeliver("billing")
    assert run_program(watched) == ENDED
    assert row(watched).cursor == place
    assert [letter.state for letter in letters(watched)] == ["open"]
    assert run_program(watched) == 0


def test_a_worker_whose_letter_was_taken_by_another_leaves_it_alone(
    watched: Watched, consumer: Consumer, bad_id: int
) -> None:
    watched.store.consumers.redeliver("billing")
    with watched.store.database.writing() as tx:
        slow = set_aside.take(tx, places.lock(tx, "billing"))
    assert slow is not None
    assert bill(consumer, refused="never") == []  # it is the slow worker's
    watched.store.consumers.redeliver("billing")
    assert bill(consumer, refused="never") == ["bad"]
    with watched.store.database.writing() as tx:
        assert not set_aside.is_due(tx, slow)
    assert bills(watched) == ["a", "bad", "c"]


def test_an_event_that_is_discarded_is_not_handed_over(watched: Watched, consumer: Consumer, bad_id: int) -> None:
    watched.store.consumers.redeliver("billing")
    assert watched.store.consumers.discard("billing") == 1
    assert drain(consumer, refused="never") == []
    with pytest.raises(NotSetAside, match="has not set aside event 99; `headgate consumers letters billing`"):
        watched.store.consumers.discard("billing", 99)
    with pytest.raises(NoSuchRow):
        watched.store.consumers.discard("biling", bad_id)


def clean(watched: Watched, kind: cleaning.Kind) -> dict[str, int]:
    with watched.store.database.writing() as tx:
        return cleaning.clean_batch(tx, kind, tx.now + timedelta(days=1), after_id=0, rows_max=100).rows


def test_an_event_is_kept_as_long_as_its_letter_is_unresolved(watched: Watched, bad_id: int) -> None:
    assert clean(watched, "keyed_events") == {"trigger_event": 1}  # the one before it; the newest is kept
    assert clean(watched, "consumer_letters") == {}
    watched.store.consumers.discard("billing", bad_id)
    assert clean(watched, "keyed_events") == {"trigger_event": 1}
    assert clean(watched, "consumer_letters") == {"consumer_letter": 1}


def test_a_consumer_is_removed_with_its_letters(watched: Watched, client: Client, bad_id: int, query: Query) -> None:
    client.remove_consumer("billing")
    assert query("SELECT * FROM consumer_letter") == []


def test_a_consumer_that_stands_still_and_events_set_aside_are_told(watched: Watched, consumer: Consumer) -> None:
    watched.store_events("bad 1", "bad 2")
    watched.store.consumers.set_max_deliveries("billing", 3)

    def told() -> list[tuple[str, str, str]]:
        found = watched.store.inspect.status()
        return [
            (problem.severity, problem.reason, problem.text)
            for problem in found
            if problem.reason in ("consumer_fails", "set_aside")
        ]

    for _ in range(3):
        with pytest.raises(Refused):
            bill(consumer)
    text = "1 consumer cannot take the next event: billing, 2 times: Refused: bad 1"
    assert told() == [("attention", "consumer_fails", text)]
    with pytest.raises(Refused):
        bill(consumer)
    ((severity, reason, text),) = told()
    assert (severity, reason) == ("attention", "set_aside")
    assert text.startswith("1 event set aside by 1 consumer, the newest ")
    watched.store.consumers.set_max_deliveries("billing", 0)
    for _ in range(3):
        with pytest.raises(Refused):
            bill(consumer)
    assert told()[0][:2] == ("broken", "consumer_fails")
