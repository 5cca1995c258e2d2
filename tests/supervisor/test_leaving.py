"""How the core leaves: drains, deadlines, and what cuts a drain short."""

from __future__ import annotations

import msgspec
import pytest
import structlog.testing
from tests.supervisor.core_harness import SETTINGS, Supervised, World, add_watchers, cut_off, fired

from headgate.protocol.errors import VersionMismatch
from headgate.protocol.messages.runner import (
    Drain,
    FinishedTrigger,
    StateChanges,
    StateSync,
)
from headgate.store.errors import DatabaseAway, DatabaseReplaced
from headgate.store.ids import Epoch, TriggerId, TryName
from headgate.supervisor import commands
from headgate.supervisor.commands import Exit, Kill, Spawn
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.leaving import DRAIN_MARGIN_S, LOG_INTERVAL_S
from headgate.supervisor.tasks.core import TaskCore
from headgate.supervisor.triggers.leases import ADVANCE_SHARE, Identity


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


class LongTask(TaskCore):
    """One task, which ends at ``ends_at``, or when it is made to."""

    dag_folder = None

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.endless_ended = 0

    def logs_trouble(self) -> str:
        return ""

    def end_endless(self, reason: str) -> None:
        self.endless_ended += 1

    def notify(self, *, has_fenced: bool = False) -> None:
        pass

    def notify_signals(self) -> None:
        pass

    def step(self, epoch: Epoch, now: float) -> bool:
        return False

    def passed_over(self) -> list[tuple[str, str]]:
        return []

    def wake_at(self) -> float:
        return self.ends_at

    def drain(self, now: float) -> bool:
        return now >= self.ends_at

    def running(self) -> list[TryName]:
        return [TryName("slow", "r1", "s", 1)] if self.ends_at else []

    def take_expanded(self) -> bool:
        return False

    def take_handled(self) -> dict[TriggerId, int]:
        return {}

    def end_all(self, reason: str) -> None:
        self.ends_at = 0.0

    def abandon(self) -> None:
        raise AssertionError("the lease is held")


def test_endless_tasks_are_ended_when_another_supervisor_may_have_the_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin them then; an outage of the database costs other tasks nothing."""
    task = LongTask(world.now + 10 * SETTINGS.lease.silence_max_s)
    identity = Identity("host", 1, "machine", 0.0)
    core = SupervisorCore(world.store, identity, SETTINGS, is_gone=lambda row: False, clock=lambda: 0.0, tasks=task)
    supervisor = Supervised(world, core)
    supervisor.start_runner()
    supervisor.pass_time(SETTINGS.lease.heartbeat_s)
    with monkeypatch.context() as patch:
        cut_off(world, patch)
        supervisor.pass_time(ADVANCE_SHARE * SETTINGS.lease.silence_max_s - 2 * SETTINGS.lease.heartbeat_s)
        assert task.endless_ended == 0
        supervisor.pass_time(2 * SETTINGS.lease.heartbeat_s)
        assert task.endless_ended > 0
    assert task.ends_at > world.now


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
    with structlog.testing.capture_logs() as logs:
        supervisor.pass_time(SETTINGS.drain_s + DRAIN_MARGIN_S)
    waits = [record["waits_for"] for record in logs if record["event"] == "the drain waits"]
    assert len(waits) >= min(runs_on_s, SETTINGS.drain_s) / LOG_INTERVAL_S - 2
    assert set(waits) == {"1 task: slow/r1/s"}
    (exit_,) = supervisor.take(Exit)
    if task.ends_at:
        assert (exit_.code, exit_.reason) == (commands.EXIT_DRAINED, "drained")
    else:
        assert (exit_.code, exit_.reason) == (commands.EXIT_KILLED, "tasks were still running at the drain's deadline")


def test_a_drain_that_waits_is_published_with_the_next_heartbeat(world: World) -> None:
    task = LongTask(world.now + SETTINGS.drain_s / 2)
    identity = Identity("host", 1, "machine", 0.0)
    core = SupervisorCore(world.store, identity, SETTINGS, is_gone=lambda row: False, clock=lambda: 0.0, tasks=task)
    supervisor = Supervised(world, core)
    supervisor.start_runner()
    assert world.store.inspect.triggerers()[0].state == "running"
    core.drain(world.now)
    supervisor.settle()
    core.runner_ended(1, "exited with code 0", world.now)
    supervisor.pass_time(SETTINGS.lease.heartbeat_s)
    (line,) = world.store.inspect.triggerers()
    assert (line.state, line.runner, line.runner_ends) == ("draining", "absent", None)
    supervisor.pass_time(SETTINGS.drain_s)
    assert [line.state for line in world.store.inspect.triggerers()] == ["stopped"]


def test_others_claim_the_triggers_while_a_drain_waits_for_a_task(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    task = LongTask(world.now + 10 * SETTINGS.drain_s)
    settings = msgspec.structs.replace(SETTINGS, drain_s=20 * SETTINGS.drain_s)
    identity = Identity("host", 1, "machine", 0.0)
    core = SupervisorCore(world.store, identity, settings, is_gone=lambda row: False, clock=lambda: 0.0, tasks=task)
    supervisor, other = Supervised(world, core), world.supervisor(pid=2)
    supervisor.start_runner()
    (spec,) = supervisor.created()
    other.start_runner()
    core.drain(world.now)
    supervisor.settle()
    supervisor.round(fired(spec, 0))
    other.pass_time(1.0)
    assert other.created() == [], "its runner may still fire"
    core.runner_ended(1, "exited with code 0", world.now)
    for unstored in (core.holds, core.blame):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(unstored), "is_stored", False)
            supervisor.pass_time(1.0)
            other.pass_time(SETTINGS.lease.poll_interval_s)
            assert other.created() == [], "what it is to be passed over or held for is not stored"
    with pytest.MonkeyPatch.context() as patch:
        cut_off(world, patch)
        supervisor.pass_time(1.0)
    assert supervisor.take(Exit) == []
    supervisor.pass_time(SETTINGS.database_retry_wait_max_s)
    other.pass_time(SETTINGS.lease.poll_interval_s)
    assert [one.trigger_id for one in other.created()] == [trigger_id]
    supervisor.pass_time(10 * SETTINGS.drain_s)
    assert [exit_.code for exit_ in supervisor.take(Exit)] == [commands.EXIT_DRAINED]


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


def test_a_database_that_is_away_at_the_deadline_is_asked_once_more_and_not_to_sign_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    asked: list[float] = []

    def hang(*_: object, **__: object) -> None:
        asked.append(world.now)
        raise DatabaseAway("db", "connection timeout expired")

    for verb in ("store_slice", "heartbeat", "poll", "live_triggerers", "release_triggerer", "release_owned"):
        monkeypatch.setattr(world.store, verb, hang)
    supervisor.core.drain(world.now)
    supervisor.round(fired(spec, 0))
    supervisor.core.runner_ended(1, "exited with code 0", world.now)
    supervisor.pass_time(SETTINGS.drain_s)
    assert supervisor.take(Exit) == []
    world.now += 10 * SETTINGS.drain_s  # as after a step that took long: everything is due, and the deadline is over
    supervisor.settle()
    (exit_,) = supervisor.take(Exit)
    assert exit_.reason == "the database was away until the drain's deadline"
    assert asked.count(world.now) == 1


def test_a_database_that_is_back_at_the_deadline_is_signed_off_from(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    with monkeypatch.context() as patch:
        cut_off(world, patch)
        supervisor.core.drain(world.now)
        supervisor.round(fired(spec, 0))
        supervisor.core.runner_ended(1, "exited with code 0", world.now)
        supervisor.pass_time(SETTINGS.drain_s)
    world.now += 10 * SETTINGS.drain_s
    supervisor.settle()
    assert len(supervisor.take(Exit)) == 1
    assert world.store.live_triggerers() == []


def test_a_second_request_to_stop_kills_at_once(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.drain(world.now)
    kill, exit_ = supervisor.core.stop_now("SIGTERM came a second time")[-2:]
    assert isinstance(kill, Kill)
    assert isinstance(exit_, Exit)
    assert exit_.code == commands.EXIT_KILLED


@pytest.mark.parametrize("verb", ["store_slice", "heartbeat"])
def test_nothing_is_answered_once_the_database_file_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()

    def lose(*_: object, **__: object) -> None:
        raise DatabaseReplaced("sqlite:////h/headgate.db", "/h/headgate.db was deleted or moved")

    monkeypatch.setattr(world.store, verb, lose)
    world.now += SETTINGS.lease.heartbeat_s
    supervisor.round(fired(spec, 0))
    assert supervisor.answers() == []
    assert [type(command) for command in supervisor.commands] == [Kill, Exit]
    (exit_,) = supervisor.take(Exit)
    assert exit_.code == commands.EXIT_DATABASE_REPLACED
    assert "was deleted or moved" in exit_.reason


def test_a_supervisor_of_another_version_than_its_next_runner_waits_for_no_task_without_end(world: World) -> None:
    task = LongTask(world.now + 10 * SETTINGS.drain_s)
    identity = Identity("host", 1, "machine", 0.0)
    core = SupervisorCore(world.store, identity, SETTINGS, is_gone=lambda row: False, clock=lambda: 0.0, tasks=task)
    supervisor = Supervised(world, core)
    supervisor.start_runner()
    core.protocol_failed(VersionMismatch("runner", supervisor=2, child=1))
    supervisor.settle()
    core.runner_ended(1, "killed by SIGKILL", world.now)
    with structlog.testing.capture_logs() as logs:
        supervisor.pass_time(SETTINGS.drain_s + DRAIN_MARGIN_S)
    assert {record["waits_for"] for record in logs if record["event"] == "the drain waits"} == {"1 task: slow/r1/s"}
    (exit_,) = supervisor.take(Exit)
    assert exit_.code == commands.EXIT_INCOMPATIBLE
    assert task.ends_at == 0.0, "it was ended"
