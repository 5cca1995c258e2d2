"""A trio loop in its own thread that runs one function at a time, so that a blocked loop fails its test."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import structlog
import trio

from headgate.runner.watchdog import Watchdog
from headgate.testing.clock import SkippingClock
from headgate.testing.failures import LoopBlocked, Misbehaved

REAL_S_MAX = 60.0  # for one step of a test; skipped time costs next to nothing
BLOCKED_S_MAX = 3.0  # a loop that is still blocked after this is abandoned with its thread
ABANDONED_WAIT_S = 0.5  # for a loop that may be blocked, or full of triggers that do not end
LOOK_INTERVAL_S = 0.05  # between two checks whether the loop is blocked
# Threads of loops that were given up: what they still log is not about the test that runs now.
_given_up: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

_T = TypeVar("_T")
_State = TypeVar("_State")

Records = list[dict[str, Any]]


class TrialLoop(Generic[_State]):
    """Opens an async context manager in its own loop, and runs functions on the object it yields.

    Not thread-safe. ``records`` is the list in which the log of the loop is collected.
    """

    def __init__(
        self, open_state: Callable[[], Any], *, clock: SkippingClock, blocked_after_s: float, records: Records
    ):
        self._open_state = open_state
        self._clock = clock
        self._blocked_after_s = blocked_after_s
        self._records = records
        self._jobs_in: trio.MemorySendChannel[_Job[_State]]
        self._token: trio.lowlevel.TrioToken
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._job: _Job[_State] | None = None
        self._others: set[threading.Thread] = set()  # that were there before its own
        # A daemon, so that a thread that is blocked for ever does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="headgate trial loop", daemon=True)

    def start(self) -> None:
        """Start the loop; return when it is ready. Raises exceptions of opening the context."""
        self._others = set(threading.enumerate())
        self._thread.start()
        self._wait(self._ready, "the loop of the test does not start")

    def call(
        self, function: Callable[[_State], Awaitable[_T]], *, if_endless: str = "this step of the test does not end"
    ) -> _T:
        """Run a function in the loop and return what it returns.

        Raises its exceptions, `LoopBlocked` if a task blocked the loop for longer than ``blocked_after_s``, and
        `Misbehaved` with the text ``if_endless`` if it takes longer than `REAL_S_MAX`.
        """
        job: _Job[_State] = _Job(function)
        self._job = job
        self._token.run_sync_soon(self._jobs_in.send_nowait, job)
        result: _T = self._wait(job.done, if_endless)
        return result

    def close(self) -> None:
        """Leave the context and end the loop. Raises `LoopBlocked`, or exceptions of leaving it."""
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._job = _Job(None, ended)
        self._token.run_sync_soon(self._jobs_in.close)
        self._wait(ended, "the loop of the test does not end")
        self._thread.join()

    def abandon(self) -> None:
        """Ask the loop to end, and do not wait long: a failure is being reported."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._jobs_in.close)
        self._thread.join(ABANDONED_WAIT_S)
        _given_up.update(set(threading.enumerate()) - self._others)

    # --- in the caller's thread -------------------------------------------------------------------

    def _wait(self, future: concurrent.futures.Future[Any], if_endless: str) -> Any:
        deadline = time.monotonic() + REAL_S_MAX
        while True:
            # A short block that is over by now is found, too.
            finished = concurrent.futures.wait((future,), timeout=LOOK_INTERVAL_S).done
            blocked = self._blocked()
            if blocked is not None and (finished or blocked["since"] + BLOCKED_S_MAX < time.monotonic()):
                raise LoopBlocked(_description(blocked))
            if finished:
                return future.result()
            if time.monotonic() > deadline:
                last = self._records[-1] if self._records else {}
                logged = f"; the last that it logged: {last['event']}: {last.get('reason', '')}" if last else ""
                raise Misbehaved(f"{if_endless}: not within {REAL_S_MAX:g} s of real time{logged}".rstrip(": "))

    def _blocked(self) -> dict[str, Any] | None:
        """Return the log record of the first step that blocked the loop too long."""
        for record in self._records:
            if record.get("event") in ("a trigger blocks the loop", "the loop is blocked"):
                return record
        return None

    # --- in the loop's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._main, clock=self._clock, strict_exception_groups=True)
        except BaseException as exc:  # raised in the thread that waits
            error = exc
        for future in (self._ready, None if self._job is None else self._job.done):
            if future is not None and not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._jobs_in, jobs = trio.open_memory_channel[_Job[_State]](1)
        with Watchdog(blocked_after_s=self._blocked_after_s):
            async with self._open_state() as state:
                self._ready.set_result(None)
                async for job in jobs:
                    assert job.function is not None
                    try:
                        result = await job.function(state)
                    except Exception as error:
                        job.done.set_exception(error)
                    else:
                        job.done.set_result(result)


class _Job(Generic[_State]):
    def __init__(
        self,
        function: Callable[[_State], Awaitable[Any]] | None,
        done: concurrent.futures.Future[Any] | None = None,
    ) -> None:
        self.function = function
        self.done: concurrent.futures.Future[Any] = done or concurrent.futures.Future()


@contextmanager
def collected_log() -> Generator[Records]:
    """Collect the records logged through structlog, instead of printing them."""
    records: Records = []

    def collect(_logger: object, method: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if threading.current_thread() in _given_up:
            raise structlog.DropEvent
        records.append({**record, "log_level": method, "since": time.monotonic() - record.get("blocked_s", 0.0)})
        raise structlog.DropEvent

    # In place, because existing loggers refer to this list.
    processors = structlog.get_config()["processors"]
    before = list(processors)
    processors[:] = [structlog.processors.format_exc_info, collect]
    try:
        yield records
    finally:
        processors[:] = before


def _description(record: dict[str, Any]) -> str:
    return f"{record['event']} ({record['blocked_s']:g} s): {record['at']}\n    {record['line']}\n{record['stack']}"
