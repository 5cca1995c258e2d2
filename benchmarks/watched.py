"""``headgate triggerer``, with what it does with its database noted on a board, and its commits slowed down if asked.

::

    python -m benchmarks.watched --board FILE [--moments] [--commit-delay SECONDS] triggerer

With SQLite the driver's connection is one of a subclass: it counts the statements, and after each that has left
something committed it waits. PostgreSQL has a proxy for that (`benchmarks.proxy`), and its supervisor runs unwatched.
``--moments`` only notes when each event was stored, by the number in its key, on both databases; it is the one thing
that touches headgate's own code.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import time
from sqlite3 import dbapi2
from typing import Any

from benchmarks.board import Board, open_board
from headgate.cli.main import main
from headgate.store.store import Store


def watch_sqlite(board: Board, commit_delay_s: float) -> None:
    """Have every connection that is opened from now on count its statements, and wait after its commits."""

    class Cursor(sqlite3.Cursor):
        def execute(self, *arguments: Any) -> Cursor:
            super().execute(*arguments)
            after_statement(self.connection)
            return self

        def executemany(self, *arguments: Any) -> Cursor:
            super().executemany(*arguments)
            after_statement(self.connection)
            return self

    class Connection(sqlite3.Connection):
        changes_before = 0

        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

        def execute(self, *arguments: Any) -> Any:
            return self.cursor().execute(*arguments)

        def executemany(self, *arguments: Any) -> Any:
            return self.cursor().executemany(*arguments)

        def commit(self) -> None:
            super().commit()
            after_statement(self)

    def after_statement(connection: Any) -> None:
        board.add("statements")
        if commit_delay_s and not connection.in_transaction and connection.total_changes > connection.changes_before:
            connection.changes_before = connection.total_changes
            time.sleep(commit_delay_s)

    connect = sqlite3.connect

    def connect_watched(*arguments: Any, **options: Any) -> Any:
        return connect(*arguments, **{"factory": Connection, **options})

    sqlite3.connect = dbapi2.connect = connect_watched


def note_moments(board: Board) -> None:
    """Have the store note when it has committed an event, by the event's key, which is its number."""
    store_slice = Store.store_slice

    def store_and_note(self: Store, *arguments: Any, **options: Any) -> Any:
        result = store_slice(self, *arguments, **options)
        now = time.monotonic()
        for event in options["events"]:
            board.stored_at[int(event.key)] = now
        return result

    Store.store_slice = store_and_note  # type: ignore[method-assign]


def prepare() -> None:
    """Read our own flags, and leave the rest to headgate's command line."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.watched")
    flags.add_argument("--board", required=True)
    flags.add_argument("--commit-delay", type=float, default=0.0)
    flags.add_argument("--moments", action="store_true")
    given, rest = flags.parse_known_args()
    board = open_board(given.board)
    if given.moments:
        note_moments(board)
    else:
        watch_sqlite(board, given.commit_delay)
    sys.argv[1:] = rest


if __name__ == "__main__":
    prepare()
    main()
