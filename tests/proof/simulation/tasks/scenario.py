"""What a seed of tasks means: the DAGs, what each step of each task does, what users do, and what goes wrong.

A scenario is data, drawn before anything runs, from one generator a part: taking away a fault changes nothing else.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec
from tests.proof.simulation import drawing, scenario
from tests.proof.simulation.scenario import FAULTS_UNTIL_S, Fault, Part, Scenario, Topology
from tests.proof.simulation.tasks.faults import (
    ACTIONS,
    Act,
    Edit,
    FailAtVerb,
    KillAtVerb,
    KillWorker,
    Pause,
    What,
)
from tests.proof.simulation.tasks.maps import plans as map_plans
from tests.proof.simulation.tasks.maps.plans import Emits, Mapped, task_of
from tests.proof.simulation.tasks.signals.plans import OfSignals, Sensor
from tests.proof.simulation.tasks.signals.rules.plans import Rule, Ruled
from tests.proof.simulation.tasks.signals.runs.plans import RunsOn
from tests.proof.simulation.tasks.streams import plans
from tests.proof.simulation.tasks.streams.plans import Stream, Trouble

from headgate.protocol import marks

RUNS_UNTIL_S = 2.0
RULES = (
    *("all_success", "all_success", "all_success", "all_done", "one_success", "one_failed", "one_done"),
    *("none_failed", "none_failed_min_one_success", "none_skipped", "all_failed", "all_skipped", "always"),
)
STATES_ACTED_ON = (
    *("running", "running", "deferred", "deferred", "scheduled", "up_for_retry"),
    *("success", "failed", "none"),
)
ENDS_ACTED_ON = ("success", "failed")
POOL = "small"
# Where a supervisor may die beside the marks: the verbs of the part for tasks, before and after their commit.
VERBS = (
    *("plan", "plan", "dispatch", "dispatch", "defer", "defer", "succeed", "fail", "lose_worker", "retry_due"),
    *("time_out", "adopt", "store_slice", "store_slice", "claim", "create_event_runs", "owned", "owned_running"),
)


# --- tasks -----------------------------------------------------------------------------------------

WaitEnd = Literal["event", "events", "raises", "returns", "never", "success", "failed", "skipped"]
LegEnd = Literal["return", "fail", "give_up", "skip", "defer", "branch"]


class Wait(Part, frozen=True):
    """What a trigger does: after ``seconds`` it ends so. ``timeout_s`` is that of the deferral."""

    end: WaitEnd
    seconds: float = 0.0
    timeout_s: float | None = None
    pushes: bool = False


class Leg(Part, frozen=True):
    """What one step does: ask what the tasks ``asks`` have left, take ``seconds``, and end so.

    ``trouble`` is what happens to its worker: it dies, its link is cut, it answers twice or late, or it takes its time
    when it is told to stop. ``streams``: it defers with the stream of the task, whose end is where the next leg begins.
    """

    end: LegEnd = "return"
    seconds: float = 0.0
    wait: Wait | None = None
    asks: tuple[str, ...] = ()
    pushes: bool = False
    skips: tuple[str, ...] = ()
    trouble: Trouble = ""
    streams: bool = False


class Task(Part, frozen=True):
    """One task. ``attempts`` are the legs of its tries; the last of them is that of all further tries.

    If it ``leaves`` a list for a mapped task, its length is that of `map_plans.list_length`. An ``endless`` one has a
    worker beside the pool.
    """

    name: str
    upstream: tuple[str, ...] = ()
    rule: str = "all_success"
    retries: int = 0
    retry_delay_s: float = 0.0
    execution_timeout_s: float | None = None
    pool: str = POOL
    pool_slots: int = 1
    priority: int = 1
    starts_in_trigger: bool = False
    attempts: tuple[tuple[Leg, ...], ...] = ((Leg(),),)
    stream: Stream | None = None
    mapped: Mapped | None = None
    leaves: int | None = None
    emits: Emits | None = None
    signals: OfSignals | None = None
    endless: bool = False

    @property
    def sensor(self) -> Sensor | None:
        """The wait for a signal, if the task is a sensor."""
        return None if self.signals is None else self.signals.sensor

    @property
    def ruled(self) -> Ruled | None:
        """The rules about signals that the task has."""
        return None if self.signals is None else self.signals.ruled

    def legs(self, try_number: int) -> tuple[Leg, ...]:
        """Return what a try does."""
        return self.attempts[min(try_number, len(self.attempts)) - 1]

    def stream_leg(self, try_number: int) -> int:
        """Return the number of the leg that defers with the stream in a try."""
        return next(number for number, leg in enumerate(self.legs(try_number)) if leg.streams)


class Dag(Part, frozen=True):
    """One DAG, with its runs: when each of them is asked for; it may have others by signals, which may end them."""

    name: str
    tasks: tuple[Task, ...]
    runs_at: tuple[float, ...]
    max_active_runs: int = 16
    runs_on: RunsOn | None = None
    end_on: tuple[Rule, ...] = ()

    def task(self, name: str) -> Task:
        """Return a task."""
        return next(task for task in self.tasks if task.name == name)


# --- the whole --------------------------------------------------------------------------------------


class TaskScenario(Scenario, frozen=True, kw_only=True):
    """All of it; nothing is published in any lane. ``peers``: a second supervisor is there from the beginning.

    Each supervisor has so many ``workers``, and ``endless_workers`` beside these.
    """

    dags: tuple[Dag, ...]
    workers: int = 2
    endless_workers: int = 0
    peers: bool = False
    pool_slots: int = 4

    def task(self, name: str) -> Task:
        """Return a task by the name ``dag/run/task``, or by that of an instance."""
        dag, _, task = task_of(name).split("/")
        return next(one for one in self.dags if one.name == dag).task(task)


def run_name(dag: str, number: int) -> str:
    """Return the name of a run."""
    return f"{dag}/r{number}"


# --- from a seed -----------------------------------------------------------------------------------


def draw(seed: int) -> TaskScenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"{seed}/tasks")
    topology = Topology(
        round_events_max=rng.choice((1, 3, 1000)),
        slice_events_max=rng.choice((1, 2, 500)),
        latency_s=rng.choice((0.0, 0.0, 0.01, 0.2)),
        chops_writes=rng.random() < 0.05,
    )
    pool_slots = rng.choice((1, 2, 3, 8))
    dags = tuple(
        _draw_dag(rng, f"d{number}", pool_slots, has_more=number == 2) for number in range(1, rng.choice((2, 2, 3)))
    )
    workers, peers = rng.choice((1, 2, 4)), rng.random() < 0.2
    faults = draw_faults(random.Random(f"{seed}/faults of tasks"), dags)
    # From generators of their own: a seed without streams means what it meant before there were any.
    dags = _with_streams(random.Random(f"{seed}/streams of tasks"), dags)
    faults += _draw_stream_faults(random.Random(f"{seed}/faults of streams"), dags) if faults else ()
    dags = _with_maps(random.Random(f"{seed}/maps of tasks"), dags)
    faults += _draw_map_faults(random.Random(f"{seed}/faults of maps"), dags) if faults else ()
    if random.Random(f"{seed}/bundles of tasks").random() < 0.5:  # many tasks wait for one worker
        workers, pool_slots = 1, max(2, pool_slots)
    mapped = {dag.name for dag in dags for task in dag.tasks if task.mapped is not None}
    faults = tuple(fault for fault in faults if not (isinstance(fault, Edit) and fault.dag in mapped))
    return TaskScenario(seed, topology, faults=faults, dags=dags, workers=workers, peers=peers, pool_slots=pool_slots)


def _draw_dag(rng: random.Random, name: str, pool_slots: int, *, has_more: bool) -> Dag:
    is_calm = rng.random() < 0.25
    shape = rng.choice(("one", "one", "chain", "chain", "diamond", "fan", "fork", "branch")) if not has_more else "one"
    upstream: dict[str, tuple[str, ...]]
    match shape:
        case "one":
            upstream = {"a": ()}
        case "chain":
            upstream = {"a": (), "b": ("a",), "c": ("b",)}
            upstream = dict(list(upstream.items())[: rng.choice((2, 3))])
        case "diamond":
            upstream = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}
        case "fork":
            upstream = {"a": (), "b": ("a",), "c": ("a",)}
        case "fan":
            upstream = {"a": (), "b": (), "c": ("a", "b")}
        case _:
            upstream = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}
    tasks = tuple(
        _draw_task(rng, task, above, pool_slots, is_calm=is_calm, branches=shape == "branch" and task == "a")
        for task, above in upstream.items()
    )
    runs_at = tuple(round(rng.uniform(0.0, RUNS_UNTIL_S), 2) for _ in range(1 if has_more else rng.choice((1, 1, 2))))
    return Dag(name, tasks, runs_at, max_active_runs=rng.choice((1, 16)))


def _draw_task(
    rng: random.Random, name: str, upstream: tuple[str, ...], pool_slots: int, *, is_calm: bool, branches: bool
) -> Task:
    retries = rng.choice((0, 0, 1, 2))
    starts = not branches and rng.random() < 0.15
    first_wait = _draw_wait(rng, is_calm=is_calm)
    attempts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        legs = draw_legs(rng, upstream, is_calm=is_calm)
        if starts:
            legs = (Leg("defer", wait=first_wait), *legs)
        elif branches:
            legs = (*legs[:-1], Leg("branch", seconds=0.1, skips=(rng.choice("bc"),), pushes=True))
        attempts.append(legs)
    # Clearly too short for its first leg, or clearly long enough for all: what is between is nobody's promise.
    has_deadline = not is_calm and not starts and rng.random() < 0.08
    if has_deadline:
        first = msgspec.structs.replace(attempts[0][0], seconds=6.0, trouble="")
        attempts = [(first, *attempts[0][1:])]
    return Task(
        name,
        upstream,
        rule=rng.choice(RULES)
        if (upstream and not is_calm and len(upstream) != 1) or rng.random() < 0.3
        else "all_success",
        retries=retries,
        retry_delay_s=rng.choice((0.0, 0.0, 0.3, 1.5)),
        execution_timeout_s=1.5 if has_deadline else rng.choice((None, 60.0)),
        pool=rng.choice((POOL, POOL, "default_pool")),
        pool_slots=rng.choice((1, 1, pool_slots)),
        priority=rng.choice((1, 1, 5)),
        starts_in_trigger=starts,
        attempts=tuple(attempts),
    )


def draw_legs(rng: random.Random, upstream: tuple[str, ...], *, is_calm: bool) -> tuple[Leg, ...]:
    """Draw the legs of one try of a task."""
    asks = upstream if rng.random() < 0.4 else ()
    legs = []
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        wait = _draw_wait(rng, is_calm=is_calm)
        legs.append(Leg("defer", _seconds(rng), wait, asks, rng.random() < 0.4, trouble=_trouble(rng, is_calm)))
    end: LegEnd = "return"
    if not is_calm and rng.random() < 0.3:
        end = rng.choice(("fail", "fail", "give_up", "skip"))
    legs.append(Leg(end, _seconds(rng), None, asks, rng.random() < 0.6, trouble=_trouble(rng, is_calm)))
    return tuple(legs)


def _seconds(rng: random.Random) -> float:
    return rng.choice((0.0, 0.05, 0.4, 1.2))


def _trouble(rng: random.Random, is_calm: bool) -> Trouble:
    if is_calm or rng.random() < 0.8:
        return ""
    return rng.choice(("dies_before", "dies_after", "cut", "twice", "late", "stubborn", "stubborn"))


def _draw_wait(rng: random.Random, *, is_calm: bool) -> Wait:
    seconds = rng.choice((0.0, 0.1, 0.8, 2.0))
    timeout_s = rng.choice((None, None, 20.0))
    if is_calm or rng.random() < 0.55:
        return Wait("event", seconds, timeout_s)
    match rng.randrange(8):
        case 0:
            return Wait("events", seconds, timeout_s)
        case 1:
            return Wait("raises", seconds)
        case 2:
            return Wait("returns", seconds)
        case 3 | 4:
            return Wait("never", 0.0, rng.choice((0.5, 1.5)))
        case 5:
            return Wait("success", seconds, timeout_s, pushes=rng.random() < 0.7)
        case 6:
            return Wait("failed", seconds, timeout_s, pushes=rng.random() < 0.3)
        case _:
            return Wait("skipped", seconds, timeout_s)


# --- its streams -----------------------------------------------------------------------------------


def _with_streams(rng: random.Random, dags: tuple[Dag, ...]) -> tuple[Dag, ...]:
    """Return the DAGs, with streams for some tasks: in half of all seeds none has one."""
    if rng.random() < 0.5:
        return dags
    return tuple(
        msgspec.structs.replace(dag, tasks=tuple(_with_stream(rng, task) for task in dag.tasks)) for dag in dags
    )


def _with_stream(rng: random.Random, task: Task) -> Task:
    is_short = task.execution_timeout_s is not None and task.execution_timeout_s < 60.0
    if is_short or any(leg.skips for leg in task.attempts[0]) or rng.random() < (0.5 if task.upstream else 0.1):
        return task
    at = 0 if task.starts_in_trigger else rng.choice((0, 0, 0, 1))
    return msgspec.structs.replace(
        task,
        retries=rng.choice((0, 1, 2, 3)),
        attempts=tuple(_with_stream_leg(rng, legs, at, is_new=not task.starts_in_trigger) for legs in task.attempts),
        stream=plans.draw(rng),
    )


def _with_stream_leg(rng: random.Random, legs: tuple[Leg, ...], at: int, *, is_new: bool) -> tuple[Leg, ...]:
    at = min(at, len(legs) - 1)
    leg = Leg("defer", _seconds(rng), pushes=rng.random() < 0.3, streams=True)
    return (*legs[:at], leg, *legs[at if is_new else at + 1 :])


def _draw_stream_faults(rng: random.Random, dags: tuple[Dag, ...]) -> tuple[Fault, ...]:
    tasks = [(dag, task) for dag in dags for task in dag.tasks if task.stream is not None]
    if not tasks:
        return ()
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        faults.append(_draw_stream_fault(rng))
    for _ in range(rng.choice((0, 0, 1, 2))):
        dag, task = rng.choice(tasks)
        name = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{task.name}"
        what: What = rng.choice(("clear", "clear", "clear", "redo", "success", "failed"))
        state = rng.choice(("running", "running", "deferred", "deferred", "scheduled", "up_for_retry", *ENDS_ACTED_ON))
        at, delay_s = round(drawing.draw_time(rng) / 2, 2), rng.choice((0.0, 0.05, 0.3, 1.0))
        faults.append(Act(at, name, what, state, delay_s, rng.choice(("", "from_start", "go_on"))))
    return tuple(faults)


def _draw_stream_fault(rng: random.Random) -> Fault:
    at, nth = drawing.draw_time(rng), rng.choice((1, 1, 2, 3, 5))
    match rng.randrange(10):
        case 0 | 1 | 2:
            return scenario.KillAtMark(rng.choice(MARKS_OF_STREAMS), nth)
        case 3 | 4:
            return KillAtVerb(rng.choice(VERBS_OF_STREAMS), nth, rng.random() < 0.6)
        case 5 | 6:
            return FailAtVerb(rng.choice(VERBS_OF_STREAMS), nth, rng.random() < 0.8)
        case 7:
            return scenario.KillRunner(at, drawing.draw_share(rng))
        case 8:
            return scenario.TakeOver(at)
        case _:
            return KillWorker(at)


# --- its maps --------------------------------------------------------------------------------------


def _with_maps(rng: random.Random, dags: tuple[Dag, ...]) -> tuple[Dag, ...]:
    """Return the DAGs, of which some tasks are mapped: in two thirds of all seeds none is."""
    return dags if rng.random() < 0.66 else tuple(_mapped(rng, dag) for dag in dags)


def _mapped(rng: random.Random, dag: Dag) -> Dag:
    tasks: dict[str, Task] = {}
    for task in dag.tasks:
        plain = task.stream is None and not task.starts_in_trigger and not any(leg.skips for leg in task.attempts[0])
        if plain and rng.random() < 0.6:
            above = [name for name in task.upstream if tasks[name].stream is None]
            of = rng.choice((*above, above[0])) if above and rng.random() < 0.7 else ""
            task = msgspec.structs.replace(task, mapped=map_plans.draw(rng, of))
            if of and tasks[of].mapped is None:
                tasks[of] = msgspec.structs.replace(tasks[of], leaves=rng.randrange(map_plans.LENGTHS))
        tasks[task.name] = task
    return msgspec.structs.replace(dag, tasks=tuple(tasks.values()))


def _draw_map_faults(rng: random.Random, dags: tuple[Dag, ...]) -> tuple[Fault, ...]:
    tasks = [(dag, task) for dag in dags for task in dag.tasks if task.mapped is not None]
    if not tasks:
        return ()
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        faults.append(scenario.KillAtMark(rng.choice(MARKS_OF_MAPS), rng.choice((1, 1, 2, 3))))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        dag, task = rng.choice(tasks)
        names = [task.name, task.name, *task.upstream, f"{task.name}[{rng.randrange(3)}]"]
        name = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{rng.choice(names)}"
        what: What = rng.choice(("clear", "clear", "clear", "clear", "success", "failed"))
        at_s, delay_s = round(drawing.draw_time(rng) / 2, 2), rng.choice((0.0, 0.05, 0.3, 1.0))
        faults.append(Act(at_s, name, what, rng.choice(("", "", "success", "none", "running")), delay_s))
    return tuple(faults)


# --- its faults ------------------------------------------------------------------------------------


def draw_faults(rng: random.Random, dags: tuple[Dag, ...]) -> tuple[Fault, ...]:
    """Draw what goes wrong, and what users do; in some seeds nothing."""
    if rng.random() < 0.12:
        return ()  # then it is known how each task ends
    faults = [_draw_fault(rng, dags) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    return (*faults, *(_draw_act(rng, dags) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))))


def _draw_act(rng: random.Random, dags: tuple[Dag, ...]) -> Act:
    dag = rng.choice(dags)
    task = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{rng.choice(dag.tasks).name}"
    state = rng.choice(STATES_ACTED_ON) if rng.random() < 0.85 else ""
    what: What = rng.choice(ACTIONS)
    # Some of these are what steps and waits take: the user and an event, or an outcome, come in one moment.
    delay_s = rng.choice((0.0, 0.0, 0.05, 0.1, 0.4, 0.8))
    return Act(round(drawing.draw_time(rng) / 2, 2), task, what, state, delay_s)


def _draw_fault(rng: random.Random, dags: tuple[Dag, ...]) -> Fault:
    at, seconds = drawing.draw_time(rng), rng.choice((0.3, 1.5, 3.0))
    match rng.randrange(23):
        case 0 | 1:
            return scenario.KillRunner(at, drawing.draw_share(rng))
        case 2 | 3:
            return scenario.KillSupervisor(at, rng.random() < 0.5, rng.choice((0.0, 0.3, 2.0)))
        case 4 | 5 | 6:
            return scenario.KillAtMark(rng.choice(MARKS_SIMULATED), rng.choice((1, 1, 2, 3, 5)))
        case 7 | 8 | 9:
            return KillAtVerb(rng.choice(VERBS), rng.choice((1, 1, 2, 3, 5)), rng.random() < 0.6)
        case 10 | 11 | 12:
            return FailAtVerb(rng.choice(VERBS), rng.choice((1, 1, 2, 3, 5)), rng.random() < 0.8)
        case 13:
            if rng.random() < 0.5:
                return scenario.CutLink(at, drawing.draw_share(rng))
            return scenario.StallLink(at, seconds, rng.random() < 0.5)
        case 14 | 15:
            return scenario.DatabaseIsAway(at, seconds, ambiguous=rng.random() < 0.8)
        case 16:
            return rng.choice((scenario.DatabaseIsSlow(at, seconds), scenario.FreezeSupervisor(at, seconds)))
        case 17 | 18:
            return scenario.TakeOver(at)
        case 19:
            return scenario.Drain(at)
        case 20:
            return KillWorker(at)
        case 21:
            return Pause(at, rng.choice(dags).name, seconds)
        case _:
            dag = rng.choice(dags)
            return Edit(at, dag.name, rng.choice(dag.tasks).name, seconds)


# The marks that a step of a task comes by in the supervisor, where it is simulated; their own table is of processes.
MARKS_OF_TASKS = (
    *("tasks.before_outcome", "outcomes.grouped", "tasks.outcome_stored", "tasks.dispatched"),
    *("defer.written", "defer.committed"),
    *("resume.by_event", "resume.by_end", "resume.to_fail", "resume.committed", "plan.in_trigger"),
)
MARKS_OF_STREAMS = tuple(marks.TASK_STREAM_MARKS)  # beside the ends of its steps, among the verbs
MARKS_OF_MAPS = ("maps.expanded", "maps.committed", "outcomes.grouped", "tasks.outcome_stored", "tasks.dispatched")
VERBS_OF_STREAMS = (
    "handle",
    "handle",
    "defer",
    "fail",
    "lose_worker",
    "store_slice",
    "begin_due_batches",
    "reopen_streams",
)
MARKS_SIMULATED = (
    *(name for name in drawing.MARKS_SIMULATED if not name.startswith("group.")),
    *MARKS_OF_TASKS,
)
assert FAULTS_UNTIL_S > RUNS_UNTIL_S
