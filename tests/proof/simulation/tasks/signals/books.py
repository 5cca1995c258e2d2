"""The books of the checker of signals: the log of each key, and the waits of sensors, as they should be."""

from __future__ import annotations

import msgspec
from tests.proof.history.signal_history import Stored, Waited
from tests.proof.simulation.tasks.signals.plans import Sensor, canonical
from tests.proof.simulation.tasks.signals.records import SignalStored

SAME_TIME_S = 1e-5  # the database knows microseconds, so it cannot tell what is closer


class Version(msgspec.Struct):
    """One version of a key."""

    stored: SignalStored
    is_kept: bool = True

    def as_seen(self) -> Stored:
        """Return it as the checker of histories takes it."""
        one = self.stored
        return Stored(one.key, one.version, one.dedup, canonical(one.value), one.run)


class KeyBook(msgspec.Struct):
    """The log of a key since it was forgotten last; ``age`` counts that."""

    key: str
    age: int = 0
    versions: list[Version] = []
    forgotten: list[Version] = []
    begun_at: float = -1.0

    def add(self, stored: SignalStored) -> None:
        """Add the next version."""
        self.versions.append(Version(stored))

    @property
    def last(self) -> int:
        """The newest version; 0 without any."""
        return len(self.versions)

    def version(self, number: int) -> Version | None:
        """Return a version, if it was sent."""
        return self.versions[number - 1] if 0 < number <= self.last else None

    def count(self, number: int, dedup: str) -> int:
        """Return how often a version was given to the signal with a dedup, of all ages; an empty one is of any."""
        every = [one.stored for one in (*self.versions, *self.forgotten)]
        return sum(one.version == number and dedup in ("", one.dedup) for one in every)

    def with_dedup(self, dedup: str) -> Version | None:
        """Return the version that is kept and has a dedup."""
        return next((one for one in self.versions if one.is_kept and one.stored.dedup == dedup), None)

    def kept(self, after: int, upto: int, run: str) -> list[SignalStored]:
        """Return the versions in between that are kept and that a run may consider."""
        return [one.stored for one in self.versions[after:upto] if one.is_kept and one.stored.run in ("", run)]

    def last_before(self, at: float) -> int:
        """Return the newest version that was sent before a time; 0 without any."""
        return max((one.stored.version for one in self.versions if one.stored.at < at), default=0)

    def begin(self, at: float) -> None:
        """Forget all versions."""
        self.age += 1
        self.begun_at = at
        self.forgotten += self.versions
        self.versions = []


class SensorWait(msgspec.Struct):
    """One wait of a sensor. Versions that were ``gone`` when it began could not be held against it."""

    wait: Waited
    age: int
    began_at: float
    gone: frozenset[int]

    @classmethod
    def begin(
        cls, task: str, plan: Sensor, book: KeyBook, *, start: int | None, run_created_at: float, now: float
    ) -> SensorWait:
        """Return the wait of a task that begins now; ``start``: the newest version when its run was created.

        Without ``start`` the DAG had no such task then, so the time of that decides.
        """
        run = task.rpartition("/")[0]
        since = until = start if start is not None else book.last_before(run_created_at - SAME_TIME_S)
        if start is None:
            until = book.last_before(run_created_at + SAME_TIME_S)
        if plan.since == "latest":
            before = book.kept(0, since, run)
            since = before[-1].version - 1 if before else since
        wanted = None if plan.value is None else canonical(plan.value)
        gone = frozenset(one.stored.version for one in book.versions if not one.is_kept)
        wait = Waited(task, book.key, wanted, since, until=until if until > since and start is None else 0, run=run)
        return cls(wait, book.age, now, gone)

    def rows(self, book: KeyBook) -> list[Stored]:
        """Return the versions that it can be held against."""
        return [one.as_seen() for one in book.versions if one.stored.version not in self.gone]
