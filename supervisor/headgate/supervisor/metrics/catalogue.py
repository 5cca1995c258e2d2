"""Everything that is measured, once: its name, kind, help and labels; in supervisors, and in servers of signals.

The names are without the prefix ``headgate_``. Labels are fixed sets, but for the names of streams, of which a runner
tells a limited number, and of consumers: so the number of series is bounded however many triggers, tasks and messages
there are. The table in docs/metrics.md is written from this module, and a test holds the alert rules against it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.protocol.messages.runner import STREAMS_TOLD_MAX

PREFIX = "headgate_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
EVENTS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)

STREAM_NAMES = (f"its name, of {STREAMS_TOLD_MAX} streams at most",)  # in place of values: they are not known before

Kind = Literal["counter", "gauge", "histogram"]


class Metric(msgspec.Struct, frozen=True):
    """One metric. ``labels``: the name of each label, and all values that it may have. ``bounds``: of a histogram."""

    kind: Kind
    name: str
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, in order."""
        return tuple(name for name, _ in self.labels)

    @property
    def is_of_streams(self) -> bool:
        """Whether it has series only for the streams that a runner tells of (`headgate.supervisor.metrics.streams`)."""
        return any(values is STREAM_NAMES for _, values in self.labels)

    @property
    def full_name(self) -> str:
        """The name of its first series, as it is scraped."""
        return f"{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


ALL: list[Metric] = []  # of supervisors, in the order of this module


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return _listed(Metric("counter", name, text, tuple(labels.items())))


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return _listed(Metric("gauge", name, text, tuple(labels.items())))


def _histogram(name: str, text: str, bounds: tuple[float, ...] = SECONDS) -> Metric:
    return _listed(Metric("histogram", name, text, bounds=bounds))


def _listed(metric: Metric) -> Metric:
    ALL.append(metric)
    return metric


# --- the supervisor ---
READY = _gauge("ready", "1 if all checks of /readyz hold; 0 as well while the loop is busy, and all else is as it was.")
CHECK = _gauge(
    "check",
    "1 if a check of /readyz holds.",
    check=("lease", "runner", "database", "staying"),
)
LEASE_LASTS = _gauge("lease_lasts_seconds", "How long the lease lasts unless it is renewed; renewed every heartbeat_s.")
LOOP_TURN = _histogram("loop_turn_seconds", "One turn of the supervisor's loop, without waiting.")
DATABASE_ERRORS = _counter("database_errors", "Transactions that failed because the database could not be used.")
DATABASE_AWAY = _gauge("database_away_seconds", "How long the database could not be used by now; 0 if it can.")
MEMORY = _gauge("process_memory_bytes", "Resident memory.", process=("supervisor", "runner"))
CPU = _counter("process_cpu_seconds", "CPU time of the process that is there now.", process=("supervisor", "runner"))

# --- the runner and its triggers ---
RUNNER_UP = _gauge("runner_up", "1 if a runner has said hello and is not asked to leave.")
RUNNER_ENDS = _counter("runner_ends", "Runners that ended without being asked to.")
TRIGGERS = _gauge("triggers", "Triggers that this supervisor owns.", state=("running", "held", "waiting"))
TRIGGER_CAPACITY = _gauge("trigger_capacity", "Triggers that this supervisor may own.")
TRIGGER_RUNS = _counter(
    "trigger_runs", "Runs of triggers whose end is stored.", outcome=("returned", "failed", "cancelled")
)

# --- streams, as the runner told with its last heartbeat or round ---
STREAM_LAG = _gauge(
    "stream_lag",
    "How much the broker has that is not advanced, if the producer knows it.",
    stream=STREAM_NAMES,
    unit=("messages", "bytes"),
)
STREAM_IN_FLIGHT = _gauge(
    "stream_in_flight_messages", "Messages that are handed out and not advanced.", stream=STREAM_NAMES
)
STREAM_QUEUED = _gauge(
    "stream_queued_messages", "Messages that wait for subscribers, counted once for each.", stream=STREAM_NAMES
)
STREAM_SUBSCRIBERS = _gauge(
    "stream_subscribers", "Triggers that read it.", stream=STREAM_NAMES, state=("online", "absent")
)
STREAM_HELD = _gauge(
    "stream_held_seconds",
    "How long nothing has been pulled because of a subscriber or its broker; 0 if it is.",
    stream=STREAM_NAMES,
)
STREAM_OLDEST = _gauge(
    "stream_oldest_seconds", "Age of the oldest message that is handed out and not advanced.", stream=STREAM_NAMES
)
STREAM_DRIFT = _gauge(
    "stream_drift",
    "Whether its broker is where headgate left it: 0, 1 if it is behind, 2 if it went back, 3 if messages may be lost.",
    stream=STREAM_NAMES,
)
STREAM_ADVANCED = _counter(
    "stream_advanced_messages",
    "Messages advanced since the runner started.",
    stream=STREAM_NAMES,
    outcome=("acked", "failed", "rejected"),
)
STREAM_ENDS = _counter("stream_ends", "Times that it ended by an error and is opened anew.", stream=STREAM_NAMES)

# --- events ---
EVENTS_STORED = _counter("events_stored", "Events stored for the first time.")
EVENTS_REDELIVERED = _counter("events_redelivered", "Events that came again and were stored already.")
EVENTS_REFUSED = _counter(
    "events_refused", "Events and messages that became dead letters instead.", by=("runner", "database", "difference")
)
MESSAGES_PASSED_OVER = _counter("messages_passed_over", "Messages that a trigger failed on max_deliveries times.")
SLICE_SECONDS = _histogram("store_slice_seconds", "One transaction that stores events.")
SLICE_EVENTS = _histogram("store_slice_events", "Events of one such transaction.", EVENTS)
INTAKE_WAITING = _gauge("intake_waiting_events", "Events that have come from the runner and are not stored yet.")

# --- tasks ---
WORKERS = _gauge("workers", "Worker processes that may run steps at once.")
STEPS_RUNNING = _gauge("task_steps_running", "Steps that workers have, those behind others included.")
STEPS_ENDED = _counter(
    "task_steps",
    "Steps whose end is stored.",
    outcome=("succeeded", "skipped", "failed", "deferred", "handled", "lost", "stopped", "returned"),
)
STEP_SECONDS = _histogram("task_step_seconds", "How long steps ran in their workers.")
TASKS_ADOPTED = _counter("tasks_adopted", "Tasks taken over from supervisors that have died.")
RUNS_ENDED = _counter("dag_runs", "Runs of DAGs that ended here.", state=("success", "failed"))
RUNS_MADE = _counter("dag_runs_made", "Runs of DAGs that this supervisor has made by date or asset.")

# --- the whole database, asked at most every `DATABASE_LOOK_S` of reporting.py ---
PROBLEMS = _gauge(
    "problems",
    "Lines of `headgate status`, the same from all supervisors of a database.",
    severity=("broken", "attention", "notice"),
)

CONSUMERS_TOLD_MAX = 100
CONSUMER_OLDEST = _gauge(
    "consumer_oldest_seconds",
    "Age of the oldest event that a consumer has yet to get; 0 if it has all. The same from all supervisors.",
    consumer=(f"its name, of {CONSUMERS_TOLD_MAX} consumers at most",),
)

# --- servers of signals: processes of their own (`headgate.signal_server`) ---
SIGNALS_READY = Metric("gauge", "signals_ready", "1 if all checks of /readyz of a server of signals hold.")
SIGNALS_CHECK = Metric(
    "gauge", "signals_check", "1 if a check of its /readyz holds.", (("check", ("database", "staying")),)
)
SIGNALS_CALLS = Metric(
    "counter",
    "signals_calls",
    "Calls that have ended; refused: they would be again; failed: they may be repeated.",
    (("call", ("send", "list", "listen")), ("outcome", ("answered", "refused", "failed"))),
)
SIGNALS_TOKENS_REFUSED = Metric("counter", "signals_tokens_refused", "Calls without the right token.")
SIGNALS_SENT = Metric(
    "counter",
    "signals_sent",
    "Signals sent here; known: they were stored before under the same dedup.",
    (("outcome", ("stored", "known")),),
)
SIGNALS_LISTENERS = Metric("gauge", "signals_listeners", "Calls that listen.")
SIGNALS_LISTENERS_MAX = Metric("gauge", "signals_listeners_max", "Calls that may listen at once.")
SIGNALS_MEMORY = Metric("gauge", "signals_memory_bytes", "Resident memory of a server of signals.")
SIGNALS_CPU = Metric("counter", "signals_cpu_seconds", "CPU time of a server of signals.")

OF_SIGNAL_SERVERS: list[Metric] = [
    SIGNALS_READY,
    SIGNALS_CHECK,
    SIGNALS_CALLS,
    SIGNALS_TOKENS_REFUSED,
    SIGNALS_SENT,
    SIGNALS_LISTENERS,
    SIGNALS_LISTENERS_MAX,
    SIGNALS_MEMORY,
    SIGNALS_CPU,
    DATABASE_ERRORS,
    DATABASE_AWAY,
]
