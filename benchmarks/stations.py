"""A real ``headgate up`` with one DAG file; what its runs took stands on the board, in the database and tasks' logs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Select, func, select

from benchmarks import pairs
from benchmarks.databases import KEYS, Database, fresh
from benchmarks.harness import BenchFailed
from benchmarks.pairs import Pair
from benchmarks.proxy import in_front_of
from headgate.protocol.values import encode_value
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.store.tables import dag_run, signal_wait, task_instance, task_stream, trigger_event
from headgate.supervisor.logs import task_log_files

WORKERS = 4
START_WAIT_MAX_S = 60.0
LOOK_INTERVAL_S = 0.05  # between two looks at the database; what is measured is written there, so it may be coarse
BEGUN, ENDS = "begun", ("deferred", "handled", "succeeded")  # what the supervisor says in a task's log of each step


class RunTimes(NamedTuple):
    """The times of a run, by the database's clock."""

    created_at: datetime
    first_begun_at: datetime  # when the first of its tasks was given to a worker
    ended_at: datetime


class StepTimes(NamedTuple):
    """When a step was given to a worker, and when its outcome was stored: the slot was taken meanwhile."""

    begun_at: datetime
    ended_at: datetime

    @property
    def slot_s(self) -> float:
        """For how many seconds."""
        return (self.ended_at - self.begun_at).total_seconds()


class Station:
    """One ``headgate up``, and its database as the command line sees it."""

    def __init__(self, pair: Pair, store: Store, database: Database) -> None:
        self.pair = pair
        self.store = store
        self._engine = database.engine()

    @property
    def board_path(self) -> str:
        """Where the board is, for the params of runs."""
        return self.pair.board.path

    def wait_dag(self, dag: str) -> None:
        """Wait until the DAG is known."""
        self.pair.wait(
            lambda: dag in [row.name for row in self.store.inspect.dags()], f"the DAG {dag}", START_WAIT_MAX_S
        )

    def create_run(self, dag: str, run_id: str, params: Mapping[str, Any] | None = None) -> int:
        """Begin a run; return its id in the database."""
        conf = None if params is None else encode_value(dict(params), where="params")
        made = self.store.tasks.create_run(dag, run_id, conf=conf)
        if made is None:
            raise BenchFailed(f"the DAG {dag} has a run {run_id} already")
        return made

    def warm_up(self, dag: str, runs: int = WORKERS) -> None:
        """Have some runs end, so that workers are there and have imported what they need."""
        self.wait_dag(dag)
        for number in range(runs):
            self.create_run(dag, f"warm-{number}")
        self.wait_ended(START_WAIT_MAX_S)

    def wait_ended(self, within_s: float) -> None:
        """Wait until every run has ended, and see that each was a success."""
        open_runs = select(func.count()).select_from(dag_run).where(dag_run.c.ended_at.is_(None))
        self._wait_none(open_runs, "all runs have ended", within_s)
        failed = select(func.count()).select_from(dag_run).where(dag_run.c.state != "success")
        if count := self._number(failed):
            raise BenchFailed(f"{count} runs have failed")

    def wait_states(self, state: str, count: int, within_s: float) -> None:
        """Wait until so many tasks are in a state."""
        those = select(count - func.count()).select_from(task_instance).where(task_instance.c.state == state)
        self._wait_none(those, f"{count:,} tasks are {state}", within_s)

    def wait_rules(self, count: int, within_s: float) -> None:
        """Wait until so many rules of tasks about signals are open, and none is to be held against anything."""
        those = select(count - func.count()).select_from(signal_wait).where(signal_wait.c.is_fresh.is_(False))
        self._wait_none(those, f"{count:,} rules wait", within_s)

    def times_of(self, run: int) -> RunTimes:
        """Return the times of a run that has ended."""
        first = select(func.min(task_instance.c.started_at)).where(task_instance.c.dag_run_id == run).scalar_subquery()
        with self._engine.connect() as connection:
            row = connection.execute(
                select(dag_run.c.created_date, first, dag_run.c.ended_at).where(dag_run.c.id == run)
            ).one()
        return RunTimes(*row)

    def first_of_map(self, run: int) -> tuple[datetime, datetime]:
        """Return when the first event of a stream of a run was stored, and when the first instance of it began."""
        of_stream = trigger_event.join(task_stream, task_stream.c.trigger_id == trigger_event.c.trigger_id)
        stored = select(func.min(trigger_event.c.stored_at)).select_from(of_stream.join(task_instance))
        begun = select(func.min(task_instance.c.started_at)).where(task_instance.c.map_index >= 0)
        with self._engine.connect() as connection:
            return (
                connection.execute(stored.where(task_instance.c.dag_run_id == run)).scalar_one(),
                connection.execute(begun.where(task_instance.c.dag_run_id == run)).scalar_one(),
            )

    def steps_of(self, dag: str, run_id: str, task_id: str) -> list[StepTimes]:
        """Return the steps of a task's first try, by its log. Raises `BenchFailed` where that is not whole."""
        steps: list[StepTimes] = []
        begun_at: datetime | None = None
        folder = self.pair.database.folder / "logs"
        for record in task_log_files.read(folder, dag, run_id, task_id, 1):
            if record.get("source") != "supervisor":
                continue
            if record["event"] == BEGUN:
                begun_at = datetime.fromisoformat(record["timestamp"])
            elif record["event"] in ENDS and begun_at is not None:
                steps.append(StepTimes(begun_at, datetime.fromisoformat(record["timestamp"])))
                begun_at = None
        if not steps or begun_at is not None:
            raise BenchFailed(f"the log of {dag} {run_id} {task_id} tells of no step, or of one without an end")
        return steps

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _wait_none(self, left: Select[Any], what: str, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while number := self._number(left):
            if time.monotonic() > deadline:
                raise BenchFailed(f"not within {within_s:g} s: {what}; {number:,} are missing")
            time.sleep(LOOK_INTERVAL_S)

    def _number(self, statement: Select[Any]) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(statement).scalar_one())


@contextlib.contextmanager
def running(
    kind: str,
    dag_file: str,
    *,
    moments: int = 0,
    command: tuple[str, ...] = pairs.PLAIN,
    counts_statements: bool = False,
) -> Generator[Station]:
    """Give a station that has this DAG file, and a board with room for so many moments; it is drained afterwards.

    If it ``counts_statements`` the board has those of its supervisor.
    """
    with fresh(kind) as database, contextlib.ExitStack() as stack:
        folder = database.folder / "dags"
        folder.mkdir()
        (folder / "dag.py").write_text(dag_file)
        board = pairs.new_board(database, moments)
        seen = database
        if counts_statements and kind == "sqlite":
            command = ("-m", "benchmarks.watched", "--board", board.path)
        elif counts_statements:
            seen = database._replace(url=stack.enter_context(in_front_of(database.url, board=board)))
        with (
            pairs.running(seen, board, command=command, subcommand="up", workers=WORKERS) as pair,
            Store(database.engine(), secrets=Secrets([KEYS], source="the benchmarks")) as store,
            contextlib.closing(Station(pair, store, database)) as station,
        ):
            yield station
