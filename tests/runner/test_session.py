"""A session of the runner: handshake, rounds, starts, confirmations, requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import trio
from tests.runner.session_rig import (
    INCARNATION,
    LEASE_S,
    SETTINGS,
    Authored,
    Broker,
    Sleeper,
    Supervisor,
    supervising,
    watcher_of,
)
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from headgate.protocol.errors import VersionMismatch
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.messages.queries import LastEvent, Request, Response, StoredEvent
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    CancelTrigger,
    DescribedStream,
    FinishedTrigger,
    FiredEvent,
    Hello,
    Refusal,
    RunnerFigures,
    RunnerSettings,
    StateChanges,
    StateSync,
    Welcome,
)
from headgate.runner.figures import FiguresReport
from headgate.runner.link import AsyncLink
from headgate.runner.outbox import Outbox
from headgate.runner.session import (
    EXIT_PROTOCOL,
    shake_hands,
)
from headgate.streams.contract import AdvanceOutcome, LanePosition
from headgate.streams.identity import identify
from headgate.streams.lease import Lease
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, LastEventUnknown, TaskSuccessEvent, TriggerEvent

# --- the handshake -------------------------------------------------------------------------------


async def test_a_supervisor_of_another_version_is_refused_with_both_versions(autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    link = AsyncLink(theirs, Connection(RunnerDialect(INCARNATION), Role.RUNNER))
    welcome = encode_message(Welcome(PROTOCOL_VERSION + 1, INCARNATION, SETTINGS))
    await ours.send_all(len(welcome).to_bytes(4, "big") + welcome)
    with pytest.raises(
        VersionMismatch, match=rf"version {PROTOCOL_VERSION + 1}, the runner version {PROTOCOL_VERSION}"
    ):
        await shake_hands(link, INCARNATION)


# --- rounds --------------------------------------------------------------------------------------


async def test_an_idle_runner_sends_an_empty_round_every_heartbeat(autojump_clock: MockClock) -> None:
    async with supervising() as supervisor:
        for number in (1, 2, 3):
            changes = await supervisor.hear_round()
            assert changes == StateChanges(round=number + 1)
            assert trio.current_time() == pytest.approx(SETTINGS.heartbeat_s * number, abs=0.01)
            await supervisor.answer(changes)


async def test_one_round_is_in_flight_and_the_next_carries_all_that_gathered(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for number in range(10):
                yield TriggerEvent(number)
                await trio.sleep(1)

    async with supervising() as supervisor:
        await supervisor.start(Trigger)
        first = await supervisor.hear_round()
        assert [event.sequence_index for event in first.events] == [0]
        with trio.move_on_after(5.5) as waited:
            await supervisor.hear_round()
        assert waited.cancelled_caught  # no heartbeat either, while an answer is owed
        await supervisor.answer(first)
        second = await supervisor.hear_round()
        assert (second.round, [event.sequence_index for event in second.events]) == (3, [1, 2, 3, 4, 5])


async def test_a_round_is_answered_only_when_its_answer_is_complete(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(0)
            yield TriggerEvent(1)

    async with supervising(RunnerSettings(round_events_max=1)) as supervisor:
        await supervisor.start(Trigger)
        await supervisor.hear_round()
        await supervisor.say(StateSync(round=2, more=True))
        with trio.move_on_after(60) as waited:
            await supervisor.hear_round()
        assert waited.cancelled_caught
        await supervisor.say(StateSync(round=2))
        assert (await supervisor.hear_round()).round == 3


async def test_a_round_too_long_for_one_frame_is_cut_and_answered_once(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for _ in range(10):
                yield TriggerEvent("x" * 900)

    async with supervising(RunnerSettings(frame_bytes_max=4096)) as supervisor:
        await supervisor.start(Trigger)
        frames = [await supervisor.hear_round()]
        while frames[-1].more:
            frames.append(await supervisor.hear_round())
        assert len(frames) == 3
        assert {frame.round for frame in frames} == {2}
        assert [event.sequence_index for frame in frames for event in frame.events] == list(range(10))
        assert [len(frame.finished) for frame in frames] == [0, 0, 1]


@pytest.mark.parametrize("number", [1, 2, 7])
async def test_an_answer_to_a_round_that_is_not_in_flight_breaks_the_protocol(
    autojump_clock: MockClock, number: int
) -> None:
    async with supervising() as supervisor:
        changes = await supervisor.hear_round()
        await supervisor.answer(changes)
        await supervisor.say(StateSync(round=number))
        await supervisor.has_ended.wait()
        assert (supervisor.exits, supervisor.exit_code) == ([EXIT_PROTOCOL], EXIT_PROTOCOL)


async def test_the_end_of_a_run_comes_after_its_events_and_after_the_last_of_them(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for number in range(4):
                yield TriggerEvent(number)
            yield TaskSuccessEvent()

    async with supervising(RunnerSettings(round_events_max=2)) as supervisor:
        await supervisor.start(Trigger)
        await supervisor.until(lambda: supervisor.finished)
        assert [len(frame.events) for frame in supervisor.frames] == [2, 2, 1]
        assert [frame.finished for frame in supervisor.frames[:2]] == [(), ()]
        assert [(event.sequence_index, event.is_last) for event in supervisor.events][-2:] == [(3, False), (4, True)]
        assert supervisor.finished[0].events == 5


# --- starting and cancelling ---------------------------------------------------------------------


async def test_a_cancelled_trigger_is_reported_and_its_neighbour_runs_on(autojump_clock: MockClock) -> None:
    async with supervising() as supervisor:
        await supervisor.start(Sleeper, 1, 2)
        await supervisor.say(StateSync(to_cancel=(CancelTrigger(1, "user"), CancelTrigger(99, "user"))))
        await supervisor.until(lambda: supervisor.finished)
        assert supervisor.finished == [FinishedTrigger(1, "run-1", "cancelled", 0, reason="user")]


async def test_a_stuck_trigger_is_named_in_a_round(autojump_clock: MockClock) -> None:
    release = trio.Event()

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            with trio.CancelScope(shield=True):
                await release.wait()
            yield TriggerEvent()

    async with supervising() as supervisor:
        await supervisor.start(Trigger, 8)
        await wait_all_tasks_blocked()
        await supervisor.say(StateSync(to_cancel=(CancelTrigger(8, "user"),)))
        await supervisor.until(lambda: any(frame.stuck for frame in supervisor.frames))
        assert [frame.stuck for frame in supervisor.frames if frame.stuck] == [(8,)]
        release.set()
        await supervisor.until(lambda: supervisor.finished)


async def test_all_triggers_of_an_assignment_join_before_the_first_broadcast_even_in_several_messages(
    autojump_clock: MockClock,
) -> None:
    broker = Broker()
    broker.publish.send_nowait(1)
    watcher = watcher_of(broker)
    async with supervising() as supervisor:
        await supervisor.say(StateSync(more=True))
        await supervisor.start(watcher, *range(1, 151), more=True)
        await wait_all_tasks_blocked()
        await supervisor.start(watcher, *range(151, 301))
        await supervisor.until(lambda: len(supervisor.events) >= 300)
        assert {event.trigger_id for event in supervisor.events} == set(range(1, 301))
        await wait_all_tasks_blocked()
        assert broker.outcomes == {1: [AdvanceOutcome(acked=300)]}
        await supervisor.drain()


# --- confirmations -------------------------------------------------------------------------------


async def test_i1_an_event_is_advanced_only_after_its_round_was_answered(autojump_clock: MockClock) -> None:
    broker = Broker()
    async with supervising() as supervisor:
        await supervisor.start(watcher_of(broker))
        broker.publish.send_nowait(1)
        changes = await supervisor.hear_round()
        await wait_all_tasks_blocked()
        assert broker.outcomes == {}
        await supervisor.answer(changes)
        await wait_all_tasks_blocked()
        assert broker.outcomes == {1: [AdvanceOutcome(acked=1)]}
        await supervisor.drain()


def skipper_of(broker: Broker) -> type[BaseEventTrigger]:
    class Skipper(watcher_of(broker)):  # type: ignore[misc]
        """Fires nothing, whatever comes."""

        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for _ in shared_stream:
                pass
            return
            yield

    return Skipper


async def test_i10_what_fired_nothing_is_advanced_only_as_long_as_rounds_are_answered(
    autojump_clock: MockClock,
) -> None:
    broker = Broker()
    async with supervising() as supervisor:
        await supervisor.start(skipper_of(broker))
        broker.publish.send_nowait(1)
        await wait_all_tasks_blocked()
        assert broker.outcomes == {1: [AdvanceOutcome(acked=1)]}
        heartbeat = await supervisor.hear_round()
        await trio.sleep(LEASE_S)
        broker.publish.send_nowait(2)
        await wait_all_tasks_blocked()
        assert 2 not in broker.outcomes
        await supervisor.answer(heartbeat)  # too late: nobody knows what has happened since it was sent
        await wait_all_tasks_blocked()
        assert 2 not in broker.outcomes
        asked = await supervisor.hear_round()
        assert msgspec.structs.replace(asked, figures=None) == StateChanges(heartbeat.round + 1)
        await supervisor.answer(asked)
        await wait_all_tasks_blocked()
        assert broker.outcomes[2] == [AdvanceOutcome(acked=1)]
        await supervisor.drain()


REASSIGNED = (CancelTrigger(7, "reassigned"),)


@pytest.mark.parametrize(
    "sync",
    [
        StateSync(lease_lost=True),
        StateSync(to_cancel=REASSIGNED, lease_lost=True),
        StateSync(to_cancel=REASSIGNED, more=True, lease_lost=True),
    ],
)
async def test_i10_nothing_is_advanced_after_the_lease_was_lost(sync: StateSync, autojump_clock: MockClock) -> None:
    broker = Broker()
    async with supervising() as supervisor:
        await supervisor.start(skipper_of(broker))
        await wait_all_tasks_blocked()
        await supervisor.say(sync)
        broker.publish.send_nowait(1)
        await wait_all_tasks_blocked()
        await supervisor.drain()
        assert broker.outcomes == {}


@pytest.mark.parametrize("sync", [StateSync(), StateSync(to_cancel=REASSIGNED), StateSync(more=True)])
async def test_a_message_that_does_not_say_that_the_lease_is_lost_takes_nothing_away(
    sync: StateSync, autojump_clock: MockClock
) -> None:
    broker = Broker()
    async with supervising() as supervisor:
        await supervisor.start(skipper_of(broker))
        await wait_all_tasks_blocked()
        await supervisor.say(sync)
        broker.publish.send_nowait(1)
        await wait_all_tasks_blocked()
        assert broker.outcomes == {1: [AdvanceOutcome(acked=1)]}
        await supervisor.drain()


async def test_a_round_for_the_lease_goes_before_the_events_that_wait_and_not_twice(autojump_clock: MockClock) -> None:
    outbox = Outbox(events_max=10, round_events_max=10)
    lease = Lease(request_round=outbox.request_round)
    ours, theirs = memory_stream_pair()
    link = AsyncLink(theirs, Connection(RunnerDialect(INCARNATION), Role.RUNNER))
    supervisor = Supervisor(ours, SETTINGS)
    rounds: list[StateChanges] = []
    async with trio.open_nursery() as nursery:

        async def runner() -> None:
            await shake_hands(link, INCARNATION)
            nursery.start_soon(lease.wait)
            outbox.enqueue(FiredEvent(1, "run", 0, 0, b"1"))
            await wait_all_tasks_blocked()
            nursery.start_soon(link.send_rounds, outbox, SETTINGS, lease, FiguresReport(RunnerFigures))
            while True:
                sync = await link.receive()
                assert isinstance(sync, StateSync)
                link.note_answer(sync)

        nursery.start_soon(runner)
        hello = await supervisor.hear()
        assert isinstance(hello, Hello)
        await supervisor.say(Welcome(PROTOCOL_VERSION, INCARNATION, SETTINGS))
        for _ in range(3):
            rounds.append(await supervisor.hear_round())
            await supervisor.answer(rounds[-1])
            outbox.request_round()
        nursery.cancel_scope.cancel()
    assert [len(one.events) for one in rounds] == [0, 1, 0]


@pytest.mark.parametrize(
    ("payload_kept", "outcome"), [(True, AdvanceOutcome(acked=1)), (False, AdvanceOutcome(rejected=1))]
)
async def test_a_dead_letter_with_its_payload_counts_as_stored_and_one_without_rejects_the_message(
    autojump_clock: MockClock, payload_kept: bool, outcome: AdvanceOutcome
) -> None:
    broker = Broker()
    async with supervising() as supervisor:
        await supervisor.start(watcher_of(broker))
        broker.publish.send_nowait(1)
        changes = await supervisor.hear_round()
        refusal = Refusal(changes.events[0].seq, 1, "the database said no", payload_kept)
        await supervisor.say(StateSync(changes.round, refused=(refusal,)))
        await wait_all_tasks_blocked()
        assert broker.outcomes == {1: [outcome]}
        await supervisor.drain()


async def test_an_event_too_big_is_refused_on_the_wire_and_rejected_at_the_broker(autojump_clock: MockClock) -> None:
    broker = Broker()

    class Watcher(watcher_of(broker)):  # type: ignore[misc]
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent("x" * message)

    async with supervising(RunnerSettings(event_bytes_max=50)) as supervisor:
        await supervisor.start(Watcher)
        for message in (10, 100, 11):
            broker.publish.send_nowait(message)
        await supervisor.until(lambda: len(supervisor.events) == 2)
        await wait_all_tasks_blocked()
        assert broker.outcomes == {
            10: [AdvanceOutcome(acked=1)],
            100: [AdvanceOutcome(rejected=1)],
            11: [AdvanceOutcome(acked=1)],
        }
        await supervisor.drain()


# --- requests ------------------------------------------------------------------------------------


def asking(answers: list[Any]) -> type[BaseTrigger]:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            try:
                answers.append(await self.last_event())
            except LastEventUnknown as exc:
                answers.append(exc)
            yield TriggerEvent("asked")

    return Trigger


@pytest.mark.parametrize(
    ("stored", "answer"),
    [(None, None), (StoredEvent("earlier", 5, b'{"a":1}', "k"), TriggerEvent({"a": 1}, key="k"))],
)
async def test_a_trigger_may_ask_for_its_newest_event(
    autojump_clock: MockClock, stored: StoredEvent | None, answer: TriggerEvent | None
) -> None:
    answers: list[Any] = []
    async with supervising() as supervisor:
        await supervisor.start(asking(answers), 6)
        request = await supervisor.hear()
        assert request == Request(1, LastEvent(6))
        await supervisor.say(Response(99))  # an answer that nobody waits for
        await supervisor.say(Response(1, stored))
        await supervisor.until(lambda: supervisor.events)
        assert answers == [answer]


async def test_a_query_that_cannot_be_answered_raises_what_is_known(autojump_clock: MockClock) -> None:
    answers: list[Any] = []
    async with supervising() as supervisor:
        await supervisor.start(asking(answers))
        await supervisor.hear()
        await supervisor.say(Response(1, error="the database is away"))
        await supervisor.until(lambda: supervisor.events)
        assert isinstance(answers[0], LastEventUnknown)
        assert str(answers[0]) == "the database is away"


async def test_a_stream_is_asked_about_once_at_a_time_however_often_its_supervisor_wants_it(
    autojump_clock: MockClock,
) -> None:
    class Asked(Broker):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.answers = 0, trio.Event()

        async def describe(self) -> list[LanePosition]:
            self.asked += 1
            await self.answers.wait()
            return [LanePosition(lag=7)]

    broker = Asked()
    described: list[DescribedStream] = []
    async with supervising() as supervisor:

        async def hear_until(condition: Callable[[], Any]) -> None:
            while not condition():
                changes = await supervisor.hear_round()
                described.extend(changes.streams)
                await supervisor.answer(changes)

        await supervisor.start(watcher_of(broker))
        digest = identify("stream").digest
        for _ in range(3):
            await supervisor.say(StateSync(describe=(digest, digest)))
        await wait_all_tasks_blocked()
        assert broker.asked == 1
        broker.answers.set()
        await hear_until(lambda: described)
        assert [each.lanes[0].lag for each in described] == [7]
        await supervisor.say(StateSync(describe=(digest,)))
        await hear_until(lambda: len(described) == 2)
        assert broker.asked == 2
