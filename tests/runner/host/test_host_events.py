"""Events of the host: what may be fired, what is refused, and room in the outbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import trio
from tests.runner.host.host_rig import Authored, beside_a_neighbour, hosting
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.protocol.messages.runner import (
    FinishedTrigger,
    RunnerSettings,
)
from headgate.runner.pauses import EVENTS_A_STEP
from headgate.triggers.base import (
    TaskFailedEvent,
    TaskSkippedEvent,
    TaskSuccessEvent,
    TriggerEvent,
)

# --- events --------------------------------------------------------------------------------------


async def test_events_are_numbered_from_0_in_each_run_and_precede_its_end(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for number in range(3):
                yield TriggerEvent(number)

    async with hosting() as rig:
        for _ in range(2):
            rig.items.clear()
            await rig.start(Trigger)
            end = await rig.end_of()
            assert [(e.sequence_index, e.payload, e.seq, e.is_last, e.kind) for e in rig.events()] == [
                (number, b"%d" % number, 0, False, "event") for number in range(3)
            ]
            assert rig.items[-1] == end == FinishedTrigger(1, "run-1", "returned", 3)


@pytest.mark.parametrize(
    ("event", "kind"),
    [(TaskSuccessEvent(xcoms={"a": 1}), "success"), (TaskFailedEvent(), "failed"), (TaskSkippedEvent(), "skipped")],
)
async def test_an_event_that_ends_the_task_ends_the_run_and_is_its_last(
    autojump_clock: MockClock, event: TriggerEvent, kind: str
) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(0)
            yield event
            yield TriggerEvent("never")

    async with hosting() as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "returned"
        assert [(e.kind, e.is_last) for e in rig.events()] == [("event", False), (kind, True)]


async def test_the_key_of_an_event_travels_with_it(autojump_clock: MockClock) -> None:
    class Topic(str):
        __slots__ = ()

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(0, key="order-7")
            yield TriggerEvent(1, key=Topic("order-8"))
            yield TriggerEvent(2)

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.end_of()
        assert [(e.key, e.position) for e in rig.events()] == [("order-7", 0), ("order-8", 0), (None, 0)]
        assert type(rig.events()[1].key) is str  # nothing else has a form on the wire


async def test_an_event_that_is_too_big_is_refused_with_name_and_size_and_the_run_goes_on(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent("x" * 98)
            yield TriggerEvent("y" * 99)
            yield TriggerEvent("z")

    async with hosting(RunnerSettings(event_bytes_max=100)) as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).events == 3
        assert [event.sequence_index for event in rig.events()] == [0, 2]
        (refused,) = rig.refused()
        assert refused.reason == "an event of name-1 has 101 bytes; the limit is 100"
        assert (refused.sequence_index, refused.payload_bytes) == (1, 101)
        assert (refused.payload_head, refused.is_whole) == (b'"' + b"y" * 99 + b'"', True)


async def test_a_payload_that_has_no_form_is_refused_with_its_path(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent({"rows": [1, print]})
            yield TriggerEvent("next")

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "returned"
        (refused,) = rig.refused()
        assert "payload['rows'][1]" in refused.reason
        assert "name-1" in refused.reason
        assert [event.sequence_index for event in rig.events()] == [1]


@pytest.mark.parametrize(
    ("key", "shown"),
    [("k" * 513, "k" * 447 + "#"), ("a\0b", "a\\x00b#"), ("a\ud800b", "a\\ud800b#"), (7, None)],
)
async def test_a_key_that_no_database_stores_is_refused(autojump_clock: MockClock, key: Any, shown: str) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            event = TriggerEvent({"n": 1})
            event.key = key
            yield event
            yield TriggerEvent(2, key="k" * 512)

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.end_of()
        (refused,) = rig.refused()
        assert "the key of an event of name-1" in refused.reason
        assert refused.key is shown is None or (refused.key or "").startswith(shown)
        assert len(refused.key or "") <= 512
        assert (refused.payload_head, refused.is_whole) == (b'{"n":1}', True)
        assert [event.key for event in rig.events()] == ["k" * 512]


# --- room in the outbox --------------------------------------------------------------------------

NARROW = RunnerSettings(outbox_events_max=2, round_events_max=2)


class Eager(Authored):
    """Fires without ever awaiting, and counts how far it got."""

    fired = 0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        for number in range(5):
            type(self).fired = number + 1
            yield TriggerEvent(number)


async def test_a_trigger_that_fires_into_a_full_outbox_waits_for_room_and_loses_nothing(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Eager):
        pass

    async with hosting(NARROW) as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        assert Trigger.fired == 2
        await rig.end_of()
        assert [event.sequence_index for event in rig.events()] == [0, 1, 2, 3, 4]


async def test_a_cancelled_trigger_does_not_wait_for_room(autojump_clock: MockClock) -> None:
    class Trigger(Eager):
        pass

    async with hosting(NARROW) as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        rig.cancel("shutdown")
        await rig.host.wait_all_ended()  # though nobody has taken a round
        assert [event.sequence_index for event in rig.events()] == [0, 1]
        assert (await rig.end_of()).events == 2


async def test_a_deadline_of_the_triggers_own_that_passes_while_it_waits_for_room_hits_the_trigger_only(
    autojump_clock: MockClock,
) -> None:
    seen: list[str] = []

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            with trio.move_on_after(1) as scope:
                for number in range(3):
                    yield TriggerEvent(number)
                await trio.sleep_forever()
            seen.append(f"cut: {scope.cancelled_caught}")
            yield TriggerEvent("after")

    async with hosting(NARROW) as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        await trio.sleep(10)  # the outbox is full all the time
        assert seen == []
        assert (await rig.end_of()).outcome == "returned"
        assert seen == ["cut: True"]
        assert [event.payload for event in rig.events()] == [b"0", b"1", b"2", b'"after"']


async def test_a_trigger_that_awaits_nothing_lets_the_others_run(autojump_clock: MockClock) -> None:
    turns: list[int] = []

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for number in range(10 * EVENTS_A_STEP):
                yield TriggerEvent(number)

    async with hosting() as rig:

        async def other() -> None:
            while len(turns) < 5:
                await trio.lowlevel.checkpoint()
                turns.append(len(rig.outbox))

        async with trio.open_nursery() as nursery:
            await rig.start(Trigger)
            nursery.start_soon(other)
        # Trio runs the tasks of one batch in random order, so two steps of the one may follow each other.
        assert all(later - earlier <= 2 * EVENTS_A_STEP for earlier, later in pairwise([0, *turns]))
        await rig.end_of()
