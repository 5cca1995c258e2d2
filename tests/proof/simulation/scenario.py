"""What a seed means: who subscribes to what, what is published when, what users' filters do, and what goes wrong.

A scenario is data. It is drawn from its seed before anything runs, from one generator a part, so that taking away
a fault (`tests.proof.simulation.shrinking`) changes nothing about the topology and the workload.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from headgate.protocol.marks import MARKS

FAULTS_FROM_S = 0.0
FAULTS_UNTIL_S = 6.0  # no fault begins later: what follows is the time to come to rest
PUBLISH_UNTIL_S = 4.0
MESSAGES_PER_LANE = (1, 1, 1, 2, 2, 3, 4)  # the canary not counted; many small seeds find more than few large ones
CANARY_AT_S = 10.0  # one more message a lane, when all faults are over: a pair that only looks healthy does not take it
FRAME_BYTES_SMALL = 40_000  # the report of a failure with its traceback fits; a few padded events do not
PADDING_BYTES = 15_000
MAX_DELIVERIES = 5  # of all triggers: after so many failures on one message they are passed over it
KILLS_MAX = 3  # ends of the process with one message, after which its trigger is passed over it
KILLER_KEYS_MAX = 3  # messages with which one trigger may end the process; with one more it is quarantined
HARM_MAX = 3  # ends of the process by a trigger without a message, after which it is quarantined
UNFIT = 1_000_000  # failures: the trigger can never take the message

# Marks of other parts of the product, which the simulation does not run.
_NOT_SIMULATED = ("filelog.", "capture.", "arbiter.")
MARKS_SIMULATED = tuple(name for name in MARKS if not name.startswith(_NOT_SIMULATED))


class Part(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


# --- the workload ----------------------------------------------------------------------------------

PlanKind = Literal["fire", "reject", "return", "refused", "poison"]


class Plan(Part, frozen=True):
    """What one trigger's filter does with one message.

    ``events`` are fired, ``nap_s`` is slept before each of them. The first ``failures`` times (`UNFIT`: always) the
    filter raises after ``fired_before_failing`` events; the first ``stalls`` times it hangs until it is cancelled.
    Before that, the first ``kills`` times (`UNFIT`: always), the filter ends the process that it runs in.
    ``swallows``: while hanging it ignores its cancellation, so that only the end of its process ends it.
    """

    kind: PlanKind = "fire"
    events: int = 1
    nap_s: float = 0.0
    failures: int = 0
    fired_before_failing: int = 0
    stalls: int = 0
    kills: int = 0
    swallows: bool = False
    padded: bool = False


class Message(Part, frozen=True):
    """One message of a lane; ``plans`` by the name of the trigger, where they are not the ordinary one."""

    publish_at: float
    plans: dict[str, Plan] = {}


class Topology(Part, frozen=True):
    """Who subscribes, and the limits and times (in seconds) that the pair works with.

    ``kills_at_start``: how often a trigger ends its process as it begins, before it gets a message.
    """

    triggers: int = 1
    lanes: int = 1
    keyed: bool = True
    overflow: Literal["pause", "fail"] = "pause"
    subscriber_queue_max: int = 1024
    in_flight_max: int = 100
    round_events_max: int = 1000
    outbox_events_max: int = 10_000
    slice_events_max: int = 500
    frame_bytes_max: int = 16 * 1024 * 1024
    ack_timeout_s: float = 5.0
    cohort_grace_s: float = 0.0
    latency_s: float = 0.0
    chops_writes: bool = False
    kills_at_start: dict[str, int] = {}


# --- the faults ------------------------------------------------------------------------------------


class Fault(Part, frozen=True):
    """Something that goes wrong, or that a user does."""


class Timed(Fault, frozen=True):
    """A fault that begins at a time, in seconds."""

    at: float


class KillRunner(Timed, frozen=True):
    """The runner dies; of what it wrote and the supervisor has not read, the share ``kept`` arrives."""

    kept: float = 1.0


class EndsWithOldBox(Timed, frozen=True):
    """The runner ends by itself, and its black box says what that of the first one said that named somebody."""


class KillSupervisor(Timed, frozen=True):
    """The supervisor dies, and its runner with it, at once or by itself when it sees the end of the link."""

    runner_at_once: bool = True
    down_s: float = 0.5


class KillAtMark(Fault, frozen=True):
    """Whoever reaches the mark for the ``nth`` time dies there."""

    mark: str
    nth: int = 1


class CutLink(Timed, frozen=True):
    """The link breaks between two living processes; of what is under way the share ``kept`` arrives."""

    kept: float = 1.0


class StallLink(Timed, frozen=True):
    """Nothing arrives for a while, in one direction."""

    seconds: float
    up: bool


class DatabaseIsAway(Timed, frozen=True):
    """The database does not answer; ``ambiguous``: its first commit meanwhile happens, and nobody is told."""

    seconds: float
    ambiguous: bool = False


class FileIsReplaced(Timed, frozen=True):
    """The database's file is replaced by a copy of itself: later commits to the open one are in no file."""


class DatabaseIsSlow(Timed, frozen=True):
    """The supervisor stands in a transaction for so long, once."""

    seconds: float


class FreezeSupervisor(Timed, frozen=True):
    """The supervisor stands still, as under SIGSTOP."""

    seconds: float


class AdvanceFails(Timed, frozen=True):
    """The next advance raises, before or after the broker has committed."""

    after_commit: bool


class AdvanceHangs(Timed, frozen=True):
    """The next advance takes so long."""

    seconds: float


class StreamFails(Timed, frozen=True):
    """The broker throws its reader out."""


class TakeOver(Timed, frozen=True):
    """This supervisor is cut off from its database, and nobody else is: when its lease has run out, another fences it.

    Then it is cut off no longer, and hears of it.
    """


class StartBeside(Timed, frozen=True):
    """One more supervisor is started on the database, for as long as it lives; timed faults are not about it."""


class Drain(Timed, frozen=True):
    """The supervisor is asked to stop, and started again when it has."""

    down_s: float = 0.2


class AddWatcher(Timed, frozen=True):
    """A user adds a trigger."""

    name: str


class RemoveWatcher(Timed, frozen=True):
    """A user removes a trigger."""

    name: str


class Release(Timed, frozen=True):
    """A user releases a trigger that is held."""

    name: str


class ChangeWatcher(Timed, frozen=True):
    """A user changes a trigger, which is to be started again with its position."""

    name: str


class Scenario(Part, frozen=True):
    """All of it. ``lanes`` are the messages, in order, by lane."""

    seed: int
    topology: Topology
    lanes: tuple[tuple[Message, ...], ...] = ()
    faults: tuple[Fault, ...] = ()


def trigger_names(topology: Topology) -> list[str]:
    """The triggers that are there from the beginning."""
    return [f"t{number}" for number in range(1, topology.triggers + 1)]


LATE = "late"  # the name of the trigger that a fault adds


# --- from a seed -----------------------------------------------------------------------------------


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
    return Scenario(seed, topology, lanes, faults)


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
        faults.append(AddWatcher(_time(rng), LATE))
    if topology.triggers > 1 and rng.random() < 0.2:
        faults.append(RemoveWatcher(_time(rng), rng.choice(trigger_names(topology))))
    if rng.random() < 0.15:
        faults.append(StartBeside(_time(rng)))
    return tuple(faults)


def _time(rng: random.Random) -> float:
    return round(rng.uniform(FAULTS_FROM_S, FAULTS_UNTIL_S), 2)


def _share(rng: random.Random) -> float:
    return 1.0 if rng.random() < 0.5 else round(rng.random(), 3)


def _draw_fault(rng: random.Random) -> Fault:
    at, seconds = _time(rng), rng.choice((0.3, 1.5, 3.0))
    match rng.randrange(20):
        case 0 | 1:
            return KillRunner(at, _share(rng))
        case 2 | 3:
            return KillSupervisor(at, runner_at_once=rng.random() < 0.5, down_s=rng.choice((0.0, 0.3, 2.0)))
        case 4 | 5 | 6 | 7 | 8:
            return KillAtMark(rng.choice(MARKS_SIMULATED), rng.choice((1, 1, 2, 3, 5)))
        case 9:
            return CutLink(at, _share(rng))
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
