"""Waiting for what another process or thread does: how long at most, and how often it is looked at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

# The longest that any single thing may take. It judges nothing but that something hangs: what works never waits so
# long, and how busy the machine is must not decide about a test.
WITHIN_S = 300.0
ALL_WITHIN_S = 900.0  # the same of many such things together: a script, a campaign
LOOK_INTERVAL_S = 0.01  # between two looks at a condition in another process that tells nobody when it comes true
LOOK_SHARE = 4  # a look that took long is followed by a wait so many times as long: the other process needs the CPU

ResultT = TypeVar("ResultT")


class NotInTime(AssertionError):
    """Something did not come true in time; the text says what."""


def wait_until(
    condition: Callable[[], ResultT | None], what: str | Callable[[], str], within_s: float = WITHIN_S
) -> ResultT:
    """Return what ``condition`` returns as soon as it is true. Raises `NotInTime`, which says ``what`` it was."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        began = time.thread_time()
        if result := condition():
            return result
        if time.monotonic() > deadline:
            raise NotInTime(f"{what if isinstance(what, str) else what()}: not within {within_s:g} s")
        pause.wait(max(LOOK_INTERVAL_S, LOOK_SHARE * (time.thread_time() - began)))
