"""The database of a crash test, from outside: who is connected to it, who is fenced, and how to cut them off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psycopg
from psycopg import sql
from sqlalchemy import make_url
from tests.proof.crash.reader import CONNECT_TIMEOUT_S, open_reader

_FENCED = "SELECT count(*) FROM triggerer WHERE pid = :pid AND fenced_at IS NOT NULL"
_BACKENDS = """
SELECT pid, extract(epoch FROM backend_start)::text, state LIKE 'idle in transaction%' OR state = 'active'
FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'headgate'
"""
_TERMINATE = "SELECT pg_terminate_backend(:pid)"


class Backend(NamedTuple):
    """The server's end of one connection: a pid may come again, with another start."""

    pid: int
    started: str


class Connections:
    """One database, looked at by our own means. `close` it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._reader = open_reader(url)

    def close(self) -> None:
        """Close our own connection."""
        self._reader.close()

    def is_fenced(self, pid: int) -> bool:
        """Whether another supervisor has taken over from this process."""
        return bool(self._number(_FENCED, pid=pid))

    def backends(self) -> dict[Backend, bool]:
        """PostgreSQL: every connection of headgate to this database, and whether it is in a transaction."""
        return {Backend(pid, started): busy for pid, started, busy in self._reader.ask(_BACKENDS)}

    def terminate(self, backends: Iterable[Backend]) -> None:
        """PostgreSQL: ask the server to end these connections, which it does soon."""
        for backend in backends:
            self._reader.ask(_TERMINATE, pid=backend.pid)

    @contextmanager
    def away(self) -> Iterator[None]:
        """PostgreSQL: let nobody connect, and end every connection of headgate; the one of ours stays."""
        url = make_url(self._url)
        name = sql.Identifier(url.database or "")
        admin_url = url.set(database="postgres").render_as_string(hide_password=False)
        with psycopg.connect(admin_url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S) as admin:
            try:
                admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
                self.terminate(self.backends())
                yield
            finally:
                admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))

    def _number(self, statement: str, **parameters: int) -> int:
        ((number,),) = self._reader.ask(statement, **parameters)
        return int(number)
