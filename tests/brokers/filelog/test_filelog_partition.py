"""What one partition has read, and how far its offset may be committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.brokers.filelogs.partition import FileLogPosition, Partition
from headgate.brokers.filelogs.storage import FileLogError
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome

CLEAN = AdvanceOutcome(acked=2)
FAILED = AdvanceOutcome(acked=1, failed=1)
REJECTED = AdvanceOutcome(acked=1, rejected=1)
NOBODY = AdvanceOutcome()
LINE_BYTES = 10


def hand_out(partition: Partition, count: int) -> list[FileLogPosition]:
    return [partition.hand_out(partition.position, partition.position + LINE_BYTES) for _ in range(count)]


def items(positions: list[FileLogPosition], *outcomes: AdvanceOutcome) -> list[AdvanceItem]:
    return [AdvanceItem(*pair) for pair in zip(positions, outcomes, strict=True)]


def test_a_clean_batch_may_be_committed_to_its_end() -> None:
    partition = Partition("p", 0)
    verdict = partition.judge(items(hand_out(partition, 3), CLEAN, CLEAN, CLEAN))
    assert verdict == (30, [], None, 3)
    assert partition.committed == 0  # judging decides, it changes nothing


@pytest.mark.parametrize("failure", [FAILED, NOBODY, AdvanceOutcome(failed=1, rejected=1)])
def test_a_commit_stops_before_the_first_line_that_failed_or_that_nobody_took(failure: AdvanceOutcome) -> None:
    partition = Partition("p", 0)
    verdict = partition.judge(items(hand_out(partition, 4), CLEAN, failure, CLEAN, FAILED))
    assert verdict == (10, [], 10, 1)


def test_a_rejected_line_is_passed_and_named() -> None:
    partition = Partition("p", 0)
    positions = hand_out(partition, 2)
    verdict = partition.judge(items(positions, REJECTED, CLEAN))
    assert verdict == (20, [(positions[0], REJECTED)], None, 2)


def test_outcomes_of_an_older_generation_are_ignored_after_a_rewind() -> None:
    partition = Partition("p", 0)
    old = hand_out(partition, 3)
    partition.rewind(0, now=0)
    assert partition.judge(items(old, CLEAN, FAILED, CLEAN)) == (0, [], None, 0)
    new = hand_out(partition, 2)
    assert [position.offset for position in new] == [0, 10]
    assert partition.judge(items([*old[1:], *new], CLEAN, CLEAN, CLEAN, CLEAN)) == (20, [], None, 2)


def test_an_outcome_that_would_skip_a_line_is_refused() -> None:
    partition = Partition("p", 0)
    positions = hand_out(partition, 2)
    with pytest.raises(FileLogError, match="would skip a line"):
        partition.judge(items(positions[1:], CLEAN))


def test_a_commit_never_goes_back() -> None:
    partition = Partition("p", 50)
    with pytest.raises(FileLogError, match="went back"):
        partition.commit(40)


def test_the_delay_doubles_while_the_same_line_fails_up_to_its_limit_and_begins_anew_at_another() -> None:
    partition = Partition("p", 0, rewind_delay_s=1, rewind_delay_max_s=5)
    delays = []
    for _ in range(5):
        partition.rewind(20, now=100)
        delays.append(partition.not_before - 100)
    partition.rewind(30, now=100)
    assert [*delays, partition.not_before - 100] == [1, 2, 4, 5, 5, 1]


def test_the_delay_stays_finite_however_often_a_line_fails() -> None:
    partition = Partition("p", 0)
    for _ in range(3000):
        partition.rewind(0, now=0)
    assert partition.not_before == 30


@dataclass
class Log:
    """A partition, a lane that resolves what was handed out in order, and the truth about it."""

    lines: int
    partition: Partition = field(default_factory=lambda: Partition("p", 0))
    lane: list[FileLogPosition] = field(default_factory=list)
    last_outcome: dict[int, str] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.lines * LINE_BYTES

    def read(self, count: int) -> None:
        """What the producer does with a chunk of lines."""
        partition = self.partition
        start = partition.position
        for at in range(start, min(start + count * LINE_BYTES, self.end), LINE_BYTES):
            self.lane.append(partition.hand_out(at, at + LINE_BYTES))

    def advance(self, outcomes: list[str]) -> None:
        """What the producer does with a batch."""
        kinds = {"clean": CLEAN, "failed": FAILED, "rejected": REJECTED, "nobody": NOBODY}
        taken, self.lane = self.lane[: len(outcomes)], self.lane[len(outcomes) :]
        batch = items(taken, *(kinds[name] for name in outcomes[: len(taken)]))
        if not batch:
            return
        for (position, _), name in zip(batch, outcomes, strict=False):
            if position.generation == self.partition.generation:
                self.last_outcome[position.offset] = name
        verdict = self.partition.judge(batch)
        if verdict.failed_at is None:
            self.partition.in_flight -= verdict.resolved
        else:
            self.partition.rewind(verdict.failed_at, 0)
        self.partition.commit(verdict.commit_to)


OUTCOMES = st.lists(
    st.sampled_from(["clean", "clean", "clean", "rejected", "failed", "nobody"]), min_size=1, max_size=8
)
STEPS = st.lists(st.one_of(st.integers(1, 8), OUTCOMES), max_size=40)


@settings(deadline=None)
@given(lines=st.integers(1, 30), steps=STEPS)
def test_a_commit_never_passes_a_failed_or_unresolved_line_and_all_is_committed_once_outcomes_are_clean(
    lines: int, steps: list[int | list[str]]
) -> None:
    log = Log(lines)
    accepted: set[int] = set()
    for step in steps:
        before = log.partition.committed
        if isinstance(step, int):
            log.read(step)
        else:
            log.advance(step)
        partition = log.partition
        for at in range(before, partition.committed, LINE_BYTES):
            # Every line that a commit passes for the first time was accepted or rejected just now.
            assert log.last_outcome.get(at) in ("clean", "rejected")
            accepted.add(at)
        current = [position for position in log.lane if position.generation == partition.generation]
        assert partition.in_flight == len(current)
        assert all(position.offset >= partition.committed for position in current)
        assert before <= partition.committed <= partition.position
    for _ in range(2 * lines + 2):
        log.advance(["clean"] * (len(log.lane) or 1))
        log.read(lines)
    log.advance(["clean"] * (len(log.lane) or 1))
    assert log.partition.committed == log.end
    assert log.partition.in_flight == 0
