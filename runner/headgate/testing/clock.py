"""A clock that skips the waits: trio's, and the wall clock as a trigger's own modules see it.

trio's own test clock jumps as soon as all tasks are blocked, and so over the answer of a thread or of a server that is
still working. This one does not: it jumps when nothing but time is waited for, and, where tasks wait for descriptors
that stay silent, after a short while of real silence.
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
# Between two looks at whether a thread has come back. No sleep: it is woken when anything else happens, too.
THREAD_LOOK_S = 0.005
_FAR_FUTURE_S = 999_999_999.0

_WAITING_FOR_DESCRIPTOR = frozenset({"wait_readable", "wait_writable", "_epoll_wait"})
_WAITING_FOR_THREAD = "to_thread_run_sync"


class SkippingClock(trio.abc.Clock):
    """A clock that stands still until `skip_to` moves it, or `skip_waits` does, whenever nothing happens."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._wall_at_start = time_module.time()

    def start_clock(self) -> None:
        """Nothing to start."""

    def current_time(self) -> float:
        """Return the seconds that were skipped so far."""
        return self.now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return 0 for a deadline that has come, and else for ever: real time brings none nearer."""
        return 0.0 if deadline <= self.now_s else _FAR_FUTURE_S

    def wall_time(self) -> float:
        """Return the seconds since the epoch, the skipped ones included."""
        return self._wall_at_start + self.now_s

    def skip_to(self, moment: float) -> None:
        """Move to a moment, if that is not past. The caller is a task, so trio looks at its deadlines next."""
        self.now_s = max(self.now_s, moment)

    def sleep(self, seconds: float) -> None:
        """Stand for `time.sleep`."""
        self.now_s += seconds

    async def skip_waits(self, until: float, *, of: trio.lowlevel.Task) -> None:
        """Skip every wait as soon as nothing else happens in a task and those below it, up to the moment ``until``."""
        while self.now_s < until:
            await wait_nothing_but_time(of)
            self.skip_to(min(until, self.now_s + trio.lowlevel.current_statistics().seconds_to_next_deadline))
            await trio.lowlevel.checkpoint()


async def wait_nothing_but_time(main: trio.lowlevel.Task) -> None:
    """Return when all tasks wait, no thread works for one of them, and what they read from is silent.

    That is said of ``main`` and the tasks below it; trio's own always wait for a descriptor.
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
    """All tasks in the nurseries of a task, and in theirs."""
    waiting = list(task.child_nurseries)
    while waiting:
        for child in waiting.pop().child_tasks:
            yield child
            waiting.extend(child.child_nurseries)


def _waits(main: trio.lowlevel.Task) -> frozenset[str]:
    """The names of all functions that tasks wait in."""
    return frozenset(
        frame.f_code.co_name for task in (main, *tasks_below(main)) for frame, _ in task.iter_await_frames()
    )


def _steps(main: trio.lowlevel.Task) -> frozenset[tuple[int, int]]:
    """How far all tasks but the caller have come."""
    me = trio.lowlevel.current_task()
    return frozenset((id(task), task._schedule_points) for task in (main, *tasks_below(main)) if task is not me)


# --- the wall clock ------------------------------------------------------------------------------


class _InstanceOfDatetime(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, datetime)


def _stand_in_datetime(clock: SkippingClock) -> type:
    """Return a class that makes real datetimes, and whose present is that of the clock."""

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
    """Have the modules that define a class, or a base of it, and further ``modules`` see the wall clock that skips.

    There, whatever stands for `datetime.datetime`, `time.time`, or the modules `datetime` and `time` themselves, is
    replaced meanwhile; with ``skips_sleep`` so is `time.sleep`, which in a trigger is the offence of blocking its
    runner. A module that such a module calls sees real time.
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
