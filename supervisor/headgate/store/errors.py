"""Errors of the store, by what the caller should do about them."""

from __future__ import annotations

from collections.abc import Sequence


class StoreError(Exception):
    """Base of the errors of the store: nothing of the transaction was written."""


class DatabaseAway(StoreError):
    """The database cannot be reached or used at the moment: ask again later.

    It is unknown whether the transaction was committed; every verb may be repeated. ``database``
    is its URL without password.
    """

    def __init__(self, database: str, reason: str) -> None:
        super().__init__(f"the database {database} is away: {reason}")
        self.database = database
        self.reason = reason


class DatabaseFault(StoreError):
    """The database refuses, and neither waiting nor leaving out rows would help.

    A permission is missing, a file is damaged, a setting makes it unsafe, or a statement of ours is wrong.
    """

    def __init__(self, database: str, reason: str) -> None:
        super().__init__(f"the database {database} cannot be used: {reason}")
        self.database = database
        self.reason = reason


class UnsupportedDatabase(StoreError):
    """The URL does not name a database that headgate can use."""


class SchemaOutOfDate(StoreError):
    """The tables of the database do not fit this version of headgate; the message says what to run."""


# The database is away, or it is there and unusable (a permission, a full disk, a migration under way). Giving up
# would help with none of these, because events that are not stored are not confirmed: the caller tries again.
DATABASE_UNUSABLE = (DatabaseAway, DatabaseFault, SchemaOutOfDate)


class RowsRefused(StoreError):
    """The database says that these rows cannot be stored: at least one of them is bad, find it by halving."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the database refuses the rows: {reason}")
        self.reason = reason


class LeaseLost(StoreError):
    """This epoch has been fenced or has ended: its supervisor may write nothing more (I10)."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"epoch {epoch} has been fenced or has ended: its triggers belong to others now")
        self.epoch = epoch


class WatcherExists(StoreError):
    """There is a watcher of this name already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a watcher named {name!r} already; remove it first or choose another name")
        self.name = name


class NoSuchWatcher(StoreError):
    """There is no watcher of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no watcher named {name!r}")
        self.name = name


class NoSuchRow(StoreError):
    """There is no variable, connection, pool, DAG, run, task or trigger of this name; ``what`` says which of them.

    ``of`` is where it was looked for, ``near`` the names that may have been meant.
    """

    def __init__(self, what: str, name: str, *, of: str = "", near: Sequence[str] = ()) -> None:
        where = f" in {of}" if of else ""
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"there is no {what} named {name!r}{where}{hint}")
        self.what = what
        self.name = name


class SpecUnreadable(StoreError):
    """The stored spec of a DAG cannot be read by this version of headgate; parsing its file replaces it."""

    def __init__(self, dag: str, reason: str) -> None:
        super().__init__(f"the DAG {dag!r} as it is stored cannot be read by this version of headgate: {reason}")
        self.dag = dag
        self.reason = reason


class ValueRefused(StoreError, ValueError):
    """A value a user wants to be stored is too big, or has no form; the message names the value and the limit."""


class BadName(StoreError, ValueError):
    """A name a user chose cannot be stored and shown safely; the message says why."""


class BadKey(StoreError):
    """None of the keys decrypts this value."""


class UnusableKey(StoreError):
    """The encryption keys cannot be used: malformed, readable by others, or not to be had. Never shows a key."""
