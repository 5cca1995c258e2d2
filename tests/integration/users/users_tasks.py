"""What the DAG files of the tests are made of: tasks and triggers that go on when a file says so, and tell of it.

Each run has a folder, ``params["folder"]``. A task holds its worker until the file it waits for is there, and a trigger
waits in the same way. What they do they append to the folder's ``journal``, a line for each thing, in one write.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import trio

from headgate.tasks import BaseOperator, Context
from headgate.triggers.base import (
    BaseTrigger,
    TaskFailedEvent,
    TaskSkippedEvent,
    TaskSuccessEvent,
    TriggerEvent,
)
from headgate.triggers.file import FileTrigger

LOOK_S = 0.005  # between two looks for a file


def note(folder: str | Path, *words: object) -> None:
    """Add a line to the journal of a run; many processes may do so at once."""
    descriptor = os.open(Path(folder, "journal"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    finally:
        os.close(descriptor)


def hold(folder: str | Path, name: str) -> None:
    """Wait until a file is there."""
    while not Path(folder, name).exists():
        time.sleep(LOOK_S)


class Gate(BaseTrigger):
    """Fires when its file is there, in the way the file's text says; tells of its hooks.

    ``success``, ``failed`` and ``skipped`` end the task with XComs; ``raise`` and ``return`` end the trigger without an
    event. Any other text is the payload.
    """

    def __init__(self, folder: str, task: str, file: str) -> None:
        self.folder, self.task, self.file = folder, task, file

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "users_tasks.Gate", {"folder": self.folder, "task": self.task, "file": self.file}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        note(self.folder, self.task, "waits")
        path = trio.Path(self.folder, self.file)
        while not await path.exists():  # noqa: ASYNC110 - another process makes it
            await trio.sleep(LOOK_S)
        said = await path.read_text()
        xcoms = {"from_trigger": self.file}
        match said:
            case "success":
                yield TaskSuccessEvent(xcoms=xcoms)
            case "failed":
                yield TaskFailedEvent(xcoms=xcoms)
            case "skipped":
                yield TaskSkippedEvent(xcoms=xcoms)
            case "raise":
                self.raise_it()
            case "return":
                return
            case _:
                yield TriggerEvent(said)

    def raise_it(self) -> None:
        raise ConnectionError("the upstream is on fire")

    async def cleanup(self) -> None:
        note(self.folder, self.task, "cleanup")

    async def on_kill(self) -> None:
        note(self.folder, self.task, "on_kill-of-trigger")


class Teller(BaseOperator):
    """A task that tells of itself."""

    def tell(self, context: Context, *words: object) -> str:
        """Add a line with the task, its try and these words; return the folder."""
        self.folder = str(context["params"]["folder"])
        note(self.folder, self.task_id, context["try_number"], *words)
        return self.folder

    def on_kill(self) -> None:
        note(self.folder, self.task_id, "on_kill-of-task")


class Holds(Teller):
    """Runs until the file ``<task_id>.go`` is there; fails if its text is ``fail``."""

    def execute(self, context: Context) -> str:
        folder = self.tell(context, "execute")
        try:
            hold(folder, f"{self.task_id}.go")
        finally:
            self.tell(context, "ends")
        said = Path(folder, f"{self.task_id}.go").read_text()
        if said == "fail":
            raise RuntimeError("it was told to fail")
        return said


class Waits(Teller):
    """Defers ``times`` times, each time until the file ``<task_id>.<number>``; then holds, if it is to, and returns.

    What it returns are the payloads of the events.
    """

    def __init__(self, *, times: int = 1, wait: timedelta | None = None, holds: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.times, self.wait, self.holds = times, wait, holds

    def execute(self, context: Context) -> None:
        folder = self.tell(context, "execute")
        self.mark = "lost with the worker"
        self._again(folder, [])

    def resumed(self, context: Context, event: Any, seen: list[Any]) -> list[Any]:
        folder = self.tell(context, "resumed", event)
        assert not hasattr(self, "mark"), "a resumed task is a new instance"
        if event == "bad":
            raise ValueError("the callback has failed")
        seen = [*seen, event]
        if len(seen) < self.times:
            self._again(folder, seen)
        if self.holds:
            hold(folder, f"{self.task_id}.go")
        return seen

    def _again(self, folder: str, seen: list[Any]) -> None:
        gate = Gate(folder, self.task_id, f"{self.task_id}.{len(seen) + 1}")
        self.defer(trigger=gate, method_name="resumed", kwargs={"seen": seen}, timeout=self.wait)


class Crowd(Teller):
    """Defers at once; all of its kind wait for one file."""

    def execute(self, context: Context) -> None:
        note(context["params"]["folder"], self.task_id, "execute")
        trigger = FileTrigger(Path(context["params"]["folder"], "fire"), poke_interval_s=1.0)
        self.defer(trigger=trigger, method_name="resumed")

    def resumed(self, context: Context, event: Any) -> None:
        note(context["params"]["folder"], self.task_id, "resumed")
