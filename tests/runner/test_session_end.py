"""The end of a session of the runner: drains, and the supervisor's death."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.runner.session_rig import (
    INCARNATION,
    Authored,
    Broker,
    Sleeper,
    supervising,
    watcher_of,
)
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from headgate.protocol.messages.queries import LastEvent, Request, Response
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FinishedTrigger,
    RunnerSettings,
    StateChanges,
    Welcome,
)
from headgate.runner.link import AsyncLink
from headgate.runner.session import (
    ABANDONED_END_S,
    EXIT_ABANDONED,
    EXIT_DRAINED,
    EXIT_OVERDUE,
    EXIT_PROTOCOL,
)
from headgate.streams.contract import AdvanceOutcome
from headgate.triggers.base import TriggerEvent

# --- the drain -----------------------------------------------------------------------------------


async def test_a_drain_without_triggers_ends_at_once_with_code_0(autojump_clock: MockClock) -> None:
    async with supervising() as supervisor:
        await supervisor.drain()
        assert (supervisor.exits, supervisor.exit_code) == ([], EXIT_DRAINED)
        assert trio.current_time() < 0.1


async def test_a_heartbeat_that_nobody_answers_makes_no_drain_late(autojump_clock: MockClock) -> None:
    async with supervising(greets=False) as supervisor:
        await supervisor.hear()
        await supervisor.say(Welcome(PROTOCOL_VERSION, INCARNATION, supervisor.settings))
        assert await supervisor.hear_round() == StateChanges(1)
        await supervisor.say(Drain(10.0))
        assert await supervisor.hear() is None
        await supervisor.has_ended.wait()
        assert (supervisor.exits, supervisor.exit_code) == ([], EXIT_DRAINED)
        assert trio.current_time() < 0.1


async def test_a_drain_stops_pulling_stores_and_advances_what_was_fired_and_then_cuts_the_triggers_short(
    autojump_clock: MockClock,
) -> None:
    broker = Broker()

    class Watcher(watcher_of(broker)):  # type: ignore[misc]
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if message == 3:
                    await trio.sleep_forever()
                yield TriggerEvent(message)

    async with supervising() as supervisor:
        await supervisor.start(Watcher, 1)
        await supervisor.start(Sleeper, 2)
        for number in (1, 2, 3):
            broker.publish.send_nowait(number)
        await wait_all_tasks_blocked()
        await supervisor.say(Drain(10.0))
        await wait_all_tasks_blocked()
        for number in (4, 5):
            broker.publish.send_nowait(number)
        await wait_all_tasks_blocked()
        assert broker.outcomes == {}  # nothing is confirmed yet
        while (message := await supervisor.hear()) is not None:
            assert isinstance(message, StateChanges)
            supervisor.events += message.events
            supervisor.finished += message.finished
            await supervisor.answer(message)
        await supervisor.has_ended.wait()
        assert [event.key for event in supervisor.events] == ["m1", "m2"]
        assert broker.outcomes == {
            1: [AdvanceOutcome(acked=1)],
            2: [AdvanceOutcome(acked=1)],
            3: [AdvanceOutcome(failed=1)],  # it was being worked on: cut short
            4: [AdvanceOutcome(failed=1)],  # the pull was under way when the drain began; nobody was handed it
        }
        assert broker.is_closed
        assert [(end.outcome, end.reason) for end in supervisor.finished] == [("cancelled", "shutdown")] * 2
        assert (supervisor.exits, supervisor.exit_code) == ([], EXIT_DRAINED)


async def test_a_drain_hands_over_what_triggers_fire_while_they_are_being_cancelled(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                yield TriggerEvent("last words")

    async with supervising() as supervisor:
        await supervisor.start(Trigger)
        await wait_all_tasks_blocked()
        await supervisor.drain()
        assert [event.payload for event in supervisor.events] == [b'"last words"']
        assert supervisor.finished == [FinishedTrigger(1, "run-1", "cancelled", 1, reason="shutdown")]
        assert supervisor.exit_code == EXIT_DRAINED


async def test_a_trigger_that_waits_for_room_does_not_hold_up_the_drain(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            while True:
                yield TriggerEvent()

    async with supervising(RunnerSettings(outbox_events_max=3, round_events_max=2)) as supervisor:
        await supervisor.start(Trigger)
        await supervisor.hear_round()
        await supervisor.answer(supervisor.frames[0])
        await supervisor.drain()
        assert supervisor.exit_code == EXIT_DRAINED
        assert [event.sequence_index for event in supervisor.events] == list(range(supervisor.finished[0].events))


async def test_a_database_that_stays_away_ends_the_drain_at_its_deadline_with_nothing_advanced(
    autojump_clock: MockClock,
) -> None:
    broker = Broker()
    async with supervising() as supervisor:
        await supervisor.start(watcher_of(broker))
        broker.publish.send_nowait(1)
        await supervisor.hear_round()
        begun_at = trio.current_time()
        await supervisor.say(Drain(10.0))
        await supervisor.has_ended.wait()
        assert trio.current_time() - begun_at == pytest.approx(9, abs=1.1)
        assert (supervisor.exits, supervisor.exit_code) == ([EXIT_OVERDUE], EXIT_OVERDUE)
        assert broker.outcomes == {}


@pytest.mark.parametrize(("advance_timeout_s", "deadline_s"), [(60.0, 40.0), (5.0, 40.0), (60.0, 10.0)])
async def test_a_drain_that_cuts_an_advance_off_does_not_count_as_drained(
    autojump_clock: MockClock, advance_timeout_s: float, deadline_s: float
) -> None:
    class Hanging(Broker):
        async def advance(self, batch: object) -> None:
            await trio.sleep_forever()

    broker = Hanging()
    async with supervising(RunnerSettings(heartbeat_s=1.0, advance_timeout_s=advance_timeout_s)) as supervisor:
        await supervisor.start(watcher_of(broker))
        broker.publish.send_nowait(1)
        await supervisor.until(lambda: supervisor.events)
        await supervisor.drain(deadline_s)
        assert supervisor.exit_code == EXIT_OVERDUE


async def test_an_advance_that_was_cut_off_long_before_the_drain_does_not_count(autojump_clock: MockClock) -> None:
    class HangsOnce(Broker):
        async def advance(self, batch: object) -> None:
            await trio.sleep_forever()

    broker = HangsOnce()
    async with supervising(RunnerSettings(heartbeat_s=1.0, advance_timeout_s=5.0)) as supervisor:
        await supervisor.start(watcher_of(broker))
        broker.publish.send_nowait(1)
        await supervisor.until(lambda: supervisor.finished)
        assert "AdvanceTimeout" in supervisor.finished[0].traceback
        await supervisor.drain(40.0)
        assert supervisor.exit_code == EXIT_DRAINED


async def test_a_trigger_that_does_not_end_is_left_behind_at_the_drains_deadline(autojump_clock: MockClock) -> None:
    release = trio.Event()

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            with trio.CancelScope(shield=True):
                await release.wait()
            yield TriggerEvent()

    async with supervising() as supervisor:
        await supervisor.start(Trigger)
        await supervisor.start(Sleeper, 2)
        await wait_all_tasks_blocked()
        await supervisor.say(Drain(10.0))
        await supervisor.until(lambda: supervisor.finished)
        assert supervisor.finished[0].trigger_id == 2
        await trio.sleep(9.5)
        assert supervisor.exits == [EXIT_OVERDUE]
        release.set()  # a real process would be gone by now
        await supervisor.has_ended.wait()


async def test_a_hook_that_hangs_is_cut_by_the_drains_deadline_if_that_comes_first(autojump_clock: MockClock) -> None:
    class Trigger(Sleeper):
        async def cleanup(self) -> None:
            await trio.sleep_forever()

    async with supervising(RunnerSettings(hook_timeout_s=60.0, heartbeat_s=1.0)) as supervisor:
        await supervisor.start(Trigger)
        await wait_all_tasks_blocked()
        await supervisor.drain(10.0)
        assert supervisor.exits == [EXIT_OVERDUE]


# --- the end of the supervisor -------------------------------------------------------------------


async def test_the_end_of_the_stream_abandons_everything_and_advances_nothing_unconfirmed(
    autojump_clock: MockClock,
) -> None:
    broker = Broker()
    async with supervising() as supervisor:
        await supervisor.start(watcher_of(broker))
        broker.publish.send_nowait(1)
        first = await supervisor.hear_round()
        broker.publish.send_nowait(2)
        await wait_all_tasks_blocked()
        await supervisor.answer(first)
        await supervisor.stream.aclose()
        begun_at = trio.current_time()
        await supervisor.has_ended.wait()
        assert broker.outcomes == {1: [AdvanceOutcome(acked=1)]}
        assert (supervisor.exits, supervisor.exit_code) == ([EXIT_ABANDONED], EXIT_ABANDONED)
        assert trio.current_time() - begun_at <= ABANDONED_END_S


async def test_the_end_of_the_stream_gives_triggers_their_cleanup_but_half_a_second_only(
    autojump_clock: MockClock,
) -> None:
    called: list[str] = []
    left_at: list[float] = []

    class Quick(Sleeper):
        async def cleanup(self) -> None:
            called.append("quick")

        async def on_kill(self) -> None:
            called.append("on_kill")

    class Slow(Sleeper):
        async def cleanup(self) -> None:
            await trio.sleep(3)
            called.append("slow")

    async with supervising() as supervisor:
        supervisor.exits = ExitTimes(left_at)
        await supervisor.start(Quick, 1)
        await supervisor.start(Slow, 2)
        await wait_all_tasks_blocked()
        await supervisor.stream.aclose()
        await supervisor.has_ended.wait()
    assert called[0] == "quick"
    assert "on_kill" not in called
    assert left_at == [pytest.approx(ABANDONED_END_S, abs=0.01)]


class ExitTimes(list[int]):
    """Notes when the process would have been left."""

    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self._times = times

    def append(self, code: int) -> None:
        super().append(code)
        self._times.append(trio.current_time())


async def test_the_supervisors_end_during_a_drain_is_an_end_too(autojump_clock: MockClock) -> None:
    async with supervising() as supervisor:
        await supervisor.start(Sleeper)
        await wait_all_tasks_blocked()
        await supervisor.say(Drain(10.0))
        await wait_all_tasks_blocked()
        await supervisor.stream.aclose()
        await supervisor.has_ended.wait()
        assert supervisor.exit_code == EXIT_ABANDONED


async def test_a_malformed_frame_ends_the_runner_with_its_own_code(autojump_clock: MockClock) -> None:
    async with supervising() as supervisor:
        await supervisor.start(Sleeper)
        await supervisor.stream.send_all(b"\x00\x00\x00\x03abc")
        await supervisor.has_ended.wait()
        assert (supervisor.exits, supervisor.exit_code) == ([EXIT_PROTOCOL], EXIT_PROTOCOL)


async def test_a_fault_of_ours_ends_the_session_even_with_triggers_that_wait_for_room(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fault(Exception):
        pass

    def fail(_self: Any, _response: Response) -> None:
        raise Fault

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            while True:
                yield TriggerEvent()

    monkeypatch.setattr(AsyncLink, "note_response", fail)
    with pytest.RaisesGroup(Fault, flatten_subgroups=True):
        async with supervising(RunnerSettings(outbox_events_max=3, round_events_max=2)) as supervisor:
            await supervisor.start(Trigger)
            await supervisor.hear_round()
            await wait_all_tasks_blocked()
            await supervisor.say(Response(1))
            await trio.sleep_forever()


async def test_a_trigger_that_is_cancelled_while_it_asks_never_leaves_half_a_frame_on_the_link(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for _ in range(3):
                with trio.move_on_after(1):
                    await self.last_event()
            yield TriggerEvent("done")

    async with supervising(streams=lockstep_stream_pair) as supervisor:
        await supervisor.start(Trigger)
        await trio.sleep(10)  # nobody reads: the first query is stuck halfway, and its asker is gone
        heard = [await supervisor.hear(), await supervisor.hear()]
        assert heard[0] == Request(1, LastEvent(1))
        assert isinstance(heard[1], StateChanges)  # the other two queries were withdrawn in time
        assert [event.payload for event in heard[1].events] == [b'"done"']
