"""Workers that decide about signals: simulated time and troubles around the real `Decider` and the real decision."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import msgspec
import trio
from tests.proof.simulation.tasks.dags import DecidingOperator, operator_of
from tests.proof.simulation.tasks.signals import records
from tests.proof.simulation.tasks.signals.rules.plans import Decides

from headgate.protocol.messages.rules import Action
from headgate.protocol.messages.steps import StepFailed
from headgate.protocol.messages.worker import DecideSignals, SignalsDecided
from headgate.supervisor.executors.deciders import DECISION_S_MAX, Answer, Decider
from headgate.worker import decisions

if TYPE_CHECKING:
    from tests.proof.simulation.tasks.signals.world import SignalSupervisor


class SimulatedDecider(Decider):
    """Asks one operator at a time, as the real one does; its process is simulated."""

    def __init__(self, supervisor: SignalSupervisor) -> None:
        self._supervisor = supervisor
        self._world = supervisor.signal_world
        self._clock = trio.current_time
        self._done: list[Answer] = []
        self._job: DecideSignals | None = None
        self._scope = trio.CancelScope()
        self.since = trio.current_time()

    def events(self, now: float) -> list[Answer]:
        """See the base class."""
        done, self._done = self._done, []
        return done

    def wake_at(self) -> float:
        """See the base class."""
        return 0.0 if self._done else float("inf")

    def close(self) -> None:
        """See the base class."""
        self._job = None
        self._scope.cancel()

    def _begin(self, job: DecideSignals) -> None:
        self._job = job
        name = _name(job)
        signals = tuple((one.key, one.version) for one in job.signals)
        self._world.note(records.Questioned(trio.current_time(), self._supervisor.number, job.token, name, signals))
        self._world.nursery.start_soon(self._live, job, name)

    async def _live(self, job: DecideSignals, name: str) -> None:
        self._scope = trio.CancelScope()
        with self._scope:
            error = await self._decide(job, name)
            self._world.note(records.QuestionOver(trio.current_time(), job.token))
            if not self._supervisor.is_gone:
                self._job = None
                if error:
                    self._fail(job, error, "")
                self._supervisor.bell.ring()

    async def _decide(self, job: DecideSignals, name: str) -> str:
        """Decide about one signal after the other; return why the process has ended, if it has."""
        ruled = self._world.scenario.task(name).ruled
        plan = Decides(()) if ruled is None or ruled.decides is None else ruled.decides
        for signal in job.signals:
            trouble = plan.trouble(self._world.count_decision(name))
            await trio.sleep(DECISION_S_MAX if trouble == "hangs" else plan.seconds)
            if self._supervisor.is_gone:
                break  # and the process with it
            if trouble in ("dies", "hangs"):
                self._note_failure(job, name, signal.key, signal.version)
                return "the process that decided it was killed"
            operator = operator_of(self._world.scenario.task(name), name)
            if isinstance(operator, DecidingOperator) and trouble in ("raises", "nonsense"):
                operator.trouble = trouble
            decided: list[Action] = []
            found = operator if self._world.has_task(name) else StepFailed(f"there is no task {name!r} any more")
            with patch.object(decisions, "find_task", lambda *_arguments, found=found: found):
                last = decisions.run(msgspec.structs.replace(job, signals=(signal,)), on_decided=decided.append)
            for action in decided:
                now = trio.current_time()
                self._world.note(records.Decided(now, job.token, name, signal.key, signal.version, action))
                self._take(job, SignalsDecided(job.token, (action,), more=True))
            if last.error:
                if not last.is_unloaded:
                    self._note_failure(job, name, signal.key, signal.version)
                self._take(job, last)
                return ""
        self._take(job, SignalsDecided(job.token))
        return ""

    def _note_failure(self, job: DecideSignals, name: str, key: str, version: int) -> None:
        self._world.note(records.Decided(trio.current_time(), job.token, name, key, version, ""))


def _name(job: DecideSignals) -> str:
    return f"{job.dag_id}/{job.run_id}/{job.task_id}"
