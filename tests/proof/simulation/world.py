"""The simulated machine: processes that die, faults that come at their time, and a journal of what is seen.

A process dies in one step: from then on nothing it does can be seen. Its tasks are cancelled and unwind like ghosts;
its link, its readers and its triggers take no notice of them any more (`RunnerProcess.is_dead`). A supervisor dies by
an exception (`Died`) thrown where it stands, or by not being stepped any more.
"""

from __future__ import annotations

import random
import sqlite3
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import trio
from tests.proof.simulation import database, records, scenario
from tests.proof.simulation.broker import Broker
from tests.proof.simulation.processes import Boxes, Died, RunnerProcess, SupervisorProcess, running_in
from tests.proof.simulation.scenario import Plan, Scenario, Timed
from tests.proof.simulation.triggers import ORDINARY
from tests.proof.simulation.users.consumers import SimulatedConsumer, catch_up
from tests.proof.simulation.users.letters import tend_letters
from tests.proof.simulation.users.messages import redrive_messages
from tests.proof.simulation.wire import Bell
from trio._core._io_epoll import EpollIOManager
from trio._core._run import GLOBAL_RUN_CONTEXT
from trio.testing import MockClock

from headgate.protocol import marks
from headgate.protocol.black_box import Record
from headgate.protocol.messages.runner import RunnerSettings
from headgate.runner import session
from headgate.store.errors import StoreError
from headgate.streams import figures as stream_figures
from headgate.streams.manager import SharedStreamManager
from headgate.supervisor.core_settings import CoreSettings
from headgate.supervisor.triggers.leases import LeaseTimes

TAKE_OVER_S = 0.5  # after one was cut off, another one begins to watch it
REST_WITHIN_S = 400.0  # after the last fault; what is not committed by then is stuck
DRAIN_S = 4.0
HISTORY_RECORDS_MAX = 200_000  # a pair that spins would fill the memory


class Weather:
    """What is wrong with the surroundings at the moment."""

    def __init__(self) -> None:
        self.database_back_at = 0.0
        self.commit_is_ambiguous = False
        self.takes_poison = False
        self.advance_fails: scenario.AdvanceFails | None = None
        self.advance_hangs_s = 0.0
        self.stream_fails = False
        self.file_in_place: sqlite3.Connection | None = None  # if the one that is open was replaced


class World:
    """One run of one scenario."""

    def __init__(self, plan: Scenario) -> None:
        self.scenario = plan
        self.history: list[records.Record] = []
        self.weather = Weather()
        self.broker = Broker(self, plan.lanes)
        self.reader = database.Reader()
        self.supervisors: list[SupervisorProcess] = []
        self.runners = 0
        self.settings = core_settings(plan)
        self.nursery: trio.Nursery
        self._store = database.open_store()
        self.first_record: Record | None = None  # of a black box
        self._tries: Counter[tuple[str, int, int]] = Counter()
        self._starts: Counter[str] = Counter()
        self._marks_left = [fault for fault in plan.faults if isinstance(fault, scenario.KillAtMark)]
        self._marks_reached: Counter[str] = Counter()
        self._rested = Bell()
        self._is_over = False
        self.first_fired: dict[tuple[str, str, int], int] = {}  # the handout, by trigger, message and position
        self.users_at_work = 0
        self.consumers: list[SimulatedConsumer] = []
        self._has_letters = any(isinstance(fault, scenario.TendLetters) for fault in plan.faults)
        self._has_redrives = any(isinstance(fault, scenario.RedriveMessages) for fault in plan.faults)

    # --- the journal ------------------------------------------------------------------------------

    def note(self, record: records.Record) -> None:
        """Add to the history."""
        if self._is_over:
            return  # what comes now are the ghosts of the end
        if len(self.history) >= HISTORY_RECORDS_MAX:
            raise RuntimeError(f"more than {HISTORY_RECORDS_MAX:,} records: something spins")
        self.history.append(record)

    def look(self) -> None:
        """Add what is new in the database's file. Nothing happens between this and the record that follows."""
        if self.weather.file_in_place is not None:
            return  # nothing is: what is committed now goes to one that was replaced
        if self._has_letters:
            for letter in self.reader.look_at_letters():
                self.note(letter)
        if self._has_redrives:
            for message in self.reader.look_at_messages():
                self.note(message)
        if self.scenario.consumers:
            for owned in self.reader.look_at_owned_rows():
                self.note(owned)
        for record in self.reader.look():
            self.note(record)

    def look_at_owners(self) -> None:
        """Add who owns the streams, if that has changed; there is no question of it with one supervisor."""
        if len(self.supervisors) > 1 and self.weather.file_in_place is None:
            for record in self.reader.look_at_owners():
                self.note(record)

    def broke(self, where: str, error: BaseException) -> None:
        """Note what should not have escaped."""
        self.note(records.Broke(trio.current_time(), where, repr(error)))

    def note_frame(self, runner: RunnerProcess, body: bytes, *, is_up: bool) -> None:
        """Note that bytes went over the wire."""
        self.note(records.Framed(trio.current_time(), runner.number, is_up, zlib.crc32(body)))

    def note_fenced(self, epoch: int) -> None:
        """Note that an epoch may write no more; where its supervisor was cut off, it hears of it from now on."""
        number = 0
        for supervisor in self.supervisors:
            if supervisor.core.leases.is_held and supervisor.core.leases.epoch == epoch:
                supervisor.is_cut_off = False
                number = supervisor.number
        self.note(records.Fenced(trio.current_time(), epoch, number))

    # --- the workload -----------------------------------------------------------------------------

    def plan_of(self, trigger: str, lane: int, offset: int) -> Plan:
        """Return what a trigger does with a message."""
        return self.scenario.lanes[lane][offset].plans.get(trigger, ORDINARY)

    def count_try(self, trigger: str, lane: int, offset: int) -> int:
        """Return for the how manieth time a trigger gets a message."""
        self._tries[trigger, lane, offset] += 1
        return self._tries[trigger, lane, offset]

    def count_start(self, trigger: str) -> int:
        """Return for the how manieth time a trigger begins."""
        self._starts[trigger] += 1
        return self._starts[trigger]

    # --- processes --------------------------------------------------------------------------------

    def make_supervisor(self, number: int) -> SupervisorProcess:
        """Return the process of a supervisor that is to start."""
        return SupervisorProcess(self, number)

    def start_supervisor(self, *, is_beside: bool = False) -> SupervisorProcess:
        """Start another supervisor, in the place of the one that faults are about or beside it."""
        supervisor = self.make_supervisor(len(self.supervisors) + 1)
        supervisor.is_beside = is_beside
        self.supervisors.append(supervisor)
        self.nursery.start_soon(supervisor.run)
        return supervisor

    @property
    def newest(self) -> SupervisorProcess:
        """The supervisor that faults are about."""
        return next(supervisor for supervisor in reversed(self.supervisors) if not supervisor.is_beside)

    def supervisor_ended(self, supervisor: SupervisorProcess, *, down_s: float) -> None:
        """Somebody starts another in its place, unless there is another already."""
        if self.weather.file_in_place is not None:
            database.restore(self.weather.file_in_place)
            self.weather.file_in_place = None
        if supervisor is self.newest:
            self.nursery.start_soon(self._start_later, down_s)

    async def _start_later(self, down_s: float) -> None:
        supervisor = self.newest
        await trio.sleep(down_s)
        if self.newest is supervisor:
            self.start_supervisor()

    # --- faults -----------------------------------------------------------------------------------

    def reach(self, mark: str) -> None:
        """A mark is reached: whoever stands there dies, if a fault says so."""
        side = self._side_of(mark)
        runner = running_in.get() if side == "runner" else None
        if runner is not None and runner.is_dead:
            return
        self._marks_reached[mark] += 1
        due = [f for f in self._marks_left if f.mark == mark and f.nth <= self._marks_reached[mark]]
        if not due or trio.current_time() > scenario.FAULTS_UNTIL_S:
            return
        self._marks_left.remove(due[0])
        self._note_fault(due[0])
        if runner is not None:
            runner.die(f"killed at {mark}")
        else:
            raise Died(mark)

    def _side_of(self, mark: str) -> str:
        of_pair = marks.MARKS | marks.POISON_MARKS | marks.REDELIVERY_MARKS | marks.RUNAWAY_MARKS
        # An event may end the task of its trigger, though there is none here.
        of_tasks = marks.TASK_MARKS | marks.BUNDLE_MARKS | marks.TASK_STREAM_MARKS
        of_tasks |= marks.MAP_MARKS | marks.SIGNAL_MARKS | marks.ENDLESS_MARKS | marks.BELL_MARKS
        return (of_pair | of_tasks | marks.LETTER_MARKS | marks.CONSUMER_MARKS)[mark].side

    async def _inject(self) -> None:
        timed = [fault for fault in self.scenario.faults if isinstance(fault, Timed)]
        for fault in sorted(timed, key=lambda fault: fault.at):
            await trio.sleep_until(fault.at)
            self._note_fault(fault)
            self._do(fault)

    def _note_fault(self, fault: scenario.Fault) -> None:
        self.note(records.Faulted(trio.current_time(), repr(fault)))

    def _do(self, fault: Timed) -> None:
        now = trio.current_time()
        weather, supervisor = self.weather, self.newest
        runner = supervisor.runner
        match fault:
            case scenario.KillRunner():
                if runner is not None:
                    runner.die("killed", kept=fault.kept)
            case scenario.EndsWithOldBox():
                if runner is not None:
                    runner.die("exit code 1", record=self.first_record)
            case scenario.KillSupervisor():
                supervisor.die("killed", runner_at_once=fault.runner_at_once, down_s=fault.down_s)
            case scenario.CutLink():
                if runner is not None:
                    runner.up.end(fault.kept)
                    runner.down.end(fault.kept)
            case scenario.StallLink():
                if runner is not None:
                    (runner.up if fault.up else runner.down).stall(now + fault.seconds)
            case scenario.DatabaseIsAway():
                weather.database_back_at = max(weather.database_back_at, now + fault.seconds)
                weather.commit_is_ambiguous = fault.ambiguous
            case scenario.FileIsReplaced():
                self.look()
                weather.file_in_place = database.copied()
            case scenario.DatabaseIsSlow():
                supervisor.slow_s = fault.seconds
            case scenario.FreezeSupervisor():
                supervisor.freeze(now + fault.seconds)
            case scenario.AdvanceFails():
                weather.advance_fails = fault
            case scenario.AdvanceHangs():
                weather.advance_hangs_s = fault.seconds
            case scenario.StreamFails():
                weather.stream_fails = True
                if self.broker.holder is not None:
                    self.broker.holder.wake()
            case scenario.TakeOver():
                supervisor.is_cut_off = True
                self.nursery.start_soon(self._take_over, supervisor)
            case scenario.StartBeside():
                self.start_supervisor(is_beside=True)
            case scenario.Drain():
                supervisor.drain(down_s=fault.down_s)
            case scenario.AddWatcher():
                database.add(self._store, fault.name)
                self.note(records.Added(now, fault.name))
            case scenario.RemoveWatcher():
                self._remove(fault.name)
            case scenario.ChangeWatcher():
                self._store.change_watcher(fault.name, max_deliveries=scenario.MAX_DELIVERIES)
            case scenario.TendLetters():
                self.nursery.start_soon(self._employ, tend_letters, fault)
            case scenario.RedriveMessages():
                self.nursery.start_soon(self._employ, redrive_messages, fault)
            case scenario.MendDatabase():
                database.take_poison()
                weather.takes_poison = True
                self.note(records.Mended(now))
            case scenario.Redeliver():
                self.consumers[fault.consumer].redeliver()
            case scenario.Release():
                self._store.resume_watcher(fault.name)
                self.note(records.Released(now, fault.name))
            case _:
                raise AssertionError(f"nothing does this: {fault}")

    async def _employ(self, work: Callable[[World, Any], Awaitable[None]], fault: Timed) -> None:
        """Have a user do something that takes a while, and that the simulation waits for."""
        self.users_at_work += 1
        await work(self, fault)
        self.users_at_work -= 1
        self._rested.ring()

    async def _take_over(self, supervisor: SupervisorProcess) -> None:
        """Start another supervisor beside one that is cut off. It fences that one as soon as it may."""
        await trio.sleep(TAKE_OVER_S)
        if supervisor is self.newest and not supervisor.is_gone:
            self.start_supervisor()

    def _remove(self, name: str) -> None:
        try:
            self._store.remove_watcher(name)
        except StoreError as error:
            self.broke("the user", error)
        self.note(records.Removed(trio.current_time(), name))

    # --- the whole --------------------------------------------------------------------------------

    def look_at_rest(self) -> None:
        """Something was committed: see whether that was the last."""
        if self.broker.is_empty:
            self._rested.ring()

    async def run(self) -> None:
        """Run it until everything is committed and all faults are over, or the time for it is."""
        for name in scenario.trigger_names(self.scenario.topology):
            self.note(records.Added(0.0, name))
        async with trio.open_nursery() as self.nursery:
            if self._has_letters:
                database.refuse_poison()
            if self.scenario.consumers:
                database.make_table_of_users()
            self.consumers = [SimulatedConsumer(self, number) for number in range(len(self.scenario.consumers))]
            for consumer in self.consumers:
                for worker in range(consumer.plan.workers):
                    self.nursery.start_soon(consumer.work, worker)
            self.nursery.start_soon(self._inject)
            self.start_supervisor()
            deadline = scenario.CANARY_AT_S + REST_WITHIN_S
            while self._is_anybody_busy() and trio.current_time() < deadline:
                await self._rested.wait_until(min(deadline, trio.current_time() + 20.0))
            self.look()
            self.note(records.Rested(trio.current_time(), self.broker.is_empty or not self._somebody_listens()))
            catch_up(self.consumers)
            self._end()

    def _is_anybody_busy(self) -> bool:
        return bool(self.users_at_work) or (not self.broker.is_empty and self._somebody_listens())

    def _somebody_listens(self) -> bool:
        return bool(self.reader.unfinished()) or trio.current_time() < scenario.FAULTS_UNTIL_S

    def _end(self) -> None:
        self._is_over = True
        for supervisor in self.supervisors:
            if supervisor.runner is not None:
                supervisor.runner.die("the simulation is over")
        self.nursery.cancel_scope.cancel()


def core_settings(plan: Scenario) -> CoreSettings:
    """Return the settings of a supervisor: the ordinary ones, with the topology's limits and shorter times."""
    topology = plan.topology
    # Looking for what others changed is the most expensive of the duties: it is done where they do change something.
    by_users = scenario.AddWatcher | scenario.RemoveWatcher | scenario.ChangeWatcher | scenario.Release
    by_others = by_users | scenario.StartBeside
    is_watched = any(isinstance(fault, by_others) for fault in plan.faults)
    looks_s = 1.5 if is_watched else 30.0
    return CoreSettings(
        runner=RunnerSettings(
            heartbeat_s=6.0,
            frame_bytes_max=topology.frame_bytes_max,
            event_bytes_max=topology.event_bytes_max,
            round_events_max=topology.round_events_max,
            outbox_events_max=topology.outbox_events_max,
            subscriber_queue_max=topology.subscriber_queue_max,
            ack_timeout_s=topology.ack_timeout_s,
            cohort_grace_s=topology.cohort_grace_s,
            cancel_grace_s=1.0,
            hook_timeout_s=1.0,
        ),
        lease=LeaseTimes(
            10.0, silence_max_s=30.0, poll_interval_s=looks_s, listen_pause_max_s=looks_s / 10, look_interval_s=looks_s
        ),
        capacity=10,
        runner_silence_max_s=15.0,
        respawn_wait_s=0.1,
        respawn_wait_max_s=2.0,
        respawn_healthy_s=5.0,
        retry_wait_s=0.2,
        retry_wait_max_s=2.0,
        database_retry_wait_s=0.1,
        database_retry_wait_max_s=1.0,
        slice_events_max=topology.slice_events_max,
        drain_s=DRAIN_S,
    )


def run(plan: Scenario) -> list[records.Record]:
    """Run a scenario and return its history: always the same for the same scenario, in any process."""
    database.reset(scenario.trigger_names(plan.topology))
    return run_world(plan, lambda: World(plan))


def run_world(plan: Scenario, make_world: Callable[[], World]) -> list[records.Record]:
    """Do it on the database as it is."""
    random.seed(plan.seed)
    _seed_scheduler(plan.seed)

    async def main() -> list[records.Record]:
        world = make_world()
        if any(isinstance(fault, scenario.KillAtMark) for fault in plan.faults):
            marks.arm(world.reach)
        await world.run()
        return world.history

    with _patched(plan):
        clock = MockClock(autojump_threshold=0.0)
        return trio.run(main, clock=clock, strict_exception_groups=True, instruments=[Boxes()])


@contextmanager
def _patched(plan: Scenario) -> Generator[None]:
    manager, get_events = SharedStreamManager, EpollIOManager.get_events

    def manager_that_fails_on_overflow(**settings: Any) -> SharedStreamManager:
        settings["overflow"] = "fail"
        return manager(**settings)

    # Hardly anything comes from outside: trio need not ask the system for it before every step.
    def get_events_if_idle(io: EpollIOManager, timeout_s: float) -> Any:
        return () if GLOBAL_RUN_CONTEXT.runner.runq else get_events(io, timeout_s)

    with ExitStack() as stack:
        stack.callback(marks.disarm)
        stack.enter_context(patch.object(EpollIOManager, "get_events", get_events_if_idle))
        stack.enter_context(patch.object(stream_figures, "time", trio.current_time))
        # It only jumps, so it need not ask the system for the time before it says its own.
        stack.enter_context(patch.object(MockClock, "current_time", lambda clock: clock._virtual_base))
        # The pair itself pauses on overflow; that the other way loses nothing either is held here alone.
        if plan.topology.overflow == "fail":
            stack.enter_context(patch.object(session, "SharedStreamManager", manager_that_fails_on_overflow))
        yield


def _seed_scheduler(seed: int) -> None:
    """Have trio order its tasks by the seed, with the door it has for hypothesis."""
    import trio._core._run as scheduler

    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r.seed(seed)
