"""What a seed of signals means for runs: in half of the seeds a DAG that has a run for signals, which may end it."""

from __future__ import annotations

import random

from tests.proof.simulation import drawing, scenario
from tests.proof.simulation.scenario import Fault
from tests.proof.simulation.tasks.faults import Act, FailAtVerb, KillAtVerb, Pause, What
from tests.proof.simulation.tasks.scenario import Dag, Leg, LegEnd, Task
from tests.proof.simulation.tasks.signals.plans import OfSignals, Send, UserAct, UserSends
from tests.proof.simulation.tasks.signals.rules.drawing import ENDED_AT_S, MAIN, WithRules
from tests.proof.simulation.tasks.signals.rules.plans import Rule, Ruled
from tests.proof.simulation.tasks.signals.runs.plans import EndsAll, OnKey, RunsOn

from headgate.protocol.messages.schedules import RunContract
from headgate.protocol.messages.signals import Since

NAME = "started"
KEYS = ("s1", "s1", "s2", "s3")
DRAIN = "drain"
VALUES = ("1", "1", "2")
CONTRACTS: tuple[RunContract, ...] = ("each", "each", "each", "all", "batch", "latest")
VERBS = ("create_event_runs", "create_event_runs", "consider_signals", "consider_signals", "plan", "plan", "dispatch")
MARKS = (
    *("runs.of_events_written", "runs.of_events_written", "signals.run_ending", "signals.run_ending"),
    *("signals.considered", "signals.action_written", "store.before_commit"),
)


def draw(seed: int, *, is_calm: bool) -> WithRules:
    """Return what is added to the scenario of a seed."""
    rng = random.Random(f"{seed}/runs of signals")
    if rng.random() < 0.5:
        return WithRules()
    dag = _dag(rng, is_calm=is_calm)
    users = (*_senders(rng), EndsAll(ENDED_AT_S, NAME))
    return WithRules((dag,), users, () if is_calm else _faults(random.Random(f"{seed}/faults of runs"), dag))


def _dag(rng: random.Random, *, is_calm: bool) -> Dag:
    tasks: list[Task] = []
    if rng.random() < 0.8:
        end: LegEnd = "fail" if not is_calm and rng.random() < 0.2 else "return"
        tasks.append(Task(MAIN, pool="default_pool", attempts=((Leg(end, rng.choice((0.0, 0.4, 1.5))),),)))
    for name in "xy"[: rng.choice((0, 1, 1, 2)) if tasks else 1]:
        upstream = (tasks[0].name,) if tasks and rng.random() < 0.2 else ()
        tasks.append(_ruled(rng, name, upstream))
    rules = tuple(OnKey(key, rng.choice((None, None, "1"))) for key in sorted(rng.sample(sorted(set(KEYS)), 2)))
    contract = rng.choice(CONTRACTS)
    runs_on = RunsOn(
        rules[: 2 if contract == "all" else rng.choice((1, 2))],
        contract,
        rng.choice((2, 3)) if contract == "batch" else 0,
        rng.choice((0.5, 2.0)) if contract == "batch" else None,
    )
    end_on = (Rule(DRAIN, "STOP", rng.choice((None, "1"))), Rule("s3", "STOP", "2"))[: rng.choice((0, 1, 1, 2))]
    runs_at = tuple(sorted(round(rng.uniform(0.0, 2.0), 2) for _ in range(rng.choice((0, 0, 1)))))
    return Dag(NAME, tuple(tasks), runs_at, rng.choice((1, 1, 2, 16)), runs_on, end_on)


def _ruled(rng: random.Random, name: str, upstream: tuple[str, ...]) -> Task:
    since: Since = rng.choice(("run", "latest", "last_run", "last_run"))
    rules = [Rule(rng.choice(KEYS), rng.choice(("START", "START", "RESTART")), rng.choice((None, "1")), since=since)]
    if rng.random() < 0.2:
        rules.append(Rule("s2", "STOP", "2"))
    return Task(
        name,
        upstream,
        rule="all_done",
        pool="default_pool",
        attempts=((Leg(seconds=rng.choice((0.0, 0.4, 1.0))),),),
        signals=OfSignals(ruled=Ruled(tuple({rule.name: rule for rule in rules}.values()))),
    )


# --- users -----------------------------------------------------------------------------------------


def _senders(rng: random.Random) -> list[UserAct]:
    users: list[UserAct] = []
    for _ in range(rng.choice((2, 4, 7))):
        sends = tuple(Send(rng.choice(KEYS), rng.choice(VALUES)) for _ in range(rng.choice((1, 1, 2, 4))))
        users.append(UserSends(_at(rng), sends))
    for _ in range(rng.choice((0, 1, 2, 3))):
        users.append(UserSends(_at(rng), (Send(DRAIN, rng.choice(VALUES)),)))
    for number in range(rng.choice((0, 1, 2, 3))):
        has_dedup = rng.random() < 0.5
        keys = [rng.choice((*KEYS, DRAIN)) for _ in range(rng.choice((1, 1, 2)))]
        sends = tuple(
            Send(key, rng.choice(VALUES), f"with a run {number} {place}" if has_dedup else "")
            for place, key in enumerate(keys)
        )
        users.append(UserSends(_at(rng), sends, unsure=rng.choice((0, 1)) if has_dedup else 0, start=NAME))
    return users


def _at(rng: random.Random) -> float:
    return round(rng.uniform(0.0, 5.5), 2)


# --- what goes wrong -------------------------------------------------------------------------------


def _faults(rng: random.Random, dag: Dag) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2))):
        verb, nth = rng.choice(VERBS), rng.choice((1, 1, 2, 3))
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
        task = f"{dag.name}/signal__{rng.choice((1, 1, 2, 3))}/{rng.choice(dag.tasks).name}"
        what: What = rng.choice(("clear", "clear", "clear", "success", "redo"))
        state = rng.choice(("", "running", "success", "success", "skipped"))
        faults.append(Act(round(drawing.draw_time(rng) / 2, 2), task, what, state, rng.choice((0.0, 0.3, 1.0))))
    if rng.random() < 0.3:
        faults.append(Pause(drawing.draw_time(rng), dag.name, rng.choice((0.3, 1.5, 3.0))))
    if rng.random() < 0.2:
        faults.append(scenario.TakeOver(drawing.draw_time(rng)))
    return tuple(faults)
