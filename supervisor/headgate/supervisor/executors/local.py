"""Steps on this machine: a warm pool of worker processes, each running one step at a time.

A worker may have further steps, which it begins one after the other (`headgate.scheduling.bundles`). If the first one
turns out long, or is to be ended, those behind it are recalled: what the worker has not begun is returned.

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
from headgate.protocol.messages.worker import (
    BUNDLE_MAX,
    FromWorker,
    RunStep,
    Step,
    StepEnded,
    StepLoaded,
    StepsReturned,
    WorkerSettings,
)
from headgate.scheduling import bundles
from headgate.supervisor.backoff import Backoff
from headgate.supervisor.children.worker import (
    RESPAWN_WAIT_MAX_S,
    RESPAWN_WAIT_S,
    START_FAILURES_MAX,
    SpawnWorker,
    WorkerStarter,
)
from headgate.supervisor.executors import processes
from headgate.supervisor.executors.base import EndReason, ExecutorEvent, StepLost, StepQuery, StepReturned
from headgate.supervisor.executors.members import Ending, GivenStep, Member, names_of

log = structlog.get_logger(__name__)

WORKER_STEPS_MAX: Final = 1000  # then the worker is replaced, which bounds what users' code can leak
# For a worker to say which steps it has not begun. One that does not, because its step is in C code and keeps Python's
# lock, or because it is stopped, would hold up the steps of others for as long as that lasts: then it is killed.
RECALL_ANSWER_MAX_S: Final = 10.0
STEPS_A_LOOK: Final = 16  # that a worker has ended, between two looks at its memory while it has others to run
END_GRACE_S: Final = 10.0  # for a step's `finally` blocks, once it is told to end
STOPPED_S: Final = 10.0  # a worker stopped for longer is reported in the log

OnRecord = Callable[[Step | None, dict[str, Any]], object]
OnOutput = Callable[[Step | None, str], object]
OnBegun = Callable[[Step], object]


class LocalExecutor:
    """A pool of ``workers`` processes, each for ``steps_max`` steps. ``is_warm``: one is there before it is needed.

    ``memory_max_bytes`` is for one worker and all that it has started; None is no limit. ``load_timeout_s`` is for the
    DAG file of a step, from when its worker begins the step. ``on_record`` and ``on_output`` get the records and the
    output of a worker, and the step it runs, ``on_begun`` before that each step that begins. ``clock`` is that of
    ``now``.
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
        on_begun: OnBegun = lambda step: None,
        memory_max_bytes: int | None = None,
        load_timeout_s: float = float("inf"),
        end_grace_s: float = END_GRACE_S,
        steps_max: int | None = None,
        is_warm: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starter = WorkerStarter(selector, spawn, self, settings, clock)
        self._workers_max = workers
        self._settings = settings
        self._on_record = on_record
        self._on_output = on_output
        self._on_begun = on_begun
        self._memory_max_bytes = memory_max_bytes
        self._load_timeout_s = load_timeout_s
        self._end_grace_s = end_grace_s
        self._steps_max = steps_max
        self._is_warm = is_warm
        self._clock = clock
        self._members: dict[int, Member] = {}
        self._running: dict[str, Member] = {}
        self._waiting: deque[GivenStep] = deque()
        self._events: list[ExecutorEvent] = []
        self._early_deaths = Backoff(RESPAWN_WAIT_S, RESPAWN_WAIT_MAX_S)  # of workers that were ready and ran no step
        self._look_at = float("inf")
        self._oom_kills = processes.OomKills(clock, processes.LOOK_INTERVAL_S)
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
        taken = sum(member.is_leaving or member.step is not None for member in self._members.values())
        return max(0, self._workers_max - taken - len(self._waiting))

    def rooms(self) -> list[bundles.Room]:
        """Return what each worker that runs a step may be given beside it."""
        if self._is_draining or self._waiting:
            return []
        return [member.room for member in self._members.values() if member.step is not None]

    def submit(self, step: Step, expected_s: float | None = None) -> None:
        """Run a step. The caller submits no more steps than `room` and `rooms` allowed when it chose them."""
        # Not these themselves: they may have shrunk since, by a worker that could not be started.
        most = self._workers_max * BUNDLE_MAX
        assert len(self._running) + len(self._waiting) < most, "there is no room for a step"
        self._waiting.append(GivenStep(step, expected_s))
        self._assign()

    def end(self, token: str, why: EndReason, text: str) -> None:
        """End a step that still runs: ``text`` becomes the reason of its `StepLost`, unless its outcome comes first.

        A step that has ended is left alone. So is one that is being ended already, unless now a user ends it. One that
        its worker has not begun is returned, and nothing is done to the step that runs there.
        """
        for given in self._waiting:
            if given.step.token == token:
                self._waiting.remove(given)
                self._events.append(StepReturned(token) if why == "lost" else StepLost(token, text))
                return
        member = self._running.get(token)
        if member is None:
            return
        if len(member.given) == 1 and not member.recalls:
            self._end_first(member, Ending(why, text))
            return
        # The signal ends what the worker runs when it arrives. So first it has to have no other step.
        before = member.endings.get(token)
        if before is None or why == "user":
            member.endings[token] = Ending(why, text)
        if member.given[0].step.token == token:
            self._recall_to_end(member, member.endings[token])
        else:
            member.recall([token], self._answer_by())

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
            is_to_end = member.end_text is not None or member.ending is not None
            if member.load_text and not is_to_end and now >= member.worker.kill_at:
                member.is_late = member.is_leaving = True
            member.worker.tick(now)
            if now >= member.recall_at:
                member.is_long = True
                member.recall_rest(self._answer_by())
            if now >= member.answer_by:
                member.answer_by = float("inf")
                self._kill_for(member, f"the worker did not answer within {RECALL_ANSWER_MAX_S:g} s")
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
        times += [min(member.recall_at, member.answer_by) for member in self._members.values()]
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
        if isinstance(message, StepLoaded):
            self._end_loading(member)
        elif isinstance(message, StepEnded):
            marks.reach("executor.outcome_read")
            self._end_loading(member)
            self._early_deaths.succeed()
            self._events.append(message)
            self._free(member, is_fit=message.unfit is None)
            self._assign()
        elif isinstance(message, StepsReturned):
            self._take_back(member, message)
            self._assign()
        else:
            assert isinstance(message, Request), "the session refuses all else"
            assert not isinstance(message.query, LastEvent), "the session refuses it"
            assert member.step is not None, "only a step sends queries"
            self._events.append(StepQuery(member.step.token, message.id, message.query))

    def child_logged(self, pid: int, record: dict[str, Any]) -> None:
        """Pass a record on."""
        member = self._members[pid]
        # The worker may have begun its next step by now, and only the records say which one they are of.
        instance = record.get("task_instance_id")
        given = member.find(instance)
        if given is not None:
            self._say_begun(given)
            self._on_record(given.step, record)
        else:  # one that names another step comes from a process which that has left behind
            self._on_record(member.step if instance is None else None, record)

    def child_printed(self, pid: int, line: str) -> None:
        """Pass a line of output on."""
        member = self._members[pid]
        printing = None if member.printing is None else member.with_token(member.printing)
        self._on_output(member.step if printing is None else printing.step, line)

    def worker_prints(self, pid: int, token: str) -> None:
        """All output that follows is of this step: its worker has begun it."""
        member = self._members[pid]
        given = member.with_token(token)
        if given is not None:
            self._say_begun(given)
            member.printing = token

    def child_broke_protocol(self, pid: int, error: RemoteProtocolError) -> None:
        """Kill the worker. What it has done with its steps is not known."""
        self._members[pid].has_broken_protocol = True
        self._members[pid].worker.process.kill(f"it broke the protocol: {error}")

    def child_ended(self, pid: int, explanation: str) -> None:
        """Handle the end of a worker: only the step that it ran is lost."""
        member = self._members.pop(pid)
        if not member.worker.is_ready:
            self._starter.failed(pid, explanation)
            self._fail_waiting(explanation)
        elif member.step is not None:
            self._lose_steps(member, self._reason(member, explanation))
        elif not member.is_leaving:
            wait_s = 0.0 if member.steps else self._early_deaths.fail()
            self._starter.start_at = self._clock() + wait_s
            log.warning("an idle worker has ended", pid=pid, how=explanation, next_in_s=round(wait_s, 1))
        self._start_workers()

    # --- steps ------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Give waiting steps to free workers, and short ones to workers that run others."""
        while self._waiting and (member := self._place_for(self._waiting[0].expected_s)) is not None:
            self._give(member, self._waiting.popleft())
        self._start_workers()

    def _place_for(self, expected_s: float | None) -> Member | None:
        members = list(self._members.values())
        for member in members:
            if self._is_free(member):
                return member
        if expected_s is None:
            return None
        rooms = [member.room for member in members]
        best = bundles.most_room(rooms)
        return members[best] if best is not None and rooms[best].fits(expected_s) else None

    def _give(self, member: Member, given: GivenStep) -> None:
        try:
            member.worker.send(RunStep(given.step, is_behind=bool(member.given)))
        except LocalProtocolError as error:
            self._events.append(StepLost(given.step.token, f"the step cannot be sent to a worker: {error}"))
            return
        if member.given:
            marks.reach("bundle.submitted")
        else:
            marks.reach("executor.step_submitted")
        member.given.append(given)
        self._running[given.step.token] = member
        if len(member.given) == 1:
            self._begin_first(member)
        if len(self._running) == 1:
            self._look_at = self._clock() + processes.LOOK_INTERVAL_S

    def _begin_first(self, member: Member) -> None:
        """The worker begins the first of its steps now, if it has not before."""
        given = member.given[0]
        self._say_begun(given)
        member.since = self._clock()
        member.is_long = False
        member.oom_kills = self._oom_kills.known()
        timeout_s = self._load_timeout_s
        file = given.step.file
        member.load_text = f"the DAG file {file} took longer than {timeout_s:g} s to load (dag_parse_timeout_s)"
        member.worker.kill_by(member.since + timeout_s, member.load_text)
        if member.ending is not None:  # it began before its recall arrived
            self._recall_to_end(member, member.ending)

    def _say_begun(self, given: GivenStep) -> None:
        if not given.has_begun:
            given.has_begun = True
            self._on_begun(given.step)

    def _answer_by(self) -> float:
        return self._clock() + RECALL_ANSWER_MAX_S

    def _grace_s(self, why: EndReason) -> float:
        return self._end_grace_s + (self._settings.hook_timeout_s if why == "user" else 0.0)

    def _recall_to_end(self, member: Member, ending: Ending) -> None:
        """Have a worker return its other steps, so that the one that it runs can be ended."""
        member.recall_rest(self._answer_by())
        member.worker.kill_by(self._clock() + self._grace_s(ending.why), f"it did not answer a recall: {ending.text}")

    def _end_first(self, member: Member, ending: Ending) -> None:
        """End the step that a worker runs; it has no other."""
        if member.end_why == "user" or (member.end_why is not None and ending.why != "user"):
            return
        grace_s = self._grace_s(ending.why)
        if member.end_text is None:
            member.end_text = ending.text
            member.worker.spare()  # it may still load its file
        member.end_why = ending.why
        member.is_leaving = True
        member.worker.process.send_signal(signal.SIGUSR2 if ending.why == "user" else signal.SIGTERM)
        reason = f"its step did not end within {grace_s:g} s: {member.end_text}"
        member.worker.kill_by(self._clock() + grace_s, reason)

    def _take_back(self, member: Member, message: StepsReturned) -> None:
        """Return the steps that the worker will not begin, and end the one that had to wait for that."""
        member.take_back(message.tokens)
        for token in message.tokens:
            del self._running[token]
            member.endings.pop(token, None)
            self._events.append(StepReturned(token))
        if member.recalls:
            return
        if member.step is None:
            self._end_loading(member)  # of one of these, which was thought to have begun as the one before it had ended
            self._retire_if_old(member)
        elif member.ending is not None:
            self._end_first(member, member.endings.pop(member.step.token))

    def _lose_steps(self, member: Member, reason: str) -> None:
        """The worker is gone: the step that it ran is lost, and those behind that had not begun."""
        self._look_at = self._look_at if len(self._running) > len(member.given) else float("inf")
        for given in member.given:
            token = given.step.token
            del self._running[token]
            may_have_begun = given.has_begun or member.has_broken_protocol
            self._events.append(StepLost(token, reason) if may_have_begun else StepReturned(token))
        member.given.clear()

    def _end_loading(self, member: Member) -> None:
        """The file of a step has been loaded: there is no limit any more, unless the step is to end."""
        if member.load_text and not member.is_late:
            member.load_text = ""
            if member.end_text is None and member.ending is None:
                member.worker.spare()

    def _free(self, member: Member, *, is_fit: bool) -> None:
        """The first step of a worker has ended; those behind it do not begin if it has left the process unfit."""
        token = member.given.popleft().step.token
        del self._running[token]
        if member.endings.pop(token, None) is not None:
            member.worker.spare()  # it was to end, and has
        member.steps += 1
        if not self._running:
            self._look_at = float("inf")
        if not is_fit:
            member.retire()
            return
        self._retire_if_old(member)
        if member.given:
            self._begin_first(member)

    def _retire_if_old(self, member: Member) -> None:
        if member.is_leaving or (member.given and member.steps % STEPS_A_LOOK):
            return  # it was told to end, or was looked at a moment ago
        is_fat = processes.is_fat(member.worker.process, self._memory_max_bytes)
        member.is_old = member.is_old or is_fat or member.steps >= (self._steps_max or WORKER_STEPS_MAX)
        if member.is_old and not member.given and not member.recalls:
            member.retire()

    def _reason(self, member: Member, explanation: str) -> str:
        if member.limit_text:
            return member.limit_text
        if member.is_late:
            return member.load_text
        if member.ending is not None:
            return member.ending.text
        if member.end_text is not None:
            return member.end_text
        reason = f"the worker process {explanation}"
        if member.worker.process.returncode == -signal.SIGKILL and self._oom_kills.now() > member.oom_kills:
            reason += "; meanwhile the kernel has killed a process for want of memory, which is likely to be this one"
        return reason

    # --- workers ----------------------------------------------------------------------------------

    def _is_free(self, member: Member) -> bool:
        return member.step is None and not member.is_leaving and not member.recalls and member.worker.is_free

    def _wanted(self) -> int:
        """Return how many workers are missing: one for each waiting step, and one more, which warms up meanwhile."""
        if self._is_draining and not self._waiting:
            return 0
        idle = sum(member.step is None and not member.is_leaving for member in self._members.values())
        may_start = self._is_warm or self._starter.failures or self._early_deaths.failures
        spare = 1 if may_start and not self._is_draining else 0
        return min(len(self._waiting) + spare - idle, self._workers_max - len(self._members))

    def _start_workers(self) -> None:
        while self._wanted() > 0 and self._clock() >= self._starter.start_at:
            try:
                worker = self._starter.start()
            except OSError as error:
                self._fail_waiting(str(error))
                return
            self._members[worker.pid] = Member(worker)
            log.info("started a worker", pid=worker.pid)

    def _fail_waiting(self, why: str) -> None:
        """After too many starts that failed: report the waiting steps as lost."""
        if self._starter.failures >= START_FAILURES_MAX:
            for given in self._waiting:
                self._events.append(StepLost(given.step.token, f"no worker can be started: {why}"))
            self._waiting.clear()

    def _kill_for(self, member: Member, limit_text: str) -> None:
        member.limit_text = limit_text
        member.is_leaving = True
        member.worker.process.kill(limit_text)

    def _look(self, now: float) -> None:
        """Check the memory of busy workers, and whether one is stopped."""
        self._look_at = now + processes.LOOK_INTERVAL_S
        busy = {member.worker.pid: member for member in self._running.values()}
        for pid, use in processes.uses(busy.keys()).items():
            member = busy[pid]
            excess = processes.excess(use, self._memory_max_bytes)
            if excess and not member.limit_text:
                self._kill_for(member, f"the worker {excess}")
            if member.has_stood_for(STOPPED_S, now, is_stopped=use.is_stopped):
                log.warning("a worker is stopped (SIGSTOP), and its step with it", pid=pid, **names_of(member.step))
