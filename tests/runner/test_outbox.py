"""The outbox: order, bounds and waiting for room."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.protocol.messages.runner import FinishedTrigger, FiredEvent, RefusedEvent
from headgate.runner import outbox as outbox_module
from headgate.runner.outbox import Outbox


def fired(index: int, payload: bytes = b"1") -> FiredEvent:
    return FiredEvent(1, "run", index, 0, payload)


def test_a_round_takes_what_was_put_in_its_order_and_leaves_the_rest_for_the_next() -> None:
    outbox = Outbox(events_max=10, round_events_max=3)
    for index in range(5):
        outbox.enqueue(fired(index))
    assert [event.sequence_index for event in outbox.take_round(1).events] == [0, 1, 2]
    assert len(outbox) == 2
    assert [event.sequence_index for event in outbox.take_round(2).events] == [3, 4]
    assert len(outbox) == 0


def test_the_end_of_a_run_is_in_no_round_before_the_last_of_its_events() -> None:
    outbox = Outbox(events_max=10, round_events_max=2)
    outbox.enqueue(fired(0))
    outbox.enqueue(RefusedEvent(1, "run", 1, 0, "too big", 9, b"x"))
    outbox.enqueue(fired(2))
    outbox.enqueue(FinishedTrigger(1, "run", "returned", 3))
    first, second = outbox.take_round(1), outbox.take_round(2)
    assert (len(first.events), len(first.refused), len(first.finished)) == (1, 1, 0)
    assert (len(second.events), len(second.refused), len(second.finished)) == (1, 0, 1)


def test_a_round_ends_with_the_item_that_reaches_its_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "ROUND_BYTES_MAX", 100)
    outbox = Outbox(events_max=10, round_events_max=10)
    for index in range(3):
        outbox.enqueue(fired(index, b"x" * 60))
    outbox.enqueue(FinishedTrigger(1, "run", "failed", 3, "e" * 50, "t" * 50))
    outbox.enqueue(fired(3))
    rounds = [outbox.take_round(number) for number in (1, 2, 3)]
    assert [(len(one.events), len(one.finished)) for one in rounds] == [(2, 0), (1, 1), (1, 0)]


def test_an_empty_round_is_the_heartbeat() -> None:
    changes = Outbox(events_max=1, round_events_max=1).take_round(7)
    assert changes.round == 7
    assert (changes.events, changes.refused, changes.finished, changes.stuck) == ((), (), (), ())


def test_a_stuck_trigger_is_named_in_one_round() -> None:
    outbox = Outbox(events_max=1, round_events_max=1)
    outbox.report_stuck(5)
    assert outbox.take_round(1).stuck == (5,)
    assert outbox.take_round(2).stuck == ()


def test_it_is_full_by_events_or_by_bytes_and_has_room_again_when_a_round_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "OUTBOX_BYTES_MAX", 100)
    outbox = Outbox(events_max=2, round_events_max=1)
    outbox.enqueue(fired(0))
    assert not outbox.is_full
    outbox.enqueue(fired(1))
    assert outbox.is_full
    outbox.take_round(1)
    assert not outbox.is_full
    outbox.take_round(2)
    outbox.enqueue(fired(2, b"x" * 100))
    assert outbox.is_full
    outbox.take_round(3)
    assert not outbox.is_full


async def test_waiting_for_something_to_send_ends_with_an_item_or_a_stuck_trigger(autojump_clock: MockClock) -> None:
    outbox = Outbox(events_max=2, round_events_max=1)
    woken: list[int] = []

    async def wait() -> None:
        for number in range(2):
            await outbox.wait_not_empty()
            woken.append(number)
            outbox.take_round(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert woken == []
        outbox.enqueue(fired(0))
        await wait_all_tasks_blocked()
        assert woken == [0]
        outbox.report_stuck(1)
    assert woken == [0, 1]


async def test_whoever_waits_for_room_waits_until_there_is_some(autojump_clock: MockClock) -> None:
    outbox = Outbox(events_max=2, round_events_max=2)
    rounds_seen: list[int] = []
    for index in range(5):
        outbox.enqueue(fired(index))

    async def wait() -> None:
        while outbox.is_full:
            await outbox.wait_room()
            rounds_seen.append(len(outbox))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        outbox.take_round(1)
        await wait_all_tasks_blocked()
        assert rounds_seen == []  # three are left, of two that fit: there is no room yet
        outbox.take_round(2)
    assert rounds_seen == [1]


async def test_wake_lets_everyone_look_again_once_and_nobody_spins(autojump_clock: MockClock) -> None:
    outbox = Outbox(events_max=1, round_events_max=1)
    outbox.enqueue(fired(0))
    looks = 0

    async def wait() -> None:
        nonlocal looks
        while outbox.is_full:
            await outbox.wait_room()
            looks += 1

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        outbox.wake()
        await wait_all_tasks_blocked()
        assert looks == 3
        outbox.take_round(1)
    assert looks == 6
