"""A real ``headgate up``: supervisor, runner and workers, with a folder of DAG files, and the database beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.pair import Pair, wait_until

from headgate.protocol.dags import TaskState
from headgate.protocol.values import encode_value
from headgate.scheduling.states import TERMINAL
from headgate.store.store import Store


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
        self.dags = home / "dags"
        self.dags.mkdir(exist_ok=True)
        super().__init__(home, database_url, keys, arguments, settings)

    def write(self, name: str, source: str) -> Path:
        """Put a DAG file where it is found; it is there in one piece."""
        path = self.dags / name
        beside = path.with_suffix(".new")
        beside.write_text(source)
        beside.rename(path)
        return path

    def wait_dag(self, dag: str) -> None:
        """Wait until a DAG is known."""
        wait_until(lambda: dag in {row.name for row in self.store.tasks.list_dags()}, f"the DAG {dag!r}")

    def trigger(self, dag: str, run_id: str, params: Mapping[str, Any] | None = None) -> int:
        """Begin a run; return its id in the database."""
        self.wait_dag(dag)
        conf = None if params is None else encode_value(dict(params), where="params")
        run = self.store.tasks.create_run(dag, run_id, conf=conf)
        assert run is not None
        return run

    def wait_states(self, run: int, **states: str) -> None:
        """Wait until tasks of a run are in these states."""
        wanted = {task: TaskState(state) for task, state in states.items()}
        wait_until(
            lambda: wanted.items() <= self.store.tasks.task_states(run).items(),
            f"{states}, which are {self.store.tasks.task_states(run)}",
        )

    def wait_end(self, run: int) -> dict[str, str]:
        """Wait until all tasks of a run have ended; return their states."""
        wait_until(lambda: all(state in TERMINAL for state in self.store.tasks.task_states(run).values()), "end")
        return {task: state.value for task, state in self.store.tasks.task_states(run).items()}
