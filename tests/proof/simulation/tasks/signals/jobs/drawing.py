"""What a seed of signals means for jobs: in a third of the seeds a DAG with tasks whose operators decide about signals,
endless ones, and some that the time starts.
"""

from __future__ import annotations

import random

from tests.proof.simulation import drawing, scenario
from tests.proof.simulation.scenario import Fault
from tests.proof.simulation.tasks.faults import Act, FailAtVerb, KillAtVerb, KillWorker, Pause, What
from tests.proof.simulation.tasks.scenario import POOL, Dag, Leg, Task, draw_legs, run_name
from tests.proof.simulation.tasks.signals.plans import OfSignals, Send, UserAct, UserSends
from tests.proof.simulation.tasks.signals.rules.drawing import ENDED_AT_S, KEYS, MAIN, WithRules
from tests.proof.simulation.tasks.signals.rules.plans import Asks, Decides, EndsRun, OfCall, Rule, Ruled

from headgate.protocol.messages.rules import Action

NAME = "jobs"
VALUES = ("1", "1", "2", "3", "4", "5")
ACTIONS: tuple[Action, ...] = ("START", "START", "START", "RESTART", "STOP", "NONE")
CALLS: tuple[OfCall, ...] = ("", "", "", "raises", "nonsense", "dies", "hangs")
EVER_S = 1000.0  # of the step of an endless task that ends by nothing of its own
ENDLESS_WORKERS = 2
MARKS = (
    *("signals.decision_given", "signals.decided_written", "signals.decided_written", "signals.decided_stored"),
    *("endless.moved", "endless.moved", "signals.action_written", "store.before_commit"),
)
VERBS = ("ask", "settle_decisions", "settle_decisions", "tick", "tick", "lose_worker", "adopt", "plan", "dispatch")


def draw(seed: int, *, is_calm: bool) -> WithRules:
    """Return what is added to the scenario of a seed."""
    rng = random.Random(f"{seed}/jobs of signals")
    if rng.random() < 0.67:
        return WithRules()
    dag = _dag(rng, is_calm=is_calm)
    users = (*_senders(rng, dag), *_ends(rng, dag))
    return WithRules((dag,), users, () if is_calm else _faults(random.Random(f"{seed}/faults of jobs"), dag))


def _dag(rng: random.Random, *, is_calm: bool) -> Dag:
    tasks = [Task(MAIN, attempts=((Leg(seconds=rng.choice((2.0, 4.0, 7.0))),),))]
    for name in "efg"[: rng.choice((1, 1, 2, 3))]:
        kind = rng.choice((_deciding, _deciding, _endless, _endless, _periodic))
        tasks.append(kind(rng, name, is_calm=is_calm))
    runs_at = tuple(sorted(round(rng.uniform(0.0, 2.0), 2) for _ in range(rng.choice((1, 1, 2)))))
    return Dag(NAME, tuple(tasks), runs_at)


def _deciding(rng: random.Random, name: str, *, is_calm: bool) -> Task:
    troubles = () if is_calm or rng.random() < 0.5 else tuple(rng.choice(CALLS) for _ in range(rng.choice((1, 3, 6))))
    decides = Decides(
        tuple((value, rng.choice(ACTIONS)) for value in sorted(set(VALUES))),
        rng.choice((0.0, 0.05, 0.4)),
        troubles,
        ("5",) if rng.random() < 0.2 else (),
    )
    rules = [Rule(key, rng.choice(("START", "START", "STOP"))) for key in rng.sample(KEYS, rng.choice((1, 1, 2)))]
    if rng.random() < 0.2:
        rules.append(Rule(rules[0].key, "START", rng.choice(VALUES)))
    ruled = Ruled(tuple(rules), rng.choice(("latest", "latest", "each", "ignore")), decides=decides)
    return Task(
        name,
        retries=rng.choice((0, 1)),
        retry_delay_s=rng.choice((0.0, 1.5)),
        pool=rng.choice((POOL, "default_pool")),
        attempts=tuple(draw_legs(rng, (), is_calm=is_calm) for _ in range(2)),
        signals=OfSignals(ruled=ruled),
    )


def _endless(rng: random.Random, name: str, *, is_calm: bool) -> Task:
    """Begins with its run, or by a signal; ends by the end of another task, by a signal, or by that of its run."""
    rules = [Rule(ended=MAIN, action="STOP")] if rng.random() < 0.7 else []
    if rng.random() < 0.4 or not rules:
        rules.append(Rule(rng.choice(KEYS), "STOP", rng.choice((None, "3"))))
    if rng.random() < 0.3:
        rules.append(Rule(rng.choice(KEYS), rng.choice(("START", "RESTART")), rng.choice(("1", "2"))))
    last = Leg(seconds=rng.choice((EVER_S, EVER_S, EVER_S, 3.0)), trouble="stubborn" if rng.random() < 0.3 else "")
    if not is_calm and rng.random() < 0.3:
        last = Leg(seconds=rng.choice((1.0, 2.5)), trouble=rng.choice(("dies_before", "dies_after")))
    own = (Leg("fail", rng.choice((0.5, 1.5))),) if not is_calm and rng.random() < 0.3 else (last,)
    return Task(
        name,
        retries=rng.choice((0, 0, 1, 2)),
        retry_delay_s=rng.choice((0.0, 0.3)),
        pool=rng.choice((POOL, "default_pool")),
        attempts=(own, (last,)),
        signals=OfSignals(ruled=Ruled(tuple({one.name: one for one in rules}.values()), stopped_as="success")),
        endless=True,
    )


def _periodic(rng: random.Random, name: str, *, is_calm: bool) -> Task:
    rules = [Rule(every_s=rng.choice((1.0, 1.3, 2.5)), action=rng.choice(("START", "START", "RESTART")))]
    if rng.random() < 0.5:
        rules.append(Rule(rng.choice(KEYS), rng.choice(("START", "STOP")), rng.choice(("1", "2"))))
    return Task(
        name,
        retries=rng.choice((0, 1)),
        attempts=tuple(draw_legs(rng, (), is_calm=is_calm) for _ in range(2)),
        signals=OfSignals(ruled=Ruled(tuple(rules), rng.choice(("latest", "each", "ignore")))),
    )


# --- users -----------------------------------------------------------------------------------------


def _senders(rng: random.Random, dag: Dag) -> list[UserAct]:
    users: list[UserAct] = []
    for _ in range(rng.choice((2, 4, 8))):
        sends = tuple(Send(rng.choice(KEYS), rng.choice(VALUES)) for _ in range(rng.choice((1, 1, 2, 4))))
        users.append(UserSends(round(rng.uniform(0.0, 5.5), 2), sends))
    for _ in range(rng.choice((0, 0, 1, 2))):
        task = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{rng.choice(dag.tasks).name}"
        users.append(Asks(round(rng.uniform(0.0, 5.5), 2) + 0.0037, task, rng.choice(("START", "RESTART", "STOP"))))
    return users


def _ends(rng: random.Random, dag: Dag) -> list[UserAct]:
    """Return the users who end all runs, at last."""
    runs = [run_name(dag.name, number) for number in range(1, len(dag.runs_at) + 1)]
    early = [EndsRun(round(rng.uniform(1.0, 6.0), 2) + 0.0061, run) for run in runs if rng.random() < 0.2]
    return [*early, *(EndsRun(ENDED_AT_S, run) for run in runs)]


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
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = drawing.draw_time(rng)
        faults.append(
            rng.choice(
                (
                    KillWorker(at),
                    KillWorker(at),
                    scenario.TakeOver(at),
                    scenario.Drain(at),
                    scenario.KillSupervisor(at, rng.random() < 0.5, rng.choice((0.0, 0.3, 2.0))),
                    scenario.FreezeSupervisor(at, rng.choice((1.5, 3.0))),
                    Pause(at, dag.name, rng.choice((0.3, 1.5))),
                )
            )
        )
    if rng.random() < 0.3:
        name = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{rng.choice(dag.tasks).name}"
        what: What = rng.choice(("clear", "clear", "success", "failed", "redo"))
        state = rng.choice(("", "running", "running", "success", "skipped"))
        faults.append(Act(round(drawing.draw_time(rng) / 2, 2), name, what, state, rng.choice((0.0, 0.3))))
    return tuple(faults)
