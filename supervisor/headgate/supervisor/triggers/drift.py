"""How far the shared streams of this supervisor are at their brokers, and the questions of users about that.

The runner tells how far they have come with its figures. That is stored at most every `STORE_INTERVAL_S` seconds, and
at once if a producer has begun: where it begins is what somebody may have moved. It costs nothing at rest, and nothing
that headgate does depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import structlog

from headgate.protocol.messages.runner import DescribedStream, LaneProgress, StateChanges, StateSync
from headgate.scheduling.drift import LEVELS, Verdict, known_of
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseRetry

log = structlog.get_logger(__name__)

STORE_INTERVAL_S = 5.0
# A question that a runner has not answered for so long is asked again by the next poll: its own limit is shorter.
ANSWER_S = 60.0


class Runner(Protocol):
    """The runner that there is, or was last: `headgate.supervisor.runner_lifecycle.RunnerLifecycle`."""

    incarnation: int

    @property
    def running(self) -> int:
        """The incarnation that is running, 0 if none is."""
        ...


class Drift:
    """What the current runner has told, as far as it is not stored, and what is asked."""

    def __init__(self, store: Store, runner: Runner, *, retry: DatabaseRetry) -> None:
        self._store = store
        self._runner = runner
        self._retry = retry
        self._incarnation = 0
        self._names: dict[str, str] = {}  # of streams, by digest
        self._told: dict[str, tuple[LaneProgress, ...]] = {}  # by digest, of this incarnation
        self._begun: dict[str, set[float]] = {}  # when its producers began with lanes, as far as that is stored
        self._changed: set[str] = set()
        self._answers: dict[str, DescribedStream] = {}
        self._to_ask: list[str] = []
        self._asked: dict[str, float] = {}
        self._store_at: float | None = None
        self._verdicts: dict[str, Verdict] = {}

    def level(self, digest: str) -> int:
        """Return what a metric says of a stream: the level of the worst that was found and not accepted, 0 for none."""
        return LEVELS[self._verdicts.get(digest, "ok")]

    def note(self, incarnation: int, changes: StateChanges, now: float) -> None:
        """Take what a runner tells of its streams, and its answers."""
        if incarnation != self._runner.incarnation:
            return
        self._begin(incarnation)
        for stream in () if changes.figures is None else changes.figures.streams:
            self._names[stream.stream] = stream.name
            self._tell(stream.stream, stream.progress, now)
        for answer in changes.streams:
            self._tell(answer.stream, answer.progress, now)
            self._asked.pop(answer.stream, None)
            self._answers[answer.stream] = answer
            self._store_at = now

    def found(self, digests: Iterable[str], now: float) -> None:
        """Take the streams whose brokers a poll says are to be asked."""
        if self._runner.running:
            self._begin(self._runner.running)
            for digest in digests:
                if digest not in self._answers and now >= self._asked.get(digest, now):
                    self._asked[digest] = now + ANSWER_S
                    self._to_ask.append(digest)
            return
        for digest in digests:
            self._answers[digest] = DescribedStream(digest, error="no runner is running at this moment")
            self._store_at = now

    def wake_at(self) -> float | None:
        """Return the time at which `step` has to be called; None if there is none."""
        return None if self._store_at is None else max(self._store_at, self._retry.at)

    def step(self, epoch: Epoch, now: float) -> StateSync | None:
        """Store what is due, in one transaction; return a question for the runner, if there is one.

        Raises `LeaseLost`.
        """
        due_at = self.wake_at()
        if due_at is not None and now >= due_at:
            with self._retry.attempt(now):
                self._store_all(epoch)
        digests, self._to_ask = tuple(self._to_ask), []
        return StateSync(describe=digests) if digests else None

    def _begin(self, incarnation: int) -> None:
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            for state in (self._names, self._told, self._begun, self._changed, self._asked):
                state.clear()

    def _tell(self, digest: str, progress: tuple[LaneProgress, ...], now: float) -> None:
        if not progress:  # a producer that has no lane yet says nothing about those of the one before
            return
        progress = tuple(lane for lane in progress if lane.begun_at)
        if known_of(progress) == known_of(self._told.get(digest, ())):
            return
        self._told[digest] = progress
        self._changed.add(digest)
        is_new = not _begun(progress) <= self._begun.get(digest, set())
        due_at = now if is_new else now + STORE_INTERVAL_S
        self._store_at = due_at if self._store_at is None else min(due_at, self._store_at)

    def _store_all(self, epoch: Epoch) -> None:
        progress = {digest: self._told[digest] for digest in self._changed}
        verdicts = self._store.note_drift(epoch, progress, self._answers)
        for digest, verdict in verdicts.items():
            if LEVELS[verdict] > 1 and self._verdicts.get(digest) != verdict:
                log.error(
                    "the broker of a stream is not where headgate has left it",
                    stream=self._names.get(digest, digest),
                    verdict=verdict,
                    next="headgate streams drift",
                )
        self._verdicts |= verdicts
        for digest in progress.keys() & verdicts.keys():
            self._begun[digest] = _begun(self._told[digest])
        self._changed.clear()
        self._answers.clear()
        self._store_at = None


def _begun(progress: Iterable[LaneProgress]) -> set[float]:
    return {lane.begun_at for lane in progress}
