"""Messages that users have redriven: given to one trigger beside those of its broker, and settled as those are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.runner.authors import expected, publish
from tests.runner.host.stream_rig import ACK_TIMEOUT_S, ACKED, FAILED, SETTINGS, Rig, Watcher, hosting
from trio.testing import MockClock

from headgate.protocol.messages.runner import Redelivery, TriggerSpec
from headgate.protocol.values import encode_value
from headgate.streams import group
from headgate.streams.contract import AckTimeout
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from headgate.triggers.shared_stream import reject_shared_stream_event


class Fires(Watcher):
    """Fires each message twice, but "skip", and hangs, raises or rejects if the message says so."""

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            if message == "skip":
                continue
            if message == "raise":
                raise ValueError("no amount")
            if message == "reject":
                reject_shared_stream_event()
                continue
            if message == "hang":
                await trio.sleep_forever()
            yield TriggerEvent(message)
            yield TriggerEvent([message])


async def redeliver(rig: Rig, message: Any, letter_id: int = 7, *, key: str = "old", run: str = "run-1") -> None:
    rig.host.redeliver(Redelivery(letter_id, 1, run, key, encode_value(message, where="message")))
    await rig.settle()


def ends(rig: Rig) -> list[tuple[int, str]]:
    return [(end.letter_id, end.outcome) for end in rig.redriven]


async def test_its_events_are_bound_to_it_and_it_is_handled_when_they_are_stored(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        await redeliver(rig, "m")
        assert [(event.key, event.position, event.payload) for event in rig.events] == [
            ("old", 0, b'"m"'),
            ("old", 1, b'["m"]'),
        ]
        assert ends(rig) == []
        rig.streams.confirm_persisted([rig.events[0].seq])
        await rig.settle()
        assert ends(rig) == [], "one of its events is not stored (I1)"
        await rig.confirm()
        assert ends(rig) == [(7, "handled")]
        assert rig.broker.outcomes == {}, "the broker knows nothing of it"


async def test_only_the_trigger_of_the_letter_gets_it(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await rig.start(Fires, 1, 2)
        await redeliver(rig, "m")
        await rig.publish(5)
        assert {event.trigger_id for event in rig.events if event.key == "old"} == {1}
        assert sorted(event.trigger_id for event in rig.events if event.key == "m5") == [1, 1, 2, 2]


async def test_it_waits_for_no_message_of_the_broker_and_none_waits_for_it(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        await rig.publish(1)
        await redeliver(rig, "m")
        await rig.publish(2)
        first, redriven, second = (
            [event.seq for event in rig.events if event.key == key] for key in ("m1", "old", "m2")
        )
        rig.streams.confirm_persisted(redriven)
        await rig.settle()
        assert (ends(rig), rig.broker.outcomes) == ([(7, "handled")], {})
        await redeliver(rig, "m", 8)
        rig.streams.confirm_persisted([*first, *second])
        await rig.settle()
        assert (ends(rig), rig.broker.outcomes) == ([(7, "handled")], {1: [ACKED], 2: [ACKED]})


async def test_it_comes_before_what_waits_in_the_queue_and_into_a_full_queue(autojump_clock: MockClock) -> None:
    """Neither a full queue nor a full one that got it costs the subscriber its place."""
    gate = trio.Event()

    class Slow(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if message == 1:
                    await gate.wait()
                yield TriggerEvent(message)

    settings = SETTINGS.__class__(event_bytes_max=100, subscriber_queue_max=2)
    async with hosting(settings, overflow="pause") as rig:
        await rig.start(Slow)
        await rig.publish(1, 2, 3, 4)
        await redeliver(rig, "m")
        assert rig.finished == []
        gate.set()
        await rig.settle()
        assert [event.payload for event in rig.events] == [b"1", b'"m"', b"2", b"3", b"4"]
        await rig.confirm()
        assert sorted(rig.broker.outcomes) == [1, 2, 3, 4]


async def test_a_message_that_the_run_is_passed_over_is_given_to_it_if_it_is_redriven(
    autojump_clock: MockClock,
) -> None:
    async with hosting() as rig:
        classpath, kwargs = publish(Fires), encode_value({}, where="kwargs")
        spec = TriggerSpec(1, "run-1", "orders", classpath, kwargs, passed_over=("m3", "old"))
        await rig.host.start((expected(spec),))
        await rig.publish(3)
        assert [letter.key for letter in rig.refused] == ["m3"]
        await redeliver(rig, "m")
        assert [event.key for event in rig.events] == ["old", "old"]


async def test_a_message_of_which_nothing_is_made_is_handled_at_once(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        await redeliver(rig, "skip")
        assert (rig.events, ends(rig)) == ([], [(7, "handled")])


async def test_a_message_that_its_filter_rejects_and_one_whose_event_is_refused_are_rejected(
    autojump_clock: MockClock,
) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        await redeliver(rig, "reject")
        await redeliver(rig, "x" * 97, 8)  # its second event is too large
        (refused,) = rig.refused
        rig.streams.confirm_persisted([event.seq for event in rig.events])
        rig.streams.confirm_refused([refused.seq])
        await rig.settle()
        assert ends(rig) == [(7, "rejected"), (8, "rejected")]


async def test_a_message_whose_event_became_another_dead_letter_is_not_handled(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        await redeliver(rig, "x" * 97)
        await rig.publish(5)
        (refused,) = rig.refused
        rig.streams.confirm_kept([refused.seq, *[event.seq for event in rig.events if event.key == "m5"]])
        rig.streams.confirm_persisted([event.seq for event in rig.events if event.key == "old"])
        await rig.settle()
        assert ends(rig) == [(7, "rejected")]
        assert rig.broker.outcomes == {5: [ACKED]}, "a message of the broker is handled"


async def test_a_trigger_that_fails_on_it_names_it_in_the_report_of_its_end(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        rig.host.redeliver(Redelivery(7, 1, "run-1", "bad", b'"raise"'))
        await redeliver(rig, "m", 8)
        (end,) = rig.finished
        assert (end.outcome, end.message_key) == ("failed", "bad")
        assert ends(rig) == [], "the other was not given: the next run gets it"
        assert rig.events == []


async def test_a_filter_that_hangs_on_it_is_failed_as_on_any_other_message(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        await redeliver(rig, "hang")
        await trio.sleep(ACK_TIMEOUT_S + 2)
        await rig.until_finished()
        (end,) = rig.finished
        assert (end.outcome, end.message_key) == ("failed", "old")
        assert AckTimeout.__name__ in end.error
        assert ends(rig) == []


async def test_a_filter_that_hangs_on_it_is_blamed_though_an_older_message_waits_behind_it(
    autojump_clock: MockClock,
) -> None:
    """The older one is due first. If it were blamed on nothing, the next run would hang on the same message."""
    gate = trio.Event()

    class Gated(Fires):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                await (gate if message == 1 else trio.Event()).wait()
                yield TriggerEvent(message)

    async with hosting() as rig:
        await rig.start(Gated)
        await rig.publish(1, 2)
        await trio.sleep(1)
        await redeliver(rig, "hang")
        gate.set()
        await rig.settle()
        await rig.confirm()
        await rig.until_finished()
        (end,) = rig.finished
        assert (end.outcome, end.message_key) == ("failed", "old")
        assert rig.broker.outcomes == {1: [ACKED], 2: [FAILED]}


async def test_redriven_messages_and_those_of_the_broker_take_turns(autojump_clock: MockClock) -> None:
    """However many are redriven, no message of the broker waits for its ack timeout behind them."""

    class Slow(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                await trio.sleep(ACK_TIMEOUT_S / 20)
                yield TriggerEvent(message)

    async with hosting() as rig:
        await rig.start(Slow)
        for number in range(40):  # two are on their way at any time
            rig.host.redeliver(Redelivery(number, 1, "run-1", f"old{number}", b'"m"'))
            if number == 1:
                await rig.publish(1, 2)
            if number > 0:
                await trio.sleep(ACK_TIMEOUT_S / 20)
            await rig.settle()
            await rig.confirm()
        assert [event.key for event in rig.events][:6] == ["old0", "m1", "old1", "m2", "old2", "old3"]
        assert rig.finished == []


async def test_a_stream_at_its_limit_goes_on_when_a_redriven_message_is_settled(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "OUTSTANDING_EVENTS_MAX", 2)
    async with hosting() as rig:
        await rig.start(Fires)
        await redeliver(rig, "m")
        redriven = [event.seq for event in rig.events]
        await rig.publish(1, 2)
        assert {event.key for event in rig.events} == {"old", "m1"}
        rig.streams.confirm_persisted(redriven)
        await rig.settle()
        assert {event.key for event in rig.events} == {"old", "m1", "m2"}


@pytest.mark.parametrize("run", ["run-0", "run-2"])
async def test_a_run_that_is_over_gets_nothing_and_says_nothing(autojump_clock: MockClock, run: str) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        await redeliver(rig, "m", run=run)
        await rig.cancel("user")
        await redeliver(rig, "m")
        assert (rig.events, rig.redriven) == ([], [])


async def test_a_trigger_being_cancelled_gets_nothing(autojump_clock: MockClock) -> None:
    class Lingers(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            try:
                async for message in shared_stream:
                    yield TriggerEvent(message)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)

    async with hosting() as rig:
        await rig.start(Lingers)
        await rig.cancel("reassigned")
        await redeliver(rig, "m")
        await trio.sleep(2)
        await rig.settle()
        assert ([end.outcome for end in rig.finished], rig.events, rig.redriven) == (["cancelled"], [], [])


# --- what cannot be given ------------------------------------------------------------------------


class Alone(BaseTrigger):
    """Reads no stream."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.sleep_forever()
        yield TriggerEvent(None)


class Fast(BaseEventTrigger):
    """Reads a stream without acknowledgements."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}

    def shared_stream_key(self) -> Any:
        return "fast"

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        await trio.sleep_forever()
        yield None

    def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("it is filtered")

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            yield TriggerEvent(message)


@pytest.mark.parametrize(
    ("cls", "error"), [(Alone, "name-1 reads no shared stream"), (Fast, "has no producer that acknowledges messages")]
)
async def test_a_trigger_whose_class_takes_no_such_message_any_more_says_so(
    autojump_clock: MockClock, cls: type[Any], error: str
) -> None:
    async with hosting() as rig:
        await rig.start(cls)
        await redeliver(rig, "m")
        (end,) = rig.redriven
        assert end.outcome == "failed"
        assert error in end.error
        assert rig.finished == [], "it goes on"


async def test_a_message_that_cannot_be_decoded_is_failed_and_harms_nobody(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await rig.start(Fires)
        rig.host.redeliver(Redelivery(7, 1, "run-1", "old", b'{"$":"of a class that is gone","v":1}'))
        rig.host.redeliver(Redelivery(8, 1, "run-1", "old", b"{no JSON"))
        await redeliver(rig, "m", 9)
        await rig.confirm()
        assert ends(rig) == [(7, "failed"), (8, "failed"), (9, "handled")]
        assert "of a class that is gone" in rig.redriven[0].error
