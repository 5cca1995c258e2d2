"""A clock that skips waits: trio's clock, and the wall clock as a trigger's own modules see it.

trio's own test clock jumps as soon as all tasks are blocked, even if a thread or a server is about to answer. This one
jumps only when all tasks wait for time, or, if tasks wait for descriptors, after a short real time of silence on them.
"""

from __future__ import annotations

import datetime as datetime_module
import sys
import time as time_module
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, tzinfo
from types import ModuleType
from typing import Any
from unittest.mock import patch

import trio
import trio.testing

# How long descriptors that tasks wait for must be silent, in real seconds, before the clock jumps: a server on this
# machine has answered by then.
SILENCE_S = 0.25
# Between two looks at whether a thread has ended; anything else that happens ends the wait, too.
THREAD_LOOK_S = 0.005
_FAR_FUTURE_S = 999_999_999.0

_WAITING_FOR_DESCRIPTOR = frozenset({"wait_readable", "wait_writable", "_epoll_wait"})
_WAITING_FOR_THREAD = "to_thread_run_sync"


class SkippingClock(trio.abc.Clock):
    """A clock that stands still until `skip_to` or `skip_waits` moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._wall_at_start = time_module.time()

    def start_clock(self) -> None:
        """Do nothing."""

    def current_time(self) -> float:
        """Return the seconds skipped so far."""
        return self.now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return 0 for a deadline that has passed, else a very long time, since real time does not count."""
        return 0.0 if deadline <= self.now_s else _FAR_FUTURE_S

    def wall_time(self) -> float:
        """Return the seconds since the epoch, including skipped ones."""
        return self._wall_at_start + self.now_s

    def skip_to(self, moment: float) -> None:
        """Move to a time, unless it is past. The caller is a task, so trio checks its deadlines next."""
        self.now_s = max(self.now_s, moment)

    def sleep(self, seconds: float) -> None:
        """Stand for `time.sleep`."""
        self.now_s += seconds

    async def skip_waits(self, until: float, *, of: trio.lowlevel.Task) -> None:
        """Skip every wait of a task and those below it as soon as they only wait, up to the time ``until``."""
        while self.now_s < until:
            await wait_nothing_but_time(of)
            self.skip_to(min(until, self.now_s + trio.lowlevel.current_statistics().seconds_to_next_deadline))
            await trio.lowlevel.checkpoint()


async def wait_nothing_but_time(main: trio.lowlevel.Task) -> None:
    """Return when ``main`` and all tasks below it wait, without a thread at work and with silent descriptors.

    trio's own tasks are not counted: they always wait for a descriptor.
    """
    while True:
        await trio.testing.wait_all_tasks_blocked()
        waits = _waits(main)
        if _WAITING_FOR_THREAD in waits:
            await trio.testing.wait_all_tasks_blocked(THREAD_LOOK_S)
        elif waits & _WAITING_FOR_DESCRIPTOR:
            before = _steps(main)
            await trio.testing.wait_all_tasks_blocked(SILENCE_S)
            if _steps(main) == before:
                return
        else:
            return


def tasks_below(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    """Yield all tasks in the nurseries of a task, and in their nurseries."""
    waiting = list(task.child_nurseries)
    while waiting:
        for child in waiting.pop().child_tasks:
            yield child
            waiting.extend(child.child_nurseries)


def _waits(main: trio.lowlevel.Task) -> frozenset[str]:
    """Return the names of all functions that tasks wait in."""
    return frozenset(
        frame.f_code.co_name for task in (main, *tasks_below(main)) for frame, _ in task.iter_await_frames()
    )


def _steps(main: trio.lowlevel.Task) -> frozenset[tuple[int, int]]:
    """Return the progress of all tasks except the caller."""
    me = trio.lowlevel.current_task()
    return frozenset((id(task), task._schedule_points) for task in (main, *tasks_below(main)) if task is not me)


# --- the wall clock ------------------------------------------------------------------------------


class _InstanceOfDatetime(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, datetime)


def _stand_in_datetime(clock: SkippingClock) -> type:
    """Return a class that creates real datetimes, and takes the current time from the clock."""

    class StandIn(datetime, metaclass=_InstanceOfDatetime):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return datetime(*args, **kwargs)

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.fromtimestamp(clock.wall_time(), tz)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(UTC).replace(tzinfo=None)

    StandIn.__name__ = StandIn.__qualname__ = "datetime"
    return StandIn


def _stand_in_module(module: ModuleType, **replaced: Any) -> ModuleType:
    stand_in = ModuleType(module.__name__)
    stand_in.__dict__.update(vars(module) | replaced)
    return stand_in


@contextmanager
def skipped_wall_clock(
    cls: type[object], clock: SkippingClock, *modules: str, skips_sleep: bool = False
) -> Generator[None]:
    """Replace the wall clock in the modules that define a class or a base of it, and in further ``modules``.

    In their globals, `datetime.datetime`, `time.time` and the modules `datetime` and `time` are replaced; with
    ``skips_sleep`` `time.sleep` is too, for tasks: in a trigger it is an error, as it blocks the runner. Other modules
    that these call see real time.
    """
    now = _stand_in_datetime(clock)
    wall: dict[str, Callable[..., Any]] = {"time": clock.wall_time, "time_ns": lambda: int(clock.wall_time() * 1e9)}
    if skips_sleep:
        wall["sleep"] = clock.sleep
    stand_ins: list[tuple[object, object]] = [
        (datetime, now),
        (time_module.time, wall["time"]),
        (time_module.time_ns, wall["time_ns"]),
        (time_module.sleep, wall.get("sleep", time_module.sleep)),
        (datetime_module, _stand_in_module(datetime_module, datetime=now)),
        (time_module, _stand_in_module(time_module, **wall)),
    ]
    with ExitStack() as stack:
        for name in {*modules, *(base.__module__ for base in cls.__mro__ if base is not object)}:
            module = sys.modules.get(name)
            if module is None or name == "abc":
                continue
            for attribute, value in list(vars(module).items()):
                for real, stand_in in stand_ins:
                    if value is real:
                        stack.enter_context(patch.object(module, attribute, stand_in))
        yield
