"""The trigger of a stream, in the simulation of tasks: it fires the numbers that the scenario says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import trio
from tests.proof.simulation.tasks import records
from tests.proof.simulation.triggers import in_runner

from headgate.triggers.base import (
    BaseTrigger,
    LastEventUnknown,
    TaskFailedEvent,
    TaskSkippedEvent,
    TaskSuccessEvent,
    TriggerEvent,
)

if TYPE_CHECKING:
    from tests.proof.simulation.tasks.streams.plans import Stream

CLASSPATH: Final = "tests.proof.simulation.tasks.streams.source.SimulatedSource"
OF_STREAM: Final = -2  # in place of a leg, of what the trigger of a stream does


class SourceBroken(Exception):
    """What a trigger raises because its plan says so."""


class SimulatedSource(BaseTrigger):
    """The trigger of the stream of a task."""

    def __init__(self, task: str) -> None:
        self.task = task

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """See the base class."""
        return CLASSPATH, {"task": self.task}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire the numbers that are not fired yet, and end as the plan says."""
        runner = in_runner()
        world: Any = runner.world
        plan: Stream = world.scenario.task(self.task).stream
        # A task that begins in its trigger does not name its run: the trigger is what tells two of them apart.
        trigger: int = self._ask_last_event.args[0]  # type: ignore[union-attr]
        world.serial += 1
        run: int = world.serial
        runner.note(records.SourceBegan(trio.current_time(), trigger, runner.number, run))

        def ended(how: str) -> None:
            runner.note(records.SourceEnded(trio.current_time(), trigger, run, how))

        try:
            last = None if plan.keyed else await self.last_event()
        except LastEventUnknown:  # the database is away
            ended("raises")
            raise
        first = 0
        if last is not None:  # it may be one that has ended an earlier try
            first = plan.total if last.payload is None else last.payload["number"] + 1
        for number in range(first, plan.total):
            await trio.sleep(plan.gap_s)
            if number in plan.breaks and world.breaks(trigger, number):
                ended("raises")
                raise SourceBroken("the trigger fails as planned")
            is_last = plan.ending == "is_last" and number == plan.total - 1
            if is_last:
                ended("is_last")
            runner.note(records.SourceFired(trio.current_time(), trigger, run, number))
            yield TriggerEvent({"number": number}, key=str(number) if plan.keyed else None, is_last=is_last)
            if is_last:
                await trio.sleep(plan.rest_s)
                return
        if plan.ending == "never":
            await trio.sleep_forever()
        ended("returns" if plan.ending == "is_last" else plan.ending)
        match plan.ending:
            case "success":
                yield TaskSuccessEvent()
            case "failed":
                yield TaskFailedEvent()
            case "skipped":
                yield TaskSkippedEvent()
            case _:
                pass

    async def on_kill(self) -> None:
        """Say that it was called."""
        in_runner().note(records.KillHookCalled(trio.current_time(), self.task, OF_STREAM))
