"""The tables. Their rules (unique events, one owner a trigger, the states of a task) are those of docs/invariants.md.

Rows of ``trigger``, ``asset_watcher`` and ``triggerer`` get a tombstone (``removed_at``, ``stopped_at``, ``fenced_at``)
at their end, so that rows which refer to them stay readable. Only `headgate.store.cleaning` deletes them, once they are
old and nothing refers to them. An id is never used twice, which SQLite promises only with ``sqlite_autoincrement``.

The tables of tasks follow those of triggers. The database checks which columns may be set in which state of a task.
The migrations define the same a second time, on purpose; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    Table,
    Text,
    TextClause,
    UniqueConstraint,
    and_,
    column,
    false,
    text,
)

from headgate.protocol.messages.dags import DEFAULT_POOL, DEFAULT_QUEUE, XCOM_BYTES_MAX, TaskState
from headgate.protocol.messages.runner import KEY_CHARS_MAX
from headgate.store.access.tables import audit as audit
from headgate.store.access.tables import connection as connection
from headgate.store.access.tables import encryption_key as encryption_key
from headgate.store.access.tables import variable as variable
from headgate.store.access.tables import web_browser as web_browser
from headgate.store.access.tables import web_guess as web_guess
from headgate.store.access.tables import web_session as web_session
from headgate.store.access.tables import web_user as web_user
from headgate.store.consumer_tables import BigId
from headgate.store.consumer_tables import consumer as consumer
from headgate.store.consumer_tables import consumer_letter as consumer_letter
from headgate.store.consumer_tables import metadata as metadata
from headgate.store.db.fact_tables import stream_drift as stream_drift
from headgate.store.db.fact_tables import supervisor_status as supervisor_status
from headgate.store.db.fact_tables import task_span as task_span
from headgate.store.db.fact_tables import trigger_run as trigger_run
from headgate.store.db.times import UtcDateTime
from headgate.store.element_tables import element as element
from headgate.store.element_tables import emitter as emitter
from headgate.store.signal_tables import dag_signal as dag_signal
from headgate.store.signal_tables import signal as signal
from headgate.store.signal_tables import signal_key as signal_key
from headgate.store.signal_tables import signal_start as signal_start
from headgate.store.signal_tables import signal_wait as signal_wait
from headgate.store.task_stream_tables import task_stream as task_stream

# One supervisor's lease. The id is the epoch: a supervisor that comes back registers again, and gets another.
triggerer = Table(
    "triggerer",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("hostname", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("machine", Text, nullable=False),  # boot id and pid namespace, in which ``pid`` is this process
    Column("process_started", Double, nullable=False),  # clock ticks since boot; with ``pid`` unique
    Column("capacity", BigInteger, nullable=False),
    Column("queues", Text, nullable=False),  # comma separated
    Column("workers", BigInteger, nullable=False, server_default=text("0")),  # 0: it only runs triggers
    Column("endless_workers", BigInteger, nullable=False, server_default=text("0")),  # beside these
    Column("started_at", UtcDateTime, nullable=False),
    Column("latest_heartbeat", UtcDateTime, nullable=False),
    Column("stopped_at", UtcDateTime),  # it ended by itself
    Column("fenced_at", UtcDateTime),  # others took over
    sqlite_autoincrement=True,
)

# A shared stream, from the first time that one of its triggers was loaded. A stream has one owner, the one of all its
# triggers: it is claimed and given up as a whole. All its triggers have its queue.
stream = Table(
    "stream",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("digest", Text, nullable=False),  # of its key, as the runner computes it
    Column("name", Text, nullable=False),  # its key for people
    Column("queue", Text, nullable=False),
    Column("triggerer_id", BigId, ForeignKey("triggerer.id")),  # the owner; claimable if null, fenced or ended
    Column("created_date", UtcDateTime, nullable=False),
    UniqueConstraint("digest"),
    sqlite_autoincrement=True,
)

trigger = Table(
    "trigger",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("classpath", Text, nullable=False),
    Column("kwargs", Text, nullable=False),  # encrypted
    Column("created_date", UtcDateTime, nullable=False),
    Column("queue", Text, nullable=False, server_default=text("'default'")),
    Column("priority", BigInteger, nullable=False, server_default=text("0")),  # of the waiting task; orders claims
    Column("triggerer_id", BigId, ForeignKey("triggerer.id")),  # the owner; claimable if null, fenced or ended
    Column("failure_count", BigInteger, nullable=False, server_default=text("0")),
    Column("last_error", Text),
    Column("last_failed_at", UtcDateTime),
    # The run that ``failure_count`` counted last: a failure that is reported again, because it was unknown
    # whether the first report was committed, is not counted again.
    Column("last_failed_run_id", Text),
    Column("finished_at", UtcDateTime),
    Column("removed_at", UtcDateTime),
    Column("stream_id", BigId),  # of `stream`; null if it reads none, or if that is not known yet
    Column("max_deliveries", BigInteger, nullable=False, server_default=text("5")),  # of one message; 0: without limit
    # A `headgate.store.ids.Hold`: it is owned, but not started until the hold is released.
    Column("hold", Text),
    Column("hold_reason", Text),
    Column("held_at", UtcDateTime),
    Column("brake_from", UtcDateTime),  # messages passed over before do not count for the next brake
    Column("changed_at", UtcDateTime),  # a user has changed it, and its owner has not read that yet
    sqlite_autoincrement=True,
)
# As text: a partial index is only used for a statement with the same condition.
_failing_trigger = text("failure_count > 0")
Index("ix_trigger_failing", trigger.c.id, postgresql_where=_failing_trigger, sqlite_where=_failing_trigger)
# Those that a user removed, or that returned, until their supervisor has let them go: few, whatever it owns.
_left_trigger = trigger.c.removed_at.is_not(None) | trigger.c.finished_at.is_not(None)
Index("ix_trigger_left", trigger.c.triggerer_id, postgresql_where=_left_trigger, sqlite_where=_left_trigger)
_changed_trigger = trigger.c.changed_at.is_not(None)
Index("ix_trigger_changed", trigger.c.triggerer_id, postgresql_where=_changed_trigger, sqlite_where=_changed_trigger)
_held_trigger = trigger.c.hold.is_not(None)
Index("ix_trigger_held", trigger.c.triggerer_id, postgresql_where=_held_trigger, sqlite_where=_held_trigger)
_streamed_trigger = trigger.c.stream_id.is_not(None)
Index("ix_trigger_stream", trigger.c.stream_id, postgresql_where=_streamed_trigger, sqlite_where=_streamed_trigger)
OPEN_TRIGGER = trigger.c.finished_at.is_(None) & trigger.c.removed_at.is_(None)  # in statements as in the index
_claim = (trigger.c.queue, trigger.c.triggerer_id, trigger.c.id)
Index("ix_trigger_claim", *_claim, postgresql_where=OPEN_TRIGGER, sqlite_where=OPEN_TRIGGER)
_owned_trigger = trigger.c.triggerer_id.is_not(None)
Index("ix_trigger_owner", trigger.c.triggerer_id, postgresql_where=_owned_trigger, sqlite_where=_owned_trigger)

asset = Table(
    "asset",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_date", UtcDateTime, nullable=False),
    UniqueConstraint("name"),
    sqlite_autoincrement=True,
)

asset_watcher = Table(
    "asset_watcher",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("asset_id", BigId, ForeignKey("asset.id")),
    Column("trigger_id", BigId, ForeignKey("trigger.id"), nullable=False),
    Column("created_date", UtcDateTime, nullable=False),
    Column("removed_at", UtcDateTime),
    # The key under which its events are sent as signals; both null: none. Nothing need have been sent under it.
    Column("signal_namespace", Text),
    Column("signal_key", Text),
    UniqueConstraint("trigger_id"),
    sqlite_autoincrement=True,
)
_present_watcher = asset_watcher.c.removed_at.is_(None)
Index(
    "uq_asset_watcher_name",
    asset_watcher.c.name,
    unique=True,
    postgresql_where=_present_watcher,
    sqlite_where=_present_watcher,
)
Index("ix_asset_watcher_name", asset_watcher.c.name, asset_watcher.c.trigger_id)  # removed ones, too
_of_asset = asset_watcher.c.asset_id.is_not(None)
Index("ix_asset_watcher_asset", asset_watcher.c.asset_id, postgresql_where=_of_asset, sqlite_where=_of_asset)

# The event log. Its two unique rules are I2: an event reported again, or a message delivered again, gives no other row.
trigger_event = Table(
    "trigger_event",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("trigger_id", BigId, ForeignKey("trigger.id"), nullable=False),
    Column("trigger_run_id", Text, nullable=False),
    Column("sequence_index", BigInteger, nullable=False),
    Column("key", Text),
    Column("position", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("is_last", Boolean, nullable=False, server_default=false()),
    Column("stored_at", UtcDateTime, nullable=False),
    UniqueConstraint("trigger_run_id", "sequence_index"),
    CheckConstraint(f"length(key) <= {KEY_CHARS_MAX}", name="key_chars"),
    sqlite_autoincrement=True,
)
_keyed_event = trigger_event.c.key.is_not(None)
Index(
    "uq_trigger_event_key",
    trigger_event.c.trigger_id,
    trigger_event.c.key,
    trigger_event.c.position,
    unique=True,
    postgresql_where=_keyed_event,
    sqlite_where=_keyed_event,
)
Index("ix_trigger_event_newest", trigger_event.c.trigger_id, trigger_event.c.id)

# The number of redeliveries of a stored event; no row if there was none.
redelivery = Table(
    "redelivery",
    metadata,
    Column("trigger_event_id", BigId, ForeignKey("trigger_event.id"), primary_key=True, autoincrement=False),
    Column("count", BigInteger, nullable=False),
    Column("last_at", UtcDateTime, nullable=False),
)

# How often a trigger has failed on a message, by the message's key; written only if it fails.
strike = Table(
    "strike",
    metadata,
    Column("trigger_id", BigId, ForeignKey("trigger.id"), primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("strikes", BigInteger, nullable=False),
    Column("kills", BigInteger, nullable=False, server_default=text("0")),  # of them: the runner ended with it
    Column("last_error", Text, nullable=False),
    Column("last_run_id", Text, nullable=False),  # the run that was counted last: a repeated report is not counted
    Column("last_at", UtcDateTime, nullable=False),
    CheckConstraint(f"length(key) <= {KEY_CHARS_MAX}", name="key_chars"),
)

# Events that could not be stored. ``trigger_id`` is not a foreign key: an event of a trigger that does not exist must
# become a dead letter like any other, and that may not fail.
dead_letter = Table(
    "dead_letter",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("trigger_id", BigInteger, nullable=False),
    Column("trigger_run_id", Text, nullable=False),
    Column("sequence_index", BigInteger, nullable=False),
    Column("key", Text),
    Column("position", BigInteger, nullable=False),
    Column("payload", LargeBinary),  # null if the runner refused the event and kept only its head
    Column("payload_head", LargeBinary, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("payload_kept", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
    Column("stored_at", UtcDateTime, nullable=False),
    Column("content", Text, nullable=False, server_default=text("'event'")),  # or 'message': of its stream
    Column("kind", Text, nullable=False, server_default=text("'event'")),
    Column("is_last", Boolean, nullable=False, server_default=false()),
    Column("traceback", Text, nullable=False, server_default=text("''")),
    Column("deliveries", BigInteger, nullable=False, server_default=text("1")),
    Column("state", Text, nullable=False, server_default=text("'open'")),  # a `headgate.store.ids.LetterState`
    Column("edited_payload", LargeBinary),  # what a user wants stored in place of ``payload``
    Column("event_id", BigInteger),  # the event that stands for it; `headgate.store.cleaning` may delete that later
    Column("resolved_at", UtcDateTime),  # null as long as something is to be done about it
    Column("resolved_by", Text),
    Column("note", Text),
    Column("target_id", BigInteger),  # the trigger that a message which is redriving is given to
    UniqueConstraint("trigger_run_id", "sequence_index"),
    sqlite_autoincrement=True,
)
_message = (dead_letter.c.trigger_id, dead_letter.c.key, dead_letter.c.position)
# One letter for each message, until it is resolved: if the message is refused again after that, it gets another.
_keyed_open = and_(dead_letter.c.key.is_not(None), dead_letter.c.resolved_at.is_(None))
Index("uq_dead_letter_key", *_message, unique=True, postgresql_where=_keyed_open, sqlite_where=_keyed_open)
_keyed_resolved = and_(dead_letter.c.key.is_not(None), dead_letter.c.resolved_at.is_not(None))
Index("ix_dead_letter_resolved", *_message, postgresql_where=_keyed_resolved, sqlite_where=_keyed_resolved)
_open_letter = dead_letter.c.resolved_at.is_(None)
Index("ix_dead_letter_open", dead_letter.c.id, postgresql_where=_open_letter, sqlite_where=_open_letter)
Index("ix_dead_letter_trigger", dead_letter.c.trigger_id, dead_letter.c.id)
Index("ix_dead_letter_state", dead_letter.c.state, dead_letter.c.id)
_redriving = dead_letter.c.state == text("'redriving'")
_of_target = (dead_letter.c.target_id, dead_letter.c.id)
Index("ix_dead_letter_redriving", *_of_target, postgresql_where=_redriving, sqlite_where=_redriving)

# Who did something to a dead letter: each act a row, deleted only with its letter.
letter_action = Table(
    "letter_action",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("letter_id", BigId, ForeignKey("dead_letter.id"), nullable=False),
    Column("action", Text, nullable=False),  # a `headgate.store.ids.LetterAction`
    Column("done_by", Text, nullable=False),
    Column("done_at", UtcDateTime, nullable=False),
    Column("note", Text, nullable=False, server_default=text("''")),
    Column("audit_id", BigInteger),  # the row of `audit` that it is counted in; that may be deleted earlier
    Index("ix_letter_action_letter", "letter_id"),
    sqlite_autoincrement=True,
)

# --- tasks ---------------------------------------------------------------------------------------

RUN_STATES = ("running", "success", "failed")
RUN_TYPES = ("manual", "scheduled", "asset", "signal")

# A DAG as its file last defined it. ``name`` is its author's dag_id.
dag = Table(
    "dag",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("file", Text, nullable=False),
    Column("spec", LargeBinary, nullable=False),  # `headgate.protocol.messages.dags.encode_dag`
    Column("max_active_runs", BigInteger, nullable=False),
    Column("is_paused", Boolean, nullable=False),
    Column("created_date", UtcDateTime, nullable=False),
    Column("parsed_at", UtcDateTime, nullable=False),
    Column("removed_at", UtcDateTime),  # its file no longer has it
    Column("spec_hash", Text, nullable=False, server_default=text("''")),  # of ``spec``; a cache compares it
    Column("next_interval_start", UtcDateTime),  # of the data interval that ``next_run_at`` is the end of
    Column("next_run_at", UtcDateTime),  # when its next scheduled run is due; null without a cron schedule
    UniqueConstraint("name"),
    sqlite_autoincrement=True,
)
_scheduled_dag = dag.c.next_run_at.is_not(None)
Index("ix_dag_next_run", dag.c.next_run_at, postgresql_where=_scheduled_dag, sqlite_where=_scheduled_dag)

import_error = Table(
    "import_error",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("file", Text, nullable=False),
    Column("error", Text, nullable=False),  # with its traceback
    Column("stored_at", UtcDateTime, nullable=False),
    UniqueConstraint("file"),
    sqlite_autoincrement=True,
)

dag_run = Table(
    "dag_run",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("dag_id", BigId, ForeignKey("dag.id"), nullable=False),
    Column("run_id", Text, nullable=False),
    Column("run_type", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("logical_date", UtcDateTime),
    Column("conf", LargeBinary),  # encoded by `headgate.protocol.values`
    Column("created_date", UtcDateTime, nullable=False),
    Column("ended_at", UtcDateTime),
    Column("needs_look", Boolean, nullable=False, server_default=false()),  # set where a task ends, or is none again
    Column("data_interval_start", UtcDateTime),
    Column("data_interval_end", UtcDateTime),
    Column("started_at", UtcDateTime),  # null: it waits, because its DAG has as many active runs as it may have
    Column("removed_at", UtcDateTime),  # a clean deletes it in pieces: it ended long ago, and is not found any more
    Column("is_ending", Boolean, nullable=False, server_default=false()),  # signals start no task of it any more
    Column("creator", Text),  # the task that asked for it, if one did
    UniqueConstraint("dag_id", "run_id"),
    CheckConstraint(column("state").in_(RUN_STATES), name="state"),
    CheckConstraint(column("run_type").in_(RUN_TYPES), name="run_type"),
    sqlite_autoincrement=True,
)
_active_run = dag_run.c.ended_at.is_(None)
Index("ix_dag_run_active", dag_run.c.dag_id, postgresql_where=_active_run, sqlite_where=_active_run)
_failed_run = text("state = 'failed'")
Index("ix_dag_run_failed", dag_run.c.ended_at, postgresql_where=_failed_run, sqlite_where=_failed_run)
_look = text("needs_look")
Index("ix_dag_run_look", dag_run.c.id, postgresql_where=_look, sqlite_where=_look)
Index("ix_dag_run_newest", dag_run.c.dag_id, dag_run.c.id)
Index("ix_dag_run_ended", dag_run.c.ended_at, dag_run.c.id)
Index("ix_dag_run_state", dag_run.c.state, dag_run.c.id)

# The subscriptions of DAGs to assets; a copy from the DAG's spec, which has the contract as well.
asset_subscription = Table(
    "asset_subscription",
    metadata,
    Column("dag_id", BigId, ForeignKey("dag.id"), primary_key=True, autoincrement=False),
    Column("asset_id", BigId, ForeignKey("asset.id"), primary_key=True, autoincrement=False),
    Column("contract", Text, nullable=False),
    Column("batch_seconds", Double),  # a run is due this long after the first waiting event
    Column("dropped", BigInteger, nullable=False, server_default=text("0")),  # events beyond the limit on waiting ones
    Index("ix_asset_subscription_asset", "asset_id"),
)

# The events that have had no run yet, per DAG; written in the transaction that stores the event.
waiting_event = Table(
    "waiting_event",
    metadata,
    Column("dag_id", BigId, ForeignKey("dag.id"), primary_key=True, autoincrement=False),
    Column("trigger_event_id", BigId, ForeignKey("trigger_event.id"), primary_key=True, autoincrement=False),
    Column("asset_id", BigId, ForeignKey("asset.id"), nullable=False),
    Column("stored_at", UtcDateTime, nullable=False),
    Index("ix_waiting_event_event", "trigger_event_id"),
)

# The events for which a run was created, and those that it superseded.
dag_run_event = Table(
    "dag_run_event",
    metadata,
    Column("dag_run_id", BigId, ForeignKey("dag_run.id"), primary_key=True, autoincrement=False),
    Column("trigger_event_id", BigId, ForeignKey("trigger_event.id"), primary_key=True, autoincrement=False),
    Column("asset_id", BigId, ForeignKey("asset.id"), nullable=False),
    Column("is_superseded", Boolean, nullable=False, server_default=false()),
    Index("ix_dag_run_event_event", "trigger_event_id"),
)

# One task of one run. ``token`` identifies the worker or trigger that the task was last given to: a new random one for
# each dispatch and each deferral, so that a late answer of an earlier one matches no row.
task_instance = Table(
    "task_instance",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("dag_run_id", BigId, ForeignKey("dag_run.id"), nullable=False),
    Column("task_id", Text, nullable=False),
    # -1: the task itself. A mapped one has rows from 0 on as well, its instances, which are what workers run.
    Column("map_index", BigInteger, nullable=False, server_default=text("-1")),
    Column("map_name", Text),
    Column("state", Text, nullable=False, server_default=text("'none'")),
    Column("try_number", BigInteger, nullable=False, server_default=text("0")),  # the try it is in, the first is 1
    Column("tries_max", BigInteger, nullable=False),  # no try after this one; a clear raises it
    Column("token", Text),
    Column("trigger_id", BigId, ForeignKey("trigger.id")),
    Column("next_method", Text),
    Column("next_kwargs", Text),  # encrypted
    Column("event_id", BigId, ForeignKey("trigger_event.id")),  # the event that resumes it
    Column("trigger_timeout", UtcDateTime),
    Column("deadline", UtcDateTime),  # of the whole try, deferrals included
    Column("retry_at", UtcDateTime),
    Column("triggerer_id", BigId, ForeignKey("triggerer.id")),  # the epoch of the supervisor whose worker has it
    Column("retries", BigInteger, nullable=False),
    Column("retry_delay_s", Double, nullable=False),
    Column("retry_exponential_backoff", Boolean, nullable=False),
    Column("max_retry_delay_s", Double),
    Column("execution_timeout_s", Double),
    Column("priority_weight", BigInteger, nullable=False),
    Column("queue", Text, nullable=False, server_default=text(f"'{DEFAULT_QUEUE}'")),
    Column("pool", Text, nullable=False, server_default=text(f"'{DEFAULT_POOL}'")),
    Column("pool_slots", BigInteger, nullable=False),
    Column("created_date", UtcDateTime, nullable=False),
    Column("scheduled_at", UtcDateTime),  # when it became ready last
    Column("started_at", UtcDateTime),  # when this try began
    Column("ended_at", UtcDateTime),
    Column("last_error", Text),
    Column("map_length", BigInteger),  # of a mapped task itself: how many instances it is to have, once that is known
    Column("given_digest", Text),  # of the values for it that stood in the file then (`MapSpec`)
    Column("map_made", BigInteger, nullable=False, server_default=text("0")),  # and how many of them there are
    Column("active_max", BigInteger),  # how many instances of the task may be with workers at once, in this run
    Column("is_endless", Boolean, nullable=False, server_default=false()),  # it gets a worker beside the pool
    Column("moves", BigInteger, nullable=False, server_default=text("0")),  # of an endless one: lost workers in a row
    Column("begins_at", UtcDateTime),  # no worker gets it before: it was moved, or could not begin
    # Of the worker that has it although a user, or a signal, has ended it: until that is gone no other one gets it.
    Column("old_token", Text),
    Column("old_owner_id", BigInteger),  # an epoch as ``triggerer_id``; if its lease is over its worker is gone
    # In this order, one range of it has the tasks of a run that are not mapped, without the instances of the others.
    UniqueConstraint("dag_run_id", "map_index", "task_id"),
    CheckConstraint("map_index >= -1", name="map_index"),
    CheckConstraint(column("state").in_([state.value for state in TaskState]), name="state"),
    CheckConstraint("(state = 'deferred') = (trigger_id IS NOT NULL)", name="trigger"),
    CheckConstraint("(state IN ('running', 'restarting')) = (triggerer_id IS NOT NULL)", name="owner"),
    CheckConstraint("(state = 'up_for_retry') = (retry_at IS NOT NULL)", name="retry"),
    CheckConstraint("(state IN ('running', 'restarting', 'deferred')) = (token IS NOT NULL)", name="token"),
    sqlite_autoincrement=True,
)


def _index_tasks(
    name: str, *columns: str | TextClause, where: ColumnElement[bool] | TextClause, unique: bool = False
) -> None:
    of = [task_instance.c[column] if isinstance(column, str) else column for column in columns]
    Index(name, *of, unique=unique, postgresql_where=where, sqlite_where=where)


# As text: a partial index is only used for a statement with the same condition, here ``state = 'scheduled'``.
# The most urgent task of a pool and a queue comes first, as `headgate.store.tasks.dispatch` asks for them.
_urgency = (text("(next_method IS NOT NULL) DESC"), text("priority_weight DESC"), "id")
_index_tasks("ix_task_instance_scheduled", "pool", "queue", *_urgency, where=text("state = 'scheduled'"))
_endless = text("state = 'scheduled' AND is_endless")
_index_tasks("ix_task_instance_endless", "pool", "queue", *_urgency, where=_endless)
# The states of a mapped task are found in it without a look at each instance (`headgate.store.tasks.run_states`).
_index_tasks("ix_task_instance_look", "dag_run_id", "task_id", "state", "map_index", where=text("map_index >= 0"))
_index_tasks("ix_task_instance_retry", "retry_at", where=task_instance.c.retry_at.is_not(None))
_index_tasks("ix_task_instance_timeout", "trigger_timeout", where=text("state = 'deferred'"))
_index_tasks("uq_task_instance_trigger", "trigger_id", where=task_instance.c.trigger_id.is_not(None), unique=True)
_index_tasks("ix_task_instance_owner", "triggerer_id", where=task_instance.c.triggerer_id.is_not(None))
_index_tasks("ix_task_instance_old_owner", "old_owner_id", where=task_instance.c.old_owner_id.is_not(None))
# A row of ``trigger_event`` is deleted only after a check for rows that refer to it.
_index_tasks("ix_task_instance_event", "event_id", where=task_instance.c.event_id.is_not(None))

xcom = Table(
    "xcom",
    metadata,
    Column("task_instance_id", BigId, ForeignKey("task_instance.id"), primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),  # encoded by `headgate.protocol.values`
    Column("stored_at", UtcDateTime, nullable=False),
    CheckConstraint(f"length(value) <= {XCOM_BYTES_MAX}", name="value_bytes"),
)

pool = Table(
    "pool",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("slots", BigInteger, nullable=False),
    UniqueConstraint("name"),
    CheckConstraint("slots >= 0", name="slots"),
    sqlite_autoincrement=True,
)
