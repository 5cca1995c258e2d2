"""The report of a crash test: a table, and the story of each finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

import msgspec

from headgate.testing.crash import history
from headgate.testing.crash.history import Finding, Report

WIDTH_CHARS = 110  # of the table if it is not printed on a terminal
STORIES_MAX = 5  # in the text of a failure; the history has all of them
_STILL_MISSING = "not stored for "  # how the checker's line about such a look begins


@dataclass(frozen=True, kw_only=True)
class CrashReport:
    """Result of one crash test.

    ``deaths``: each kill as text, and whether the process died at the planned mark. ``pending``: messages that the
    broker still held at the end. ``strange_rows``: stored events whose payload names no message. ``incomplete``:
    messages that gave a subscriber some of their events and not all. ``unwanted``: events of messages that should have
    given none. ``dead_letters``: the reason of each. ``last_error``: the last one in the supervisor's log.
    """

    subject: str
    checked: Report
    deaths: tuple[tuple[str, bool], ...]
    subscribers: int
    has_producer: bool
    pending: int
    strange_rows: int
    exit_code: int
    seed: int
    seconds: float
    history_path: str
    incomplete: int = 0
    unwanted: int = 0
    dead_letters: Sequence[str] = ()
    last_error: str = ""

    @property
    def kills(self) -> int:
        """The number of times a process was killed."""
        return len(self.deaths)

    def faults(self) -> list[str]:
        """Return the faults, in words; the test has passed if there are none."""
        counts = Counter(finding.kind for finding in self.checked.findings)
        found = [f"{count:,} {kind}" for kind, count in counts.items()]
        if self.has_producer and self.pending:
            found.append(f"{self.pending:,} messages are never acknowledged at the broker")
        if self.strange_rows:
            found.append(f"{self.strange_rows:,} stored events name no message in their payload")
        if self.incomplete:
            found.append(f"{self.incomplete:,} messages gave fewer events than events_per_message says")
        if self.unwanted:
            found.append(f"{self.unwanted:,} events of messages that were to give none")
        if self.dead_letters:
            found.append(f"{len(self.dead_letters):,} events became dead letters, the first: {self.dead_letters[0]}")
        if self.exit_code:
            found.append(f"the supervisor left with exit code {self.exit_code} when it was asked to stop")
        return found

    def lines(self) -> list[tuple[str, str, bool]]:
        """Return label, value and whether it is bad, for each line of the table."""
        checked = self.checked
        times = Counter(f"{where}" if reached else f"{where}: not reached" for where, reached in self.deaths)
        lines = [
            ("messages published", f"{checked.published:,}", False),
            (f"events stored, subscribers: {self.subscribers}", f"{checked.stored:,}", False),
            ("redelivered", f"{checked.redelivered:,}", False),
        ]
        for label, kind in (("lost", "lost"), ("stored twice", "stored twice")):
            count = sum(finding.kind == kind for finding in checked.findings)
            lines.append((label, f"{count:,}", count > 0))
        if self.has_producer:
            for kind in history.KINDS[2:]:
                count = sum(finding.kind == kind for finding in checked.findings)
                lines.append((kind, f"{count:,}", count > 0))
            lines.append(("left at the broker", f"{self.pending:,}", self.pending > 0))
        else:
            lines.append(("acknowledged", "no producer, nothing to look at", False))
        lines.append((f"SIGKILLs, in {self.seconds:.0f} s and {checked.looks:,} looks", f"{self.kills:,}", False))
        lines += [(f"    {where}", f"{count:,}", False) for where, count in sorted(times.items())]
        return lines

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for label, value, is_bad in self.lines():
            table.add_row(label, value + (" BAD" if is_bad else ""))
        out = StringIO()
        Console(file=out, width=WIDTH_CHARS, highlight=False).print(table)
        return f"crash test of {self.subject}, seed {self.seed}\n{out.getvalue().rstrip()}"


class CrashTestFailed(AssertionError):
    """A crash test found something; ``report`` holds all of it."""

    def __init__(self, report: CrashReport) -> None:
        self.report = report
        stories = [_text_of(finding) for finding in report.checked.findings[:STORIES_MAX]]
        more = len(report.checked.findings) - len(stories)
        if more > 0:
            stories.append(f"... and {more:,} more")
        super().__init__(
            "\n".join(
                [
                    "; ".join(report.faults()),
                    str(report),
                    *stories,
                    *([f"the last error in the log: {report.last_error}"] if report.last_error else []),
                    f"all of it: python -m headgate.testing.crash.history {report.history_path}",
                ]
            )
        )


def _text_of(finding: Finding) -> str:
    """Return the story of a finding, without repeated looks at which nothing had changed."""
    story: list[str] = []
    for line in finding.story:
        if not (story and line.startswith(_STILL_MISSING) and story[-1].startswith(_STILL_MISSING)):
            story.append(line)
    return str(msgspec.structs.replace(finding, story=tuple(story)))
