"""The judgement of a checker of tasks: what it has found, and how that is said."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from headgate.testing.crash.history import RecordT, summary

TERMINAL: Final = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})  # states of a task
KindT = TypeVar("KindT", bound=str)


class Finding(msgspec.Struct, Generic[KindT], frozen=True):
    """One thing that must never be. ``about`` is a task or a trigger; the story is in order of sight."""

    kind: KindT
    about: str
    why: str
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join((f"{self.kind}: {self.about}: {self.why}", *self.story))


class Report(msgspec.Struct, Generic[KindT], frozen=True):
    """What a history shows. Subclasses count what there was."""

    findings: tuple[Finding[KindT], ...]

    def count(self, kind: KindT) -> int:
        """Return the number of findings of one kind."""
        return sum(finding.kind == kind for finding in self.findings)

    def text(self, counts: str, kinds: Sequence[KindT]) -> str:
        """Return the counts and all findings as text."""
        return summary(counts, kinds, self.findings)


class Checker(Generic[RecordT]):
    """Takes a history record by record. Subclasses have `add`, and a report that may be asked for at any time."""

    def extend(self, records: Iterable[RecordT]) -> None:
        """Take more records. Raises `ValueError` for one that contradicts the others."""
        for record in records:
            self.add(record)

    def add(self, record: RecordT) -> None:
        """Take the next record; as `extend`."""
        raise NotImplementedError


def judge_file(
    arguments: Sequence[str],
    module: str,
    decode: Callable[..., Iterator[RecordT]],
    check: Callable[[Iterator[RecordT]], Report[Any]],
) -> int:
    """Print the judgement of a checker, run as ``module``, on the one file that is named; return the exit code.

    That is 0 if nothing is found, 1 if something is, 2 if it is no history. ``decode`` gives the records of its lines.
    """
    if len(arguments) != 1:
        print(f"usage: python -m {module} FILE", file=sys.stderr)
        return 2
    try:
        report = check(decode(Path(arguments[0]).read_bytes(), where=arguments[0]))
    except (OSError, ValueError) as error:
        print(f"{module.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 2
    print(report)
    return 1 if report.findings else 0
