"""The workload of the pair: events of a file log, for one or several subscribers of one stream, and their truth."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.proof.crash.truth import Truth
from tests.proof.crash.workload import Fault, Workload
from tests.waiting import wait_until

from headgate.protocol.marks import MARKS, POISON_MARKS, REDELIVERY_MARKS, RUNAWAY_MARKS, Mark
from headgate.store.store import Store
from headgate.testing.crash.history import (
    Checker,
    Committed,
    Looked,
    Published,
    PutAside,
    Record,
    Report,
    Stored,
    Subscribed,
    decode_lines,
)
from headgate.testing.crash.journal import JournalReader
from headgate.testing.poisonous import MENDED

GROUP = "g"
PARTITIONS = 2
APPENDED_AT_ONCE = 3  # lines a partition: rounds stay short, so that there are many of them
APPEND_INTERVAL_S = 0.01
CAPTURES_MAX = 10_000  # files of the frame log, one a supervisor: none is removed, all are replayed
KILLS_AT_WORK = 0.7  # the share of random kills that wait for rows of the new incarnation
RUNAWAY_INTERVAL_S = 10.0  # each ends the runner three times; between, a message can be struck often enough
PAUSE_S = 0.1  # before a random kill, on average
# Two supervisors on one PostgreSQL may commit out of the order of their ids: so many rows are read again.
LOOKBACK_ROWS = 2000

_SUBSCRIBERS = "SELECT trigger_id, name FROM asset_watcher ORDER BY trigger_id"
_ROWS = "SELECT id, trigger_id FROM trigger_event WHERE id > :after ORDER BY id"
_PAYLOADS = "SELECT id, payload FROM trigger_event WHERE id >= :first"
_COUNT = "SELECT count(*) FROM trigger_event"
_PASSED_OVER = "SELECT id, trigger_id, payload FROM dead_letter WHERE position = -1 AND id > :after ORDER BY id"
_QUARANTINED_COUNT = "SELECT count(*) FROM trigger WHERE hold = 'quarantine'"
_PASSED_OVER_COUNT = "SELECT count(*) FROM dead_letter WHERE position = -1 AND payload IS NOT NULL"
_PUT_ASIDE_COUNT = f"{_PASSED_OVER_COUNT} AND state <> 'redriven'"
_REDRIVEN_COUNT = f"{_PASSED_OVER_COUNT} AND state = 'redriven'"
_REDRIVING_COUNT = "SELECT count(*) FROM dead_letter WHERE state = 'redriving'"
_OPEN_MESSAGES = "SELECT id FROM dead_letter WHERE position = -1 AND state = 'open' ORDER BY id"


class Log:
    """The writer's side of a file log: whole lines, each named by its place."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self.folder = folder
        self.ends = {f"p{number}": 0 for number in range(partitions)}
        folder.mkdir()
        self._fds = {
            name: os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in self.ends
        }

    def append(self, count: int) -> list[Published]:
        """Append ``count`` lines to each partition; return their records, which the caller must record at once."""
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


class PairTruth(Truth[Record, Report]):
    """The history of one log, one database and the journals of the producers."""

    def __init__(self, log: Log, group: str, journals: Path, url: str) -> None:
        super().__init__(url, Checker())
        self._log = log
        self._group = group
        self._journals = JournalReader(journals, decode_lines)
        self._committed: dict[str, int] = {}
        self._rows_seen: set[int] = set()
        self._row_newest = 0
        self._letter_newest = 0
        self._lookback = 0 if url.startswith("sqlite") else LOOKBACK_ROWS
        self._published: list[Published] = []  # appended, and not yet recorded
        self.events = 0
        self.runaways = 0  # triggers that were added to be quarantined
        self._names: dict[int, str] = {trigger_id: name for trigger_id, name in self._reader.ask(_SUBSCRIBERS)}
        self._record(Subscribed(name) for name in self._names.values())

    def append(self, count: int) -> None:
        """Append ``count`` lines to each partition of the log."""
        published = self._log.append(count)
        self.events += len(published)
        self._published += published

    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """See `Truth`: the offsets rest on the journals, and these on the rows."""
        committed = self._log.committed(self._group)
        journalled = self._journals.read()
        rows = self._read_rows()
        letters = self._read_letters()
        self._record(self._published)
        self._published = []
        moved = {lane: before for lane, before in committed.items() if self._committed.get(lane) != before}
        self._committed |= moved
        self._record(Committed(lane, before, at=at) for lane, before in moved.items())
        self._record(journalled)
        self._record(rows)
        self._record(letters)
        self._record([Looked(at, at_rest)])

    def rows(self) -> int:
        """Return the number of rows in the database."""
        return self._number(_COUNT)

    def is_complete(self) -> bool:
        """Whether all events are stored for all subscribers, and acknowledged, and all runaways are quarantined."""
        if self.quarantined() < self.runaways or self.redriving():
            return False
        kept = self.rows() + self._number(_PUT_ASIDE_COUNT)
        return self._log.committed(self._group) == self._log.ends and kept >= self.events * len(self._names)

    def passed_over(self) -> int:
        """Return the number of messages that became whole dead letters because a trigger cannot take them."""
        return self._number(_PASSED_OVER_COUNT)

    def open_messages(self) -> list[int]:
        """Return the dead letters of messages that nobody has redriven."""
        return [letter for (letter,) in self._reader.ask(_OPEN_MESSAGES)]

    def redriving(self) -> int:
        """Return the number of messages that are on their way to their trigger."""
        return self._number(_REDRIVING_COUNT)

    def redriven(self) -> int:
        """Return the number of messages that came back."""
        return self._number(_REDRIVEN_COUNT)

    def quarantined(self) -> int:
        """Return the number of triggers that are not started any more because they end their runner."""
        return self._number(_QUARANTINED_COUNT)

    def dead_letters(self) -> int:
        return super().dead_letters() - self.passed_over()

    def close(self) -> None:
        """Close the files and the connection."""
        self._log.close()
        super().close()

    def _read_rows(self) -> list[Record]:
        # The payloads of new rows alone, since most of the rows that are read again are known.
        rows = self._reader.ask(_ROWS, after=self._row_newest - self._lookback)
        new = {row: id_ for row, id_ in rows if row not in self._rows_seen and id_ in self._names}
        if not new:
            return []
        payloads = dict(self._reader.ask(_PAYLOADS, first=min(new)))
        self._rows_seen.update(new)
        self._row_newest = max(self._row_newest, *new)
        return [
            Stored(json.loads(bytes(payloads[row]))["id"], self._names[trigger_id], str(row))
            for row, trigger_id in new.items()
        ]

    def _read_letters(self) -> list[Record]:
        letters = self._reader.ask(_PASSED_OVER, after=self._letter_newest)
        self._letter_newest = max([self._letter_newest, *(row for row, _, _ in letters)])
        return [
            PutAside(json.loads(bytes(payload))["id"], self._names[trigger_id])
            for _, trigger_id, payload in letters
            if payload is not None
        ]


class PairWorkload(Workload):
    """``headgate triggerer`` with triggers of the class ``trigger`` in ``users/crash_triggers.py``."""

    name = "pair"
    command = "triggerer"
    marks: ClassVar[Mapping[str, Mark]] = MARKS
    faults: ClassVar[tuple[Fault, ...]] = (
        *("kill runner", "kill supervisor", "kill both", "stop", "drop connection", "database away"),
        *("restart server", "crash server"),
    )
    subscriber_counts = (1, 3)
    # A supervisor takes three times as long to start as a runner.
    kill_weights: ClassVar[Mapping[Fault, int]] = {"kill runner": 75, "kill supervisor": 10, "kill both": 15}
    skips_max = 20
    is_captured = True
    is_stuck_after_error = False  # an event may be on its way yet
    at_rest = "everything is stored and acknowledged"
    truth_type: ClassVar[type[PairTruth]] = PairTruth

    def __init__(self, folder: Path, url: str, subscribers: int, *, trigger: str = "CrashTrigger") -> None:
        super().__init__(folder, url, subscribers)
        journals = folder / "journals"
        journals.mkdir()
        log = Log(folder / "log", PARTITIONS)
        with self._store() as store:
            kwargs = {"path": str(log.folder), "group": GROUP, "journal": str(journals)}
            for number in range(subscribers):
                self._add_subscriber(store, number, f"crash_triggers.{trigger}", kwargs)
        self.truth: PairTruth = self.truth_type(log, GROUP, journals, url)
        self.settings = {"capture": str(folder / "capture"), "capture_files_max": str(CAPTURES_MAX)}
        self._fed_at = 0.0

    def _add_subscriber(self, store: Store, number: int, classpath: str, kwargs: dict[str, Any]) -> None:
        store.add_watcher(f"s{number}", classpath, kwargs)

    def warm_up(self, *, is_new: bool) -> None:
        """Have events stored, so that the fault meets a pair at work."""
        rows = self.truth.rows()
        self.feed()
        wait_until(lambda: self.truth.rows() > rows, "the flow of events")

    def feed(self) -> None:
        self.truth.append(APPENDED_AT_ONCE)
        self._fed_at = time.monotonic()

    def is_hungry(self) -> bool:
        return self._is_hungry_after(1)

    def _is_hungry_after(self, intervals: int) -> bool:
        return time.monotonic() - self._fed_at >= intervals * APPEND_INTERVAL_S

    def work_until_kill(self, randomness: random.Random) -> None:
        """Wait until events flow again, mostly; the other kills meet an incarnation that is starting."""
        rows, pause_s = self.truth.rows(), randomness.expovariate(1 / PAUSE_S)
        until = time.monotonic() + pause_s

        def has_moved() -> bool:
            self.truth.append(1)
            return time.monotonic() >= until and self.truth.rows() > rows

        if randomness.random() < KILLS_AT_WORK:
            wait_until(has_moved, "rows after a kill")
        else:
            time.sleep(pause_s)

    def counts(self) -> Counter[str]:
        return Counter(events=self.truth.events, redelivered=self.truth.report().redelivered)


class HarmWorkload(PairWorkload):
    """The pair, with a subscriber that cannot take some of the lines, and triggers that end their runner.

    A user mends the subscriber whenever some lines are dead letters, redrives these, and spoils it again.
    """

    name = "harm"
    marks: ClassVar[Mapping[str, Mark]] = {**POISON_MARKS, **REDELIVERY_MARKS, **RUNAWAY_MARKS}
    skips_max = 1  # a message is passed over now and then, not all the time
    is_captured = True
    at_rest = "everything is stored or put aside, and acknowledged; every runaway is quarantined"

    def __init__(self, folder: Path, url: str, subscribers: int) -> None:
        super().__init__(folder, url, subscribers, trigger="PoisonTrigger")
        self.settings |= {"retry_wait_s": "0.1", "respawn_wait_s": "0.05"}
        self._runaway_at = 0.0
        self._mended = folder / "journals" / MENDED

    def _add_subscriber(self, store: Store, number: int, classpath: str, kwargs: dict[str, Any]) -> None:
        store.add_watcher(f"s{number}", classpath, {**kwargs, "is_unfit": number == 0}, max_deliveries=2)

    def feed(self) -> None:
        """Add lines, and one more trigger that ends its runner if all before it are quarantined."""
        super().feed()
        if self.truth.quarantined() == self.truth.runaways and time.monotonic() >= self._runaway_at:
            self._runaway_at = time.monotonic() + RUNAWAY_INTERVAL_S
            with self._store() as store:
                store.add_watcher(f"runaway-{self.truth.runaways}", "crash_triggers.Runaway", {})
            self.truth.runaways += 1
        self._redrive()

    def _redrive(self) -> None:
        if self._mended.exists():
            if not self.truth.redriving():
                self._mended.unlink()
        elif letters := self.truth.open_messages():
            self._mended.touch()
            with self._store() as store:
                for letter in letters:
                    store.letters.redrive(letter, by="the crash test")

    def is_hungry(self) -> bool:
        # Each line that is passed over holds the stream up for some tenths of a second.
        return self._is_hungry_after(10)

    def counts(self) -> Counter[str]:
        truth = self.truth
        harm = Counter(passed_over=truth.passed_over(), quarantined=truth.quarantined(), redriven=truth.redriven())
        return super().counts() + harm
