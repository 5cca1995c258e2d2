"""The intake, with a store that does as it is told: what is confirmed, when, and to whom."""

from __future__ import annotations

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.supervisor.triggers.intake_harness import EPOCH, ScriptedStore, event, intake_of, run_dry

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.messages.runner import (
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    RedeliveryEnd,
    RefusedEvent,
    StateChanges,
    StateSync,
)
from headgate.store.errors import DatabaseAway, DatabaseFault, LeaseLost, RowsRefused
from headgate.store.triggers.redeliveries import Difference
from headgate.store.triggers.watchers import Replaced
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.intake import (
    DIFFERING_LOGGED_MAX,
    ROUNDS_WAITING_MAX,
    Intake,
    Slice,
)


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


def test_a_round_is_one_transaction_and_its_answer_names_what_is_stored(store: ScriptedStore) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0), event(1))))
    stored = intake.step(EPOCH, 0.0)
    assert store.transactions == [[0, 1]]
    assert stored is not None
    assert stored.answer == StateSync(1, persisted=(100, 101))


def test_a_payload_that_fits_into_no_signal_is_logged_once_for_each_watcher(store: ScriptedStore) -> None:
    store.replaced = (Replaced("w", 7, 50_000), Replaced("v", 8, 50_001))
    intake = intake_of(store)
    for round_ in (1, 2):
        intake.add_frame(1, StateChanges(round_, (event(round_),)))
    with capture_logs() as logs:
        run_dry(intake)
    assert [(one["log_level"], one["watcher"], one["event_id"], one["bytes_max"]) for one in logs] == [
        ("warning", "w", 7, 49_152),
        ("warning", "v", 8, 49_152),
    ]


def test_events_that_differ_from_the_stored_ones_are_confirmed_and_named_in_the_log_as_far_as_its_limit_goes(
    store: ScriptedStore,
) -> None:
    events = tuple(
        FiredEvent(1, "run", index, 100 + index, b"1", f"k{index}") for index in range(DIFFERING_LOGGED_MAX + 2)
    )
    store.differing = tuple(Difference(event, stored_id=7) for event in events)
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, events))
    with capture_logs() as logs:
        (answer,) = run_dry(intake)
    assert answer.persisted == tuple(event.seq for event in events)
    assert [record["log_level"] for record in logs] == ["error"] * (DIFFERING_LOGGED_MAX + 1)
    assert logs[0].items() >= {"trigger_id": 1, "key": "k0", "position": 0, "stored_event": 7}.items()
    assert logs[-1]["events"] == 2


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
def test_only_the_bad_events_are_dead_lettered_and_all_others_are_stored(bad: set[int], slice_events_max: int) -> None:
    store = ScriptedStore()
    intake = intake_of(store, slice_events_max=slice_events_max)
    events = tuple(event(index, b"bad" if index in bad else b"1") for index in range(40))
    finished = FinishedTrigger(1, "run", "returned", 40)
    intake.add_frame(1, StateChanges(1, events, finished=(finished,)))
    (answer,) = run_dry(intake)
    assert store.dead_lettered == sorted(bad)
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
    assert store.dead_lettered == [0]
    assert answer.refused[0].payload_kept


@pytest.mark.parametrize("company", [0, 1, 5])
def test_an_event_that_is_refused_once_is_stored_and_not_dead_lettered(store: ScriptedStore, company: int) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(1 + company))))
    store.failures = [RowsRefused("what it refers to has just been deleted")]
    assert run_dry(intake) == [StateSync(1, persisted=tuple(range(100, 101 + company)))]
    assert store.dead_lettered == []
    assert store.stored == list(range(1 + company))


def test_an_event_refused_once_by_itself_for_another_reason_than_before_is_not_dead_lettered(
    store: ScriptedStore,
) -> None:
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(0), event(1, b"bad"))))
    store.failures = [RowsRefused("the second is bad"), RowsRefused("what the first refers to has just been deleted")]
    (answer,) = run_dry(intake)
    assert (store.stored, store.dead_lettered) == ([0], [1])
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
    assert store.dead_lettered == [0, 1]
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


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_event_the_runner_refused_is_reported_as_kept_if_its_letter_is_whole(
    store: ScriptedStore, is_whole: bool
) -> None:
    intake = intake_of(store)
    refused = RefusedEvent(1, "run", 0, 55, "too big", 2_000_000, b"head", is_whole=is_whole)
    intake.add_frame(1, StateChanges(1, refused=(refused,)))
    (answer,) = run_dry(intake)
    assert store.refused == [refused]
    assert answer.persisted == ()
    assert [(refusal.seq, refusal.payload_kept) for refusal in answer.refused] == [(55, is_whole)]


def test_a_letter_is_confirmed_only_after_it_is_stored_and_not_at_all_if_the_database_refuses_it(
    store: ScriptedStore,
) -> None:
    intake = intake_of(store)
    refused = RefusedEvent(1, "run", 0, 55, "too big", 4, b"1234" * 1_000_000, is_whole=True)
    intake.add_frame(1, StateChanges(1, refused=(refused,)))
    store.failures = [DatabaseAway("sqlite", "gone")]
    assert intake.step(EPOCH, 0.0) is None
    store.failures = [RowsRefused("for good")] * 2
    with structlog.testing.capture_logs() as records:
        (answer,) = run_dry(intake, now=1000.0)
    assert [(refusal.seq, refusal.payload_kept) for refusal in answer.refused] == [(55, False)]
    assert max(len(str(record)) for record in records) < 5000, "its megabytes are not in the log"


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


def test_rounds_of_runners_that_died_keep_out_no_other() -> None:
    """While the database is away each may leave some: neither a healthy runner nor the core may end for it (I9)."""
    intake = intake_of(ScriptedStore())
    for incarnation in range(1, ROUNDS_WAITING_MAX + 2):
        intake.add_frame(incarnation, StateChanges(1, (event(incarnation),)))
    intake.add_frame(0, StateChanges(0, finished=(FinishedTrigger(1, "", "failed", 0, error="no key fits"),)))
    for _ in range(ROUNDS_WAITING_MAX + 2):
        assert intake.step(EPOCH, 0.0)
    assert intake.is_empty


def test_heartbeats_of_runners_that_died_do_not_pile_up(store: ScriptedStore) -> None:
    """A runner may die again and again for as long as the database is away."""
    intake = intake_of(store)
    intake.add_frame(1, StateChanges(1, (event(1),), more=True))
    intake.add_frame(1, StateChanges(1))
    for incarnation in range(2, 1000):
        intake.add_frame(incarnation, StateChanges(1))
    steps = iter(lambda: intake.step(EPOCH, 0.0), None)
    assert [(stored.incarnation, stored.answer) for stored in steps] == [(1, None), (999, StateSync(1))]
    assert len(store.stored) == 1


@given(
    events=st.integers(0, 9),
    refused=st.integers(0, 5),
    finished=st.integers(0, 5),
    described=st.integers(0, 5),
    redriven=st.integers(0, 5),
    ends=st.booleans(),
    data=st.data(),
)
def test_cutting_keeps_everything_in_order(
    events: int, refused: int, finished: int, described: int, redriven: int, ends: bool, data: st.DataObject
) -> None:
    whole = Slice(
        3,
        1,
        tuple(event(index) for index in range(events)),
        tuple(RefusedEvent(1, "run", index, 0, "too long", 9, b"") for index in range(refused)),
        tuple(FinishedTrigger(index, "run", "returned", 1) for index in range(finished)),
        tuple(DescribedTrigger(index, "run", "d", "d") for index in range(described)),
        tuple(RedeliveryEnd(index, 1, "run", "handled") for index in range(redriven)),
        ends,
    )
    at = data.draw(st.integers(0, len(whole)))
    first, rest = whole.cut(at)
    assert len(first) == at
    assert first.events + rest.events == whole.events
    assert first.refused + rest.refused == whole.refused
    assert first.finished + rest.finished == whole.finished
    assert first.described + rest.described == whole.described
    assert not (rest.events and (first.refused or first.finished))
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


def test_a_long_round_is_cut_by_what_the_database_took_for_its_first_slices(store: ScriptedStore) -> None:
    moments = iter([0.0, 1.0, 1.0, 1.25, 1.25, 1.3])
    intake = Intake(store, slice_events_max=500, retry=DatabaseRetry("events", 1.0, 8.0), clock=lambda: next(moments))
    intake.add_frame(1, StateChanges(1, tuple(event(index) for index in range(800))))
    assert run_dry(intake) == [StateSync(1, persisted=tuple(range(100, 900)))]
    assert [len(transaction) for transaction in store.transactions] == [500, 250, 50]


def test_nothing_behind_a_refused_event_is_stored_in_the_stream_of_a_task() -> None:
    """Its trigger fires all of it again in the next try; messages that wait for an answer are stored as ever (I20)."""
    store = ScriptedStore()
    store.task_streams = {1}
    intake = intake_of(store)
    own = [FiredEvent(1, "run", index, seq=0, payload=b"bad" if index == 1 else b"1") for index in range(4)]
    others = [FiredEvent(2, "other", 0, 0, b"bad"), FiredEvent(2, "other", 10, 0, b"1")]
    later = FiredEvent(1, "run", 4, seq=0, payload=b"1")
    of_message, next_run = FiredEvent(1, "run", 5, seq=105, payload=b"1"), FiredEvent(1, "next", 20, 0, b"1")
    intake.add_frame(1, StateChanges(1, events=(*own, *others)))
    intake.add_frame(1, StateChanges(2, events=(later, of_message, next_run)))
    intake.add_frame(1, StateChanges(3, finished=(FinishedTrigger(1, "run", "cancelled", 6, reason="user"),)))
    answers = run_dry(intake)
    assert sorted(store.stored) == [0, 5, 10, 20]
    assert [run.outcome for run in store.finished] == ["cancelled"]
    assert [answer.persisted for answer in answers] == [(), (105,), ()]
