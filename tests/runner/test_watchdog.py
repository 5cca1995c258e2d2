"""The watchdog: who blocks the loop, at which line, said while it is being blocked.

The triggers here block on an event that only the watchdog's report sets, so no test depends on how fast the
machine is: if nobody were named, the trigger would block until it gives up, and the test would fail.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import structlog
import trio
from tests.runner.authors import AUTHORS, publish

from headgate.protocol.messages.runner import RunnerSettings, TriggerSpec
from headgate.runner.black_box import BlackBox
from headgate.runner.host import Host
from headgate.runner.outbox import Outbox
from headgate.runner.watchdog import IDLE_SAMPLES, SAMPLES_PER_LIMIT, Watchdog, culprit_of
from headgate.streams.manager import SharedStreamManager
from headgate.triggers.base import BaseTrigger, TriggerEvent

BLOCKED_AFTER_S = 0.05
GIVE_UP_S = 20.0  # how long a trigger waits to be named

REPORTS: list[dict[str, Any]] = []
NAMED = threading.Event()
RUNS_AGAIN = threading.Event()


def note(_logger: object, method: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
    REPORTS.append({"level": method, **record})
    if "block" in record["event"]:
        NAMED.set()
    if record["event"] == "the loop runs again":
        RUNS_AGAIN.set()
    raise structlog.DropEvent


@pytest.fixture(autouse=True)
def sink() -> Iterator[None]:
    """Records go to `REPORTS`, and a report that something blocks sets `NAMED`."""
    before = structlog.get_config()
    structlog.configure(processors=[note], cache_logger_on_first_use=False)
    REPORTS.clear()
    NAMED.clear()
    RUNS_AGAIN.clear()
    yield
    structlog.configure(**before)


def blocking_reports() -> list[dict[str, Any]]:
    return [report for report in REPORTS if "block" in report["event"]]


def block() -> bool:
    """Block the loop until the watchdog has said so."""
    return NAMED.wait(GIVE_UP_S)


class Authored(BaseTrigger):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}


def run_trigger(cls: type[BaseTrigger]) -> list[Any]:
    """Run one trigger under a watchdog until it ends; return what it fired and how it ended."""
    classpath = publish(cls)

    async def main() -> list[Any]:
        settings = RunnerSettings()
        outbox = Outbox(events_max=10, round_events_max=10)

        async def ask(trigger_id: int) -> None:
            await trio.lowlevel.checkpoint()

        async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
            host = Host(
                settings=settings, streams=streams, outbox=outbox, nursery=nursery, ask_last_event=ask, box=BlackBox()
            )
            spec = TriggerSpec(41, "run", "orders", classpath, b"{}")
            await host.start((spec,))
            await host.wait_all_ended()
            nursery.cancel_scope.cancel()
        changes = outbox.take_round(1)
        return [*changes.events, *changes.finished]

    fired: list[Any] = watch(main)
    return fired


def watch(main: Callable[[], Awaitable[Any]], blocked_after_s: float = BLOCKED_AFTER_S) -> Any:
    async def watched() -> Any:
        with Watchdog(blocked_after_s=blocked_after_s):
            return await main()

    return trio.run(watched)


def test_a_blocking_trigger_is_named_with_class_and_line_while_it_blocks() -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            await trio.lowlevel.checkpoint()
            yield TriggerEvent(block())  # the line that is named

    event, _end = run_trigger(Trigger)
    assert event.payload == b"true"  # it was named before it stopped blocking
    (report,) = blocking_reports()
    assert report["event"] == "a trigger blocks the loop"
    assert (report["level"], report["trigger_id"], report["trigger_name"]) == ("error", 41, "orders")
    assert report["classpath"] == f"{AUTHORS.__name__}.Trigger"
    # The innermost frame of users' code is the function that this file blocks with; its caller is in the stack.
    assert report["at"].startswith(f"{__file__}:{block.__code__.co_firstlineno + 2} in block")
    assert "NAMED.wait" in report["line"]
    assert "# the line that is named" in report["stack"]
    assert report["blocked_s"] >= BLOCKED_AFTER_S


def test_a_block_is_reported_once_and_its_end_too() -> None:
    def go_on_blocking() -> None:
        block()
        time.sleep(10 * BLOCKED_AFTER_S)  # the same step, many samples later

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            go_on_blocking()
            yield TriggerEvent(await trio.to_thread.run_sync(RUNS_AGAIN.wait, GIVE_UP_S))

    event, _end = run_trigger(Trigger)
    assert event.payload == b"true"
    assert len(blocking_reports()) == 1


def test_a_blocking_constructor_is_attributed_to_its_trigger() -> None:
    class Trigger(Authored):
        def __init__(self) -> None:
            self.was_named = block()

        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(self.was_named)

    event, _end = run_trigger(Trigger)
    assert event.payload == b"true"
    (report,) = blocking_reports()
    assert (report["event"], report["trigger_id"]) == ("a trigger blocks the loop", 41)
    assert "in __init__" in report["stack"]


def test_a_task_that_a_trigger_started_is_attributed_to_it_even_if_it_clears_the_context() -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            structlog.contextvars.clear_contextvars()
            named: list[bool] = []

            async def child() -> None:
                await trio.lowlevel.checkpoint()
                named.append(block())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)
            yield TriggerEvent(named[0])

    event, _end = run_trigger(Trigger)
    assert event.payload == b"true"
    (report,) = blocking_reports()
    assert report["trigger_id"] == 41
    assert "child" in report["task"]


def test_what_is_no_trigger_is_named_by_its_task() -> None:
    async def main() -> bool:
        return block()

    assert watch(main)
    (report,) = blocking_reports()
    assert report["event"] == "the loop is blocked"
    assert "trigger_id" not in report
    assert "watched" in report["task"]


def test_a_busy_loop_of_short_steps_and_short_lived_tasks_is_not_reported() -> None:
    # The loop is never idle for three times the limit, and every sample finds another step.
    async def work() -> None:
        end = time.monotonic() + 0.002
        while time.monotonic() < end:
            pass

    async def main() -> None:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)

    watch(main, blocked_after_s=0.5)
    assert REPORTS == []


def test_an_idle_loop_is_not_reported() -> None:
    async def main() -> None:
        await trio.sleep(5 * BLOCKED_AFTER_S)

    watch(main)
    assert REPORTS == []


def test_a_block_after_a_long_idle_time_is_reported() -> None:
    async def main() -> bool:
        # Long enough to be looked at rarely; where the machine is slow it is not, and that is reported as well.
        await trio.sleep(2 * IDLE_SAMPLES * BLOCKED_AFTER_S / SAMPLES_PER_LIMIT)
        return block()

    assert watch(main)
    assert len(blocking_reports()) == 1


def test_the_watchdogs_thread_ends_with_its_block() -> None:
    before = threading.active_count()

    async def main() -> int:
        return threading.active_count()

    assert watch(main) == before + 1
    assert threading.active_count() == before


def summary(filename: str, name: str) -> traceback.FrameSummary:
    return traceback.FrameSummary(filename, 1, name, lookup_line=False)


OURS = sys.modules["headgate.runner.host"].__file__ or ""
USERS = "/somewhere/of/theirs/triggers.py"


@pytest.mark.parametrize(
    ("frames", "culprit"),
    [
        ([(OURS, "a"), (USERS, "b"), (threading.__file__, "c")], "b"),
        ([(USERS, "a"), (USERS, "b"), (trio.__file__, "c")], "b"),
        ([(USERS, "a"), ("<string>", "b"), ("<frozen importlib>", "c")], "a"),
        ([(OURS, "a"), (threading.__file__, "b")], "b"),
        ([(sys.modules["headgate.protocol.values"].__file__ or "", "a")], "a"),
        ([], None),
    ],
)
def test_the_culprit_is_the_innermost_frame_of_users_code(frames: list[tuple[str, str]], culprit: str | None) -> None:
    found = culprit_of([summary(filename, name) for filename, name in frames])
    assert (found.name if found else None) == culprit
