"""The core on a real store in memory and a clock of the test's: messages in, commands out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from sqlalchemy import Engine

from headgate.protocol.errors import RemoteProtocolError, VersionMismatch
from headgate.protocol.link.splitting import split_sync
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.queries import (
    GetConnection,
    GetVariable,
    LastEvent,
    Request,
    Response,
    SecretText,
    StoredEvent,
)
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    CancelTrigger,
    Drain,
    FinishedTrigger,
    FiredEvent,
    FromRunner,
    FromSupervisor,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)
from headgate.protocol.values import encode_value
from headgate.scheduling.names import TryName
from headgate.store.db.engine import open_engine
from headgate.store.db.schema import upgrade
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store
from headgate.store.tasks.deferral import Deferral
from headgate.store.triggers.leases import ClaimedTrigger, TriggererRow
from headgate.supervisor import commands
from headgate.supervisor.commands import Command, DumpStacks, Exit, Kill, Send, Spawn
from headgate.supervisor.core import CoreSettings, SupervisorCore
from headgate.supervisor.leaving import DRAIN_MARGIN_S
from headgate.supervisor.queries import StoreQueries
from headgate.supervisor.runner_lifecycle import DUMP_TO_KILL_S, RunnerState
from headgate.supervisor.triggers import assignments
from headgate.supervisor.triggers.leases import ADVANCE_SHARE, FAIR_WAIT_S, Identity, LeaseTimes
from headgate.supervisor.triggers.releases import ENDED_GRACE_S

KEYS = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
SETTINGS = CoreSettings(
    runner=RunnerSettings(),
    lease=LeaseTimes(heartbeat_s=5.0, silence_max_s=30.0, poll_interval_s=5.0),
    capacity=10,
    slice_events_max=5,
)
AnyCommand = TypeVar("AnyCommand", bound=Command)
AnyMessage = TypeVar("AnyMessage", bound=FromSupervisor)


class World:
    """One database, one clock, and any number of supervisors with runners made of nothing."""

    def __init__(self, engine: Engine) -> None:
        self.now = 1000.0
        self.secrets = Secrets.open(Path(), KEYS)
        self.engine = engine
        self.store = self.open_store()

    def open_store(self) -> Store:
        return Store(self.engine, secrets=self.secrets, clock=self.clock)

    def clock(self) -> datetime:
        return datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now)

    def supervisor(
        self,
        settings: CoreSettings = SETTINGS,
        *,
        pid: int = 1,
        is_gone: Callable[[TriggererRow], bool] = lambda row: False,
    ) -> Supervised:
        identity = Identity("host", pid, "machine", 0.0)
        answers = StoreQueries(self.store, {"HEADGATE_VAR_REGION": "north"})
        core = SupervisorCore(self.store, identity, settings, is_gone=is_gone, clock=lambda: 0.0, answers=answers)
        return Supervised(self, core)


class Supervised:
    """A core, and what it has said so far."""

    def __init__(self, world: World, core: SupervisorCore) -> None:
        self.world = world
        self.core = core
        self.commands: list[Command] = []
        self._round = 0

    def settle(self) -> None:
        """Step until nothing is due."""
        for _ in range(1000):
            out = list(self.core.step(self.world.now))
            self.commands += out
            if any(isinstance(command, Exit) for command in out):
                return
            if not out and self.core.wake_at() > self.world.now:
                return
        raise AssertionError("the core never comes to rest: it would burn a CPU")

    def pass_time(self, seconds: float) -> None:
        """Let time go by, waking the core whenever it wants to be woken, like the loop does."""
        end = self.world.now + seconds
        while self.world.now < end:
            self.settle()
            if any(isinstance(command, Exit) for command in self.commands):
                self.world.now = end
                return
            self.world.now = min(end, max(self.core.wake_at(), self.world.now + 0.001))
        self.settle()

    def say(self, message: FromRunner, incarnation: int | None = None) -> None:
        self.core.receive(self.core.runner.incarnation if incarnation is None else incarnation, message, self.world.now)
        self.settle()

    def start_runner(self) -> None:
        self.settle()
        (spawn,) = self.take(Spawn)
        self._round = 0
        self.say(Hello(PROTOCOL_VERSION, spawn.incarnation, 4711, "1.0"))
        (welcome,) = self.sent(Welcome)
        assert welcome.incarnation == spawn.incarnation

    def round(self, *events: FiredEvent, finished: tuple[FinishedTrigger, ...] = ()) -> None:
        self._round += 1
        self.say(StateChanges(self._round, events, finished=finished))

    def heartbeat(self) -> None:
        self.round()

    def pass_time_with_heartbeats(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.pass_time(1.0)
            if self.core.runner.state is RunnerState.RUNNING:
                self.heartbeat()

    def take(self, kind: type[AnyCommand]) -> list[AnyCommand]:
        found = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return found

    def sent(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        sends = self.take(Send)
        found = [send.message for send in sends if isinstance(send.message, kind)]
        self.commands += [send for send in sends if not isinstance(send.message, kind)]
        return found

    def created(self) -> list[TriggerSpec]:
        """Take all `StateSync` messages; return the triggers to create."""
        return [spec for sync in self.sent(StateSync) for spec in sync.to_create]

    def answers(self) -> list[StateSync]:
        """Take all `StateSync` messages; return the answers, without what they say of the lease."""
        return [msgspec.structs.replace(sync, lease_s=None) for sync in self.sent(StateSync) if sync.round]

    def leases(self) -> list[float | None]:
        """Take all `StateSync` messages; return for how long the answers say that the lease lasts."""
        return [sync.lease_s for sync in self.sent(StateSync) if sync.round]


def fired(spec: TriggerSpec, index: int, *, key: str | None = None) -> FiredEvent:
    return FiredEvent(spec.trigger_id, spec.trigger_run_id, index, seq=index + 1, payload=b"1", key=key)


@pytest.fixture
def world() -> Iterator[World]:
    engine = open_engine("sqlite://")
    upgrade(engine)
    world = World(engine)
    yield world
    world.store.close()
    engine.dispose()


def add_watchers(world: World, count: int) -> list[int]:
    return [world.store.add_watcher(f"w{number}", "users.Trigger", {"number": number}) for number in range(count)]


def stored(world: World) -> list[tuple[int, int]]:
    return [(row.trigger_id, row.sequence_index) for row in world.store.inspect.events()]


def test_a_supervisor_registers_spawns_and_hands_over_what_it_claims(world: World) -> None:
    first, second = add_watchers(world, 2)
    supervisor = world.supervisor()
    supervisor.start_runner()
    specs = supervisor.created()
    assert [(spec.trigger_id, spec.name, spec.kwargs) for spec in specs] == [
        (first, "w0", encode_value({"number": 0}, where="kwargs")),
        (second, "w1", encode_value({"number": 1}, where="kwargs")),
    ]
    third = world.store.add_watcher("late", "users.Trigger", {})
    supervisor.pass_time(1.1)
    assert [spec.trigger_id for spec in supervisor.created()] == [third]


def test_an_event_is_confirmed_in_the_round_that_stored_it(world: World) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    supervisor.round(fired(spec, 0), fired(spec, 1))
    assert supervisor.answers() == [StateSync(1, persisted=(1, 2))]
    assert stored(world) == [(spec.trigger_id, 0), (spec.trigger_id, 1)]


def test_a_dead_runner_is_replaced_and_every_trigger_handed_over_in_a_new_run(world: World) -> None:
    add_watchers(world, 2)
    supervisor = world.supervisor()
    supervisor.start_runner()
    before = supervisor.created()
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.pass_time(1.0)
    supervisor.start_runner()
    assert supervisor.core.runner.incarnation == 2
    after = supervisor.created()
    assert [spec.trigger_id for spec in after] == [spec.trigger_id for spec in before]
    assert {spec.trigger_run_id for spec in after}.isdisjoint(spec.trigger_run_id for spec in before)


def test_respawns_back_off_and_a_healthy_while_forgives(world: World) -> None:
    supervisor = world.supervisor()

    def wait_for_respawn() -> float:
        supervisor.core.runner_ended(supervisor.core.runner.incarnation, "exited with code 1", world.now)
        died_at = world.now
        while not supervisor.take(Spawn):
            world.now += 0.01
            supervisor.settle()
        return world.now - died_at

    supervisor.settle()
    supervisor.take(Spawn)
    waits = [wait_for_respawn() for _ in range(6)]
    assert waits[0] < 0.2
    assert waits[5] > 3.0
    supervisor.core.receive(supervisor.core.runner.incarnation, Hello(PROTOCOL_VERSION, 1, 1, "1.0"), world.now)
    supervisor.pass_time_with_heartbeats(61)
    assert wait_for_respawn() < 0.2


def test_a_confirmation_never_reaches_a_later_incarnation(world: World) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    # The round arrives, and before it is stored the runner dies and its successor says hello.
    supervisor.core.receive(1, StateChanges(1, (fired(spec, 0),)), world.now)
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.core.runner.incarnation = 2
    supervisor.core.runner.state = RunnerState.RUNNING
    supervisor.settle()
    assert supervisor.answers() == []
    assert stored(world) == [(spec.trigger_id, 0)], "it was fired, so it is stored"


def test_a_silent_runner_is_dumped_then_killed(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.pass_time(29.0)
    supervisor.heartbeat()
    supervisor.pass_time(29.9)
    assert supervisor.take(DumpStacks) == []
    supervisor.pass_time(0.2)
    assert len(supervisor.take(DumpStacks)) == 1
    assert supervisor.take(Kill) == []
    supervisor.pass_time(DUMP_TO_KILL_S)
    assert len(supervisor.take(Kill)) == 1


def test_a_runner_that_never_says_hello_is_killed_too(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.settle()
    assert len(supervisor.take(Spawn)) == 1
    supervisor.pass_time(30.0 + DUMP_TO_KILL_S)
    assert len(supervisor.take(Kill)) == 1


def test_a_runner_that_waits_for_its_answer_is_not_blamed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()

    def away(*_: object, **__: object) -> None:
        raise DatabaseAway("db", "no answer")

    with monkeypatch.context() as patch:
        for verb in ("store_slice", "heartbeat", "poll", "live_triggerers"):
            patch.setattr(world.store, verb, away)
        supervisor.round(fired(spec, 0))
        supervisor.pass_time(300.0)
        assert supervisor.take(Kill) == []
        assert supervisor.answers() == []
    supervisor.pass_time(20.0)
    assert supervisor.answers() == [StateSync(1, persisted=(1,))]


def test_a_supervisor_that_stood_still_does_not_blame_the_runner(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    world.now += 3600.0  # stopped, or the machine was suspended; what the runner said waits in the socket
    supervisor.settle()
    assert supervisor.take(DumpStacks) == []
    supervisor.heartbeat()
    supervisor.pass_time(1.0)
    assert supervisor.take(DumpStacks) == []


def test_a_failed_trigger_is_started_again_with_backoff_and_counted(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    waits = []
    for _ in range(4):
        (spec,) = supervisor.created()
        failed_at = world.now
        supervisor.round(
            finished=(FinishedTrigger(trigger_id, spec.trigger_run_id, "failed", 0, error="ValueError: no"),)
        )
        assert supervisor.created() == []
        while supervisor.core.assignments.running() == 0:
            supervisor.pass_time(0.1)
        waits.append(world.now - failed_at)
    assert 1.0 <= waits[0] <= 1.7
    assert waits[3] >= 8.0
    (row,) = world.store.inspect.triggers()
    assert row.failure_count == 4
    assert row.last_error is not None
    assert "ValueError: no" in row.last_error


class Said:
    """Stands for the logs of tasks."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def say(self, name: TryName, level: str, event: str, **fields: object) -> None:
        self.lines.append((name.task, event))


def defer_task(world: World) -> int:
    """Have a task wait for a trigger, as if a worker had deferred it; return the trigger's id."""
    epoch = world.store.register_triggerer(
        hostname="h", pid=9, machine="m", process_started=0.0, capacity=1, queues=("of its own",)
    )
    world.store.tasks.save_file(epoch, "etl.py", [DagSpec("etl", tasks=(TaskSpec("a", "Op"),))])
    run = world.store.tasks.create_run("etl", "r1")
    assert run is not None
    world.store.scheduling.plan(epoch)
    (task,) = world.store.tasks.dispatch(epoch, limit=1, queues=("default",)).tasks
    wait = Deferral("users.Trigger", encode_value({}, where="k"), "resume", encode_value({}, where="k"))
    assert world.store.tasks.defer(epoch, task.id, task.token, wait) is not None
    world.store.release_triggerer(epoch)
    (row,) = world.store.inspect.triggers()
    return row.id


def test_the_trigger_of_a_task_has_its_name_and_what_becomes_of_it_is_said_in_the_log_of_the_task(world: World) -> None:
    trigger_id = defer_task(world)
    said = Said()
    identity = Identity("host", 1, "machine", 0.0)
    core = SupervisorCore(world.store, identity, SETTINGS, is_gone=lambda row: False, clock=lambda: 0.0, task_logs=said)
    supervisor = Supervised(world, core)
    supervisor.start_runner()
    (spec,) = supervisor.created()
    assert (spec.trigger_id, spec.name) == (trigger_id, "etl.r1.a")
    name = TryName("etl", "r1", "a", 1)
    assert core.assignments.task_of(trigger_id) == name
    failed = FinishedTrigger(trigger_id, spec.trigger_run_id, "failed", 0, error="boom")
    supervisor.round(finished=(failed,))
    supervisor.pass_time_with_heartbeats(60)
    said_to_runner = supervisor.sent(StateSync)
    assert not any(sync.to_create for sync in said_to_runner), "the task has failed; its trigger is not started again"
    cancels = [cancel for sync in said_to_runner for cancel in sync.to_cancel]
    assert cancels == [CancelTrigger(trigger_id, "timeout")], "or a shared stream would wait for it to be back"
    assert trigger_id not in core.assignments
    assert core.assignments.task_of(trigger_id) == name, "what it logged last may still come"
    assert said.lines == [("etl.r1.a", "its trigger is started"), ("etl.r1.a", "its trigger has ended")]


def test_of_the_tasks_of_triggers_that_ended_so_many_are_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignments, "ENDED_TASKS_MAX", 2)
    names = [TryName("d", "r", f"t{number}", 1) for number in range(4)]
    assigned = assignments.Assignments(retry_wait_s=1.0, retry_wait_max_s=1.0, healthy_s=1.0, frame_bytes_max=1000)
    assigned.assign([ClaimedTrigger(n, "x", "a.B", b"", "default", 0, "", names[n]) for n in range(4)], 0.0)
    for spec in assigned.start_due(1, 1, 0.0):
        assigned.end_run(FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "returned", 1), 0.0)
    assert [assigned.task_of(number) for number in range(4)] == [None, None, *names[2:]]


def test_a_trigger_that_returned_does_not_run_again(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    supervisor.round(fired(spec, 0), finished=(FinishedTrigger(trigger_id, spec.trigger_run_id, "returned", 1),))
    supervisor.pass_time(10.0)
    assert supervisor.created() == []
    (row,) = world.store.inspect.events()
    assert row.is_last


def test_a_trigger_whose_end_arrived_just_before_its_runner_died_does_not_run_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()

    def away(*_: object, **__: object) -> None:
        raise DatabaseAway("db", "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "store_slice", away)
        finished = FinishedTrigger(trigger_id, spec.trigger_run_id, "returned", 1)
        supervisor.round(fired(spec, 0), finished=(finished,))
        supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
        supervisor.pass_time(1.0)
        supervisor.start_runner()
        supervisor.heartbeat()
        assert supervisor.created() == [], "nothing starts while it is not known what has ended"
    supervisor.pass_time(5.0)
    assert supervisor.created() == []
    assert stored(world) == [(trigger_id, 0)]


def test_a_late_report_of_an_earlier_run_changes_nothing(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.created()
    supervisor.round(finished=(FinishedTrigger(trigger_id, "an.earlier.run", "failed", 0, error="old"),))
    supervisor.pass_time(3.0)
    assert supervisor.created() == []
    assert supervisor.core.assignments.running() == 1


def test_a_removed_watcher_is_cancelled_for_the_user_and_released(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    world.store.remove_watcher("w0")
    supervisor.pass_time(1.1)
    (sync,) = supervisor.sent(StateSync)
    assert sync.to_cancel == (CancelTrigger(trigger_id, "user"),)
    finished = FinishedTrigger(trigger_id, spec.trigger_run_id, "cancelled", 0, reason="user")
    supervisor.round(finished=(finished,))
    supervisor.pass_time(2.0)
    assert supervisor.sent(StateSync)[1:] == []
    assert world.store.poll(supervisor.core.leases.epoch, ("default",)).removed == []


def test_a_runner_is_not_told_to_cancel_what_it_was_never_given(world: World) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.settle()
    (spawn,) = supervisor.take(Spawn)
    world.supervisor(pid=2, is_gone=lambda row: True).settle()
    # It finds out that its lease is gone in the very step in which its runner arrives.
    world.now += 60.0
    supervisor.say(Hello(PROTOCOL_VERSION, spawn.incarnation, 4711, "1.0"))
    assert [sync.to_create + sync.to_cancel for sync in supervisor.sent(StateSync)] == [()]
    assert supervisor.core.is_leaving


def test_a_watcher_removed_while_it_waits_for_its_next_try_is_released(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    supervisor.round(finished=(FinishedTrigger(trigger_id, spec.trigger_run_id, "failed", 0, error="no"),))
    world.store.remove_watcher("w0")
    supervisor.pass_time(5.0)
    assert supervisor.created() == []
    assert len(supervisor.core.assignments) == 0
    assert world.store.poll(supervisor.core.leases.epoch, ("default",)).removed == []


def test_no_more_triggers_than_the_capacity_are_claimed(world: World) -> None:
    add_watchers(world, 13)
    one = world.supervisor()
    one.start_runner()
    assert len(one.created()) == SETTINGS.capacity
    other = world.supervisor(pid=2)
    other.start_runner()
    assert len(other.core.assignments) == 2  # its share, as long as the first one might want some, too
    assert other.created() == [], "what the others leave may belong to these, and all of a stream begin together"
    other.pass_time(FAIR_WAIT_S + SETTINGS.lease.notice_interval_s)
    assert len(other.created()) == 3


def test_room_that_becomes_free_is_used_at_once_although_nobody_else_writes(world: World) -> None:
    add_watchers(world, 13)
    supervisor = world.supervisor()
    supervisor.start_runner()
    specs = supervisor.created()
    supervisor.round(finished=tuple(FinishedTrigger(s.trigger_id, s.trigger_run_id, "returned", 1) for s in specs[:2]))
    supervisor.pass_time(SETTINGS.lease.notice_interval_s)
    assert len(supervisor.created()) == 2
    assert SETTINGS.lease.notice_interval_s < SETTINGS.lease.poll_interval_s, "or this would show nothing"


def test_requests_are_answered_while_a_round_waits_for_the_database(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    supervisor.round(fired(spec, 0, key="k"))

    def away(*_: object, **__: object) -> None:
        raise DatabaseAway("db", "no answer")

    monkeypatch.setattr(world.store, "store_slice", away)
    supervisor.round(fired(spec, 1))
    supervisor.say(Request(1, LastEvent(trigger_id)))
    (response,) = supervisor.sent(Response)
    assert isinstance(response.result, StoredEvent)
    assert (response.result.sequence_index, response.result.key) == (0, "k")
    monkeypatch.setattr(world.store, "last_event", away)
    supervisor.say(Request(2, LastEvent(trigger_id)))
    (response,) = supervisor.sent(Response)
    assert response.result is None
    assert "no answer" in response.error


def test_the_heartbeat_does_not_wait_behind_a_long_round(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    calls = []
    store_slice, heartbeat = world.store.store_slice, world.store.heartbeat

    def slow_store(*args: object, **kwargs: object) -> object:
        world.now += 4.0
        calls.append("slice")
        return store_slice(*args, **kwargs)  # type: ignore[arg-type]

    def noted_heartbeat(epoch: int) -> None:
        calls.append("heartbeat")
        heartbeat(epoch)

    monkeypatch.setattr(world.store, "store_slice", slow_store)
    monkeypatch.setattr(world.store, "heartbeat", noted_heartbeat)
    supervisor.round(*(fired(spec, index) for index in range(30)))
    assert calls.count("slice") == 6
    longest = max(len(part) for part in "".join(call[0] for call in calls).split("h"))
    assert longest <= 2, f"a heartbeat is due every 5 s, and a slice takes 4: {calls}"


def test_a_drain_lets_the_runner_hand_over_stores_it_and_releases_the_triggers(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    supervisor.core.drain(world.now)
    supervisor.settle()
    assert len(supervisor.sent(Drain)) == 1
    supervisor.round(fired(spec, 0))
    assert supervisor.answers() == [StateSync(1, persisted=(1,))]
    cancelled = FinishedTrigger(trigger_id, spec.trigger_run_id, "cancelled", 1, reason="shutdown")
    supervisor.core.receive(1, StateChanges(2, finished=(cancelled,)), world.now)
    supervisor.core.runner_ended(1, "exited with code 0", world.now)
    supervisor.settle()
    (exit_,) = supervisor.take(Exit)
    assert exit_.code == commands.EXIT_DRAINED
    assert supervisor.take(Spawn) == []
    other = world.supervisor(pid=2)
    other.start_runner()
    assert [spec.trigger_id for spec in other.created()] == [trigger_id], "at once, without waiting for the lease"


def test_a_drain_during_the_start_of_the_runner_is_told_once_it_is_there(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.settle()
    supervisor.core.drain(world.now)
    supervisor.start_runner()
    assert len(supervisor.sent(Drain)) == 1


def test_a_runner_that_does_not_end_in_the_drain_is_killed(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.drain(world.now)
    for _ in range(int(SETTINGS.drain_s + DRAIN_MARGIN_S) - 1):
        supervisor.pass_time(1.0)
        supervisor.heartbeat()
    assert supervisor.take(Kill) == []
    supervisor.pass_time(1.1)
    assert len(supervisor.take(Kill)) == 1
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.settle()
    (exit_,) = supervisor.take(Exit)
    assert exit_.code == commands.EXIT_KILLED
    assert exit_.reason == "the runner did not come to the end of its drain in time"


def test_a_runner_that_gives_up_its_drain_cuts_it_short(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.drain(world.now)
    supervisor.core.runner_ended(1, "exited with code 77", world.now, gave_up=True)
    supervisor.settle()
    (exit_,) = supervisor.take(Exit)
    assert exit_.code == commands.EXIT_KILLED
    assert exit_.reason == "the runner did not come to the end of its drain: exited with code 77"


def test_a_runner_that_is_killed_during_a_drain_has_lost_nothing(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.drain(world.now)
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.settle()
    assert [exit_.code for exit_ in supervisor.take(Exit)] == [commands.EXIT_DRAINED], "its brokers deliver it again"


class LongTask:
    """One task, which ends at ``ends_at``, or when it is made to."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at

    def notify(self, *, has_fenced: bool = False) -> None:
        pass

    def step(self, epoch: int, now: float) -> bool:
        return False

    def wake_at(self) -> float:
        return self.ends_at

    def drain(self, now: float) -> bool:
        return now >= self.ends_at

    def end_all(self, reason: str) -> None:
        self.ends_at = 0.0

    def abandon(self) -> None:
        raise AssertionError("the lease is held")


@pytest.mark.parametrize("runs_on_s", [SETTINGS.drain_s / 2, 10 * SETTINGS.drain_s])
def test_a_drain_that_ends_a_task_is_cut_short(world: World, runs_on_s: float) -> None:
    task = LongTask(world.now + runs_on_s)
    identity = Identity("host", 1, "machine", 0.0)
    core = SupervisorCore(world.store, identity, SETTINGS, is_gone=lambda row: False, clock=lambda: 0.0, tasks=task)
    supervisor = Supervised(world, core)
    supervisor.start_runner()
    core.drain(world.now)
    supervisor.settle()
    core.runner_ended(1, "exited with code 0", world.now)
    supervisor.pass_time(SETTINGS.drain_s + DRAIN_MARGIN_S)
    (exit_,) = supervisor.take(Exit)
    if task.ends_at:
        assert (exit_.code, exit_.reason) == (commands.EXIT_DRAINED, "drained")
    else:
        assert (exit_.code, exit_.reason) == (commands.EXIT_KILLED, "tasks were still running at the drain's deadline")


# --- what fits no frame --------------------------------------------------------------------------

SMALL_FRAMES = msgspec.structs.replace(SETTINGS, runner=RunnerSettings(frame_bytes_max=1000))


@pytest.mark.parametrize("kwargs_bytes", [600, 800, 2000])
def test_a_trigger_whose_kwargs_fit_no_frame_fails_and_harms_no_other(world: World, kwargs_bytes: int) -> None:
    long = world.store.add_watcher("long", "users.Trigger", {"text": "x" * kwargs_bytes})
    short = world.store.add_watcher("short", "users.Trigger", {})
    supervisor = world.supervisor(SMALL_FRAMES)
    supervisor.start_runner()
    syncs = supervisor.sent(StateSync)
    created = [spec for sync in syncs for spec in sync.to_create]
    for sync in syncs:
        for piece in split_sync(sync, 1000):
            assert len(encode_message(piece)) <= 1000
    if kwargs_bytes == 600:
        assert [spec.trigger_id for spec in created] == [long, short]
        return
    assert [spec.trigger_id for spec in created] == [short]
    (row,) = [row for row in world.store.inspect.triggers() if row.id == long]
    assert row.last_error is not None
    assert "bytes; the limit is 1,000 (frame_bytes_max)" in row.last_error


def test_an_answer_that_fits_no_frame_is_an_error_for_who_asked(world: World) -> None:
    world.store.tasks.variables.put("LONG", b"x" * 2000)
    supervisor = world.supervisor(SMALL_FRAMES)
    supervisor.start_runner()
    supervisor.say(Request(1, GetVariable("LONG")))
    (response,) = supervisor.sent(Response)
    assert "the limit is 1,000 (frame_bytes_max)" in response.error


# --- answers and the lease (I10) -----------------------------------------------------------------


def cut_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise DatabaseAway("db", "no answer")

    for verb in ("store_slice", "heartbeat", "poll", "live_triggerers", "release_triggerer"):
        monkeypatch.setattr(world.store, verb, away)


LASTS_S = SETTINGS.lease.silence_max_s * ADVANCE_SHARE


def test_an_answer_says_how_long_the_lease_is_sure_to_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.heartbeat()
    assert supervisor.leases() == [LASTS_S]
    with monkeypatch.context() as patch:
        cut_off(world, patch)
        for seconds, lasts_s in ((10.0, LASTS_S - 10.0), (LASTS_S - 10.5, 0.5), (0.5, 0.0), (100.0, 0.0)):
            world.now += seconds
            supervisor.heartbeat()
            assert supervisor.leases() == [pytest.approx(lasts_s)]
    supervisor.pass_time(SETTINGS.database_retry_wait_max_s)
    supervisor.heartbeat()
    (lasts_s,) = supervisor.leases()
    assert lasts_s is not None
    assert lasts_s > LASTS_S - SETTINGS.database_retry_wait_max_s - 1.0


def test_what_is_stored_is_confirmed_whether_the_lease_lasts_or_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()

    def away(epoch: int) -> None:
        raise DatabaseAway("db", "no answer")

    monkeypatch.setattr(world.store, "heartbeat", away)
    world.now += SETTINGS.lease.silence_max_s - 1.0
    supervisor.round(fired(spec, 0))
    (answer,) = [sync for sync in supervisor.sent(StateSync) if sync.round]
    assert (answer.persisted, answer.lease_s) == ((1,), 0.0)


def test_a_healthy_runner_outlives_any_outage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    with monkeypatch.context() as patch:
        cut_off(world, patch)
        supervisor.pass_time_with_heartbeats(100)
    supervisor.pass_time_with_heartbeats(60)
    assert supervisor.take(DumpStacks) == []
    assert supervisor.take(Kill) == []
    assert supervisor.core.runner.incarnation == 1


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_lost_lease_is_told_before_anything_else_is_answered(world: World, *, is_draining: bool) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    if is_draining:
        supervisor.core.drain(world.now)
        supervisor.settle()
    world.store.release_triggerer(supervisor.core.leases.epoch)
    supervisor.round(fired(spec, 0))
    first, *rest = supervisor.sent(StateSync)
    assert first.lease_lost
    assert [cancel.trigger_id for cancel in first.to_cancel] == [spec.trigger_id]
    assert rest, "answered, so that the runner can end"
    assert [(sync.persisted, sync.lease_s) for sync in rest] == [((), 0.0)] * len(rest)


def test_a_drain_does_not_wait_for_ever_for_the_database(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()

    cut_off(world, monkeypatch)
    supervisor.core.drain(world.now)
    supervisor.round(fired(spec, 0))
    supervisor.core.runner_ended(1, "exited with code 0", world.now)
    supervisor.pass_time(10.0)
    assert supervisor.take(Exit) == []
    supervisor.pass_time(SETTINGS.drain_s)
    assert [exit_.code for exit_ in supervisor.take(Exit)] == [commands.EXIT_KILLED]


def test_a_second_request_to_stop_kills_at_once(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.drain(world.now)
    supervisor.core.stop_now("SIGTERM came a second time")
    supervisor.settle()
    assert len(supervisor.take(Kill)) == 1
    assert [exit_.code for exit_ in supervisor.take(Exit)] == [commands.EXIT_KILLED]


def test_the_triggers_of_a_silent_supervisor_are_taken_over_and_it_writes_nothing_more(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    silent = world.supervisor()
    silent.start_runner()
    (spec,) = silent.created()
    world.now += 31.0
    other = world.supervisor(pid=2)
    other.start_runner()
    other.pass_time(6.0)
    assert [spec.trigger_id for spec in other.created()] == [trigger_id]

    silent.round(fired(spec, 0))
    assert stored(world) == []
    syncs = silent.sent(StateSync)
    assert [sync.persisted for sync in syncs if sync.persisted] == []
    assert [cancel for sync in syncs for cancel in sync.to_cancel] == [CancelTrigger(trigger_id, "reassigned")]
    assert len(silent.sent(Drain)) == 1
    silent.round(fired(spec, 1))
    assert silent.answers() == [StateSync(2)], "answered, so that the runner can end, and nothing confirmed"
    silent.core.runner_ended(1, "exited with code 0", world.now)
    silent.settle()
    assert [exit_.code for exit_ in silent.take(Exit)] == [commands.EXIT_LEASE_LOST]
    assert stored(world) == []


def test_the_triggers_of_a_supervisor_known_to_be_gone_are_taken_over_at_once(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    gone = world.supervisor()
    gone.start_runner()
    gone.created()
    other = world.supervisor(pid=2, is_gone=lambda row: row.pid == 1)
    other.start_runner()
    assert [spec.trigger_id for spec in other.created()] == [trigger_id]


def test_a_supervisor_with_a_fresh_heartbeat_keeps_its_triggers(world: World) -> None:
    add_watchers(world, 1)
    one = world.supervisor()
    one.start_runner()
    one.created()
    other = world.supervisor(pid=2)
    other.start_runner()
    for _ in range(60):
        one.pass_time(0.5)
        one.heartbeat()
        other.pass_time(0.5)
        other.heartbeat()
    assert other.created() == []
    assert one.take(Exit) == []


def test_stuck_triggers_have_the_runner_replaced_without_a_wait(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.created()
    supervisor.say(StateChanges(1, stuck=(trigger_id,)))
    assert len(supervisor.sent(Drain)) == 1
    supervisor.core.runner_ended(1, "exited with code 0", world.now)
    supervisor.start_runner()
    assert [spec.trigger_id for spec in supervisor.created()] == [trigger_id]


def test_a_broken_protocol_has_the_runner_killed_and_replaced(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.protocol_failed(RemoteProtocolError("no such tag"))
    supervisor.settle()
    assert [kill.reason for kill in supervisor.take(Kill)] == ["no such tag"]
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.pass_time(1.0)
    assert len(supervisor.take(Spawn)) == 1


def test_another_protocol_version_ends_the_supervisor_with_both_versions_named(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.settle()
    supervisor.core.protocol_failed(VersionMismatch("runner", supervisor=2, child=1))
    supervisor.settle()
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.settle()
    (exit_,) = supervisor.take(Exit)
    assert exit_.code == commands.EXIT_INCOMPATIBLE
    assert "version 2" in exit_.reason
    assert "version 1" in exit_.reason
    assert "upgrade" in exit_.reason


def test_a_trigger_with_unreadable_kwargs_fails_alone(world: World) -> None:
    (unreadable,) = add_watchers(world, 1)
    world.store.close()
    world.secrets = Secrets.open(Path(), "MTExMTExMTExMTExMTExMTExMTExMTExMTExMTExMTE=")
    world.store = world.open_store()
    readable = world.store.add_watcher("fine", "users.Trigger", {})
    supervisor = world.supervisor()
    supervisor.start_runner()
    assert [spec.trigger_id for spec in supervisor.created()] == [readable]
    failures = {row.id: row.failure_count for row in world.store.inspect.triggers()}
    assert failures == {unreadable: 1, readable: 0}


def test_more_triggers_than_one_claim_takes_start_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.supervisor.triggers.leases.CLAIM_TRIGGERS_MAX", 2)
    add_watchers(world, 5)
    supervisor = world.supervisor()
    supervisor.start_runner()
    syncs = [sync for sync in supervisor.sent(StateSync) if sync.to_create]
    assert [len(sync.to_create) for sync in syncs] == [5]


def test_an_idle_supervisor_sleeps_and_asks_little(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    add_watchers(world, 3)
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.pass_time(2.0)
    asked: list[str] = []
    for verb in ("heartbeat", "live_triggerers", "poll", "claim_triggers", "claimed_triggers", "store_slice"):
        original = getattr(Store, verb)

        def ask(*args: Any, verb: str = verb, original: Any = original, **kwargs: Any) -> Any:
            asked.append(verb)
            return original(*args, **kwargs)

        monkeypatch.setattr(Store, verb, ask)
    steps = 0
    end = world.now + 20.0
    while world.now < end:
        supervisor.core.step(world.now)
        steps += 1
        world.now = max(supervisor.core.wake_at(), world.now + 1e-6)
    assert steps < 20 * 6, "a look for notices every 0.5 s, and the duties in between"
    assert 0 < len(asked) <= 20, "a query a second at most"


def test_replacing_the_runner_for_one_stuck_trigger_stops_none_of_the_others(world: World) -> None:
    stuck, *others = add_watchers(world, 3)
    supervisor = world.supervisor()
    supervisor.start_runner()
    specs = {spec.trigger_id: spec for spec in supervisor.created()}
    supervisor.say(StateChanges(1, stuck=(stuck,)))
    ends = tuple(
        FinishedTrigger(trigger_id, specs[trigger_id].trigger_run_id, "cancelled", 0, reason="shutdown")
        for trigger_id in others
    )
    supervisor.say(StateChanges(2, finished=ends))
    supervisor.core.runner_ended(1, "exited with code 77", world.now)
    supervisor.start_runner()
    assert sorted(spec.trigger_id for spec in supervisor.created()) == sorted([stuck, *others])


def test_a_trigger_whose_failure_is_still_unread_when_the_runner_dies_begins_again_with_the_others(
    world: World,
) -> None:
    fails, *others = add_watchers(world, 3)
    supervisor = world.supervisor()
    supervisor.start_runner()
    specs = {spec.trigger_id: spec for spec in supervisor.created()}
    failure = FinishedTrigger(fails, specs[fails].trigger_run_id, "failed", 0, error="no")
    supervisor.core.receive(1, StateChanges(1, finished=(failure,)), world.now)
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.pass_time(1.0)
    supervisor.start_runner()
    syncs = [sync for sync in supervisor.sent(StateSync) if sync.to_create]
    assert [sorted(spec.trigger_id for spec in sync.to_create) for sync in syncs] == [sorted([fails, *others])]
    assert {row.id: row.failure_count for row in world.store.inspect.triggers()}[fails] == 1, "and it is counted"


def test_a_claim_of_which_nobody_knows_whether_it_was_committed_orphans_no_trigger(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    claim = world.store.claim_triggers

    def commit_and_vanish(*args: object, **kwargs: object) -> None:
        claim(*args, **kwargs)  # type: ignore[arg-type]
        raise DatabaseAway("db", "the connection broke at the commit")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "claim_triggers", commit_and_vanish)
        supervisor.settle()
    supervisor.pass_time(2.0)
    supervisor.start_runner()
    assert [spec.trigger_id for spec in supervisor.created()] == [trigger_id]


def test_a_database_that_does_not_answer_is_not_asked_again_for_every_query(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    asked = []

    def away(*_: object) -> None:
        asked.append(world.now)
        raise DatabaseAway("db", "no answer within 5 s")

    monkeypatch.setattr(world.store, "last_event", away)
    for number in range(100):
        supervisor.say(Request(number + 1, LastEvent(trigger_id)))
    responses = supervisor.sent(Response)
    assert len(responses) == 100
    assert all(response.error for response in responses)
    assert len(asked) == 1


# --- triggers that tasks wait for ----------------------------------------------------------------


class Waiting:
    """A task that waits for a trigger, which the runner of a supervisor has been given."""

    def __init__(self, world: World) -> None:
        self.world, self.verbs = world, world.store.tasks
        self.supervisor = world.supervisor()
        self.supervisor.start_runner()
        self.epoch = self.supervisor.core.leases.epoch
        self.verbs.save_file(self.epoch, "f.py", [DagSpec("d", tasks=(TaskSpec("a", "Op"),))])
        run = self.verbs.create_run("d", "r")
        assert run is not None
        world.store.scheduling.plan(self.epoch)
        (given,) = self.verbs.dispatch(self.epoch, limit=1, queues=("default",)).tasks
        self.task = given.id
        empty = encode_value({}, where="kwargs")
        self.verbs.defer(self.epoch, given.id, given.token, Deferral("a.B", empty, "resume", empty, timeout_s=3.0))
        self.supervisor.pass_time(SETTINGS.lease.poll_interval_s - 3.0)
        (self.spec,) = self.supervisor.created()

    @property
    def owner(self) -> int | None:
        """Whose trigger it is."""
        (row,) = [row for row in self.world.store.inspect.triggers(with_ended=True) if row.id == self.spec.trigger_id]
        return row.triggerer_id

    def cancels(self) -> list[CancelTrigger]:
        return [cancel for sync in self.supervisor.sent(StateSync) for cancel in sync.to_cancel]

    def ends(self, outcome: str, reason: str | None = None, error: str = "") -> None:
        finished = FinishedTrigger(
            self.spec.trigger_id,
            self.spec.trigger_run_id,
            outcome,  # type: ignore[arg-type]
            0,
            reason=reason,  # type: ignore[arg-type]
            error=error,
        )
        self.supervisor.round(finished=(finished,))
        self.supervisor.pass_time(0.1)


def test_a_trigger_whose_task_has_timed_out_is_cancelled_and_let_go(world: World) -> None:
    waiting = Waiting(world)
    world.now += 3.0
    assert waiting.verbs.time_out(waiting.epoch) == [waiting.task]
    waiting.supervisor.pass_time(SETTINGS.lease.poll_interval_s + ENDED_GRACE_S)
    assert waiting.cancels() == [CancelTrigger(waiting.spec.trigger_id, "timeout")]
    waiting.ends("cancelled", "timeout")
    assert waiting.owner is None
    assert len(waiting.supervisor.core.assignments) == 0
    assert world.store.poll(waiting.epoch, ("default",)).ended == []


def test_a_trigger_that_fired_and_ends_by_itself_is_not_cancelled(world: World) -> None:
    waiting = Waiting(world)
    waiting.supervisor.round(fired(waiting.spec, 0))
    waiting.supervisor.pass_time(SETTINGS.lease.poll_interval_s)
    assert world.store.poll(waiting.epoch, ("default",)).ended == [waiting.spec.trigger_id]
    waiting.ends("returned")
    waiting.supervisor.pass_time(2 * ENDED_GRACE_S)
    assert waiting.cancels() == []
    assert waiting.owner is None


def test_a_trigger_that_fired_and_goes_on_is_cancelled_after_a_moment(world: World) -> None:
    waiting = Waiting(world)
    waiting.supervisor.round(fired(waiting.spec, 0))
    waiting.supervisor.pass_time(SETTINGS.lease.poll_interval_s + ENDED_GRACE_S)
    assert waiting.cancels() == [CancelTrigger(waiting.spec.trigger_id, "timeout")]


def test_a_trigger_that_failed_its_task_is_not_started_again(world: World) -> None:
    waiting = Waiting(world)
    waiting.ends("failed", error="boom")
    waiting.supervisor.pass_time(60.0)
    assert waiting.supervisor.created() == []
    assert len(waiting.supervisor.core.assignments) == 0
    assert waiting.owner is None


def test_a_trigger_of_no_use_whose_runner_is_gone_is_let_go(world: World) -> None:
    waiting = Waiting(world)
    world.now += 3.0
    waiting.verbs.time_out(waiting.epoch)
    waiting.supervisor.pass_time(SETTINGS.lease.poll_interval_s)
    waiting.supervisor.core.runner_ended(waiting.supervisor.core.runner.incarnation, "killed", world.now)
    waiting.supervisor.pass_time(2 * SETTINGS.lease.poll_interval_s + ENDED_GRACE_S)
    assert waiting.owner is None
    assert len(waiting.supervisor.core.assignments) == 0


def test_a_trigger_is_told_variables_and_connections(world: World) -> None:
    world.store.tasks.connections.put("db", b"pg://me:hunter22@h")
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.say(Request(1, GetVariable("region")))
    supervisor.say(Request(2, GetConnection("db")))
    supervisor.say(Request(3, GetVariable("nothing")))
    assert [(response.id, response.result) for response in supervisor.sent(Response)] == [
        (1, SecretText("north")),
        (2, SecretText("pg://me:hunter22@h")),
        (3, SecretText(None)),
    ]


def test_a_query_that_is_refused_is_answered_with_the_reason_and_holds_up_no_other(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.say(Request(1, GetVariable("")))
    supervisor.say(Request(2, LastEvent(trigger_id)))
    refused, answered = supervisor.sent(Response)
    assert (refused.id, "must not be empty" in refused.error) == (1, True)
    assert (answered.id, answered.error) == (2, "")


def test_a_supervisor_without_answers_says_so(world: World) -> None:
    core = SupervisorCore(world.store, Identity("host", 1, "machine", 0.0), SETTINGS, is_gone=lambda row: False)
    supervisor = Supervised(world, core)
    supervisor.start_runner()
    supervisor.say(Request(1, GetVariable("region")))
    (response,) = supervisor.sent(Response)
    assert response.error == "this supervisor answers no such queries"


def test_a_database_that_does_not_answer_is_not_asked_again_for_any_query(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    asked = []

    def away(*_: object) -> None:
        asked.append(world.now)
        raise DatabaseAway("db", "no answer within 5 s")

    monkeypatch.setattr(world.store.tasks.variables, "get", away)
    for number in range(10):
        supervisor.say(Request(number + 1, GetVariable("v")))
    assert [bool(response.error) for response in supervisor.sent(Response)] == [True] * 10
    assert len(asked) == 1
    monkeypatch.undo()
    supervisor.pass_time(10.0)
    supervisor.say(Request(11, GetVariable("v")))
    assert [reply.id for reply in supervisor.sent(Response)] == [11]
