"""Dead letters of the host: what is refused or passed over is kept whole, or the broker keeps its message (I1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog
import trio
from tests.runner.authors import expected, publish
from tests.runner.host.stream_rig import ACK_TIMEOUT_S, ACKED, FAILED, REJECTED, SETTINGS, Rig, Watcher, hosting
from trio.testing import MockClock

from headgate.protocol.link.splitting import fits_frame, split_round
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import LETTER_BYTES_MAX, Redelivery, RefusedEvent, StateChanges, TriggerSpec
from headgate.protocol.values import decode_value, encode_value
from headgate.triggers.base import TaskSuccessEvent, TriggerEvent
from headgate.triggers.shared_stream import Undecodable, reject_shared_stream_event


class Unencodable:
    """A value without a form on the wire."""


class Fires(Watcher):
    """Fires what `payload_of` says for each message."""

    payloads: dict[int, Any] = {}  # noqa: RUF012 - set by each test

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            yield TriggerEvent(self.payloads.get(message, message))


async def start_passing_over(rig: Rig, cls: type[Watcher], *keys: str, trigger_id: int = 1, run: str = "run") -> None:
    classpath, kwargs = publish(cls), encode_value({}, where="kwargs")
    await rig.host.start((expected(TriggerSpec(trigger_id, run, "orders", classpath, kwargs, passed_over=keys)),))
    await rig.settle()


# --- refused events ------------------------------------------------------------------------------


async def test_an_event_without_a_form_is_kept_as_the_whole_message_it_derives_from(autojump_clock: MockClock) -> None:
    class Trigger(Fires):
        payloads = {2: Unencodable()}  # noqa: RUF012

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.publish(1, 2, 3)
        await rig.confirm()
        (letter,) = rig.refused
        assert (letter.content, letter.payload_head, letter.is_whole) == ("message", b"2", True)
        assert (letter.key, letter.position, letter.payload_bytes) == ("m2", 0, 1)
        assert "cannot be stored: payload" in letter.reason
        assert rig.broker.outcomes == {1: [ACKED]}
        rig.streams.confirm_persisted([letter.seq])
        await rig.settle()
        assert rig.broker.outcomes == {1: [ACKED], 2: [ACKED], 3: [ACKED]}


async def test_an_event_longer_than_a_letter_is_kept_as_its_message(autojump_clock: MockClock) -> None:
    class Trigger(Fires):
        payloads = {2: "x" * LETTER_BYTES_MAX}  # noqa: RUF012

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.publish(2)
        (letter,) = rig.refused
        assert (letter.content, letter.payload_head, letter.is_whole) == ("message", b"2", True)


async def test_if_neither_event_nor_message_can_be_kept_the_message_is_rejected(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent(message)

    async with hosting() as rig:
        rig.broker.names_messages = False
        await rig.start(Trigger)
        for message in (Unencodable(), "x" * LETTER_BYTES_MAX):
            rig.broker.publish.send_nowait(message)  # type: ignore[arg-type]
        await rig.settle()
        assert [(letter.is_whole, letter.payload_bytes) for letter in rig.refused] == [
            (False, 0),
            (False, LETTER_BYTES_MAX + 2),
        ]
        assert len(rig.refused[1].payload_head) == 4096
        rig.streams.confirm_refused([letter.seq for letter in rig.refused])
        await rig.settle()
        assert list(rig.broker.outcomes.values()) == [[REJECTED], [REJECTED]]


@pytest.mark.parametrize(("payload_bytes", "is_whole"), [(1_000_000, False), (900_000, True)])
async def test_a_letter_that_fits_no_frame_has_only_a_head_and_the_link_goes_on(
    autojump_clock: MockClock, payload_bytes: int, is_whole: bool
) -> None:
    class Trigger(Watcher):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent("x" * payload_bytes)

        def shared_stream_key(self) -> None:
            return None

    limit = 1_000_000
    async with hosting(msgspec.structs.replace(SETTINGS, frame_bytes_max=limit)) as rig:
        await rig.start(Trigger)
        await rig.settle()
        (letter,) = rig.refused
        assert letter.is_whole is is_whole
        changes = StateChanges(2**32, refused=(letter, letter), finished=tuple(rig.finished))
        assert all(len(encode_message(piece)) <= limit for piece in split_round(changes, limit))


@pytest.mark.parametrize("letter_bytes", [0, 1, 254, 255, 256, 65_535, 65_536, 400_000])
def test_a_whole_letter_fits_a_frame_exactly_if_it_is_said_to(letter_bytes: int) -> None:
    letter = RefusedEvent(2**40, "run", 5, 2**40, "reason", letter_bytes, b"x" * letter_bytes, key="k", is_whole=True)
    needed = len(encode_message(StateChanges(2**63, refused=(letter,), more=True)))
    limits = range(needed - 200, needed + 200)
    assert all(needed <= limit for limit in limits if fits_frame(letter, limit))
    assert fits_frame(letter, needed + 100)


async def test_kind_and_end_of_a_refused_event_travel(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TaskSuccessEvent(xcoms={"long": "x" * 200})

        def shared_stream_key(self) -> None:
            return None

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.settle()
        (letter,) = rig.refused
        assert (letter.kind, letter.is_last, letter.is_whole) == ("success", True, True)


async def test_events_with_bad_keys_that_begin_alike_have_letters_of_their_own(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for key in ("k" * 600, "k" * 601, "k" * 600):
                yield TriggerEvent(1, key=key)

        def shared_stream_key(self) -> None:
            return None

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.settle()
        first, second, again = (letter.key for letter in rig.refused)
        assert first != second
        assert first == again


# --- messages that are passed over ---------------------------------------------------------------


async def test_a_message_passed_over_is_reported_whole_and_acked_once_the_letter_is_stored(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Fires):
        pass

    class Second(Fires):
        pass

    async with hosting() as rig:
        rig.streams.pause_starts()
        await start_passing_over(rig, Trigger, "m2", "m9")
        await rig.start(Second, 2)
        rig.streams.resume_starts()
        await rig.publish(1, 2, 3)
        assert [event.payload for event in rig.events if event.trigger_id == 1] == [b"1", b"3"]
        assert [event.payload for event in rig.events if event.trigger_id == 2] == [b"1", b"2", b"3"]
        (letter,) = rig.refused
        assert (letter.trigger_id, letter.content, letter.key, letter.position) == (1, "message", "m2", -1)
        assert (letter.payload_head, letter.payload_bytes, letter.is_whole) == (b"2", 1, True)
        assert letter.sequence_index < 0
        assert "orders" in letter.reason
        await rig.confirm()
        assert list(rig.broker.outcomes) == [1], "neither the message nor a later one of its lane (I1, I3)"
        rig.streams.confirm_persisted([letter.seq])
        await rig.settle()
        assert {message: one.acked for message, (one,) in rig.broker.outcomes.items()} == {1: 2, 2: 2, 3: 2}


async def test_a_message_passed_over_again_is_reported_again_in_the_same_place(autojump_clock: MockClock) -> None:
    class Trigger(Fires):
        pass

    async with hosting() as rig:
        await start_passing_over(rig, Trigger, "m2")
        await rig.publish(2, 2)
        first, second = rig.refused
        assert (first.key, first.position) == (second.key, second.position)
        assert first.sequence_index != second.sequence_index
        assert first.seq != second.seq


@pytest.mark.parametrize("message", [Unencodable(), "x" * LETTER_BYTES_MAX])
async def test_a_message_passed_over_that_cannot_be_kept_is_rejected(autojump_clock: MockClock, message: Any) -> None:
    class Trigger(Fires):
        pass

    async with hosting() as rig:
        rig.broker.event_key = lambda broker_payload: "bad"  # type: ignore[method-assign]
        await start_passing_over(rig, Trigger, "bad")
        rig.broker.publish.send_nowait(message)
        await rig.settle()
        (letter,) = rig.refused
        assert not letter.is_whole
        rig.streams.confirm_refused([letter.seq])
        await rig.settle()
        assert list(rig.broker.outcomes.values()) == [[REJECTED]]


@pytest.mark.parametrize("name", ["a\ud800", "a\0b"])
async def test_a_key_that_cannot_be_stored_is_escaped_and_is_the_same_each_time(
    autojump_clock: MockClock, name: str
) -> None:
    """Its publisher names it as it likes: neither its letter nor the report of a failure may end the runner."""

    class Trigger(Fires):
        pass

    class Fails(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if message:
                    raise KeyError(message)
                yield TriggerEvent(message)

    async with hosting() as rig:
        rig.broker.event_key = lambda broker_payload: name  # type: ignore[method-assign]
        await rig.start(Trigger, 1)
        await rig.publish(1)
        (event,) = rig.events
        assert event.key is not None
        assert event.key.startswith("a\\")
        await rig.cancel("user")
        await start_passing_over(rig, Trigger, event.key, trigger_id=2)
        await rig.publish(2)
        assert [letter.key for letter in rig.refused] == [event.key]
        await rig.start(Fails, 3)
        await rig.publish(3)
        await rig.until_finished(2)
        assert rig.finished[-1].message_key == event.key
        for message in (event, rig.finished[-1], *rig.refused):
            msgspec.msgpack.encode(message)


async def test_while_the_outbox_is_full_nothing_is_passed_over_and_the_subscriber_is_not_failed(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Fires):
        pass

    narrow = msgspec.structs.replace(SETTINGS, outbox_events_max=3, round_events_max=3, subscriber_queue_max=4)
    async with hosting(narrow, overflow="pause") as rig:
        await start_passing_over(rig, Trigger, *(f"m{number}" for number in range(20)))
        for number in range(20):
            rig.broker.publish.send_nowait(number)
        await trio.testing.wait_all_tasks_blocked()
        assert len(rig.outbox) == 3
        assert rig.streams.statistics().queued_events == 4
        while len(rig.refused) < 20:
            await rig.settle()
            rig.streams.confirm_persisted([letter.seq for letter in rig.refused])
        await rig.settle()
        assert [letter.key for letter in rig.refused] == [f"m{number}" for number in range(20)]
        assert list(rig.broker.outcomes) == list(range(20))


async def test_a_cancelled_trigger_leaves_its_messages_unreported_while_the_outbox_is_full(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Fires):
        pass

    narrow = msgspec.structs.replace(SETTINGS, outbox_events_max=1, round_events_max=1)
    async with hosting(narrow, overflow="pause") as rig:
        await start_passing_over(rig, Trigger, "m1", "m2")
        rig.broker.publish.send_nowait(1)
        rig.broker.publish.send_nowait(2)
        await trio.testing.wait_all_tasks_blocked()
        await rig.cancel("shutdown")
        while not rig.finished:
            await rig.settle()
        assert [letter.key for letter in rig.refused] == ["m1"]
        assert rig.finished[0].outcome == "cancelled"


# --- the message at fault ------------------------------------------------------------------------


async def test_a_failure_names_the_message_it_happened_on_and_no_other(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if message == 8:
                    raise TypeError("bad message")
                yield TriggerEvent(message)

    class Early(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            raise TypeError("before the first message")
            yield TriggerEvent()

    async with hosting() as rig:
        await rig.start(Trigger, 1)
        await rig.start(Early, 2)
        await rig.settle()
        await rig.cancel("user", 2)  # it has failed, and is not waited for
        await rig.publish(7, 8, 9)
        assert {end.trigger_id: end.message_key for end in rig.finished} == {1: "m8", 2: None}


async def test_an_ack_timeout_names_the_message_only_if_the_filter_hangs_on_it(autojump_clock: MockClock) -> None:
    class Hangs(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent(message)
                if message == 2:
                    await trio.sleep_forever()

    async with hosting() as rig:
        await rig.start(Hangs)
        await rig.publish(1, 2)
        with structlog.testing.capture_logs():
            await trio.sleep(ACK_TIMEOUT_S + 2)  # nothing is confirmed: it is message 1 that is due first
        await rig.until_finished()
        assert (rig.finished[0].error.split(":")[0], rig.finished[0].message_key) == ("AckTimeout", None)
        await rig.cancel("user")
        await rig.start(Hangs, 3)
        await rig.publish(2)
        await rig.confirm()
        await trio.sleep(ACK_TIMEOUT_S + 2)
        await rig.until_finished(2)
        assert (rig.finished[1].error.split(":")[0], rig.finished[1].message_key) == ("AckTimeout", "m2")
        assert rig.broker.outcomes[2][-1] == FAILED


# --- messages that the producer cannot decode ------------------------------------------------------


async def test_a_message_that_the_producer_cannot_decode_is_a_letter_of_each_subscriber_and_given_to_none(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Fires):
        pass

    async with hosting() as rig:
        await rig.start(Trigger, 1, 2)
        await rig.publish(1)
        rig.broker.publish.send_nowait(Undecodable("no JSON: \ud800", b"\xff\xfe"))  # type: ignore[arg-type]
        rig.broker.event_key = lambda broker_payload: str(broker_payload)[:2]  # type: ignore[method-assign]
        await rig.publish(3)
        await rig.confirm()
        assert sorted(event.payload for event in rig.events) == [b"1", b"1", b"3", b"3"]
        letters = sorted(rig.refused, key=lambda letter: letter.trigger_id)
        assert [letter.trigger_id for letter in letters] == [1, 2]
        for letter in letters:
            assert letter.reason == "the message cannot be decoded: no JSON: \\ud800"
            assert (letter.content, letter.is_whole, letter.position) == ("undecoded", True, -1)
            assert decode_value(letter.payload_head) == b"\xff\xfe"
        assert list(rig.broker.outcomes) == [1], "neither the message nor a later one of its lane (I1, I3)"
        rig.streams.confirm_persisted([letter.seq for letter in letters])
        await rig.settle()
        assert [one.acked for (one,) in rig.broker.outcomes.values()] == [2, 2, 2]


@pytest.mark.parametrize(("whole_bytes", "told"), [(None, 5003), (7_000, 7_000), (3, 5003), ("much", 5003)])
async def test_of_an_undecodable_message_that_is_not_whole_the_broker_keeps_the_rest(
    autojump_clock: MockClock, whole_bytes: Any, told: int
) -> None:
    class Trigger(Fires):
        pass

    async with hosting() as rig:
        rig.broker.names_messages = False
        await rig.start(Trigger)
        rig.broker.publish.send_nowait(
            Undecodable("too long", "x" * 5000, is_whole=False, whole_bytes=whole_bytes)  # type: ignore[arg-type]
        )
        await rig.settle()
        (letter,) = rig.refused
        assert letter.payload_bytes == told, "that of the message, or else more than what is kept"
        assert (letter.key, letter.is_whole, letter.payload_head) == (None, False, b'"' + b"x" * 4095)
        rig.streams.confirm_refused([letter.seq])
        await rig.settle()
        assert list(rig.broker.outcomes.values()) == [[REJECTED]]


class Rejects(Watcher):
    """Fires even numbers, rejects odd ones with a reason, and 9 twice and after an event."""

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            if message == 9:
                yield TriggerEvent(message)
                reject_shared_stream_event()
            if message % 2:
                reject_shared_stream_event(f"{message} is odd")
            else:
                yield TriggerEvent(message)


async def test_what_a_subscriber_rejects_is_its_letter_if_the_broker_has_no_place_for_it(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Rejects):
        pass

    async with hosting() as rig:
        rig.broker.keeps_rejected = False
        await rig.start(Trigger, 1)
        await rig.start(Fires, 2)
        await rig.publish(7, 8)
        (letter,) = rig.refused
        assert (letter.trigger_id, letter.key, letter.content, letter.is_whole) == (1, "m7", "message", True)
        assert letter.reason == "name-1 has rejected this message: 7 is odd"
        assert decode_value(letter.payload_head) == 7
        await rig.confirm()
        assert rig.broker.outcomes == {}, "not before the letter is stored (I1)"
        rig.streams.confirm_persisted([letter.seq])
        await rig.settle()
        assert [outcomes[0].acked for outcomes in rig.broker.outcomes.values()] == [2, 2]
        assert rig.finished == []


async def test_a_message_is_rejected_once_and_its_events_from_before_are_waited_for(autojump_clock: MockClock) -> None:
    class Trigger(Rejects):
        pass

    async with hosting() as rig:
        rig.broker.keeps_rejected = False
        await rig.start(Trigger)
        with structlog.testing.capture_logs() as records:
            await rig.publish(9)
        assert [record["event"] for record in records if "had no effect" in record["event"]] != [], "the second time"
        (letter,) = rig.refused
        assert letter.reason == "name-1 has rejected this message"
        rig.streams.confirm_persisted([letter.seq])
        await rig.settle()
        assert rig.broker.outcomes == {}
        await rig.confirm()
        assert rig.broker.outcomes == {9: [ACKED]}


async def test_a_rejected_message_whose_letter_is_not_whole_stays_with_the_broker(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for _ in shared_stream:
                reject_shared_stream_event("it has no form")
            yield TriggerEvent(None)

    async with hosting() as rig:
        rig.broker.keeps_rejected = False
        rig.broker.names_messages = False
        await rig.start(Trigger)
        rig.broker.publish.send_nowait(Unencodable())  # type: ignore[arg-type]
        await rig.settle()
        (letter,) = rig.refused
        assert not letter.is_whole
        rig.streams.confirm_refused([letter.seq])
        await rig.settle()
        assert list(rig.broker.outcomes.values()) == [[REJECTED]]


async def test_a_rejected_message_that_was_redriven_keeps_the_letter_that_it_has(autojump_clock: MockClock) -> None:
    class Trigger(Rejects):
        pass

    async with hosting() as rig:
        rig.broker.keeps_rejected = False
        await rig.start(Trigger)
        rig.host.redeliver(Redelivery(5, 1, "run-1", "old", encode_value(7, where="message")))
        await rig.settle()
        assert [(end.letter_id, end.outcome) for end in rig.redriven] == [(5, "rejected")]
        assert rig.refused == []
