"""A look at a run whose task has many instances, and a dispatch among many scheduled tasks.

No task has instances yet, so they are inserted as rows. The fastest of some calls counts. They are timed without their
transactions, which cost a durable commit whatever the run has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import NamedTuple

from sqlalchemy import bindparam, select, text

from benchmarks.bench_status import fastest_ms
from benchmarks.databases import KEYS, fresh
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from headgate.protocol.messages.dags import DEFAULT_POOL, DagSpec, TaskSpec, TaskState
from headgate.scheduling import planning
from headgate.store.db.prepared import Prepared
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRunId, Epoch
from headgate.store.store import Store
from headgate.store.tables import task_instance
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks import run_states

QUEUES = ("default",)
LOOK, DISPATCH = "a look", "a dispatch"
LOOK_MS_MAX = {"sqlite": 1.0, "postgresql": 2.0}
UNFINISHED_MAX = 256  # instances that have not ended, as in a window of so many
TASKS_PER_DISPATCH = 4
FEW = 200  # scheduled tasks of the baseline: more than all its calls take
SLOTS = 100_000
SPEC = DagSpec(
    "etl",
    tasks=(
        TaskSpec("source", "Op"),
        TaskSpec("each", "Op", upstream=("source",)),
        TaskSpec("total", "Op", upstream=("each",)),
    ),
)
GRAPH = planning.Graph(SPEC)
Load = Callable[[Tx, DagRunId], dict[str, frozenset[TaskState]]]

_COPIED = "tries_max, retries, retry_delay_s, retry_exponential_backoff, pool_slots, created_date"
# Both databases know this; ``n`` counts to ``:rows``.
_INSTANCES = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows) "
    f"INSERT INTO task_instance (dag_run_id, task_id, map_index, state, priority_weight, {_COPIED}) "
    "SELECT dag_run_id, 'each', i - 1, CASE WHEN i > :rows - :unfinished THEN 'scheduled' WHEN i % 100 = 0 "
    f"THEN 'skipped' ELSE 'success' END, i % 10, {_COPIED} FROM n, task_instance WHERE task_id = 'source'"
)
_EVERY_ROW = Prepared(
    select(task_instance.c.task_id, task_instance.c.id, task_instance.c.state).where(
        task_instance.c.dag_run_id == bindparam("of_run")
    )
)


class Run(NamedTuple):
    """A run in a store, and its supervisor."""

    store: Store
    epoch: Epoch
    id: DagRunId


@contextlib.contextmanager
def filled(kind: str, instances: int, unfinished: int) -> Generator[Run]:
    """Yield a run with a task that has so many instances, of which the last are scheduled."""
    with fresh(kind) as database:
        engine = database.engine()
        with Store(engine, secrets=Secrets([KEYS], source="the benchmarks")) as store:
            lease = {"hostname": "h", "pid": 1, "machine": "m", "process_started": 0.0, "queues": QUEUES}
            epoch = store.register_triggerer(capacity=1, workers=4, **lease)  # type: ignore[arg-type]
            store.tasks.save_file(epoch, "etl.py", [SPEC])
            store.tasks.set_pool(DEFAULT_POOL, SLOTS)
            run = store.tasks.create_run("etl", "r1")
            assert run is not None
            with engine.begin() as connection:
                connection.execute(text(_INSTANCES), {"rows": instances, "unfinished": unfinished})
                connection.execute(text("DELETE FROM task_instance WHERE task_id = 'each' AND map_index < 0"))
                connection.execute(text("UPDATE task_instance SET state = 'success' WHERE task_id = 'source'"))
            if kind == "postgresql":  # which does so by itself after a while; SQLite does not
                with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    connection.execute(text("VACUUM ANALYZE"))
            yield Run(store, epoch, run)
        engine.dispose()


def distinct_states(tx: Tx, run: DagRunId) -> dict[str, frozenset[TaskState]]:
    """Return the states of the run's tasks, as a look reads them."""
    return run_states.read(tx, run).for_rules()


def every_row(tx: Tx, run: DagRunId) -> dict[str, frozenset[TaskState]]:
    """Return the same by loading every row, as looks did before."""
    found: dict[str, set[TaskState]] = {}
    for task_id, _, state in _EVERY_ROW.run(tx.connection, of_run=run).fetchall():
        found.setdefault(task_id, set()).add(TaskState(state))
    return {name: frozenset(some) for name, some in found.items()}


def look(kind: str, instances: int, load: Load) -> Figures:
    """Return how long it takes to read the states of the run, and to decide that there is nothing to do."""
    with filled(kind, instances, min(instances // 2, UNFINISHED_MAX)) as run, run.store.database.reading() as tx:

        def once() -> None:
            decisions = planning.decide(GRAPH, load(tx, run.id))
            if decisions != planning.Decisions():
                raise BenchFailed(f"there was nothing to decide, and this was decided: {decisions}")

        return {LOOK: fastest_ms(once)}


def dispatch(kind: str, scheduled: int) -> Figures:
    """Return how long it takes to give some tasks to workers, among so many that are scheduled."""
    verb = TaskVerbs.dispatch.__wrapped__  # type: ignore[attr-defined]  # in a transaction that is there already
    with filled(kind, scheduled, scheduled) as run, run.store.database.leased(run.epoch) as tx:

        def once() -> None:
            given = verb(run.store.tasks, tx, limit=TASKS_PER_DISPATCH, queues=QUEUES).tasks
            if len(given) != TASKS_PER_DISPATCH:
                raise BenchFailed(f"{len(given)} tasks were given to workers in place of {TASKS_PER_DISPATCH}")

        return {DISPATCH: fastest_ms(once)}


def cases(options: Options) -> list[Case]:
    """Return the looks and the dispatch of each database."""
    sizes = options.of((100, 10_000, 100_000), (100, 10_000), (100, 1000))
    scheduled = options.of(10_000, 10_000, 1000)
    made = []
    for kind in options.databases:
        made += [look_case(kind, size) for size in sizes]
        made.append(dispatch_case(kind, scheduled))
    return made


def look_case(kind: str, instances: int) -> Case:
    """Return the case of a look at so many instances."""
    return Case(
        f"{kind}, {instances:,} instances",
        [Figure(LOOK, "ms", Target(value_max=LOOK_MS_MAX[kind]))],
        lambda: look(kind, instances, distinct_states),
        lambda: look(kind, instances, every_row),
    )


def dispatch_case(kind: str, scheduled: int) -> Case:
    """Return the case of a dispatch among so many tasks."""
    return Case(
        f"{kind}, {TASKS_PER_DISPATCH} of {scheduled:,} scheduled",
        [Figure(DISPATCH, "ms")],
        lambda: dispatch(kind, scheduled),
        lambda: dispatch(kind, FEW),
    )


BENCH = Bench(
    "look",
    "look: at a run whose task has many instances, and a dispatch among many scheduled tasks",
    f"looks: loading every row of the run; dispatches: {FEW} scheduled tasks",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
