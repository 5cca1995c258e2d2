"""The database of a simulation: the real store on SQLite in memory, and a layer that lets it fail.

Migrating takes longer than a whole seed, so it is done once a process; each seed begins with a copy of the result,
with the triggers of its topology already in it. One engine serves all seeds, because its compiled statements are
what makes SQLAlchemy fast.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio
from tests.proof.simulation import records
from tests.proof.simulation.scenario import MAX_DELIVERIES

from headgate.client.client import Client
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.values import decode_value
from headgate.store.db.database_file import DatabaseFile
from headgate.store.db.engine import open_engine
from headgate.store.db.schema import upgrade
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Database
from headgate.store.errors import DatabaseAway, DatabaseReplaced, RowsRefused
from headgate.store.store import Store
from headgate.store.triggers.events import StoredSlice

if TYPE_CHECKING:
    from tests.proof.simulation.processes import SupervisorProcess
    from tests.proof.simulation.world import World

KEY = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="  # of the kwargs: any will do
CLASSPATH = "tests.proof.simulation.triggers.SimulatedTrigger"
EPOCH_OF_TIME = datetime(2030, 1, 1, tzinfo=UTC)  # simulated second 0
POISON = "poison"  # of a payload that the database refuses
NAME = "simulated"
MIGRATED = "SIMULATION_DATABASE"  # names a file of SQLite with the tables, for who starts many simulations

Result = TypeVar("Result")

_engine = open_engine("sqlite://")
_secrets = Secrets([KEY], source="the simulation")


def open_store() -> Store:
    """Return a store on the one database; its clock is trio's."""
    return Store(_engine, secrets=_secrets, clock=_clock)


def decrypted(text: str) -> bytes:
    """Return a value that is encrypted in the database."""
    return _secrets.decrypt(text)


def _clock() -> datetime:
    try:
        return EPOCH_OF_TIME + timedelta(seconds=trio.current_time())
    except RuntimeError:
        return EPOCH_OF_TIME  # the templates are made outside of any run


def _raw() -> sqlite3.Connection:
    connection = _engine.raw_connection().driver_connection
    assert isinstance(connection, sqlite3.Connection)
    return connection


@cache
def _template(names: tuple[str, ...]) -> sqlite3.Connection:
    """Return a migrated database that holds these triggers."""
    template = sqlite3.connect(":memory:")
    if names:
        _template(()).backup(_raw())
        with open_store() as store:
            for name in names:
                add(store, name)
    elif MIGRATED in os.environ:
        with closing(sqlite3.connect(os.environ[MIGRATED])) as migrated:
            migrated.backup(_raw())
    else:
        upgrade(_engine)
    _raw().backup(template)
    return template


def reset(names: Sequence[str]) -> None:
    """Begin anew, with these triggers and nothing else."""
    _template(tuple(names)).backup(_raw())


def copied() -> sqlite3.Connection:
    """Return a copy of the database as it is."""
    copy = sqlite3.connect(":memory:")
    _raw().backup(copy)
    return copy


def restore(copy: sqlite3.Connection) -> None:
    """Go on with such a copy."""
    copy.backup(_raw())


class SimulatedFile(DatabaseFile):
    """The file of the database, which is replaced when a fault says so."""

    def __init__(self, world: World) -> None:
        self._world = world

    def before_connecting(self) -> None:
        """There is one connection, which is the database."""

    def connected(self) -> None:
        """See `before_connecting`."""

    def check(self) -> None:
        """See `DatabaseFile`."""
        if self._world.weather.file_in_place is not None:
            raise DatabaseReplaced(NAME, "it was replaced by another file")


def add(store: Store, name: str) -> int:
    """Add a trigger as a user would; return its id."""
    return store.add_watcher(name, CLASSPATH, {"name": name}, max_deliveries=MAX_DELIVERIES)


def open_client() -> Client:
    """Return what a program of a user opens to read events; it has a connection of its own as far as it knows."""
    return Client(Database(_engine, Secrets.none(), _clock))


def make_table_of_users() -> None:
    """Make the table that consumers write to."""
    _raw().execute(
        "CREATE TABLE taken (id INTEGER PRIMARY KEY AUTOINCREMENT, consumer TEXT, worker INTEGER, event_id INTEGER, "
        "trigger_id INTEGER, key TEXT, handout INTEGER)"
    )


def refuse_poison() -> None:
    """Have the database itself refuse poisoned events, whoever stores them."""
    _raw().execute(
        f"CREATE TRIGGER refuses_poison BEFORE INSERT ON trigger_event "
        f"WHEN instr(NEW.payload, CAST('{POISON}' AS BLOB)) BEGIN SELECT RAISE(ABORT, 'this row is poison'); END"
    )


def take_poison() -> None:
    """Have the database store poisoned events as well."""
    _raw().execute("DROP TRIGGER refuses_poison")


def said_in(payload: bytes) -> dict[str, Any]:
    """Return what the filter has said in the payload of an event; nothing if it is no event of a filter."""
    said = decode_value(payload)
    said = said.get("xcoms", said) if isinstance(said, dict) else None
    return said if isinstance(said, dict) else {}


_OWNERS = """
SELECT s.digest, t.id, coalesce(o.id, 0) FROM trigger t JOIN stream s ON s.id = t.stream_id
LEFT JOIN triggerer o ON o.id = t.triggerer_id AND o.fenced_at IS NULL AND o.stopped_at IS NULL
WHERE t.finished_at IS NULL AND t.removed_at IS NULL ORDER BY s.id, t.id
"""


_TOLD = "{0}.trigger_id, {0}.trigger_run_id, {0}.sequence_index, {0}.key, {0}.position, {0}.kind, {0}.is_last"
_LETTERS = f"""
SELECT l.id, l.state, l.event_id,
  (SELECT group_concat(action, ' ') FROM (SELECT action FROM letter_action WHERE letter_id = l.id ORDER BY id)),
  coalesce(l.edited_payload, l.payload, l.payload_head), coalesce(l.payload, l.payload_head),
  {_TOLD.format("l")}, {_TOLD.format("e")}, e.payload, t.removed_at IS NOT NULL, l.payload_kept
FROM dead_letter l LEFT JOIN trigger_event e ON e.id = l.event_id LEFT JOIN trigger t ON t.id = e.trigger_id
WHERE l.content = 'event' ORDER BY l.id
"""


_MESSAGES = """
SELECT id, coalesce(target_id, trigger_id), key, position, state FROM dead_letter
WHERE content = 'message' AND key IS NOT NULL ORDER BY id
"""

_SET_ASIDE = """
SELECT l.id, c.name, l.event_id, l.trigger_id, l.state FROM consumer_letter l JOIN consumer c ON c.id = l.consumer_id
ORDER BY l.id
"""


class Reader:
    """Looks at the rows from outside, with SQL of its own. Nothing is in the middle of a transaction when it does."""

    def __init__(self) -> None:
        self._connection = _raw()
        self._last_row = self._last_letter = self._last_logged = self._last_taken = 0
        self._names: dict[int, str] = {}
        self._owners: dict[str, dict[str, int]] = {}  # by stream
        self._letters: dict[int, tuple[Any, ...]] = {}
        self._messages: dict[int, tuple[Any, ...]] = {}
        self._set_aside: dict[int, list[Any]] = {}

    def look(self) -> list[records.Stored | records.DeadLettered]:
        """Return what is new since the last look."""
        now = trio.current_time()
        found: list[records.Stored | records.DeadLettered] = []
        rows = self._connection.execute(
            "SELECT id, trigger_id, trigger_run_id, sequence_index, key, position, payload FROM trigger_event "
            "WHERE id > ? ORDER BY id",
            (self._last_row,),
        ).fetchall()
        for row, trigger, run_id, index, key, position, payload in rows:
            self._last_row = row
            said = said_in(payload)
            message, handout = str(said["message"]).removesuffix(f" {POISON}"), int(said["handout"])
            found.append(
                records.Stored(now, row, self.name_of(trigger), run_id, index, key, position, message, handout)
            )
        letters = self._connection.execute(
            "SELECT id, trigger_id, trigger_run_id, sequence_index, key, position, payload FROM dead_letter "
            "WHERE id > ? ORDER BY id",
            (self._last_letter,),
        ).fetchall()
        for row, trigger, run_id, index, key, position, payload in letters:
            self._last_letter = row
            name, is_whole = self.name_of(trigger), payload is not None
            found.append(records.DeadLettered(now, row, name, run_id, index, key, position, is_whole))
        return found

    def look_at_owned_rows(self) -> list[records.Logged]:
        """Return the triggers of the events that were stored since the last look."""
        rows = self._connection.execute(
            "SELECT id, trigger_id FROM trigger_event WHERE id > ? ORDER BY id", (self._last_logged,)
        ).fetchall()
        self._last_logged = max([self._last_logged, *(row for row, _ in rows)])
        return [records.Logged(trio.current_time(), *row) for row in rows]

    def look_at_taken(self) -> list[records.Taken]:
        """Return the rows of the user's table that are new since the last look."""
        rows = self._connection.execute("SELECT * FROM taken WHERE id > ? ORDER BY id", (self._last_taken,)).fetchall()
        self._last_taken = max([self._last_taken, *(row[0] for row in rows)])
        return [records.Taken(trio.current_time(), *row[1:]) for row in rows]

    def look_at_set_aside(self) -> list[records.SetAside]:
        """Return the letters of consumers that are new or have changed since the last look."""
        found = []
        for letter, *row in self._connection.execute(_SET_ASIDE).fetchall():
            if self._set_aside.get(letter) != row:
                self._set_aside[letter] = row
                found.append(records.SetAside(trio.current_time(), *row))
        return found

    def letters(self) -> dict[int, bytes | None]:
        """Return the payload of each dead letter of an event, by the id of the letter; None if only a head is kept."""
        letters = self._connection.execute("SELECT id, payload FROM dead_letter WHERE content = 'event' ORDER BY id")
        return dict(letters.fetchall())

    def look_at_letters(self) -> list[records.LetterSeen]:
        """Return the dead letters of events that are new or have changed since the last look."""
        found = []
        for row in self._connection.execute(_LETTERS).fetchall():
            if self._letters.get(row[0]) == row:
                continue
            self._letters[row[0]] = row
            letter, state, event_id, actions, payload, original = row[:6]
            event, stored = row[6:13], row[13:20]
            has_row = stored[0] is not None
            found.append(
                records.LetterSeen(
                    trio.current_time(),
                    letter,
                    state,
                    self._told(event, payload, is_whole=bool(row[22])),
                    zlib.crc32(original),
                    event_id or 0,
                    self._told(stored, row[20]) if has_row else None,
                    has_row and bool(row[21]),
                    tuple((actions or "").split()),
                )
            )
        return found

    def _told(self, names: tuple[Any, ...], payload: bytes, *, is_whole: bool = True) -> records.Told:
        trigger_id, run_id, index, key, position, kind, is_last = names
        name = self.name_of(trigger_id)
        handout = said_in(payload).get("handout", 0) if is_whole else 0
        return records.Told(name, run_id, index, key, position, kind, bool(is_last), zlib.crc32(payload), handout)

    def messages(self) -> list[int]:
        """Return the dead letters of messages, by their ids, the oldest first."""
        return [row[0] for row in self._connection.execute(_MESSAGES).fetchall()]

    def redriving(self) -> list[int]:
        """Return those of them that are on their way to their trigger."""
        return [row[0] for row in self._connection.execute(_MESSAGES).fetchall() if row[4] == "redriving"]

    def look_at_messages(self) -> list[records.MessageSeen]:
        """Return the dead letters of messages that are new or have changed since the last look."""
        rows = self._connection.execute(_MESSAGES).fetchall()
        changed = [row for row in rows if self._messages.get(row[0]) != row]
        self._messages.update((row[0], row) for row in changed)
        return [
            records.MessageSeen(trio.current_time(), letter, self.name_of(trigger), message, position, state)
            for letter, trigger, message, position, state in changed
        ]

    def look_at_owners(self) -> list[records.Owned]:
        """Return the streams whose owners have changed since the last look."""
        owners: dict[str, dict[str, int]] = {digest: {} for digest in self._owners}
        for digest, trigger, owner in self._connection.execute(_OWNERS).fetchall():
            owners.setdefault(digest, {})[self.name_of(trigger)] = owner
        changed = [digest for digest in owners if owners[digest] != self._owners.get(digest, {})]
        self._owners = owners
        return [records.Owned(trio.current_time(), digest, owners[digest]) for digest in changed]

    def name_of(self, trigger_id: int) -> str:
        """Return the name of a trigger."""
        name = self._names.get(trigger_id)
        if name is None:
            (name,) = self._connection.execute(
                "SELECT name FROM asset_watcher WHERE trigger_id = ?", (trigger_id,)
            ).fetchone()
            assert isinstance(name, str)
            self._names[trigger_id] = name
        return name

    def live_epochs(self) -> list[int]:
        """Return the epochs that may write."""
        rows = self._connection.execute("SELECT id FROM triggerer WHERE fenced_at IS NULL AND stopped_at IS NULL")
        return [epoch for (epoch,) in rows.fetchall()]

    def unfinished(self) -> list[str]:
        """Return the triggers that should be running."""
        rows = self._connection.execute("SELECT id FROM trigger WHERE finished_at IS NULL AND removed_at IS NULL")
        return [self.name_of(trigger_id) for (trigger_id,) in rows.fetchall()]


# Verbs that write under the epoch that is their first argument, with the names that histories know them by.
WRITES = {
    "heartbeat": "heartbeat",
    "fence_triggerers": "fence",
    "claim_triggers": "claim",
    "release_triggers": "release",
    "store_slice": "store_slice",
    "dead_letter_event": "dead_letter_event",
    "strike_message": "strike_message",
    "hold_trigger": "hold_trigger",
    "reset_failures": "reset_failures",
    "take_changes": "take_changes",
}


class FailingStore:
    """The store as one supervisor sees it: away, ambiguous, and strict about poison, as the faults say.

    Its verbs are those of `Store`.
    """

    def __init__(self, world: World, supervisor: SupervisorProcess) -> None:
        self._world = world
        self._supervisor = supervisor
        self._store = open_store()
        self._store.database.watch(SimulatedFile(world))
        self._connection = _raw()
        self._own_changes = 0
        self._last_changes = 0  # rows changed by the last verb
        self._by_others: int | None = None  # not looked at yet

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, name, getattr(self._store, name))

    def call(self, name: str, verb: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Carry out a verb of the store, unless the faults of the moment do not let it."""
        return self.fail_or(lambda: verb(*args, **kwargs), args[0] if name in WRITES else 0, WRITES.get(name, ""))

    def has_changes(self) -> bool:
        """See `Store`: whether others have written. Of its own writes no database tells a supervisor."""
        last, self._by_others = self._by_others, self._connection.total_changes - self._own_changes
        return last != self._by_others

    def no_bell(self) -> str:
        """See `Store`."""
        return "the simulation has none"

    def fence_triggerers(self, epoch: Any, **kwargs: Any) -> list[Any]:
        """See `Store`."""
        fenced: list[Any] = self.call("fence_triggerers", self._store.fence_triggerers, epoch, **kwargs)
        for other in fenced:
            self._world.note_fenced(other)
        return fenced

    def release_triggerer(self, epoch: Any) -> None:
        """See `Store`."""
        self.call("release_triggerer", self._store.release_triggerer, epoch)
        self._world.note_fenced(epoch)

    def hold_trigger(self, epoch: Any, trigger_id: int, hold: Any, reason: str) -> bool:
        """See `Store`."""
        is_held: bool = self.call("hold_trigger", self._store.hold_trigger, epoch, trigger_id, hold, reason)
        if is_held:
            self._world.note(records.Held(trio.current_time(), self._world.reader.name_of(trigger_id), hold))
        return is_held

    def store_slice(self, epoch: Any, **parts: Any) -> StoredSlice:
        """See `Store`. A slice with a poisoned event is refused, as a database would refuse a row."""

        def store(epoch: Any, *, events: Sequence[FiredEvent], **rest: Any) -> StoredSlice:
            is_poisoned = any(POISON in str(decode_value(event.payload)) for event in events)
            if is_poisoned and not self._world.weather.takes_poison:
                raise RowsRefused("one of these rows is poison")
            return self._store.store_slice(epoch, events=events, **rest)

        return self.call("store_slice", store, epoch, **parts)

    def fail_or(self, verb: Callable[[], Result], epoch: int = 0, writes: str = "") -> Result:
        """Carry it out, or fail as the faults of the moment say; `epoch` if it ``writes`` for one."""
        weather = self._world.weather
        now = trio.current_time()
        if self._supervisor.is_cut_off:
            raise DatabaseAway(NAME, "the simulation has cut this supervisor off")
        if now >= weather.database_back_at:
            result = self._carried_out(verb)
            if writes:
                self._wrote(epoch, writes)
            return result
        if weather.commit_is_ambiguous and writes:
            weather.commit_is_ambiguous = False
            self._carried_out(verb)
            self._wrote(epoch, writes)
        raise DatabaseAway(NAME, "the simulation has taken it away")

    def _carried_out(self, verb: Callable[[], Result]) -> Result:
        before = self._connection.total_changes
        try:
            return verb()
        finally:
            self._last_changes = self._connection.total_changes - before
            self._own_changes += self._last_changes

    def _wrote(self, epoch: int, verb: str) -> None:
        """A verb that writes for an epoch has committed, with or without changed rows."""
        self._world.note(records.Wrote(trio.current_time(), epoch, verb))
        self._world.look_at_owners()
