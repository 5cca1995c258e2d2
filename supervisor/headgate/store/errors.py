"""Errors of the store, by the reaction that they need from the caller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def described(error: BaseException) -> str:
    """Return an error that nobody foresaw in one line: with its class, as its text alone may be a bare key."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class StoreError(Exception):
    """Base of the errors of the store: nothing of the transaction was written."""


class TransactionOpen(StoreError):
    """The connection is in a transaction, which its block has to end first: that of a batch of a consumer."""

    def __init__(self) -> None:
        super().__init__("a batch of this client is open: within its block use another `Client`, or do it afterwards")


class DatabaseAway(StoreError):
    """The database cannot be reached or used at the moment: try again later.

    It is unknown whether the transaction was committed; every verb may be repeated. ``database``
    is its URL without password.
    """

    said = "is away"

    def __init__(self, database: str, reason: str) -> None:
        super().__init__(f"the database {database} {self.said}: {reason}")
        self.database = database
        self.reason = reason


class DatabaseReadOnly(DatabaseAway):
    """The server answers, and takes no writes: a standby, in the middle of a failover or after it."""

    said = "is read-only"


class DatabaseLocked(DatabaseAway):
    """The server answers, and another session has kept a lock on a table or a row for longer than is waited for."""

    said = "waits for another session"

    def __init__(self, database: str, reason: str, waited_s: float) -> None:
        super().__init__(
            database,
            f"it holds a lock on headgate's tables or rows for longer than {waited_s:g} s ({reason}); to find it: "
            f"SELECT pid, pg_blocking_pids(pid), query FROM pg_stat_activity WHERE pg_blocking_pids(pid) <> '{{}}'",
        )


class DatabaseBusy(DatabaseAway):
    """Too many of this process use it already: nothing was asked of the database."""

    said = "is asked for by too many"


class DatabaseFault(StoreError):
    """The database refuses, and neither waiting nor leaving out rows would help.

    A permission is missing, a file is damaged, a setting makes it unsafe, or a statement of headgate is wrong.
    """

    def __init__(self, database: str, reason: str) -> None:
        super().__init__(f"the database {database} cannot be used: {reason}")
        self.database = database
        self.reason = reason


class DatabaseReplaced(StoreError):
    """The file of a SQLite database, or its log, was deleted, moved or replaced while it was in use.

    Unlike after other errors, the transaction may have been committed, but to a file that no other process will open.
    Trying again does not help, and nothing may depend on the commit.
    """

    def __init__(self, database: str, reason: str) -> None:
        super().__init__(f"the database {database} is not the file that is in use: {reason}")
        self.database = database
        self.reason = reason


class UnsupportedDatabase(StoreError):
    """The URL does not name a database that headgate can use."""


class SchemaOutOfDate(StoreError):
    """The tables of the database do not fit this version of headgate; the message has the command to run."""


class RowsRefused(StoreError):
    """The database refuses these rows: at least one of them is bad, and the caller finds it by halving."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the database refuses the values: {reason}")
        self.reason = reason


class ItemFailed(StoreError):
    """One of many that a transaction handles has failed as nobody foresaw; the cause is the ``__cause__``.

    ``kind`` and ``id`` say which, by the id of its row (`headgate.store.db.faults`).
    """

    def __init__(self, kind: str, id_: int, reason: str) -> None:
        super().__init__(f"the {kind} of row {id_} has failed: {reason}")
        self.kind = kind
        self.id = id_
        self.reason = reason


class LeaseLost(StoreError):
    """This epoch has been fenced or has ended: its supervisor may write nothing more (I10)."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"epoch {epoch} has been fenced or has ended: its triggers belong to others now")
        self.epoch = epoch


class WatcherExists(StoreError):
    """A watcher of this name exists already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a watcher named {name!r} already: `headgate watchers set {name}` changes it")
        self.name = name


class NoSuchWatcher(StoreError):
    """There is no watcher of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no watcher named {name!r}")
        self.name = name


class WatcherHeld(StoreError):
    """This watcher is held, so it is not started."""

    def __init__(self, name: str, hold: str) -> None:
        super().__init__(f"the watcher {name!r} is held ({hold}): `headgate watchers resume {name}` starts it again")
        self.name = name
        self.hold = hold


class NoSuchRow(StoreError):
    """There is no row of this name; ``what`` is its kind, for example variable, pool, DAG, run or trigger.

    ``of`` is the object in which it was looked up, ``near`` are similar names.
    """

    def __init__(self, what: str, name: str, *, of: str = "", near: Sequence[str] = ()) -> None:
        where = f" in {of}" if of else ""
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"there is no {what} named {name!r}{where}{hint}")
        self.what = what
        self.name = name


class DagRemoved(NoSuchRow):
    """A DAG is in no file any more. Its runs and what waits for it are kept, and it goes on if it is there again."""

    def __init__(self, name: str, file: str) -> None:
        told = f"no DAG file has the DAG {name} any more, which was in {file}: its runs and events are kept"
        StoreError.__init__(self, told)
        self.what, self.name, self.file = "DAG", name, file


class NoSuchInstance(StoreError):
    """A task does not have the instances that were named; ``reason`` says which it has, or that it is not mapped."""

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(f"{task_id} {reason}")
        self.task_id = task_id


class TriggerRemoved(StoreError):
    """The trigger was removed: readers leave its events behind, so none is added."""

    def __init__(self, trigger_id: int) -> None:
        super().__init__(f"trigger {trigger_id} was removed, and no event is added to those of a removed trigger")
        self.trigger_id = trigger_id


class OwnerUnsettled(StoreError):
    """The owner of a trigger changed during each of several tries to write for it by hand: try again later."""

    def __init__(self, trigger_id: int, tries: int) -> None:
        super().__init__(f"the owner of trigger {trigger_id} changed during each of {tries} tries; try again later")
        self.trigger_id = trigger_id
        self.tries = tries


class EventExists(StoreError):
    """There is an event of this key already, and a second one would be taken for a redelivery of it."""

    def __init__(self, watcher: str, key: str, event_id: int) -> None:
        super().__init__(f"the watcher {watcher!r} has an event with the key {key!r} already: event {event_id}")
        self.watcher = watcher
        self.key = key
        self.event_id = event_id


class CursorRefused(StoreError, ValueError):
    """A cursor is not a place in the events that it was given for; the message says why."""

    def __init__(self, cursor: object, reason: str) -> None:
        super().__init__(f"the cursor {cursor} cannot be used: {reason}")
        self.cursor = str(cursor)
        self.reason = reason


class ConsumerExists(StoreError):
    """A consumer of this name exists already, and reads another watcher."""

    def __init__(self, name: str, watcher: str) -> None:
        super().__init__(f"there is a consumer named {name!r} already, of the watcher {watcher!r}; choose another name")
        self.name = name
        self.watcher = watcher


class ConsumerBusy(StoreError):
    """Another worker of the consumer has been handling a batch for as long as a lock is waited for: try again."""

    def __init__(self, name: str, waited_s: float) -> None:
        super().__init__(f"another worker of the consumer {name!r} has not finished its batch within {waited_s:g} s")
        self.name = name


class NotSetAside(StoreError):
    """The consumer has no unresolved letter of this event; ``state`` is that of a resolved one."""

    def __init__(self, consumer: str, event_id: int, state: str | None) -> None:
        why = (
            f": it was {state.replace('_', ' ')} before"
            if state
            else f"; `headgate consumers letters {consumer}` lists"
        )
        super().__init__(f"the consumer {consumer!r} has not set aside event {event_id}{why}")
        self.consumer = consumer
        self.event_id = event_id
        self.state = state


class SignalKeyInUse(StoreError):
    """A key of signals cannot be forgotten: its versions would begin anew while others count on the old ones."""

    def __init__(self, key: str, by: str) -> None:
        super().__init__(f"the key {key!r} is in use: {by}")
        self.key = key


class LetterRefused(StoreError):
    """A dead letter cannot be redriven, edited or discarded; ``reason`` says why. It is left as it is."""

    def __init__(self, letter_id: int, verb: str, reason: str) -> None:
        super().__init__(f"dead letter {letter_id} cannot be {verb}: {reason}")
        self.letter_id = letter_id
        self.reason = reason


class LetterWithoutTrigger(LetterRefused):
    """The dead letter cannot be redriven, as no trigger can get its event or its message; others may be."""


class LetterResolved(LetterRefused):
    """The dead letter was redriven or discarded before."""


class SpecUnreadable(StoreError):
    """The stored spec of a DAG cannot be read by this version of headgate; parsing its file replaces it."""

    def __init__(self, dag: str, reason: str) -> None:
        super().__init__(f"the DAG {dag!r} as it is stored cannot be read by this version of headgate: {reason}")
        self.dag = dag
        self.reason = reason


class ValueRefused(StoreError, ValueError):
    """A user's value is too big, or cannot be encoded; the message names the value and the limit."""


class BadName(StoreError, ValueError):
    """A name a user chose cannot be stored and shown safely; the message says why."""


class BadKey(StoreError):
    """None of the keys decrypts this value."""


class UnusableKey(StoreError):
    """The encryption keys are missing, malformed, readable by others, or not accessible. No message shows a key."""


class NoKeyFile(UnusableKey):
    """There is no key file, and the caller may not make one."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"there is no key file {path}: run `headgate db upgrade` to make it")
        self.path = path


class WrongKeys(UnusableKey):
    """The keys are not those of the database; the message names them by their fingerprints."""


# The database is away, or cannot be used (a permission, a full disk, a running migration, a new key that this machine
# does not have yet). The caller tries again, because events that are not stored are not confirmed, and stopping would
# solve none of these.
DATABASE_UNUSABLE = (DatabaseAway, DatabaseFault, SchemaOutOfDate, WrongKeys)
# No row, run, task or file is to blame for these: without it the same would have happened.
BLAMELESS = (*DATABASE_UNUSABLE, DatabaseReplaced, LeaseLost)
