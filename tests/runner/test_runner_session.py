"""A session of the runner against a scripted supervisor, over streams in memory."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from headgate.protocol.errors import VersionMismatch
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.messages.queries import LastEvent, Request, Response, StoredEvent
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    CancelTrigger,
    Drain,
    FinishedTrigger,
    FiredEvent,
    FromRunner,
    Hello,
    Refusal,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)
from headgate.protocol.values import encode_value
from headgate.runner import session as session_module
from headgate.runner.link import AsyncLink
from headgate.runner.outbox import Outbox
from headgate.runner.session import (
    ABANDONED_END_S,
    EXIT_ABANDONED,
    EXIT_DRAINED,
    EXIT_OVERDUE,
    EXIT_PROTOCOL,
    RunnerSession,
    shake_hands,
)
from headgate.streams.contract import AdvanceItem, AdvanceOutcome, SharedStreamProducer
from headgate.streams.lease import Lease
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, LastEventUnknown, TaskSuccessEvent, TriggerEvent

INCARNATION = 3
LEASE_S = 7.0
SETTINGS = RunnerSettings(heartbeat_s=5.0, cancel_grace_s=10.0, hook_timeout_s=5.0, rejoin_wait_s=0.0)

AUTHORS = types.ModuleType("authors_of_test_runner_session")


@pytest.fixture(autouse=True)
def authors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, AUTHORS.__name__, AUTHORS)
    with structlog.testing.capture_logs():
        yield


class Supervisor:
    """The other side, word by word."""

    def __init__(self, stream: trio.abc.Stream, settings: RunnerSettings) -> None:
        self.stream = stream
        self.settings = settings
        self.connection = Connection(RunnerDialect(INCARNATION), Role.SUPERVISOR)
        self.frames: list[StateChanges] = []
        self.events: list[FiredEvent] = []
        self.finished: list[FinishedTrigger] = []
        self.exit_code: int | None = None  # what the session returned
        self.exits: list[int] = []  # what it left the process with
        self.has_ended = trio.Event()

    async def say(self, message: Any) -> None:
        await self.stream.send_all(self.connection.send(message))

    async def hear(self) -> FromRunner | None:
        """The next message, None at the end of the stream."""
        while (message := self.connection.next_message()) is None:
            data = await self.stream.receive_some()
            if not data:
                return None
            self.connection.receive_data(data)
        return message

    async def greet(self) -> None:
        hello = await self.hear()
        assert isinstance(hello, Hello)
        assert (hello.protocol_version, hello.incarnation) == (PROTOCOL_VERSION, INCARNATION)
        await self.say(Welcome(PROTOCOL_VERSION, INCARNATION, self.settings))
        heartbeat = await self.hear()  # the first round asks for the lease, whatever else there is
        assert heartbeat == StateChanges(1)
        await self.answer(heartbeat)

    async def hear_round(self) -> StateChanges:
        """The next frame of a round; its contents are noted."""
        changes = await self.hear()
        assert isinstance(changes, StateChanges)
        self.frames.append(changes)
        self.events += changes.events
        self.finished += changes.finished
        return changes

    async def answer(self, changes: StateChanges) -> None:
        """Everything of this frame is stored."""
        refused = tuple(Refusal(one.seq, one.trigger_id, one.reason, False) for one in changes.refused)
        persisted = tuple(one.seq for one in changes.events if one.seq)
        await self.say(StateSync(changes.round, persisted, refused, lease_s=LEASE_S))

    async def until(self, condition: Callable[[], Any]) -> None:
        """Answer rounds until the condition holds."""
        while not condition():
            changes = await self.hear_round()
            if not changes.more:
                await self.answer(changes)

    async def start(self, cls: type[BaseTrigger], *trigger_ids: int, more: bool = False) -> None:
        await self.say(StateSync(to_create=specs(cls, *trigger_ids), more=more))

    async def drain(self, deadline_s: float = 10.0) -> None:
        """Ask for the end, and answer rounds until the runner closes the link."""
        await self.say(Drain(deadline_s))
        while (message := await self.hear()) is not None:
            assert isinstance(message, StateChanges)
            self.events += message.events
            self.finished += message.finished
            if not message.more:
                await self.answer(message)
        await self.has_ended.wait()


def specs(cls: type[BaseTrigger], *trigger_ids: int) -> tuple[TriggerSpec, ...]:
    setattr(AUTHORS, cls.__name__, cls)
    classpath, kwargs = f"{AUTHORS.__name__}.{cls.__name__}", encode_value({}, where="kwargs")
    return tuple(TriggerSpec(one, f"run-{one}", f"name-{one}", classpath, kwargs) for one in trigger_ids or (1,))


@asynccontextmanager
async def supervising(
    settings: RunnerSettings = SETTINGS,
    streams: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = memory_stream_pair,
    *,
    greets: bool = True,
) -> AsyncIterator[Supervisor]:
    ours, theirs = streams()
    supervisor = Supervisor(ours, settings)

    async def run() -> None:
        link = AsyncLink(theirs, Connection(RunnerDialect(INCARNATION), Role.RUNNER))
        welcome_settings = await shake_hands(link, INCARNATION)
        session = RunnerSession(link, welcome_settings, exit_process=lambda code: supervisor.exits.append(code))
        supervisor.exit_code = await session.run()
        await link.aclose()
        supervisor.has_ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        if greets:
            await supervisor.greet()
        yield supervisor
        nursery.cancel_scope.cancel()


class Authored(BaseTrigger):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}


class Sleeper(Authored):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.sleep_forever()
        yield TriggerEvent()


class Broker(SharedStreamProducer):
    """A broker in memory."""

    def __init__(self) -> None:
        self.publish, self._messages = trio.open_memory_channel[int](100)
        self.outcomes: dict[int, list[AdvanceOutcome]] = defaultdict(list)
        self.is_closed = False

    async def open_stream(self) -> AsyncIterator[tuple[int, int]]:
        async for message in self._messages:
            yield message, message

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        for item in batch:
            self.outcomes[item.broker_payload].append(item.outcome)

    def event_key(self, broker_payload: int) -> str | None:
        return f"m{broker_payload}"

    async def aclose(self) -> None:
        self.is_closed = True
        self.publish.close()
        self._messages.close()


def watcher_of(broker: Broker) -> type[BaseEventTrigger]:
    class Watcher(BaseEventTrigger):
        def serialize(self) -> tuple[str, dict[str, Any]]:
            return "", {}

        def shared_stream_key(self) -> str:
            return "stream"

        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            return broker

        def run(self) -> AsyncIterator[TriggerEvent]:
            raise AssertionError

    return Watcher


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
        assert asked == StateChanges(heartbeat.round + 1)
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
            nursery.start_soon(link.send_rounds, outbox, SETTINGS, lease)
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
        for message in (1, 2, 3):
            broker.publish.send_nowait(message)
        await wait_all_tasks_blocked()
        await supervisor.say(Drain(10.0))
        await wait_all_tasks_blocked()
        for message in (4, 5):
            broker.publish.send_nowait(message)
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

    monkeypatch.setattr(session_module.Link, "note_response", fail)
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
