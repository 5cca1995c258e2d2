"""The crash tests of all adapters of brokers: kills of runner, supervisor and broker, counted in ``docs/proof.md``.

::

    python -m tests.proof.brokers [--kills N] [--minutes N] [--only redis] [--jobs N] [--seed N] [--proof]

Each trial is `headgate.testing.crash_test` with a private server of one broker: every third kill is of that, if it
keeps messages over a kill. The brokers take turns until so many kills are done, or the time is over. ``--proof`` adds
a row for each broker to ``docs/proof.md``, and writes it after each trial. The exit code is 0 only if nothing was
found.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.proof import document
from tests.proof.crash.matrix import run_all
from tests.proof.crash.reader import open_reader

from headgate.testing.brokers.demo import running_station
from headgate.testing.brokers.station import CONNECTION
from headgate.testing.crash.campaign import crash_test
from headgate.testing.crash.history import KINDS
from headgate.testing.crash.pair import Pair
from headgate.testing.crash.report import CrashReport, CrashTestFailed

# Whether the broker itself is killed. The server of SQS has all in memory; webhooks have a sender in place of a broker.
BROKERS: Mapping[str, bool] = {
    "redis": True,
    "postgres": True,
    "kafka": True,
    "rabbitmq": True,
    "rabbitmq-classic": True,
    "nats": True,
    "sqs": False,
    "sqs-fifo": False,
    "mqtt": True,
    "webhook": False,
}
KILLS = 270
KILLS_OF_A_TRIAL = 45  # enough to be worth its beginning and its end
MESSAGES_PER_KILL = 20
SUBSCRIBERS_MAX = 3
JOBS = 3  # pairs for two cores: each is waited for now and then
VICTIMS = ("runner", "supervisor", "broker")


class Trial(NamedTuple):
    """One crash test that is to be run."""

    broker: str
    kills: int
    subscribers: int
    seed: int


class Result(NamedTuple):
    """What a trial came to: ``counts`` by the names of `COUNTS`; ``problem``: why it failed, empty if it has not."""

    broker: str
    counts: Mapping[str, int]
    problem: str


_EVENTS = """
SELECT e.id, w.name, e.payload FROM trigger_event e JOIN asset_watcher w ON w.trigger_id = e.trigger_id ORDER BY e.id
"""
_LETTERS = "SELECT reason FROM dead_letter"

# --- running -------------------------------------------------------------------------------------


class ReadPair(Pair):
    """A pair whose database is read by the bare driver: there are many looks, at many events."""

    def dead_letters(self) -> list[str]:
        """Return the reasons of the dead letters."""
        return [str(reason) for (reason,) in self._ask(_LETTERS)]

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return id, watcher and encoded payload of the stored events, the oldest first."""
        rows = self._ask(_EVENTS)
        found = [{"id": id_, "watcher": watcher, "payload": bytes(payload)} for id_, watcher, payload in rows]
        return [row for row in found if name in (None, row["watcher"])]

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        return open_reader(f"sqlite:///{self.folder / 'headgate.db'}").ask(statement)


def plan(brokers: Sequence[str], kills: int, seed: int) -> list[Trial]:
    """Return the trials: the brokers take turns, with one subscriber, then two, and so on."""
    numbers = random.Random(seed)
    trials: list[Trial] = []
    while (left := kills - sum(trial.kills for trial in trials)) > 0:
        turn, place = divmod(len(trials), len(brokers))
        size = min(KILLS_OF_A_TRIAL, left)
        trials.append(Trial(brokers[place], size, turn % SUBSCRIBERS_MAX + 1, numbers.randrange(2**31)))
    return trials


def run_trial(trial: Trial, folder: Path) -> Result:
    """Run a trial in a folder, which is kept if it fails."""
    problem = ""
    try:
        report = _report_of(trial, folder)
    except CrashTestFailed as failed:
        report, problem = failed.report, str(failed)
    except Exception as error:  # whatever it is, it is that of this trial
        return Result(trial.broker, {"trials": 1, "failed": 1}, f"{trial}: {type(error).__name__}: {error}")
    if not problem:
        shutil.rmtree(folder)
    return Result(trial.broker, counts_of(report), problem and f"{trial}: {problem}")


def _report_of(trial: Trial, folder: Path) -> CrashReport:
    folder.mkdir()
    with running_station(trial.broker, folder / "broker") as station:
        return crash_test(
            station.trigger(),
            station,
            messages=MESSAGES_PER_KILL * (trial.kills + 1),
            kills=trial.kills,
            subscribers=trial.subscribers,
            settings={f"conn_{CONNECTION}": station.uri},
            seed=trial.seed,
            folder=folder / "crash",
            kill_broker=station.server.crash if station.server is not None and BROKERS[trial.broker] else None,
            open_pair=ReadPair,
        )


def counts_of(report: CrashReport) -> dict[str, int]:
    """Return the counts of one trial."""
    victims = Counter(where.partition(",")[0] for where, _ in report.deaths)
    return {
        "trials": 1,
        **{f"kills of {victim}": victims[victim] for victim in VICTIMS},
        "messages": report.checked.published,
        "stored": report.checked.stored,
        "redelivered": report.checked.redelivered,
        **{kind: report.checked.count(kind) for kind in KINDS},
        "left at the broker": report.pending,
        "failed": int(bool(report.faults())),
    }


# --- the document --------------------------------------------------------------------------------

SECTION = "brokers"
COUNTS = (
    *("trials", *(f"kills of {victim}" for victim in VICTIMS), "messages", "stored", "redelivered"),
    *(*KINDS, "left at the broker", "failed"),
)
_COLUMNS = ("ended", "broker", *COUNTS, "seed", "commit")
_TEXT = """\
## Brokers

The real supervisor and runner read a real broker of their own through each adapter, and are killed with SIGKILL at
random moments and at marks, while messages are published; where it keeps messages over a kill, the broker is killed,
too (Mosquitto ends in order instead: it acknowledges what is published before it writes it). Some messages fail in a
subscriber, or are told to have failed. The truth is read from outside: the broker, what has passed a proxy before it,
a journal of what is handed out and advanced, and the tables; `headgate.testing.crash.history` judges it. Publishers of
RabbitMQ and MQTT give their messages names. Written by `make brokers ARGS=--proof`.
"""


class Row(NamedTuple):
    """The counts of one broker in one run of the command."""

    ended: str
    broker: str
    counts: Mapping[str, int]
    seed: str
    commit: str

    def __str__(self) -> str:
        numbers = [f"{self.counts.get(name, 0):,}" for name in COUNTS]
        return f"| {' | '.join([self.ended, self.broker, *numbers, self.seed, f'`{self.commit}`'])} |"


def rows_in(text: str) -> list[Row]:
    """Return the rows that a section has."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| 2") and len(cells) == len(_COLUMNS):
            numbers = [int(cell.replace(",", "")) for cell in cells[2:-2]]
            counts = dict(zip(COUNTS, numbers, strict=True))
            rows.append(Row(cells[0], cells[1], counts, cells[-2], cells[-1].strip("`")))
    return rows


def failures_in(text: str) -> list[str]:
    """Return the texts of the trials that failed."""
    return [part.partition("\n```")[0] for part in text.split("```text\n")[1:]]


def section(rows: Sequence[Row], failures: Sequence[str]) -> list[str]:
    """Return the lines of the section: sums over all runs, for each broker, and the runs."""
    totals = _sums(row.counts for row in rows)
    kills = sum(totals[f"kills of {victim}"] for victim in VICTIMS)
    of = ", ".join(f"{totals[f'kills of {victim}']:,} of the {victim}" for victim in VICTIMS)
    commits = len({row.commit for row in rows})
    lines = [
        _TEXT,
        f"- **{kills:,} kills** ({of}); {totals['messages']:,} messages, stored for each of 1 to {SUBSCRIBERS_MAX} "
        f"subscribers; on {commits} commit{'s' * (commits > 1)}",
        "- " + ", ".join(f"**{totals[kind]:,} {kind}**" for kind in KINDS),
        f"- {totals['redelivered']:,} redelivered, and recognised; {totals['left at the broker']:,} left at the broker",
        f"- {totals['failed']:,} of {totals['trials']:,} trials failed",
        "",
        f"| broker | {' | '.join(COUNTS)} |",
        "|---" * (len(COUNTS) + 1) + "|",
    ]
    for broker in dict.fromkeys([*BROKERS, *(row.broker for row in rows)]):
        if counts := _sums(row.counts for row in rows if row.broker == broker):
            lines.append(f"| {broker} | {' | '.join(f'{counts[name]:,}' for name in COUNTS)} |")
    lines += ["", "### Runs", "", f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *map(str, rows)]
    if failures:
        lines += ["", "### Trials that failed", ""]
        for failure in failures:
            lines += ["```text", failure, "```", ""]
    return lines


def _sums(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


class Book:
    """The results of one run of the command, beside those that the document at ``path`` has already."""

    def __init__(self, seed: int, path: Path | None) -> None:
        text = "" if path is None else document.section_of(path, SECTION)
        self._earlier, self._failures = rows_in(text), failures_in(text)
        self._path = path
        self._seed = str(seed)
        self._commit = document.commit()
        self._counts: dict[str, Counter[str]] = {}
        self.failed = 0
        self.kills = 0

    def add(self, result: Result) -> None:
        """Count a result, and write the document."""
        self._counts.setdefault(result.broker, Counter()).update(result.counts)
        self.kills += sum(result.counts.get(f"kills of {victim}", 0) for victim in VICTIMS)
        if result.problem:
            self.failed += 1
            self._failures.append(f"commit {self._commit}\n{result.problem}".replace("```", "'''"))
        if self._path is not None:
            document.write(SECTION, section([*self._earlier, *self.rows()], self._failures), self._path)

    def rows(self) -> list[Row]:
        """Return the rows of this run."""
        ended = document.now()
        return [Row(ended, broker, counts, self._seed, self._commit) for broker, counts in self._counts.items()]


# --- the command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.brokers", description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS, help="of all brokers together")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no trial after so many minutes")
    parser.add_argument("--only", action="append", choices=BROKERS, help="only this broker; may be repeated")
    parser.add_argument("--jobs", type=int, default=JOBS, help="trials at a time")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the kills")
    parser.add_argument("--proof", action="store_true", help="add a row for each broker to docs/proof.md")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: no server of ours is left behind
    home = Path(tempfile.mkdtemp(prefix="headgate-brokers-"))
    home.chmod(0o711)  # some servers run as another user
    book = Book(given.seed, document.PATH if given.proof else None)
    trials = plan(given.only or list(BROKERS), given.kills, given.seed)

    def run_one(number: int, trial: Trial) -> list[Result]:
        return [run_trial(trial, home / f"{number}-{trial.broker}")]

    def note(trial: Trial, results: Sequence[Result]) -> None:
        for result in results:
            book.add(result)
            print(f"{book.kills:,} kills; {trial}: {result.problem or 'good'}", flush=True)

    _run(trials, run_one, note, given.jobs, given.minutes)
    for row in book.rows():
        print(row)
    print(f"seed {given.seed}; {book.failed} of {len(trials)} trials failed")
    if any(home.iterdir()):
        print(f"histories and logs of what failed are in {home}")
    else:
        home.rmdir()
    return 1 if book.failed else 0


def _run(
    trials: Sequence[Trial],
    run_one: Callable[[int, Trial], list[Result]],
    note: Callable[[Trial, list[Result]], object],
    jobs: int,
    minutes: float,
) -> None:
    deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
    try:
        run_all(trials, run_one, note, jobs=jobs, deadline=deadline)
    except KeyboardInterrupt:
        print("cut short")


if __name__ == "__main__":
    sys.exit(main())
