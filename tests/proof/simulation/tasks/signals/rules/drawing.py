"""What a seed of signals means for rules: in half of the seeds a DAG whose tasks signals start, restart and stop."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.proof.simulation import drawing, scenario
from tests.proof.simulation.scenario import Fault
from tests.proof.simulation.tasks.faults import Act, FailAtVerb, KillAtVerb, Pause, What
from tests.proof.simulation.tasks.scenario import POOL, Dag, Leg, LegEnd, Task, draw_legs, run_name
from tests.proof.simulation.tasks.signals.plans import OfSignals, Send, UserAct, UserSends
from tests.proof.simulation.tasks.signals.rules.plans import Asks, EndsRun, Rule, Ruled

from headgate.protocol.messages.rules import Action, EndState
from headgate.protocol.messages.signals import Since

NAME = "ruled"
MAIN = "m"  # a task that holds its run open
KEYS = ("k1", "k2", "k3")  # those of all others
VALUES = ("1", "1", "2")
ACTIONS: tuple[Action, ...] = ("START", "START", "START", "RESTART", "STOP", "STOP", "NONE")
VERBS = ("plan", "plan", "plan", "consider_signals", "tick", "dispatch", "store_slice")
MARKS = ("signals.action_written", "signals.action_written", "signals.considered", "store.before_commit")
ENDED_AT_S = 12.0  # a user ends runs that do not end by themselves: behind all that others do


class WithRules(NamedTuple):
    """What rules add to a scenario."""

    dags: tuple[Dag, ...] = ()
    users: tuple[UserAct, ...] = ()
    faults: tuple[Fault, ...] = ()


def draw(seed: int, *, is_calm: bool) -> WithRules:
    """Return what is added to the scenario of a seed."""
    rng = random.Random(f"{seed}/rules of signals")
    if rng.random() < 0.5:
        return WithRules()
    dag = _dag(rng, is_calm=is_calm)
    users = (*_senders(rng, dag), *_ends(rng, dag))
    return WithRules((dag,), users, () if is_calm else _faults(random.Random(f"{seed}/faults of rules"), dag))


def _dag(rng: random.Random, *, is_calm: bool) -> Dag:
    tasks = [] if rng.random() < 0.1 else [_plain(rng, MAIN, (), is_calm=is_calm)]
    for name in "xyz"[: rng.choice((1, 1, 2, 3))]:
        upstream = (rng.choice(tasks).name,) if tasks and rng.random() < 0.4 else ()
        tasks.append(_ruled(rng, name, upstream, [task.name for task in tasks], is_calm=is_calm))
    if rng.random() < 0.15:
        tasks.append(_plain(rng, "w", (tasks[-1].name,), is_calm=is_calm))
    runs_at = tuple(sorted(round(rng.uniform(0.0, 2.0), 2) for _ in range(rng.choice((1, 1, 2)))))
    return Dag(NAME, tuple(tasks), runs_at)


def _plain(rng: random.Random, name: str, upstream: tuple[str, ...], *, is_calm: bool) -> Task:
    end: LegEnd = "fail" if not is_calm and rng.random() < 0.2 else "return"
    return Task(name, upstream, attempts=((Leg(end, rng.choice((0.5, 2.0, 4.0, 5.0))),),))


def _ruled(rng: random.Random, name: str, upstream: tuple[str, ...], others: list[str], *, is_calm: bool) -> Task:
    attempts = tuple(draw_legs(rng, upstream, is_calm=is_calm) for _ in range(rng.choice((1, 2))))
    return Task(
        name,
        upstream,
        rule=rng.choice(("all_success", "all_done", "all_done", "one_failed")) if upstream else "all_success",
        retries=rng.choice((0, 0, 1, 2)),
        retry_delay_s=rng.choice((0.0, 0.3, 1.5)),
        pool=rng.choice((POOL, "default_pool")),
        attempts=attempts,
        signals=OfSignals(
            ruled=Ruled(
                _rules(rng, others),
                rng.choice(("latest", "latest", "each", "ignore")),
                rng.choice(("skipped", "skipped", "success", "failed")),
            )
        ),
    )


def _rules(rng: random.Random, others: list[str]) -> tuple[Rule, ...]:
    kind = rng.choice(("any", "any", "any", "necessary", "necessary", "ended", "every"))
    since: Since = rng.choice(("run", "run", "latest"))
    rules: tuple[Rule, ...]
    match kind:
        case "necessary":
            first, other = rng.sample(KEYS, 2)
            rules = (
                Rule(first, rng.choice(("START", "RESTART")), condition="necessary", since=since),
                Rule(other, value=rng.choice((None, "1")), condition="necessary"),
            )
        case "ended" if others:
            state: EndState | None = rng.choice((None, "failed", "success", "skipped"))
            rules = (Rule(ended=rng.choice(others), action=rng.choice(("START", "START", "RESTART")), state=state),)
        case "every":
            rules = (Rule(every_s=rng.choice((1.0, 1.7)), action=rng.choice(("START", "START", "RESTART"))),)
        case _:
            rules = (Rule(rng.choice(KEYS), "START", rng.choice((None, None, "1")), since=since),)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        rules += (Rule(rng.choice(KEYS), rng.choice(ACTIONS), rng.choice((None, "1", "2"))),)
    return tuple({rule.name: rule for rule in rules}.values())


# --- users -----------------------------------------------------------------------------------------


def _senders(rng: random.Random, dag: Dag) -> list[UserAct]:
    users: list[UserAct] = []
    for _ in range(rng.choice((2, 4, 8))):
        sends = tuple(Send(rng.choice(KEYS), rng.choice(VALUES)) for _ in range(rng.choice((1, 1, 2, 3))))
        users.append(UserSends(round(rng.uniform(0.0, 5.5), 2), sends))
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        task = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{rng.choice(dag.tasks).name}"
        # Never at the time of a signal: then it is nobody's promise which is the first.
        users.append(Asks(round(rng.uniform(0.0, 5.5), 2) + 0.0037, task, rng.choice(("START", "RESTART", "STOP"))))
    return users


def _ends(rng: random.Random, dag: Dag) -> list[UserAct]:
    """Return the users who end runs: those that would stay open, and some of the others."""
    runs = [run_name(dag.name, number) for number in range(1, len(dag.runs_at) + 1)]
    if not ends_by_itself(dag):
        return [EndsRun(ENDED_AT_S, run) for run in runs]
    return [EndsRun(round(rng.uniform(1.0, 6.0), 2) + 0.0061, run) for run in runs if rng.random() < 0.2]


def ends_by_itself(dag: Dag) -> bool:
    """Whether the runs of a DAG end without a user: nothing that no signal starts is downstream of what one does."""
    started = {task.name for task in dag.tasks if task.ruled is not None and task.ruled.starts}
    others = [task for task in dag.tasks if task.name not in started]
    if any(rule.every_s for task in dag.tasks if task.ruled is not None for rule in task.ruled.rules):
        return False  # one that the time starts may be under way whenever another has ended
    return bool(others) and not any(started.intersection(task.upstream) for task in others)


# --- what goes wrong -------------------------------------------------------------------------------


def _faults(rng: random.Random, dag: Dag) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2))):
        verb, nth = rng.choice(VERBS), rng.choice((1, 2, 3, 5, 8))
        faults.append(
            rng.choice(
                (
                    scenario.KillAtMark(rng.choice(MARKS), nth),
                    KillAtVerb(verb, nth, rng.random() < 0.6),
                    FailAtVerb(verb, nth, rng.random() < 0.8),
                )
            )
        )
    for _ in range(rng.choice((0, 0, 1, 2))):
        name = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{rng.choice(dag.tasks).name}"
        what: What = rng.choice(("clear", "clear", "clear", "success", "failed", "redo"))
        state = rng.choice(("", "running", "running", "deferred", "up_for_retry", "success", "success", "skipped"))
        faults.append(Act(round(drawing.draw_time(rng) / 2, 2), name, what, state, rng.choice((0.0, 0.05, 0.3, 1.0))))
    if rng.random() < 0.25:
        faults.append(Pause(drawing.draw_time(rng), dag.name, rng.choice((0.3, 1.5, 3.0))))
    return tuple(faults)
