"""shared_stream drives the real manager and host, and shows the outcome of every message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
import trio

from headgate.testing import Misbehaved, TriggerFailed, shared_stream
from headgate.triggers.base import BaseEventTrigger, TriggerEvent
from headgate.triggers.shared_stream import (
    AckTimeout,
    AdvanceOutcome,
    SharedStreamProducer,
    reject_shared_stream_event,
)

ACKED, FAILED, REJECTED = AdvanceOutcome(acked=1), AdvanceOutcome(failed=1), AdvanceOutcome(rejected=1)


class _Words(BaseEventTrigger):
    """Does with a message what the message says."""

    def __init__(self, topic: str = "t") -> None:
        self.topic = topic

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {"topic": self.topic}

    def shared_stream_key(self) -> str:
        return self.topic

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for word in shared_stream:
            match word:
                case "skip":
                    continue
                case "reject":
                    reject_shared_stream_event()
                case "raise":
                    raise ValueError(word)
                case "wait":
                    await trio.sleep(60)
                    yield TriggerEvent(word)
                case "twice":
                    yield TriggerEvent(1)
                    yield TriggerEvent(2)
                case _:
                    yield TriggerEvent(word)


class Obedient(_Words):
    """Shares a stream that has a producer."""

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        raise AssertionError("the broker is not spoken to")


class Fast(_Words):
    """Shares a stream that has none."""

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        raise AssertionError("the broker is not spoken to")
        yield


class FailsToCleanUp(Obedient):
    async def cleanup(self) -> None:
        raise OSError("the server is gone")


def test_what_is_fired_and_stored_is_acked_and_what_is_refused_is_rejected() -> None:
    with shared_stream(Obedient()) as stream:
        assert stream.send("hello").outcome == ACKED
        assert stream.send("skip").outcome == ACKED
        assert stream.send("reject").outcome == REJECTED
        assert stream.send("twice").outcome == ACKED
        assert [event.payload for event in stream.events()] == ["hello", 1, 2]


def test_every_trigger_has_its_share_in_the_outcome() -> None:
    with shared_stream(Obedient(), Obedient(), Obedient()) as stream:
        assert stream.send("hello").outcome == AdvanceOutcome(acked=3)
        assert [len(stream.events(number)) for number in range(3)] == [1, 1, 1]


def test_a_message_waits_for_its_confirmation_and_holds_back_those_behind_it_in_its_lane() -> None:
    with shared_stream(Obedient()) as stream:
        stream.hold_persistence()
        held = stream.send("hello", lane="a")
        behind, beside = stream.send("skip", lane="a"), stream.send("skip", lane="b")
        assert (held.outcome, behind.outcome, beside.outcome) == (None, None, ACKED)
        stream.confirm_persistence()
        assert (held.outcome, behind.outcome) == (ACKED, ACKED)


def test_the_second_delivery_is_acked_and_not_stored_again_unless_it_has_no_key() -> None:
    with shared_stream(Obedient()) as stream:
        named, nameless = stream.send("twice"), stream.send("hello", key=None)
        for message in (named, nameless):
            stream.send_again(message)
            assert message.outcomes == [ACKED, ACKED]
        assert [event.payload for event in stream.events()] == [1, 2, "hello", "hello"]


def test_a_filter_that_waits_goes_on_when_time_is_skipped() -> None:
    with shared_stream(Obedient()) as stream:
        message = stream.send("wait")
        stream.skip(timedelta(seconds=59))
        assert message.outcome is None
        stream.skip(timedelta(seconds=1))
        assert message.outcome == ACKED


def test_one_that_takes_too_long_fails_and_can_be_started_again() -> None:
    with shared_stream(Obedient(), ack_timeout=timedelta(seconds=30)) as stream:
        message = stream.send("wait")
        stream.skip(timedelta(seconds=30))
        assert message.outcome == FAILED
        assert isinstance(stream.failure(), AckTimeout)
        stream.restart()
        stream.send_again(message)
        assert message.outcomes == [FAILED, None]
        stream.skip(timedelta(seconds=29))
        assert message.outcome is None


def test_a_failure_that_is_asked_about_is_the_exception_itself() -> None:
    with shared_stream(Obedient(), Obedient("t")) as stream:
        message = stream.send("raise")
        assert message.outcome == AdvanceOutcome(failed=2)
        assert isinstance(stream.failure(0), ValueError)
        assert isinstance(stream.failure(1), ValueError)


def send_all(*words: str) -> None:
    with shared_stream(Obedient()) as stream:
        for word in words:
            stream.send(word)


def test_a_failure_that_nobody_asks_about_fails_the_test() -> None:
    with pytest.raises(TriggerFailed, match="trigger 0, a Obedient: ValueError: raise") as failed:
        send_all("hello", "raise")
    assert isinstance(failed.value.__cause__, ValueError)
    assert failed.value.events == [TriggerEvent("hello", key="message-1")]


def test_a_trigger_that_is_removed_is_done_with_what_it_sits_on() -> None:
    with shared_stream(Obedient(), Obedient()) as stream:
        message = stream.send("wait")
        stream.remove(1)
        stream.skip(timedelta(minutes=1))
        assert message.outcome == AdvanceOutcome(acked=2)
        assert (len(stream.events(0)), len(stream.events(1))) == (1, 0)


def test_a_stream_without_a_producer_has_events_and_no_outcomes() -> None:
    with shared_stream(Fast(), Fast()) as stream:
        assert stream.send("hello").outcome is None
        assert [event.payload for event in stream.events(1)] == ["hello"]


def test_a_hook_that_fails_fails_the_test() -> None:
    with pytest.raises(Misbehaved, match="a hook failed"):
        with shared_stream(FailsToCleanUp()) as stream:
            stream.send("hello")


def fail_after_a_failure() -> None:
    with shared_stream(Obedient()) as stream:
        stream.send("raise")
        raise ZeroDivisionError


def test_what_the_test_itself_finds_wrong_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        fail_after_a_failure()


def test_triggers_of_different_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="do not share one stream"):
        with shared_stream(Obedient("a"), Obedient("b")):
            pass


def test_the_class_is_itself_again_afterwards() -> None:
    with shared_stream(Obedient()) as stream:
        stream.send("hello")
    with pytest.raises(AssertionError, match="not spoken to"):
        Obedient.create_shared_stream_producer({})
