"""The truth of a crash test, read from outside by means of our own: rows, journals and files become a history.

Nothing here uses the code under test, except the names of its tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
from tests.proof.crash.connections import Connections

from headgate.testing.crash.history import encode

_DEAD_LETTERS = "SELECT count(*) FROM dead_letter"

RecordT = TypeVar("RecordT", bound=msgspec.Struct)
RecordT_contra = TypeVar("RecordT_contra", bound=msgspec.Struct, contravariant=True)
ReportT = TypeVar("ReportT")
ReportT_co = TypeVar("ReportT_co", covariant=True)


class Checker(Protocol[RecordT_contra, ReportT_co]):
    """Judges a history that grows."""

    def extend(self, history: Iterable[RecordT_contra]) -> None: ...

    def report(self) -> ReportT_co: ...


class Truth(Connections, ABC, Generic[RecordT, ReportT]):
    """The history of one database and its surroundings; grows by `look`."""

    def __init__(self, url: str, checker: Checker[RecordT, ReportT]) -> None:
        super().__init__(url)
        self._checker = checker
        self._history: list[RecordT] = []

    @abstractmethod
    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """Read everything, effects before their causes, into the history.

        ``at`` describes the moment. ``at_rest``: nothing will change. ``is_over``: the processes are gone as well.
        """

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all work is done."""

    def note_fault(self, at: str, pid: int = 0) -> None:
        """Record a fault that may cost work: that of one process, or (0) all work that is under way."""

    def report(self) -> ReportT:
        """Return the judgement on all looks together."""
        return self._checker.report()

    def write_history(self, path: Path) -> None:
        """Keep the history, for the command of its checker."""
        path.write_bytes(b"".join(map(encode, self._history)))

    def dead_letters(self) -> int:
        """Return the number of events that were put aside; there should be none."""
        return self._number(_DEAD_LETTERS)

    def _record(self, records: Iterable[RecordT]) -> None:
        new = list(records)
        self._history += new
        self._checker.extend(new)
