"""What `headgate status` looks at, and the form of what it says."""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.scheduling.drift import Verdict
from headgate.scheduling.why import Supervisor

COUNTED_MAX = 1000  # rows of one kind are counted up to this

Severity = Literal["broken", "attention", "notice"]


class TroubledTrigger(msgspec.Struct, frozen=True):
    """An open trigger that is held or has failed; ``absence`` says why and since when, in one line.

    ``is_back``: it has stored an event since its last failure. ``is_unreadable``: no supervisor could read its kwargs.
    """

    name: str
    absence: str
    failures: int = 0
    hold: str | None = None
    stream: str | None = None
    is_back: bool = False
    is_unreadable: bool = False


class ReturnedWatcher(msgspec.Struct, frozen=True):
    """A watcher of a shared stream whose trigger returned ``for_s`` seconds ago."""

    name: str
    stream: str
    for_s: float


class Unclaimed(msgspec.Struct, frozen=True):
    """An open trigger of a queue that no living supervisor has."""

    name: str
    queue: str
    age_s: float
    stream: str | None = None


class Overdue(msgspec.Struct, frozen=True):
    """A task for which something should have happened ``late_s`` seconds ago."""

    what: Literal["wait_timed_out", "retry_due", "deadline_over", "owner_gone", "scheduled"]
    dag: str
    run_id: str
    task_id: str
    late_s: float


class MissingPool(msgspec.Struct, frozen=True):
    """A pool that there is not, and the ``tasks`` that wait for it, up to `COUNTED_MAX`; ``first`` is one of them."""

    name: str
    tasks: int
    first: tuple[str, str, str]  # dag, run_id, task_id


class Letters(msgspec.Struct, frozen=True):
    """The open dead letters of one watcher or trigger, among the newest `COUNTED_MAX`."""

    name: str
    count: int
    newest_age_s: float


class TroubledConsumer(msgspec.Struct, frozen=True):
    """A consumer whose next event waits or has failed alone ``failures`` times, or that has unresolved letters.

    ``newest_age_s`` is the age of the newest of its ``letters``. They are counted among the newest `COUNTED_MAX` events
    that any consumer has set aside. ``waits_s`` is the age of the oldest event that it has yet to get, 0 if nobody need
    worry.
    """

    name: str
    failures: int
    error: str
    letters: int
    newest_age_s: float
    waits_s: float


class TroubledTask(msgspec.Struct, frozen=True):
    """A task of which something went wrong ``times`` times, the last time ``age_s`` seconds ago with this error."""

    dag: str
    run_id: str
    task_id: str
    times: int
    age_s: float
    error: str


class GoneDag(msgspec.Struct, frozen=True):
    """A DAG that has not been in its file for ``for_s`` seconds, and has unfinished runs."""

    name: str
    file: str
    runs: int
    for_s: float


class FullBacklog(msgspec.Struct, frozen=True):
    """A DAG for whose runs as many events of assets wait as may; ``dropped`` more make no run."""

    name: str
    dropped: int


class Drifted(msgspec.Struct, frozen=True):
    """A stream whose broker was not where headgate has left it, which nobody has accepted; ``verdict`` is the worst."""

    stream: int
    name: str
    verdict: Verdict


class BrokerAway(msgspec.Struct, frozen=True):
    """A stream whose producer has had no connection to its broker for ``for_s`` seconds."""

    stream: int
    name: str
    for_s: float
    error: str


class StatusFacts(msgspec.Struct, frozen=True):
    """Everything that `problems` looks at. No list has more than `COUNTED_MAX` rows.

    ``trigger_queues`` and ``task_queues``: those of open triggers, and of tasks that wait for a worker. ``old_keys``
    are still needed although a rotation has begun. ``failed_runs``: (dag, run_id), the newest first.
    """

    supervisors: tuple[Supervisor, ...] = ()
    trigger_queues: tuple[str, ...] = ()
    task_queues: tuple[str, ...] = ()
    has_active_runs: bool = False
    unclaimed: tuple[Unclaimed, ...] = ()
    troubled: tuple[TroubledTrigger, ...] = ()
    returned: tuple[ReturnedWatcher, ...] = ()
    missing_pools: tuple[MissingPool, ...] = ()
    overdue: tuple[Overdue, ...] = ()
    away: tuple[BrokerAway, ...] = ()
    impeded: tuple[tuple[int, str], ...] = ()  # supervisors by their epochs, and what they cannot use the database for
    unlogged: tuple[tuple[int, str], ...] = ()  # and why they cannot write logs of tasks
    passing_over: tuple[tuple[int, str], ...] = ()  # the same, and what has failed in their schedulers
    drifted: tuple[Drifted, ...] = ()
    letters: tuple[Letters, ...] = ()
    consumers: tuple[TroubledConsumer, ...] = ()
    undecided: tuple[TroubledTask, ...] = ()  # their on_signal could not decide about signals
    failed_starts: tuple[TroubledTask, ...] = ()  # they were started once more after starts had failed
    import_errors: tuple[tuple[str, str], ...] = ()  # file, error in one line
    gone_dags: tuple[GoneDag, ...] = ()
    full_backlogs: tuple[FullBacklog, ...] = ()
    failed_runs: tuple[tuple[str, str], ...] = ()
    old_keys: int = 0


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong: its name for programs, a sentence, and the command to look further with.

    ``details`` are lines with all that the sentence leaves out.
    """

    severity: Severity
    reason: str
    text: str
    next: str
    details: tuple[str, ...] = ()
