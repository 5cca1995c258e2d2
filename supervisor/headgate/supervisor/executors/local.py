"""Steps on this machine: a warm pool of worker processes, each running one step at a time.

Everything is event driven: the workers' descriptors are on the supervisor's selector, and the outcomes are returned by
`LocalExecutor.events`. Whether a worker lives is asked of the kernel, not of the worker: its end is signalled by a
pidfd, and its use of memory is read from /proc.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from headgate.protocol import marks
from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError
from headgate.protocol.messages.queries import LastEvent, Request, Response
from headgate.protocol.messages.worker import FromWorker, RunStep, Step, StepEnded, StepLoaded, WorkerSettings
from headgate.supervisor.backoff import Backoff
from headgate.supervisor.children.worker import (
    RESPAWN_WAIT_MAX_S,
    RESPAWN_WAIT_S,
    START_FAILURES_MAX,
    SpawnWorker,
    Worker,
    WorkerStarter,
)
from headgate.supervisor.executors import processes
from headgate.supervisor.executors.base import EndReason, ExecutorEvent, StepLost, StepQuery

log = structlog.get_logger(__name__)

WORKER_STEPS_MAX: Final = 1000  # then the worker is replaced, which bounds what users' code can leak
END_GRACE_S: Final = 10.0  # for a step's `finally` blocks, once it is told to end
LOOK_INTERVAL_S: Final = 2.0  # between two looks at the memory of workers that run a step
STOPPED_S: Final = 10.0  # a worker stopped for longer is reported in the log
RETIRE_SHARE: Final = 0.5  # of the memory limit: an idle worker that holds more is replaced, before a step pays for it

OnRecord = Callable[[Step | None, dict[str, Any]], object]
OnOutput = Callable[[Step | None, str], object]


class _Member:
    """A worker of the pool, and the step it runs."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.step: Step | None = None
        self.steps = 0
        self.is_leaving = False  # it gets no more steps
        self.end_text: str | None = None  # why its step is to end
        self.end_why: EndReason | None = None
        self.load_text = ""  # that its DAG file took too long; '' if the file is loaded
        self.is_late = False  # it did
        self.limit_text = ""  # the limit for which we killed it
        self.stopped_since: float | None = None
        self.oom_kills = 0  # of the kernel until the step began


class LocalExecutor:
    """A pool of ``workers`` processes. Implements `headgate.supervisor.executors.base.Executor`.

    ``memory_max_bytes`` is for one worker and all that it has started; None is no limit. ``load_timeout_s`` is for the
    DAG file of a step, from when its worker gets the step. ``on_record`` and
    ``on_output`` get the records and the output of a worker, and the step it runs. ``clock`` is that of ``now``.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        spawn: SpawnWorker,
        *,
        workers: int,
        settings: WorkerSettings,
        on_record: OnRecord,
        on_output: OnOutput,
        memory_max_bytes: int | None = None,
        load_timeout_s: float = float("inf"),
        end_grace_s: float = END_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starter = WorkerStarter(selector, spawn, self, settings, clock)
        self._workers_max = workers
        self._settings = settings
        self._on_record = on_record
        self._on_output = on_output
        self._memory_max_bytes = memory_max_bytes
        self._load_timeout_s = load_timeout_s
        self._end_grace_s = end_grace_s
        self._clock = clock
        self._members: dict[int, _Member] = {}
        self._running: dict[str, _Member] = {}
        self._waiting: deque[Step] = deque()
        self._events: list[ExecutorEvent] = []
        self._early_deaths = Backoff(RESPAWN_WAIT_S, RESPAWN_WAIT_MAX_S)  # of workers that were ready and ran no step
        self._look_at = float("inf")
        self._is_draining = False
        self._start_workers()  # the first one, so that the first step finds it warm

    # --- called by the supervisor -----------------------------------------------------------------

    def room(self) -> int:
        """Return how many steps may be submitted now and would begin at once, or as soon as a worker has started."""
        if self._is_draining:
            return 0
        if self._starter.failures or self._early_deaths.failures:
            # It is not certain that another worker can be started: only those that exist count.
            there = sum(self._is_free(member) for member in self._members.values())
            return max(0, there - len(self._waiting))
        leaving = sum(member.is_leaving and member.step is None for member in self._members.values())
        return max(0, self._workers_max - len(self._running) - leaving - len(self._waiting))

    def submit(self, step: Step) -> None:
        """Run a step. The caller submits no more steps than `room` allowed when it chose them."""
        # Not `room` itself: it may have shrunk since, by a worker that could not be started.
        assert len(self._running) + len(self._waiting) < self._workers_max, "there is no room for a step"
        self._waiting.append(step)
        self._assign()

    def end(self, token: str, why: EndReason, text: str) -> None:
        """End a step that still runs: ``text`` becomes the reason of its `StepLost`, unless its outcome comes first.

        A step that has ended is left alone. So is one that is being ended already, unless now a user ends it.
        """
        for step in self._waiting:
            if step.token == token:
                self._waiting.remove(step)
                self._events.append(StepLost(token, text))
                return
        member = self._running.get(token)
        if member is None or member.end_why == "user" or (member.end_why is not None and why != "user"):
            return
        grace_s = self._end_grace_s + (self._settings.hook_timeout_s if why == "user" else 0.0)
        if member.end_text is None:
            member.end_text = text
            member.worker.spare()  # it may still load its file
        member.end_why = why
        member.is_leaving = True
        member.worker.process.send_signal(signal.SIGUSR2 if why == "user" else signal.SIGTERM)
        member.worker.kill_by(self._clock() + grace_s, f"its step did not end within {grace_s:g} s: {text}")

    def answer(self, token: str, answer: Response) -> None:
        """Answer a query of a step; dropped if the step has ended."""
        member = self._running.get(token)
        if member is None or not member.worker.is_open(answer.id):
            return
        try:
            member.worker.send(answer)
        except LocalProtocolError as error:
            member.worker.send(Response(answer.id, error=f"the answer cannot be sent: {error}"))

    def events(self, now: float) -> Sequence[ExecutorEvent]:
        """Return the events since the last call, in order."""
        for member in list(self._members.values()):
            if member.load_text and member.end_text is None and now >= member.worker.kill_at:
                member.is_late = member.is_leaving = True
            member.worker.tick(now)
        if now >= self._look_at:
            self._look(now)
        self._start_workers()
        self._assign()
        events, self._events = self._events, []
        return events

    def wake_at(self) -> float:
        """Return when `events` has something to do even if nothing happens, for example when a limit is reached."""
        if self._events:
            return 0.0
        times = [member.worker.kill_at for member in self._members.values()]
        times.append(self._look_at)
        if self._wanted() > 0:
            times.append(self._starter.start_at)
        return min(times)

    def drain(self, now: float) -> bool:
        """Take nothing more; return whether no step is running any more."""
        self._is_draining = True
        return not self._running and not self._waiting

    def close(self) -> None:
        """End all steps and processes. Nothing more is reported."""
        self._is_draining = True
        for member in self._members.values():
            member.worker.destroy()
        self._members.clear()
        self._running.clear()
        self._waiting.clear()

    def pids(self) -> list[int]:
        """Return the pids of the workers."""
        return [member.worker.pid for member in self._members.values()]

    # --- called by the workers (`WorkerOwner`) ----------------------------------------------------

    def worker_ready(self, pid: int) -> None:
        """A worker has started: it can be given a step."""
        self._starter.succeeded()
        self._assign()

    def child_said(self, pid: int, message: FromWorker) -> None:
        """Handle an outcome or a query."""
        member = self._members[pid]
        step = member.step
        if isinstance(message, StepLoaded):
            self._end_loading(member)
        elif isinstance(message, StepEnded):
            marks.reach("executor.outcome_read")
            self._end_loading(member)
            self._early_deaths.succeed()
            self._events.append(message)
            self._free(member)
            self._retire_if_old(member)
            self._assign()
        else:
            assert isinstance(message, Request), "the session refuses all else"
            assert not isinstance(message.query, LastEvent), "the session refuses it"
            assert step is not None, "only a step sends queries"
            self._events.append(StepQuery(step.token, message.id, message.query))

    def child_logged(self, pid: int, record: dict[str, Any]) -> None:
        """Pass a record on."""
        self._on_record(self._members[pid].step, record)

    def child_printed(self, pid: int, line: str) -> None:
        """Pass a line of output on."""
        self._on_output(self._members[pid].step, line)

    def child_broke_protocol(self, pid: int, error: RemoteProtocolError) -> None:
        """Kill the worker."""
        self._members[pid].worker.process.kill(f"it broke the protocol: {error}")

    def child_ended(self, pid: int, explanation: str) -> None:
        """Handle the end of a worker: only its step is lost."""
        member = self._members.pop(pid)
        if not member.worker.is_ready:
            self._starter.failed(pid, explanation)
            self._fail_waiting(explanation)
        elif member.step is not None:
            self._events.append(StepLost(member.step.token, self._reason(member, explanation)))
        elif not member.is_leaving:
            wait_s = 0.0 if member.steps else self._early_deaths.fail()
            self._starter.start_at = self._clock() + wait_s
            log.warning("an idle worker has ended", pid=pid, how=explanation, next_in_s=round(wait_s, 1))
        self._free(member)
        self._start_workers()

    # --- steps ------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Give waiting steps to free workers."""
        for member in self._members.values():
            if not self._waiting:
                break
            if self._is_free(member):
                self._give(member, self._waiting.popleft())
        self._start_workers()

    def _give(self, member: _Member, step: Step) -> None:
        try:
            member.worker.send(RunStep(step))
        except LocalProtocolError as error:
            self._events.append(StepLost(step.token, f"the step cannot be sent to a worker: {error}"))
            return
        marks.reach("executor.step_submitted")
        member.step = step
        member.oom_kills = processes.oom_kills()
        self._running[step.token] = member
        timeout_s = self._load_timeout_s
        member.load_text = f"the DAG file {step.file} took longer than {timeout_s:g} s to load (dag_parse_timeout_s)"
        member.worker.kill_by(self._clock() + timeout_s, member.load_text)
        if len(self._running) == 1:
            self._look_at = self._clock() + LOOK_INTERVAL_S

    def _end_loading(self, member: _Member) -> None:
        """The file of a step has been loaded: there is no limit any more, unless the step is to end."""
        if member.load_text and not member.is_late:
            member.load_text = ""
            if member.end_text is None:
                member.worker.spare()

    def _free(self, member: _Member) -> None:
        if member.step is not None:
            del self._running[member.step.token]
            member.step = None
            member.steps += 1
        if not self._running:
            self._look_at = float("inf")

    def _retire_if_old(self, member: _Member) -> None:
        if member.is_leaving:
            return  # it was told to end
        limit = self._memory_max_bytes
        use = None if limit is None else member.worker.process.statistics()
        is_fat = limit is not None and use is not None and use.rss_bytes > limit * RETIRE_SHARE
        if is_fat or member.steps >= WORKER_STEPS_MAX:
            member.is_leaving = True
            member.worker.retire()

    def _reason(self, member: _Member, explanation: str) -> str:
        if member.limit_text:
            return member.limit_text
        if member.is_late:
            return member.load_text
        if member.end_text is not None:
            return member.end_text
        reason = f"the worker process {explanation}"
        if member.worker.process.returncode == -signal.SIGKILL and processes.oom_kills() > member.oom_kills:
            reason += "; meanwhile the kernel has killed a process for want of memory, which is likely to be this one"
        return reason

    # --- workers ----------------------------------------------------------------------------------

    def _is_free(self, member: _Member) -> bool:
        return member.worker.is_free and not member.is_leaving and member.step is None

    def _wanted(self) -> int:
        """Return how many workers are missing: one for each waiting step, and one more, which warms up meanwhile."""
        if self._is_draining and not self._waiting:
            return 0
        idle = sum(member.step is None and not member.is_leaving for member in self._members.values())
        spare = 0 if self._is_draining else 1
        return min(len(self._waiting) + spare - idle, self._workers_max - len(self._members))

    def _start_workers(self) -> None:
        while self._wanted() > 0 and self._clock() >= self._starter.start_at:
            try:
                worker = self._starter.start()
            except OSError as error:
                self._fail_waiting(str(error))
                return
            self._members[worker.pid] = _Member(worker)
            log.info("started a worker", pid=worker.pid)

    def _fail_waiting(self, why: str) -> None:
        """After too many starts that failed: report the waiting steps as lost."""
        if self._starter.failures >= START_FAILURES_MAX:
            for step in self._waiting:
                self._events.append(StepLost(step.token, f"no worker can be started: {why}"))
            self._waiting.clear()

    def _look(self, now: float) -> None:
        """Check the memory of busy workers, and whether one is stopped."""
        self._look_at = now + LOOK_INTERVAL_S
        busy = {member.worker.pid: member for member in self._running.values()}
        for pid, use in processes.uses(busy.keys()).items():
            member = busy[pid]
            limit = self._memory_max_bytes
            if limit is not None and use.rss_bytes > limit and not member.limit_text:
                member.limit_text = (
                    f"the worker and what it has started used {use.rss_bytes / 2**20:,.0f} MiB of memory; "
                    f"the limit is {limit / 2**20:,.0f} MiB (worker_memory_max_mib)"
                )
                member.is_leaving = True
                member.worker.process.kill(member.limit_text)
            if not use.is_stopped:
                member.stopped_since = None
            elif member.stopped_since is None:
                member.stopped_since = now
            elif now - member.stopped_since >= STOPPED_S:
                log.warning("a worker is stopped (SIGSTOP), and its step with it", pid=pid, **_names(member.step))
                member.stopped_since = float("inf")  # it is reported once


def _names(step: Step | None) -> dict[str, object]:
    return {} if step is None else {"dag_id": step.dag_id, "task_id": step.task_id, "run_id": step.run_id}
