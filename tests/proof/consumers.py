"""A consumer that is killed at random, while two supervisors store the events of two watchers, and are killed, too.

::

    python -m tests.proof.consumers [--kills N] [--events N] [--db sqlite|postgresql] [--seed N] [--proof]

The worker (`tests.proof.consuming_worker`) writes a row of the user for each event, in the transaction that hands it
over. A look from outside sees which events become visible when, and with that the order of commits. At the end the
table of the user must have each event once, in that order, and with it each line of the logs. The exit code is 0 only
if nothing was found. ``--proof`` adds a row to ``docs/proof.md``.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import psutil
from sqlalchemy import text
from tests.proof import document
from tests.proof.consuming_worker import TABLES
from tests.proof.crash.databases import Databases
from tests.proof.crash.processes import send
from tests.proof.crash.reader import open_reader
from tests.proof.crash.workloads.pair import GROUP, LOOKBACK_ROWS, Log
from tests.proof.supervisors import Supervisors
from tests.waiting import LOOK_INTERVAL_S, wait_until

from headgate.store.db.engine import open_engine

SUPERVISORS = 2
MISSED_LINES = 50  # of each log, behind each look that found no open batch: they keep the worker busy
PARTITIONS = 1  # of each log: its lines are stored in their order, whatever is delivered again
LIFE_S_MAX = 0.5  # of a worker from its first batch on; at random, at most
INSIDE = ("begun", "written")  # what a worker says last while it has a batch
KILLS_PER_SUPERVISOR = 10  # kills of workers between two kills of a supervisor
SETTLE_S = 300.0  # for the last events to be handed over on a busy machine
DATABASES = ("sqlite", "postgresql")
WATCHERS = ("left", "right")
_BILLS = "SELECT watcher, event_id, payload FROM users_bill ORDER BY n"
_BILLED = "SELECT count(*) FROM users_bill"
_EVENTS = "SELECT count(*) FROM trigger_event"
_UNREAD = """
SELECT count(*) FROM consumer c JOIN asset_watcher w ON w.name = c.watcher
JOIN trigger_event e ON e.trigger_id = w.trigger_id WHERE e.id > c.event_id
"""
_STORED = "SELECT id, trigger_id FROM trigger_event WHERE id > :after ORDER BY id"


class Bill(NamedTuple):
    """A row that a worker has written."""

    watcher: str
    event_id: int
    line: str


class Outcome(NamedTuple):
    """The end of it. By watcher: the ``lines`` that were written, and the ids of its events in ``commits``' order.

    ``inside`` are the kills that met a worker with an open batch. ``late`` are events that became visible after an
    event of the same trigger with a greater id.
    """

    bills: Sequence[Bill]
    lines: Mapping[str, Sequence[str]]
    commits: Mapping[str, Sequence[int]]
    kills: int
    inside: int
    supervisor_kills: int
    late: int
    exit_codes: Counter[int]
    took_s: float

    def twice(self) -> int:
        """Return how many rows are one too many."""
        return len(self.bills) - len({(bill.watcher, bill.event_id) for bill in self.bills})

    def missing(self) -> int:
        """Return how many lines have no row."""
        billed = {(bill.watcher, bill.line) for bill in self.bills}
        return sum((name, line) not in billed for name, lines in self.lines.items() for line in lines)

    def out_of_order(self) -> int:
        """Return how many rows of a watcher do not follow in the order of commits from the row before."""
        count = 0
        for name, ids in self.commits.items():
            places = {id_: place for place, id_ in enumerate(ids)}
            mine = [places.get(bill.event_id, -1) for bill in self.bills if bill.watcher == name]
            count += sum(after <= before for before, after in zip([-1, *mine], mine, strict=False))
        return count

    def faults(self) -> list[str]:
        """Return what is wrong, in words."""
        lines = sum(map(len, self.lines.values()))
        found = {
            f"{self.twice()} events are handed over twice": self.twice(),
            f"{self.missing()} lines are not handed over": self.missing(),
            f"{len(self.bills):,} rows for {lines:,} lines": len(self.bills) != lines,
            f"{self.out_of_order()} events are handed over out of the order of commits": self.out_of_order(),
            f"{self.late} events were committed below an id that was there already": self.late,
            f"supervisors left with the exit codes {dict(self.exit_codes)}": set(self.exit_codes) != {0},
            f"{self.inside} of {self.kills} kills met an open batch": self.inside < self.kills // 2,
        }
        return [words for words, is_so in found.items() if is_so]


class Observer:
    """Sees from outside in which order events become visible. It is used by one thread."""

    def __init__(self, url: str) -> None:
        self.commits: dict[int, list[int]] = {}  # by trigger
        self.late = 0
        self._seen: set[int] = set()
        self._reader = open_reader(url)

    def look(self) -> None:
        """Note the events that have become visible. Rows of two supervisors may be committed out of order of ids."""
        after = max(self._seen, default=0) - LOOKBACK_ROWS
        for id_, trigger_id in self._reader.ask(_STORED, after=after):
            if id_ not in self._seen:
                self.see(id_, trigger_id)

    def see(self, id_: int, trigger_id: int) -> None:
        """Note one event."""
        self._seen.add(id_)
        ids = self.commits.setdefault(trigger_id, [])
        self.late += bool(ids) and id_ < ids[-1]
        ids.append(id_)

    def bills(self) -> list[Bill]:
        """Return the rows of the user, in the order in which they were written."""
        return [Bill(*row) for row in self._reader.ask(_BILLS)]

    def billed(self) -> int:
        """Return how many rows there are."""
        return self._number(_BILLED)

    def is_at_rest(self, lines: int) -> bool:
        """Whether the events of so many lines are stored, and the places of the consumers are behind all of them."""
        return self._number(_EVENTS) >= lines and self._number(_UNREAD) == 0

    def _number(self, statement: str) -> int:
        return int(self._reader.ask(statement)[0][0])

    def close(self) -> None:
        """Keep nothing open."""
        self._reader.close()


class Campaign:
    """One campaign in an empty folder, on an empty database; ``with`` it."""

    def __init__(self, folder: Path, url: str, *, kills: int, events: int, seed: int) -> None:
        self._folder, self._url = folder, url
        self._kills, self._events = kills, events
        self._random = random.Random(seed)
        self._logs = {name: Log(folder / f"log-{name}", PARTITIONS) for name in WATCHERS}
        self._lines: dict[str, list[str]] = {name: [] for name in WATCHERS}
        self._said = folder / "worker.out"
        # Each has room for one of the two watchers, so that both store at the same time.
        self._supervisors = Supervisors(folder, url, {"capacity": "1"})
        self._observer = Observer(url)
        self._pause = threading.Event()
        self._ended: Counter[str] = Counter()

    def __enter__(self) -> Self:
        engine = open_engine(self._url)
        with engine.begin() as connection:
            connection.execute(text(TABLES[engine.dialect.name]))
        engine.dispose()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._supervisors.__exit__(kind, error, trace)
        self._observer.close()
        for log in self._logs.values():
            log.close()
        engine = open_engine(self._url)
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE users_bill"))
        engine.dispose()

    def run(self) -> Outcome:
        """Run it to its end. Raises `tests.waiting.NotInTime`."""
        begun_at = time.monotonic()
        ids = {name: self._add(name) for name in WATCHERS}
        self._supervisors.start(SUPERVISORS)
        self._supervisors.wait_ready()
        for number in range(1, self._kills + 1):
            to = self._events * number // (self._kills + 1)
            self._live(self._random.uniform(0.0, LIFE_S_MAX), to, is_aimed=number % 2 == 0)
            if number % KILLS_PER_SUPERVISOR == 0:
                self._supervisors.replace_owner()
        self._feed(self._events)
        with self._worker():
            wait_until(self._is_complete, "the last events are handed over", SETTLE_S)
        codes = self._supervisors.drain()
        self._observer.look()
        return Outcome(
            bills=self._observer.bills(),
            lines=self._lines,
            commits={name: self._observer.commits.get(id_, []) for name, id_ in ids.items()},
            kills=sum(self._ended.values()),
            inside=sum(self._ended[word] for word in INSIDE),
            supervisor_kills=self._supervisors.kills,
            late=self._observer.late,
            exit_codes=codes,
            took_s=time.monotonic() - begun_at,
        )

    def _add(self, name: str) -> int:
        kwargs = {"path": str(self._logs[name].folder), "group": GROUP}
        return self._supervisors.add_watcher(name, "headgate.brokers.filelog.FileLogTrigger", kwargs)

    def _feed(self, total: int) -> None:
        """Write lines to both logs, until there are so many."""
        for place, name in enumerate(WATCHERS):
            count = (total + place) // len(WATCHERS) - len(self._lines[name])
            if count > 0:
                self._lines[name] += [line.event for line in self._logs[name].append(count)]

    def _live(self, life_s: float, to: int, *, is_aimed: bool) -> None:
        """Run a worker for so long after its first batch, and kill it; write lines meanwhile, up to the number ``to``.

        It is killed wherever it is, or if that ``is_aimed``, as soon as it is found with an open batch.
        """
        fed = self._written()
        to = max(to, fed + 10 * len(WATCHERS))  # a worker that has nothing to do has no first batch
        with self._worker() as worker:
            self._feed(fed + (to - fed) // 10)
            wait_until(lambda: "committed" in self._said.read_text(), "the first batch of a worker")
            begun_at = time.monotonic()
            while (lived_s := time.monotonic() - begun_at) < life_s:
                self._feed(fed + int((to - fed) * lived_s / life_s))
                self._observer.look()
                self._pause.wait(LOOK_INTERVAL_S)
            self._feed(to)
            if is_aimed:
                wait_until(lambda: self._is_inside(worker), "a worker with an open batch")
            assert worker.poll() is None, "a worker has ended by itself"
        self._ended[self._last_word()] += 1

    def _is_inside(self, worker: subprocess.Popen[bytes]) -> bool:
        """Stop the worker somewhere, and return whether it has a batch; if not, let it go on, with more to do."""
        send(worker.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED, "a stopped worker")
        if self._last_word() in INSIDE:
            return True
        send(worker.pid, signal.SIGCONT)
        self._feed(self._written() + MISSED_LINES * len(WATCHERS))
        self._pause.wait(self._random.uniform(0.0, LOOK_INTERVAL_S))
        return False

    def _last_word(self) -> str:
        return self._said.read_text().rpartition("\n")[0].rpartition("\n")[2]

    def _written(self) -> int:
        return sum(map(len, self._lines.values()))

    def _worker(self) -> _Killed:
        with self._said.open("wb") as said:
            command = [sys.executable, "-m", "tests.proof.consuming_worker", self._url, *WATCHERS]
            return _Killed(subprocess.Popen(command, cwd=document.ROOT, stdout=said))

    def _is_complete(self) -> bool:
        self._observer.look()
        return self._observer.is_at_rest(self._written())


class _Killed:
    """A process that is killed with SIGKILL at the end of the block."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()


# --- the document --------------------------------------------------------------------------------

SECTION = "consumers"
_TEXT = """\
## Consumers

A worker of two consumers is killed with SIGKILL at random, while two supervisors store the events of two watchers, and
one of these is killed after every 10 workers. It writes a row of the user for each event. Judged by the table of the
user, and by the order in which events became visible. Written by `make consumers ARGS=--proof`.
"""
_COLUMNS = (
    *("ended", "database", "events", "kills", "inside a batch", "kills of supervisors", "twice", "missing"),
    *("out of order", "seconds", "commit"),
)


def row(outcome: Outcome, database: str) -> str:
    """Return one campaign as a row of the document."""
    events = sum(map(len, outcome.lines.values()))
    cells = (
        *(document.now(), database, f"{events:,}", outcome.kills, outcome.inside, outcome.supervisor_kills),
        *(outcome.twice(), outcome.missing(), outcome.out_of_order(), f"{outcome.took_s:.0f}"),
        f"`{document.commit()}`",
    )
    return f"| {' | '.join(map(str, cells))} |"


def write(new: str, path: Path = document.PATH) -> None:
    """Add a row to those of earlier campaigns."""
    old = [line for line in document.section_of(path, SECTION).splitlines() if line.startswith("| 2")]
    head = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    document.write(SECTION, [_TEXT, *head, *old, new], path)


# --- the command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.consumers", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--db", choices=DATABASES, action="append", help="by default both, one after the other")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--proof", action="store_true", help="add a row for each database to docs/proof.md")
    given = parser.parse_args(arguments)
    faults: list[str] = []
    home = Path(tempfile.mkdtemp(prefix="headgate-consumers-"))
    databases = Databases(home)
    try:
        for database in given.db or DATABASES:
            folder = home / database
            folder.mkdir()
            with (
                databases.one(database, folder) as (url, _),
                Campaign(folder, url, kills=given.kills, events=given.events, seed=given.seed) as campaign,
            ):
                outcome = campaign.run()
            print(f"| {' | '.join(_COLUMNS)} |\n{row(outcome, database)}", flush=True)
            faults += [f"{database}: {fault}" for fault in outcome.faults()]
            if given.proof:
                write(row(outcome, database))
    finally:
        databases.close()
    for fault in faults:
        print(f"BAD: {fault}")
    print(f"logs are in {home}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
