"""The host on its own: triggers that fail, are cancelled, get stuck, and what is reported of them."""

from __future__ import annotations

import asyncio
import gc
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.protocol.messages.queries import StoredEvent
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    CancelReason,
    CancelTrigger,
    FinishedTrigger,
    FiredEvent,
    RefusedEvent,
    RunnerSettings,
    TriggerSpec,
)
from headgate.protocol.values import encode_value
from headgate.runner.host import EVENTS_A_STEP, Host
from headgate.runner.outbox import Outbox
from headgate.streams.manager import SharedStreamManager
from headgate.triggers.base import (
    BaseTrigger,
    TaskFailedEvent,
    TaskSkippedEvent,
    TaskSuccessEvent,
    TriggerEvent,
)

SETTINGS = RunnerSettings(cancel_grace_s=10.0, hook_timeout_s=5.0)
REASONS: tuple[CancelReason, ...] = ("user", "timeout", "reassigned", "shutdown")


class Rig:
    """A host whose outbox the test empties."""

    def __init__(self, settings: RunnerSettings, streams: SharedStreamManager, nursery: trio.Nursery) -> None:
        self.outbox = Outbox(events_max=settings.outbox_events_max, round_events_max=settings.round_events_max)
        self.host = Host(
            settings=settings, streams=streams, outbox=self.outbox, nursery=nursery, ask_last_event=self._last_event
        )
        self.items: list[FiredEvent | RefusedEvent | FinishedTrigger] = []
        self.stuck: list[int] = []
        self.asked: list[int] = []

    async def _last_event(self, trigger_id: int) -> StoredEvent | None:
        await trio.lowlevel.checkpoint()
        self.asked.append(trigger_id)
        return StoredEvent("earlier", 3, b"[1]", "k")

    async def start(self, cls: type[BaseTrigger] | str, trigger_id: int = 1, **kwargs: Any) -> None:
        classpath = cls if isinstance(cls, str) else publish(cls)
        spec = TriggerSpec(
            trigger_id, f"run-{trigger_id}", f"name-{trigger_id}", classpath, encode_value(kwargs, where="kwargs")
        )
        await self.host.start((spec,))

    def cancel(self, reason: CancelReason, trigger_id: int = 1) -> None:
        self.host.cancel(CancelTrigger(trigger_id, reason))

    def take(self) -> None:
        while True:
            changes = self.outbox.take_round(1)
            self.stuck += changes.stuck
            if not (changes.events or changes.refused or changes.finished):
                return
            self.items += [*changes.events, *changes.refused, *changes.finished]

    def events(self, trigger_id: int = 1) -> list[FiredEvent]:
        self.take()
        return [item for item in self.items if isinstance(item, FiredEvent) and item.trigger_id == trigger_id]

    def refused(self, trigger_id: int = 1) -> list[RefusedEvent]:
        self.take()
        return [item for item in self.items if isinstance(item, RefusedEvent) and item.trigger_id == trigger_id]

    def ends(self, trigger_id: int = 1) -> list[FinishedTrigger]:
        self.take()
        return [item for item in self.items if isinstance(item, FinishedTrigger) and item.trigger_id == trigger_id]

    async def until(self, condition: Callable[[], Any]) -> None:
        with trio.fail_after(1000):
            while not condition():
                await self.outbox.wait_not_empty()

    async def end_of(self, trigger_id: int = 1) -> FinishedTrigger:
        await self.until(lambda: self.ends(trigger_id))
        await wait_all_tasks_blocked()
        (end,) = self.ends(trigger_id)  # once, and only once
        return end


@asynccontextmanager
async def hosting(settings: RunnerSettings = SETTINGS) -> AsyncIterator[Rig]:
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        rig = Rig(settings, streams, nursery)
        yield rig
        nursery.cancel_scope.cancel()


AUTHORS = types.ModuleType("authors_of_test_host")


@pytest.fixture(autouse=True)
def authors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, AUTHORS.__name__, AUTHORS)
    with structlog.testing.capture_logs():
        yield
    vars(AUTHORS).pop("Trigger", None)
    gc.collect()  # what a trigger left behind warns in its own test, not in another


def publish(cls: type[BaseTrigger]) -> str:
    """Put a class where its classpath says it is."""
    setattr(AUTHORS, cls.__name__, cls)
    return f"{AUTHORS.__name__}.{cls.__name__}"


class Authored(BaseTrigger):
    """What every trigger here has in common."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}


class Neighbour(Authored):
    """Fires when its bell is rung."""

    bell: trio.MemoryReceiveChannel[None]

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for _ in self.bell:
            yield TriggerEvent("alive")


@asynccontextmanager
async def beside_a_neighbour() -> AsyncIterator[Rig]:
    """A host with a neighbour in it, which must still be alive at the end."""
    ring, Neighbour.bell = trio.open_memory_channel[None](1)
    async with hosting() as rig:
        await rig.start(Neighbour, 99)
        yield rig
        assert rig.ends(99) == []
        ring.send_nowait(None)
        await rig.until(lambda: rig.events(99))
        ring.close()
        Neighbour.bell.close()


# --- a trigger fails alone -----------------------------------------------------------------------


async def raise_error(self: Any) -> AsyncIterator[TriggerEvent]:
    raise ValueError("boom")
    yield


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


async def return_at_once(self: Any) -> AsyncIterator[TriggerEvent]:
    return
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
    raise kept
    yield


async def leak_a_group_of_cancellations(self: Any) -> AsyncIterator[TriggerEvent]:
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            kept = BaseExceptionGroup("leaked", [cancelled])
    raise kept
    yield


async def ignore_the_end(self: Any) -> AsyncIterator[TriggerEvent]:
    try:
        yield TaskSuccessEvent()
    finally:
        yield TriggerEvent("too late")


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
    (fail_in_a_nursery, "ExceptionGroup: "),
    (leak_a_cancel_scope, "RuntimeError: Cancel scope stack corrupted"),
    (leak_a_nursery, "RuntimeError: Cancel scope stack corrupted"),
    (leak_a_cancellation, "CancelledByItself: "),
    (leak_a_group_of_cancellations, "CancelledByItself: "),
    (ignore_the_end, "RuntimeError: async generator ignored GeneratorExit"),
    (raise_the_unspeakable, "Unspeakable, whose text cannot be had"),
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
    Trigger.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    async with beside_a_neighbour() as rig:
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
        run = raise_error  # type: ignore[assignment]

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
        run = raise_error  # type: ignore[assignment]

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
        run = raise_error  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match="running trigger only"):
        await Trigger().last_event()


# --- the end of a run ----------------------------------------------------------------------------


class Sleeper(Authored):
    """Sleeps until it is cancelled, and writes down what is called."""

    called: list[str]

    def __init_subclass__(cls) -> None:
        cls.called = []

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            yield TriggerEvent("begun")
            await trio.sleep_forever()
        finally:
            self.called.append("finally")

    async def on_kill(self) -> None:
        await trio.sleep(1)
        self.called.append("on_kill")

    async def cleanup(self) -> None:
        await trio.sleep(1)
        self.called.append("cleanup")


@pytest.mark.parametrize("reason", REASONS)
async def test_a_cancelled_trigger_is_reported_with_the_reason_and_on_kill_is_for_users_only(
    autojump_clock: MockClock, reason: CancelReason
) -> None:
    class Trigger(Sleeper):
        pass

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        await rig.until(rig.events)
        rig.cancel(reason)
        end = await rig.end_of()
        assert (end.outcome, end.reason, end.error, end.events) == ("cancelled", reason, "", 1)
        hooks = ["on_kill", "cleanup"] if reason == "user" else ["cleanup"]
        assert Trigger.called == ["finally", *hooks]


async def test_a_trigger_that_returned_or_failed_has_its_cleanup_before_it_is_reported(
    autojump_clock: MockClock,
) -> None:
    order: list[str] = []

    class Returning(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(1)

        async def cleanup(self) -> None:
            await trio.sleep(1)
            order.append("cleanup")

    class Failing(Returning):
        run = raise_error  # type: ignore[assignment]

    async with hosting() as rig:
        for cls, outcome in ((Returning, "returned"), (Failing, "failed")):
            rig.items.clear()
            order.clear()
            await rig.start(cls)
            await wait_all_tasks_blocked()
            assert rig.ends() == []  # it is still cleaning up
            assert (await rig.end_of()).outcome == outcome
            assert order == ["cleanup"]


@pytest.mark.parametrize("reason", ["user", "shutdown"])
async def test_a_trigger_cancelled_before_its_first_step_never_runs_but_is_cleaned_up(
    autojump_clock: MockClock, reason: CancelReason
) -> None:
    class Trigger(Sleeper):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            self.called.append("run")
            yield TriggerEvent("begun")

    async with hosting() as rig:
        await rig.start(Trigger)
        rig.cancel(reason)
        end = await rig.end_of()
        assert (end.outcome, end.reason, end.events) == ("cancelled", reason, 0)
        assert Trigger.called == (["on_kill", "cleanup"] if reason == "user" else ["cleanup"])


@pytest.mark.parametrize(("run", "outcome"), [(raise_error, "failed"), (None, "returned")])
@pytest.mark.parametrize("reason", ["user", "shutdown"])
async def test_a_cancel_that_comes_during_the_hooks_changes_nothing_of_how_the_run_ended(
    autojump_clock: MockClock, run: Any, outcome: str, reason: CancelReason
) -> None:
    class Trigger(Sleeper):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(1)

    if run is not None:
        Trigger.run = run  # type: ignore[method-assign]
    async with hosting() as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        rig.cancel(reason)
        end = await rig.end_of()
        assert (end.outcome, end.reason) == (outcome, None)
        assert Trigger.called == ["cleanup"]


async def test_the_first_reason_counts(autojump_clock: MockClock) -> None:
    class Trigger(Sleeper):
        pass

    async with hosting() as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        rig.cancel("shutdown")
        rig.cancel("user")
        assert (await rig.end_of()).reason == "shutdown"
        assert Trigger.called == ["finally", "cleanup"]


async def test_cancelling_what_does_not_run_is_harmless(autojump_clock: MockClock) -> None:
    async with beside_a_neighbour() as rig:
        rig.cancel("user", 12345)
        await wait_all_tasks_blocked()
        assert rig.ends(12345) == []


async def test_a_trigger_that_fails_while_it_is_cancelled_is_cancelled_and_keeps_its_error(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            try:
                yield TriggerEvent(1)
                await trio.sleep_forever()
            finally:
                raise ValueError("boom")

    async with hosting() as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        rig.cancel("timeout")
        end = await rig.end_of()
        assert (end.outcome, end.reason, end.error) == ("cancelled", "timeout", "ValueError: boom")


async def hang(self: Any) -> None:
    await trio.sleep_forever()


async def fail(self: Any) -> None:
    raise ValueError("boom")


async def exit_from_hook(self: Any) -> None:
    raise SystemExit(1)


async def leak_from_hook(self: Any) -> None:
    kept: list[BaseException] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            kept.append(cancelled)
            raise
    raise kept[0]


def not_async(self: Any) -> None:
    pass


BAD_HOOKS = [hang, fail, exit_from_hook, leak_from_hook, not_async]


@pytest.mark.parametrize("hook", BAD_HOOKS)
async def test_a_hook_that_misbehaves_harms_neither_the_other_hook_nor_the_report(
    autojump_clock: MockClock, hook: Callable[[Any], Awaitable[None]]
) -> None:
    class Trigger(Sleeper):
        on_kill = hook  # type: ignore[assignment]

    class Other(Sleeper):
        cleanup = hook  # type: ignore[assignment]

    async with beside_a_neighbour() as rig:
        for cls, called in ((Trigger, ["finally", "cleanup"]), (Other, ["finally", "on_kill"])):
            rig.items.clear()
            await rig.start(cls)
            await rig.until(rig.events)
            begun_at = trio.current_time()
            rig.cancel("user")
            end = await rig.end_of()
            assert (end.outcome, end.reason, end.error) == ("cancelled", "user", "")
            assert cls.called == called
            assert trio.current_time() - begun_at == pytest.approx(6 if hook is hang else 1, abs=0.1)
            assert rig.stuck == []


async def test_a_hook_that_is_no_method_at_all_harms_nothing(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        run = return_at_once  # type: ignore[assignment]
        cleanup = None  # type: ignore[assignment]

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "failed"


async def test_a_finally_block_may_not_await_once_cancelled_but_a_hook_may(autojump_clock: MockClock) -> None:
    class Trigger(Sleeper):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            try:
                yield TriggerEvent(1)
                await trio.sleep_forever()
            finally:
                await trio.sleep(1)
                self.called.append("the finally block went on")

    async with hosting() as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        rig.cancel("reassigned")
        await rig.end_of()
        assert Trigger.called == ["cleanup"]


async def test_a_trigger_that_swallows_its_cancellation_is_reported_stuck_once_after_the_grace_period(
    autojump_clock: MockClock,
) -> None:
    release = trio.Event()

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(1)
            while not release.is_set():
                with trio.CancelScope(shield=True):
                    await release.wait()

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        rig.cancel("user")
        begun_at = trio.current_time()
        await rig.until(lambda: rig.take() or rig.stuck)
        assert trio.current_time() - begun_at == pytest.approx(SETTINGS.cancel_grace_s, abs=0.1)
        await trio.sleep(1000)
        rig.take()
        assert rig.stuck == [1]
        assert rig.ends() == []
        release.set()
        assert (await rig.end_of()).outcome == "cancelled"


async def test_a_hook_that_swallows_its_cancellation_is_reported_stuck_too(autojump_clock: MockClock) -> None:
    release = trio.Event()

    class Trigger(Authored):
        run = raise_error  # type: ignore[assignment]

        async def cleanup(self) -> None:
            with trio.CancelScope(shield=True):
                await release.wait()

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.until(lambda: rig.take() or rig.stuck)
        assert rig.stuck == [1]
        release.set()
        assert (await rig.end_of()).error == "ValueError: boom"


async def test_waiting_for_the_end_of_all_wakes_everyone_who_waits(autojump_clock: MockClock) -> None:
    class Trigger(Sleeper):
        pass

    async with hosting() as rig:
        await rig.start(Trigger)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.host.wait_all_ended)
            nursery.start_soon(rig.host.wait_all_ended)
            await wait_all_tasks_blocked()
            rig.host.cancel_all("shutdown")
        assert len(rig.host) == 0


async def test_a_trigger_that_runs_is_not_started_a_second_time(autojump_clock: MockClock) -> None:
    class Trigger(Sleeper):
        pass

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        assert len(rig.host) == 1
        assert len(rig.events()) == 1
        rig.cancel("user")
        await rig.end_of()


# --- events --------------------------------------------------------------------------------------


async def test_events_are_numbered_from_0_in_each_run_and_precede_its_end(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for number in range(3):
                yield TriggerEvent(number)

    async with hosting() as rig:
        for _ in range(2):
            rig.items.clear()
            await rig.start(Trigger)
            end = await rig.end_of()
            assert [(e.sequence_index, e.payload, e.seq, e.is_last, e.kind) for e in rig.events()] == [
                (number, b"%d" % number, 0, False, "event") for number in range(3)
            ]
            assert rig.items[-1] == end == FinishedTrigger(1, "run-1", "returned", 3)


@pytest.mark.parametrize(
    ("event", "kind"),
    [(TaskSuccessEvent(xcoms={"a": 1}), "success"), (TaskFailedEvent(), "failed"), (TaskSkippedEvent(), "skipped")],
)
async def test_an_event_that_ends_the_task_ends_the_run_and_is_its_last(
    autojump_clock: MockClock, event: TriggerEvent, kind: str
) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(0)
            yield event
            yield TriggerEvent("never")

    async with hosting() as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "returned"
        assert [(e.kind, e.is_last) for e in rig.events()] == [("event", False), (kind, True)]


async def test_the_key_of_an_event_travels_with_it(autojump_clock: MockClock) -> None:
    class Topic(str):
        __slots__ = ()

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(0, key="order-7")
            yield TriggerEvent(1, key=Topic("order-8"))
            yield TriggerEvent(2)

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.end_of()
        assert [(e.key, e.position) for e in rig.events()] == [("order-7", 0), ("order-8", 0), (None, 0)]
        assert type(rig.events()[1].key) is str  # nothing else has a form on the wire


async def test_an_event_that_is_too_big_is_refused_with_name_and_size_and_the_run_goes_on(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent("x" * 98)
            yield TriggerEvent("y" * 99)
            yield TriggerEvent("z")

    async with hosting(RunnerSettings(event_bytes_max=100)) as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).events == 3
        assert [event.sequence_index for event in rig.events()] == [0, 2]
        (refused,) = rig.refused()
        assert refused.reason == "an event of name-1 has 101 bytes; the limit is 100"
        assert (refused.sequence_index, refused.payload_bytes) == (1, 101)
        assert refused.payload_head.startswith(b'"yyy')


async def test_a_payload_that_has_no_form_is_refused_with_its_path(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent({"rows": [1, print]})
            yield TriggerEvent("next")

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "returned"
        (refused,) = rig.refused()
        assert "payload['rows'][1]" in refused.reason
        assert "name-1" in refused.reason
        assert [event.sequence_index for event in rig.events()] == [1]


@pytest.mark.parametrize(
    ("key", "shown"),
    [("k" * 513, "k" * 512), ("a\0b", "a\\x00b"), ("a\ud800b", "a\\ud800b"), (7, "<int>")],
)
async def test_a_key_that_no_database_stores_is_refused(autojump_clock: MockClock, key: Any, shown: str) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            event = TriggerEvent({"n": 1})
            event.key = key
            yield event
            yield TriggerEvent(2, key="k" * 512)

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.end_of()
        (refused,) = rig.refused()
        assert "the key of an event of name-1" in refused.reason
        assert refused.key == shown
        assert refused.payload_head == b'{"n":1}'
        assert [event.key for event in rig.events()] == ["k" * 512]


# --- room in the outbox --------------------------------------------------------------------------

NARROW = RunnerSettings(outbox_events_max=2, round_events_max=2)


class Eager(Authored):
    """Fires without ever awaiting, and counts how far it got."""

    fired = 0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        for number in range(5):
            type(self).fired = number + 1
            yield TriggerEvent(number)


async def test_a_trigger_that_fires_into_a_full_outbox_waits_for_room_and_loses_nothing(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Eager):
        pass

    async with hosting(NARROW) as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        assert Trigger.fired == 2
        await rig.end_of()
        assert [event.sequence_index for event in rig.events()] == [0, 1, 2, 3, 4]


async def test_a_cancelled_trigger_does_not_wait_for_room(autojump_clock: MockClock) -> None:
    class Trigger(Eager):
        pass

    async with hosting(NARROW) as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        rig.cancel("shutdown")
        await rig.host.wait_all_ended()  # though nobody has taken a round
        assert [event.sequence_index for event in rig.events()] == [0, 1]
        assert (await rig.end_of()).events == 2


async def test_a_deadline_of_the_triggers_own_that_passes_while_it_waits_for_room_hits_the_trigger_only(
    autojump_clock: MockClock,
) -> None:
    seen: list[str] = []

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            with trio.move_on_after(1) as scope:
                for number in range(3):
                    yield TriggerEvent(number)
                await trio.sleep_forever()
            seen.append(f"cut: {scope.cancelled_caught}")
            yield TriggerEvent("after")

    async with hosting(NARROW) as rig:
        await rig.start(Trigger)
        await wait_all_tasks_blocked()
        await trio.sleep(10)  # the outbox is full all the time
        assert seen == []
        assert (await rig.end_of()).outcome == "returned"
        assert seen == ["cut: True"]
        assert [event.payload for event in rig.events()] == [b"0", b"1", b"2", b'"after"']


async def test_a_trigger_that_awaits_nothing_lets_the_others_run(autojump_clock: MockClock) -> None:
    turns: list[int] = []

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for number in range(10 * EVENTS_A_STEP):
                yield TriggerEvent(number)

    async with hosting() as rig:

        async def other() -> None:
            while len(turns) < 5:
                await trio.lowlevel.checkpoint()
                turns.append(len(rig.outbox))

        async with trio.open_nursery() as nursery:
            await rig.start(Trigger)
            nursery.start_soon(other)
        # Trio runs the tasks of one batch in random order, so two steps of the one may follow each other.
        assert all(later - earlier <= 2 * EVENTS_A_STEP for earlier, later in pairwise([0, *turns]))
        await rig.end_of()
