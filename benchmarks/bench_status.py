"""`why`, `status`, and the statements that a supervisor repeats, on a database with many events and triggers.

The time is that of the store's verbs, in one process: the database's, and what SQLAlchemy and the judgement of the
facts take. One supervisor owns all triggers; of each thousand one fails and one is held, and half read shared streams.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from sqlalchemy import Engine, text

from benchmarks.databases import KEYS, Database, fresh
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main
from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.steps import StepDeferred
from headgate.protocol.values import encode_value
from headgate.store.db.secrets import Secrets
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd

QUEUES = ("default",)
FAST = Target(value_max=50)  # ms
STREAM_TRIGGERS = 10
CALLS = 25  # of each verb; the fastest counts, because whatever else the machine does only adds to the others
FEW = (2000, 200)  # events and triggers of the baseline
BATCH_ROWS = 50_000  # events in one statement: the server ends one that takes too long
NOW = "CURRENT_TIMESTAMP"

# Both databases know these; ``n`` counts to ``:rows``.
_COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows) "
_TRIGGERS = (
    "INSERT INTO trigger (classpath, kwargs, created_date, queue, triggerer_id, stream_id, failure_count, last_error, "
    "last_failed_at, hold, hold_reason, held_at) "
    f"SELECT 'a.B', 'x', {NOW}, 'default', :epoch, CASE WHEN i % 2 = 0 THEN i / :in_stream + 1 END, "
    f"CASE WHEN i % 1000 = 7 THEN 3 ELSE 0 END, CASE WHEN i % 1000 = 7 THEN 'KeyError' END, "
    f"CASE WHEN i % 1000 = 7 THEN {NOW} END, CASE WHEN i % 1000 = 8 THEN 'brake' END, "
    f"CASE WHEN i % 1000 = 8 THEN 'too many' END, CASE WHEN i % 1000 = 8 THEN {NOW} END FROM n"
)
_STREAMS = (
    "INSERT INTO stream (digest, name, queue, triggerer_id, created_date) "
    f"SELECT 'd' || i, 's' || i, 'default', :epoch, {NOW} FROM n"
)
_WATCHERS = (
    "INSERT INTO asset_watcher (name, trigger_id, created_date) "
    f"SELECT 'w' || id, id, {NOW} FROM trigger WHERE classpath = 'a.B'"
)
_EVENTS = (
    "INSERT INTO trigger_event (trigger_id, trigger_run_id, sequence_index, key, position, kind, payload, stored_at) "
    "SELECT :first + (:done + i) % :triggers, 'run', :done + i, 'k' || (:done + i), 0, 'event', :payload, "
    f"{NOW} FROM n"
)


@contextlib.contextmanager
def filled(kind: str, events: int, triggers: int) -> Generator[tuple[Store, Epoch, int, Engine]]:
    """Yield a store with so many events and triggers, its supervisor, and the id of a trigger that has many events."""
    with fresh(kind) as database:
        engine = database.engine()
        with Store(engine, secrets=Secrets([KEYS], source="the benchmarks")) as store:
            lease = {"hostname": "h", "pid": 1, "machine": "m", "process_started": 0.0, "queues": QUEUES}
            for _ in range(3):
                store.release_triggerer(store.register_triggerer(capacity=1, **lease))  # type: ignore[arg-type]
            epoch = store.register_triggerer(capacity=2 * triggers, workers=4, **lease)  # type: ignore[arg-type]
            _defer_a_task(store, epoch)
            first = _fill(database, engine, epoch, events, triggers)
            store.heartbeat(epoch)
            yield store, epoch, first + 1, engine
        engine.dispose()


def _defer_a_task(store: Store, epoch: Epoch) -> None:
    store.tasks.save_file(epoch, "etl.py", [DagSpec("etl", tasks=(TaskSpec("a", "Op"),))])
    store.tasks.create_run("etl", "r1")
    store.scheduling.plan(epoch)
    (task,) = store.tasks.dispatch(epoch, limit=1, queues=QUEUES).tasks
    nothing = encode_value({}, where="kwargs")
    outcome = StepDeferred("a.Waits", nothing, "resume", nothing)
    store.tasks.store_ends(epoch, [StepEnd(task.id, task.token, outcome)])
    store.claim_triggers(epoch, limit=1, queues=QUEUES)


def _fill(database: Database, engine: Engine, epoch: Epoch, events: int, triggers: int) -> int:
    """Insert the rows in a few statements; return the id of the first of these triggers."""
    with engine.begin() as connection:
        streams = {"rows": triggers // STREAM_TRIGGERS + 1, "epoch": epoch}
        connection.execute(text(_COUNT + _STREAMS), streams)
        rows = {"rows": triggers, "epoch": epoch, "in_stream": STREAM_TRIGGERS}
        connection.execute(text(_COUNT + _TRIGGERS), rows)
        connection.execute(text(_WATCHERS))
        first = int(connection.execute(text("SELECT min(trigger_id) FROM asset_watcher")).scalar_one())
    for done in range(0, events, BATCH_ROWS):
        with engine.begin() as connection:
            told = {"rows": min(BATCH_ROWS, events - done), "done": done, "first": first, "triggers": triggers}
            connection.execute(text(_COUNT + _EVENTS), told | {"payload": b"\x01"})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE" if database.kind == "sqlite" else "VACUUM ANALYZE"))
    return first


def run(kind: str, events: int, triggers: int) -> Figures:
    """Call each verb some times; return the times of the fastest in ms."""
    with filled(kind, events, triggers) as (store, epoch, busy, _):
        inspect = store.inspect
        task = inspect.find_task("etl", "r1", "a")
        verbs: dict[str, Callable[[], object]] = {
            "status": inspect.status,
            "why, a trigger": lambda: inspect.why_trigger(busy),
            "why, a task that is deferred": lambda: inspect.why_task(task),
            "a look for changes": lambda: store.poll(epoch, QUEUES),
            "a claim of nothing": lambda: store.claim_triggers(epoch, limit=100, queues=QUEUES),
            "a count of claimable triggers": lambda: store.count_claimable(epoch, QUEUES),
        }
        return {name: fastest_ms(verb) for name, verb in verbs.items()}


def fastest_ms(verb: Callable[[], object]) -> float:
    """Return the time of the fastest of some calls, after one that is not counted."""
    verb()
    took = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        verb()
        took.append((time.perf_counter() - begun) * 1000)
    return min(took)


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    sizes = options.of((1_000_000, 100_000), (100_000, 10_000), (2000, 1000))
    return [case(kind, *sizes) for kind in options.databases]


def case(kind: str, events: int, triggers: int) -> Case:
    """Return the case of so many events and triggers."""
    asked = ("status", "why, a trigger", "why, a task that is deferred")
    repeated = ("a look for changes", "a claim of nothing", "a count of claimable triggers")
    figures = [*(Figure(name, "ms", FAST) for name in asked), *(Figure(name, "ms") for name in repeated)]
    label = f"{kind}, {events:,} events, {triggers:,} triggers"
    return Case(label, figures, lambda: run(kind, events, triggers), lambda: run(kind, *FEW))


BENCH = Bench(
    "status",
    "status: what is wrong, and why, with many events and triggers",
    f"the same verbs with {FEW[0]:,} events and {FEW[1]:,} triggers",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
