"""The thread that has the database: it does what the threads of calls ask for, and wakes those that listen.

Sends that wait at the same time are committed together: they have dedups, so each may be repeated, and if one of them
is refused each is done alone.

The beginning and the end of an outage of the database are logged once. While it lasts, the thread itself looks whether
it is over, because those who have asked may ask no more.

Between its jobs it waits for bells and notifications, as a client does (`headgate.client.waiting`). A listener joins
before it looks, so what is committed after its look finds it here. One statement says which keys have moved.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from headgate.client.waiting import CHECKS_S
from headgate.protocol.messages.signals import SENDS_MAX, SentSignal
from headgate.signal_server.health import Health
from headgate.store.db.transaction import Database
from headgate.store.errors import DATABASE_UNUSABLE, DatabaseReplaced, RowsRefused, ValueRefused, described
from headgate.store.signal_verbs import SignalVerbs
from headgate.store.signals import reading, sending
from headgate.store.signals.sending import NewSignal
from headgate.supervisor.metrics.asking import Loop

log = structlog.get_logger(__name__)

JOBS_A_LOOK_MAX = 100  # jobs that are done before those that listen are looked after
RETRY_S = 1.0  # after the database could not be used
PROBE_SHARE = 4  # a look whether it is back that took long is followed by a pause so many times as long
FRESH_S = 5.0  # whoever asks how it is hears of a database that was used within so long
DUTY = "signals"  # the only one that this process has

Result = TypeVar("Result")
Job = Callable[[SignalVerbs], Any]


class Stopping(Exception):
    """The server is stopping; what was asked for may have been done."""

    def __init__(self) -> None:
        super().__init__("the server of signals is stopping")


class TooManyListeners(Exception):
    """So many listen that one more is refused."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit:,} listen already, which is the limit")


class Waiter:
    """One who listens: it has seen the versions of its key up to ``seen``."""

    def __init__(self, namespace: str, key: str) -> None:
        self.address = (namespace, key)
        self.key_id: int | None = None  # none while nobody has sent under the key
        self.seen = 0
        self._is_woken = threading.Event()
        self._error: Exception | None = None

    def wake(self, error: Exception | None = None) -> None:
        """End `wait`; with an error for good."""
        self._error = self._error or error
        self._is_woken.set()

    def wait(self) -> None:
        """Wait until there may be more, or there was since the last call. Raises what it was woken with."""
        self._is_woken.wait()
        self._is_woken.clear()
        if self._error is not None:
            raise self._error


class _Sends:
    """The signals of one call, and its answer."""

    def __init__(self, signals: Sequence[NewSignal]) -> None:
        self.signals = signals
        self.answer: Future[list[SentSignal]] = Future()


class StoreThread:
    """Runs verbs for other threads on one connection. There are no more jobs than threads that wait for them."""

    def __init__(
        self,
        database: Database,
        *,
        listeners_max: int,
        failed: Callable[[], None],
        health: Health | None = None,
    ) -> None:
        """``failed`` is called in the thread if it ends by an error, which `close` raises then."""
        self.loop = Loop(self._wake, "the thread that has the database")  # it answers those who ask how it is
        self._health = Health() if health is None else health
        self._database = database
        self._kind = database.engine.dialect.name
        self._verbs = SignalVerbs(database)
        self._listeners_max = listeners_max
        self._failed = failed
        self._lock = threading.Lock()  # of the next four
        self._jobs: deque[_Sends | tuple[Job, Future[Any]]] = deque()
        self._waiters: set[Waiter] = set()
        self._is_closed = False
        self._is_refusing = False
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_due = False
        self._is_listening = False
        self._checks = 0
        self._check_at = 0.0
        self._probe_at = 0.0
        self._used_at = -math.inf
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="signal store")
        self._thread.start()

    # --- of the threads of calls ---

    def send(self, signals: Sequence[NewSignal]) -> list[SentSignal]:
        """Send signals in one transaction. Raises as the verb does, and `Stopping`."""
        sending.check_count(len(signals))
        sends = _Sends(signals)
        self._put(sends)
        return sends.answer.result()

    def call(self, verb: Callable[[SignalVerbs], Result]) -> Result:
        """Return what a verb that reads returns. Raises as it does, and `Stopping`."""
        answer: Future[Result] = Future()
        self._put((verb, answer))
        return answer.result()

    @contextmanager
    def joined(self, waiter: Waiter) -> Generator[None]:
        """Wake one who listens in the block. Raises `TooManyListeners` and `Stopping`."""
        with self._lock:
            if self._is_refusing:
                raise Stopping
            if len(self._waiters) >= self._listeners_max:
                raise TooManyListeners(self._listeners_max)
            self._waiters.add(waiter)
        try:
            yield
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def end_listeners(self) -> None:
        """Have all who listen end with `Stopping`, and let nobody join any more."""
        with self._lock:
            self._is_refusing = True
        self._wake_all(Stopping())

    def close(self) -> None:
        """Do the jobs that there are, and end. Raises what the thread has failed with. A second call does nothing."""
        self.end_listeners()
        with self._lock:
            if self._wakes < 0:
                return
            self._is_closed = True
            self._ring()
        self._thread.join()
        with self._lock:
            os.close(self._wakes)
            self._wakes = -1
        if self._error is not None:
            raise self._error

    def _put(self, job: _Sends | tuple[Job, Future[Any]]) -> None:
        with self._lock:
            if self._is_closed:
                raise Stopping
            self._jobs.append(job)
            self._ring()

    def _wake(self) -> None:
        with self._lock:
            if self._wakes >= 0:
                self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it has rung often enough
            os.eventfd_write(self._wakes, 1)

    # --- of the thread itself ---

    def _run(self) -> None:
        try:
            while self._goes_on():
                self.loop.turn_began_at = time.monotonic()
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wakes)
                self._look_after_listeners()  # before the jobs: among these are first looks, which must miss nothing
                self._do_jobs()
                self._probe()
                if self.loop.is_asked:
                    self.loop.answer(self._health.report(self._kind, len(self._waiters), self._listeners_max))
                self.loop.turn_began_at = None
                self._wait()
        except BaseException as error:
            self._error = error
            log.error("the server of signals cannot go on", error=described(error))
        finally:
            self._end()

    def _goes_on(self) -> bool:
        with self._lock:
            return bool(self._jobs) or not self._is_closed

    def _end(self) -> None:
        with self._lock:
            self._is_closed = self._is_refusing = True
            left, self._jobs = list(self._jobs), deque()
        for job in left:
            (job.answer if isinstance(job, _Sends) else job[1]).set_exception(Stopping())
        self._wake_all(Stopping())
        self._database.close()
        if self._error is not None:
            self._failed()

    def _do_jobs(self) -> None:
        for _ in range(JOBS_A_LOOK_MAX):
            job = self._next_job()
            if job is None:
                return
            if isinstance(job, list):
                self._send(job)
            else:
                verb, answer = job
                self._do(answer, partial(verb, self._verbs))

    def _next_job(self) -> list[_Sends] | tuple[Job, Future[Any]] | None:
        """Take the oldest job; sends together with those behind them that fit into one transaction."""
        with self._lock:
            if not self._jobs:
                return None
            oldest = self._jobs.popleft()
            if not isinstance(oldest, _Sends):
                return oldest
            group = [oldest]
            room = SENDS_MAX - len(oldest.signals)
            while self._jobs and isinstance(sends := self._jobs[0], _Sends) and len(sends.signals) <= room:
                group.append(sends)
                room -= len(sends.signals)
                self._jobs.popleft()
            return group

    def _send(self, group: list[_Sends]) -> None:
        if len(group) > 1:
            together: Future[list[SentSignal]] = Future()
            together_send = partial(self._verbs.send, [one for sends in group for one in sends.signals])
            self._do(together, together_send, writes=True)
            if together.exception() is None:
                sent = iter(together.result())
                for sends in group:
                    sends.answer.set_result([next(sent) for _ in sends.signals])
                self._is_due = True
                return
            if not isinstance(together.exception(), ValueRefused | RowsRefused):
                for sends in group:
                    sends.answer.set_exception(together.exception())
                return
            # One of them is to blame: each is done alone.
        for sends in group:
            self._do(sends.answer, partial(self._verbs.send, sends.signals), writes=True)
        self._is_due = True  # nobody reports what this connection has committed

    def _do(self, answer: Future[Any], verb: Callable[[], Any], *, writes: bool = False) -> None:
        try:
            result = verb()
        except Exception as error:
            if isinstance(error, DATABASE_UNUSABLE):
                self._failed_at(error)
            answer.set_exception(error)
            if isinstance(error, DatabaseReplaced):
                raise  # nothing more can be stored by this process
        else:
            if writes:
                self._succeeded()
            answer.set_result(result)

    # --- an outage of the database ---

    def _failed_at(self, error: Exception, *, took_s: float = 0.0) -> None:
        pause_s = max(RETRY_S, PROBE_SHARE * took_s)
        now = time.monotonic()
        self._probe_at = now + pause_s
        self._health.outage.failed(DUTY, error, now, pause_s)

    def _succeeded(self) -> None:
        """Something was written: what is only read may be there although nothing can be sent."""
        self._used_at = time.monotonic()
        self._health.outage.succeeded(DUTY, self._used_at)

    def _is_away(self) -> bool:
        return self._health.outage.away_s(time.monotonic()) > 0

    def _probe(self) -> None:
        """Look whether an outage is over, or, if somebody asks how it is, whether one has begun."""
        began_at = time.monotonic()
        if self._is_away():
            if began_at < self._probe_at:
                return
        elif not self.loop.is_asked or began_at < self._used_at + FRESH_S:
            return
        try:
            with self._database.writing() as tx:
                tx.now  # noqa: B018 - PostgreSQL is asked nothing before the first statement
        except DATABASE_UNUSABLE as error:
            self._failed_at(error, took_s=time.monotonic() - began_at)
        else:
            self._succeeded()

    # --- those that listen ---

    def _look_after_listeners(self) -> None:
        with self._lock:
            waiters = list(self._waiters)
        self._is_listening = False
        if not waiters:
            return
        try:
            if self._database.listen_for("signals"):
                self._is_due = True
                self._checks = 0
            if self._is_due or time.monotonic() >= self._check_at:
                self._look(waiters)
            self._is_listening = True
        except DATABASE_UNUSABLE as error:
            self._failed_at(error)
            self._wake_all(error)

    def _look(self, waiters: list[Waiter]) -> None:
        """Wake those whose keys have newer versions."""
        with self._database.reading() as tx:
            newest = reading.newest_versions(tx, {waiter.address for waiter in waiters})
        for waiter in waiters:
            if newest.get(waiter.address, 0) > waiter.seen:
                waiter.wake()
        self._is_due = False
        self._check_at = time.monotonic() + CHECKS_S[self._checks]
        self._checks = min(self._checks + 1, len(CHECKS_S) - 1)

    def _wait(self) -> None:
        with self._lock:
            if self._jobs or self._is_closed:
                return
            has_waiters = bool(self._waiters)
        if self._is_due and has_waiters and self._is_listening:
            return
        now = time.monotonic()
        probe_in_s = max(0.0, self._probe_at - now) if self._is_away() else math.inf
        if not self._is_listening:
            left_s = min(RETRY_S if has_waiters else math.inf, probe_in_s)
            ready = select.poll()
            ready.register(self._wakes, select.POLLIN)
            ready.poll(None if math.isinf(left_s) else math.ceil(left_s * 1000))
            return
        left_s = min(max(0.0, self._check_at - now), probe_in_s)
        try:
            if self._database.listen_for("signals"):  # a job has lost the connection
                self._is_due = True
            elif self._database.wait_for("signals", left_s, self._concerns_anyone, self._wakes):
                self._is_due = True
                self._checks = 0
        except DATABASE_UNUSABLE as error:
            self._failed_at(error)
            self._wake_all(error)

    def _concerns_anyone(self, key_id: int) -> bool:
        with self._lock:
            return any(waiter.key_id in (None, key_id) for waiter in self._waiters)

    def _wake_all(self, error: Exception) -> None:
        with self._lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake(error)
