"""The runner's end of the link on its own: whole frames, one round in flight, a bounded number of queries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_one_way_pair, memory_stream_pair, wait_all_tasks_blocked

from headgate.child.parent_death import SupervisorGone
from headgate.child.queries import QueryFailed
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.queries import GetVariable, LastEvent, Request, Response, SecretText
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    FiredEvent,
    Hello,
    RunnerFigures,
    RunnerSettings,
    StateChanges,
    StateSync,
    Welcome,
)
from headgate.runner.figures import FiguresReport
from headgate.runner.link import REQUESTS_MAX, AsyncLink
from headgate.runner.outbox import Outbox
from headgate.streams.lease import Lease
from headgate.triggers.base import LastEventUnknown

SETTINGS = RunnerSettings(heartbeat_s=5.0)


class Peer:
    """The supervisor's end, without a will of its own."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.connection = Connection(RunnerDialect(1), Role.SUPERVISOR)

    async def say(self, message: Any) -> None:
        await self.stream.send_all(self.connection.send(message))

    async def hear(self) -> Any:
        while (message := self.connection.next_message()) is None:
            data = await self.stream.receive_some()
            assert data
            self.connection.receive_data(data)
        return message


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[AsyncLink, Peer, trio.Nursery]]:
    ours, theirs = memory_stream_pair()
    link, peer = AsyncLink(ours, Connection(RunnerDialect(1), Role.RUNNER)), Peer(theirs)
    await link.send(Hello(PROTOCOL_VERSION, 1, 4, "0"))
    await peer.hear()
    await peer.say(Welcome(PROTOCOL_VERSION, 1, SETTINGS))
    await link.receive()
    async with trio.open_nursery() as nursery:
        yield link, peer, nursery
        nursery.cancel_scope.cancel()


async def test_the_end_of_the_stream_is_the_end_of_the_supervisor(autojump_clock: MockClock) -> None:
    async with linked() as (link, peer, _):
        await peer.stream.aclose()
        with pytest.raises(SupervisorGone):
            await link.receive()


async def test_a_connection_that_breaks_is_the_end_of_the_supervisor_too(autojump_clock: MockClock) -> None:
    sender, _ = memory_stream_one_way_pair()
    link = AsyncLink(trio.StapledStream(sender, _Broken()), Connection(RunnerDialect(1), Role.RUNNER))
    with pytest.raises(SupervisorGone):
        await link.receive()


class _Broken(trio.abc.ReceiveStream):
    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_frames_of_several_senders_do_not_mix(autojump_clock: MockClock) -> None:
    async with linked() as (link, peer, nursery):
        for number in range(20):
            nursery.start_soon(link.send, Request(number, LastEvent(number)))
        heard = [await peer.hear() for _ in range(20)]
        assert sorted(request.id for request in heard) == list(range(20))


class Sink(trio.abc.Stream):
    """Takes everything at once, without a turn of the scheduler."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        raise AssertionError("not used")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        raise AssertionError("not used")

    async def aclose(self) -> None:
        raise AssertionError("not used")


async def test_a_frame_needs_no_turn_of_the_scheduler_if_nobody_else_sends() -> None:
    sink = Sink()
    link = AsyncLink(sink, Connection(RunnerDialect(1), Role.RUNNER))
    with pytest.raises(StopIteration):  # `send` has returned, and awaited nothing
        link.send(Hello(PROTOCOL_VERSION, 1, 4, "0")).send(None)
    assert len(sink.sent) == 1


async def test_waiting_until_all_is_told_ends_with_the_answer_and_does_not_spin(autojump_clock: MockClock) -> None:
    outbox = Outbox(events_max=10, round_events_max=1)
    told: list[float] = []
    async with linked() as (link, peer, nursery):
        for index in range(2):
            outbox.enqueue(FiredEvent(1, "run", index, 0, b"1"))

        async def obey() -> None:
            while True:
                sync = await link.receive()
                assert isinstance(sync, StateSync)
                link.note_answer(sync)

        async def wait() -> None:
            await link.wait_told(outbox)
            told.append(trio.current_time())

        nursery.start_soon(obey)
        lease = Lease(request_round=outbox.request_round)
        nursery.start_soon(link.send_rounds, outbox, SETTINGS, lease, FiguresReport(RunnerFigures))
        nursery.start_soon(wait)
        for number in (1, 2):
            await wait_all_tasks_blocked()
            assert told == []
            assert not link.is_told(outbox)
            changes = await peer.hear()
            assert isinstance(changes, StateChanges)
            await peer.say(StateSync(round=number))
        await wait_all_tasks_blocked()
        assert len(told) == 1
        assert link.is_told(outbox)


async def test_an_answer_to_nothing_breaks_the_protocol(autojump_clock: MockClock) -> None:
    async with linked() as (link, peer, _):
        await peer.say(StateSync(round=0))
        await link.receive()
        await peer.say(StateSync(round=1))
        with pytest.raises(RemoteProtocolError, match="answers round 1; in flight is none"):
            await link.receive()


async def test_the_number_of_queries_that_wait_for_answers_is_bounded(autojump_clock: MockClock) -> None:
    answered: list[int] = []
    async with linked() as (link, peer, nursery):

        async def ask(trigger_id: int) -> None:
            assert await link.ask_last_event(trigger_id) is None
            answered.append(trigger_id)

        async def obey() -> None:
            while True:
                response = await link.receive()
                assert isinstance(response, Response)
                link.note_response(response)

        nursery.start_soon(link.send_requests)
        nursery.start_soon(obey)
        for number in range(REQUESTS_MAX + 20):
            nursery.start_soon(ask, number)
        heard = [await peer.hear() for _ in range(REQUESTS_MAX)]
        with trio.move_on_after(60) as waited:
            await peer.hear()
        assert waited.cancelled_caught
        for request in heard:
            await peer.say(Response(request.id))
        for _ in range(20):
            await peer.say(Response((await peer.hear()).id))
        await wait_all_tasks_blocked()
        assert sorted(answered) == list(range(REQUESTS_MAX + 20))


async def test_a_query_whose_asker_has_gone_makes_room_for_another(autojump_clock: MockClock) -> None:
    async with linked() as (link, peer, nursery):
        nursery.start_soon(link.send_requests)
        for _ in range(3):
            with trio.move_on_after(1):
                await link.ask_last_event(1)
        assert [(await peer.hear()).id for _ in range(3)] == [1, 2, 3]
        link.note_response(Response(2))  # late, and nobody needs it
        async with trio.open_nursery() as asking:
            asking.start_soon(link.ask_last_event, 1)
            assert (await peer.hear()).id == 4
            link.note_response(Response(4))


async def test_a_query_gets_its_result_or_the_reason_why_there_is_none(autojump_clock: MockClock) -> None:
    async with linked() as (link, peer, nursery):
        nursery.start_soon(link.send_requests)

        async def obey() -> None:
            while True:
                response = await link.receive()
                assert isinstance(response, Response)
                link.note_response(response)

        async def supervise() -> None:
            request = await peer.hear()
            assert request == Request(1, GetVariable("v"))
            await peer.say(Response(1, SecretText("x")))
            await peer.hear()
            await peer.say(Response(2, error="there is no such thing"))
            await peer.hear()
            await peer.say(Response(3, SecretText("x")))

        nursery.start_soon(obey)
        nursery.start_soon(supervise)
        assert await link.send_query(GetVariable("v")) == SecretText("x")
        with pytest.raises(QueryFailed, match="there is no such thing"):
            await link.send_query(GetVariable("w"))
        with pytest.raises(LastEventUnknown, match="sent a SecretText instead"):
            await link.ask_last_event(1)
