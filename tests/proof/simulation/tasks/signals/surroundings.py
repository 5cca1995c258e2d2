"""What surrounds the supervisors: the log read from outside, a store that fails, workers whose steps send and listen,
and the triggers of watchers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio
from tests.proof.simulation.processes import SupervisorProcess
from tests.proof.simulation.tasks.database import READS, FailingVerbs, TaskFailingStore, TaskReader
from tests.proof.simulation.tasks.executor import RESUMED_TO_FAIL, Operator, SimulatedExecutor, Worker
from tests.proof.simulation.tasks.records import SaidSignal
from tests.proof.simulation.tasks.signals import records
from tests.proof.simulation.tasks.signals.jobs.reading import JobReader
from tests.proof.simulation.tasks.signals.plans import Listens, OfSignals, Send, Watcher, said_of
from tests.proof.simulation.tasks.signals.rehearsal import Rehearsal
from tests.proof.simulation.tasks.signals.runs.plans import RunsOn
from tests.proof.simulation.tasks.signals.runs.reading import RunReader, has_runs_to_come, open_runs
from tests.proof.simulation.triggers import in_runner

from headgate.child.queries import QueryFailed
from headgate.protocol.messages.queries import ListenSignals, Query, Response, SendSignals, SignalsHeard
from headgate.signals import Signal, SignalService, SignalVersion, SignalWatcher, StopListening
from headgate.supervisor.executors.base import StepQuery
from headgate.triggers.base import BaseTrigger, TriggerEvent

if TYPE_CHECKING:
    from tests.proof.simulation.tasks.signals.world import SignalWorld
    from tests.proof.simulation.tasks.world import TaskSupervisor

Result = TypeVar("Result")
CLASSPATH: Final = "tests.proof.simulation.tasks.signals.surroundings.SimulatedWatcher"
FIRST_ID: Final = 1000  # of the queries of code that is rehearsed: others count from 1


# --- the database ----------------------------------------------------------------------------------


class SignalReader(TaskReader):
    """Tells of the log of signals as well, in front of all else that a transaction has changed."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[int, str] = {}
        self._kept: dict[str, tuple[int, ...]] = {}
        self._last_signal = 0
        self._starts: dict[int, list[tuple[Any, ...]]] = {}  # of tasks with rules
        self._met: set[tuple[int, str, int]] = set()
        self._jobs, self._of_runs = JobReader(), RunReader()
        self.said = ""  # the token of the step for which the verb is carried out

    def _first(self, now: float, by: str) -> list[Any]:
        found: list[Any] = []
        keys = dict(self._connection.execute("SELECT id, key FROM signal_key ORDER BY id").fetchall())
        for id_ in sorted(self._keys.keys() - keys.keys()):
            found.append(records.KeyForgotten(now, by, self._keys[id_]))
            self._kept.pop(self._keys[id_], None)
        self._keys = keys
        for id_, key_id, version, value, dedup, sender, run in self._connection.execute(_NEW, (self._last_signal,)):
            self._last_signal = id_
            key, text = keys[key_id], bytes(value).decode()
            found.append(records.SignalStored(now, by, self.said, key, version, text, dedup, sender, run or ""))
            self._kept[key] = (*self._kept.get(key, ()), version)
        kept: dict[str, list[int]] = {}
        for key_id, version in self._connection.execute("SELECT key_id, version FROM signal ORDER BY version"):
            kept.setdefault(keys[key_id], []).append(version)
        for key, before in sorted(self._kept.items()):
            if dropped := set(before) - set(kept.get(key, ())):
                found.append(records.SignalsDropped(now, by, key, tuple(sorted(dropped))))
                self._kept[key] = tuple(kept.get(key, ()))
        for reader in (self._of_runs, self._jobs):
            found += reader.changes(self._connection, self.names, now, by)
        return found + self._rule_moves(now, by)

    def has_runs_to_come(self, dags: Mapping[str, RunsOn]) -> bool:
        """Whether signals that were sent are to make runs of these DAGs."""
        return has_runs_to_come(self._connection, dags)

    def open_runs(self, dag: str) -> list[str]:
        """Return the runs of a DAG that have not ended."""
        return open_runs(self._connection, dag)

    def _rule_moves(self, now: float, by: str) -> list[Any]:
        starts: dict[int, list[tuple[Any, ...]]] = {}
        for id_, *rest in self._connection.execute(_STARTS):
            starts.setdefault(id_, []).append(tuple(rest))
        before, self._starts = self._starts, starts
        met = set(self._connection.execute(_MET))
        new, self._met = sorted(met - self._met), met
        found: list[Any] = [records.RuleMet(now, by, self.names[id_], rule, version) for id_, rule, version in new]
        return found + [
            records.RulesMoved(now, by, self.names[id_], tuple((rule, version) for rule, version, _ in some if version))
            for id_, some in starts.items()
            if before.get(id_) != some
        ]

    def events_of(self, trigger: int) -> int:
        """Return how many events of a trigger are stored that it has fired itself."""
        sql = "SELECT count(*) FROM trigger_event WHERE trigger_id = ? AND trigger_run_id NOT LIKE 'by hand %'"
        return int(self._connection.execute(sql, (trigger,)).fetchone()[0])


_NEW = """
SELECT s.id, s.key_id, s.version, s.value, s.dedup, s.sender, dag.name || '/' || r.run_id FROM signal AS s
LEFT JOIN dag_run AS r ON r.id = s.dag_run_id LEFT JOIN dag ON dag.id = r.dag_id WHERE s.id > ? ORDER BY s.id
"""

_STARTS = """
SELECT task_instance_id, rule, coalesce(start_version, 0), coalesce(previous_version, 0) FROM signal_wait
WHERE start_version IS NOT NULL OR previous_version IS NOT NULL ORDER BY id
"""
_MET = """
SELECT task_instance_id, rule, met_version FROM signal_wait
WHERE met_version IS NOT NULL AND task_instance_id IS NOT NULL
"""


class SignalStore(TaskFailingStore):
    """The store with its part for signals."""

    reads = READS - {"consider_signals", "create_event_runs"} | {"hear", "page", "version"}

    def __init__(self, world: SignalWorld, supervisor: SupervisorProcess) -> None:
        super().__init__(world, supervisor)
        self._reader = world.reader
        self._limits = world.scenario.limits
        self.signals = FailingVerbs(self, self._store.signals)

    def call_part(self, name: str, verb: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """See the base class."""
        if name == "consider_signals":
            kwargs["limit"] = self._limits.waits
        if name != "send_signals":
            return super().call_part(name, verb, *args, **kwargs)
        self._reader.said = args[2]
        try:
            return super().call_part(name, verb, *args, **kwargs)
        finally:
            self._reader.said = ""

    def _wrote(self, epoch: int, verb: str) -> None:
        is_maybe_idle = verb in ("consider_signals", "ask", "create_event_runs")
        if self._last_changes or not is_maybe_idle:  # if there is nothing to do they need no lease
            super()._wrote(epoch, verb)


# --- workers ---------------------------------------------------------------------------------------


class _Taking(SignalWatcher):
    """Takes what a step listens for."""

    def __init__(self, most: int, note: Callable[[str, object], None]) -> None:
        self._most = most
        self._note = note

    def process(self, signals: Any) -> None:
        """See the base class."""
        self._most -= len(signals)
        self._note("listened", tuple(signal.version for signal in signals))
        if self._most <= 0:
            raise StopListening


class _Code:
    """What the code of a step does with signals before its end."""

    def __init__(self, plan: OfSignals, task: str) -> None:
        self._plan = plan
        self._task = task

    def __call__(self, rehearsal: Rehearsal) -> None:
        self._send(rehearsal, self._plan.now)
        if self._plan.listens is not None:
            self._listen(rehearsal, self._plan.listens)
        self._send(rehearsal, self._plan.then)

    def _send(self, rehearsal: Rehearsal, sends: tuple[Send, ...]) -> None:
        groups = [sends] if self._plan.together and sends else [(one,) for one in sends]
        for group in groups:
            for of_run in sorted({one.of_run for one in group}):
                some = [one for one in group if one.of_run is of_run]
                signals = [Signal(one.key, json.loads(one.value), one.dedup or None) for one in some]
                for version in SignalService().send_signals(signals, of_run=of_run):
                    rehearsal.note("sent", version)

    def _listen(self, rehearsal: Rehearsal, plan: Listens) -> None:
        service, after, version, timeout = SignalService(), plan.after, plan.version, plan.timeout_s
        if plan.watches:
            taking = _Taking(plan.most, rehearsal.note)
            service.listen_signal(self._task, plan.key, taking, version, after=after, timeout=timeout)
            rehearsal.note("over", False)
            return
        most = plan.most
        for signal in service.listen_signal(self._task, plan.key, None, version, after=after, timeout=timeout):
            rehearsal.note("listened", (signal.version,))
            most -= 1
            if not most:
                break
        rehearsal.note("over", most > 0 and plan.version is None)


class SignalExecutor(SimulatedExecutor):
    """The workers of one supervisor, whose steps send signals and listen for them."""

    def __init__(self, supervisor: TaskSupervisor, workers: int) -> None:
        super().__init__(supervisor, workers)
        self._queries: dict[tuple[str, int], Query] = {}

    async def _converse(self, worker: Worker, operator: Operator) -> None:
        plan = operator.plan.signals
        if plan is None or operator.leg == RESUMED_TO_FAIL or operator.leg > 0:
            return
        token, name = worker.step.token, operator.name
        rehearsal = Rehearsal(_Code(plan, name), partial(self._say, token, name))
        number = FIRST_ID
        try:
            while (query := rehearsal.run()) is not None:
                number += 1
                if isinstance(query, SendSignals):
                    run = name.rpartition("/")[0]
                    said = tuple(map(said_of, query.signals))
                    self._note(records.Sends(trio.current_time(), token, said, run))
                self._tell(worker, StepQuery(token, number, query), "asked")
                while number not in worker.answers:
                    await worker.answered.wait()
                rehearsal.answer(query, worker.answers[number])
        except QueryFailed as error:
            self._note(records.Refused(trio.current_time(), token, name, str(error)))

    def _gone(self, worker: Worker) -> None:
        step = worker.step
        if self._world.scenario.task(f"{step.dag_id}/{step.run_id}/{step.task_id}").endless:
            self._note(records.WorkerGone(trio.current_time(), step.token))

    def answer(self, token: str, answer: Response) -> None:
        """See the base class."""
        worker = self._busy.get(token)
        if worker is not None and answer.id not in worker.answers and isinstance(answer.result, SignalsHeard):
            self._note_heard(worker, answer.result, self._asked_by(worker, answer.id))
        super().answer(token, answer)

    def _tell(self, worker: Worker, event: Any, how: str) -> None:
        if isinstance(event, StepQuery):
            self._queries[worker.step.token, event.id] = event.query
        super()._tell(worker, event, how)

    def _asked_by(self, worker: Worker, number: int) -> ListenSignals:
        query = self._queries[worker.step.token, number]
        assert isinstance(query, ListenSignals)
        return query

    def _note_heard(self, worker: Worker, heard: SignalsHeard, query: ListenSignals) -> None:
        step, versions = worker.step, tuple(signal.version for signal in heard.signals)
        name = f"{step.dag_id}/{step.run_id}/{step.task_id}"
        self._note(
            records.Answered(trio.current_time(), step.token, name, query.key, query.after, versions, heard.seen)
        )

    def _say(self, token: str, name: str, what: str, value: Any) -> None:
        now = trio.current_time()
        match what:
            case "sent":
                assert isinstance(value, SignalVersion)
                self._note(records.Sent(now, token, value.key, value.dedup or "", value.version, value.is_new))
            case "listened":
                self._note(records.Listened(now, token, value))
            case _:
                self._note(records.ListenedOut(now, token, name, value))


# --- watchers --------------------------------------------------------------------------------------


class SimulatedWatcher(BaseTrigger):
    """The trigger of a watcher: it fires its numbers, from the first on whenever it is started."""

    def __init__(self, name: str) -> None:
        self.name = name

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """See the base class."""
        return CLASSPATH, {"name": self.name}

    async def run(self) -> Any:
        """Fire all numbers, and send a signal beside each if the plan says so."""
        runner: Any = in_runner()
        plan: Watcher = runner.world.scenario.watcher(self.name)
        for number in range(plan.count):
            await trio.sleep(plan.gap_s)
            if plan.sends:
                await self._send(runner, plan.sends, number)
            yield TriggerEvent(plan.payload(number), key=str(number))
        await trio.sleep_forever()

    async def _send(self, runner: Any, key: str, number: int) -> None:
        said = SaidSignal(key, f"{self.name} {number}", str(number))
        runner.note(records.Sends(trio.current_time(), "a trigger", (said,)))
        try:
            sent = await self.send_signal(key, number, dedup=said.dedup)
        except QueryFailed:
            return  # it may have been sent
        runner.note(records.Sent(trio.current_time(), "a trigger", key, said.dedup, sent.version, sent.is_new))
