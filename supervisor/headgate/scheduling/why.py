"""`headgate why`: explain from the facts in the database why a task or a trigger waits.

docs/deferral.md, *Why does it wait?*, has the flowchart. The questions are asked in its order: is there anything to
wait for, which supervisor should run it, is that one alive, has it capacity, has it failed, and what was the last
event. The first problem found is the headline; further ones are listed among the facts. These modules query nothing
themselves, so that tests can pass any facts.

The database does not know the state inside a running trigger, for example its place in a stream or a confirmation that
has not arrived. Its runner logs these, and the answer says in which log to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from headgate.protocol.messages.dags import TaskState, TriggerRule
from headgate.protocol.messages.rules import STARTING, Action
from headgate.scheduling.words import counted, moment, some, span

HEADGATE_UP = "start `headgate up`"
CLOCK_TOLERANCE_S = 1.0  # a heartbeat may be this much later than the transaction that looks at it
RUNNER_ENDS_TOLD_MIN = 3  # within the time for which a supervisor counts them; fewer are no reason to look
DIGEST_CHARS_SHOWN = 8  # of DAG files: enough to see that two supervisors do not have the same
OWNED_COUNTED_MAX = 10_000  # of a supervisor's triggers, unless it matters whether it is at its capacity

RunState = Literal["queued", "running", "success", "failed"]
SupervisorState = Literal["alive", "silent", "fenced", "ended", "gone"]  # gone: its process is no longer there


# --- facts ---------------------------------------------------------------------------------------


class RunnerEnds(msgspec.Struct, frozen=True, omit_defaults=True):
    """How often a runner ended within the last ``within_s`` seconds unless it was asked to, and ``last`` how.

    ``wait_s``: how long its supervisor waits before it starts the next one; 0 if it does not wait.
    """

    times: int
    within_s: float
    last: str
    wait_s: float = 0.0

    def __str__(self) -> str:
        waits = f"; the next one starts after {span(self.wait_s)}" if self.wait_s else ""
        return f"ended {counted(self.times, 'time')} within {span(self.within_s)}, the last time so: {self.last}{waits}"


class DagFolder(msgspec.Struct, frozen=True):
    """The DAG files of a supervisor: digests of where and of what they are, and since when, in seconds since 1970."""

    where: str
    files: str
    since: float

    @property
    def files_shown(self) -> str:
        """The digest of the files, in the short form in which people compare it."""
        return self.files[:DIGEST_CHARS_SHOWN]


class Supervisor(msgspec.Struct, frozen=True):
    """One lease, with the triggers and tasks it has. Ages are by the database's clock; negative if that is set back."""

    epoch: int
    hostname: str
    pid: int
    state: SupervisorState
    heartbeat_age_s: float
    capacity: int
    queues: tuple[str, ...]
    open_triggers: int = 0
    tasks: int = 0
    workers: int = 1  # steps of tasks it can run at once; 0: it only runs triggers
    endless_workers: int = 0  # endless tasks it can run beside these
    endless_tasks: int = 0
    passed_over: tuple[tuple[str, str], ...] = ()  # what its scheduler has failed with, by its name, and why
    runner_ends: RunnerEnds | None = None
    dag_folder: DagFolder | None = None
    dag_folder_age_s: float = 0.0  # for so long its files have been these
    is_draining: bool = False  # it was asked to stop, and claims nothing any more

    @property
    def dying(self) -> RunnerEnds | None:
        """How its runner has ended, if that was so often that a person should look."""
        ends = self.runner_ends
        return ends if ends is not None and ends.times >= RUNNER_ENDS_TOLD_MIN else None

    @property
    def shown_state(self) -> str:
        """Its state in lists: ``draining`` for one that is alive and was asked to stop."""
        return "draining" if self.is_draining else self.state

    def __str__(self) -> str:
        return f"supervisor {self.epoch} (pid {self.pid} on {self.hostname})"


class StoredEvent(msgspec.Struct, frozen=True):
    """The newest event of a trigger; ``redelivered`` counts its later deliveries."""

    id: int
    age_s: float
    redelivered: int = 0


class StruckMessage(msgspec.Struct, frozen=True):
    """The message of a shared stream on which a trigger has failed last, ``strikes`` times by now.

    ``kills`` of them ended the runner's process. After ``max_deliveries`` it is passed over; 0: never.
    """

    key: str
    strikes: int
    kills: int
    max_deliveries: int


class StreamFacts(msgspec.Struct, frozen=True):
    """The shared stream of a trigger. ``triggers`` are open. ``held_up_by``: others that it may wait for, and why.

    ``away_s``: for how long its broker has been away, and ``away_error`` why; None if it is not.
    """

    name: str
    triggers: int
    owner: Supervisor | None = None
    held_up_by: tuple[tuple[str, str], ...] = ()
    away_s: float | None = None
    away_error: str = ""


class SignalFacts(msgspec.Struct, frozen=True):
    """The wait for a signal: its key, its namespace, the version up to which none fits, and the newest version.

    ``predicate`` is the condition on its value, in words; "" if any value will do. ``replaced`` of the newest versions
    have the id of an event in place of its payload, which is too large.
    """

    key: str
    namespace: str
    seen_version: int
    last_version: int
    predicate: str = ""
    replaced: int = 0


class TriggerFacts(msgspec.Struct, frozen=True):
    """One trigger. ``owner`` is None if it is not claimed, an age is None if the event has not happened.

    ``struck`` is set if its last failure was one on a message, which is not passed over. ``passed_over`` counts the
    messages that are. ``others_of_stream``: the number of open triggers that read the same shared stream. ``signal`` is
    set if it stands for the wait for a signal, which nobody runs.
    """

    id: int
    classpath: str
    queue: str
    age_s: float
    owner: Supervisor | None = None
    watcher: str | None = None
    task: tuple[str, str, str] | None = None  # dag, run_id, task_id
    failure_count: int = 0
    last_error: str | None = None
    last_failed_age_s: float | None = None
    finished_age_s: float | None = None
    removed_age_s: float | None = None
    newest_event: StoredEvent | None = None
    hold: str | None = None
    hold_reason: str | None = None
    held_age_s: float | None = None
    struck: StruckMessage | None = None
    passed_over: int = 0
    others_of_stream: int = 0
    stream: StreamFacts | None = None
    signal: SignalFacts | None = None

    @property
    def has_stored_since(self) -> bool:
        """Whether it has stored an event since its last failure; failures are counted until it has run for longer."""
        newest, failed_s = self.newest_event, self.last_failed_age_s
        return newest is not None and failed_s is not None and newest.age_s < failed_s


class Pool(msgspec.Struct, frozen=True):
    """The pool of a task. ``slots`` is None if there is no such pool. ``holders``: dag, run_id, task_id and slots."""

    name: str
    slots: int | None
    used: int = 0
    holders: tuple[tuple[str, str, str, int], ...] = ()


class TaskStreamFacts(msgspec.Struct, frozen=True):
    """The stream of a task: how many events are handled, how many wait, counted up to a limit, and how many it takes.

    ``reopens``: its trigger is to be opened again when its last run has ended. ``ended_as``: why no event will come.
    """

    handled: int
    waiting: int
    wanted: int
    contract: str
    reopens: bool = False
    ended_as: str | None = None


class GroupFacts(msgspec.Struct, frozen=True):
    """The mapped group of a task, whose instances go on index by index.

    ``upstream`` are the tasks outside of the group that its tasks wait for, ``may_begin`` says whether an index could
    begin now. ``open`` are the first indexes with an instance that has not ended, of ``open_count``; ``at`` has the
    states of the tasks of the group, in order, at the index of an instance, or else at the first open one.
    """

    name: str
    upstream: tuple[tuple[str, TaskState], ...] = ()
    may_begin: bool = True
    open: tuple[int, ...] = ()
    open_count: int = 0
    at: tuple[tuple[str, TaskState], ...] = ()


class WorklistFacts(msgspec.Struct, frozen=True):
    """The worklist that a task is expanded over: the ``given`` values of the file, and those that are ``appended``.

    Of a loop they are its iterations, and ``gate`` is the task that decides whether there is another one.
    """

    given: int
    appended: int
    length_max: int
    gate: str | None = None


class MapFacts(msgspec.Struct, frozen=True):
    """A mapped task: how many instances are ``made``, of how many, and how many are in which state.

    ``sources`` are the tasks over whose output it is expanded, ``emitters`` those over whose elements it is, which need
    not have ended; ``emitted`` counts these elements. ``stopped_by`` is the word of its author by which no more
    instances are made, ``first_open`` the index of the first instance that has begun and not ended.
    """

    window: int
    made: int = 0
    length: int | None = None
    counts: dict[str, int] = {}
    sources: tuple[str, ...] = ()
    emitters: tuple[str, ...] = ()
    emitted: int = 0
    stopped_by: str | None = None
    is_held: bool = False
    first_open: int | None = None
    group: GroupFacts | None = None
    worklist: WorklistFacts | None = None


class RuleFacts(msgspec.Struct, frozen=True):
    """A rule of a task about signals, as ``text``. ``met_version`` has met it, and waits for the task to start.

    ``sent_by`` is the command that sends one which may meet it; empty for a rule that is about no key.

    ``last_version`` is the newest of its key, of which all up to ``seen_version`` were held against it; None for a rule
    about the end of a task or the time, for what a user asked for, and if the run has ended. The next start of a rule
    about the time is ``due_in_s``. Users' code may decide about its signals: ``asks`` is "no",
    "yes", or "now" if it is asked about the next ones; ``error`` is why it could not, and ``decided`` what it said
    about ``met_version``. ``undecided`` counts the signals that do nothing because it could not decide about them,
    ``replaced`` those among the newest that have the id of an event in place of its payload, which is too large.
    ``failed_starts`` are those that had failed, the last one with ``failed_error``, when it started the task again.
    """

    text: str
    action: Action
    is_necessary: bool = False
    met_version: int | None = None
    seen_version: int = 0
    last_version: int | None = None
    asks: Literal["no", "yes", "now"] = "no"
    error: str | None = None
    decided: Action | None = None
    due_in_s: float | None = None
    undecided: int = 0
    failed_starts: int = 0
    failed_error: str | None = None
    replaced: int = 0
    sent_by: str = ""

    @property
    def is_met(self) -> bool:
        """Whether something has met it that is to start the task."""
        return self.met_version is not None and (self.decided or self.action) in STARTING

    @property
    def starts(self) -> bool:
        """Whether it starts the task."""
        return self.action in STARTING


class TaskFacts(msgspec.Struct, frozen=True):
    """One task of one run. ``*_in_s`` are seconds until a moment, negative if it is past, None if there is none.

    ``map`` is set for a mapped task itself, whose ``state`` is that of its own row, and for an instance of it, which
    has a ``map_index``; ``map_state`` is then the state of the task's own row. ``seen`` has all states of the rows of
    upstream tasks. ``upstream`` of an instance of a mapped group has the instances of the group at its index.

    ``since_s``: for how long it has been in its state, None if that is not recorded. ``ahead``: the number of scheduled
    tasks of its pool that are more urgent. ``other_runs``: the other active runs of its DAG.
    """

    dag: str
    run_id: str
    task_id: str
    state: TaskState
    pool: Pool
    run_state: RunState = "running"
    try_number: int = 0
    tries_max: int = 1
    retries: int = 0
    since_s: float | None = None
    is_paused: bool = False
    is_dag_removed: bool = False
    is_in_dag: bool = True
    unreadable: str | None = None  # why this version cannot read the DAG as it is stored
    import_error: str | None = None
    max_active_runs: int = 16
    other_runs: tuple[str, ...] = ()
    trigger_rule: TriggerRule = "all_success"
    upstream: tuple[tuple[str, TaskState], ...] = ()
    queue: str = "default"
    pool_slots: int = 1
    ahead: int = 0
    owner: Supervisor | None = None
    trigger: TriggerFacts | None = None
    next_method: str | None = None
    retry_in_s: float | None = None
    timeout_in_s: float | None = None
    deadline_in_s: float | None = None
    last_error: str | None = None
    stream: TaskStreamFacts | None = None
    map_index: int = -1
    map: MapFacts | None = None
    map_state: TaskState | None = None
    seen: dict[str, frozenset[TaskState]] = {}
    rules: tuple[RuleFacts, ...] = ()
    is_ending: bool = False  # signals start nothing of its run any more
    is_endless: bool = False
    moves: int = 0  # an endless one has lost so many workers in a row
    begins_in_s: float | None = None  # no worker gets it before: it was moved, or could not begin
    old_owner: Supervisor | None = None

    @property
    def is_map(self) -> bool:
        """Whether it is a mapped task itself."""
        return self.map is not None and self.map_index < 0

    @property
    def name(self) -> str:
        """Its name, with the index of an instance."""
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.map_index}]"

    @property
    def is_started_by_signals(self) -> bool:
        """Whether it begins by its rules, and not by what is upstream."""
        return any(rule.starts for rule in self.rules)


class Finding(msgspec.Struct, frozen=True):
    """One reason to wait, and what happens next because of it. ``reason`` is its name for programs."""

    reason: str
    text: str
    next: str


class Answer(msgspec.Struct, frozen=True):
    """The answer: one headline, the facts as (name, text), and what happens next or what the user should do.

    ``errors`` are whole, with their tracebacks, as (name, text); the sentences have one line of them.
    """

    reason: str
    headline: str
    facts: tuple[tuple[str, str], ...]
    next: str
    errors: tuple[tuple[str, str], ...] = ()


def answered(
    findings: Sequence[Finding], facts: Sequence[tuple[str, str]], errors: Sequence[tuple[str, str | None]] = ()
) -> Answer:
    """Return the answer whose headline is the first finding; the others are added to the facts."""
    first, *others = findings
    also = tuple(("also", other.text) for other in others)
    whole = tuple((name, error) for name, error in errors if error)
    return Answer(first.reason, first.text, (*facts, *also), first.next, whole)


# --- supervisors ---------------------------------------------------------------------------------


def alive(supervisors: Sequence[Supervisor]) -> list[Supervisor]:
    """Return those whose heartbeat is recent enough."""
    return [one for one in supervisors if one.state == "alive"]


def nobody_is_alive(supervisors: Sequence[Supervisor], *, with_workers: bool) -> Finding | None:
    """Return a finding if no supervisor is alive; ``with_workers``: none that runs tasks, and creates their runs."""
    if not alive(supervisors):
        return Finding("no_supervisor", "no supervisor is alive", f"{HEADGATE_UP}, or a supervisor on any machine")
    if with_workers and not any(one.workers for one in alive(supervisors)):
        text = "the supervisors that are alive run triggers alone, and no tasks"
        return Finding("no_workers", text, f"{HEADGATE_UP}, on any machine")
    return None


def nobody_serves(supervisors: Sequence[Supervisor], queue: str, *, with_workers: bool = False) -> Finding | None:
    """Return a finding if no living supervisor serves this queue; ``with_workers``: none that runs tasks."""
    if (nobody := nobody_is_alive(supervisors, with_workers=with_workers)) is not None:
        return nobody
    living = [one for one in alive(supervisors) if one.workers or not with_workers]
    serving = [one for one in living if queue in one.queues]
    if serving:
        text = f"every supervisor of the queue {queue!r} was asked to stop, and takes nothing new: {serving[0]} drains"
        return Finding("draining", text, HEADGATE_UP) if all(one.is_draining for one in serving) else None
    served = sorted({name for one in living for name in one.queues})
    return Finding(
        "no_supervisor_for_queue",
        f"no living supervisor serves the queue {queue!r}; what is served: {some(served)}",
        f"start a supervisor with `--queues {queue}`, or add the queue to one of those that run",
    )


def gone(owner: Supervisor, supervisors: Sequence[Supervisor], what: str) -> Finding | None:
    """Return a finding if the owner is not alive any more; ``what`` says what the next owner does."""
    if owner.state == "alive":
        return None
    others = [one for one in alive(supervisors) if one.epoch != owner.epoch]
    told = {
        "silent": f"its owner, {owner}, has been silent for {span(owner.heartbeat_age_s)}",
        "fenced": f"its owner, {owner}, was fenced: it writes nothing more",
        "ended": f"its owner, {owner}, has ended",
        "gone": f"the process of its owner, {owner}, is gone",
    }[owner.state]
    if not others:
        return Finding(f"owner_{owner.state}", f"{told}, and no other is alive", f"{HEADGATE_UP}: it will {what}")
    first = "another supervisor fences it and will" if owner.state in ("silent", "gone") else "another supervisor will"
    return Finding(f"owner_{owner.state}", told, f"{first} {what}, within seconds; nothing is to be done")


def passed_over(names: Sequence[str], supervisors: Sequence[Supervisor]) -> list[Finding]:
    """Return which schedulers have failed with one of these, as ``run etl r1``, or with a rule of it."""
    of_them = tuple(f" of the {name}" for name in names)
    return [
        Finding(
            "passed_over",
            f"the scheduler of {one} has failed with the {name}, and passes over it for a while: {error}",
            "it is tried again by itself; this is a fault of headgate, or a row that another version has written, and "
            "the log of that supervisor has the traceback",
        )
        for one in alive(supervisors)
        for name, error in one.passed_over
        if name in names or name.endswith(of_them)
    ]


def owner_facts(owner: Supervisor | None) -> list[tuple[str, str]]:
    """Return the facts about the owner."""
    if owner is None:
        return [("owner", "none")]
    beat = f"{owner.state}{', draining' if owner.is_draining else ''}, last heartbeat {moment(-owner.heartbeat_age_s)}"
    if owner.heartbeat_age_s < -CLOCK_TOLERANCE_S:
        beat += ": that is in the future, because the database's clock was set back, so it may not be alive"
    more = " or more" if owner.open_triggers == OWNED_COUNTED_MAX < owner.capacity else ""
    return [("owner", f"{owner}: {beat}"), ("owner's triggers", f"{owner.open_triggers:,}{more} of {owner.capacity:,}")]
