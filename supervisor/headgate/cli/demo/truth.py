"""What really happened in a demo: read from the log files, the committed offsets and the tables, by our own means.

Nothing here uses the code under test. Events are told apart by the ``id`` in their payload, never by the keys
headgate gives them, and the tables are read with SQL of this module.

The order of reading is what makes the check of I1 sound: the committed offsets come first and the tables
after, so an event that is below an offset and not in the tables was acknowledged before it was stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, Engine, NullPool, create_engine, make_url, text

SQLITE_TIMEOUT_S = 30.0  # waiting for a database that is being recovered after a kill
ROWS_AT_ONCE_MAX = 10_000  # rows fetched at once
COPIES_MAX = 255  # copies of one event that are told apart; a byte counts them

_NEW_ROWS = text("SELECT id, trigger_id, trigger_run_id, payload FROM trigger_event WHERE id > :last ORDER BY id")
_SUBSCRIBERS = text("SELECT name, trigger_id FROM asset_watcher WHERE removed_at IS NULL ORDER BY trigger_id")
_UNCLAIMED = text("SELECT count(*) FROM trigger WHERE triggerer_id IS NULL")
_REDELIVERED = text("SELECT coalesce(sum(count), 0) FROM redelivery")
_DEAD_LETTERS = text("SELECT count(*) FROM dead_letter")


def open_reader(url: str) -> Engine:
    """Return an engine to look at the demo's database with.

    No connection is kept: on SQLite one that stayed open would spare a killed supervisor's successor the
    recovery that it is here to show.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return create_engine(parsed, poolclass=NullPool, connect_args={"timeout": SQLITE_TIMEOUT_S})
    return create_engine(parsed.set(drivername="postgresql+psycopg"), poolclass=NullPool)


@dataclass
class _Partition:
    """The whole lines of one file that have been read: the id of each, and the offset in bytes where it ends."""

    read_to: int = 0
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    checked: int = 0  # so many of them were found to be committed, and looked up in the tables


class WrittenLog:
    """The log as it stands in its files."""

    def __init__(self, folder: Path, group: str) -> None:
        self._folder = folder
        self._group = group
        self.partitions: dict[str, _Partition] = {}

    def read(self) -> None:
        """Read the whole lines that were appended since the last time."""
        for path in sorted(self._folder.glob("*.jsonl")):
            partition = self.partitions.setdefault(path.stem, _Partition())
            with path.open("rb") as file:
                file.seek(partition.read_to)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    partition.read_to += len(line)
                    partition.ids.append(json.loads(line)["id"])
                    partition.ends.append(partition.read_to)

    def committed(self) -> dict[str, int]:
        """Return how far, in bytes, each partition is acknowledged."""
        try:
            data = (self._folder / ".groups" / f"{self._group}.json").read_bytes()
        except FileNotFoundError:
            return {}
        offsets: dict[str, int] = json.loads(data)["offsets"]
        return offsets

    def ids(self) -> list[int]:
        """Return the ids of all lines that were read."""
        return [id_ for partition in self.partitions.values() for id_ in partition.ids]

    def is_committed_to_the_end(self) -> bool:
        """Whether every line that was read is acknowledged."""
        committed = self.committed()
        return all(committed.get(name, 0) == partition.read_to for name, partition in self.partitions.items())


class Audit:
    """Compares the log with the tables; `look` may be called as often as one likes, and reads only what is new.

    ``events`` is how many will be written, with the ids from 0.
    """

    def __init__(self, engine: Engine, log: WrittenLog, events: int) -> None:
        self._engine = engine
        self._events = events
        self._last_row = 0
        self.log = log
        self.looks = 0
        self.names: dict[int, str] = {}  # of the subscribers, by trigger id
        self.copies: dict[int, bytearray] = {}  # of each event, by trigger id
        self.runs: dict[int, set[str]] = {}  # trigger runs that have stored events, by trigger id
        self.rows = 0
        self.foreign_rows = 0  # rows that hold no event of the log
        self.acknowledged_before_stored: set[tuple[int, int]] = set()  # (trigger id, event id)
        with engine.connect() as connection:
            for name, trigger_id in connection.execute(_SUBSCRIBERS):
                self.names[trigger_id] = name
                self.copies[trigger_id] = bytearray(events)
                self.runs[trigger_id] = set()

    def look(self) -> None:
        """Read offsets, log and tables, in this order, and check what is newly committed (I1)."""
        self.looks += 1
        committed = self.log.committed()
        self.log.read()
        with self._engine.connect() as connection:
            self._read_rows(connection)
        for name, partition in self.log.partitions.items():
            up_to = committed.get(name, 0)
            while partition.checked < len(partition.ends) and partition.ends[partition.checked] <= up_to:
                id_ = partition.ids[partition.checked]
                partition.checked += 1
                self.acknowledged_before_stored.update(
                    (trigger_id, id_) for trigger_id, copies in self.copies.items() if not copies[id_]
                )

    def _read_rows(self, connection: Connection) -> None:
        result = connection.execute(_NEW_ROWS, {"last": self._last_row})
        for row_id, trigger_id, trigger_run_id, payload in result.yield_per(ROWS_AT_ONCE_MAX):
            self._last_row = row_id
            self.rows += 1
            id_ = json.loads(bytes(payload)).get("id", -1)
            copies = self.copies.get(trigger_id)
            if copies is None or not 0 <= id_ < self._events:
                self.foreign_rows += 1
                continue
            self.runs[trigger_id].add(trigger_run_id)
            copies[id_] = min(copies[id_] + 1, COPIES_MAX)

    def flows_again_since(self, runs_before: dict[int, frozenset[str]]) -> bool:
        """Whether every subscriber has stored an event of a trigger run that had stored none before."""
        return all(runs - runs_before[trigger_id] for trigger_id, runs in self.runs.items())

    @property
    def written(self) -> int:
        """How many events stand in the log."""
        return sum(len(partition.ids) for partition in self.log.partitions.values())

    def stored(self, trigger_id: int) -> int:
        """How many different events are stored for a subscriber."""
        copies = self.copies[trigger_id]
        return len(copies) - copies.count(0)

    @property
    def lost(self) -> int:
        """Events of the log that are not stored, summed over the subscribers."""
        ids = self.log.ids()
        return sum(1 for copies in self.copies.values() for id_ in ids if not copies[id_])

    @property
    def stored_twice(self) -> int:
        """Rows too many: the second and every further row of an event, and rows that belong to no event."""
        surplus = sum(sum(copies) - (len(copies) - copies.count(0)) for copies in self.copies.values())
        return surplus + self.foreign_rows

    @property
    def is_complete(self) -> bool:
        """Whether every event is written, stored for every subscriber, and acknowledged."""
        return (
            self.written >= self._events
            and all(self.stored(trigger_id) == self._events for trigger_id in self.copies)
            and self.log.is_committed_to_the_end()
        )

    def unclaimed(self) -> int:
        """How many triggers no supervisor has taken yet."""
        with self._engine.connect() as connection:
            return int(connection.execute(_UNCLAIMED).scalar_one())

    def redelivered(self) -> int:
        """How many events came again and were not stored again; the one number that headgate itself counts."""
        with self._engine.connect() as connection:
            return int(connection.execute(_REDELIVERED).scalar_one())

    def dead_letters(self) -> int:
        """How many events were put aside instead of being stored."""
        with self._engine.connect() as connection:
            return int(connection.execute(_DEAD_LETTERS).scalar_one())
