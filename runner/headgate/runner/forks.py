"""Forks of the runner: the copy of the trio loop in them ends before it runs another task (I1).

A trigger may fork and let the child do other work, as ``multiprocessing`` does. Only a child that returns to the loop
is ended: it has copies of all triggers and streams, and would filter and advance the messages of its parent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Final, NoReturn

import structlog
import trio

from headgate.child.logs import names_now

log = structlog.get_logger(__name__)

EXIT_FORK: Final = 78  # of a fork of the runner that returned to its loop


def end_forks_of_the_loop() -> None:
    """Have all forks of this process from now on end when they return to trio's loop, with `EXIT_FORK`."""
    os.register_at_fork(after_in_child=_end_after_this_step)


def _end_after_this_step() -> None:
    # A fork made in another thread has no loop, because only the thread that forks exists in it.
    with contextlib.suppress(RuntimeError):
        trio.lowlevel.add_instrument(_End(names_now()))


class _End(trio.abc.Instrument):
    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    def before_task_step(self, task: trio.lowlevel.Task) -> NoReturn:
        """End the fork: it was made outside of any task, in a callback."""
        self._end()

    def after_task_step(self, task: trio.lowlevel.Task) -> NoReturn:
        """End the fork: the task that made it waits now, or has ended."""
        self._end()

    def _end(self) -> NoReturn:
        log.error(
            "a fork of the runner returned to its loop and was ended: call os._exit() in a fork, or start a program",
            pid=os.getpid(),
            exit_code=EXIT_FORK,
            **self._names,
        )
        os._exit(EXIT_FORK)
