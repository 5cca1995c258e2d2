"""Triggers of the host that are cancelled, get stuck, and have hooks (I13, I14)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from tests.runner.host.host_rig import (
    REASONS,
    SETTINGS,
    Authored,
    beside_a_neighbour,
    hosting,
    raise_error,
    return_at_once,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.protocol.messages.runner import (
    CancelReason,
)
from headgate.triggers.base import (
    TriggerEvent,
)

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
        run = raise_error

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
        run = return_at_once
        cleanup = None  # type: ignore[assignment]

    async with beside_a_neighbour() as rig:
        rig.earlier = None
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "failed"


async def test_a_trigger_whose_attributes_cannot_be_listed_harms_nothing(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        run = return_at_once

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise SystemExit(1)

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "returned"


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
        await rig.until(rig.take_stuck)
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
        run = raise_error

        async def cleanup(self) -> None:
            with trio.CancelScope(shield=True):
                await release.wait()

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.until(rig.take_stuck)
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
