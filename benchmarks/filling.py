"""A database with very many rows, within seconds: each table takes a few statements, which both databases know.

One supervisor owns all triggers, is full, and says how its streams are. Of each thousand triggers one fails and one is
held, and half read shared streams. Two of five events are those of one trigger. Of the runs of `DAGS` DAGs one of
`FAILED_EVERY` has failed, and the newest have not ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import NamedTuple

from sqlalchemy import Connection, Engine, text

from benchmarks.databases import KEYS, fresh
from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.steps import StepDeferred
from headgate.protocol.values import encode_value
from headgate.store.db.secrets import Secrets
from headgate.store.facts.supervisor_status import StreamStatus, SupervisorStatus, encode_status
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd

QUEUES = ("default",)
STREAM_TRIGGERS = 10
STREAMS_SAID = 100  # of which the supervisor has figures
DAGS = 200
TASKS = 24  # of each run
ACTIVE_RUNS = 100  # the newest
FAILED_EVERY = 50
ASSETS = 100
CONSUMERS = 100
VERSIONS = 3  # of each signal key
BATCH_ROWS = 50_000  # in one statement: the server ends one that takes too long
_NOW = "CURRENT_TIMESTAMP"


class Sizes(NamedTuple):
    """How many rows there are to be. Each run has `TASKS` tasks."""

    events: int
    triggers: int
    runs: int = 0
    letters: int = 0
    signal_keys: int = 0


class Filled(NamedTuple):
    """A store on a filled database, its supervisor, and the id of a trigger that has very many events."""

    store: Store
    epoch: Epoch
    busy: int
    engine: Engine
    url: str


# ``n`` counts to ``:rows``.
_COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows) "
_STREAMS = (
    "INSERT INTO stream (digest, name, queue, triggerer_id, created_date) "
    f"SELECT 'd' || i, 's' || i, 'default', :epoch, {_NOW} FROM n"
)
_TRIGGERS = (
    "INSERT INTO trigger (classpath, kwargs, created_date, queue, triggerer_id, stream_id, failure_count, last_error, "
    "last_failed_at, hold, hold_reason, held_at) "
    f"SELECT 'a.B', 'x', {_NOW}, 'default', :epoch, CASE WHEN i % 2 = 0 THEN i / :in_stream + :stream END, "
    f"CASE WHEN i % 1000 = 7 THEN 3 ELSE 0 END, CASE WHEN i % 1000 = 7 THEN 'KeyError' END, "
    f"CASE WHEN i % 1000 = 7 THEN {_NOW} END, CASE WHEN i % 1000 = 8 THEN 'brake' END, "
    f"CASE WHEN i % 1000 = 8 THEN 'too many' END, CASE WHEN i % 1000 = 8 THEN {_NOW} END FROM n"
)
_ASSETS = f"INSERT INTO asset (name, created_date) SELECT 'asset' || i, {_NOW} FROM n"
_WATCHERS = (
    "INSERT INTO asset_watcher (name, trigger_id, asset_id, created_date) "
    f"SELECT 'w' || id, id, CASE WHEN id % 10 = 0 THEN id % {ASSETS} + :asset END, {_NOW} FROM trigger "
    "WHERE classpath = 'a.B'"
)
_EVENTS = (
    "INSERT INTO trigger_event (trigger_id, trigger_run_id, sequence_index, key, position, kind, payload, stored_at) "
    "SELECT CASE WHEN i % 5 < 2 THEN :first + 1 ELSE :first + (:done + i) % :triggers END, 'run', :done + i, "
    f"'k' || (:done + i), 0, 'event', :payload, {_NOW} FROM n"
)
_REDELIVERIES = (
    "INSERT INTO redelivery (trigger_event_id, count, last_at) "
    f"SELECT id, 1, {_NOW} FROM trigger_event WHERE id % 10 = 0"
)
_LETTERS = (
    "INSERT INTO dead_letter (trigger_id, trigger_run_id, sequence_index, key, position, payload, payload_head, "
    "payload_bytes, payload_kept, reason, stored_at, state, resolved_at) "
    "SELECT :first + i % :triggers, 'letters', i, 'k' || i, 0, :payload, :payload, 1, :yes, 'KeyError: price', "
    f"{_NOW}, CASE WHEN i % 2 = 0 THEN 'open' ELSE 'discarded' END, CASE WHEN i % 2 = 0 THEN NULL ELSE {_NOW} END "
    "FROM n"
)
# All are at the beginning of the trigger that has most of the events; one has set events aside.
_CONSUMERS = (
    "INSERT INTO consumer (name, watcher, trigger_id, event_id, created_date) "
    f"SELECT 'consumer' || i, 'w' || CAST(:first + 1 AS TEXT), :first + 1, i, {_NOW} FROM n"
)
_SET_ASIDE = (
    "INSERT INTO consumer_letter (consumer_id, trigger_id, event_id, deliveries, error, set_aside_at) "
    f"SELECT consumer.id, trigger_event.trigger_id, trigger_event.id, 5, 'KeyError: price', {_NOW} "
    "FROM trigger_event JOIN consumer ON consumer.trigger_id = trigger_event.trigger_id "
    "WHERE consumer.name = 'consumer1' ORDER BY trigger_event.id LIMIT :rows"
)
_STATE = (
    f"CASE WHEN i > :rows - {ACTIVE_RUNS} THEN 'running' WHEN i % {FAILED_EVERY} = 0 THEN 'failed' ELSE 'success' END"
)
_RUNS = (
    "INSERT INTO dag_run (dag_id, run_id, run_type, state, created_date, started_at, ended_at) "
    f"SELECT :dag + i % {DAGS}, 'filled__' || i, 'manual', {_STATE}, {_NOW}, {_NOW}, "
    f"CASE WHEN i > :rows - {ACTIVE_RUNS} THEN NULL ELSE {_NOW} END FROM n"
)
_TASKS = (
    "INSERT INTO task_instance (dag_run_id, task_id, state, try_number, tries_max, retries, retry_delay_s, "
    "retry_exponential_backoff, priority_weight, pool_slots, created_date, started_at, ended_at, last_error) "
    f"SELECT dag_run.id, 't' || (i - 1), CASE WHEN i < {TASKS} OR dag_run.state = 'success' THEN 'success' "
    "WHEN dag_run.state = 'failed' THEN 'failed' ELSE 'none' END, 1, 1, 0, 0, :no, 1, 1, "
    f"{_NOW}, {_NOW}, CASE WHEN i < {TASKS} OR dag_run.state <> 'running' THEN {_NOW} END, "
    f"CASE WHEN i = {TASKS} AND dag_run.state = 'failed' THEN 'KeyError' END "
    "FROM dag_run CROSS JOIN n WHERE dag_run.id BETWEEN :least AND :most"
)
_SIGNAL_KEYS = (
    "INSERT INTO signal_key (namespace, key, last_version, created_date) "
    f"SELECT 'default', 'key' || i, {VERSIONS}, {_NOW} FROM n"
)
_SIGNALS = (
    "INSERT INTO signal (key_id, version, value, dedup, sender, sent_at) "
    f"SELECT signal_key.id, i, :payload, 'd' || i, 'the benchmarks', {_NOW} FROM signal_key CROSS JOIN n"
)


@contextlib.contextmanager
def filled(kind: str, sizes: Sizes) -> Generator[Filled]:
    """Yield a new database with so many rows."""
    with fresh(kind) as database:
        engine = database.engine()
        with Store(engine, secrets=Secrets([KEYS], source="the benchmarks")) as store:
            epoch, busy = fill(store, sizes)
            yield Filled(store, epoch, busy, engine, database.url)
        engine.dispose()


def fill(store: Store, sizes: Sizes) -> tuple[Epoch, int]:
    """Fill a database that has tables and no rows; return its supervisor, and a trigger that has very many events."""
    lease = {"hostname": "h", "pid": 1, "machine": "m", "process_started": 0.0, "queues": QUEUES}
    for _ in range(3):
        store.release_triggerer(store.register_triggerer(capacity=1, **lease))  # type: ignore[arg-type]
    epoch = store.register_triggerer(capacity=sizes.triggers + 1, workers=4, **lease)  # type: ignore[arg-type]
    _defer_a_task(store, epoch)
    engine = store.database.engine
    first = _fill_triggers(engine, epoch, sizes)
    if sizes.runs:
        _fill_runs(store, epoch, sizes.runs)
    if sizes.signal_keys:
        with engine.begin() as connection:
            connection.execute(text(_COUNT + _SIGNAL_KEYS), {"rows": sizes.signal_keys})
            connection.execute(text(_COUNT + _SIGNALS), {"rows": VERSIONS, "payload": b"\x01"})
    analyse(engine)
    store.heartbeat(epoch, encode_status(_status(sizes, first)))
    return epoch, first + 1


def _status(sizes: Sizes, first: int) -> SupervisorStatus:
    """Return what the supervisor says: some of its streams are behind, and one is held up by a trigger."""
    held = StreamStatus("d1", lag=120_000, in_flight=8, absent=1, held="absent subscriber", held_by=(first,))
    behind = (StreamStatus(f"d{i}", lag=10 * i, in_flight=2, online=STREAM_TRIGGERS) for i in range(2, STREAMS_SAID))
    owned, streams = sizes.triggers + 1, sizes.triggers // STREAM_TRIGGERS + 1
    return SupervisorStatus("ready", 1, owned, owned, streams=(held, *behind), streams_in_all=streams)


def analyse(engine: Engine) -> None:
    """Tell the database what it holds, as it would find out by itself in time."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE" if engine.dialect.name == "sqlite" else "VACUUM ANALYZE"))


def _defer_a_task(store: Store, epoch: Epoch) -> None:
    store.tasks.save_file(epoch, "etl.py", [DagSpec("etl", tasks=(TaskSpec("a", "Op"),))])
    store.tasks.create_run("etl", "r1")
    store.scheduling.plan(epoch)
    (task,) = store.tasks.dispatch(epoch, limit=1, queues=QUEUES).tasks
    nothing = encode_value({}, where="kwargs")
    outcome = StepDeferred("a.Waits", nothing, "resume", nothing)
    store.tasks.store_ends(epoch, [StepEnd(task.id, task.token, outcome)])
    store.claim_triggers(epoch, limit=1, queues=QUEUES)


def _fill_triggers(engine: Engine, epoch: Epoch, sizes: Sizes) -> int:
    """Insert triggers, watchers, events, letters and consumers; return the id of the first of these triggers."""
    triggers = sizes.triggers
    with engine.begin() as connection:
        streams = {"rows": triggers // STREAM_TRIGGERS + 1, "epoch": epoch}
        connection.execute(text(_COUNT + _STREAMS), streams)
        stream = _scalar(connection, "SELECT min(id) FROM stream")
        rows = {"rows": triggers, "epoch": epoch, "in_stream": STREAM_TRIGGERS, "stream": stream}
        connection.execute(text(_COUNT + _TRIGGERS), rows)
        connection.execute(text(_COUNT + _ASSETS), {"rows": ASSETS})
        connection.execute(text(_WATCHERS), {"asset": _scalar(connection, "SELECT min(id) FROM asset")})
        first = _scalar(connection, "SELECT min(trigger_id) FROM asset_watcher")
    told = {"first": first, "triggers": triggers, "payload": b"\x01"}
    for done, rows_now in _batches(sizes.events):
        with engine.begin() as connection:
            connection.execute(text(_COUNT + _EVENTS), told | {"rows": rows_now, "done": done})
    with engine.begin() as connection:
        connection.execute(text(_REDELIVERIES))
        if sizes.letters:
            connection.execute(text(_COUNT + _LETTERS), told | {"rows": sizes.letters, "yes": True})
            connection.execute(text(_COUNT + _CONSUMERS), {"first": first, "rows": CONSUMERS})
            connection.execute(text(_SET_ASIDE), {"rows": sizes.letters})
    return first


def _fill_runs(store: Store, epoch: Epoch, runs: int) -> None:
    tasks = tuple(TaskSpec(f"t{i}", "Op", upstream=(f"t{(i - 1) // 2}",) if i else ()) for i in range(TASKS))
    store.tasks.save_file(epoch, "many.py", [DagSpec(f"dag{i}", tasks=tasks) for i in range(DAGS)])
    engine = store.database.engine
    with engine.begin() as connection:
        dag = _scalar(connection, "SELECT min(id) FROM dag WHERE file = 'many.py'")
        connection.execute(text(_COUNT + _RUNS), {"rows": runs, "dag": dag})
        least = _scalar(connection, "SELECT min(id) FROM dag_run WHERE run_id LIKE 'filled%'")
    for done, rows in _batches(runs, BATCH_ROWS // TASKS):
        with engine.begin() as connection:
            between = {"least": least + done, "most": least + done + rows - 1}
            connection.execute(text(_COUNT + _TASKS), between | {"rows": TASKS, "no": False})


def _batches(rows: int, size: int = BATCH_ROWS) -> list[tuple[int, int]]:
    """Return how many rows are done already, and how many are to be done now, of each batch."""
    return [(done, min(size, rows - done)) for done in range(0, rows, size)]


def _scalar(connection: Connection, statement: str) -> int:
    return int(connection.execute(text(statement)).scalar_one())
