"""A runner in memory that reads a real broker: the runner's own host and streams, on trio's real clock, in a thread.

Events are stored in dicts, and confirmed round by round as by a supervisor; triggers that fail are started again.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self, cast

import msgspec
import trio

from headgate.protocol.messages.runner import RefusedEvent, RunnerSettings, TriggerSpec
from headgate.runner.loading import import_class
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, wait_until
from headgate.testing.clock import SkippingClock
from headgate.testing.hosting import HostedTriggers, hosted_triggers
from headgate.testing.round_trip import check_round_trip
from headgate.testing.stubs import Stubs
from headgate.triggers.base import BaseEventTrigger, TriggerEvent
from headgate.triggers.shared_stream import SharedStreamProducer, reject_shared_stream_event

NAME = re.compile(r"message-\d{6}")
RESTARTS_MAX = 100  # of one trigger: whatever fails for ever fails the test


def names(count: int, first: int = 0) -> list[str]:
    """Return names of messages, as `NAME` finds them."""
    return [f"message-{number:06d}" for number in range(first, first + count)]


class FilterFailed(Exception):
    """The filter of a subscriber fails, because the test has it fail on this message."""


class Subscriber(BaseEventTrigger):
    """Does what the trigger of ``classpath`` and ``kwargs`` does, but fails once on some messages, and rejects others.

    ``number`` tells subscribers of one stream apart.
    """

    has_failed: set[tuple[int, str]] = set()  # noqa: RUF012 - of this process; a test begins with an empty one

    def __init__(
        self,
        classpath: str,
        kwargs: dict[str, Any],
        number: int,
        fails: Sequence[str] = (),
        rejects: Sequence[str] = (),
    ) -> None:
        self.number = number
        self.fails = list(fails)
        self.rejects = list(rejects)
        inner = import_class(classpath)(**kwargs)
        assert isinstance(inner, BaseEventTrigger)
        self._inner = inner

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class, and that of the trigger."""
        classpath, kwargs = self._inner.serialize()
        own = {"number": self.number, "fails": self.fails, "rejects": self.rejects}
        return self._classpath(), {"classpath": classpath, "kwargs": kwargs, **own}

    def shared_stream_key(self) -> Any:
        """Return the key of the trigger."""
        return self._inner.shared_stream_key()

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Return the producer of the trigger."""
        inner = import_class(kwargs["classpath"])
        assert issubclass(inner, BaseEventTrigger)
        return inner.create_shared_stream_producer(kwargs["kwargs"])

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Yield the events of the trigger, except for messages that fail or are rejected."""
        # Closed in order at the end, as a runner closes the outer one: not whenever they are collected as garbage.
        async with aclosing(self._judged(shared_stream)) as judged:
            filtered = cast(AsyncGenerator[TriggerEvent], self._inner.filter_shared_stream(judged))
            async with aclosing(filtered) as events:
                async for event in events:
                    yield event

    async def _judged(self, shared_stream: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        async for raw_event in shared_stream:
            found = NAME.search(repr(raw_event))
            name = "" if found is None else found.group()
            if name in self.fails and (self.number, name) not in self.has_failed:
                self.has_failed.add((self.number, name))
                raise FilterFailed(f"on {name}, once")
            if name in self.rejects:
                reject_shared_stream_event("the test rejects it")
                continue
            yield raw_event


class Reading:
    """Triggers that read a broker. A context manager; leaving it closes the streams as a runner does.

    With ``is_held`` nothing is confirmed from the first message on, as after `hold`.
    """

    def __init__(self, *triggers: BaseEventTrigger, uri: str, has_restarts: bool = True, is_held: bool = False) -> None:
        specs = [check_round_trip(trigger) for trigger in triggers]
        self._specs = tuple(
            msgspec.structs.replace(spec, trigger_id=number, trigger_run_id=f"run-{number}")
            for number, spec in enumerate(specs)
        )
        self._uri = uri
        self._has_restarts = has_restarts
        self._is_held = is_held
        self._thread = threading.Thread(target=self._run, name="headgate reading", daemon=True)
        self._ready, self._closed = threading.Event(), threading.Event()
        self._token: trio.lowlevel.TrioToken
        self._hosted: HostedTriggers
        self._closing: trio.Event
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(WITHIN_S)
        self._check()
        return self

    def __exit__(self, *exc: object) -> None:
        self._token.run_sync_soon(self._closing.set)
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), f"the streams are not closed within {WITHIN_S:g} s"
        if exc[1] is None:
            self._check()

    # --- what a test asks for ---------------------------------------------------------------------

    def hold(self) -> None:
        """Confirm nothing from now on, as if the database did not answer; what came before may be confirmed."""
        self._hosted.is_held = True

    def confirm(self) -> None:
        """Undo `hold`: confirm everything."""
        self._hosted.is_held = False
        self._token.run_sync_soon(self._hosted.confirm)

    def payloads(self, subscriber: int = 0) -> list[bytes]:
        """Return the encoded payloads of the events stored for a subscriber."""
        return [event.payload for event in list(self._hosted.fired[subscriber])]

    def stored(self, subscriber: int = 0) -> Counter[str]:
        """Return how often each message is stored for a subscriber; an event that is recognised counts once."""
        return Counter(self.order(subscriber))

    def keys(self, subscriber: int = 0) -> dict[str, str | None]:
        """Return the key of each message that is stored for a subscriber."""
        events = list(self._hosted.fired[subscriber])
        return {name: event.key for event in events for name in NAME.findall(event.payload.decode())}

    def order(self, subscriber: int = 0) -> list[str]:
        """Return the messages stored for a subscriber, in the order in which they were."""
        return [name for payload in self.payloads(subscriber) for name in dict.fromkeys(NAME.findall(payload.decode()))]

    @property
    def letters(self) -> list[RefusedEvent]:
        """The dead letters so far."""
        return list(self._hosted.letters)

    def outstanding(self) -> int:
        """Return the messages that are handed out, and not resolved."""
        return self._hosted.outstanding

    def failure(self, subscriber: int = 0) -> BaseException:
        """Wait until a subscriber that is not started again has failed; return the cause of it."""
        wait_until(lambda: subscriber in self._hosted.finished, f"subscriber {subscriber} fails")
        error = self._hosted.errors[subscriber]
        assert error is not None
        return error.__cause__ or error

    def wait_stored(self, expected: Sequence[str], subscriber: int = 0) -> None:
        """Wait until these messages are stored for a subscriber, and check that each of them is once."""

        def are_stored() -> bool:
            self._check()
            return self.stored(subscriber).keys() >= set(expected)

        wait_until(are_stored, f"subscriber {subscriber} has all of {len(expected)} messages")
        twice = {name: count for name, count in self.stored(subscriber).items() if count > 1}
        assert twice == {}, f"stored twice for subscriber {subscriber}: {twice}"

    # --- its thread -------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise AssertionError("the runner in memory has failed") from self._error

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._error = error
        self._ready.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._closing = trio.Event()
        stubs = Stubs(connections={CONNECTION: self._uri})
        settings = RunnerSettings()
        # The clock is one for tests that skip time; nothing here does.
        async with hosted_triggers(SkippingClock(), settings, {}, has_streams=True, stubs=stubs) as self._hosted:
            self._hosted.is_held = self._is_held
            await self._hosted.start(self._specs)
            self._ready.set()
            async with trio.open_nursery() as nursery:
                if self._has_restarts:
                    nursery.start_soon(self._start_again)
                await self._closing.wait()
                nursery.cancel_scope.cancel()

    async def _start_again(self) -> None:
        hosted = self._hosted
        while True:
            for spec in self._specs:
                if spec.trigger_id in hosted.finished:
                    del hosted.finished[spec.trigger_id]
                    hosted.restarts += 1
                    assert hosted.restarts <= RESTARTS_MAX, hosted.errors[spec.trigger_id]
                    await hosted.start((self._next_run(spec),))
            await hosted.progress.park()

    def _next_run(self, spec: TriggerSpec) -> TriggerSpec:
        return msgspec.structs.replace(spec, trigger_run_id=f"{spec.trigger_run_id}-{self._hosted.restarts}")


def subscribers(
    trigger: Callable[[], BaseEventTrigger], count: int, *, fails: Sequence[str] = (), rejects: Sequence[str] = ()
) -> list[Subscriber]:
    """Return subscribers of the stream of a trigger, of which the first fails and rejects as it is told."""
    Subscriber.has_failed.clear()
    classpath, kwargs = trigger().serialize()
    first = Subscriber(classpath, kwargs, 0, fails, rejects)
    return [first, *(Subscriber(classpath, kwargs, number) for number in range(1, count))]
