"""Translation of the drivers' errors to `headgate.store.errors`: the only place that knows their codes.

The class tells the caller how to react: to wait if waiting might help, because waiting loses nothing. It is
`RowsRefused` only if the rows themselves are at fault. The caller makes these dead letters, so if a fault of the
database were classified like this, all events would end there.
"""

from __future__ import annotations

import os
import pwd
import re
import sqlite3
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import exc
from sqlalchemy.engine import make_url

from headgate.store.db.engine import LOCK_TIMEOUT_S
from headgate.store.errors import (
    DatabaseAway,
    DatabaseFault,
    DatabaseLocked,
    DatabaseReadOnly,
    RowsRefused,
    SchemaOutOfDate,
    StoreError,
)

if TYPE_CHECKING:
    import psycopg

_UPGRADE = "its tables do not fit this version of headgate: run `headgate db upgrade`"

_SQLITE_AWAY = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,  # a disk that was remounted, a file that was moved away
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_SCHEMA,  # another process is upgrading
    }
)
_SQLITE_REFUSED = frozenset({sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH})
_SQLITE_NO_SUCH = ("no such table", "no such column", "has no column named")

# PostgreSQL's codes: the first two characters are the class (Appendix A of its manual).
_CLASS_AWAY = frozenset(
    {
        "08",  # connection
        "28",  # authorization: a password is being rotated, or a failover is not finished
        "40",  # rolled back: deadlock, serialization, completion unknown
        "53",  # disk full, out of memory, too many connections
        "57",  # shut down by an administrator, cancelled, starting up
        "58",  # input and output
        "F0",  # its configuration file
    }
)
_CLASS_REFUSED = frozenset(
    {
        "22",  # data: out of range, not in the encoding
        "23",  # constraints
        "54",  # limits of size: an index row too long
    }
)
# An error while connecting has no code, only the server's text (here in English).
_NOT_THERE = re.compile(r'FATAL: +((?:database|role) ".*" does not exist)')
_CODES: dict[str, type[StoreError]] = {
    "25006": DatabaseReadOnly,  # read only: a standby, in the middle of a failover
    "25P03": DatabaseAway,  # idle in transaction for too long: this process was stopped
    "25P04": DatabaseAway,  # a transaction that took too long
    "26000": DatabaseAway,  # a prepared statement does not exist: a connection pooler switched servers
    "0A000": DatabaseAway,  # a cached plan no longer fits, because the schema was upgraded; a new connection solves it
    "55P03": DatabaseLocked,  # a lock was not available in time
    "55006": DatabaseAway,  # an object is in use
    "42P01": SchemaOutOfDate,  # no such table
    "42703": SchemaOutOfDate,  # no such column
    "3F000": SchemaOutOfDate,  # no such schema
}


def psycopg_errors() -> tuple[type[psycopg.Error], ...]:
    """Return the base of psycopg's errors, for ``except`` and ``isinstance``; empty if psycopg was not imported.

    The import takes a fifth of the time that a supervisor needs to start, and SQLite does not need it.
    """
    psycopg = sys.modules.get("psycopg")
    return () if psycopg is None else (psycopg.Error,)


def translated() -> tuple[type[Exception], ...]:
    """Return the classes of errors, about the database or the rows, that a statement may raise; for ``except``.

    Overflow and Unicode errors come from the drivers' conversions, before anything is sent.
    """
    return (exc.SQLAlchemyError, sqlite3.Error, *psycopg_errors(), OverflowError, UnicodeError)


def translate(error: BaseException, *, database: str) -> StoreError:
    """Return the store's error for ``error``, one of `translated`. ``database`` is its URL without password."""
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return DatabaseAway(database, _reason(error.orig or error))
    if isinstance(error, exc.StatementError) and error.orig is not None:
        error = error.orig
    if isinstance(error, psycopg_errors()):
        return _translate_postgresql(error, database)
    match error:
        case sqlite3.Error():
            return _translate_sqlite(error, database)
        case OverflowError() | UnicodeError():
            return RowsRefused(_reason(error))
        case exc.TimeoutError() | exc.DisconnectionError() | exc.InvalidatePoolError():
            return DatabaseAway(database, _reason(error))
        case _:
            return DatabaseFault(database, _reason(error))


def _translate_sqlite(error: sqlite3.Error, database: str) -> StoreError:
    reason = _reason(error)
    # Errors of the Python module itself have no code, for example that of a closed connection.
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        if "closed" in reason:
            return DatabaseAway(database, reason)
        refused = isinstance(error, sqlite3.DataError | sqlite3.IntegrityError | sqlite3.InterfaceError)
        return RowsRefused(reason) if refused or "binding" in reason else DatabaseFault(database, reason)
    primary = code & 0xFF
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        path = Path((make_url(database).database if "://" in database else None) or os.devnull)
        try:
            if not path.parent.is_dir():
                reason = f"{reason}: there is no folder {path.parent}"
            elif (why := not_writable(path)) is not None:
                return DatabaseFault(database, why)
            elif not path.exists():
                reason = f"{reason}: there is no file {path}"
        except OSError as unreachable:  # a folder above it, or its file system; both may be back later
            reason = f"{reason}: {path.parent}: {unreachable.strerror}"
    if primary in _SQLITE_AWAY:
        return DatabaseAway(database, reason)
    if primary in _SQLITE_REFUSED:
        return RowsRefused(reason)
    if primary == sqlite3.SQLITE_ERROR and any(words in reason for words in _SQLITE_NO_SUCH):
        return SchemaOutOfDate(f"the database {database}: {reason}; {_UPGRADE}")
    return DatabaseFault(database, reason)


def not_writable(path: Path) -> str | None:
    """Say why SQLite cannot write a file, or the other files that it needs in the same folder; None if it can."""
    for each in (path, path.parent):
        if each.exists() and not os.access(each, os.W_OK):
            found = each.stat()
            try:
                owner = pwd.getpwuid(found.st_uid).pw_name
            except KeyError:
                owner = str(found.st_uid)
            return f"{each} is not writable (mode {stat.filemode(found.st_mode)}, owner {owner})"
    return None


def _translate_postgresql(error: psycopg.Error, database: str) -> StoreError:
    import psycopg

    reason = _reason(error)
    code = error.sqlstate
    if code is None:
        # The client's own errors: a value that cannot be encoded, or a connection that cannot be opened.
        if (not_there := _NOT_THERE.search(reason)) is not None:
            return DatabaseFault(database, not_there[1])
        if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
            return RowsRefused(reason)
        away = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError)
        return DatabaseAway(database, reason) if away else DatabaseFault(database, reason)
    kind = _CODES.get(code, DatabaseAway if code[:2] in _CLASS_AWAY else DatabaseFault)
    if kind is DatabaseLocked:
        return DatabaseLocked(database, reason, LOCK_TIMEOUT_S)
    if issubclass(kind, DatabaseAway):
        return kind(database, reason)
    if kind is SchemaOutOfDate:
        return SchemaOutOfDate(f"the database {database}: {reason}; {_UPGRADE}")
    if code[:2] in _CLASS_REFUSED:
        return RowsRefused(reason)
    return DatabaseFault(database, f"{reason} ({code})")


def _reason(error: BaseException) -> str:
    """Return the error in one line, without PostgreSQL's details, because they quote the rows."""
    if isinstance(error, psycopg_errors()) and error.diag.message_primary:
        return error.diag.message_primary
    text = " ".join(str(error).split())
    return text or type(error).__name__
