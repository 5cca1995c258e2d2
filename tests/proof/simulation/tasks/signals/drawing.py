"""What a seed of signals means: DAGs whose tasks send, wait and listen, watchers, users, and what goes wrong."""

from __future__ import annotations

import random

import msgspec
from tests.proof.simulation import drawing, scenario
from tests.proof.simulation.scenario import Fault, Topology
from tests.proof.simulation.tasks.faults import Act, Edit, FailAtVerb, KillAtVerb, What
from tests.proof.simulation.tasks.scenario import (
    POOL,
    Dag,
    Leg,
    LegEnd,
    Task,
    TaskScenario,
    Wait,
    draw_faults,
    run_name,
)
from tests.proof.simulation.tasks.signals.jobs import drawing as jobs
from tests.proof.simulation.tasks.signals.plans import (
    Cleans,
    Forgets,
    Limits,
    Listens,
    OfSignals,
    Send,
    Sensor,
    UserAct,
    UserPuts,
    UserSends,
    Watcher,
)
from tests.proof.simulation.tasks.signals.rules import drawing as rules
from tests.proof.simulation.tasks.signals.runs import drawing as runs
from tests.proof.simulation.tasks.streams.plans import Trouble

from headgate.protocol import marks

KEYS = ("k1", "k1", "k1", "k2", "k3")
VALUES = ("1", "1", "2", '"two"', '{"a":1,"b":2}', '{"b":2,"a":1}', "null")
DEDUPS = ("x1", "x2", "x3", "x4", "x5", "x6")
WANTED = (None, None, "1", "2", '{"a":1,"b":2}', "null")
TROUBLES: tuple[Trouble, ...] = ("dies_before", "dies_after", "cut", "twice", "late", "stubborn")
RUNS_UNTIL_S = 3.0
ACTS_UNTIL_S = 5.0
LONG_S = 30.0  # of a sensor: long enough for any version that fits to be considered, whatever went wrong
MARKS = (*marks.SIGNAL_MARKS, *marks.SIGNAL_MARKS, "outcomes.grouped", "store.before_commit", "plan.in_trigger")
VERBS = (
    *("consider_signals", "consider_signals", "send_signals", "send_signals", "succeed", "defer", "plan"),
    *("create_run", "time_out", "store_slice", "retry_due", "dispatch"),
)


class SignalScenario(TaskScenario, frozen=True, kw_only=True):
    """All of it."""

    watchers: tuple[Watcher, ...] = ()
    users: tuple[UserAct, ...] = ()
    limits: Limits = Limits()

    def watcher(self, name: str) -> Watcher:
        """Return a watcher."""
        return next(one for one in self.watchers if one.name == name)

    def dag(self, name: str) -> Dag:
        """Return a DAG."""
        return next(one for one in self.dags if one.name == name)


def draw(seed: int) -> SignalScenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"{seed}/signals")
    topology = Topology(latency_s=rng.choice((0.0, 0.0, 0.01, 0.2)), round_events_max=rng.choice((1, 1000)))
    is_calm = rng.random() < 0.25
    names = rng.choice((("d1",), ("d1", "d2"), ("d1", "d2")))
    dags = tuple(_dag(rng, name, is_calm=is_calm) for name in names)
    watchers = tuple(_watcher(rng, name) for name in ("w1", "w2")[: rng.choice((0, 1, 1, 2))])
    faults = () if is_calm else _draw_faults(random.Random(f"{seed}/faults of signals"), dags)
    # From generators of their own: a seed without rules means what it meant before there were any.
    parts = [part.draw(seed, is_calm=is_calm) for part in (rules, jobs, runs)]
    return SignalScenario(
        seed,
        topology,
        faults=faults + tuple(fault for part in parts for fault in part.faults),
        dags=dags + tuple(dag for part in parts for dag in part.dags),
        workers=rng.choice((2, 4, 4)),
        endless_workers=jobs.ENDLESS_WORKERS,
        peers=rng.random() < 0.3,
        pool_slots=8,
        watchers=watchers,
        users=_users(rng, dags, watchers) + tuple(user for part in parts for user in part.users),
        limits=Limits(
            kept=rng.choice((8, 8, 10_000)),
            page=rng.choice((1, 2, 20)),
            heard=rng.choice((1, 2, 1000)),
            waits=rng.choice((1, 2, 500)),
        ),
    )


# --- the DAGs --------------------------------------------------------------------------------------


def _dag(rng: random.Random, name: str, *, is_calm: bool) -> Dag:
    """One to three sensors, listeners and senders, side by side or behind each other."""
    tasks: list[Task] = []
    for one in "abcd"[: rng.choice((2, 3, 3, 4))]:
        upstream = (rng.choice(tasks).name,) if tasks and rng.random() < 0.5 else ()
        kind = rng.choice((_sensor, _sensor, _sender, _sender, _listener))
        rule = rng.choice(("all_success", "all_done", "all_done"))
        tasks.append(msgspec.structs.replace(kind(rng, one, is_calm), upstream=upstream, rule=rule))
    runs_at = tuple(sorted(round(rng.uniform(0.0, RUNS_UNTIL_S), 2) for _ in range(rng.choice((1, 2, 2, 3)))))
    return Dag(name, tuple(tasks), runs_at)


def _sensor(rng: random.Random, name: str, is_calm: bool) -> Task:
    timeout_s = rng.choice((1.5, 4.0, LONG_S, LONG_S, LONG_S))
    limit_s = rng.choice((None, None, None, 3.0))
    sensor = Sensor(
        key=rng.choice(KEYS),
        value=rng.choice(WANTED),
        since=rng.choice(("run", "run", "latest")),
        timeout_s=timeout_s,
        soft_fail=rng.random() < 0.2,
    )
    return Task(
        name,
        retries=rng.choice((0, 1, 2)),
        retry_delay_s=0.0 if is_calm else rng.choice((0.0, 0.3)),
        execution_timeout_s=limit_s,
        pool=POOL,
        starts_in_trigger=True,
        attempts=((Leg("defer", wait=Wait("never", timeout_s=timeout_s)), Leg()),),
        signals=OfSignals(sensor=sensor),
    )


def _sender(rng: random.Random, name: str, is_calm: bool, listens: Listens | None = None) -> Task:
    attempts = tuple(_legs(rng, is_calm=is_calm) for _ in range(rng.choice((1, 2, 2))))
    with_outcome = tuple(_sends(rng, rng.choice((0, 1, 1, 2))) for _ in range(2))
    return Task(
        name,
        retries=rng.choice((1, 1, 2)),
        retry_delay_s=0.0 if is_calm else rng.choice((0.0, 0.3)),
        pool=POOL,
        attempts=attempts,
        signals=OfSignals(
            now=_sends(rng, rng.choice((0, 1, 1, 2, 3))),
            listens=listens,
            then=_sends(rng, rng.choice((0, 1))) if listens else (),
            together=rng.random() < 0.5,
            with_outcome=with_outcome,
        ),
    )


def _listener(rng: random.Random, name: str, is_calm: bool) -> Task:
    after = rng.choice((None, None, 0, 0, 1, 3))
    listens = Listens(
        rng.choice(KEYS),
        after,
        rng.choice((None, None, 2)) if after is None else None,
        rng.choice((0.0, 0.8, 2.5)),
        rng.choice((1, 3, 100)),
        rng.random() < 0.4,
    )
    return _sender(rng, name, is_calm, listens)


def _legs(rng: random.Random, *, is_calm: bool) -> tuple[Leg, ...]:
    end: LegEnd = "return" if is_calm or rng.random() < 0.65 else rng.choice(("fail", "fail", "skip", "give_up"))
    last = Leg(end, rng.choice((0.0, 0.05, 0.4, 1.2)), trouble=_trouble(rng, is_calm))
    if rng.random() < 0.75:
        return (last,)
    return (Leg("defer", rng.choice((0.0, 0.3)), Wait("event", 0.3), trouble=_trouble(rng, is_calm)), last)


def _trouble(rng: random.Random, is_calm: bool) -> Trouble:
    return rng.choice(TROUBLES) if not is_calm and rng.random() < 0.2 else ""


def _sends(rng: random.Random, count: int) -> tuple[Send, ...]:
    return tuple(
        Send(
            rng.choice(KEYS),
            rng.choice(VALUES),
            rng.choice(DEDUPS) if rng.random() < 0.5 else "",
            of_run=rng.random() < 0.2,
        )
        for _ in range(count)
    )


# --- beside them -----------------------------------------------------------------------------------


def _watcher(rng: random.Random, name: str) -> Watcher:
    count = rng.choice((1, 3, 5))
    long = tuple(number for number in range(count) if rng.random() < 0.15)
    return Watcher(name, rng.choice(KEYS), count, rng.choice((0.0, 0.1, 0.6)), long, rng.choice(("", "", "k2")))


def _users(rng: random.Random, dags: tuple[Dag, ...], watchers: tuple[Watcher, ...]) -> tuple[UserAct, ...]:
    acts: list[UserAct] = []
    for _ in range(rng.choice((1, 3, 6, 10))):
        acts.append(_user_sends(rng, dags))
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = round(rng.uniform(0.0, ACTS_UNTIL_S), 2)
        acts.append(rng.choice((Forgets(at, rng.choice(KEYS)), Cleans(at, rng.choice((0.0, 0.5, 1.5))))))
    if watchers and rng.random() < 0.3:
        acts.append(UserPuts(round(rng.uniform(0.0, ACTS_UNTIL_S), 2), rng.choice(watchers).name))
    return tuple(acts)


def _user_sends(rng: random.Random, dags: tuple[Dag, ...]) -> UserSends:
    sends, dag = _sends(rng, rng.choice((1, 1, 2, 3))), rng.choice(dags)
    run = run_name(dag.name, rng.randint(1, len(dag.runs_at))) if any(one.of_run for one in sends) else ""
    unsure = rng.choice((0, 0, 1, 2)) if all(one.dedup for one in sends) else 0
    return UserSends(round(rng.uniform(0.0, ACTS_UNTIL_S), 2), sends, run, unsure)


# --- what goes wrong -------------------------------------------------------------------------------


def _draw_faults(rng: random.Random, dags: tuple[Dag, ...]) -> tuple[Fault, ...]:
    faults: list[Fault] = [fault for fault in draw_faults(rng, dags) if not isinstance(fault, Act | Edit)]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        verb, nth = rng.choice(VERBS), rng.choice((1, 1, 2, 3, 5))
        faults.append(
            rng.choice(
                (
                    scenario.KillAtMark(rng.choice(MARKS), nth),
                    KillAtVerb(verb, nth, rng.random() < 0.6),
                    FailAtVerb(verb, nth, rng.random() < 0.8),
                )
            )
        )
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        faults.append(_draw_act(rng, dags))
    if rng.random() < 0.2:
        dag = rng.choice(dags)
        seconds = rng.choice((0.3, 1.5, 3.0))
        faults.append(Edit(drawing.draw_time(rng) / 2, dag.name, rng.choice(dag.tasks).name, seconds))
    return tuple(faults)


def _draw_act(rng: random.Random, dags: tuple[Dag, ...]) -> Act:
    dag = rng.choice(dags)
    name = f"{run_name(dag.name, rng.randint(1, len(dag.runs_at)))}/{rng.choice(dag.tasks).name}"
    what: What = rng.choice(("clear", "clear", "clear", "success", "failed", "redo"))
    state = rng.choice(("", "running", "running", "deferred", "deferred", "success", "success", "failed"))
    at_s, delay_s = round(drawing.draw_time(rng) / 2, 2), rng.choice((0.0, 0.05, 0.3, 1.0))
    return Act(at_s, name, what, state, delay_s)
