"""The simulated executor: workers that take simulated time around the real `run_step`, and have their troubles.

It keeps to `headgate.supervisor.executors.base.Executor`, but where a scenario says otherwise: a worker whose link is
cut is told to be lost and answers all the same, another one answers twice. Nothing of it may do any harm. A worker may
say that a step was shorter than it was, so that others are given to wait behind one that turns out long.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import trio
from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks import records
from tests.proof.simulation.tasks.dags import KEY, SimulatedOperator, operator_of
from tests.proof.simulation.tasks.scenario import Leg, Task
from tests.proof.simulation.tasks.signals.plans import said_of
from tests.proof.simulation.tasks.signals.sensing import SimulatedSensor
from tests.proof.simulation.tasks.streams.handling import METHODS, state_text

from headgate.protocol.messages.queries import ElementRoom, EmitElements, EncodedValue, GetXCom, Response
from headgate.protocol.messages.steps import (
    StepDeferred,
    StepFailed,
    StepHandled,
    StepOutcome,
    StepSkipped,
    StepSucceeded,
)
from headgate.protocol.messages.worker import Step, StepEnded
from headgate.protocol.values import decode_value
from headgate.scheduling import bundles
from headgate.scheduling.bundles import Room
from headgate.store.ids import instance_name
from headgate.supervisor.executors.base import EndReason, ExecutorEvent, StepLost, StepQuery, StepReturned
from headgate.tasks.context import TaskStream, XComReader, make_context
from headgate.tasks.execution import NO_EVENT, Resumption, run_step
from headgate.tasks.maps.elements import hash_of_key

if TYPE_CHECKING:
    from tests.proof.simulation.tasks.world import TaskSupervisor

LATE_S = 1.7  # of an answer that comes late
TWICE_AFTER_S = 0.3
STUBBORN_S = 3.0  # until a worker that does not want to is stopped at last
STOPS_WITHIN_S = (0.0, 0.05, 0.5)
SHORT_S = (0.0, 0.03)  # that a worker may say a step took
RESUMED_TO_FAIL = -1  # the leg that is none of the author's
OUTCOMES = {
    StepSucceeded: "succeeded",
    StepSkipped: "skipped",
    StepFailed: "failed",
    StepDeferred: "deferred",
    StepHandled: "handled",
}


def outcome_name(outcome: StepOutcome) -> str:
    """Return the kind of an outcome."""
    return OUTCOMES[type(outcome)]


Operator = SimulatedOperator | SimulatedSensor


class Process:
    """A worker's process: the steps that it has, of which the first one runs, and what it may have besides.

    ``peers`` are those of its pool; they have numbers in the order in which they were started.
    """

    def __init__(self, number: int, peers: list[Process]) -> None:
        self.number = number
        self.peers = peers
        self.steps: deque[Worker] = deque()
        self.room = bundles.WHOLE
        self.takes_more = True

    def add(self, worker: Worker) -> None:
        """Take one more step."""
        self.steps.append(worker)
        self.room = bundles.NONE if worker.expected_s is None else self.room.less(worker.expected_s)


class Worker:
    """A step, and what becomes of it in its process."""

    def __init__(self, step: Step, expected_s: float | None, process: Process) -> None:
        self.step = step
        self.expected_s = expected_s
        self.process = process
        self.scope = trio.CancelScope()
        self.answers: dict[int, Response] = {}
        self.answered = trio.Event()
        self.end_text: str | None = None
        self.has_reported = False
        self.leg = Leg()


class SimulatedExecutor:
    """The workers of one supervisor."""

    def __init__(self, supervisor: TaskSupervisor, workers: int) -> None:
        self._supervisor = supervisor
        self._world = supervisor.task_world
        self._workers_max = workers
        self._rng = random.Random(f"{self._world.scenario.seed}/workers/{supervisor.number}")
        self._busy: dict[str, Worker] = {}
        self._all: list[Worker] = []
        self._processes: list[Process] = []  # that have a step
        self._beside: list[Process] = []  # the same of endless tasks
        self._started = itertools.count()
        self._events: list[ExecutorEvent] = []
        self._is_draining = False
        self._is_cut_off = False  # nobody hears of the workers any more

    # --- what the supervisor calls ----------------------------------------------------------------

    def room(self) -> int:
        """See `Executor`."""
        return 0 if self._is_draining else self._workers_max - len(self._processes)

    def endless_room(self) -> int:
        """See `Executor`."""
        return 0 if self._is_draining else self._world.scenario.endless_workers - len(self._beside)

    def rooms(self) -> list[Room]:
        """See `Executor`."""
        return [
            process.room if process.takes_more and not self._is_draining else bundles.NONE
            for process in self._processes
        ]

    def submit(self, step: Step, expected_s: float | None = None, *, is_endless: bool = False) -> None:
        """See `Executor`."""
        if self._is_cut_off:
            return  # whoever submits it is dead by now, and goes no further than this turn
        assert step.token not in self._busy, "the step runs already"
        peers = self._beside if is_endless else self._processes
        if is_endless or self.room() > 0:
            assert not is_endless or self.endless_room() > 0, "there is room for one"
            process = Process(next(self._started), peers)
            peers.append(process)
        else:
            # The steps of a dispatch in doubt come in another order than the one in which places were found for them,
            # so a step may have the worker of another, which has to wait then.
            best = bundles.most_room(self.rooms())
            fewest = min(self._processes, key=lambda process: len(process.steps))
            process = fewest if best is None else self._processes[best]
        worker = Worker(step, expected_s, process)
        self._busy[step.token] = worker
        process.add(worker)
        if len(process.steps) == 1:
            self._begin_first(process)

    def end(self, token: str, why: EndReason, text: str) -> None:
        """See `Executor`."""
        worker = self._busy.get(token)
        if worker is not None and worker is not worker.process.steps[0]:
            self._give_back(worker.process, [worker])
            return
        self._note(records.StepStopped(trio.current_time(), token, why))
        if worker is None or worker.end_text is not None:
            return
        worker.end_text = text
        self._recall(worker.process)
        self._world.nursery.start_soon(self._stop, worker)

    def answer(self, token: str, answer: Response) -> None:
        """See `Executor`."""
        worker = self._busy.get(token)
        if worker is None or answer.id in worker.answers:
            return
        worker.answers[answer.id] = answer
        if isinstance(answer.result, EncodedValue):
            value = answer.result.value
            told = None if value is None else str(decode_value(value))
            name = f"{worker.step.dag_id}/{worker.step.run_id}/{worker.leg.asks[answer.id - 1]}"
            self._note(records.StepAnswered(trio.current_time(), token, name, told))
        worker.answered.set()
        worker.answered = trio.Event()

    def events(self, now: float) -> Sequence[ExecutorEvent]:
        """See `Executor`."""
        events, self._events = self._events, []
        return events

    def wake_at(self) -> float:
        """See `Executor`."""
        return 0.0 if self._events else math.inf

    def drain(self, now: float) -> bool:
        """See `Executor`."""
        self._is_draining = True
        return not self._busy

    def close(self) -> None:
        """See `Executor`."""
        self._is_draining = True
        self.orphan(at_once=True)

    # --- what the world does ----------------------------------------------------------------------

    def orphan(self, *, at_once: bool) -> None:
        """The supervisor is gone: its workers die with it, or find out when they have something to say."""
        self._is_cut_off = True
        self._events.clear()
        self._busy.clear()
        self._processes.clear()
        self._beside.clear()
        if at_once:
            for worker in self._all:
                worker.scope.cancel()

    def kill_oldest(self) -> None:
        """The process dies that has been at its step for the longest time."""
        oldest = min((*self._processes, *self._beside), key=lambda process: process.number, default=None)
        if oldest is not None:
            self._lose(oldest.steps[0], "killed by signal 9")

    # --- a worker ---------------------------------------------------------------------------------

    def _note(self, record: Record) -> None:
        self._world.note(record)

    def _begin_first(self, process: Process) -> None:
        worker = process.steps[0]
        self._all.append(worker)
        self._world.nursery.start_soon(self._live, worker)
        self._world.nursery.start_soon(self._recall_late, worker)

    async def _recall_late(self, worker: Worker) -> None:
        """Recall what waits behind a step that turns out long."""
        await trio.sleep(bundles.RECALL_AFTER_S)
        if not worker.has_reported and not self._is_cut_off:
            self._recall(worker.process)

    def _recall(self, process: Process) -> None:
        """Have a process give back what it has not begun; it gets no more until the step that it runs has ended."""
        process.takes_more = False
        self._give_back(process, list(itertools.islice(process.steps, 1, None)))

    def _give_back(self, process: Process, workers: list[Worker]) -> None:
        for worker in workers:
            process.steps.remove(worker)
            self._tell(worker, StepReturned(worker.step.token), "returned")

    def _has_ended(self, process: Process, event: ExecutorEvent) -> None:
        """The first step of a process has ended: it begins the next one, or is gone, and gives back the others."""
        process.steps.popleft()
        if isinstance(event, StepLost):
            self._recall(process)
        if not process.steps:
            process.peers.remove(process)
            return
        times = [worker.expected_s for worker in process.steps]
        process.room, process.takes_more = bundles.WHOLE, True
        for expected_s in times:
            process.room = bundles.NONE if expected_s is None else process.room.less(expected_s)
        self._begin_first(process)

    def _tell(self, worker: Worker, event: ExecutorEvent, how: str) -> None:
        """Say something to the supervisor: it hears it in its next turn."""
        if self._is_cut_off:
            return
        is_end_of_first = not isinstance(event, StepQuery | StepReturned) and not worker.has_reported
        if not isinstance(event, StepQuery):
            self._busy.pop(worker.step.token, None)
            worker.has_reported = True
            self._note(records.StepTold(trio.current_time(), self._supervisor.number, worker.step.token, how))
        self._events.append(event)
        if is_end_of_first:
            self._has_ended(worker.process, event)
        self._supervisor.bell.ring()

    def _lose(self, worker: Worker, reason: str) -> None:
        worker.scope.cancel()
        self._gone(worker)
        if not worker.has_reported:
            self._tell(worker, StepLost(worker.step.token, worker.end_text or reason), "lost")

    async def _stop(self, worker: Worker) -> None:
        stubborn = worker.leg.trouble == "stubborn"
        await trio.sleep(STUBBORN_S if stubborn else self._rng.choice(STOPS_WITHIN_S))
        self._lose(worker, "stopped")

    async def _live(self, worker: Worker) -> None:
        try:
            with worker.scope:
                await self._work(worker)
        except Exception as error:
            self._world.broke("a worker", error)
        self._all.remove(worker)
        self._gone(worker)

    def _gone(self, worker: Worker) -> None:
        """A worker does nothing more for its step; this may be called twice."""

    async def _work(self, worker: Worker) -> None:
        step, begun_at = worker.step, trio.current_time()
        name = f"{step.dag_id}/{step.run_id}/{instance_name(step.task_id, step.map_index)}"
        plan = self._world.scenario.task(name)
        number = leg_number(step, plan)
        operator = operator_of(plan, name)
        worker.leg = leg = self._begin(step, operator, number)
        if leg.trouble == "dies_before":
            self._lose(worker, "killed by signal 11")
        read_xcom = await self._ask(worker)
        operator.emitted = await self._emit(worker, plan)
        await self._converse(worker, operator)
        await trio.sleep(leg.seconds / 2)
        if leg.trouble == "cut" and not worker.has_reported:
            self._tell(worker, StepLost(step.token, "its link broke"), "lost")
        await trio.sleep(leg.seconds / 2)
        if not self._world.has_task(name):
            outcome: StepOutcome = StepFailed(f"there is no task {name!r} any more")
        else:
            context = make_context(
                operator,
                run_id=step.run_id,
                try_number=step.try_number,
                read_xcom=read_xcom,
                stream=TaskStream.of(step.stream),
            )
            outcome = run_step(operator, context, _resumption(step), step.stream, emitted=operator.emitted)
        self._note(ran_record(step.token, operator, outcome))
        if leg.trouble == "dies_after":
            self._lose(worker, "exit code 1")
        await trio.sleep(LATE_S if leg.trouble in ("late", "cut") else 0.0)
        took_s = self._rng.choice((*SHORT_S, trio.current_time() - begun_at))
        self._tell(worker, StepEnded(step.token, outcome, took_s=took_s), "ended")
        if leg.trouble == "twice":
            await trio.sleep(TWICE_AFTER_S)
            self._tell(worker, StepEnded(step.token, outcome), "ended")

    def _begin(self, step: Step, operator: Operator, number: int) -> Leg:
        """Say that a step has begun; return what it does."""
        now, name, plan, operator.leg = trio.current_time(), operator.name, operator.plan, number
        by = self._supervisor.number
        self._note(records.StepBegan(now, by, step.token, name, step.try_number, number, serial_of(step)))
        if number == RESUMED_TO_FAIL:
            return Leg()
        part, stream = step.stream, plan.stream
        if step.next_method not in METHODS or part is None or stream is None:
            return plan.legs(step.try_number)[number]
        rows = tuple(event.id for event in part.events)
        numbers = tuple(int(decode_value(event.payload)["number"]) for event in part.events)
        left = state_text(part.state)
        self._note(records.StepGot(now, step.token, name, part.handled, rows, numbers, left, part.is_over))
        assert isinstance(operator, SimulatedOperator)
        operator.call = stream.call(self._world.count_call(name))
        return Leg("defer", stream.seconds, trouble=operator.call.trouble)

    async def _ask(self, worker: Worker) -> XComReader:
        """Ask for what the leg wants to know; return what reads the answers."""
        known: dict[str, bytes | None] = {}
        for number, task in enumerate(worker.leg.asks, start=1):
            self._tell(worker, StepQuery(worker.step.token, number, GetXCom(task, KEY)), "asked")
            while number not in worker.answers:
                await worker.answered.wait()
            answer = worker.answers[number]
            if not isinstance(answer.result, EncodedValue):
                raise RuntimeError(f"the answer to a query of {worker.step.task_id}: {answer}")
            known[task] = answer.result.value
        return lambda task_id, key, map_index=-1: known[task_id]

    async def _converse(self, worker: Worker, operator: Operator) -> None:
        """Do what the code of the step asks for beside that; nothing here."""

    async def _emit(self, worker: Worker, plan: Task) -> int:
        """Have elements stored before the end of the step, one by one; return how many the try has emitted."""
        leg, has_keys = worker.leg, plan.emits is not None and plan.emits.have_keys
        emitted = 0 if has_keys else worker.step.emitted
        early = [] if plan.emits is None else plan.emits.values(worker.step.try_number)[: plan.emits.early]
        for number, (position, value) in enumerate(list(enumerate(early))[emitted:], start=len(leg.asks) + 1):
            keys = (hash_of_key(str(value), "an element"),) if has_keys else ()
            query = EmitElements(position, (b"%d" % value,), keys)
            self._tell(worker, StepQuery(worker.step.token, number, query), "asked")
            while number not in worker.answers:
                await worker.answered.wait()
            if not isinstance(worker.answers[number].result, ElementRoom):
                return emitted  # the task is another's by now
            emitted = position + 1
            await trio.sleep(leg.seconds / 4)
        return emitted


def leg_number(step: Step, plan: Task) -> int:
    """Return which leg a step is; the handler of a stream belongs to the leg that has deferred with it."""
    if step.next_method is None:
        return 0
    if step.next_method in METHODS:
        return plan.stream_leg(step.try_number)
    if step.next_method != "resume":
        return RESUMED_TO_FAIL
    kwargs = decode_value(step.next_kwargs or b"{}")
    return int(kwargs["leg"])


def serial_of(step: Step) -> int:
    """Return what the event says that resumes a step; 0 where there is none."""
    payload = None if step.event is None else decode_value(step.event)
    return int(payload["serial"]) if isinstance(payload, dict) else 0


def ran_record(token: str, operator: Operator, outcome: StepOutcome) -> records.StepRan:
    """Return what the journal says of an outcome."""
    xcoms = tuple(sorted((xcom.key, str(decode_value(xcom.value))) for xcom in outcome.xcoms))
    skips = outcome.skips if isinstance(outcome, StepSucceeded) else ()
    may_retry = outcome.may_retry if isinstance(outcome, StepFailed) else True
    kind = outcome_name(outcome)
    ran = records.StepRan(
        *(trio.current_time(), token, operator.name, operator.leg, kind, may_retry, xcoms, skips),
        has_ended=operator.has_ended,
        reported=operator.reported,
        takes_no_more=operator.takes_no_more,
        appended=_appended(outcome),
        signals=() if isinstance(outcome, StepFailed) else tuple(map(said_of, outcome.signals)),
    )
    handled = outcome.handled
    if handled is None:
        return ran
    to, left = handled.event_id, state_text(handled.state)
    return msgspec.structs.replace(ran, handled_to=to, handled=handled.count, left=left)


def _appended(outcome: StepOutcome) -> tuple[str, ...]:
    appended = outcome.appended if isinstance(outcome, StepSucceeded | StepSkipped) else None
    return () if appended is None else tuple(str(decode_value(value)) for value in appended.values)


def _resumption(step: Step) -> Resumption | None:
    if step.next_method is None:
        return None
    return Resumption(step.next_method, step.next_kwargs or b"{}", NO_EVENT if step.event is None else step.event)
