"""An intake on a store that a test scripts."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.protocol.messages.runner import (
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    RedeliveryEnd,
    RefusedEvent,
    StateSync,
)
from headgate.store.errors import RowsRefused
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.triggers.events import StoredSlice
from headgate.store.triggers.redeliveries import Difference
from headgate.store.triggers.watchers import Replaced
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.intake import (
    Intake,
)

EPOCH = Epoch(7)


class ScriptedStore(Store):
    """Stores in memory; refuses events with a bad payload; fails with what `failures` says, one call each."""

    def __init__(self) -> None:
        self.task_streams: set[int] = set()
        self.transactions: list[list[int]] = []
        self.dead_lettered: list[int] = []
        self.finished: list[FinishedTrigger] = []
        self.refused: list[RefusedEvent] = []
        self.described: list[DescribedTrigger] = []
        self.redriven: list[RedeliveryEnd] = []
        self.failures: list[Exception] = []
        self.differing: tuple[Difference, ...] = ()
        self.replaced: tuple[Replaced, ...] = ()

    def store_slice(
        self,
        epoch: Epoch,
        *,
        events: Sequence[FiredEvent] = (),
        refused: Sequence[RefusedEvent] = (),
        finished: Sequence[FinishedTrigger] = (),
        described: Sequence[DescribedTrigger] = (),
        redriven: Sequence[RedeliveryEnd] = (),
    ) -> StoredSlice:
        assert epoch == EPOCH
        if self.failures:
            raise self.failures.pop(0)
        if any(event.payload == b"bad" for event in events):
            raise RowsRefused("one of them is bad")
        self.transactions.append([event.sequence_index for event in events])
        self.refused += refused
        self.finished += finished
        self.described += described
        self.redriven += redriven
        failed = {run.trigger_id: 1 for run in finished if run.outcome == "failed"}
        return StoredSlice(len(events), 0, failed, differing=self.differing, replaced=self.replaced)

    def dead_letter_event(self, epoch: Epoch, event: FiredEvent, reason: str) -> bool:
        assert epoch == EPOCH
        if self.failures:
            raise self.failures.pop(0)
        self.dead_lettered.append(event.sequence_index)
        return event.seq != 0 or event.trigger_id not in self.task_streams

    @property
    def stored(self) -> list[int]:
        return [index for transaction in self.transactions for index in transaction]


def intake_of(store: ScriptedStore, *, slice_events_max: int = 500) -> Intake:
    return Intake(store, slice_events_max=slice_events_max, retry=DatabaseRetry("events", 1.0, 8.0), clock=lambda: 0.0)


def event(index: int, payload: bytes = b"1") -> FiredEvent:
    return FiredEvent(1, "run", index, seq=100 + index, payload=payload)


def run_dry(intake: Intake, now: float = 0.0) -> list[StateSync]:
    """Step until nothing waits; return the answers."""
    answers = []
    while not intake.is_empty:
        stored = intake.step(EPOCH, now)
        if stored is not None and stored.answer is not None:
            answers.append(stored.answer)
    return answers
