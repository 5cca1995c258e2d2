"""Strikes: each failure on a message is counted once, and too many of them pass it over for that trigger alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.store.harness import QUEUES, Clock, OpenStore, Query, register

from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    PASSED_OVER_KEYS_MAX,
    PASSED_OVER_POSITION,
    FinishedTrigger,
    FiredEvent,
    RefusedEvent,
)
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.triggers.events import Message
from headgate.store.triggers.strikes import (
    BRAKE_IN_A_ROW,
    BRAKE_MESSAGES,
    BRAKE_PASSED_OVER,
    KILLS_MAX,
    NO_STRIKES,
    Strikes,
)


class Struck(msgspec.Struct):
    """A store with an epoch that owns the trigger of one watcher, whose runs fail."""

    store: Store
    epoch: Epoch
    trigger_id: int
    runs: int = 0

    def fail(self, *keys: str | None, **fields: Any) -> list[Message]:
        """Report one failed run for each key in one slice; return the messages that are passed over then."""
        return self.report(*[self.failure(key, **fields) for key in keys])

    def failure(self, key: str | None, **fields: Any) -> FinishedTrigger:
        self.runs += 1
        run = {"trigger_id": self.trigger_id, "trigger_run_id": f"run {self.runs}", "outcome": "failed", "events": 0}
        return FinishedTrigger(**{**run, "error": f"ValueError: {key}", "message_key": key, **fields})

    def report(self, *runs: FinishedTrigger) -> list[Message]:
        return self.store.store_slice(self.epoch, finished=runs).passed_over

    def kill(self, key: str = "k", run_id: str | None = None) -> Strikes:
        self.runs += 1
        return self.store.strike_message(self.epoch, self.trigger_id, key, run_id or f"run {self.runs}", "it died")

    def claimed(self) -> tuple[str, ...]:
        """Return the keys that a supervisor hears of that takes the trigger over."""
        self.store.release_triggers(self.epoch, [self.trigger_id])
        self.epoch = register(self.store)
        (claimed,) = self.store.claim_triggers(self.epoch, limit=1, queues=QUEUES)
        (again,) = self.store.claimed_triggers(self.epoch)
        assert claimed.passed_over == again.passed_over
        return claimed.passed_over


def set_max_deliveries(query: Query, number: int) -> None:
    query("UPDATE trigger SET max_deliveries = :number", number=number)


def make_struck(store: Store, name: str = "w") -> Struck:
    epoch = register(store)
    trigger_id = store.add_watcher(name, "a.B", {})
    assert [claimed.id for claimed in store.claim_triggers(epoch, limit=1, queues=QUEUES)] == [trigger_id]
    return Struck(store, epoch, trigger_id)


@pytest.fixture
def on(store: Store) -> Struck:
    return make_struck(store)


def strikes(query: Query) -> list[tuple[str, int, int]]:
    return [(row["key"], row["strikes"], row["kills"]) for row in query("SELECT * FROM strike ORDER BY key")]


# --- counting ------------------------------------------------------------------------------------


def test_a_failure_on_a_message_is_a_strike_of_it_and_one_without_a_message_is_none(on: Struck, query: Query) -> None:
    on.fail("k", traceback="Traceback\nValueError: k")
    on.fail(None, "k", "other")
    assert strikes(query) == [("k", 2, 0), ("other", 1, 0)]
    (row,) = query("SELECT * FROM strike WHERE key = 'k'")
    assert (row["trigger_id"], row["last_error"], row["last_run_id"]) == (on.trigger_id, "ValueError: k", "run 3")
    assert on.store.inspect.triggers()[0].failure_count == 4


def test_a_report_that_is_repeated_is_counted_once(on: Struck, query: Query) -> None:
    failure = on.failure("k")
    for _ in range(9):
        assert on.report(failure) == []
        assert on.report(failure, failure) == []
    assert strikes(query) == [("k", 1, 0)]


def test_runs_that_did_not_fail_strike_nothing(on: Struck, query: Query) -> None:
    on.fail("k", outcome="cancelled", reason="reassigned")
    on.fail("k", outcome="returned")
    assert strikes(query) == []


def test_only_the_owner_counts(on: Struck, query: Query) -> None:
    other = make_struck(on.store, "other")
    assert other.report(on.failure("k")) == []
    assert other.store.strike_message(other.epoch, on.trigger_id, "k", "run", "x") == NO_STRIKES
    assert other.store.strike_message(other.epoch, 4711, "k", "run", "x") == NO_STRIKES
    assert strikes(query) == []


@pytest.mark.parametrize("key", ["", "é" * KEY_CHARS_MAX, "a\0b", "é" * (KEY_CHARS_MAX + 1), "'; -- %s :x"])
def test_any_key_and_any_error_can_be_counted(on: Struck, query: Query, key: str) -> None:
    set_max_deliveries(query, 2)
    assert on.fail(key, error="\0\ud800", traceback="x" * ERROR_CHARS_MAX) == []
    assert on.fail(key) == [(on.trigger_id, key)], "the key comes back as it was reported"
    assert [number for _, number, _ in strikes(query)] == [2]


# --- passing over --------------------------------------------------------------------------------


def test_a_message_is_passed_over_after_as_many_strikes_as_the_trigger_allows(on: Struck, query: Query) -> None:
    assert [on.fail("k") for _ in range(6)] == [[], [], [], [], [(on.trigger_id, "k")], [(on.trigger_id, "k")]]
    set_max_deliveries(query, 1)
    assert on.fail("x", "y") == [(on.trigger_id, "x"), (on.trigger_id, "y")]


def test_a_trigger_that_can_go_on_does_not_count_as_failing(on: Struck, query: Query) -> None:
    set_max_deliveries(query, 2)
    on.fail(None, "k")
    assert on.store.inspect.triggers()[0].failure_count == 2
    on.fail("k")
    assert on.store.inspect.triggers()[0].failure_count == 0
    on.fail("other")
    assert on.store.inspect.triggers()[0].failure_count == 1


def test_without_a_limit_no_message_is_ever_passed_over(on: Struck, query: Query) -> None:
    set_max_deliveries(query, 0)
    assert [on.fail("k") for _ in range(30)] == [[]] * 30
    assert not any(on.kill().is_passed_over for _ in range(5))
    assert strikes(query) == [("k", 35, 5)]
    assert on.claimed() == ()


def test_a_message_is_another_one_for_another_trigger(on: Struck, query: Query) -> None:
    other = make_struck(on.store, "other")
    set_max_deliveries(query, 2)
    assert on.fail("k") == other.fail("k", trigger_run_id="other") == []
    assert on.fail("k") == [(on.trigger_id, "k")]


# --- deaths of the process -----------------------------------------------------------------------


def test_a_message_that_ends_the_process_is_passed_over_early(on: Struck) -> None:
    found = [on.kill() for _ in range(KILLS_MAX)]
    assert found == [Strikes(1, 1, False), Strikes(2, 2, False), Strikes(3, 3, True)]
    assert on.claimed() == ("k",)


def test_ends_of_the_process_and_failures_count_together(on: Struck) -> None:
    on.fail("k", "k", "k")
    assert on.kill() == Strikes(4, 1, False)
    assert on.kill() == Strikes(5, 2, True)


def test_an_end_of_the_process_is_counted_once_and_not_after_the_failure_of_the_same_run(
    on: Struck, query: Query
) -> None:
    assert on.kill(run_id="a") == on.kill(run_id="a") == Strikes(1, 1, False)
    on.fail("k", trigger_run_id="b")
    assert on.kill(run_id="b") == Strikes(2, 1, False)


# --- the dead letter -----------------------------------------------------------------------------


def letter(on: Struck, key: str, number: int = 1, **fields: Any) -> RefusedEvent:
    """Return the report of a message that the next run is passed over."""
    message = {"reason": "w does not get it any more", "payload_head": b'{"n":1}', "payload_bytes": 7}
    names = {"trigger_id": on.trigger_id, "trigger_run_id": f"run {on.runs + 1}", "sequence_index": -number, "seq": 1}
    whole = {"is_whole": True, "content": "message", "key": key, "position": PASSED_OVER_POSITION}
    return RefusedEvent(**{**message, **names, **whole, **fields})


def test_a_message_that_is_passed_over_is_kept_whole_with_the_error_of_its_last_strike(on: Struck) -> None:
    on.fail("k", "k", "other", "k", "k")
    on.fail("k", error="ValueError: at last", traceback="Traceback\n  line 1\n\nValueError: at last")
    on.store.store_slice(on.epoch, refused=[letter(on, "k")])
    (row,) = on.store.inspect.dead_letters()
    assert (row.key, row.content, row.payload_head, row.payload_kept) == ("k", "message", b'{"n":1}', True)
    assert (row.reason, row.deliveries) == ("ValueError: at last", 5)
    found = on.store.inspect.dead_letter(row.id)
    assert (found.payload, found.traceback) == (b'{"n":1}', "Traceback\n  line 1\n\nValueError: at last")


def test_a_letter_that_comes_again_changes_nothing_but_the_deliveries(on: Struck) -> None:
    on.fail("k", "k")
    first = letter(on, "k")
    for _ in range(3):
        on.store.store_slice(on.epoch, refused=[first])
    (before,) = on.store.inspect.dead_letters()
    assert before.deliveries == 2
    again = letter(on, "k", payload_head=b"else", payload_bytes=4, trigger_run_id="later")
    on.store.store_slice(on.epoch, refused=[again, letter(on, "new", 2)])
    assert {row.key: row.deliveries for row in on.store.inspect.dead_letters()} == {"k": 3, "new": 1}
    (after,) = [row for row in on.store.inspect.dead_letters() if row.key == "k"]
    assert msgspec.structs.replace(after, deliveries=2) == before


def test_a_message_and_an_event_derived_from_it_have_each_their_letter(on: Struck) -> None:
    """A filter fires an event that is too large, and fails then: neither letter may take the place of the other."""
    too_large = letter(on, "k", reason="too large", position=0, sequence_index=0, content="event")
    on.fail("k")
    on.store.store_slice(on.epoch, refused=[too_large])
    on.store.store_slice(on.epoch, refused=[letter(on, "k")])
    assert [(row.content, row.reason) for row in on.store.inspect.dead_letters()] == [
        ("message", "ValueError: k"),
        ("event", "too large"),
    ]


def test_without_a_strike_a_letter_has_the_reason_of_the_runner(on: Struck) -> None:
    other = make_struck(on.store, "other")
    other.fail("k", trigger_run_id="other")
    on.store.store_slice(on.epoch, refused=[letter(on, "k"), letter(on, "a\0b", 2)])
    assert {row.reason for row in on.store.inspect.dead_letters()} == {"w does not get it any more"}


# --- the brake -----------------------------------------------------------------------------------


class Road(msgspec.Struct):
    """A trigger that is passed over each message at its first failure; a second goes by between two slices."""

    on: Struck
    clock: Clock
    query: Query

    def bury(self, count: int) -> dict[int, str]:
        """Have it fail on so many messages; return whether it is held after the last one, and why."""
        braked: dict[int, str] = {}
        for _ in range(count):
            assert not braked, "it is held before the last one"
            self.clock.advance(1.0)
            failure = self.on.failure(f"bad {self.on.runs}", traceback="Traceback")
            braked = self.on.store.store_slice(self.on.epoch, finished=[failure]).braked
        return braked

    def handle(self, count: int) -> None:
        """Have it handle so many messages."""
        self.clock.advance(1.0)
        self.on.runs += 1
        run_id = f"run {self.on.runs}"
        events = [
            FiredEvent(self.on.trigger_id, run_id, index, seq=0, payload=b"1", key=f"good {self.on.runs} {index}")
            for index in range(count)
        ]
        self.on.store.store_slice(self.on.epoch, events=events)

    def hold(self) -> str | None:
        return self.on.store.inspect.triggers()[0].hold


@pytest.fixture
def road(open_store: OpenStore, query: Query) -> Road:
    clock = Clock()
    on = make_struck(open_store(clock=clock))
    set_max_deliveries(query, 1)
    return Road(on, clock, query)


def test_a_trigger_that_fails_on_too_many_messages_in_a_row_is_held_with_the_last_error(road: Road) -> None:
    braked = road.bury(BRAKE_IN_A_ROW + 1)
    reason = "it failed too often on 21 messages in a row, the last one 'bad 20': ValueError: bad 20"
    assert braked == {road.on.trigger_id: reason}
    (row,) = road.on.store.inspect.triggers()
    assert (row.hold, row.hold_reason) == ("brake", reason)


def test_a_message_that_is_handled_in_between_begins_the_row_anew(road: Road) -> None:
    assert road.bury(BRAKE_IN_A_ROW) == {}
    road.handle(1)
    assert road.bury(BRAKE_IN_A_ROW) == {}
    assert road.bury(1) != {}


def test_failures_that_pass_over_no_message_do_not_brake(road: Road) -> None:
    set_max_deliveries(road.query, 2)
    assert road.bury(3 * BRAKE_IN_A_ROW) == {}
    set_max_deliveries(road.query, 0)
    assert road.bury(1) == {}


def test_a_trigger_that_fails_on_too_many_of_its_last_messages_is_held(road: Road) -> None:
    road.handle(50)
    for _ in range(BRAKE_PASSED_OVER // 20):
        assert road.bury(20) == {}
        road.handle(10)
    braked = road.bury(1)
    assert "on 101 of its last 1,000 messages, the last one" in braked[road.on.trigger_id]


def test_one_message_in_ten_does_not_brake(road: Road) -> None:
    share = BRAKE_MESSAGES // BRAKE_PASSED_OVER
    for _ in range(BRAKE_PASSED_OVER // 10 * 2):
        assert road.bury(10) == {}
        road.handle(10 * (share - 1))


def test_the_next_supervisor_goes_on_counting(road: Road) -> None:
    assert road.bury(BRAKE_IN_A_ROW) == {}
    road.on.claimed()
    assert road.bury(1) != {}


def test_after_a_release_it_counts_anew(road: Road) -> None:
    assert road.bury(BRAKE_IN_A_ROW + 1) != {}
    assert road.on.store.release_trigger(road.on.trigger_id) == "brake"
    assert road.bury(BRAKE_IN_A_ROW) == {}
    assert road.hold() is None
    assert road.bury(1) != {}


def test_messages_that_end_the_process_brake_as_well(road: Road) -> None:
    set_max_deliveries(road.query, 5)
    for number in range(BRAKE_IN_A_ROW + 1):
        road.clock.advance(1.0)
        struck = [road.on.kill(f"k{number}") for _ in range(KILLS_MAX)]
        assert [bool(one.brake) for one in struck] == [False, False, number == BRAKE_IN_A_ROW]
    assert road.hold() == "brake"


# --- at a claim ----------------------------------------------------------------------------------


def test_a_supervisor_that_takes_over_knows_the_messages_in_the_order_of_their_strikes(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    on = make_struck(open_store(clock=clock))
    set_max_deliveries(query, 2)
    for key in ("b", "open", "c", "a", "b", "a", "c"):
        clock.advance(1.0)
        on.fail(key)
    assert on.claimed() == ("b", "a", "c")


def test_of_too_many_messages_the_newest_are_known_and_the_others_are_passed_over_at_their_next_failure(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    on = make_struck(open_store(clock=clock))
    other = make_struck(on.store, "other")
    set_max_deliveries(query, 1)
    keys = [f"key {number:04}" for number in range(PASSED_OVER_KEYS_MAX + 2)]
    on.fail(*keys[:2])
    clock.advance(1.0)
    on.fail(*keys[2:])
    other.fail("another", trigger_run_id="other")
    assert on.claimed() == tuple(keys[2:])
    assert on.fail(keys[0]) == [(on.trigger_id, keys[0])]
