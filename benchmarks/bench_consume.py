"""A consumer that takes stored events in batches, and writes a row of its own for each, in the same transaction."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any

import psycopg
from sqlalchemy import BigInteger, Column, MetaData, Table
from sqlalchemy.engine import make_url

from benchmarks import nothing
from benchmarks.databases import Database, add_triggers, bare_driver, fresh, moment
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from headgate.client import open_client
from headgate.protocol.values import encode_value

BATCH_EVENTS = 100
EVENTS = "events"
BILLS = Table("users_bill", MetaData(), Column("event_id", BigInteger, primary_key=True), Column("amount", BigInteger))
PLACE = "users_place"  # what a program without headgate has instead of a consumer


def run_consumer(kind: str, *, events: int, at_once: bool = False) -> Figures:
    """Hand over all events of a watcher; return the events a second.

    ``at_once``: PostgreSQL gets the rows of a batch by one INSERT, and not one by one.
    """
    return _run(kind, events, lambda database: _consume(database, at_once=at_once))


def run_driver(kind: str, *, events: int, at_once: bool = False) -> Figures:
    """Have the bare driver read the same rows, write as many, and move its own place, as many a commit."""
    if kind == "sqlite":
        return _run(kind, events, _drive_sqlite)
    return _run(kind, events, lambda database: _drive_postgresql(database, at_once=at_once))


def _run(kind: str, events: int, consume: Callable[[Database], None]) -> Figures:
    payload = encode_value({"order": 1, "amount": 1800}, where="payload")
    with fresh(kind) as database:
        add_triggers(database, "nobody.Loads", [{}])
        driver = bare_driver(database)
        driver.store([nothing.event_row(1, index, str(index), payload, moment(kind)) for index in range(events)])
        driver.close()
        engine = database.engine()
        with engine.begin() as connection:
            BILLS.metadata.create_all(connection)
            connection.exec_driver_sql(f"CREATE TABLE {PLACE} (event_id BIGINT NOT NULL)")
            connection.exec_driver_sql(f"INSERT INTO {PLACE} VALUES (0)")
        engine.dispose()
        begun = time.monotonic()
        consume(database)
        took_s = time.monotonic() - begun
        rows = database.count(BILLS.name)
    if rows != events:
        raise BenchFailed(f"{rows:,} rows are written for {events:,} events")
    return {EVENTS: events / took_s}


def _consume(database: Database, *, at_once: bool) -> None:
    with open_client(database.url) as client:
        consumer = client.add_consumer("billing", "w1")
        while True:
            with consumer.batch(BATCH_EVENTS) as batch:
                if not len(batch):
                    return
                if at_once:
                    rows = [event.id for event in batch], [event.payload["amount"] for event in batch]
                    batch.connection.exec_driver_sql(_WRITE_AT_ONCE, rows)
                    continue
                place = "?" if database.kind == "sqlite" else "%s"
                bills = [(event.id, event.payload["amount"]) for event in batch]
                batch.connection.exec_driver_sql(_WRITE.format(place, place), bills)


_READ = "SELECT id, payload FROM trigger_event WHERE trigger_id = 1 AND id > {} ORDER BY id LIMIT " + str(BATCH_EVENTS)
_WRITE = "INSERT INTO users_bill (event_id, amount) VALUES ({}, {})"
_WRITE_AT_ONCE = "INSERT INTO users_bill SELECT * FROM unnest(%s::bigint[], %s::bigint[])"
_MOVE = f"UPDATE {PLACE} SET event_id = {{}}"


def _bills(rows: list[Any]) -> list[tuple[int, int]]:
    return [(id_, json.loads(payload)["amount"]) for id_, payload in rows]


def _drive_sqlite(database: Database) -> None:
    path = make_url(database.url).database
    assert path is not None
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    while True:
        connection.execute("BEGIN IMMEDIATE")
        (place,) = connection.execute(f"SELECT event_id FROM {PLACE}").fetchone()
        rows = connection.execute(_READ.format("?"), (place,)).fetchall()
        if rows:
            connection.executemany(_WRITE.format("?", "?"), _bills(rows))
            connection.execute(_MOVE.format("?"), (rows[-1][0],))
        connection.execute("COMMIT")
        if not rows:
            connection.close()
            return


def _drive_postgresql(database: Database, *, at_once: bool) -> None:
    with psycopg.connect(database.url) as connection, connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")
        connection.commit()
        while True:
            place = cursor.execute(f"SELECT event_id FROM {PLACE} FOR UPDATE".encode()).fetchone()
            assert place is not None
            rows = cursor.execute(_READ.format("%s").encode(), place).fetchall()
            if rows:
                if at_once:
                    cursor.execute(
                        _WRITE_AT_ONCE.encode(), [list(column) for column in zip(*_bills(rows), strict=True)]
                    )
                else:
                    cursor.executemany(_WRITE.format("%s", "%s").encode(), _bills(rows))
                cursor.execute(_MOVE.format("%s").encode(), (rows[-1][0],))
            connection.commit()
            if not rows:
                return


def cases(options: Options) -> list[Case]:
    """Return one case for each database and way to write."""
    events = options.of(20_000, 5000, 1000)
    ways = [
        (kind, at_once) for kind in options.databases for at_once in (False, True) if kind != "sqlite" or not at_once
    ]
    return [
        Case(
            f"{kind}, {BATCH_EVENTS} a batch" + (", one INSERT each" if at_once else ""),
            [Figure(EVENTS, "events/s", Target(ratio_min=0.5, value_min=20_000))],
            lambda kind=kind, at_once=at_once: run_consumer(kind, events=events, at_once=at_once),  # type: ignore[misc]
            lambda kind=kind, at_once=at_once: run_driver(kind, events=events, at_once=at_once),  # type: ignore[misc]
        )
        for kind, at_once in ways
    ]


BENCH = Bench(
    "consume",
    "consume: stored events handed over into a transaction with one row of the user for each",
    "the bare driver reading the same events, writing the same rows and moving a place, as many a commit",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
