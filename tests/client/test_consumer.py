"""Consumers: the user's rows and the consumer's place are committed together, or neither is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from tests.client.harness import BILLS, Watched, bills, client_of, payloads, row
from tests.store.harness import Query, add, wait_until_blocked
from tests.waiting import WITHIN_S

from headgate.client import (
    BatchEnded,
    Client,
    Consumer,
    ConsumerBusy,
    ConsumerExists,
    Cursor,
    CursorRefused,
    NoSuchRow,
    NoSuchWatcher,
    StatementFailed,
    ValueRefused,
)
from headgate.store import cleaning
from headgate.store.consuming import places
from headgate.store.db.engine import open_engine
from headgate.store.errors import BadName, DatabaseAway, TransactionOpen
from headgate.store.store import Store


@pytest.fixture
def consumer(client: Client) -> Consumer:
    return client.add_consumer("billing", "orders")


def bill(consumer: Consumer, limit: int = 100) -> list[Any]:
    """Write a bill for each event of a batch; return the payloads."""
    with consumer.batch(limit) as batch:
        for event in batch:
            batch.connection.execute(insert(BILLS).values(event_id=event.id, payload=event.payload))
        return payloads(batch)


def test_each_event_is_handed_over_once_in_batches(watched: Watched, consumer: Consumer) -> None:
    watched.store_events(*"abcde")
    assert [bill(consumer, 2) for _ in range(4)] == [["a", "b"], ["c", "d"], ["e"], []]
    assert bills(watched) == list("abcde")
    assert (row(watched).handed_over, row(watched).behind, row(watched).oldest_at) == (5, 0, None)
    watched.store_events("f")
    assert row(watched).behind == 1
    assert bill(consumer) == ["f"]


def test_an_exception_rolls_back_the_rows_and_the_place_and_is_passed_on(watched: Watched, consumer: Consumer) -> None:
    watched.store_events("a")
    unlike_ours = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "the user's own")  # the store has a meaning for it

    def fail() -> None:
        with consumer.batch() as batch:
            batch.connection.execute(insert(BILLS).values(event_id=1, payload="lost"))
            raise unlike_ours

    with pytest.raises(UnicodeDecodeError) as raised:
        fail()
    assert raised.value is unlike_ours
    assert bills(watched) == []
    assert row(watched).handed_over == 0
    assert bill(consumer) == ["a"]


@pytest.mark.parametrize("statement", ["ROLLBACK", "COMMIT"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_block_that_ends_its_transaction_by_sql_is_told_and_moves_no_place(
    watched: Watched, consumer: Consumer, statement: str, goes_on: bool
) -> None:
    if goes_on and watched.store.database.engine.dialect.name == "sqlite":
        pytest.skip("the driver of SQLite begins no other transaction by itself")
    watched.store_events("a")

    def end() -> None:
        with consumer.batch() as batch:
            batch.connection.execute(insert(BILLS).values(event_id=1, payload="a"))
            batch.connection.exec_driver_sql(statement)
            if goes_on:
                batch.connection.exec_driver_sql("SELECT 1")

    with pytest.raises(BatchEnded):
        end()
    assert (row(watched).handed_over, row(watched).failures) == (0, 0)
    assert bills(watched) == ["a"] * (statement == "COMMIT")


def test_within_a_batch_the_same_client_is_refused_and_the_batch_goes_on(
    watched: Watched, client: Client, consumer: Consumer
) -> None:
    watched.store_events("a")
    with consumer.batch() as batch:
        for use in (
            lambda: client.send_signal("k", 1),
            lambda: client.newest("orders"),
            lambda: client.events("orders"),
            lambda: client.consumer("billing"),
        ):
            with pytest.raises(TransactionOpen, match="within its block use another"):
                use()
        batch.connection.execute(insert(BILLS).values(event_id=1, payload="a"))
    assert (bills(watched), row(watched).handed_over) == (["a"], 1)
    client.send_signal("k", 1)


def test_an_error_of_the_users_own_statement_stays_what_it_is(watched: Watched, consumer: Consumer) -> None:
    watched.store_events("a")

    def twice() -> None:
        with consumer.batch() as batch:
            for _ in range(2):
                batch.connection.execute(insert(BILLS).values(event_id=1, payload="a"))

    with pytest.raises(IntegrityError):
        twice()
    assert bill(consumer) == ["a"]


def test_a_part_that_fails_may_be_rolled_back_by_itself(watched: Watched, consumer: Consumer) -> None:
    watched.store_events("good", "bad", "fine")
    with consumer.batch() as batch:
        for event in batch:
            try:
                with batch.connection.begin_nested():
                    batch.connection.execute(insert(BILLS).values(event_id=event.id, payload=event.payload))
                    if event.payload == "bad":
                        raise ValueError
            except ValueError:
                continue
    assert bills(watched) == ["good", "fine"]
    assert row(watched).behind == 0


@pytest.mark.parametrize("verb", ["commit", "rollback"])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_block_that_ends_the_transaction_itself_is_told_and_nothing_is_committed(
    watched: Watched, consumer: Consumer, verb: str, is_hidden: bool
) -> None:
    watched.store_events("a")

    def end() -> None:
        with consumer.batch() as batch:
            batch.connection.execute(insert(BILLS).values(event_id=1, payload="a"))
            try:
                getattr(batch.connection, verb)()
            except BatchEnded:
                if not is_hidden:
                    raise

    with pytest.raises(BatchEnded, match="must not call commit or rollback"):
        end()
    assert bills(watched) == []
    assert bill(consumer) == ["a"]


def test_what_comes_after_the_block_is_refused_and_holds_up_nobody(
    watched: Watched, client: Client, consumer: Consumer
) -> None:
    """One indentation too few: the rows would be lost, and on SQLite the database locked until the program ends."""
    watched.store_events("a", "b")
    with consumer.batch(1) as batch:
        pass
    for _ in range(2):
        with pytest.raises(BatchEnded, match="belongs into its block"):
            batch.connection.execute(insert(BILLS).values(event_id=1, payload="a"))
        with pytest.raises(BatchEnded), Session(batch.connection) as session:
            session.execute(insert(BILLS).values(event_id=1, payload="a"))
        assert client.newest("orders") == client.events("orders")[-1].cursor
        watched.store_events("more")
    assert bill(consumer) == ["b", "more", "more"]
    assert client.send_signal("k", 1).version == 1


def test_a_hidden_error_of_a_statement_counts_as_one_of_the_block(watched: Watched, consumer: Consumer) -> None:
    """SQLite goes on after it; PostgreSQL commits nothing more, and the reason was told wrong."""
    watched.store_events("a")
    row_of_a = insert(BILLS).values(event_id=1, payload="a")

    def hide() -> None:
        with consumer.batch() as batch:
            batch.connection.execute(row_of_a)
            with suppress(IntegrityError):
                batch.connection.execute(row_of_a)

    if watched.store.database.engine.dialect.name == "sqlite":
        hide()
        assert bills(watched) == ["a"]
        return
    with pytest.raises(StatementFailed, match="begin_nested"):
        hide()
    assert (bills(watched), row(watched).failures) == ([], 1)
    assert str(row(watched).last_error).startswith("StatementFailed: a statement in the block has failed")


def test_an_empty_batch_commits_the_rows_of_the_user_too(watched: Watched, consumer: Consumer) -> None:
    with consumer.batch() as batch:
        assert len(batch) == 0
        batch.connection.execute(insert(BILLS).values(event_id=1, payload="heartbeat"))
    assert bills(watched) == ["heartbeat"]


def test_a_consumer_begins_where_it_is_told_and_stays_there_when_it_is_added_again(
    watched: Watched, client: Client
) -> None:
    watched.store_events("old")
    consumer = client.add_consumer("billing", "orders", after=client.newest("orders"))
    watched.store_events("new")
    assert bill(client.add_consumer("billing", "orders")) == ["new"]
    assert bill(consumer) == []
    assert bill(client.consumer("billing")) == []


def test_a_consumer_may_be_added_again_when_its_watcher_is_cleaned_away(
    watched: Watched, client: Client, query: Query
) -> None:
    """Every start of its program adds it, and must not fail because of what became of the watcher."""
    client.add_consumer("billing", "orders")
    watched.store.remove_watcher("orders")
    query("DELETE FROM asset_watcher")
    assert client.add_consumer("billing", "orders").name == "billing"
    with pytest.raises(NoSuchWatcher):
        client.add_consumer("more", "orders")


def test_a_consumer_that_is_unknown_or_of_another_watcher_is_refused(watched: Watched, client: Client) -> None:
    add(watched.store, "others")
    client.add_consumer("billing", "orders")
    with pytest.raises(NoSuchRow, match="no consumer named 'biling'; did you mean billing"):
        client.consumer("biling")
    with pytest.raises(ConsumerExists, match="named 'billing' already, of the watcher 'orders'"):
        client.add_consumer("billing", "others")
    with pytest.raises(NoSuchWatcher):
        client.add_consumer("more", "ordres")
    with pytest.raises(CursorRefused, match="beyond the end"):
        client.add_consumer("more", "orders", after=Cursor(watched.trigger_id, 10**6))
    for wrong in (5, None):
        with pytest.raises(BadName, match=f"the name of a consumer must be a str, not {wrong}"):
            client.add_consumer(wrong, "orders")  # type: ignore[arg-type]
    with pytest.raises(ValueRefused, match="max_deliveries must be from 1 to 1,000, or 0 for no limit: 'a'"):
        client.add_consumer("typed", "orders", max_deliveries="a")  # type: ignore[arg-type]
    with pytest.raises(BadName):
        client.add_consumer("", "orders")
    assert [one.name for one in watched.store.consumers.all()] == ["billing"]


def test_a_consumer_that_was_removed_gets_nothing(client: Client, consumer: Consumer) -> None:
    client.remove_consumer("billing")
    with pytest.raises(NoSuchRow, match="no consumer named 'billing'"), consumer.batch():
        pytest.fail("there is no batch")
    with pytest.raises(NoSuchRow):
        client.remove_consumer("billing")


def test_events_that_a_consumer_has_yet_to_get_are_not_cleaned_away(watched: Watched, consumer: Consumer) -> None:
    watched.store_events("a", "b", "c")
    bill(consumer, 1)

    def clean() -> int:
        with watched.store.database.writing() as tx:
            later = tx.now + timedelta(days=1)
            done = cleaning.clean_batch(tx, "keyed_events", later, after_id=0, rows_max=100)
        return done.rows.get("trigger_event", 0)

    assert clean() == 1  # the one that it has got
    assert bill(consumer) == ["b", "c"]
    assert clean() == 1  # the newest is kept


# --- PostgreSQL: two workers ---------------------------------------------------------------------


def test_a_second_worker_waits_for_the_first_and_gets_the_next_events(postgres_url: str, secrets: Any) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        watched = Watched(store)
        watched.store_events("a", "b")
        with client_of(store) as one, client_of(store) as two, ThreadPoolExecutor(1) as pool:
            first, second = (client.add_consumer("billing", "orders") for client in (one, two))
            with first.batch(1) as batch:
                assert payloads(batch) == ["a"]
                waiting = pool.submit(lambda: _handed(second))
                wait_until_blocked(open_engine(postgres_url))
            assert waiting.result(WITHIN_S) == ["b"]


def _handed(consumer: Consumer) -> list[Any]:
    with consumer.batch() as batch:
        return payloads(batch)


def test_a_worker_that_waits_for_too_long_is_told_that_another_is_busy(postgres_url: str, secrets: Any) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        Watched(store)
        with client_of(store) as one, client_of(store) as two:
            first, second = (client.add_consumer("billing", "orders") for client in (one, two))
            with two._database.writing() as tx:
                tx.connection.execute(text("SET lock_timeout = '10ms'"))
            with (
                first.batch(),
                pytest.raises(ConsumerBusy, match="another worker of the consumer 'billing'"),
                second.batch(),
            ):
                pytest.fail("the other one has it")
            assert _handed(second) == []


def test_a_connection_that_is_cut_in_a_batch_is_the_users_error_and_the_next_batch_works(
    postgres_url: str, secrets: Any
) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        watched = Watched(store)
        watched.store_events("a")
        with client_of(store) as client:
            consumer = client.add_consumer("billing", "orders")

            def cut() -> None:
                with consumer.batch() as batch:
                    batch.connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

            with pytest.raises(Exception, match="terminating connection"):
                cut()
            assert _handed(consumer) == ["a"]


def test_a_commit_whose_answer_is_lost_hands_over_nothing_twice(
    watched: Watched, consumer: Consumer, monkeypatch: pytest.MonkeyPatch, query: Query
) -> None:
    """The process loses the answer to its COMMIT: whether it arrived shows in the next batch."""
    watched.store_events("a", "b")
    real = places.move

    def lose_answer(tx: Any, place: Any, page: Any) -> None:
        real(tx, place, page)
        tx.connection.commit()
        raise DatabaseAway("here", "the answer was lost")

    monkeypatch.setattr(places, "move", lose_answer)
    with pytest.raises(DatabaseAway):
        bill(consumer, 1)
    monkeypatch.undo()
    assert bill(consumer) == ["b"]
    assert bills(watched) == ["a", "b"]
