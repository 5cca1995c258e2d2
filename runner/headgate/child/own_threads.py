"""Threads for calls that may hang: such a call keeps its thread until it returns, also if nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Args = TypeVarTuple("Args")


class OwnThreads:
    """At most ``threads_max`` threads in each run of trio, so that the rest of the process has its own."""

    def __init__(self, name: str, threads_max: int) -> None:
        self._threads_max = threads_max
        self._limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar(name)

    async def run(self, call: Callable[[*Args], T], *args: *Args) -> T:
        """Return what the call returns. If it is cancelled, the call is left to itself."""
        try:
            limiter = self._limiter.get()
        except LookupError:
            limiter = trio.CapacityLimiter(self._threads_max)
            self._limiter.set(limiter)
        return await trio.to_thread.run_sync(call, *args, abandon_on_cancel=True, limiter=limiter)
