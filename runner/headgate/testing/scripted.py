"""`shared_stream`: triggers of one shared stream, on a producer that a test controls."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Generator, Hashable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import trio

from headgate.protocol.messages.runner import RunnerSettings, TriggerSpec
from headgate.streams import checks
from headgate.testing.clock import SkippingClock, skipped_wall_clock
from headgate.testing.failures import TriggerFailed
from headgate.testing.hosting import HostedTriggers, hosted_triggers
from headgate.testing.loop import TrialLoop
from headgate.testing.round_trip import check_round_trip
from headgate.testing.running import BLOCKED_AFTER, check_left, check_log, trial
from headgate.triggers.base import BaseEventTrigger, TriggerEvent
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome, SharedStreamProducer

ACK_TIMEOUT = timedelta(seconds=300)  # as in the runner: the default of ack_timeout_s


@dataclass
class Message:
    """One message at the scripted broker. ``outcomes`` has that of each delivery, None while it is not resolved."""

    raw_event: Any
    key: str | None
    lane: Hashable
    outcomes: list[AdvanceOutcome | None] = field(default_factory=list)

    @property
    def outcome(self) -> AdvanceOutcome | None:
        """The outcome of the newest delivery; None while it is not resolved."""
        return self.outcomes[-1] if self.outcomes else None


class Delivery(NamedTuple):
    """The broker payload: the message, and the number of this delivery."""

    message: Message
    number: int


class ScriptedProducer(SharedStreamProducer):
    """Yields the messages that `SharedStream` puts in, and records the outcomes in them."""

    def __init__(self) -> None:
        self._waiting: list[Message] = []
        self._news = trio.Event()

    def hand_out(self, message: Message) -> None:
        """Deliver a message, the first time or again."""
        self._waiting.append(message)
        self._news.set()

    async def open_stream(self) -> AsyncIterator[tuple[Any, Delivery]]:
        """Yield the messages as they are put in."""
        while True:
            while self._waiting:
                message = self._waiting.pop(0)
                message.outcomes.append(None)
                yield message.raw_event, Delivery(message, len(message.outcomes) - 1)
            self._news = trio.Event()
            await self._news.wait()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Record the outcomes."""
        for item in batch:
            delivery: Delivery = item.broker_payload
            delivery.message.outcomes[delivery.number] = item.outcome

    def get_advance_lane(self, broker_payload: Delivery) -> Hashable:
        """Return the lane the message was sent in."""
        return broker_payload.message.lane

    def event_key(self, broker_payload: Delivery) -> str | None:
        """Return the key the message was sent with."""
        return broker_payload.message.key


class SharedStream:
    """Running triggers, and control over the messages they get. Created by `shared_stream`.

    When a call returns, everything that does not need time to pass has happened. ``trigger`` is the index of a trigger
    among the arguments, from 0.
    """

    def __init__(self, loop: TrialLoop[HostedTriggers], producer: ScriptedProducer, specs: tuple[TriggerSpec, ...]):
        self._loop = loop
        self._producer = producer
        self._specs = specs
        self._sent = 0
        self._excused: set[int] = set()  # triggers whose failure the test has asked about

    def send(self, raw_event: Any, *, key: str | None = "", lane: Hashable = None) -> Message:
        """Deliver one message; return it. ``key`` is the broker's name for it; by default each has its own."""
        self._sent += 1
        message = Message(raw_event, f"message-{self._sent}" if key == "" else key, lane)
        self.send_again(message)
        return message

    def send_again(self, message: Message) -> None:
        """Deliver a message again, as a broker does if it got no acknowledgement, or a negative one."""

        async def hand_out(hosted: HostedTriggers) -> None:
            self._producer.hand_out(message)
            await hosted.settle()

        self._loop.call(hand_out)

    def hold_persistence(self) -> None:
        """Confirm nothing from now on, as if the database were unavailable."""

        async def hold(hosted: HostedTriggers) -> None:
            hosted.is_held = True

        self._loop.call(hold)

    def confirm_persistence(self) -> None:
        """Confirm all events that were fired since `hold_persistence`, and all later ones."""

        async def confirm(hosted: HostedTriggers) -> None:
            hosted.is_held = False
            hosted.confirm()
            await hosted.settle()

        self._loop.call(confirm)

    def skip(self, time: timedelta) -> None:
        """Let time pass; waits end and timeouts expire, in their order."""
        self._loop.call(lambda hosted: hosted.skip(time.total_seconds()))

    def remove(self, trigger: int = 0) -> None:
        """Remove a trigger as a user would: its on_kill is called, and its current message counts as moved past."""

        async def cancel(hosted: HostedTriggers) -> None:
            hosted.cancel(self._id(trigger))
            await hosted.settle()

        self._loop.call(cancel)

    def restart(self, trigger: int = 0) -> None:
        """Start a trigger again that has ended, as the supervisor does if one failed."""
        spec = self._specs[self._id(trigger) - 1]

        async def start(hosted: HostedTriggers) -> None:
            assert spec.trigger_id in hosted.finished, f"trigger {trigger} runs: it cannot be started a second time"
            del hosted.finished[spec.trigger_id]
            hosted.restarts += 1
            run_id = f"{spec.trigger_run_id}-{hosted.restarts}"
            await hosted.start((msgspec.structs.replace(spec, trigger_run_id=run_id),))
            await hosted.settle()

        self._loop.call(start)

    def events(self, trigger: int = 0) -> list[TriggerEvent]:
        """Return the stored events of a trigger. A redelivered event is stored once (I2)."""

        async def read(hosted: HostedTriggers) -> list[TriggerEvent]:
            return hosted.events(self._id(trigger))

        return self._loop.call(read)

    def failure(self, trigger: int = 0) -> BaseException | None:
        """Return the exception of a trigger, None if it has not failed. A failure not asked for fails the test."""
        self._excused.add(self._id(trigger))

        async def read(hosted: HostedTriggers) -> BaseException | None:
            return hosted.errors.get(self._id(trigger))

        return self._loop.call(read)

    def _id(self, trigger: int) -> int:
        return self._specs[trigger].trigger_id

    def end(self) -> list[str]:
        """End all triggers; return what they left behind. Raises `TriggerFailed` for one that was not asked for."""

        async def finish(hosted: HostedTriggers) -> list[str]:
            for spec in self._specs:
                ended = hosted.finished.get(spec.trigger_id)
                if ended is not None and ended.outcome == "failed" and spec.trigger_id not in self._excused:
                    raise TriggerFailed(
                        f"trigger {spec.trigger_id - 1}, a {spec.name}: {ended.error}", hosted.events(spec.trigger_id)
                    ) from hosted.errors[spec.trigger_id]
            return await hosted.end()

        return self._loop.call(finish)


@contextmanager
def shared_stream(
    *triggers: BaseEventTrigger,
    ack_timeout: timedelta = ACK_TIMEOUT,
    blocked_after: timedelta = BLOCKED_AFTER,
    settings: Mapping[str, Any] | None = None,
) -> Generator[SharedStream]:
    """Run triggers that share a stream; the test takes the place of the broker::

        # test_orders.py
        from orders import BigOrders

        from headgate.testing import shared_stream


        def test_small_orders_are_passed_over():
            with shared_stream(BigOrders("inbox", least=100)) as stream:
                small = stream.send({"amount": 1})
                stream.send({"amount": 500})
                assert [event.payload["amount"] for event in stream.events()] == [500]
                assert small.outcome.acked == 1

    The triggers are constructed from their kwargs and run by the runner's own host and stream manager; the producer,
    the database and the clock are the kit's. Time only passes in `SharedStream.skip`. ``settings`` are further fields
    of `headgate.protocol.messages.runner.RunnerSettings`.

    Raises, at the end of the ``with`` block at the latest, `RoundTripFailed`, `TriggerFailed`, `LoopBlocked`,
    `Misbehaved` and `LeftBehind`; ValueError for triggers that do not share a stream.
    """
    keys = {trigger.shared_stream_key() for trigger in triggers}
    if len(keys) != 1 or None in keys:
        raise ValueError(f"these triggers do not share one stream: their shared_stream_key() are {keys}")
    specs = tuple(
        msgspec.structs.replace(check_round_trip(trigger), trigger_id=number, trigger_run_id=f"run-{number}")
        for number, trigger in enumerate(triggers, 1)
    )
    clock, producer = SkippingClock(), ScriptedProducer()
    given: dict[str, Any] = {"ack_timeout_s": ack_timeout.total_seconds()} | dict(settings or {})
    open_state = functools.partial(hosted_triggers, clock, RunnerSettings(**given), {}, has_streams=True)
    with ExitStack() as stack:
        for cls in {type(trigger) for trigger in triggers}:
            stack.enter_context(skipped_wall_clock(cls, clock))
            stack.enter_context(_in_place_of_the_broker(cls, producer))
        with trial(open_state, clock, blocked_after.total_seconds()) as (loop, records, leaks):
            loop.call(lambda hosted: _start(hosted, specs))
            stream = SharedStream(loop, producer, specs)
            yield stream
            left = stream.end()
            loop.close()
        check_log(records)
        check_left("the stream", [*left, *leaks])


async def _start(hosted: HostedTriggers, specs: tuple[TriggerSpec, ...]) -> None:
    await hosted.start(specs)
    await hosted.settle()


@contextmanager
def _in_place_of_the_broker(cls: type[BaseEventTrigger], producer: ScriptedProducer) -> Generator[None]:
    """Have a class open the scripted stream, in the mode in which it opens its own."""

    async def open_shared_stream(_cls: object, _kwargs: object) -> AsyncIterator[Any]:
        async for raw_event, _ in producer.open_stream():
            yield raw_event

    def create_shared_stream_producer(_cls: object, _kwargs: object) -> ScriptedProducer:
        return producer

    if checks.has_producer(cls):
        with patch.object(cls, "create_shared_stream_producer", classmethod(create_shared_stream_producer)):
            yield
    else:
        with patch.object(cls, "open_shared_stream", classmethod(open_shared_stream)):
            yield
