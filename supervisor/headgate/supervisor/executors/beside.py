"""Two pools of workers on this machine: one for all steps, and one beside it for those of endless tasks."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.protocol.messages.queries import Response
from headgate.protocol.messages.worker import Step
from headgate.scheduling.bundles import Room
from headgate.supervisor.executors.base import EndReason, ExecutorEvent
from headgate.supervisor.executors.local import LocalExecutor


class TwoPools:
    """Implements `headgate.supervisor.executors.base.Executor`. A worker of ``endless`` runs one step and leaves."""

    def __init__(self, pool: LocalExecutor, endless: LocalExecutor) -> None:
        self._pool = pool
        self._endless = endless
        self._both = (pool, endless)

    def room(self) -> int:
        """Return how many steps may be submitted now and would begin at once, or as soon as a worker has started."""
        return self._pool.room()

    def endless_room(self) -> int:
        """Return how many steps of endless tasks may be submitted now."""
        return self._endless.room()

    def rooms(self) -> list[Room]:
        """Return what each worker that runs a step may be given beside it; a worker of an endless task gets nothing."""
        return self._pool.rooms()

    def submit(self, step: Step, expected_s: float | None = None, *, is_endless: bool = False) -> None:
        """Run a step."""
        if is_endless:
            self._endless.submit(step)
        else:
            self._pool.submit(step, expected_s)

    def end(self, token: str, why: EndReason, text: str) -> None:
        """End a step that still runs; the pool that does not know it does nothing."""
        for one in self._both:
            one.end(token, why, text)

    def answer(self, token: str, answer: Response) -> None:
        """Answer a query of a step; dropped if the step has ended."""
        for one in self._both:
            one.answer(token, answer)

    def events(self, now: float) -> Sequence[ExecutorEvent]:
        """Return the events since the last call; those of one step are in order."""
        return [*self._pool.events(now), *self._endless.events(now)]

    def wake_at(self) -> float:
        """Return when `events` has something to do even if nothing happens."""
        return min(one.wake_at() for one in self._both)

    def drain(self, now: float) -> bool:
        """Take nothing more; return whether no step is running any more."""
        return all([one.drain(now) for one in self._both])

    def close(self) -> None:
        """End all steps and processes."""
        for one in self._both:
            one.close()
