"""The workload of users' programs: beside a pair, a command redrives dead letters, and a program consumes events.

The trigger fires some events that are too long, so that they become letters. The command is the real one, with a
greater limit; it is started whenever there are letters to redrive. The program takes the events of all watchers into
a table of the user's, and is started again whenever it is dead.
"""

from __future__ import annotations

import getpass
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, get_args

from sqlalchemy import text
from tests.proof import consuming_worker, document
from tests.proof.consumers import Observer
from tests.proof.crash.workload import Fault
from tests.proof.crash.workloads.pair import Log, PairTruth, PairWorkload

from headgate.protocol.marks import CONSUMER_MARKS, LETTER_MARKS, Mark
from headgate.store.db.engine import open_engine
from headgate.testing.crash import history
from headgate.testing.crash.history import PutAside, Record

EVENT_BYTES_MAX = 2_000  # of the supervisor; `crash_triggers.LongTrigger` fires some that are longer
COMMAND_BYTES_MAX = 1_000_000
FAILS_ONE_IN = 8  # batches, in which the user's code raises
FOUND_MAX = 20  # findings of a kind; more would tell a reader nothing new

Kind = Literal[
    "redriven without its event",
    "redriven without a record",
    "handed over twice",
    "never handed over",
    "handed over out of order",
    "committed out of order",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_LETTERS = "SELECT id, trigger_id, payload FROM dead_letter WHERE content = 'event' AND id > :after ORDER BY id"
_OTHER_LETTERS = "SELECT count(*) FROM dead_letter WHERE content <> 'event' OR payload IS NULL"
_OPEN_LETTERS = "SELECT count(*) FROM dead_letter WHERE state = 'open'"
_REDRIVEN = "SELECT count(*) FROM dead_letter WHERE state IN ('redriven', 'stored_meanwhile')"
_WITHOUT_EVENT = """
SELECT l.id FROM dead_letter l LEFT JOIN trigger_event e ON e.id = l.event_id AND e.trigger_id = l.trigger_id
AND e.key = l.key AND e.position = l.position AND e.kind = l.kind AND e.payload = l.payload
WHERE l.state IN ('redriven', 'stored_meanwhile') AND e.id IS NULL ORDER BY l.id
"""
_WITHOUT_RECORD = """
SELECT l.id FROM dead_letter l WHERE (SELECT count(*) FROM letter_action a WHERE a.letter_id = l.id)
<> CASE WHEN l.resolved_at IS NULL THEN 0 ELSE 1 END ORDER BY l.id
"""


class Finding(NamedTuple):
    """A violated promise about letters or consumers."""

    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class Report(NamedTuple):
    """The judgement on the pair, and on the programs beside it."""

    findings: tuple[history.Finding | Finding, ...]
    redelivered: int


class ProgramTruth(PairTruth):
    """The history of a pair, the dead letters, and the table of the user."""

    def __init__(self, log: Log, group: str, journals: Path, url: str) -> None:
        super().__init__(log, group, journals, url)
        self.keep_programs: Callable[[], None] = lambda: None  # of the workload: has its programs run
        self._observer = Observer(url)
        self._found: dict[str, Finding] = {}

    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """See `PairTruth`: the user's rows and the states of letters rest on events, and are read before these."""
        billed: dict[str, list[int]] = {}
        for bill in self._observer.bills():
            billed.setdefault(bill.watcher, []).append(bill.event_id)
        without_record = self._reader.ask(_WITHOUT_RECORD)
        super().look(at, at_rest=at_rest, is_over=is_over)
        self._observer.look()
        for trigger_id, name in self._names.items():
            self._judge(name, billed.get(name, []), self._observer.commits.get(trigger_id, []), at_rest=at_rest)
        self._find("redriven without its event", [f"letter {id_}" for (id_,) in self._reader.ask(_WITHOUT_EVENT)])
        self._find("redriven without a record", [f"letter {id_}" for (id_,) in without_record])
        self._find("committed out of order", ["an event, below one that was there"] * self._observer.late)

    def report(self) -> Report:  # type: ignore[override]  # more findings than those of the pair
        """See `Truth`."""
        of_pair = super().report()
        return Report((*of_pair.findings, *self._found.values()), of_pair.redelivered)

    def is_complete(self) -> bool:
        """Whether every event is stored, after a redrive if need be, and in the user's table."""
        self.keep_programs()
        return super().is_complete() and not self.open_letters() and self.billed() >= self.rows()

    def billed(self) -> int:
        """Return the number of rows in the user's table."""
        return self._observer.billed()

    def open_letters(self) -> int:
        """Return the number of letters that are to be redriven."""
        return self._number(_OPEN_LETTERS)

    def redriven(self) -> int:
        """Return the number of letters that were redriven, or whose event was stored meanwhile."""
        return self._number(_REDRIVEN)

    def dead_letters(self) -> int:
        return self._number(_OTHER_LETTERS)

    def close(self) -> None:
        """Close the files and the connections."""
        self._observer.close()
        super().close()

    def _read_letters(self) -> list[Record]:
        letters = self._reader.ask(_LETTERS, after=self._letter_newest)
        self._letter_newest = max([self._letter_newest, *(row for row, _, _ in letters)])
        return [
            PutAside(json.loads(bytes(payload))["id"], self._names[trigger_id])
            for _, trigger_id, payload in letters
            if payload is not None
        ]

    def _judge(self, name: str, billed: list[int], stored: list[int], *, at_rest: bool) -> None:
        """Compare the user's rows with the events of a watcher, both in the order of their commits."""
        if billed == (stored if at_rest else stored[: len(billed)]):
            return
        places = {event: place for place, event in enumerate(stored)}
        self._find("handed over twice", [f"{name} {event}" for event, rows in Counter(billed).items() if rows > 1])
        to = len(stored) if at_rest else max(places.get(event, -1) for event in billed)
        self._find("never handed over", [f"{name} {event}" for event in stored[:to] if event not in set(billed)])
        order = [places.get(event, -1) for event in billed]
        late = [event for event, before, place in zip(billed[1:], order, order[1:], strict=False) if place < before]
        self._find("handed over out of order", [f"{name} {event}" for event in late])

    def _find(self, kind: Kind, places: Sequence[str]) -> None:
        for what in places[:FOUND_MAX]:
            finding = Finding(kind, what)
            self._found.setdefault(str(finding), finding)


class ProgramWorkload(PairWorkload):
    """The pair, a command that redrives its dead letters, and a program that consumes its events."""

    name = "programs"
    marks: ClassVar[Mapping[str, Mark]] = {**LETTER_MARKS, **CONSUMER_MARKS}
    faults: ClassVar[tuple[Fault, ...]] = (
        "kill program",
        "kill runner",
        "kill supervisor",
        "kill both",
        "drop connection",
    )
    kill_weights: ClassVar[Mapping[Fault, int]] = {"kill program": 60, "kill runner": 25, "kill both": 15}
    skips_max = 2  # some marks are reached once in a process, or when the user's code raises
    is_captured = False  # a log of frames does not show what commands do
    at_rest = "everything is stored, no letter is open, and all events are in the user's table"
    truth_type: ClassVar[type[PairTruth]] = ProgramTruth
    truth: ProgramTruth

    def __init__(self, folder: Path, url: str, subscribers: int) -> None:
        super().__init__(folder, url, subscribers, trigger="LongTrigger")
        self.settings |= {"event_bytes_max": str(EVENT_BYTES_MAX)}
        self.truth.keep_programs = self.keep_programs
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers = [f"s{number}" for number in range(subscribers)]
        self._in_database(lambda dialect: consuming_worker.TABLES[dialect])

    def feed(self) -> None:
        """Add lines, and have the programs run."""
        super().feed()
        self.keep_programs()

    def is_hungry(self) -> bool:
        # A command takes a second to start: there would be more letters than it could redrive.
        return self._is_hungry_after(10)

    def work_until_kill(self, randomness: random.Random) -> None:
        """See the base class."""
        self.keep_programs()
        super().work_until_kill(randomness)

    def keep_programs(self) -> None:
        """Start the programs that are not running, and the command only if there is something to redrive."""
        worker = ("-m", "tests.proof.consuming_worker", self.url, *self._watchers, "--fails-one-in", str(FAILS_ONE_IN))
        self._keep("consumer", worker, {})
        if self.truth.open_letters():
            command = ("-P", "-m", "headgate.cli", "dlq", "redrive", "--content", "event")
            limit = {"HEADGATE_EVENT_BYTES_MAX": str(COMMAND_BYTES_MAX), "USER": getpass.getuser()}
            self._keep("command", command, limit)

    def programs(self) -> list[int]:
        """Return the pids of those that run."""
        return [program.pid for program in self._programs.values() if program.poll() is None]

    def counts(self) -> Counter[str]:
        return super().counts() + Counter(redriven=self.truth.redriven(), handed_over=self.truth.billed())

    def close(self) -> None:
        """Leave neither a process nor the table behind."""
        for program in self._programs.values():
            program.kill()
            program.wait()
        super().close()
        self._in_database(lambda dialect: "DROP TABLE users_bill")

    def _keep(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if name in self._programs and self._programs[name].poll() is None:
            return
        with (self.folder / f"{name}.log").open("ab") as log:
            self._programs[name] = subprocess.Popen(
                [sys.executable, *command],
                cwd=document.ROOT,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _in_database(self, statement: Callable[[str], str]) -> None:
        engine = open_engine(self.url)
        with engine.begin() as connection:
            connection.execute(text(statement(engine.dialect.name)))
        engine.dispose()
