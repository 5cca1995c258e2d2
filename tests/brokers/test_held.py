"""The books of a producer: which messages are held, what is due again, and what the broker may be told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.brokers.fake_broker import ACKED, FAILED, REJECTED

from headgate.brokers import held as module
from headgate.brokers.held import Delivery, HeldMessages, Received

SETTLE_S = 2.0


def message(ref: str, lane: str = "") -> Received:
    return Received(ref, ref.upper(), None, lane, 1)


def refs(deliveries: list[Delivery]) -> list[str]:
    return [delivery.message.ref for delivery in deliveries]


@pytest.fixture
def held() -> HeldMessages:
    return HeldMessages(retry_s=1.0, retry_max_s=4.0)


def settle(held: HeldMessages, now: float = 0.0) -> list[str]:
    messages, _ = held.settled(now, SETTLE_S, 100)
    held.forget(messages)
    return [each.ref for each in messages]


def test_a_message_is_handed_out_once_however_often_the_broker_delivers_it(held: HeldMessages) -> None:
    first = held.take([message("1")])
    assert held.take([message("1"), message("2")]) != []
    assert held.refs == ["1", "2"]
    held.resolve(first[0], ACKED, 0.0)
    assert held.take([message("1")]) == [], "until its acknowledgement is made"
    assert settle(held) == ["1"]
    assert refs(held.take([message("1")])) == ["1"]


def test_the_delay_doubles_while_the_same_message_fails_and_holds_up_its_lane_only(held: HeldMessages) -> None:
    delivery, other = held.take([message("1", "a"), message("1b", "b")])
    delays, now = [], 0.0
    for _ in range(4):
        held.resolve(delivery, FAILED, now)
        due_at = held.next_due()
        assert due_at is not None
        assert held.due(due_at - 0.001) == []
        delays.append(due_at - now)
        now = due_at
        (delivery,) = held.due(now)
    assert delays == [1.0, 2.0, 4.0, 4.0]
    held.resolve(other, ACKED, now)
    assert settle(held, now) == ["1b"]
    held.resolve(delivery, ACKED, now)
    assert settle(held, now) == ["1"]
    assert held.next_due() is None
    assert (len(held), held.bytes) == (0, 0)


def test_what_comes_while_its_lane_waits_is_handed_out_behind_what_failed(held: HeldMessages) -> None:
    (first,) = held.take([message("1")])
    held.resolve(first, FAILED, 0.0)
    assert held.take([message("2")]) == []
    assert refs(held.due(1.0)) == ["1", "2"]
    assert held.redelivered == 1


def test_what_is_resolved_too_late_is_due_again_before_what_is_behind_it(held: HeldMessages) -> None:
    deliveries = held.take([message("1"), message("2"), message("3")])
    held.resolve(deliveries[0], ACKED, 0.0)
    held.resolve(deliveries[1], REJECTED, 3.0)
    assert settle(held, now=3.0) == []
    again = held.due(3.0)
    assert refs(again) == ["1", "2", "3"]
    held.resolve(deliveries[2], ACKED, 3.0)
    assert settle(held, now=3.0) == [], "the outcome of a delivery before"
    for delivery in again:
        held.resolve(delivery, ACKED, 3.0)
    assert settle(held, now=4.0) == ["1", "2", "3"]


def test_a_lane_that_was_empty_begins_anew_with_what_was_resolved_too_late(held: HeldMessages) -> None:
    (first,) = held.take([message("1")])
    held.resolve(first, ACKED, 0.0)
    (second,) = held.take([message("2")])
    assert settle(held, now=3.0) == []
    assert refs(held.due(3.0)) == ["1", "2"]
    held.resolve(second, ACKED, 3.0)
    assert settle(held, now=3.0) == []


def test_what_the_place_refuses_has_failed_with_all_behind_it_in_its_lane(held: HeldMessages) -> None:
    deliveries = held.take([message(ref, ref[0]) for ref in ("a0", "a1", "b1", "a2")])
    for delivery, outcome in zip(deliveries, [REJECTED, REJECTED, REJECTED, ACKED], strict=True):
        held.resolve(delivery, outcome, 0.0)
    (a0, a1, b1), are_rejected = held.settled(0.0, SETTLE_S, 100)
    assert are_rejected
    held.put_back([a1], 0.0)
    held.forget([a0, b1])
    assert settle(held) == [], "one behind it is not told before it"
    assert refs(held.due(1.0)) == ["a1", "a2"]


def test_the_delay_doubles_while_the_place_refuses_a_message_whatever_becomes_of_its_lane(held: HeldMessages) -> None:
    deliveries, delays, now = held.take([message("1")]), [], 0.0
    for number in range(4):
        for delivery in deliveries:
            held.resolve(delivery, REJECTED, now)
        held.take([message(f"behind-{number}")])
        messages, _ = held.settled(now, SETTLE_S, 100)
        held.put_back(messages, now)
        due_at = held.next_due()
        assert due_at is not None
        delays.append(due_at - now)
        now = due_at
        deliveries = held.due(now)
    assert delays == [1.0, 2.0, 4.0, 4.0]
    assert refs(deliveries) == ["1", *(f"behind-{number}" for number in range(4))]


def test_accepted_and_rejected_messages_are_told_in_the_order_in_which_they_were_resolved(held: HeldMessages) -> None:
    deliveries = held.take([message(ref) for ref in "12345"])
    for delivery, outcome in zip(deliveries, [ACKED, ACKED, REJECTED, REJECTED, ACKED], strict=True):
        held.resolve(delivery, outcome, 0.0)
    told = []
    while (next_ones := held.settled(0.0, SETTLE_S, 100))[0]:
        held.forget(next_ones[0])
        told.append(("".join(each.ref for each in next_ones[0]), next_ones[1]))
    assert told == [("12", False), ("34", True), ("5", False)]


def test_only_so_many_refs_are_remembered_of_messages_that_are_left(
    held: HeldMessages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEFT_MAX", 2)
    for ref in "123":
        (delivery,) = held.take([message(ref)])
        held.resolve(delivery, REJECTED, 0.0)
        messages, are_rejected = held.settled(0.0, SETTLE_S, 100)
        assert are_rejected
        held.leave(messages)
    assert refs(held.take([message("1"), message("2"), message("3")])) == ["1"]


@given(st.lists(st.tuples(st.sampled_from("tfarcdp"), st.integers(0, 2)), max_size=200))
def test_whatever_happens_lanes_are_acknowledged_in_order_and_nothing_is_forgotten(
    steps: list[tuple[str, int]],
) -> None:
    """Take, fail, accept, reject, clear and settle late, in any order: a lane is told without a gap, each once."""
    held = HeldMessages(retry_s=1.0, retry_max_s=1.0)
    taken, acknowledged = [0, 0, 0], [0, 0, 0]
    flying: tuple[list[Delivery], ...] = ([], [], [])
    now = 0.0
    for what, lane in steps:
        if what == "t":
            flown = held.take([Received((lane, taken[lane]), None, None, lane, 1)])
            taken[lane] += 1
        elif what in "far" and flying[lane]:
            held.resolve(flying[lane].pop(0), {"f": FAILED, "a": ACKED, "r": REJECTED}[what], now)
            flown = []
        elif what == "c":  # the connection is gone, and the broker delivers what is not acknowledged
            held.clear()
            flown = held.take(
                [
                    Received((lane, each), None, None, lane, 1)
                    for lane in range(3)
                    for each in range(acknowledged[lane], taken[lane])
                ]
            )
        else:
            now += 1.5
            flown = held.due(now)
            told, are_rejected = held.settled(now, SETTLE_S, count_max=2)
            if are_rejected and what == "p":  # the place refuses those of the lane
                held.put_back([each for each in told if each.lane == lane], now)
                told = [each for each in told if each.lane != lane]
            held.forget(told)
            for ref in [each.ref for each in told]:
                assert ref == (ref[0], acknowledged[ref[0]])
                acknowledged[ref[0]] += 1
        for delivery in flown:
            flying[delivery.message.ref[0]].append(delivery)
    assert len(held) == held.bytes == sum(taken) - sum(acknowledged)


def test_lanes_that_another_reader_has_are_forgotten_and_no_outcome_of_them_is_settled(held: HeldMessages) -> None:
    first, failed, resolved, kept = held.take(
        [message("1", "a"), message("2", "b"), message("3", "c"), message("4", "d")]
    )
    held.resolve(failed, FAILED, 0.0)
    held.resolve(resolved, ACKED, 0.0)
    held.resolve(kept, ACKED, 0.0)
    held.drop({"a", "b", "c", "nobody's"})
    held.resolve(first, ACKED, 0.0)
    assert (held.refs, held.bytes, held.next_due()) == (["4"], 1, None)
    again = held.take([message("1", "a")])
    assert refs(again) == ["1"], "the lane has come back, and what was handed out before is another delivery"
    held.resolve(again[0], ACKED, 0.0)
    assert settle(held) == ["4", "1"]
