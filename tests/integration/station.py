"""A real ``headgate up``: supervisor, runner and workers, with a folder of DAG files, and the database beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import text
from tests.integration.pair import Pair
from tests.supervisor.tasks_harness import instance_of, task_states
from tests.waiting import wait_until

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.values import decode_value, encode_value
from headgate.scheduling.states import TERMINAL
from headgate.store.db.engine import open_engine
from headgate.store.ids import DagRunId
from headgate.store.store import Store
from headgate.supervisor.logs.task_log_files import Record, read

JOURNAL = "journal"  # see users/users_tasks.py


class Run:
    """One run of a DAG, and the folder in which its tasks are told to go on."""

    def __init__(self, station: Station, id_: DagRunId, dag: str, run_id: str, folder: Path):
        self.station, self.id, self.dag, self.run_id, self.folder = station, id_, dag, run_id, folder

    # --- what tasks are told, and tell ---

    def say(self, file: str, said: str = "") -> None:
        """Put a file where tasks and triggers look for it; it is there in one piece."""
        beside = self.folder / f".{file}.new"
        beside.write_text(said)
        beside.rename(self.folder / file)

    def journal(self) -> list[str]:
        """What tasks and triggers have told of themselves, in order."""
        path = self.folder / JOURNAL
        return path.read_text().splitlines() if path.exists() else []

    def wait_told(self, line: str, times: int = 1) -> None:
        """Wait until a line stands so often in the journal."""
        wait_until(lambda: self.journal().count(line) >= times, lambda: f"{line!r} {times} times in {self.journal()}")

    def told(self, line: str) -> int:
        """How often a line stands in the journal."""
        return Counter(self.journal())[line]

    # --- what the database says ---

    def task(self, task: str) -> int:
        """What the store calls a task."""
        return instance_of(self.station.store, self.id, task)

    def row(self, task: str) -> dict[str, Any]:
        """A task's row."""
        (row,) = self.station.query("SELECT * FROM task_instance WHERE id = :id", id=self.task(task))
        return row

    def state(self, task: str) -> str:
        """A task's state."""
        return task_states(self.station.store, self.id)[task].value

    def trigger(self, trigger_id: int) -> dict[str, Any]:
        """A trigger's row."""
        (row,) = self.station.query("SELECT * FROM trigger WHERE id = :id", id=trigger_id)
        return row

    def xcom(self, task: str, key: str = "return_value") -> Any:
        """What a task has left."""
        value = self.station.store.tasks.pull_xcom(self.id, task, key)
        return None if value is None else decode_value(value)

    def wait(self, **states: str) -> Run:
        """Wait until tasks are in these states."""
        self.station.wait_states(self.id, **states)
        return self

    def wait_end(self) -> dict[str, str]:
        """Wait until all tasks have ended; return their states."""
        return self.station.wait_end(self.id)

    # --- what the logs say ---

    def log(self, task: str, try_number: int | None = None) -> list[Record]:
        """The log of a task."""
        return list(read(self.station.home / "logs", self.dag, self.run_id, task, try_number))

    def logged(self, task: str, event: str, try_number: int | None = None) -> list[Record]:
        """The records of a task's log with an event of which this is a part."""
        return [record for record in self.log(task, try_number) if event in str(record["event"])]

    def wait_logged(self, task: str, event: str, try_number: int | None = None) -> Record:
        """Wait until there is one: what a supervisor has to say of an end is logged after the end is stored."""
        found: list[Record] = wait_until(
            lambda: self.logged(task, event, try_number), lambda: f"{event!r} in the log of {task}: {self.log(task)}"
        )
        return found[0]


class Station(Pair):
    """One ``headgate up`` and what it has started."""

    command = "up"

    def __init__(
        self,
        home: Path,
        database_url: str,
        keys: str,
        store: Store,
        arguments: tuple[str, ...],
        settings: dict[str, str],
    ):
        self.store = store
        self.home = home
        self.dags = home / "dags"
        self.dags.mkdir(exist_ok=True)
        self._engine = open_engine(database_url)
        self._runs = count(1)
        super().__init__(home, database_url, keys, arguments, settings)

    def close(self) -> None:
        """Leave nothing behind."""
        super().close()
        self._engine.dispose()

    def query(self, statement: str, **parameters: Any) -> list[dict[str, Any]]:
        """Run SQL in a transaction of its own; return the rows."""
        with self._engine.begin() as connection:
            result = connection.execute(text(statement), parameters)
            return [dict(row._mapping) for row in result] if result.returns_rows else []

    def write(self, name: str, source: str) -> Path:
        """Put a DAG file where it is found; it is there in one piece."""
        path = self.dags / name
        beside = path.with_suffix(".new")
        beside.write_text(source)
        beside.rename(path)
        return path

    def wait_dag(self, dag: str) -> None:
        """Wait until a DAG is known."""
        wait_until(lambda: dag in {row.name for row in self.store.inspect.dags()}, f"the DAG {dag!r}")

    def trigger(self, dag: str, run_id: str, params: Mapping[str, Any] | None = None) -> DagRunId:
        """Begin a run; return its id in the database."""
        self.wait_dag(dag)
        conf = None if params is None else encode_value(dict(params), where="params")
        run = self.store.tasks.create_run(dag, run_id, conf=conf)
        assert run is not None
        return run

    def run(self, dag: str, **params: Any) -> Run:
        """Begin a run with a folder and a name of its own."""
        run_id = f"{dag}-{next(self._runs)}"
        folder = self.home / "runs" / run_id
        folder.mkdir(parents=True)
        return Run(self, self.trigger(dag, run_id, {"folder": str(folder), **params}), dag, run_id, folder)

    def wait_states(self, run: int, **states: str) -> None:
        """Wait until tasks of a run are in these states."""
        wanted = {task: TaskState(state) for task, state in states.items()}
        wait_until(
            lambda: wanted.items() <= task_states(self.store, run).items(),
            lambda: f"{states}, which are {task_states(self.store, run)}",
        )

    def wait_end(self, run: int) -> dict[str, str]:
        """Wait until all tasks of a run have ended; return their states."""
        wait_until(
            lambda: all(state in TERMINAL for state in task_states(self.store, run).values()),
            lambda: f"the end of {task_states(self.store, run)}",
        )
        return {task: state.value for task, state in task_states(self.store, run).items()}
