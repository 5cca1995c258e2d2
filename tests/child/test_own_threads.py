"""Calls that hang keep threads of their own, and never those of the rest."""

from __future__ import annotations

import threading

import trio
from trio.testing import wait_all_tasks_blocked

from headgate.child.own_threads import OwnThreads


async def test_calls_that_hang_take_no_thread_of_others_and_are_limited() -> None:
    threads, ends, begun = OwnThreads("test", 2), threading.Event(), threading.Semaphore(0)

    def hang() -> str:
        begun.release()
        assert ends.wait(30)
        return "ended"

    others = trio.to_thread.current_default_thread_limiter()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(threads.run, hang)
        for _ in range(2):
            await trio.to_thread.run_sync(begun.acquire)
        await wait_all_tasks_blocked()
        assert not begun.acquire(blocking=False), "the others wait for a thread"
        assert others.borrowed_tokens == 0
        nursery.cancel_scope.cancel()
    with trio.move_on_after(0) as scope:
        await threads.run(hang)
    assert scope.cancelled_caught, "those that were cancelled keep their threads"
    ends.set()
    assert await threads.run(hang) == "ended"
