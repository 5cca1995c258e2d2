"""One worker for jobs that are not steps: it does one at a time, each within a limit of time.

A job that takes longer or needs too much memory, or that brings its worker down, has failed, with the place where it
was; the next job gets a new worker.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.protocol.messages.worker import FromWorker, ToWorker, WorkerSettings
from headgate.supervisor.children.worker import START_FAILURES_MAX, SpawnWorker, Worker, WorkerStarter
from headgate.supervisor.executors import processes

LINES_KEPT_MAX: Final = 200  # of the output of a job's worker, with its stacks
OUTPUT_CHARS_MAX: Final = 64 * 1024  # of records and output that are passed on, for one job

Job = TypeVar("Job")
Done = TypeVar("Done")


class SingleWorker(ABC, Generic[Job, Done]):
    """Does one job at a time. ``timeout_s`` is for one, from when its worker begins with it.

    ``memory_max_bytes`` is for the worker and all that it has started; None is no limit. ``on_record`` and
    ``on_output`` get the records and the output of a job, and the job, up to `OUTPUT_CHARS_MAX` for each; a subclass
    says how many were left out. A subclass puts what has come of a job into ``_done``.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        spawn: SpawnWorker,
        *,
        timeout_s: float,
        settings: WorkerSettings,
        on_record: Callable[[Job | None, dict[str, Any]], object],
        on_output: Callable[[Job | None, str], object],
        memory_max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starter = WorkerStarter(selector, spawn, self, settings, clock)
        self._timeout_s = timeout_s
        self._on_record = on_record
        self._on_output = on_output
        self._clock = clock
        self._worker: Worker | None = None
        self._job: Job | None = None
        self._is_sent = False
        self._memory_max_bytes = memory_max_bytes
        self._look_at = float("inf")  # at its memory, while a job needs a limit
        self._ended_for = ""  # the limit for which the worker of this job is killed
        self._is_retiring = False
        self._jobs = 0
        self._lines: deque[str] = deque(maxlen=LINES_KEPT_MAX)
        self._output_chars = 0  # of this job, passed on
        self._left_out = 0  # lines and records of this job
        self._done: list[Done] = []  # until `events`

    # --- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def _message(self, job: Job) -> ToWorker:
        """Return what asks a worker for a job."""

    @abstractmethod
    def _take(self, job: Job, message: FromWorker) -> bool:
        """Take a part of the answer; return whether it was the last."""

    @abstractmethod
    def _fail(self, job: Job, error: str, trace: str) -> None:
        """Have a job fail, whose worker has not answered, or not to the end."""

    @abstractmethod
    def _words(self) -> tuple[str, str, str]:
        """Return what a job is for its worker, what its worker has done with it, and what its limit is called."""

    @abstractmethod
    def _jobs_max(self) -> int:
        """Return after how many jobs the worker is replaced, as one that runs steps is."""

    def _note_left_out(self, job: Job, lines: int) -> None:
        """Say that so many lines and records of a job were not passed on."""

    def _begin(self, job: Job) -> None:
        assert self._job is None, "one at a time"
        self._job = job
        self._is_sent, self._ended_for = False, ""
        self._lines.clear()
        self._output_chars = self._left_out = 0
        self._go_on()

    # --- called by the supervisor -----------------------------------------------------------------

    def room(self) -> int:
        """Return how many jobs may be given to it now: one or none."""
        return 1 if self._job is None else 0

    def events(self, now: float) -> list[Done]:
        """Return what has come of jobs since the last call."""
        worker = self._worker
        if worker is not None:
            if self._is_sent and now >= worker.kill_at and not self._ended_for:
                does, _, limit = self._words()
                self._ended_for = f"it took longer than {self._timeout_s:g} s to {does} ({limit})"
            worker.tick(now)
            if now >= self._look_at:
                self._look(worker, now)
        self._go_on()
        done, self._done = self._done, []
        return done

    def wake_at(self) -> float:
        """Return when `events` has something to do even if nothing happens."""
        if self._done:
            return 0.0
        if self._worker is not None:
            return min(self._worker.kill_at, self._look_at)
        return float("inf") if self._job is None else self._starter.start_at

    def close(self) -> None:
        """End the worker."""
        self._job = None
        if self._worker is not None:
            self._worker.destroy()
            self._worker = None

    # --- called by the worker (`WorkerOwner`) -----------------------------------------------------

    def worker_ready(self, pid: int) -> None:
        """The worker has started."""
        self._starter.succeeded()
        self._go_on()

    def worker_prints(self, pid: int, token: str) -> None:
        """It runs no steps; what a job prints is read as it is."""

    def child_said(self, pid: int, message: FromWorker) -> None:
        """Take a part of an answer."""
        assert self._worker is not None
        assert self._job is not None, "the session refuses what answers nothing"
        if not self._take(self._job, message):
            return
        self._end_job(self._job)
        self._worker.kill_at = float("inf")
        self._jobs += 1
        if self._jobs >= self._jobs_max() or processes.is_fat(self._worker.process, self._memory_max_bytes):
            self._jobs = 0
            self._is_retiring = True
            self._worker.retire()

    def child_logged(self, pid: int, record: dict[str, Any]) -> None:
        """Pass a record on."""
        if self._has_room_for(sum(len(str(value)) for value in record.values())):
            self._on_record(self._job, record)

    def child_printed(self, pid: int, line: str) -> None:
        """Pass a line of output on."""
        self._lines.append(line)
        if self._has_room_for(len(line)):
            self._on_output(self._job, line)

    def child_broke_protocol(self, pid: int, error: RemoteProtocolError) -> None:
        """Kill the worker."""
        if self._worker is not None:
            self._worker.process.kill(f"it broke the protocol: {error}")

    def child_ended(self, pid: int, explanation: str) -> None:
        """Handle the end of the worker. If it was busy with a job, that is at fault."""
        assert self._worker is not None
        is_ready = self._worker.is_ready
        self._worker = None
        self._is_retiring = False
        job = self._job
        if not is_ready:
            self._starter.failed(pid, explanation)
            if self._starter.failures >= START_FAILURES_MAX and job is not None:
                self._end_job(job)
                self._fail(job, f"no worker can be started to {self._words()[0]} it: {explanation}", "")
        elif job is not None and self._is_sent:
            how = explanation.partition("; its last output")[0]
            error = self._ended_for or f"the process that {self._words()[1]} it {how}"
            trace = "\n".join(self._lines)[-ERROR_CHARS_MAX:].replace("\0", "\\x00")
            self._end_job(job)
            self._fail(job, error, trace)
        self._go_on()

    # --- inside -----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Start a worker if a job needs one, and send the job to it once it is ready."""
        if self._job is None or self._is_sent:
            return
        if self._worker is None:
            if self._clock() >= self._starter.start_at:
                with contextlib.suppress(OSError):  # logged, and tried again
                    self._worker = self._starter.start()
        elif self._worker.is_free and not self._is_retiring:
            self._is_sent = True
            job = self._job
            try:
                self._worker.send(self._message(job))
            except LocalProtocolError as error:
                self._end_job(job)
                self._fail(job, f"it cannot be sent to a worker: {error}", "")
                return
            now = self._clock()
            self._worker.kill_by(now + self._timeout_s, f"a job takes too long: {self._words()[2]}")
            if self._memory_max_bytes is not None:
                self._look_at = now + processes.LOOK_INTERVAL_S

    def _look(self, worker: Worker, now: float) -> None:
        """Kill a worker that uses too much memory for its job."""
        self._look_at = now + processes.LOOK_INTERVAL_S
        for use in processes.uses([worker.pid]).values():
            excess = processes.excess(use, self._memory_max_bytes)
            if excess and not self._ended_for:
                self._ended_for = f"the process that {self._words()[1]} it {excess}"
                worker.process.kill(self._ended_for)

    def _has_room_for(self, chars: int) -> bool:
        self._output_chars += chars
        if self._output_chars > OUTPUT_CHARS_MAX:
            self._left_out += 1
        return self._output_chars <= OUTPUT_CHARS_MAX

    def _end_job(self, job: Job) -> None:
        if self._left_out:
            self._note_left_out(job, self._left_out)
        self._job = None
        self._is_sent, self._look_at = False, float("inf")
