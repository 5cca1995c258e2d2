"""What a seed means: who subscribes to what, what is published when, what users' filters do, and what goes wrong.

A scenario is data; `drawing` draws it from a seed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.protocol.messages.runner import EVENT_BYTES_MAX

FAULTS_UNTIL_S = 6.0  # no fault begins later: what follows is the time to come to rest
CANARY_AT_S = 10.0  # one more message a lane, when all faults are over: a pair that only looks healthy does not take it
FRAME_BYTES_SMALL = 40_000  # the report of a failure with its traceback fits; a few padded events do not
PADDING_BYTES = 15_000
EVENT_BYTES_SMALL = 18_000  # a padded event fits, a long one does not; a whole letter of it fits into a small frame
LONG_BYTES = 20_000
MAX_DELIVERIES = 5  # of all triggers: after so many failures on one message they are passed over it
KILLS_MAX = 3  # ends of the process with one message, after which its trigger is passed over it
KILLER_KEYS_MAX = 3  # messages with which one trigger may end the process; with one more it is quarantined
HARM_MAX = 3  # ends of the process by a trigger without a message, after which it is quarantined
UNFIT = 1_000_000  # failures: the trigger can never take the message


class Part(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


# --- the workload ----------------------------------------------------------------------------------

PlanKind = Literal["fire", "reject", "return", "refused", "poison", "long"]


class Plan(Part, frozen=True):
    """What one trigger's filter does with one message.

    ``events`` are fired, ``nap_s`` is slept before each of them. The first ``failures`` times (`UNFIT`: always) the
    filter raises after ``fired_before_failing`` events; the first ``stalls`` times it hangs until it is cancelled.
    Before that, the first ``kills`` times (`UNFIT`: always), the filter ends the process that it runs in.
    ``swallows``: while hanging it ignores its cancellation, so that only the end of its process ends it.

    What becomes of the events is the ``kind``: those of "refused" have no form on the wire, those of "long" are too
    big (in a topology with `EVENT_BYTES_SMALL`), those of "poison" are refused by the database. ``steady``: they are
    the same at each delivery, and do not name the handout that they derive from. ``ends``: they are of the kind that
    ends a task, and the trigger returns with the first.
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
    steady: bool = False
    ends: bool = False


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
    event_bytes_max: int = EVENT_BYTES_MAX
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


LetterAct = Literal["redrive", "edit", "discard"]
LETTER_ACTS: tuple[LetterAct, ...] = ("redrive", "redrive", "edit", "discard")  # redrives are what there is most of


class TendLetters(Timed, frozen=True):
    """A user does this to one dead letter of an event after the other, resolved ones too; all ``times`` over.

    A user who dies at a mark (`KillAtMark`) leaves the other letters to the next time.
    """

    what: LetterAct
    times: int = 1
    pause_s: float = 0.0


class RedriveMessages(Timed, frozen=True):
    """A user redrives every message that is a dead letter, and waits for what becomes of them; all ``times`` over."""

    times: int = 1


class MendDatabase(Timed, frozen=True):
    """From now on the database stores what it has refused."""


class Redeliver(Timed, frozen=True):
    """A user has all events handed over again that were set aside by a consumer, by the place of its plan."""

    consumer: int


class Consuming(Part, frozen=True):
    """A consumer of the events of a trigger: its workers take batches into a table of the user's, and pause between.

    By the number of the batch, over all workers: ``fails`` are those in which the user's code raises, ``dies`` those in
    which its process ends, both in the middle of the user's rows. The code always raises at the events of the messages
    ``unfit``, by the broker's names, until the user mends it.
    """

    watcher: str
    begins_at: float = 0.0
    workers: int = 1
    limit: int = 100
    pause_s: float = 0.2
    fails: tuple[int, ...] = ()
    dies: tuple[int, ...] = ()
    unfit: tuple[str, ...] = ()
    mended_at: float = 0.0
    max_deliveries: int = 5


class Scenario(Part, frozen=True):
    """All of it. ``lanes`` are the messages, in order, by lane."""

    seed: int
    topology: Topology
    lanes: tuple[tuple[Message, ...], ...] = ()
    faults: tuple[Fault, ...] = ()
    consumers: tuple[Consuming, ...] = ()


def trigger_names(topology: Topology) -> list[str]:
    """The triggers that are there from the beginning."""
    return [f"t{number}" for number in range(1, topology.triggers + 1)]


LATE = "late"  # the name of the trigger that a fault adds
