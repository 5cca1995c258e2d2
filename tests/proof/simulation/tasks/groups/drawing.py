"""What a seed of groups means: one DAG with a group, a loop, a worklist or elements, and what users do to it.

A group is expanded over a list that another task leaves, or over values of the file. One of its tasks waits for a task
outside as well, and one task is below it all.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from tests.proof.simulation import drawing, scenario
from tests.proof.simulation.scenario import Fault, Topology
from tests.proof.simulation.tasks.faults import Act, Edit, FailAtVerb, KillAtVerb, What
from tests.proof.simulation.tasks.maps.plans import LENGTHS, Emits, EndAt, Mapped, Worklist
from tests.proof.simulation.tasks.scenario import (
    MARKS_OF_MAPS,
    POOL,
    Dag,
    Leg,
    LegEnd,
    Task,
    TaskScenario,
    draw_faults,
    draw_legs,
    run_name,
)
from tests.proof.simulation.tasks.streams.plans import Trouble

GROUP = "g"
RULES_INSIDE = (
    *("all_success", "all_success", "all_success", "all_done", "none_failed", "one_success", "one_failed"),
    *("none_failed_min_one_success", "one_done", "none_skipped"),
)
RULES_BELOW = ("all_success", "all_done", "all_done", "none_failed", "one_success", "one_failed")
VERBS = ("plan", "plan", "plan", "succeed", "succeed", "fail", "dispatch", "emit", "retry_due")
MARKS = (
    *MARKS_OF_MAPS,
    "groups.advanced",
    "groups.advanced",
    "elements.written",
    "elements.committed",
    "elements.appended",
)
KEYS = ("", "k1", "k1", "k2", "k3", "k4")
TROUBLES: tuple[Trouble, ...] = ("dies_before", "dies_after", "twice", "late", "stubborn")


class GroupAct(Act, frozen=True):
    """A user does something to a task, to all of its instances, or to one; a clear may go on ``downstream``."""

    downstream: bool = False


def draw(seed: int) -> TaskScenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"{seed}/groups")
    topology = Topology(latency_s=rng.choice((0.0, 0.0, 0.01, 0.2)))
    is_calm = rng.random() < 0.2
    shape: Callable[..., list[Task]] = rng.choice((_group, _group, _worklist, _loop, _elements))
    tasks = shape(rng, is_calm=is_calm)
    runs_at = (0.1,) if rng.random() < 0.7 else (0.1, 0.7)
    dag = Dag("d1", tuple(tasks), runs_at)
    faults = () if is_calm else _draw_faults(random.Random(f"{seed}/faults of groups"), dag)
    workers, peers = rng.choice((1, 2, 4)), rng.random() < 0.15
    return TaskScenario(seed, topology, faults=faults, dags=(dag,), workers=workers, peers=peers, pool_slots=8)


# --- the shapes ------------------------------------------------------------------------------------


def _group(rng: random.Random, *, is_calm: bool) -> list[Task]:
    """A group of two to four tasks, with a task outside that one of them waits for."""
    of = rng.choice(("s", "s", ""))
    spec = _limited(rng, Mapped(of, count=0 if of else rng.choice((0, 1, 2, 3, 5)), group=GROUP))
    names = "abcd"[: rng.randint(2, 4)]
    outside = rng.choice(("", "o", "o"))
    waiting = rng.choice(names)
    tasks = [_plain(rng, "s", leaves=rng.randrange(LENGTHS), is_calm=is_calm)] if of else []
    tasks += [_plain(rng, "o", is_calm=is_calm, is_long=True)] if outside else []
    for number, name in enumerate(names):
        above = {rng.choice(names[:number])} | {one for one in names[:number] if rng.random() < 0.3} if number else {of}
        upstream = tuple(sorted({*above, *([outside] if name == waiting else [])} - {""}))
        below = names[number + 1 :]
        tasks.append(_inside(rng, name, upstream, _with_ends(rng, spec, is_calm), is_calm=is_calm, below=below))
    return [*tasks, _below(rng, tasks)]


def _worklist(rng: random.Random, *, is_calm: bool) -> list[Task]:
    """A task, or a group of two, whose instances append to what it is expanded over."""
    names = rng.choice(("a", "a", "ab"))
    appends = tuple(
        tuple(rng.choice(KEYS) for _ in range(rng.choice((0, 1, 1, 2, 3)))) for _ in range(rng.choice((2, 3)))
    )
    by = (*rng.choice((names[0], names[-1], names)),)
    given = rng.choice((0, 1, 1, 2))
    worklist = Worklist(rng.choice(names), given, rng.choice((3, 6, 9)), by, appends)
    spec = _limited(rng, Mapped(group=GROUP if len(names) > 1 else "", worklist=worklist))
    tasks: list[Task] = []
    for number, name in enumerate(names):
        ended = _with_ends(rng, spec, is_calm)
        tasks.append(_inside(rng, name, tuple(names[:number]), ended, is_calm=is_calm, may_wait=name not in by))
    return [*tasks, _below(rng, tasks)]


def _loop(rng: random.Random, *, is_calm: bool) -> list[Task]:
    """A group that is repeated, whose last task is its gate."""
    names = rng.choice(("bg", "bcg"))
    stops = tuple(rng.randrange(4) for _ in range(rng.choice((1, 2, 3))))
    spec = Mapped(window=1, group=GROUP, worklist=Worklist("g", 1, rng.choice((2, 4, 6)), stops=stops))
    tasks: list[Task] = []
    for number, name in enumerate(names):
        ended = _with_ends(rng, spec, is_calm)
        upstream = tuple(names[number - 1 : number])
        tasks.append(_inside(rng, name, upstream, ended, is_calm=is_calm, rules=("all_success",), may_wait=name != "g"))
    return [*tasks, _below(rng, tasks)]


def _elements(rng: random.Random, *, is_calm: bool) -> list[Task]:
    """A task that emits elements, and one, or a group of two, that is expanded over them."""
    count = rng.choice((0, 1, 2, 3, 5))
    emits = Emits(count, rng.randint(0, count), have_keys=rng.random() < 0.4)
    legs = (_leg(rng, is_calm=is_calm),)
    end: LegEnd = "fail" if not is_calm and rng.random() < 0.2 else "return"
    last = Leg(end, rng.choice((0.4, 1.2, 2.4)), trouble=legs[0].trouble)
    tasks = [_task(rng, "s", (), ((last,), legs), is_calm=is_calm, emits=emits, priority=9)]
    names = rng.choice(("a", "a", "ab"))
    spec = _limited(rng, Mapped("s", is_of_elements=True, group=GROUP if len(names) > 1 else ""))
    rules = ("all_success", "none_failed", "all_done", "one_success")
    for number, name in enumerate(names):
        upstream = tuple(names[:number]) or ("s",)
        ended = _with_ends(rng, spec, is_calm)
        tasks.append(_inside(rng, name, upstream, ended, is_calm=is_calm, rules=rules))
    return [*tasks, _below(rng, tasks)]


# --- their tasks -----------------------------------------------------------------------------------


def _limited(rng: random.Random, spec: Mapped) -> Mapped:
    return msgspec.structs.replace(
        spec,
        window=rng.choice((1, 2, 3, 4)),
        fail_fast=rng.random() < 0.15,
        failures_max=rng.choice((None, None, None, 1, 2)),
    )


def _with_ends(rng: random.Random, spec: Mapped, is_calm: bool) -> Mapped:
    """Return how a task is mapped, some of whose instances fail, or are skipped, at their first tries."""
    some: tuple[EndAt, ...] = ("fail", "fail", "skip")
    count = 0 if is_calm else rng.choice((0, 0, 1, 2))
    ends = tuple((rng.randrange(4), rng.choice(some), rng.choice((1, 2, 9))) for _ in range(count))
    return msgspec.structs.replace(spec, ends=ends)


def _inside(
    rng: random.Random,
    name: str,
    upstream: tuple[str, ...],
    mapped: Mapped,
    *,
    is_calm: bool,
    rules: tuple[str, ...] = RULES_INSIDE,
    may_wait: bool = True,
    below: str = "",
) -> Task:
    legs: tuple[Leg, ...] = (_leg(rng, is_calm=is_calm),)
    if may_wait and not is_calm and rng.random() < 0.2:
        legs = draw_legs(rng, (), is_calm=False)
    elif below and rng.random() < 0.15:
        legs = (Leg("branch", rng.choice((0.05, 0.4)), skips=(rng.choice(below),)),)
    return _task(rng, name, upstream, (legs,), is_calm=is_calm, mapped=mapped, rule=rng.choice(rules))


def _plain(rng: random.Random, name: str, *, is_calm: bool, is_long: bool = False, leaves: int | None = None) -> Task:
    end: LegEnd = "return" if is_calm or rng.random() < 0.75 else rng.choice(("fail", "skip"))
    leg = Leg(end, rng.choice((0.4, 1.2, 2.4)) if is_long else 0.05, trouble=_trouble(rng, is_calm))
    return _task(rng, name, (), ((leg,),), is_calm=is_calm, leaves=leaves)


def _below(rng: random.Random, tasks: list[Task]) -> Task:
    above = {one for task in tasks for one in task.upstream}
    upstream = tuple(task.name for task in tasks if task.name not in above)
    return Task("t", upstream, rule=rng.choice(RULES_BELOW))


def _task(
    rng: random.Random,
    name: str,
    upstream: tuple[str, ...],
    attempts: tuple[tuple[Leg, ...], ...],
    *,
    is_calm: bool,
    rule: str = "all_success",
    mapped: Mapped | None = None,
    leaves: int | None = None,
    emits: Emits | None = None,
    priority: int = 1,
) -> Task:
    return Task(
        name,
        upstream,
        rule=rule,
        retries=rng.choice((0, 1, 1, 2)),
        retry_delay_s=0.0 if is_calm else rng.choice((0.0, 0.3)),
        pool=POOL,
        priority=priority,
        attempts=attempts,
        mapped=mapped,
        leaves=leaves,
        emits=emits,
    )


def _leg(rng: random.Random, *, is_calm: bool) -> Leg:
    return Leg("return", rng.choice((0.0, 0.05, 0.4, 0.8)), trouble=_trouble(rng, is_calm))


def _trouble(rng: random.Random, is_calm: bool) -> Trouble:
    return rng.choice(TROUBLES) if not is_calm and rng.random() < 0.1 else ""


# --- their faults ----------------------------------------------------------------------------------


def _draw_faults(rng: random.Random, dag: Dag) -> tuple[Fault, ...]:
    if rng.random() < 0.15:
        return ()
    faults: list[Fault] = [fault for fault in draw_faults(rng, (dag,)) if not isinstance(fault, Act | Edit)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        verb, nth = rng.choice(VERBS), rng.choice((1, 2, 3, 5))
        faults.append(
            rng.choice(
                (
                    scenario.KillAtMark(rng.choice(MARKS), nth),
                    KillAtVerb(verb, nth, rng.random() < 0.6),
                    FailAtVerb(verb, nth, rng.random() < 0.8),
                )
            )
        )
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        faults.append(_draw_act(rng, dag))
    return tuple(faults)


def _draw_act(rng: random.Random, dag: Dag) -> GroupAct:
    task = rng.choice(dag.tasks)
    name = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{task.name}"
    if task.mapped is not None and rng.random() < 0.6:
        name = f"{name}[{rng.randrange(4)}]"
    what: What = rng.choice(("clear", "clear", "clear", "clear", "success", "failed"))
    state = rng.choice(("", "running", "scheduled", "none", "success", "success", "failed"))
    at_s, delay_s = round(drawing.draw_time(rng) / 2, 2), rng.choice((0.0, 0.05, 0.3, 1.0))
    # What is expanded over the values of a task is cleared with it: it would not be expanded over the new ones.
    downstream = task.leaves is not None or task.emits is not None or rng.random() < 0.5
    return GroupAct(at_s, name, what, state, delay_s, downstream=downstream)
