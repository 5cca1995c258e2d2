"""What users wrote, in the simulation: one class of trigger, whose filter does what the scenario's plans say."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from typing import TYPE_CHECKING, Any

import trio
from tests.proof.simulation import records
from tests.proof.simulation.database import POISON
from tests.proof.simulation.scenario import LONG_BYTES, PADDING_BYTES, Plan

from headgate.triggers.base import BaseEventTrigger, TaskSuccessEvent, TriggerEvent
from headgate.triggers.shared_stream import SharedStreamProducer, reject_shared_stream_event

if TYPE_CHECKING:
    from tests.proof.simulation.broker import Delivery
    from tests.proof.simulation.processes import RunnerProcess

STREAM = "the stream"
PLANNED_FAILURE = "the filter fails as planned"
ORDINARY = Plan()
EXIT_OF_USERS = 3  # of a process that a trigger ends
NAPPING_TRIES_MAX = 3  # a filter that is slow for ever would never get a message behind it


class PlannedFailure(Exception):
    """What a filter raises because its plan says so."""


def in_runner() -> RunnerProcess:
    """Return the simulated process that the calling task runs in."""
    from tests.proof.simulation.processes import running_in

    return running_in.get()


class SimulatedTrigger(BaseEventTrigger):
    """One subscriber."""

    def __init__(self, name: str) -> None:
        self.name = name

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """See the base class."""
        return "tests.proof.simulation.triggers.SimulatedTrigger", {"name": self.name}

    def shared_stream_key(self) -> Hashable:
        """Return the one key; the host asks for it in the step in which it joins, or once to describe the trigger."""
        runner = in_runner()
        if self.name in runner.described:
            runner.note(records.Began(trio.current_time(), self.name, runner.number))
        return STREAM

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """See the base class."""
        from tests.proof.simulation.broker import SimulatedProducer

        return SimulatedProducer(in_runner())

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Never run."""
        raise RuntimeError("a shared stream has a filter")
        yield

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Delivery]) -> AsyncGenerator[TriggerEvent, None]:
        """Do with each message what its plan says."""
        runner = in_runner()
        if runner.world.count_start(self.name) <= runner.world.scenario.topology.kills_at_start.get(self.name, 0):
            await self._end_process(runner, None)
        async for delivery in shared_stream:
            runner.note(records.Pulled(trio.current_time(), self.name, delivery.handout, runner.number))
            plan = runner.world.plan_of(self.name, delivery.lane, delivery.offset)
            tried = runner.world.count_try(self.name, delivery.lane, delivery.offset)
            if tried <= plan.kills:
                await self._end_process(runner, delivery.message)
            tried -= plan.kills
            if tried <= plan.stalls:
                await self._hang(runner, delivery, plan)
            if tried <= plan.stalls + plan.failures:
                for position in range(plan.fired_before_failing):
                    yield self._event(runner, delivery, plan, position)
                raise PlannedFailure(PLANNED_FAILURE)
            for position in range(plan.events):
                if plan.nap_s and tried <= NAPPING_TRIES_MAX:
                    await runner.nap(plan.nap_s)
                if plan.ends:
                    runner.note(records.Returned(trio.current_time(), self.name))
                yield self._event(runner, delivery, plan, position)
            if plan.kind == "reject":
                reject_shared_stream_event()
                runner.note(records.Refused(trio.current_time(), self.name, delivery.handout))
            elif plan.kind == "return":
                runner.note(records.Returned(trio.current_time(), self.name))
                return

    async def _end_process(self, runner: RunnerProcess, message: str | None) -> None:
        runner.note(records.Killed(trio.current_time(), self.name, runner.number, message))
        runner.die(f"exit code {EXIT_OF_USERS}")
        await trio.sleep_forever()  # cancelled: it is a ghost

    async def _hang(self, runner: RunnerProcess, delivery: Delivery, plan: Plan) -> None:
        try:
            await runner.nap(runner.world.scenario.topology.ack_timeout_s * 3)
        except trio.Cancelled:
            runner.note(records.Hung(trio.current_time(), self.name, delivery.handout))
            if plan.swallows:
                with trio.CancelScope(shield=True):
                    await runner.death.wait()
            raise

    def _event(self, runner: RunnerProcess, delivery: Delivery, plan: Plan, position: int) -> TriggerEvent:
        """Say that the event is fired, which it is in this very step, and return it."""
        runner.note(records.Fired(trio.current_time(), self.name, delivery.handout, position))
        handout = delivery.handout
        if plan.steady and not runner.is_dead:  # of what a ghost fires, nothing is seen
            handout = runner.world.first_fired.setdefault((self.name, delivery.message, position), handout)
        message = delivery.message if plan.kind != "poison" else f"{delivery.message} {POISON}"
        payload: dict[str, Any] = {"message": message, "handout": handout}
        if plan.padded:
            payload["padding"] = "." * PADDING_BYTES
        if plan.kind == "long":
            payload["padding"] = "." * LONG_BYTES
        if plan.kind == "refused":
            payload["unfit"] = object()
        return TaskSuccessEvent(xcoms=payload) if plan.ends else TriggerEvent(payload)
