"""How many events a slice takes: learnt from what the database took for the slices before it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.supervisor.triggers.intake_harness import EPOCH, ScriptedStore, event

from headgate.protocol.messages.runner import (
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    RedeliveryEnd,
    RefusedEvent,
    StateChanges,
    StateSync,
)
from headgate.store.db import engine
from headgate.store.errors import DatabaseAway
from headgate.store.ids import Epoch
from headgate.store.triggers.events import StoredSlice
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.slice_size import (
    FAILED_LATE_S,
    SLICE_EVENTS_FIRST,
    SLICE_EVENTS_MIN,
    SLICE_S,
    SLICES_LEARNT,
    SliceSize,
)
from headgate.supervisor.triggers.intake import Intake


def settle(size: SliceSize, *, commit_s: float, event_s: float, slices: int = 40) -> tuple[int, float]:
    """Store long slices on a database of such times until the size is found; return it, and how long one takes."""
    for _ in range(slices):
        size.stored(size.items, commit_s + size.items * event_s)
    return size.items, commit_s + size.items * event_s


def test_a_database_that_answers_slowly_is_given_more_at_a_time() -> None:
    events, took_s = settle(SliceSize(100_000), commit_s=0.05, event_s=25e-6)
    assert took_s == pytest.approx(SLICE_S, rel=0.05)
    assert events == pytest.approx((SLICE_S - 0.05) / 25e-6, rel=0.05)


def test_a_database_that_stores_slowly_is_given_less_and_the_loop_comes_round_in_time() -> None:
    assert settle(SliceSize(5000), commit_s=0.001, event_s=0.001)[1] <= SLICE_S * 1.05


@pytest.mark.parametrize("commit_s", [0.16, 0.3, 2.0, 10.0])
def test_where_the_commit_takes_all_the_time_fewer_events_a_commit_would_not_help(commit_s: float) -> None:
    assert settle(SliceSize(5000), commit_s=commit_s, event_s=1e-5)[0] == 5000
    assert settle(SliceSize(5000), commit_s=commit_s, event_s=0.0)[0] == 5000
    events, took_s = settle(SliceSize(5000), commit_s=commit_s, event_s=0.001)
    assert took_s <= 2.1 * commit_s
    assert events >= 100


def test_a_database_that_changes_is_followed() -> None:
    size = SliceSize(5000)
    assert settle(size, commit_s=0.3, event_s=1e-5)[0] == 5000
    assert settle(size, commit_s=0.001, event_s=0.001)[1] <= SLICE_S * 1.05
    assert settle(size, commit_s=0.001, event_s=1e-5)[0] == 5000


@given(noise=st.lists(st.floats(0.5, 2.0), min_size=60, max_size=60))
def test_noise_leaves_the_size_within_its_bounds_and_the_commits_few(noise: list[float]) -> None:
    size, sizes = SliceSize(5000), []
    for factor in noise:
        sizes.append(size.items)
        size.stored(size.items, (0.02 + size.items * 20e-6) * factor)
    assert all(SLICE_EVENTS_MIN <= events <= 5000 for events in sizes)
    assert sum(sizes) / len(sizes) > 500


def test_the_size_is_bounded_and_moves_by_a_factor_of_two_at_most() -> None:
    size = SliceSize(1500)
    assert size.items == SLICE_EVENTS_FIRST
    size.stored(500, 1e-4)
    assert size.items == 1000
    size.stored(1000, 0.0)
    assert size.items == 1500
    size.stored(1500, 60.0)
    assert size.items == 750
    assert SliceSize(3).items == 3


def test_short_slices_say_nothing_of_long_ones() -> None:
    size = SliceSize(5000)
    for _ in range(100):
        size.stored(3, 0.4)
    assert size.items == SLICE_EVENTS_FIRST


class SlowStore(ScriptedStore):
    """Takes so long for an event, on a clock of its own, and gives up a slice that takes longer than it may."""

    def __init__(self, event_s: float, *, limit_s: float = engine.STATEMENT_TIMEOUT_S) -> None:
        super().__init__()
        self.event_s, self.limit_s = event_s, limit_s
        self.now = 0.0
        self.given_up: list[int] = []

    def clock(self) -> float:
        return self.now

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
        items = len(events) + len(refused) + len(finished) + len(redriven)
        self.now += min(items * self.event_s, self.limit_s)
        if items * self.event_s > self.limit_s:
            self.given_up.append(items)
            raise DatabaseAway("db", "canceling statement due to statement timeout")
        return super().store_slice(
            epoch, events=events, refused=refused, finished=finished, described=described, redriven=redriven
        )


def slow_intake_of(store: SlowStore) -> Intake:
    return Intake(store, slice_events_max=5000, retry=DatabaseRetry("events", 1.0, 8.0), clock=store.clock)


def run_through(intake: Intake, store: SlowStore, *, steps_max: int = 10_000) -> list[StateSync]:
    """Step whenever the intake wants to, until nothing waits; return the answers."""
    answers: list[StateSync] = []
    for _ in range(steps_max):
        wake_at = intake.wake_at()
        if wake_at is None:
            return answers
        store.now = max(store.now, wake_at)
        stored = intake.step(EPOCH, store.now)
        if stored is not None and stored.answer is not None:
            answers.append(stored.answer)
    raise AssertionError("the intake makes no progress")


@pytest.mark.parametrize("limit_s", [engine.IDLE_IN_TRANSACTION_MAX_S, engine.STATEMENT_TIMEOUT_S, 35.0])
@pytest.mark.parametrize("event_s", [0.1, 0.35, 1.0, 3.0, 9.9])
def test_a_slice_that_is_too_long_for_the_database_is_halved_until_it_fits(event_s: float, limit_s: float) -> None:
    store = SlowStore(event_s, limit_s=limit_s)
    intake = slow_intake_of(store)
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(500))))
    assert run_through(intake, store) == [StateSync(1, persisted=tuple(range(100, 600)))]
    assert store.stored == list(range(500)), "all of them, once and in order"
    assert len(store.given_up) <= 9 + len(store.transactions) / SLICES_LEARNT, "little time is lost by trying more"


def test_a_round_of_which_no_two_items_fit_into_one_slice_comes_to_its_end_and_so_does_the_next() -> None:
    store = SlowStore(20.0)
    intake = slow_intake_of(store)
    refused = tuple(RefusedEvent(1, "run", index, 50 + index, "too big", 2_000_000, b"head") for index in range(3))
    finished = tuple(FinishedTrigger(index, "run", "returned", 1) for index in range(3))
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(5)), more=True))
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(5, 9)), refused, finished))
    intake.add_frame(1, StateChanges(2, (event(9), event(10))))
    first, second = run_through(intake, store)
    assert (first.round, first.persisted) == (1, tuple(range(100, 109)))
    assert [refusal.seq for refusal in first.refused] == [50, 51, 52]
    assert (second.round, second.persisted) == (2, (109, 110))
    assert store.finished == list(finished)


def test_what_failed_is_halved_however_long_a_slice_might_be() -> None:
    store = SlowStore(10.0)
    intake = slow_intake_of(store)
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(6))))
    run_through(intake, store)
    assert store.given_up == [6]
    assert [len(transaction) for transaction in store.transactions] == [3, 3]


@pytest.mark.parametrize("failing_s", [0.0, engine.CONNECT_TIMEOUT_S, engine.SQLITE_BUSY_TIMEOUT_S])
def test_a_database_that_is_down_or_locked_makes_no_slice_smaller(failing_s: float) -> None:
    store = SlowStore(1.0, limit_s=failing_s)
    intake = slow_intake_of(store)
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(500))))
    for _ in range(20):
        store.now = intake.wake_at() or store.now
        assert intake.step(EPOCH, store.now) is None
    store.event_s = 0.0
    run_through(intake, store)
    assert [len(transaction) for transaction in store.transactions] == [500]


def test_a_slice_grows_again_when_the_database_is_quick_again() -> None:
    store = SlowStore(20.0)
    intake = slow_intake_of(store)
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(500))))
    for _ in range(20):
        store.now = max(store.now, intake.wake_at() or 0.0)
        intake.step(EPOCH, store.now)
    assert {len(transaction) for transaction in store.transactions} == {1}
    store.event_s = 1e-5
    run_through(intake, store)
    intake.add_frame(1, StateChanges(2, tuple(event(index) for index in range(20_000))))
    run_through(intake, store)
    assert len(store.transactions[-2]) == 5000


def test_what_was_learnt_before_a_slice_was_too_long_does_not_make_the_next_one_longer() -> None:
    size = SliceSize(5000)
    assert settle(size, commit_s=0.3, event_s=1e-5)[0] == 5000
    size.failed(5000, 35.0)
    assert size.items == 2500
    size.stored(2500, 20.0)
    assert size.items == 1250


def test_a_slice_smaller_than_the_least_comes_back_to_it_but_not_where_twice_as_many_may_be_too_many() -> None:
    size = SliceSize(5000)
    size.failed(20, FAILED_LATE_S)
    assert size.items == 10
    size.stored(9, 0.1)
    assert size.items == 10, "it says less than a whole one"
    size.stored(10, FAILED_LATE_S / 2 + 0.1)
    assert size.items == 10

    size = SliceSize(5000)
    size.failed(20, FAILED_LATE_S)
    for expected in (20, 40, SLICE_EVENTS_MIN, SLICE_EVENTS_MIN):
        size.stored(size.items, size.items * 0.1)
        assert size.items == expected


@pytest.mark.parametrize("commit_s", [0.5, 5.0, 10.0])
def test_where_the_commit_takes_all_the_time_a_slice_does_not_stay_small(commit_s: float) -> None:
    size = SliceSize(5000)
    size.failed(1, 35.0)
    assert size.items == 1
    assert settle(size, commit_s=commit_s, event_s=1e-5)[0] == 5000


def test_a_slice_of_one_is_as_small_as_it_gets() -> None:
    size = SliceSize(5000)
    size.failed(1, 60.0)
    assert size.items == 1


def test_the_limits_that_a_long_slice_runs_into_are_told_from_those_that_it_does_not() -> None:
    unconcerned = (engine.CONNECT_TIMEOUT_S, engine.LOCK_TIMEOUT_S, engine.SQLITE_BUSY_TIMEOUT_S)
    concerned = (engine.STATEMENT_TIMEOUT_S, engine.IDLE_IN_TRANSACTION_MAX_S, engine.TCP_UNACKED_MAX_S)
    assert max(unconcerned) < FAILED_LATE_S < min(concerned)
