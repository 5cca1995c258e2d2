"""The truth of a crash test: log files, offsets file, journals and rows, read by our own means into a history.

Nothing here uses the code under test, but for the names of its tables and files.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from sqlalchemy import Connection, Engine, NullPool, create_engine, make_url, text

from headgate.testing.history import (
    Checker,
    Committed,
    Looked,
    Published,
    Record,
    Report,
    Stored,
    Subscribed,
    decode_lines,
    encode,
)

SQLITE_TIMEOUT_S = 30.0  # waiting for a database that is being recovered after a kill
# Two supervisors on one PostgreSQL may commit out of the order of their ids: so many rows are read again.
LOOKBACK_ROWS = 2000

_SUBSCRIBERS = text("SELECT trigger_id, name FROM asset_watcher ORDER BY trigger_id")
_ROWS = text("SELECT id, trigger_id, payload FROM trigger_event WHERE id > :after ORDER BY id")
_COUNT = text("SELECT count(*) FROM trigger_event")
_DEAD_LETTERS = text("SELECT count(*) FROM dead_letter")
_FENCED = text("SELECT count(*) FROM triggerer WHERE pid = :pid AND fenced_at IS NOT NULL")
_DROP = text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = 'headgate'"
)


def open_reader(url: str) -> Engine:
    """Return an engine that keeps no connection: one that stayed open would spare a successor its recovery."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return create_engine(parsed, poolclass=NullPool, connect_args={"timeout": SQLITE_TIMEOUT_S})
    return create_engine(parsed.set(drivername="postgresql+psycopg"), poolclass=NullPool, isolation_level="AUTOCOMMIT")


class Log:
    """The writer's side of a file log: whole lines, each naming itself by where it stands."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self.folder = folder
        self.ends = {f"p{number}": 0 for number in range(partitions)}
        folder.mkdir()
        self._fds = {
            name: os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in self.ends
        }

    def append(self, count: int) -> list[Published]:
        """Append ``count`` lines to each partition; return what they are. The caller records it at once."""
        published = []
        for name, fd in self._fds.items():
            lines = []
            for _ in range(count):
                event = f"{name}:{self.ends[name]}"
                lines.append(json.dumps({"id": event}).encode() + b"\n")
                published.append(Published(event, name, self.ends[name]))
                self.ends[name] += len(lines[-1])
            os.write(fd, b"".join(lines))
        return published

    def committed(self, group: str) -> dict[str, int]:
        """Return how far, in bytes, the group has acknowledged each partition."""
        try:
            data = (self.folder / ".groups" / f"{group}.json").read_bytes()
        except FileNotFoundError:
            return {}
        offsets: dict[str, int] = json.loads(data)["offsets"]
        return offsets

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])


class Truth:
    """What is known of one log, one database and their journals; grows by `publish` and `look`."""

    def __init__(self, log: Log, group: str, journals: Path, url: str) -> None:
        self._log = log
        self._group = group
        self._journals = journals
        self._url = url
        self._engine = open_reader(url)
        self._held: Connection | None = None  # open while nobody else may connect
        self._read_to: Counter[Path] = Counter()
        self._committed: dict[str, int] = {}
        self._rows_seen: set[int] = set()
        self._published: list[Published] = []  # appended, and not yet recorded
        self._checker = Checker()
        self._history: list[Record] = []
        self.events = 0
        with self._engine.connect() as connection:
            self._names = {trigger_id: name for trigger_id, name in connection.execute(_SUBSCRIBERS)}
        self._record([Subscribed(name) for name in self._names.values()])

    def append(self, count: int) -> None:
        """Have the log grow by ``count`` lines a partition."""
        published = self._log.append(count)
        self.events += len(published)
        self._published += published

    def look(self, at: str, *, at_rest: bool = False) -> Report:
        """Read everything in the order in which one thing rests on the other; return what it shows."""
        committed = self._log.committed(self._group)
        journalled = self._read_journals()
        rows = self._read_rows()
        self._record(self._published)
        self._published = []
        for lane, before in committed.items():
            if self._committed.get(lane) != before:
                self._committed[lane] = before
                self._record([Committed(lane, before, at=at)])
        self._record(journalled)
        self._record(rows)
        self._record([Looked(at, at_rest)])
        return self._checker.report()

    def rows(self) -> int:
        """How many rows the database holds."""
        return self._number(_COUNT)

    def is_complete(self) -> bool:
        """Whether as many rows are stored as there should be, and everything is acknowledged."""
        return self._log.committed(self._group) == self._log.ends and self.rows() >= self.events * len(self._names)

    def dead_letters(self) -> int:
        """How many events were put aside; here none should be."""
        return self._number(_DEAD_LETTERS)

    def is_fenced(self, pid: int) -> bool:
        """Whether another supervisor has taken over from this process."""
        return bool(self._number(_FENCED, pid=pid))

    def drop_connections(self) -> int:
        """PostgreSQL: end every connection of headgate to this database; return how many there were."""
        return self._number(_DROP)

    @contextmanager
    def away(self) -> Iterator[None]:
        """PostgreSQL: let nobody connect, end every connection of headgate, and go on looking by one of our own."""
        name = make_url(self._url).database
        server = open_reader(make_url(self._url).set(database="postgres").render_as_string(hide_password=False))
        with self._engine.connect() as self._held, server.connect() as admin:
            try:
                admin.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'))
                self.drop_connections()
                yield
            finally:
                admin.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'))
                self._held = None
        server.dispose()

    def _connect(self) -> nullcontext[Connection] | Connection:
        return self._engine.connect() if self._held is None else nullcontext(self._held)

    def write_history(self, path: Path) -> None:
        """Keep the history, for ``python -m headgate.testing.history``."""
        path.write_bytes(b"".join(map(encode, self._history)))

    def close(self) -> None:
        """Close the files and the engine."""
        self._log.close()
        self._engine.dispose()

    def _record(self, records: list[Record] | list[Published] | list[Subscribed]) -> None:
        self._history += records
        self._checker.extend(records)

    def _read_journals(self) -> list[Record]:
        records: list[Record] = []
        for path in sorted(self._journals.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read_to[path])
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read_to[path] += whole
            records += decode_lines(data[:whole], where=str(path))
        return records

    def _read_rows(self) -> list[Record]:
        records: list[Record] = []
        after = max(self._rows_seen, default=0) - LOOKBACK_ROWS
        with self._connect() as connection:
            for row, trigger_id, payload in connection.execute(_ROWS, {"after": after}):
                if row not in self._rows_seen:
                    self._rows_seen.add(row)
                    records.append(Stored(json.loads(bytes(payload))["id"], self._names[trigger_id], str(row)))
        return records

    def _number(self, statement: object, **parameters: int) -> int:
        with self._connect() as connection:
            return int(connection.execute(statement, parameters).scalar_one())  # type: ignore[call-overload]
