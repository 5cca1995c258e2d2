"""Triggers of the host that fail, in every way: each fails alone (I9)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from tests.runner.authors import AUTHORS
from tests.runner.host.host_rig import Authored, beside_a_neighbour, hosting, raise_error, return_at_once
from trio.testing import MockClock

from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
)
from headgate.triggers.base import (
    TriggerEvent,
)

# --- a trigger fails alone -----------------------------------------------------------------------


async def raise_after_an_event(self: Any) -> AsyncIterator[TriggerEvent]:
    yield TriggerEvent(1)
    raise ValueError("boom")


async def exit_process(self: Any) -> AsyncIterator[TriggerEvent]:
    sys.exit(3)
    yield


async def interrupt(self: Any) -> AsyncIterator[TriggerEvent]:
    raise KeyboardInterrupt
    yield


async def raise_group(self: Any) -> AsyncIterator[TriggerEvent]:
    raise BaseExceptionGroup("several", [SystemExit(1), ValueError("boom")])
    yield


async def raise_generator_exit(self: Any) -> AsyncIterator[TriggerEvent]:
    raise GeneratorExit
    yield


async def raise_asyncio_cancelled(self: Any) -> AsyncIterator[TriggerEvent]:
    raise asyncio.CancelledError
    yield


async def raise_stop(self: Any) -> AsyncIterator[TriggerEvent]:
    raise StopAsyncIteration
    yield


async def return_a_value(self: Any) -> int:
    return 5


def return_plainly(self: Any) -> list[int]:
    return [1, 2]


def raise_plainly(self: Any) -> None:
    raise LookupError("boom")


async def yield_something_else(self: Any) -> AsyncIterator[Any]:
    yield {"not": "an event"}


async def yield_an_odd_kind(self: Any) -> AsyncIterator[TriggerEvent]:
    class Odd(TriggerEvent):
        kind = "odd"  # type: ignore[assignment]

    yield Odd(1)


async def yield_an_odd_end(self: Any) -> AsyncIterator[TriggerEvent]:
    event = TriggerEvent(1)
    event.is_last = object()  # type: ignore[assignment]
    yield event


async def fail_in_a_nursery(self: Any) -> AsyncIterator[TriggerEvent]:
    async def child() -> None:
        raise LookupError("boom")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)
        yield TriggerEvent(1)
        await trio.sleep_forever()


async def leak_a_cancel_scope(self: Any) -> AsyncIterator[TriggerEvent]:
    trio.CancelScope().__enter__()
    yield TriggerEvent(1)


async def leak_a_nursery(self: Any) -> AsyncIterator[TriggerEvent]:
    async def child() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise LookupError("boom")

    nursery = await trio.open_nursery().__aenter__()
    nursery.start_soon(child)
    yield TriggerEvent(1)


async def leak_a_cancellation(self: Any) -> AsyncIterator[TriggerEvent]:
    kept: BaseException | None = None
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            kept = cancelled
            raise
    assert kept is not None
    assert kept is not None
    raise kept
    yield


async def leak_a_group_of_cancellations(self: Any) -> AsyncIterator[TriggerEvent]:
    kept: BaseException | None = None
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            kept = BaseExceptionGroup("leaked", [cancelled])
    assert kept is not None
    raise kept
    yield


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even this")


async def raise_the_unspeakable(self: Any) -> AsyncIterator[TriggerEvent]:
    raise Unspeakable
    yield


RUNS_THAT_FAIL = [
    (raise_error, "ValueError: boom"),
    (raise_after_an_event, "ValueError: boom"),
    (exit_process, "SystemExit: 3"),
    (interrupt, "KeyboardInterrupt: "),
    (raise_group, "BaseExceptionGroup: several"),
    (raise_generator_exit, "GeneratorExit: "),
    (raise_asyncio_cancelled, "CancelledError: "),
    (raise_stop, "RuntimeError: async generator raised StopAsyncIteration"),
    (return_at_once, "ReturnedBeforeFirstEvent: "),
    (return_a_value, "NotATriggerEvent: "),
    (return_plainly, "NotATriggerEvent: "),
    (raise_plainly, "LookupError: boom"),
    (yield_something_else, "NotATriggerEvent: "),
    (yield_an_odd_kind, "NotATriggerEvent: "),
    (yield_an_odd_end, "NotATriggerEvent: "),
    (fail_in_a_nursery, "ExceptionGroup: "),
    (leak_a_cancel_scope, "RuntimeError: Cancel scope stack corrupted"),
    (leak_a_nursery, "RuntimeError: Cancel scope stack corrupted"),
    (leak_a_cancellation, "CancelledByItself: "),
    (leak_a_group_of_cancellations, "CancelledByItself: "),
    (raise_the_unspeakable, "Unspeakable, whose text cannot be shown"),
]


@pytest.mark.parametrize(("run", "error"), RUNS_THAT_FAIL, ids=[run.__name__ for run, _ in RUNS_THAT_FAIL])
async def test_a_trigger_whose_run_fails_fails_alone_and_is_reported_once_with_its_traceback(
    autojump_clock: MockClock, run: Any, error: str
) -> None:
    cleanups: list[str] = []

    class Trigger(Authored):
        async def cleanup(self) -> None:
            await trio.lowlevel.checkpoint()
            cleanups.append("cleanup")

    Trigger.run = run  # type: ignore[method-assign]
    Trigger.__abstractmethods__ = frozenset()
    async with beside_a_neighbour() as rig:
        rig.earlier = None
        await rig.start(Trigger)
        end = await rig.end_of()
        assert end.error.startswith(error)
        assert (end.outcome, end.reason, end.trigger_run_id) == ("failed", None, "run-1")
        assert end.events == len(rig.events())
        assert "Traceback" in end.traceback
        assert cleanups == ["cleanup"]
        assert len(rig.host) == 1


def no_trigger() -> None:
    """Stands where a class should."""


CLASSES_THAT_FAIL = {
    "missing module": ("nowhere_at_all.Trigger", "TriggerNotLoaded: nowhere_at_all.Trigger"),
    "missing attribute": (f"{AUTHORS.__name__}.Absent", "TriggerNotLoaded: "),
    "no trigger class": (f"{__name__}.no_trigger", "TriggerNotLoaded: "),
}


@pytest.mark.parametrize("kind", CLASSES_THAT_FAIL)
async def test_a_trigger_whose_class_cannot_be_loaded_fails_alone(autojump_clock: MockClock, kind: str) -> None:
    classpath, error = CLASSES_THAT_FAIL[kind]
    if kind == "no trigger class":
        AUTHORS.no_trigger = no_trigger  # type: ignore[attr-defined]
        classpath = f"{AUTHORS.__name__}.no_trigger"
    async with beside_a_neighbour() as rig:
        await rig.start(classpath)
        end = await rig.end_of()
        assert (end.outcome, end.events) == ("failed", 0)
        assert end.error.startswith(error)
        assert "Traceback" in end.traceback


class Odd(BaseException):
    pass


@pytest.mark.parametrize("raised", [ValueError("boom"), SystemExit(2), KeyboardInterrupt(), Odd("boom"), Unspeakable()])
async def test_a_trigger_whose_constructor_raises_anything_fails_alone_and_has_no_cleanup(
    autojump_clock: MockClock, raised: BaseException
) -> None:
    cleanups: list[str] = []

    class Trigger(Authored):
        run = raise_error

        def __init__(self) -> None:
            raise raised

        async def cleanup(self) -> None:
            cleanups.append("cleanup")

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        end = await rig.end_of()
        assert end.outcome == "failed"
        assert end.error.startswith(type(raised).__name__)
        assert "__init__" in end.traceback
        assert cleanups == []


async def test_wrong_kwargs_fail_the_trigger_alone(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        run = raise_error

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger, no_such=1)
        assert (await rig.end_of()).error.startswith("TypeError: ")


async def test_asyncio_in_a_trigger_fails_it_with_a_word_about_trio(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            await asyncio.sleep(1)
            yield TriggerEvent()

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        assert (
            "no running event loop: triggers are trio code, not asyncio; use trio.sleep" in (await rig.end_of()).error
        )


async def test_an_error_is_cut_and_freed_of_what_no_database_stores(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            raise ValueError("head\0\ud800" + "x" * ERROR_CHARS_MAX)
            yield

    async with hosting() as rig:
        await rig.start(Trigger)
        end = await rig.end_of()
    assert end.error.startswith("ValueError: head\\x00\\ud800xxx")
    assert len(end.error) == len(end.traceback) == ERROR_CHARS_MAX
    assert end.traceback.endswith("xxx\n")


async def test_a_frozen_dataclass_can_be_a_trigger(autojump_clock: MockClock) -> None:
    @dataclass(frozen=True)
    class Trigger(Authored):
        n: int

        async def run(self) -> AsyncIterator[TriggerEvent]:
            assert await self.last_event() == TriggerEvent([1], key="k")
            yield TriggerEvent(self.n)

    async with hosting() as rig:
        await rig.start(Trigger, n=4)
        assert (await rig.end_of()).outcome == "returned"
        assert rig.asked == [1]
        assert [event.payload for event in rig.events()] == [b"4"]


async def test_last_event_outside_of_a_runner_says_so() -> None:
    class Trigger(Authored):
        run = raise_error

    with pytest.raises(RuntimeError, match="running trigger only"):
        await Trigger().last_event()
