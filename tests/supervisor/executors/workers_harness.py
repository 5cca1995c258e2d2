"""A supervisor's loop around an executor or a parser, with real worker processes; and the author's files."""

from __future__ import annotations

import os
import selectors
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.waiting import WITHIN_S

from headgate.protocol.messages.runner import FRAME_BYTES_MAX
from headgate.protocol.messages.worker import FileParsed, Step, StepEnded, WorkerSettings
from headgate.supervisor.children.process import ChildProcess, scrub, start_worker
from headgate.supervisor.executors.base import ExecutorEvent, StepLost, StepQuery, StepReturned
from headgate.supervisor.executors.deciders import Deciders
from headgate.supervisor.executors.file_parser import FileParser
from headgate.supervisor.executors.local import LocalExecutor

PARSE_S_MAX = 30.0  # of a parser

HEAD = """
import os, sys, signal, time, ctypes, threading, subprocess, logging
from datetime import timedelta
from pathlib import Path

import structlog

from headgate.tasks import *
from headgate.tasks.operators import PythonOperator
from headgate.triggers.temporal import TimeDeltaTrigger


def wait_for_ever():
    threading.Event().wait()


def wait_for(name):
    deadline = time.monotonic() + 60
    while not Path(__file__).with_name(name).exists() and time.monotonic() < deadline:
        threading.Event().wait(0.01)

"""


class Author:
    """A folder of DAG files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens = count(1)

    def write(self, source: str, name: str = "dag.py", *, head: str = HEAD) -> Path:
        """Write a file; the source may be indented."""
        path = self.folder / name
        path.write_text(head + textwrap.dedent(source))
        return path

    def step(self, function: str, **fields: Any) -> Step:
        """Write a DAG `d` whose one task `t` calls `function(context)` (its source), and return a step of it."""
        source = textwrap.dedent(function) + textwrap.dedent(
            """
            class Operator(BaseOperator):
                def execute(self, context):
                    return f(context)

                def on_kill(self):
                    (Path(__file__).parent / "killed").write_text("on_kill")

            with DAG("d"):
                Operator(task_id="t")
            """
        )
        return self.step_of(self.write(source), **fields)

    def step_of(self, path: Path, **fields: Any) -> Step:
        """Return a step of the task `t` of the DAG `d` in a file."""
        number = next(self._tokens)
        known: dict[str, Any] = {
            "token": f"token-{number}",
            "task_instance_id": number,
            "file": str(path),
            "dag_id": "d",
            "run_id": "r",
            "task_id": "t",
            "try_number": 1,
        }
        return Step(**known | fields)


class Clock:
    """The time, and that which a test lets pass at once."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.passed_s


class Loop:
    """A selector, and what is read from the workers by whoever is on it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.selector = selectors.DefaultSelector()
        self.records: list[tuple[Any, dict[str, Any]]] = []
        self.output: list[tuple[Any, str]] = []
        self.parts: list[LocalExecutor | FileParser | Deciders] = []
        self.events: list[Any] = []
        self.spawned = 0

    def turn(self, wait_s: float) -> None:
        """Wait for something to happen, at most so long, and take it in."""
        wake_at = min([part.wake_at() for part in self.parts], default=float("inf"))
        for key, _ in self.selector.select(max(0.0, min(wait_s, wake_at - self.clock()))):
            key.data()
        for part in self.parts:
            self.events += part.events(self.clock())

    def until(self, is_so: Callable[[], Any], what: str) -> None:
        """Turn until something is so."""
        deadline = time.monotonic() + WITHIN_S
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: not within {WITHIN_S:g} s; {self.events} {self.output}"
            # Not all that is waited for wakes the loop: a file does not.
            self.turn(0.05)

    def spawn(self) -> ChildProcess:
        self.spawned += 1
        return start_worker(environment=scrub(os.environ, passed=(), secrets=()))

    def lines(self) -> list[str]:
        """What was printed by way of Python's streams."""
        return [record["event"] for _, record in self.records if record.get("logger") in ("stdout", "stderr")]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [record for _, record in self.records if record.get("event") == event]


class Pool(Loop):
    """A loop around a `LocalExecutor`."""

    def __init__(self, folder: Path, *, workers: int = 1, **options: Any) -> None:
        super().__init__()
        self.begun: list[tuple[str, int]] = []  # tokens, and the number of records by then
        settings = WorkerSettings(import_paths=(str(folder),), hook_timeout_s=options.pop("hook_timeout_s", 10.0))
        self.executor = LocalExecutor(
            self.selector,
            options.pop("spawn", self.spawn),
            workers=workers,
            settings=settings,
            on_record=lambda step, record: self.records.append((step, record)),
            on_output=lambda step, line: self.output.append((step, line)),
            on_begun=lambda step: self.begun.append((step.token, len(self.records))),
            clock=self.clock,
            **options,
        )
        self.parts.append(self.executor)

    def ended(self, token: str) -> ExecutorEvent | None:
        """What became of a step, None while it runs. No step may end twice."""
        ends = [e for e in self.events if isinstance(e, StepEnded | StepLost | StepReturned) and e.token == token]
        assert len(ends) <= 1, ends
        return ends[0] if ends else None

    def run(self, step: Step) -> Any:
        """Submit a step as soon as there is room; return its outcome, or its `StepLost`."""
        self.until(self.executor.room, "room for a step")
        self.executor.submit(step)
        return self.wait_end(step)

    def wait_end(self, step: Step) -> Any:
        self.until(lambda: self.ended(step.token), f"the end of {step.token}")
        end = self.ended(step.token)
        return end.outcome if isinstance(end, StepEnded) else end

    def asked(self) -> list[StepQuery]:
        return [event for event in self.events if isinstance(event, StepQuery)]


class Parser(Loop):
    """A loop around a `FileParser`."""

    def __init__(
        self, folder: Path, *, frame_bytes_max: int = FRAME_BYTES_MAX, memory_max_bytes: int | None = None
    ) -> None:
        super().__init__()
        self.parser = FileParser(
            self.selector,
            self.spawn,
            timeout_s=PARSE_S_MAX,
            memory_max_bytes=memory_max_bytes,
            settings=WorkerSettings(frame_bytes_max, (str(folder),)),
            on_record=lambda file, record: self.records.append((file, record)),
            on_output=lambda file, line: self.output.append((file, line)),
            clock=self.clock,
        )
        self.parts.append(self.parser)

    def parse(self, file: Path, *, hangs_after: Path | None = None) -> FileParsed:
        """Parse a file; one that hangs after it has written another takes too long."""
        assert self.parser.room() == 1
        self.parser.parse(str(file))
        before = len(self.events)
        if hangs_after is not None:
            self.until(lambda: hangs_after.exists() and hangs_after.read_text(), f"{hangs_after} is written")
            self.clock.passed_s += PARSE_S_MAX
        self.until(lambda: len(self.events) > before, f"the parse of {file}")
        parsed = self.events[-1]
        assert isinstance(parsed, FileParsed)
        assert parsed.file == str(file)
        return parsed


@contextmanager
def closing(loop: Loop) -> Iterator[Any]:
    """Leave no process behind."""
    try:
        yield loop
    finally:
        for part in loop.parts:
            part.close()
        loop.selector.close()


MakePool = Callable[..., Pool]
