"""The intake, with a store that does as it is told: what is confirmed, when, and to whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.messages.runner import FinishedTrigger, FiredEvent, RefusedEvent, StateChanges, StateSync
from headgate.store.db import engine
from headgate.store.errors import DatabaseAway, DatabaseFault, LeaseLost, RowsRefused
from headgate.store.triggers.events import StoredSlice
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.intake import (
    FAILED_LATE_S,
    ROUNDS_WAITING_MAX,
    SLICE_EVENTS_FIRST,
    SLICE_EVENTS_MIN,
    SLICE_S,
    SLICES_UNTIL_TRIED,
    Intake,
    Slice,
    SliceSize,
)

EPOCH = 7


class ScriptedStore:
    """Stores in memory; refuses events with a bad payload; fails with what `failures` says, one call each."""

    def __init__(self) -> None:
        self.transactions: list[list[int]] = []
        self.buried: list[int] = []
        self.finished: list[FinishedTrigger] = []
        self.refused: list[RefusedEvent] = []
        self.failures: list[Exception] = []

    def store_slice(
        self,
        epoch: int,
        *,
        events: Sequence[FiredEvent],
        refused: Sequence[RefusedEvent],
        finished: Sequence[FinishedTrigger],
    ) -> StoredSlice:
        assert epoch == EPOCH
        if self.failures:
            raise self.failures.pop(0)
        if any(event.payload == b"bad" for event in events):
            raise RowsRefused("one of them is bad")
        self.transactions.append([event.sequence_index for event in events])
        self.refused += refused
        self.finished += finished
        return StoredSlice(len(events), 0, {run.trigger_id: 1 for run in finished if run.outcome == "failed"})

    def bury_event(self, epoch: int, event: FiredEvent, reason: str) -> None:
        assert epoch == EPOCH
        if self.failures:
            raise self.failures.pop(0)
        self.buried.append(event.sequence_index)

    @property
    def stored(self) -> list[int]:
        return [index for transaction in self.transactions for index in transaction]


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


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


def test_a_round_is_one_transaction_and_its_answer_names_what_is_stored(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0), event(1))))
    stored = intake.step(EPOCH, 0.0)
    assert store.transactions == [[0, 1]]
    assert stored is not None
    assert stored.answer == StateSync(1, persisted=(100, 101))


def test_nothing_is_confirmed_while_the_database_is_away(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0),)))
    store.failures = [DatabaseAway("db", "no answer"), DatabaseFault("db", "read only"), DatabaseAway("db", "again")]
    now = 0.0
    for _ in range(3):
        assert intake.step(EPOCH, now) is None
        retry_at = intake.wake_at()
        assert retry_at is not None
        assert retry_at > now
        assert intake.step(EPOCH, (now + retry_at) / 2) is None, "not before its time"
        now = retry_at
    assert store.stored == []
    stored = intake.step(EPOCH, now)
    assert stored is not None
    assert stored.answer == StateSync(1, persisted=(100,))


def test_the_waits_for_the_database_grow_and_begin_anew_after_success(store: ScriptedStore) -> None:
    intake = intake_of(store)

    def wait_after_failure(now: float) -> float:
        store.failures = [DatabaseAway("db", "no answer")]
        assert intake.step(EPOCH, now) is None
        retry_at = intake.wake_at()
        assert retry_at is not None
        return retry_at - now

    intake.add_frame(1, StateChanges(1, (event(0),)))
    waits = [wait_after_failure(100.0 * number) for number in range(1, 7)]
    assert waits[0] >= 1.0
    assert waits[1] >= 2.0
    assert max(waits) <= 8.0 + 0.5
    run_dry(intake, 1000.0)
    intake.add_frame(1, StateChanges(2, (event(1),)))
    assert wait_after_failure(2000.0) <= 1.5


def test_events_that_nobody_waits_for_are_stored_and_not_named(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (FiredEvent(1, "run", 0, seq=0, payload=b"1"), event(1))))
    assert run_dry(intake) == [StateSync(1, persisted=(101,))]
    assert store.stored == [0, 1]


def test_a_long_round_is_stored_in_slices_and_answered_once_all_of_it_is(store: ScriptedStore) -> None:
    intake = intake_of(store, slice_events_max=2)
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(5))))
    assert intake.step(EPOCH, 0.0).answer is None  # type: ignore[union-attr]
    assert intake.step(EPOCH, 0.0).answer is None  # type: ignore[union-attr]
    last = intake.step(EPOCH, 0.0)
    assert last is not None
    assert last.answer == StateSync(1, persisted=(100, 101, 102, 103, 104))
    assert store.transactions == [[0, 1], [2, 3], [4]]


def test_a_round_of_several_frames_is_answered_after_its_last(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0),), more=True))
    assert run_dry(intake) == []
    intake.add_frame(1, StateChanges(1, (event(1),)))
    assert run_dry(intake) == [StateSync(1, persisted=(100, 101))]


def test_what_a_dead_runner_left_half_said_is_stored_and_confirmed_to_nobody(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(9, (event(0),), more=True))
    intake.add_frame(2, StateChanges(1, (event(1),)))
    assert run_dry(intake) == [StateSync(1, persisted=(101,))]
    assert store.stored == [0, 1]


@given(
    bad=st.sets(st.integers(0, 39), max_size=6),
    slice_events_max=st.integers(1, 50),
)
def test_only_the_bad_events_are_buried_and_all_others_are_stored(bad: set[int], slice_events_max: int) -> None:
    store = ScriptedStore()
    intake = intake_of(store, slice_events_max=slice_events_max)
    events = tuple(event(index, b"bad" if index in bad else b"1") for index in range(40))
    finished = FinishedTrigger(1, "run", "returned", 40)
    intake.add_frame(1, StateChanges(1, events, finished=(finished,)))
    (answer,) = run_dry(intake)
    assert store.buried == sorted(bad)
    assert store.stored == [index for index in range(40) if index not in bad]
    assert store.finished == [finished], "and the end of the run is recorded, after all of its events"
    assert answer.persisted == tuple(100 + index for index in range(40) if index not in bad)
    assert [(refusal.seq, refusal.payload_kept) for refusal in answer.refused] == [
        (100 + index, True) for index in sorted(bad)
    ]


def test_a_bad_event_is_not_given_up_while_the_database_is_away(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0, b"bad"),)))
    store.failures = [RowsRefused("bad"), RowsRefused("bad"), DatabaseAway("db", "no answer")]
    assert intake.step(EPOCH, 0.0) is None
    assert intake.step(EPOCH, 0.0) is None
    assert not intake.is_empty
    (answer,) = run_dry(intake, now=100.0)
    assert store.buried == [0]
    assert answer.refused[0].payload_kept


@pytest.mark.parametrize("company", [0, 1, 5])
def test_an_event_that_is_refused_once_is_stored_and_not_buried(store: ScriptedStore, company: int) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(1 + company))))
    store.failures = [RowsRefused("what it refers to has just been deleted")]
    assert run_dry(intake) == [StateSync(1, persisted=tuple(range(100, 101 + company)))]
    assert store.buried == []
    assert store.stored == list(range(1 + company))


def test_an_event_refused_once_by_itself_for_another_reason_than_before_is_not_buried(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0), event(1, b"bad"))))
    store.failures = [RowsRefused("the second is bad"), RowsRefused("what the first refers to has just been deleted")]
    (answer,) = run_dry(intake)
    assert (store.stored, store.buried) == ([0], [1])
    assert answer.persisted == (100,)


def test_a_bad_event_is_tried_twice_by_itself_and_then_never_again(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0, b"bad"), event(1, b"bad"))))
    store.failures = [
        RowsRefused("both"),
        RowsRefused("the first"),
        DatabaseAway("db", "no answer"),  # in between, which is no refusal and no reason to begin again
    ]
    steps = 0
    now = 0.0
    while not intake.is_empty:
        now = max(now, intake.wake_at() or 0.0)
        intake.step(EPOCH, now)
        steps += 1
    assert store.buried == [0, 1]
    assert steps == 6, "together, twice and once away, twice"


def test_a_report_that_is_refused_once_is_recorded_and_one_that_is_refused_again_holds_up_nothing(
    store: ScriptedStore,
) -> None:
    intake = intake_of(store)
    first, second = (FinishedTrigger(number, "run", "returned", 1) for number in (1, 2))
    intake.add_frame(1, StateChanges(1, finished=(first,)))
    intake.add_frame(1, StateChanges(2, finished=(second,)))
    store.failures = [RowsRefused("for the moment")]
    assert run_dry(intake) == [StateSync(1), StateSync(2)]
    assert store.finished == [first, second]
    intake.add_frame(1, StateChanges(3, finished=(first,)))
    store.failures = [RowsRefused("for good")] * 2
    assert run_dry(intake) == [StateSync(3)]
    assert (store.finished, store.failures) == ([first, second], [])


def test_an_event_the_runner_refused_is_recorded_and_reported_as_not_kept(store: ScriptedStore) -> None:
    intake = intake_of(store)
    refused = RefusedEvent(1, "run", 0, 55, "too big", 2_000_000, b"head")
    intake.add_frame(1, StateChanges(1, refused=(refused,)))
    (answer,) = run_dry(intake)
    assert store.refused == [refused]
    assert answer.persisted == ()
    assert [(refusal.seq, refusal.payload_kept) for refusal in answer.refused] == [(55, False)]


def test_a_lost_lease_confirms_nothing(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0),)))
    intake.add_frame(2, StateChanges(4, (event(1),)))
    intake.add_frame(2, StateChanges(5, (event(2),), more=True))
    store.failures = [LeaseLost(EPOCH)]
    with pytest.raises(LeaseLost):
        intake.step(EPOCH, 0.0)
    assert intake.discard(2) == [4], "the only one of this runner that nothing more will come of"
    assert intake.is_empty
    assert store.stored == []


def test_a_heartbeat_is_answered_without_a_transaction(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(4))
    assert run_dry(intake) == [StateSync(4)]
    assert store.transactions == []


def test_a_runner_that_does_not_wait_for_answers_is_stopped() -> None:
    intake = intake_of(ScriptedStore())
    for number in range(ROUNDS_WAITING_MAX):
        intake.add_frame(1, StateChanges(number + 1))
    with pytest.raises(RemoteProtocolError, match="without an answer"):
        intake.add_frame(1, StateChanges(ROUNDS_WAITING_MAX + 1))


@given(
    events=st.integers(0, 9), refused=st.integers(0, 5), finished=st.integers(0, 5), ends=st.booleans(), data=st.data()
)
def test_cutting_keeps_everything_in_order(
    events: int, refused: int, finished: int, ends: bool, data: st.DataObject
) -> None:
    whole = Slice(
        3,
        1,
        tuple(event(index) for index in range(events)),
        tuple(RefusedEvent(1, "run", index, 0, "too long", 9, b"") for index in range(refused)),
        tuple(FinishedTrigger(index, "run", "returned", 1) for index in range(finished)),
        ends,
    )
    at = data.draw(st.integers(0, len(whole)))
    first, rest = whole.cut(at)
    assert len(first) == at
    assert first.events + rest.events == whole.events
    assert first.refused + rest.refused == whole.refused
    assert first.finished + rest.finished == whole.finished
    assert not (rest.events and first.refused + first.finished)
    assert not (rest.refused and first.finished)
    assert (first.ends_round, rest.ends_round) == (False, ends)


def test_a_report_from_beside_takes_nothing_from_a_round_in_several_frames(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0),), more=True))
    intake.add_frame(
        0, StateChanges(0, finished=(FinishedTrigger(9, "", "failed", 0, error="its kwargs cannot be read"),))
    )
    intake.add_frame(1, StateChanges(1, (event(1),)))
    assert run_dry(intake) == [StateSync(0), StateSync(1, persisted=(100, 101))]


# --- the size of a slice ---------------------------------------------------------------------------


def settle(size: SliceSize, *, commit_s: float, event_s: float, slices: int = 40) -> tuple[int, float]:
    """Store long slices on a database of such times until the size is found; return it, and how long one takes."""
    for _ in range(slices):
        size.stored(size.events, commit_s + size.events * event_s)
    return size.events, commit_s + size.events * event_s


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
        sizes.append(size.events)
        size.stored(size.events, (0.02 + size.events * 20e-6) * factor)
    assert all(SLICE_EVENTS_MIN <= events <= 5000 for events in sizes)
    assert sum(sizes) / len(sizes) > 500


def test_the_size_is_bounded_and_moves_by_a_factor_of_two_at_most() -> None:
    size = SliceSize(1500)
    assert size.events == SLICE_EVENTS_FIRST
    size.stored(500, 1e-4)
    assert size.events == 1000
    size.stored(1000, 0.0)
    assert size.events == 1500
    size.stored(1500, 60.0)
    assert size.events == 750
    assert SliceSize(3).events == 3


def test_short_slices_say_nothing_of_long_ones() -> None:
    size = SliceSize(5000)
    for _ in range(100):
        size.stored(3, 0.4)
    assert size.events == SLICE_EVENTS_FIRST


def test_a_long_round_is_cut_by_what_the_database_took_for_its_first_slices(store: ScriptedStore) -> None:
    moments = iter([0.0, 1.0, 1.0, 1.25, 1.25, 1.3])
    intake = Intake(store, slice_events_max=500, retry=DatabaseRetry("events", 1.0, 8.0), clock=lambda: next(moments))
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(800))))
    assert run_dry(intake) == [StateSync(1, persisted=tuple(range(100, 900)))]
    assert [len(transaction) for transaction in store.transactions] == [500, 250, 50]


# --- slices that are too long for the database --------------------------------------------------------


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
        epoch: int,
        *,
        events: Sequence[FiredEvent],
        refused: Sequence[RefusedEvent],
        finished: Sequence[FinishedTrigger],
    ) -> StoredSlice:
        items = len(events) + len(refused) + len(finished)
        self.now += min(items * self.event_s, self.limit_s)
        if items * self.event_s > self.limit_s:
            self.given_up.append(items)
            raise DatabaseAway("db", "canceling statement due to statement timeout")
        return super().store_slice(epoch, events=events, refused=refused, finished=finished)


def slow_intake_of(store: SlowStore) -> Intake:
    return Intake(store, slice_events_max=5000, retry=DatabaseRetry("events", 1.0, 8.0), clock=store.clock)


def run_through(intake: Intake, store: SlowStore, *, steps_max: int = 10_000) -> list[StateSync]:
    """Step whenever the intake wants to, until nothing waits; return the answers."""
    answers = []
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
    assert len(store.given_up) <= 9 + len(store.transactions) / SLICES_UNTIL_TRIED, "little time is lost by trying more"


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
    assert size.events == 2500
    size.stored(2500, 20.0)
    assert size.events == 1250


def test_a_slice_smaller_than_the_least_comes_back_to_it_but_not_where_twice_as_many_may_be_too_many() -> None:
    size = SliceSize(5000)
    size.failed(20, FAILED_LATE_S)
    assert size.events == 10
    size.stored(9, 0.1)
    assert size.events == 10, "it says less than a whole one"
    size.stored(10, FAILED_LATE_S / 2 + 0.1)
    assert size.events == 10

    size = SliceSize(5000)
    size.failed(20, FAILED_LATE_S)
    for expected in (20, 40, SLICE_EVENTS_MIN, SLICE_EVENTS_MIN):
        size.stored(size.events, size.events * 0.1)
        assert size.events == expected


@pytest.mark.parametrize("commit_s", [0.5, 5.0, 10.0])
def test_where_the_commit_takes_all_the_time_a_slice_does_not_stay_small(commit_s: float) -> None:
    size = SliceSize(5000)
    size.failed(1, 35.0)
    assert size.events == 1
    assert settle(size, commit_s=commit_s, event_s=1e-5)[0] == 5000


def test_a_slice_of_one_is_as_small_as_it_gets() -> None:
    size = SliceSize(5000)
    size.failed(1, 60.0)
    assert size.events == 1


def test_the_limits_that_a_long_slice_runs_into_are_told_from_those_that_it_does_not() -> None:
    unconcerned = (engine.CONNECT_TIMEOUT_S, engine.LOCK_TIMEOUT_S, engine.SQLITE_BUSY_TIMEOUT_S)
    concerned = (engine.STATEMENT_TIMEOUT_S, engine.IDLE_IN_TRANSACTION_MAX_S, engine.TCP_UNACKED_MAX_S)
    assert max(unconcerned) < FAILED_LATE_S < min(concerned)
