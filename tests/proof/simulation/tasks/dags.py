"""What users wrote, in the simulation of tasks: one operator and one trigger, which do what the scenario says."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from tests.proof.simulation.tasks import records
from tests.proof.simulation.tasks.maps.plans import LIST_KEY, index_of, list_length
from tests.proof.simulation.tasks.scenario import Dag, Task
from tests.proof.simulation.tasks.signals.rules.plans import OfCall
from tests.proof.simulation.tasks.signals.sensing import SimulatedSensor
from tests.proof.simulation.tasks.streams.handling import BEGIN, TAKES_ONE, StreamOperator
from tests.proof.simulation.tasks.streams.source import CLASSPATH as OF_SOURCE
from tests.proof.simulation.triggers import in_runner

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.task_streams import HANDLER_METHOD
from headgate.protocol.values import encode_value
from headgate.signals import SignalAction, SignalVersion
from headgate.tasks import DAG, Context, StartTriggerArgs, TaskFailed, TaskSkipped
from headgate.tasks.maps.worklists import Appends
from headgate.triggers.base import BaseTrigger, TaskFailedEvent, TaskSkippedEvent, TaskSuccessEvent, TriggerEvent

if TYPE_CHECKING:
    from tests.proof.simulation.tasks.world import TaskWorld

KEY = "value"  # of the one XCom of each task
EVENTS = 3  # of a trigger that fires several


class PlannedFailure(Exception):
    """What users' code raises because its plan says so."""


def pushed(task: str, try_number: int, leg: int) -> str:
    """Return what a step leaves for others, or a trigger for its task."""
    return f"{task} try {try_number} leg {leg}"


class SimulatedOperator(StreamOperator):
    """One task. ``name`` is that of the task in its run, ``dag/run/task``."""

    def __init__(self, plan: Task, name: str = "", dag: DAG | None = None) -> None:
        options: dict[str, Any] = {
            "retries": plan.retries,
            "retry_delay": timedelta(seconds=plan.retry_delay_s),
            "execution_timeout": None
            if plan.execution_timeout_s is None
            else timedelta(seconds=plan.execution_timeout_s),
            "pool": plan.pool,
            "pool_slots": plan.pool_slots,
            "priority_weight": plan.priority,
            "trigger_rule": plan.rule,
        }
        if plan.ruled is not None:
            options |= plan.ruled.options()
        if plan.endless:
            options["endless"] = True
        if plan.starts_in_trigger:
            options["start_from_trigger"] = True
            options["start_trigger_args"] = _start(plan, f"{'' if dag is None else dag.dag_id}/*/{plan.name}")
        super().__init__(task_id=plan.name, dag=dag, **options)
        self.plan = plan
        self.name = name
        self.emits = plan.emits is not None
        self.emitted = 0  # before its outcome

    def execute(self, context: Context) -> None:
        """Run the first leg."""
        self.run_leg(context, 0)

    def resume(self, context: Context, event: Any, leg: int) -> None:
        """Run the leg after a deferral."""
        self.run_leg(context, leg)

    def run_leg(self, context: Context, number: int) -> None:
        """See the base class."""
        self.leg = number
        try_number = context["try_number"]
        leg = self.plan.legs(try_number)[number]
        for task in leg.asks:
            context["ti"].xcom_pull(task, KEY)
        if self.plan.leaves is not None and leg.end == "return":
            context["ti"].xcom_push(LIST_KEY, list(range(list_length(self.plan.leaves, try_number))))
        if self.plan.signals is not None:
            self.plan.signals.send_with_outcome(number)
        if leg.pushes:
            context["ti"].xcom_push(KEY, pushed(self.name, try_number, number))
        mapped, end = self.plan.mapped, leg.end
        if mapped is not None and end != "defer":
            end = mapped.end_at(index_of(self.name), try_number) or end
            self._append(context, try_number)
        if self.plan.emits is not None and end == "return":
            for value in self.plan.emits.values(try_number)[self.emitted :]:
                self.emit(value, key=str(value) if self.plan.emits.have_keys else None)
        match end:
            case "fail":
                raise PlannedFailure("as planned")
            case "give_up":
                raise TaskFailed("for good, as planned")
            case "skip":
                raise TaskSkipped("as planned")
            case "branch":
                self.skips = set(leg.skips)
            case "defer" if leg.streams:
                self.begin_stream()
            case "defer":
                assert leg.wait is not None
                self.defer(
                    trigger=SimulatedWait(self.name, try_number, number),
                    method_name="resume",
                    kwargs={"leg": number + 1},
                    timeout=None if leg.wait.timeout_s is None else timedelta(seconds=leg.wait.timeout_s),
                )
            case "return":
                pass

    def _append(self, context: Context, try_number: int) -> None:
        """Append what the plan says to the worklist over which the task is expanded."""
        worklist = None if self.plan.mapped is None else self.plan.mapped.worklist
        if worklist is not None:
            context["ti"].take_appends(Appends(worklist.to, worklist.room, frozenset()))
            for number, key in enumerate(worklist.keys(self.plan.name, index_of(self.name), try_number)):
                context["ti"].append(f"{key}|{self.name} try {try_number} no {number}", key=key or None)


def _start(plan: Task, name: str) -> StartTriggerArgs:
    """Return the trigger that a task begins in: that of its stream, or of its first wait."""
    stream = plan.stream
    if stream is not None and plan.legs(1)[0].streams:
        return StartTriggerArgs(
            trigger_cls=OF_SOURCE,
            trigger_kwargs={"task": name},
            next_method=TAKES_ONE if stream.takes_one else HANDLER_METHOD,
            next_kwargs=BEGIN,
            timeout=None if stream.timeout_s is None else timedelta(seconds=stream.timeout_s),
            stream=stream.asked,
            ahead=stream.ahead,
            poison=stream.poison,
        )
    wait = plan.legs(1)[0].wait
    assert wait is not None
    return StartTriggerArgs(
        trigger_cls="tests.proof.simulation.tasks.dags.SimulatedWait",
        trigger_kwargs={"task": name, "try_number": 1, "leg": 0},
        next_method="resume",
        next_kwargs={"leg": 1},
        timeout=None if wait.timeout_s is None else timedelta(seconds=wait.timeout_s),
    )


class SimulatedWait(BaseTrigger):
    """What a task waits for, from its leg ``leg`` on."""

    def __init__(self, task: str, try_number: int, leg: int) -> None:
        self.task = task
        self.try_number = try_number
        self.leg = leg
        self.number = 0  # of its run

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """See the base class."""
        kwargs = {"task": self.task, "try_number": self.try_number, "leg": self.leg}
        return "tests.proof.simulation.tasks.dags.SimulatedWait", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, and end as the plan says."""
        runner = in_runner()
        world: Any = runner.world
        wait = world.scenario.task(self.task).legs(self.try_number)[self.leg].wait
        world.serial += 1
        self.number = world.serial
        runner.note(records.Waited(trio.current_time(), self.task, self.leg, runner.number, self.number))
        await trio.sleep(math.inf if wait.end == "never" else wait.seconds)
        xcoms = {KEY: pushed(self.task, self.try_number, self.leg)} if wait.pushes else None
        match wait.end:
            case "raises":
                raise PlannedFailure("the trigger fails as planned")
            case "returns":
                return
            case "success":
                yield self._fired(world, TaskSuccessEvent(xcoms=xcoms))
            case "failed":
                yield self._fired(world, TaskFailedEvent(xcoms=xcoms))
            case "skipped":
                yield self._fired(world, TaskSkippedEvent(xcoms=xcoms))
            case _:
                for _ in range(EVENTS if wait.end == "events" else 1):
                    world.serial += 1
                    yield self._fired(world, TriggerEvent({"serial": world.serial}))

    def _fired(self, world: TaskWorld, event: TriggerEvent) -> TriggerEvent:
        serial = 0 if event.kind != "event" else event.payload["serial"]
        in_runner().note(records.EventFired(trio.current_time(), self.task, self.leg, event.kind, serial, self.number))
        return event

    async def on_kill(self) -> None:
        """Say that it was called."""
        in_runner().note(records.KillHookCalled(trio.current_time(), self.task, self.leg))


class DecidingOperator(SimulatedOperator):
    """A task that decides itself what signals do. ``trouble`` is that of the call of `on_signal` to come."""

    trouble: OfCall = ""

    def on_signal(self, signal: SignalVersion) -> Any:
        """Do as the plan says."""
        ruled = self.plan.ruled
        assert ruled is not None
        assert ruled.decides is not None, "it decides"
        value = encode_value(signal.value, where="").decode()
        if self.trouble == "raises" or value in ruled.decides.bad:
            raise PlannedFailure("on_signal fails as planned")
        return "nonsense" if self.trouble == "nonsense" else SignalAction(ruled.decides.action(value))


def operator_of(plan: Task, name: str = "", dag: DAG | None = None) -> SimulatedOperator | SimulatedSensor:
    """Return the operator of a task."""
    if plan.sensor is not None:
        return SimulatedSensor(plan, plan.sensor, name, dag)
    decides = plan.ruled is not None and plan.ruled.decides is not None
    return (DecidingOperator if decides else SimulatedOperator)(plan, name, dag)


def spec_of(plan: Dag, without: str = "") -> DagSpec:
    """Return the DAG as its file says it, maybe without one of its tasks."""
    schedule = None if plan.runs_on is None else plan.runs_on.schedule()
    end_on = [rule.on() for rule in plan.end_on]
    dag = DAG(plan.name, max_active_runs=plan.max_active_runs, schedule=schedule, end_on=end_on)
    operators = {task.name: operator_of(task, dag=dag) for task in plan.tasks if task.name != without}
    for task in plan.tasks:
        for above in task.upstream:
            if task.name in operators and above in operators:
                operators[above] >> operators[task.name]
    spec = dag.to_spec()
    plans = {task.name: task for task in plan.tasks}
    return msgspec.structs.replace(spec, tasks=tuple(_mapped(task, plans[task.task_id]) for task in spec.tasks))


def _mapped(task: TaskSpec, plan: Task) -> TaskSpec:
    mapped = plan.mapped
    if mapped is None:
        return task
    return msgspec.structs.replace(task, map=mapped.spec, active_max=mapped.active_max, group=mapped.group)
