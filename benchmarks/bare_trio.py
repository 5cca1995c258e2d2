"""Cost of many waiting generators in trio alone, printed as JSON by a process that does nothing else."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator

import trio

from benchmarks.kernel import pss_kb


class _Waiting:
    """Counts the generators that wait."""

    def __init__(self, wanted: int) -> None:
        self.left = wanted
        self.all_there = trio.Event()

    async def forever(self) -> AsyncIterator[None]:
        self.left -= 1
        if not self.left:
            self.all_there.set()
        await trio.sleep_forever()
        yield


async def _consume(waiting: _Waiting) -> None:
    async for _ in waiting.forever():
        pass


async def _start(count: int) -> None:
    before_kb = pss_kb(os.getpid())
    begun = time.monotonic()
    waiting = _Waiting(count)
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(_consume, waiting)
        await waiting.all_there.wait()
        took_s = time.monotonic() - begun
        memory_kb = pss_kb(os.getpid()) - before_kb
        print(
            json.dumps(
                {
                    "to the last one running": took_s,
                    "KB each": memory_kb / count,
                    "the whole process": (before_kb + memory_kb) / 1024,
                }
            )
        )
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_start, int(sys.argv[1]))
