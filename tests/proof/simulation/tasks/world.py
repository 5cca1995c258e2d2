"""The simulated machine with tasks: supervisors that have their part for tasks, DAG files, and users."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import trio
from tests.proof.simulation import scenario
from tests.proof.simulation.database import NAME
from tests.proof.simulation.processes import Died, SupervisorProcess
from tests.proof.simulation.records import Record
from tests.proof.simulation.scenario import Timed
from tests.proof.simulation.tasks import database, records
from tests.proof.simulation.tasks.dags import spec_of
from tests.proof.simulation.tasks.database import FILE, QUEUES, TaskFailingStore, TaskReader
from tests.proof.simulation.tasks.executor import SHORT_S, SimulatedExecutor
from tests.proof.simulation.tasks.faults import Act, Edit, FailAtVerb, KillAtVerb, KillWorker, Pause
from tests.proof.simulation.tasks.groups.drawing import GroupAct
from tests.proof.simulation.tasks.maps.plans import index_of, task_of
from tests.proof.simulation.tasks.scenario import TaskScenario, run_name
from tests.proof.simulation.world import World, run_world

from headgate.protocol import marks
from headgate.protocol.messages.dags import DagSpec
from headgate.scheduling.bundles import StepKind, StepTimes
from headgate.store.errors import DatabaseAway, StoreError
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.tasks import dags, task_rows, user_actions
from headgate.store.tasks.outcomes import StepEnd
from headgate.store.tasks.user_actions import StreamClear, every_instance
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.executors.deciders import Decider, Deciders
from headgate.supervisor.queries import StoreQueries
from headgate.supervisor.tasks.core import TaskCore, TaskTimes
from headgate.supervisor.tasks.decisions import Decisions
from headgate.supervisor.tasks.scheduler import Scheduler
from headgate.supervisor.triggers.leases import Identity, LeaseTimes

REST_WITHIN_S = 600.0  # after the last fault; what has not ended by then is stuck (18 starts of three tries take 300)
LOOK_S = 5.0  # between two polls, and two looks at running tasks, if others seem to have written nothing
QUIET_S = 5.0  # at rest: longer than a late answer is late, so that it has its chance to do harm
KNOWN = 0.8  # of the tasks: how long they take is known
ACTS_UNTIL_S = 5.5  # users wait no longer for a task to be in a state


class SilentLogs:
    """The logs of tries, which nobody reads."""

    trouble = ""

    def say(self, *_arguments: object, **_fields: object) -> None:
        """Say nothing."""

    def begun(self, *_arguments: object) -> None:
        """Say nothing."""

    def flush(self) -> bool:
        """Have nothing to write."""
        return True


def _no_decider() -> Decider:
    raise AssertionError("no operator of the simulation decides about signals")


class SimulatedFiles:
    """Keeps the database in line with the DAG files: stored when they change, and when a supervisor starts."""

    def __init__(self, task_world: TaskWorld, store: TaskFailingStore) -> None:
        self._world = task_world
        self._store = store
        self._seen: dict[str, int] = {}
        self.told = None  # nobody compares it

    def step(self, epoch: int, now: float) -> bool:
        """Store what a file says, if that is new."""
        if self._seen == self._world.versions:
            return False
        for file, version in self._world.versions.items():
            if self._seen.get(file) != version:
                spec = self._world.specs[file]
                self._store.tasks.save_file(epoch, FILE.format(file), [spec])
                self._seen[file] = version
                return True
        return False

    def wake_at(self) -> float:
        """See `DagFiles`."""
        return 0.0 if self._seen != self._world.versions else float("inf")

    def close(self) -> None:
        """Leave nothing behind."""


class TaskSupervisor(SupervisorProcess):
    """A supervisor with its part for tasks."""

    task_world: TaskWorld
    executor: SimulatedExecutor
    store_of: type[TaskFailingStore] = TaskFailingStore
    executor_of: type[SimulatedExecutor] = SimulatedExecutor

    def _make_core(self, identity: Identity) -> SupervisorCore:
        assert isinstance(self.world, TaskWorld)
        self.task_world = self.world
        settings = self.world.settings
        store: Any = self.store_of(self.world, self)
        files: Any = SimulatedFiles(self.world, store)
        logs: Any = SilentLogs()
        self.executor = self.executor_of(self, self.world.scenario.workers)
        answers = StoreQueries(store, {})

        def retry_of(duty: str) -> DatabaseRetry:
            return DatabaseRetry(duty, settings.database_retry_wait_s, settings.database_retry_wait_max_s)

        tasks = TaskCore(
            store.tasks,
            self.executor,
            Scheduler(store, retry=retry_of("scheduling")),
            answers,
            files,
            Decisions(store.scheduling, self._deciders(), logs),
            logs,
            queues=QUEUES,
            times=TaskTimes(look_s=LOOK_S),
            retry=retry_of("tasks"),
            clock=trio.current_time,
            step_times=self.world.step_times,
        )
        return SupervisorCore(
            store,
            identity,
            settings,
            is_gone=self._is_other_gone,
            clock=trio.current_time,
            tasks=tasks,
            answers=answers,
        )

    def _deciders(self) -> Deciders:
        return Deciders(_no_decider)

    def die(self, how: str, *, runner_at_once: bool, down_s: float) -> None:
        """Be gone, and the workers with it, at once or as soon as they find out."""
        self.executor.orphan(at_once=runner_at_once)
        super().die(how, runner_at_once=runner_at_once, down_s=down_s)


class TaskWorld(World):
    """One run of one scenario of tasks."""

    def __init__(self, plan: TaskScenario) -> None:
        super().__init__(plan)
        self.scenario: TaskScenario = plan
        self.settings = msgspec.structs.replace(
            self.settings, lease=LeaseTimes(10.0, silence_max_s=30.0, poll_interval_s=LOOK_S, look_interval_s=0.5)
        )
        self.reader: TaskReader = TaskReader()
        self.serial = 0
        self.specs: dict[str, DagSpec] = {dag.name: spec_of(dag) for dag in plan.dags}
        self.versions = dict.fromkeys(self.specs, 0)
        self.saving: Sequence[DagSpec] = ()  # by the verb that is being carried out
        self._saved = dict(self.specs)
        self._verbs: Counter[tuple[str, bool]] = Counter()
        self._deadly = [fault for fault in plan.faults if isinstance(fault, KillAtVerb | FailAtVerb)]
        self._changed = trio.Event()  # set by the next change
        self._acting = 0
        self.verb: tuple[str, Sequence[StepEnd]] = ("", ())  # that is being carried out, as `see` takes it
        self.step_times = self._known_times()
        self._calls: Counter[str] = Counter()  # of the handlers of streams, by task
        self._broken: set[tuple[int, int]] = set()

    def _known_times(self) -> StepTimes:
        """Have the supervisors know of most tasks how short their steps are; many will turn out longer."""
        rng = random.Random(f"{self.scenario.seed}/step times")
        times = StepTimes()
        for dag in self.scenario.dags:
            for task in dag.tasks:
                for is_resumed in (False, True):
                    if rng.random() < KNOWN:
                        times.note(StepKind(dag.name, task.name, is_resumed), rng.choice(SHORT_S))
        return times

    # --- the journal ------------------------------------------------------------------------------

    def look(self) -> None:
        """Nothing: what has changed is told by `see`."""

    def see(self, by: str, ends: Sequence[StepEnd] = ()) -> bool:
        """Add what the transaction that was committed just now has changed; return whether that was anything."""
        for spec in self.saving if by == "save_file" else ():
            if self._saved[spec.dag_id] != spec:
                self._saved[spec.dag_id] = spec
                upstream = tuple((task.task_id, task.upstream) for task in spec.tasks)
                self.note(records.DagSaved(trio.current_time(), spec.dag_id, upstream))
        found = self.reader.changes(by, ends)
        for record in found:
            self.note(record)
        if found:
            self._changed.set()
            self._changed = trio.Event()
            self._rested.ring()
        return bool(found)

    def has_task(self, name: str) -> bool:
        """Whether the DAG's file has this task now."""
        dag, _, task = task_of(name).split("/")
        return any(one.task_id == task for one in self.specs[dag].tasks)

    def count_call(self, task: str) -> int:
        """Return the number of this call of the handler of a task, from 0 on."""
        self._calls[task] += 1
        return self._calls[task] - 1

    def breaks(self, trigger: int, number: int) -> bool:
        """Return whether this is the first time that the trigger of a stream comes to a number."""
        is_first = (trigger, number) not in self._broken
        self._broken.add((trigger, number))
        return is_first

    # --- processes and faults ---------------------------------------------------------------------

    def make_supervisor(self, number: int) -> SupervisorProcess:
        """See the base class."""
        return TaskSupervisor(self, number)

    def _side_of(self, mark: str) -> str:
        return "supervisor" if mark in marks.TASK_MARKS else super()._side_of(mark)

    def reach(self, mark: str) -> None:
        """See the base class."""
        if mark.endswith("committed"):
            self.see(*self.verb)  # whoever dies here tells nobody any more
        super().reach(mark)

    def reach_verb(self, verb: str, *, is_committed: bool) -> None:
        """A supervisor calls a verb, or has changed something by it: it dies there, or loses the database, if due."""
        self._verbs[verb, is_committed] += 1
        if not self._deadly or trio.current_time() > scenario.FAULTS_UNTIL_S:
            return
        for fault in self._deadly:
            reached = fault.nth <= self._verbs[verb, is_committed]
            if reached and (fault.verb, fault.is_committed) == (verb, is_committed):
                self._deadly.remove(fault)
                self._note_fault(fault)
                if isinstance(fault, KillAtVerb):
                    raise Died(verb)
                raise DatabaseAway(NAME, "the simulation has lost it")

    def _do(self, fault: Timed) -> None:
        match fault:
            case KillWorker():
                supervisor = self.newest
                assert isinstance(supervisor, TaskSupervisor)
                supervisor.executor.kill_oldest()
            case Act():
                self.nursery.start_soon(self._act, fault)
            case Pause():
                self.nursery.start_soon(self._pause, fault)
            case Edit():
                self.nursery.start_soon(self._edit, fault)
            case scenario.TakeOver():
                # At once, and not when the lease has run out: what is at stake here no broker could lose meanwhile.
                self.newest.is_taken_for_dead = True
                self.start_supervisor()
            case _:
                super()._do(fault)

    # --- users ------------------------------------------------------------------------------------

    async def _act(self, act: Act) -> None:
        self._acting += 1
        with trio.move_on_at(ACTS_UNTIL_S):
            while not self._is_time_for(act):
                await self._changed.wait()
        await trio.sleep(act.delay_s)
        task_id = self.reader.id_of(act.task)
        if task_id is not None and self._is_time_for(msgspec.structs.replace(act, state="")):
            steps = ("success", "clear") if act.what == "redo" else (act.what,)
            for step in steps:
                if isinstance(act, GroupAct):
                    self._do_to_group(task_id, act)
                else:
                    self._do_to(task_id, act.task, step, act.streams or None)
        self._acting -= 1
        self._rested.ring()

    def _is_time_for(self, act: Act) -> bool:
        state = self.reader.states.get(act.task)
        return state is not None and act.state in ("", state)

    def _do_to(self, task_id: TaskInstanceId, name: str, what: Any, streams: StreamClear | None) -> None:
        try:
            rows, plan = self._rows_of(name), self.scenario.task(name)
            run, _, task = name.rpartition("/")
            if what == "clear" and plan.mapped is None and plan.leaves is None:
                of_run = self.reader.run_of(run)
                result: object = self._store.tasks.clear_many(of_run, [task], streams=streams).cleared.get(task)
            elif what == "clear":
                result = self._clear_mapped(self.reader.run_of(run), rows)
            elif plan.mapped is not None:
                result = [self._store.tasks.mark(id_, what) for id_ in reversed(rows)]  # a task after its instances
            else:
                result = self._store.tasks.mark(task_id, what)
        except StoreError as error:
            self.broke("the user", error)
            return
        self.note(records.Acted(trio.current_time(), name, what, str(result)))
        self.see("clear" if what == "clear" else f"mark_{what}")

    def _do_to_group(self, task_id: TaskInstanceId, act: GroupAct) -> None:
        """Clear, or mark, a task with its instances, or one instance, as a command does."""
        run, tasks = self.reader.run_of(act.task.rpartition("/")[0]), self._store.tasks
        try:
            if act.what == "clear":
                cleared = tasks.clear_many(run, [act.task.rpartition("/")[2]], downstream=act.downstream)
                assert cleared.left is None, "it is not too much for one transaction, and nobody else is in one"
                result: object = (cleared.cleared, cleared.instances)
            elif act.what == "redo":
                raise ValueError("a user of groups does one thing after the other")
            elif self.scenario.task(act.task).mapped is None or index_of(act.task) >= 0:
                result = tasks.mark(task_id, act.what)
            else:
                result = tasks.mark_map(run, every_instance(act.task.rpartition("/")[2]), act.what)
        except StoreError as error:
            self.broke("the user", error)
            return
        self.note(records.Acted(trio.current_time(), act.task, act.what, str(result)))
        self.see("clear" if act.what == "clear" else f"mark_{act.what}")

    def _rows_of(self, name: str) -> list[TaskInstanceId]:
        """Return the rows of a task with its instances; of one that leaves values for others, of those as well."""
        run = name.rpartition("/")[0]
        dag = next(dag for dag in self.scenario.dags if dag.name == run.split("/")[0])
        names = {name}
        if self.scenario.task(name).leaves is not None:
            for below in dag.tasks:  # in the order of the DAG
                if names.intersection(f"{run}/{above}" for above in below.upstream):
                    names.add(f"{run}/{below.name}")
        found = [id_ for id_, one in self.reader.names.items() if one in names or task_of(one) in names]
        return [TaskInstanceId(id_) for id_ in sorted(found)]

    def _clear_mapped(self, run: DagRunId, rows: Sequence[TaskInstanceId]) -> list[str]:
        """Clear tasks with their instances in one transaction."""
        with self._store.database.writing() as tx:
            tx.notify()
            tasks = [task for id_ in rows if (task := task_rows.locked(tx, id_)) is not None]
            cleared = [str(state) for task in tasks if (state := user_actions.clear_one(tx, task, None)) is not None]
            if cleared:
                dags.reopen(tx, run)
        return cleared

    async def _pause(self, pause: Pause) -> None:
        self._acting += 1
        self._store.tasks.set_paused(pause.dag, is_paused=True)
        self.see("set_paused")
        await trio.sleep(pause.seconds)
        self._store.tasks.set_paused(pause.dag, is_paused=False)
        self.see("set_paused")
        self._acting -= 1

    async def _edit(self, edit: Edit) -> None:
        self._acting += 1
        dag = next(dag for dag in self.scenario.dags if dag.name == edit.dag)
        for without in (edit.task, ""):
            self.specs[edit.dag] = spec_of(dag, without)
            self.versions[edit.dag] += 1
            for supervisor in self.supervisors:
                supervisor.bell.ring()
            await trio.sleep(edit.seconds if without else 0.0)
        self._acting -= 1

    async def _create_runs(self) -> None:
        wanted = sorted(
            (at, dag.name, number) for dag in self.scenario.dags for number, at in enumerate(dag.runs_at, start=1)
        )
        for at, dag, number in wanted:
            await trio.sleep_until(at)
            self._store.tasks.create_run(dag, run_name(dag, number).split("/")[1])
            self.see("create_run")

    # --- the whole --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run it until all runs have ended and all faults are over, or the time for it is."""
        self.see("setup")
        async with trio.open_nursery() as self.nursery:
            for work in self._works():
                self.nursery.start_soon(work)
            self.start_supervisor()
            if self.scenario.peers:
                self.start_supervisor()
            deadline = scenario.FAULTS_UNTIL_S + REST_WITHIN_S
            while not (is_at_rest := self._is_at_rest()) and trio.current_time() < deadline:
                await self._rested.wait_until(min(deadline, trio.current_time() + 20.0))
                await trio.sleep(0.05)
            await trio.sleep(QUIET_S)
            self.see("nobody")
            self.note(records.AllRested(trio.current_time(), is_at_rest))
            self._end()

    def _works(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Yield what goes on beside the supervisors."""
        yield self._inject
        yield self._create_runs

    def _is_at_rest(self) -> bool:
        return (
            self.reader.is_at_rest
            and self._has_all_runs()
            and not self._acting
            and (not self.scenario.faults or trio.current_time() > scenario.FAULTS_UNTIL_S + 0.5)
        )

    def _has_all_runs(self) -> bool:
        """Whether no more runs are to come."""
        return self.reader.runs == sum(len(dag.runs_at) for dag in self.scenario.dags)


def run(plan: TaskScenario) -> list[Record]:
    """Run a scenario and return its history: always the same for the same scenario, in any process."""
    with tokens_counted():
        database.reset(plan)
        return run_world(plan, lambda: TaskWorld(plan))


@contextmanager
def tokens_counted() -> Generator[None]:
    """Have the tokens of steps be the same each time."""
    tokens = itertools.count(1)
    with patch.object(task_rows, "new_token", lambda: f"token-{next(tokens)}"):
        yield
