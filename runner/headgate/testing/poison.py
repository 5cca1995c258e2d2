"""The demo of bad messages: three of them are somewhere in the log, and everything else is to be stored all the same.

``headgate demo --poison`` runs this module in a process of its own::

    python -m headgate.testing.poison FOLDER --events N --partitions P

With the settings that users have, three subscribers share the stream. All of them derive too large an event from one
message, one of them raises on a second one, and another ends its process on a third (`headgate.testing.poisonous`). A
message that a subscriber cannot take has to be a dead letter of that subscriber, kept whole. For the audit, which is
that of the ordinary demo (`headgate.testing.demo`), such a letter counts as stored.

Then the triggers are mended and the limit of an event is raised, as after a deployment, and one command brings all
letters back: every message has to be stored for every subscriber, once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from headgate.testing.crash import history
from headgate.testing.crash.commands import PairFailed
from headgate.testing.crash.pair import SETTINGS, Pair
from headgate.testing.demo import (
    DATABASE_VARIABLE,
    GROUP,
    NOT_PROVEN,
    Audit,
    Writer,
    WrittenLog,
    print_report,
    run_program,
)
from headgate.testing.poisonous import MENDED, SWOLLEN_BYTES, Poisonous

SUBSCRIBERS = ("takes-most", "raises", "kills")

RATE = 250.0  # events written a second
BEHIND_S = 1.0  # the stream is behind if more events are not acknowledged than are written in this time
BEHIND_S_MAX = 60.0  # the longest that it may be behind in one piece
DEATHS_MAX = 5  # of the runner
POLL_S = 0.02  # between two readings of the committed offsets
LINE_INTERVAL_S = 5.0  # between two lines of progress
LOOK_INTERVAL_S = 20.0  # between two looks at the stored events: a look takes as long as listing them
TIME_LIMIT_S = 300.0  # of the whole demo besides the writing, after which it fails
# Texts of the supervisor's log.
RUNNER_ENDED = re.compile(r"the runner ended +\[")  # not: the runner ended while ...
LEFT_BEHIND = "did not rejoin its shared stream in time"
_ID_IN_LETTER = re.compile(r"\bid\W+(\d+)")

Letters = dict[tuple[str, int], bool]  # whether it is whole, by subscriber and id of the message
_NO_MESSAGE = -1  # the id of a letter in which none is found


@dataclass(frozen=True)
class PoisonPlan:
    """The size of the demo, and which messages are bad."""

    events: int
    partitions: int

    @property
    def swells(self) -> int:
        """The id of the message from which all derive too large an event."""
        return self.events // 5

    @property
    def raises(self) -> int:
        """The id of the message on which one subscriber raises."""
        return 2 * self.events // 5

    @property
    def kills(self) -> int:
        """The id of the message on which one subscriber ends its process."""
        return 3 * self.events // 5

    def trigger(self, name: str, folder: Path) -> Poisonous:
        """Return the trigger of a subscriber."""
        return Poisonous(
            str(folder),
            GROUP,
            raises=[self.raises] if name == "raises" else [],
            kills=[self.kills] if name == "kills" else [],
            swells=[self.swells],
        )

    def letters(self) -> set[tuple[str, int]]:
        """Return the dead letters that there should be: by subscriber and id of the message."""
        return {("raises", self.raises), ("kills", self.kills), *((name, self.swells) for name in SUBSCRIBERS)}


class Lag:
    """How long the stream is behind its writer, from samples of both: until the first sample at which it is not."""

    def __init__(self, events_max: float) -> None:
        self._events_max = events_max
        self._since: float | None = None
        self.longest_s = 0.0

    def sample(self, now: float, unacknowledged: int) -> None:
        """Take in how many written events are not acknowledged."""
        if self._since is not None:
            self.longest_s = max(self.longest_s, now - self._since)
        if unacknowledged <= self._events_max:
            self._since = None
        elif self._since is None:
            self._since = now


@dataclass(frozen=True)
class Mended:
    """What came of the dead letters once their causes were mended: ``left`` are those that did not come back."""

    redriven: int
    left: Letters
    stored: Mapping[str, int]  # by subscriber
    checked: history.Report
    strange_rows: int
    exit_code: int


@dataclass(frozen=True)
class PoisonResult:
    """The outcome of a demo that has come to its end."""

    plan: PoisonPlan
    written: int
    stored: Mapping[str, int]  # by subscriber, letters not included
    checked: history.Report
    strange_rows: int
    letters: Letters
    deaths: int
    left_behind: int
    behind_s: float
    exit_code: int
    mended: Mended

    def faults(self) -> list[str]:
        """Return the faults, in words; the demo has proven its promise if there are none."""
        expected = self.plan.letters()
        extra, missing = self.letters.keys() - expected, expected - self.letters.keys()
        cut = [place for place, is_whole in self.letters.items() if not is_whole]
        found: dict[str, object] = {
            f"{self.checked.count('lost'):,} events are lost": self.checked.count("lost"),
            f"{self.checked.count('stored twice'):,} events are stored twice": self.checked.count("stored twice"),
            f"{self.strange_rows:,} stored events are not in the log": self.strange_rows,
            f"{self.checked.count('advanced before stored'):,} events were acknowledged before they were stored": (
                self.checked.count("advanced before stored")
            ),
            f"{self.written:,} of {self.plan.events:,} events were written": self.written != self.plan.events,
            f"dead letters of messages that can be taken: {_places(extra)}": extra,
            f"no dead letter of a bad message: {_places(missing)}": missing,
            f"dead letters that are not whole: {_places(cut)}": cut,
            f"a subscriber was left behind {self.left_behind:,} times": self.left_behind,
            f"the runner died {self.deaths:,} times; at most {DEATHS_MAX} are needed": self.deaths > DEATHS_MAX,
            f"the stream was behind for {self.behind_s:.0f} s; at most {BEHIND_S_MAX:.0f} s are needed": (
                self.behind_s > BEHIND_S_MAX
            ),
            f"the supervisor left with exit code {self.exit_code} when it was asked to stop": self.exit_code,
        }
        return [words for words, is_so in (found | self._faults_after_mending()).items() if is_so]

    def _faults_after_mending(self) -> dict[str, object]:
        mended, after = self.mended, "after the mending"
        lost, twice = mended.checked.count("lost"), mended.checked.count("stored twice")
        missing = [name for name in SUBSCRIBERS if mended.stored.get(name, 0) != self.plan.events]
        return {
            f"{after}, dead letters are left: {_places(set(mended.left))}": mended.left,
            f"{after}, {mended.redriven:,} of {len(self.plan.letters()):,} dead letters came back": (
                mended.redriven != len(self.plan.letters())
            ),
            f"{after}, not everything is stored for {', '.join(missing)}": missing,
            f"{after}, {lost:,} events are lost": lost,
            f"{after}, {twice:,} events are stored twice": twice,
            f"{after}, {mended.strange_rows:,} stored events are not in the log": mended.strange_rows,
            f"{after}, the supervisor left with exit code {mended.exit_code}": mended.exit_code,
        }

    def lines(self) -> list[tuple[str, str]]:
        """Return label and value of each line of the table."""
        return [
            ("events written", f"{self.written:,}"),
            *((f"stored for {name}", f"{number:,}") for name, number in self.stored.items()),
            *(
                (f"dead letter of {name}", f"message {id_:,}, {'whole' if is_whole else 'cut'}")
                for (name, id_), is_whole in sorted(self.letters.items())
            ),
            ("lost", f"{self.checked.count('lost'):,}"),
            ("stored twice", f"{self.checked.count('stored twice'):,}"),
            (f"acknowledged before stored, in {self.checked.looks:,} looks", self._early()),
            ("deaths of the runner", f"{self.deaths:,}"),
            ("longest time behind the writer", f"{self.behind_s:.1f} s"),
            ("after the mending: dead letters redriven", f"{self.mended.redriven:,}"),
            *((f"stored for {name} then", f"{number:,}") for name, number in self.mended.stored.items()),
            ("lost then", f"{self.mended.checked.count('lost'):,}"),
            ("stored twice then", f"{self.mended.checked.count('stored twice'):,}"),
        ]

    def _early(self) -> str:
        return f"{self.checked.count('advanced before stored'):,}"


def _places(places: Sequence[tuple[str, int]] | set[tuple[str, int]]) -> str:
    return ", ".join(f"message {id_:,} of {name}" for name, id_ in sorted(places))


def letters_of(rows: Sequence[Mapping[str, Any]]) -> Letters:
    """Return the dead letters from the rows of ``headgate dlq list --json``.

    The id of the message is found in the head of the payload; a letter without one gets `_NO_MESSAGE`.
    """
    return {(str(row["watcher"]), _message_of(row)): bool(row["payload_kept"]) for row in rows}


def _message_of(row: Mapping[str, Any]) -> int:
    match = _ID_IN_LETTER.search(str(row["payload_head"]))
    return int(match[1]) if match else _NO_MESSAGE


class PoisonDemo:
    """One demo, in a folder of its own."""

    def __init__(self, plan: PoisonPlan, folder: Path, pair: Pair, out: Console) -> None:
        self._plan = plan
        self._pair = pair
        self._out = out
        self._folder = folder / "log"
        self._folder.mkdir()
        self._log = WrittenLog(self._folder)
        for name in SUBSCRIBERS:
            pair.add(plan.trigger(name, self._folder), name)
        self._audit = Audit(self._log, SUBSCRIBERS, self._stored)
        self._letters: Letters = {}
        self._lag = Lag(RATE * BEHIND_S)
        self._line_at = time.monotonic() + LINE_INTERVAL_S
        self._look_at = time.monotonic() + LOOK_INTERVAL_S

    @property
    def progress(self) -> str:
        """How far it has come, in words."""
        acknowledged = self._log.acknowledged(self._log.committed())
        deaths = len(RUNNER_ENDED.findall(self._pair.log_path.read_text(errors="replace")))
        return f"acknowledged {acknowledged:,} of {self._log.written:,} written, deaths of the runner {deaths}"

    def run(self) -> PoisonResult:
        """Run it to its end. Raises `PairFailed` if it cannot get there."""
        self._pair.start()
        self._pair.wait_until(self._pair.ready_count, "the runner is ready")
        deadline = time.monotonic() + TIME_LIMIT_S + self._plan.events / RATE
        plan = self._plan
        with Writer(self._folder, events=plan.events, partitions=plan.partitions, rate=RATE) as writer:
            while (acknowledged := self._sample()) < plan.events:
                writer.check()
                if not self._pair.is_running:
                    raise self._pair.left_by_itself()
                if time.monotonic() > deadline:
                    raise self._pair.failure(f"{plan.events - acknowledged:,} events are not acknowledged in time")
                time.sleep(POLL_S)
        log = self._pair.log_path.read_text(errors="replace")
        exit_code = self._pair.stop()
        self._audit.look("the pair has left", at_rest=True)
        return PoisonResult(
            plan=plan,
            written=self._log.written,
            stored={
                name: len(events) - sum(owner == name for owner, _ in self._letters)
                for name, events in self._audit.events.items()
            },
            checked=self._audit.report(),
            strange_rows=self._audit.strange_rows,
            letters=self._letters,
            deaths=len(RUNNER_ENDED.findall(log)),
            left_behind=log.count(LEFT_BEHIND),
            behind_s=self._lag.longest_s,
            exit_code=exit_code,
            mended=self._mend(),
        )

    def _mend(self) -> Mended:
        """Mend the triggers, bring the dead letters back with one command, and audit the database anew."""
        self._out.print("the triggers are mended, and the limit of an event is raised")
        self._folder.with_name(MENDED).touch()
        self._pair.set(event_bytes_max=str(2 * SWOLLEN_BYTES))
        self._pair.start()
        redriven = self._pair.redrive()
        exit_code = self._pair.stop()
        audit = Audit(WrittenLog(self._folder), SUBSCRIBERS, self._stored)
        audit.look("the letters are back", at_rest=True)
        return Mended(
            redriven=redriven,
            left=self._letters,
            stored={name: len(events) for name, events in audit.events.items()},
            checked=audit.report(),
            strange_rows=audit.strange_rows,
            exit_code=exit_code,
        )

    def _sample(self) -> int:
        """Read offsets and log once; return how many events are acknowledged."""
        committed = self._log.committed()
        self._log.read()
        acknowledged, now = self._log.acknowledged(committed), time.monotonic()
        self._lag.sample(now, self._log.written - acknowledged)
        if now >= self._line_at:
            self._line_at = now + LINE_INTERVAL_S
            self._out.print(self.progress)
        if now >= self._look_at:
            self._audit.look(f"at {acknowledged:,} events")
            self._look_at = time.monotonic() + LOOK_INTERVAL_S
        return acknowledged

    def _stored(self) -> list[dict[str, Any]]:
        """Return the rows of stored events, and as such rows the dead letters that are whole."""
        rows = self._pair.events()
        letters = self._pair.dead_letter_rows()
        self._letters = letters_of(letters)
        whole = [
            # A negative id is that of no event.
            {"id": -row["id"], "watcher": row["watcher"], "payload": {"id": _message_of(row)}, "redelivered": 0}
            for row in letters
            if row["payload_kept"]
        ]
        return [*rows, *whole]


def prove(
    plan: PoisonPlan,
    folder: Path,
    database_url: str | None,
    out: Console,
    *,
    waits: Mapping[str, str] | None = None,
) -> bool:
    """Run the demo in an empty folder, print its report, and return whether all is well.

    ``waits`` replaces settings; without it they are those that users have.
    """
    settings = {"log_format": SETTINGS["log_format"], **(waits or {})}
    if database_url:
        settings["database_url"] = database_url
    with Pair(folder, settings=settings, has_short_waits=False) as pair:
        demo = PoisonDemo(plan, folder, pair, out)
        try:
            result = demo.run()
        except PairFailed as failure:
            out.print(f"\nthe demo failed ({demo.progress}): {failure}", markup=False)
            return False
    faults = result.faults()
    print_report(out, "headgate demo --poison", [(*line, False) for line in result.lines()], faults)
    if not faults:
        out.print(
            "Every message was stored for every subscriber, or is a whole dead letter of one that cannot take it. "
            "All letters came back, and every message is stored for every subscriber, once."
        )
    return not faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m headgate.testing.poison", description="See `headgate demo --help`."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--partitions", type=int, required=True)
    given = parser.parse_args(arguments)
    out = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    plan = PoisonPlan(given.events, given.partitions)
    return 0 if prove(plan, given.folder, os.environ.get(DATABASE_VARIABLE), out) else NOT_PROVEN


if __name__ == "__main__":
    run_program(main)
