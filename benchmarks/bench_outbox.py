"""From the rows of a table of PostgreSQL to their deletion: how many events a second a pair stores.

The server is the one at ``HEADGATE_TEST_POSTGRES_URL``, with a table of the benchmark's own, which is removed. Where
headgate's database is on PostgreSQL, too, it is on the same server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Generator, Sequence
from functools import cache

import psycopg
from psycopg.rows import TupleRow

from benchmarks.bare_brokers import BareMessage, BareSource, bench_of
from benchmarks.harness import BenchFailed, main

OUTBOX_URL = os.environ.get("HEADGATE_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")


@cache
def outbox_answers() -> bool:
    """Whether a server answers."""
    try:
        psycopg.connect(OUTBOX_URL, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


class BareTable(BareSource):
    """A table whose rows are deleted by their ids."""

    uri = OUTBOX_URL
    classpath = "headgate.brokers.postgres.PostgresOutboxTrigger"

    def __init__(self, connection: psycopg.Connection[TupleRow], table: str) -> None:
        self._connection = connection
        self._table = table.encode()
        self.kwargs = {"table": table}

    def read(self, count: int) -> list[BareMessage]:
        """Read the first rows."""
        rows = self._connection.execute(b"SELECT id, payload FROM %b ORDER BY id LIMIT %%s" % self._table, [count])
        table = self._table.decode()
        return [
            BareMessage(
                number, str(number), {"id": str(number), "table": table, "row": {"id": number, "payload": body}}
            )
            for number, body in rows
        ]

    def acknowledge(self, messages: Sequence[BareMessage]) -> None:
        """Delete all in one statement."""
        ids = [message.handle for message in messages]
        self._connection.execute(b"DELETE FROM %b WHERE id = ANY (%%s)" % self._table, [ids])

    def unacknowledged(self) -> int:
        """Return the rows that are there."""
        row = self._connection.execute(b"SELECT count(*) FROM %b" % self._table).fetchone()
        assert row is not None
        return int(row[0])


@contextlib.contextmanager
def filled(rows: int) -> Generator[BareSource]:
    """Yield a table with so many rows."""
    if not outbox_answers():
        raise BenchFailed("no PostgreSQL server answers at HEADGATE_TEST_POSTGRES_URL")
    table = f"headgate_bench_{secrets.token_hex(6)}"
    name = table.encode()
    with psycopg.connect(OUTBOX_URL, autocommit=True) as connection:
        try:
            connection.execute(b"CREATE TABLE %b (id bigserial PRIMARY KEY, payload jsonb)" % name)
            body = "jsonb_build_object('order', n, 'amount', '1800', 'customer', 'a customer''s name')"
            insert = f"INSERT INTO {table} (payload) SELECT {body} FROM generate_series(1, %s) AS n"
            connection.execute(insert.encode(), [rows])
            connection.execute(b"ANALYZE %b" % name)
            yield BareTable(connection, table)
        finally:
            connection.execute(b"DROP TABLE IF EXISTS %b" % name)


BENCH = bench_of("outbox", "from the rows of a table of PostgreSQL to their deletion", filled)

if __name__ == "__main__":
    sys.exit(main(BENCH))
