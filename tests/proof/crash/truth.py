"""The truth of a crash test: log files, offsets file, journals and rows, read by our own means into a history.

Nothing here uses the code under test, but for the names of its tables and files.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from tests.proof.crash.connections import Connections

from headgate.testing.crash.history import (
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

# Two supervisors on one PostgreSQL may commit out of the order of their ids: so many rows are read again.
LOOKBACK_ROWS = 2000

_SUBSCRIBERS = "SELECT trigger_id, name FROM asset_watcher ORDER BY trigger_id"
_ROWS = "SELECT id, trigger_id FROM trigger_event WHERE id > :after ORDER BY id"
_PAYLOADS = "SELECT id, payload FROM trigger_event WHERE id >= :first"
_COUNT = "SELECT count(*) FROM trigger_event"
_DEAD_LETTERS = "SELECT count(*) FROM dead_letter"


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


class Truth(Connections):
    """What is known of one log, one database and their journals; grows by `publish` and `look`."""

    def __init__(self, log: Log, group: str, journals: Path, url: str) -> None:
        super().__init__(url)
        self._log = log
        self._group = group
        self._journals = journals
        self._read_to: Counter[Path] = Counter()
        self._committed: dict[str, int] = {}
        self._rows_seen: set[int] = set()
        self._row_newest = 0
        self._lookback = 0 if url.startswith("sqlite") else LOOKBACK_ROWS
        self._published: list[Published] = []  # appended, and not yet recorded
        self._checker = Checker()
        self._history: list[Record] = []
        self.events = 0
        self._names: dict[int, str] = {trigger_id: name for trigger_id, name in self._reader.ask(_SUBSCRIBERS)}
        self._record([Subscribed(name) for name in self._names.values()])

    def append(self, count: int) -> None:
        """Have the log grow by ``count`` lines a partition."""
        published = self._log.append(count)
        self.events += len(published)
        self._published += published

    def report(self) -> Report:
        """Say what all looks together show."""
        return self._checker.report()

    def look(self, at: str, *, at_rest: bool = False) -> None:
        """Read everything in the order in which one thing rests on the other."""
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

    def rows(self) -> int:
        """How many rows the database holds."""
        return self._number(_COUNT)

    def is_complete(self) -> bool:
        """Whether as many rows are stored as there should be, and everything is acknowledged."""
        return self._log.committed(self._group) == self._log.ends and self.rows() >= self.events * len(self._names)

    def dead_letters(self) -> int:
        """How many events were put aside; here none should be."""
        return self._number(_DEAD_LETTERS)

    def write_history(self, path: Path) -> None:
        """Keep the history, for ``python -m headgate.testing.crash.history``."""
        path.write_bytes(b"".join(map(encode, self._history)))

    def close(self) -> None:
        """Close the files and the connection."""
        self._log.close()
        super().close()

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
        # The payloads of new rows alone, since most of what is looked at again is known.
        rows = self._reader.ask(_ROWS, after=self._row_newest - self._lookback)
        new = {row: trigger_id for row, trigger_id in rows if row not in self._rows_seen}
        if not new:
            return []
        payloads = dict(self._reader.ask(_PAYLOADS, first=min(new)))
        self._rows_seen.update(new)
        self._row_newest = max(self._row_newest, *new)
        return [
            Stored(json.loads(bytes(payloads[row]))["id"], self._names[trigger_id], str(row))
            for row, trigger_id in new.items()
        ]
