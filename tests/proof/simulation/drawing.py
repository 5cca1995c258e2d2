"""From a seed to its scenario.

Everything is drawn before anything runs, from one generator a part, so that taking away a fault
(`tests.proof.simulation.judging`) changes nothing about the topology and the workload.
"""

from __future__ import annotations

import random

import msgspec
from tests.proof.simulation.scenario import (
    CANARY_AT_S,
    EVENT_BYTES_SMALL,
    FAULTS_UNTIL_S,
    FRAME_BYTES_SMALL,
    KILLS_MAX,
    LATE,
    LETTER_ACTS,
    MAX_DELIVERIES,
    UNFIT,
    AddWatcher,
    AdvanceFails,
    AdvanceHangs,
    Consuming,
    CutLink,
    DatabaseIsAway,
    DatabaseIsSlow,
    Drain,
    Fault,
    FreezeSupervisor,
    KillAtMark,
    KillRunner,
    KillSupervisor,
    MendDatabase,
    Message,
    Plan,
    PlanKind,
    Redeliver,
    RedriveMessages,
    RemoveWatcher,
    Scenario,
    StallLink,
    StartBeside,
    StreamFails,
    TakeOver,
    TendLetters,
    Topology,
    trigger_names,
)

from headgate.protocol.marks import CONSUMER_MARKS, LETTER_MARKS, MARKS, REDELIVERY_MARKS

FAULTS_FROM_S = 0.0
PUBLISH_UNTIL_S = 4.0
MESSAGES_PER_LANE = (1, 1, 1, 2, 2, 3, 4)  # the canary not counted; many small seeds find more than few large ones

# Marks of other parts of the product, which the simulation does not run.
_NOT_SIMULATED = ("filelog.", "capture.", "arbiter.")
MARKS_SIMULATED = tuple(name for name in MARKS if not name.startswith(_NOT_SIMULATED))


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"{seed}/scenario")
    topology = _draw_topology(rng)
    faults = _draw_faults(random.Random(f"{seed}/faults"), topology)
    names = trigger_names(topology)
    if any(isinstance(fault, AddWatcher) for fault in faults):
        names.append(LATE)
    lanes = _draw_lanes(random.Random(f"{seed}/workload"), topology, names)
    if topology.keyed:
        lanes = _with_unfit(random.Random(f"{seed}/unfit"), lanes, names)
        lanes = _with_killer(random.Random(f"{seed}/killer"), lanes, names)
    plan = _with_letters(random.Random(f"{seed}/letters"), Scenario(seed, topology, lanes, faults), names)
    plan = _with_redriven_messages(random.Random(f"{seed}/redriven messages"), plan, names)
    return _with_consumers(random.Random(f"{seed}/consumers"), plan)


def _draw_topology(rng: random.Random) -> Topology:
    # A subscriber that is failed for being slow starts again from the first message of its burst. It only ever gets
    # anywhere where nothing but its own naps makes it slow; that is why the pair pauses instead.
    overflows = rng.random() < 0.15
    # One event a round, each way over a slow link, is slower than any ack timeout: that would be no fault of the pair.
    latency_s = 0.0 if overflows else rng.choice((0.0, 0.0, 0.01, 0.2))
    is_far = latency_s > 0.1
    frame_bytes_max = FRAME_BYTES_SMALL if rng.random() < 0.3 else 16 * 1024 * 1024
    return Topology(
        triggers=rng.choice((1, 1, 1, 2, 2, 3)),
        lanes=rng.choice((1, 1, 1, 2, 3)),
        keyed=rng.random() < 0.85,
        overflow="fail" if overflows else "pause",
        subscriber_queue_max=rng.choice((4, 8)) if overflows else rng.choice((1, 2, 1024)),
        in_flight_max=rng.choice((1, 3, 100)),
        round_events_max=rng.choice((1000, 100) if is_far or overflows else (1, 3, 1000)),
        outbox_events_max=10_000 if overflows else rng.choice((1, 4, 10_000)),
        slice_events_max=rng.choice((1, 2, 500)),
        frame_bytes_max=frame_bytes_max,
        ack_timeout_s=rng.choice((4.0, 10.0) if is_far else (2.0, 4.0, 10.0)),
        cohort_grace_s=rng.choice((0.0, 0.0, 0.5)),
        latency_s=latency_s,
        chops_writes=not overflows and frame_bytes_max != FRAME_BYTES_SMALL and rng.random() < 0.1,
    )


def _draw_lanes(rng: random.Random, topology: Topology, names: list[str]) -> tuple[tuple[Message, ...], ...]:
    # One trigger at most goes for good, and never the only one: somebody has to take the rest.
    may_return = rng.choice(names) if len(names) > 1 and rng.random() < 0.15 else None
    bursts = [round(rng.uniform(0.0, PUBLISH_UNTIL_S), 2) for _ in range(rng.randint(1, 3))]
    is_calm = rng.random() < 0.25
    lanes = []
    for _ in range(topology.lanes):
        messages = []
        times = sorted(
            rng.choice(bursts) + rng.choice((0.0, 0.0, 0.1, 0.5)) for _ in range(rng.choice(MESSAGES_PER_LANE))
        )
        for publish_at in times:
            plans = {}
            for name in names:
                plan = _draw_plan(rng, topology, is_calm=is_calm, may_return=name == may_return)
                if plan is not None:
                    plans[name] = plan
            messages.append(Message(publish_at, plans))
        lanes.append((*messages, Message(CANARY_AT_S)))
    return tuple(lanes)


def _with_unfit(
    rng: random.Random, lanes: tuple[tuple[Message, ...], ...], names: list[str]
) -> tuple[tuple[Message, ...], ...]:
    """Now and then make one message one that one of the triggers can never take."""
    if rng.random() >= 0.2:
        return lanes
    unfit = Plan(events=rng.choice((0, 1)), failures=UNFIT, fired_before_failing=rng.choice((0, 0, 1)))
    return _with_plan(rng, lanes, names, unfit)


def _with_killer(
    rng: random.Random, lanes: tuple[tuple[Message, ...], ...], names: list[str]
) -> tuple[tuple[Message, ...], ...]:
    """Now and then make one message one with which one of the triggers ends its process."""
    if rng.random() >= 0.1:
        return lanes
    killer = Plan(events=rng.choice((0, 1)), kills=rng.choice((1, KILLS_MAX - 1, UNFIT)))
    return _with_plan(rng, lanes, names, killer)


def _with_letters(rng: random.Random, plan: Scenario, names: list[str]) -> Scenario:
    """Now and then have some events refused, and users who care for their letters."""
    if rng.random() >= 0.2:
        return plan
    lanes = plan.lanes
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind: PlanKind = rng.choice(("poison", "poison", "long"))
        is_steady = plan.topology.keyed and rng.random() < 0.6
        lanes = _with_plan(rng, lanes, names, Plan(kind, events=rng.choice((1, 1, 2)), steady=is_steady))
    if len(names) > 1 and rng.random() < 0.3 and not _goes(plan):
        lanes = _with_plan(rng, lanes, names, Plan("poison", ends=True))
    faults = list(plan.faults)
    for _ in range(rng.choice((1, 2, 2, 3))):
        what = rng.choice(LETTER_ACTS)
        faults.append(TendLetters(draw_time(rng), what, rng.choice((1, 1, 2)), rng.choice((0.0, 0.0, 0.05, 0.4))))
    if rng.random() < 0.6:
        faults.append(MendDatabase(max(2.0, draw_time(rng))))  # later than most of the messages
    if rng.random() < 0.4:
        faults.append(KillAtMark(rng.choice(tuple(LETTER_MARKS)), rng.choice((1, 1, 2))))
    topology = msgspec.structs.replace(plan.topology, event_bytes_max=EVENT_BYTES_SMALL)
    return Scenario(plan.seed, topology, lanes, tuple(faults))


def _with_redriven_messages(rng: random.Random, plan: Scenario, names: list[str]) -> Scenario:
    """Now and then have users redrive messages, some of which their triggers can take by then."""
    if not plan.topology.keyed or rng.random() >= 0.15:
        return plan
    lanes = plan.lanes
    for _ in range(rng.choice((1, 1, 2, 3))):
        events, before = rng.choice((0, 1, 1, 2)), rng.choice((0, 0, 1))
        ends = rng.random() < 0.2
        unfit = Plan(
            "reject" if rng.random() < 0.1 else "fire",
            events=events,
            failures=0 if ends else MAX_DELIVERIES + rng.choice((0, 0, 0, 1, UNFIT)),
            fired_before_failing=min(before, events),
            kills=KILLS_MAX + rng.choice((0, 0, 1)) if ends else 0,
        )
        lanes = _with_plan(rng, lanes, names, unfit)
    marks = tuple(REDELIVERY_MARKS)
    faults = [KillAtMark(rng.choice(marks), rng.choice((1, 1, 2)))] if rng.random() < 0.5 else []
    redrives = [RedriveMessages(draw_time(rng), rng.choice((1, 1, 2, 3))) for _ in range(rng.choice((1, 2)))]
    redrives.append(RedriveMessages(FAULTS_UNTIL_S, 2))  # by then they are dead letters
    return msgspec.structs.replace(plan, lanes=lanes, faults=(*plan.faults, *redrives, *faults))


def _with_consumers(rng: random.Random, plan: Scenario) -> Scenario:
    """Now and then have programs of users consume the events of some triggers, and die."""
    if rng.random() >= 0.2:
        return plan
    consumers: list[Consuming] = []
    faults = list(plan.faults)
    for number in range(rng.choice((1, 1, 2))):
        troubles = rng.sample(range(1, 12), rng.choice((0, 1, 2, 3)))
        middle = rng.randint(0, len(troubles))
        consumers.append(
            Consuming(
                rng.choice(trigger_names(plan.topology)),
                rng.choice((0.0, draw_time(rng))),
                workers=rng.choice((1, 1, 2)),
                limit=rng.choice((1, 2, 100)),
                pause_s=rng.choice((0.05, 0.2, 1.0)),
                fails=tuple(troubles[:middle]),
                dies=tuple(troubles[middle:]),
            )
        )
        if rng.random() < 0.4:
            lane = rng.randrange(len(plan.lanes))
            consumers[number] = msgspec.structs.replace(
                consumers[number],
                unfit=(f"{lane}:{rng.randrange(len(plan.lanes[lane]) - 1)}",),
                mended_at=rng.choice((3.0, 6.0, 9.0)),
                max_deliveries=rng.choice((1, 2, 5)),
            )
            faults.append(Redeliver(draw_time(rng), number))
    if rng.random() < 0.4:
        faults.append(KillAtMark(rng.choice(tuple(CONSUMER_MARKS)), rng.choice((1, 2, 3, 5))))
    return msgspec.structs.replace(plan, faults=tuple(faults), consumers=tuple(consumers))


def _goes(plan: Scenario) -> bool:
    """Whether a trigger goes for good: another one that does might be the last."""
    returns = any(one.kind == "return" for lane in plan.lanes for message in lane for one in message.plans.values())
    return returns or any(isinstance(fault, RemoveWatcher) for fault in plan.faults)


def _with_plan(
    rng: random.Random, lanes: tuple[tuple[Message, ...], ...], names: list[str], plan: Plan
) -> tuple[tuple[Message, ...], ...]:
    """Give a plan to one of the triggers for one of the messages, but the canary."""
    lane, name = rng.randrange(len(lanes)), rng.choice(names)
    offset = rng.randrange(len(lanes[lane]) - 1)
    message = lanes[lane][offset]
    if message.plans.get(name, Plan()).kind == "return":
        return lanes
    message = msgspec.structs.replace(message, plans={**message.plans, name: plan})
    changed = (*lanes[lane][:offset], message, *lanes[lane][offset + 1 :])
    return (*lanes[:lane], changed, *lanes[lane + 1 :])


def _draw_plan(rng: random.Random, topology: Topology, *, is_calm: bool, may_return: bool) -> Plan | None:
    """Return a plan, or None for the ordinary one: fire one event at once."""
    if is_calm or rng.random() < 0.6:
        return None
    padded = topology.frame_bytes_max == FRAME_BYTES_SMALL and rng.random() < 0.5
    nap_s = rng.choice((0.0, 0.0, 0.05, 0.4))
    match rng.randrange(12):
        case 0:
            return Plan(events=0, nap_s=nap_s)
        case 1 | 2:
            return Plan(events=rng.randint(2, 3), nap_s=nap_s, padded=padded)
        case 3:
            return Plan("reject", events=rng.choice((0, 0, 1)))
        case 4 | 5:
            fired = rng.choice((0, 1))
            return Plan(events=rng.randint(1, 2), failures=rng.randint(1, 2), fired_before_failing=fired, padded=padded)
        case 6:
            return Plan(events=rng.randint(0, 2), stalls=1, swallows=rng.random() < 0.15)
        case 7:
            # Of two of them in a row the second is too late.
            return Plan(events=1, nap_s=round(topology.ack_timeout_s * 0.6, 3))
        case 8:
            return Plan("refused")
        case 9:
            return Plan("poison", events=rng.randint(1, 2))
        case 10 if may_return:
            return Plan("return", events=rng.choice((1, 1, 2)))
        case _:
            return Plan(padded=padded)


def _draw_faults(rng: random.Random, topology: Topology) -> tuple[Fault, ...]:
    faults = [_draw_fault(rng) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))]
    if rng.random() < 0.15:
        faults.append(AddWatcher(draw_time(rng), LATE))
    if topology.triggers > 1 and rng.random() < 0.2:
        faults.append(RemoveWatcher(draw_time(rng), rng.choice(trigger_names(topology))))
    if rng.random() < 0.15:
        faults.append(StartBeside(draw_time(rng)))
    return tuple(faults)


def draw_time(rng: random.Random) -> float:
    return round(rng.uniform(FAULTS_FROM_S, FAULTS_UNTIL_S), 2)


def draw_share(rng: random.Random) -> float:
    return 1.0 if rng.random() < 0.5 else round(rng.random(), 3)


def _draw_fault(rng: random.Random) -> Fault:
    at, seconds = draw_time(rng), rng.choice((0.3, 1.5, 3.0))
    match rng.randrange(20):
        case 0 | 1:
            return KillRunner(at, draw_share(rng))
        case 2 | 3:
            return KillSupervisor(at, runner_at_once=rng.random() < 0.5, down_s=rng.choice((0.0, 0.3, 2.0)))
        case 4 | 5 | 6 | 7 | 8:
            return KillAtMark(rng.choice(MARKS_SIMULATED), rng.choice((1, 1, 2, 3, 5)))
        case 9:
            return CutLink(at, draw_share(rng))
        case 10:
            return StallLink(at, seconds, up=rng.random() < 0.5)
        case 11 | 12:
            return DatabaseIsAway(at, seconds, ambiguous=rng.random() < 0.7)
        case 13:
            return DatabaseIsSlow(at, seconds)
        case 14:
            return FreezeSupervisor(at, seconds)
        case 15:
            return AdvanceFails(at, after_commit=rng.random() < 0.5)
        case 16:
            return AdvanceHangs(at, seconds)
        case 17:
            return StreamFails(at)
        case 18:
            return TakeOver(at)
        case _:
            return Drain(at)
