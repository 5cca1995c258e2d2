"""The tables of signals; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)

from headgate.protocol.messages.signals import SIGNAL_BYTES_MAX
from headgate.store.consumer_tables import BigId, metadata
from headgate.store.db.times import UtcDateTime

# A key that signals were sent under. It is never cleaned away, because its versions must not begin again.
signal_key = Table(
    "signal_key",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("namespace", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("last_version", BigInteger, nullable=False, server_default=text("0")),
    Column("created_date", UtcDateTime, nullable=False),
    # Set by each who sends: tasks may wait for what was sent (`headgate.store.signals.waits`).
    Column("is_unseen", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("namespace", "key"),
    sqlite_autoincrement=True,
)
_unseen = text("is_unseen")
Index("ix_signal_key_unseen", signal_key.c.id, postgresql_where=_unseen, sqlite_where=_unseen)

# The versions of a key; those that are kept.
signal = Table(
    "signal",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("key_id", BigId, ForeignKey("signal_key.id"), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("value", LargeBinary, nullable=False),  # encoded by `headgate.protocol.values`
    Column("dedup", Text, nullable=False),
    # The run that it is for, if it is for one alone; no foreign key, because it outlives the run.
    Column("dag_run_id", BigInteger),
    Column("sender", Text, nullable=False),  # for people
    Column("sent_at", UtcDateTime, nullable=False),
    UniqueConstraint("key_id", "version"),
    UniqueConstraint("key_id", "dedup"),
    CheckConstraint(f"length(value) <= {SIGNAL_BYTES_MAX}", name="value_bytes"),
    sqlite_autoincrement=True,
)

# The newest version of a key when a run was created, for each key that a task of the run waits for. Not a foreign key:
# nothing need have been sent under the key.
signal_start = Table(
    "signal_start",
    metadata,
    Column("dag_run_id", BigId, ForeignKey("dag_run.id"), primary_key=True, autoincrement=False),
    Column("namespace", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
)

# What is held against the versions of a key, each once: the wait of a sensor, which has a trigger that no supervisor
# claims; a rule of a task; one of a run, which ends it; or one of a DAG, by which it has runs. A row of a sensor may
# outlive its wait. Rules about the ends of tasks, and what users ask for by hand, have rows as well, with an empty key,
# which no signal has.
signal_wait = Table(
    "signal_wait",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("dag_run_id", BigInteger),  # a signal may be for one run alone; null: of a DAG
    Column("dag_id", BigId, ForeignKey("dag.id")),
    Column("trigger_id", BigId, ForeignKey("trigger.id"), unique=True),
    Column("task_instance_id", BigId, ForeignKey("task_instance.id")),
    Column("rule", Text),  # its name, `headgate.protocol.messages.rules.rule_name`
    Column("namespace", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("predicate", LargeBinary),  # encoded; null: any value
    Column("seen_version", BigInteger, nullable=False),  # versions up to it were considered
    # It was not looked at since it began, so a version may have been sent meanwhile.
    Column("is_fresh", Boolean, nullable=False, server_default=true()),
    # It is held against no more versions: until its task has started with the one that it has, or as its run has ended.
    Column("is_held", Boolean, nullable=False, server_default=false()),
    Column("takes_each", Boolean, nullable=False, server_default=false()),  # one version for each start
    Column("every_s", Double),  # of a rule about the time: seconds between two starts, and when the next one is due
    Column("due_at", UtcDateTime),
    # The newest version that has met a rule and has done nothing yet; that with which the task was started; and before.
    Column("met_version", BigInteger),
    Column("met_value", LargeBinary),
    Column("met_at", UtcDateTime),
    # The id of the signal: of two of different keys with one sent_at, which on SQLite has milliseconds, the first has
    # the smaller one.
    Column("met_id", BigInteger),
    Column("start_version", BigInteger),
    Column("start_value", LargeBinary),
    Column("previous_version", BigInteger),
    Column("previous_value", LargeBinary),
    # Users' code decides what its signals do. From ``ask_at`` on it is to be asked about the next one that fits, and
    # more, until then no version is considered further; ``asked_by`` is the epoch whose worker is asked.
    Column("asks", Boolean, nullable=False, server_default=false()),
    Column("ask_at", UtcDateTime),
    Column("asked_by", BigInteger),
    Column("asked_tries", Integer, nullable=False, server_default=text("0")),  # that have failed, about that signal
    # What the version does that has met the rule, if users' code has decided it, and when the signal was sent, with its
    # id, for which it has decided a stop before that has not acted either.
    Column("decided", Text),
    Column("stop_at", UtcDateTime),
    Column("stop_id", BigInteger),
    Column("decision_error", Text),  # of the last signal about which it could not decide, with its version
    # Of a rule about the time: a cron expression in place of ``every_s``, and its time zone.
    Column("cron", Text),
    Column("timezone", Text),
    Column("batch_seconds", Double),  # of a DAG: a run is due this long after the first signal that waits
    # How many signals users' code could not decide about in all of its tries, and when the last of them was given up.
    Column("undecided", Integer, nullable=False, server_default=text("0")),
    Column("undecided_at", UtcDateTime),
    # How often it has started the task once more after a start had failed, when last, and the error of that start: the
    # row of the task tells the newest start alone.
    Column("failed_starts", Integer, nullable=False, server_default=text("0")),
    Column("failed_at", UtcDateTime),
    Column("failed_error", Text),
    UniqueConstraint("task_instance_id", "rule"),
    CheckConstraint("(trigger_id IS NULL) <> (rule IS NULL)", name="of_sensor_or_rule"),
    UniqueConstraint("dag_id", "rule"),
    CheckConstraint("task_instance_id IS NULL OR rule IS NOT NULL", name="task_has_rule"),
    CheckConstraint("dag_id IS NULL OR (rule IS NOT NULL AND task_instance_id IS NULL)", name="dag_has_rule"),
    CheckConstraint("(dag_id IS NULL) <> (dag_run_id IS NULL)", name="of_dag_or_run"),
    sqlite_autoincrement=True,
)
# Rows of rules stay after the end of their run, and are closed: there may be very many for one key.
_open = text("NOT is_held OR met_version IS NOT NULL")
Index(
    "ix_signal_wait_key",
    *(signal_wait.c.namespace, signal_wait.c.key, signal_wait.c.seen_version),
    postgresql_where=_open,
    sqlite_where=_open,
)
_fresh = text("is_fresh")
Index("ix_signal_wait_fresh", signal_wait.c.id, postgresql_where=_fresh, sqlite_where=_fresh)
_of_rule = text("rule IS NOT NULL")
Index("ix_signal_wait_rule", signal_wait.c.dag_run_id, postgresql_where=_of_rule, sqlite_where=_of_rule)
_asked = text("ask_at IS NOT NULL")
Index("ix_signal_wait_ask", signal_wait.c.ask_at, postgresql_where=_asked, sqlite_where=_asked)
_undecided = text("undecided_at IS NOT NULL")
Index(
    "ix_signal_wait_undecided",
    signal_wait.c.undecided_at,
    postgresql_where=_undecided,
    sqlite_where=_undecided,
)
_failed = text("failed_at IS NOT NULL")
Index("ix_signal_wait_failed", signal_wait.c.failed_at, postgresql_where=_failed, sqlite_where=_failed)
_due = text("due_at IS NOT NULL")
Index("ix_signal_wait_due", signal_wait.c.due_at, postgresql_where=_due, sqlite_where=_due)

# The signals that have met a rule of a DAG's schedule, each once: those that wait for a run, and those of runs. Their
# values are copies, because signals are cleaned away.
dag_signal = Table(
    "dag_signal",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("dag_id", BigId, ForeignKey("dag.id"), nullable=False),
    Column("wait_id", BigInteger, nullable=False),  # the row of the rule; no foreign key, because it outlives that
    Column("namespace", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("value", LargeBinary, nullable=False),
    Column("sent_at", UtcDateTime, nullable=False),
    Column("dag_run_id", BigId, ForeignKey("dag_run.id")),  # null: it waits
    Column("is_superseded", Boolean, nullable=False, server_default=false()),
    sqlite_autoincrement=True,
)
_waiting = text("dag_run_id IS NULL")
Index("ix_dag_signal_waiting", dag_signal.c.dag_id, dag_signal.c.id, postgresql_where=_waiting, sqlite_where=_waiting)
Index("ix_dag_signal_run", dag_signal.c.dag_run_id)
