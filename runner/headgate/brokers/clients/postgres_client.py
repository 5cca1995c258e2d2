"""Connections to PostgreSQL from stored ones: to a table of a user's that is read as a queue.

``postgresql://login:password@host:5432/database``. In the query are the options of TLS as libpq names them,
``sslmode``, ``sslrootcert``, ``sslcert`` and ``sslkey``. Of several hosts the first that takes writes is used.

This is the only module under ``runner/`` that imports a driver of databases. The database of headgate itself, whose URL
may well be another database of the same server, is still touched by the supervisor alone: nothing here ever gets it.
"""

from __future__ import annotations

import ipaddress
import re
import select
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import psycopg
from psycopg import errors, sql
from psycopg.abc import PQGen

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured, BrokerSourceMissing
from headgate.brokers.clients.connecting import readable_files
from headgate.triggers.named_values import Connection

__all__ = ["TROUBLE", "PostgresClient", "PostgresLocked", "PostgresPasses", "translated"]

SCHEMES: Final = ("postgresql", "postgres")
FILES: Final = ("sslrootcert", "sslcert", "sslkey")
MODES: Final = ("disable", "prefer", "require", "verify-ca", "verify-full")
OPTIONS: Final = ("sslmode", *FILES)
PORT: Final = 5432
CONNECT_TIMEOUT_S: Final = 5
ANSWER_S: Final = 30.0  # for one statement: a server that hangs is left
# How long a dead host keeps a connection: its lock is gone as soon as the server has noticed, so the server is told.
KEEPALIVE: Final = {"idle": 10, "interval": 5, "count": 3}
KEEPALIVE_MS: Final = 25_000

Row = tuple[Any, ...]
Result = TypeVar("Result")

TROUBLE: Final = (psycopg.OperationalError, psycopg.InterfaceError, OSError)
_MISSING: Final = (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName)
# The SQLSTATE of what a server refuses before there is a connection is not told, only its English text.
_REFUSALS: Final = re.compile(
    r"password authentication failed|no password supplied|no pg_hba\.conf entry|role \".*\" (?:does not exist|is not)|"
    r"database \".*\" does not exist|permission denied for database|authentication failed|valid client certificate"
)
_TLS_REFUSALS: Final = re.compile(
    r"certificate verify failed[^\n]*|does not match host name \"[^\"]*\"|server does not support SSL[^\n]*|"
    r"alert [a-z ]+|root certificate file \"[^\"]*\" does not exist|could not load private key[^\n]*|"
    r"could not read certificate file[^\n]*"
)


class PostgresPasses(ConnectionError):
    """The server cannot be used for now; among `TROUBLE`."""


class PostgresLocked(PostgresPasses):
    """Another transaction has locked what a statement is about."""


class _Connection(psycopg.Connection[Row]):
    """A connection that does not wait for ever for a server that hangs."""

    def wait(self, gen: PQGen[Result], *args: Any, **kwargs: Any) -> Result:
        """Raise `PostgresPasses` if the answer takes longer than `ANSWER_S`; the connection cannot be used then."""
        return super().wait(_bounded(gen, time.monotonic() + ANSWER_S), *args, **kwargs)


def _bounded(gen: PQGen[Result], until: float) -> PQGen[Result]:
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() > until:
                raise PostgresPasses(f"the server has not answered for {ANSWER_S:g} s")
            state = gen.send(ready)
    except StopIteration as end:
        return cast("Result", end.value)


class PostgresClient:
    """One connection, of which each statement is a transaction. Every method raises what `translated` does."""

    def __init__(self, connection: Connection, name: str) -> None:
        """Connect to the first host that takes writes. ``name`` is what the server lists the connection as.

        Raises `BrokerMisconfigured` for a connection that cannot be used, and what `TROUBLE` names.
        """
        self._is_notified = False
        options = _options(connection)
        with translated(f"postgresql connection {connection.name!r}"):
            self._connection = _Connection.connect(**options, autocommit=True, application_name=f"headgate {name}"[:63])
            try:
                self._settle()
            except BaseException:
                self.close()
                raise

    def _settle(self) -> None:
        """Make the texts of values the same in every session, and have the server notice when we are gone."""
        settings = {
            "timezone": "UTC",
            "datestyle": "ISO",
            "intervalstyle": "iso_8601",
            "bytea_output": "hex",
            "extra_float_digits": "1",
            "default_transaction_read_only": "off",
            "statement_timeout": f"{int(ANSWER_S * 900)}ms",
            "lock_timeout": "2s",
        }
        if self._connection.info.host and not self._connection.info.host.startswith(("/", "@")):
            settings |= {f"tcp_keepalives_{name}": str(value) for name, value in KEEPALIVE.items()}
            settings["tcp_user_timeout"] = str(KEEPALIVE_MS)
        for setting, value in settings.items():
            self.rows("SELECT set_config(%(setting)s, %(value)s, false)", {"setting": setting, "value": value})

    @property
    def server_version(self) -> int:
        """The major version."""
        return self._connection.info.server_version // 10_000

    @property
    def is_behind_pooler(self) -> bool:
        """Whether something between us and the server has given itself for the server's process."""
        ((process_id,),) = self.rows("SELECT pg_backend_pid()")
        return bool(process_id != self._connection.info.backend_pid)

    @property
    def is_readable_on_the_way(self) -> bool:
        """Whether the connection goes over a network without TLS."""
        info = self._connection.info
        if self._connection.pgconn.ssl_in_use or not info.hostaddr:
            return False
        return not ipaddress.ip_address(info.hostaddr.split("%")[0]).is_loopback

    def rows(self, statement: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Return the rows of one statement with ``%(name)s``; an empty list for one that returns none."""
        cursor = self._connection.execute(statement.encode(), parameters)
        return [] if cursor.description is None else cursor.fetchall()

    def listen(self, channel: str) -> None:
        """Have `wait` end for notifications of a channel."""
        self._connection.add_notify_handler(self._note)  # of those that come with the answer to a statement
        self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    def _note(self, _: object) -> None:
        self._is_notified = True

    def wait(self, wait_s: float) -> bool:
        """Wait for a notification, so long at most; return whether there was one.

        By the socket itself: many streams wait like this all day, and the client's own generator costs twice as much.
        """
        link = self._connection.pgconn
        if not self._is_notified:
            poll = select.poll()
            poll.register(link.socket, select.POLLIN)
            poll.poll(max(0.0, wait_s) * 1000)
            link.consume_input()
            while link.notifies() is not None:
                self._is_notified = True
        is_notified, self._is_notified = self._is_notified, False
        return is_notified

    def close(self) -> None:
        """Close it; the server ends its locks."""
        self._connection.close()


def _options(connection: Connection) -> dict[str, Any]:
    where = f"the connection {connection.name!r}"
    if connection.scheme not in SCHEMES:
        raise BrokerMisconfigured(f"{where} must begin with postgresql://, not {connection.scheme}://")
    for option in connection.extra:
        if option not in OPTIONS:
            raise BrokerMisconfigured(f"{where} has the option {option!r}; the options are {', '.join(OPTIONS)}")
    mode = connection.extra.get("sslmode", "prefer")
    if mode not in MODES:
        raise BrokerMisconfigured(f"{where}: sslmode must be one of {', '.join(MODES)}, not {mode!r}")
    hosts = connection.hosts or (("localhost", None),)
    return {
        "host": ",".join(host or "localhost" for host, _ in hosts),
        "port": ",".join(str(port or PORT) for _, port in hosts),
        "user": connection.login or "postgres",
        "password": connection.password or None,
        "dbname": connection.schema or connection.login or "postgres",
        "sslmode": mode,
        **readable_files(connection, FILES),
        "target_session_attrs": "read-write",
        "connect_timeout": CONNECT_TIMEOUT_S,
        **{f"keepalives_{name}": value for name, value in KEEPALIVE.items()},
        "tcp_user_timeout": KEEPALIVE_MS,
        "client_encoding": "UTF8",
    }


@contextmanager
def translated(name: str) -> Generator[None]:
    """Raise what the driver raises as `BrokerMisconfigured` or `BrokerError`, if trying again would not help.

    Raises `PostgresLocked` where another transaction stands in the way.
    """
    try:
        yield
    except errors.LockNotAvailable as error:
        raise PostgresLocked(_text(error)) from error
    except errors.ReadOnlySqlTransaction as error:
        raise PostgresPasses(_text(error)) from error
    except errors.InsufficientPrivilege as error:
        raise BrokerMisconfigured(f"{name}: the server refuses access: {_text(error)}") from None
    except _MISSING as error:
        raise BrokerSourceMissing(f"{name}: it does not exist (any more): {_text(error)}") from None
    except psycopg.OperationalError as error:
        text = _text(error)
        if (tls := _TLS_REFUSALS.search(text)) is not None:
            raise BrokerMisconfigured(f"{name}: there is no TLS with the server: {tls.group()}") from None
        if (refusal := _REFUSALS.search(text)) is not None:
            raise BrokerMisconfigured(f"{name}: the server refuses access: {refusal.group()}") from None
        raise PostgresPasses(text) from error
    except psycopg.InterfaceError as error:
        raise PostgresPasses(_text(error)) from error
    except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
        raise BrokerMisconfigured(f"{name}: the server does not take a statement: {_text(error)}") from None
    except psycopg.IntegrityError as error:
        diag = error.diag  # whose detail has values of the row
        of_table = f" of the table {diag.table_name}" if diag.table_name else ""
        raise BrokerMisconfigured(
            f"{name}: a constraint{of_table} stands against an outcome: {diag.message_primary}"
        ) from None
    except psycopg.Error as error:
        raise BrokerError(f"{name}: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
