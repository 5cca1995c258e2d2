"""The runner's process as the core handles it: spawned, replaced, asked for its stacks, killed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.supervisor.core_harness import SETTINGS, World, add_watchers, fired

from headgate.protocol.errors import RemoteProtocolError, VersionMismatch
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FinishedTrigger,
    Hello,
    StateChanges,
    StateSync,
)
from headgate.scheduling.why import RunnerEnds
from headgate.store.errors import DatabaseAway
from headgate.store.facts.supervisor_status import SupervisorStatus
from headgate.store.ids import Epoch
from headgate.store.triggers.events import StoredSlice
from headgate.store.triggers.leases import Poll
from headgate.supervisor import commands
from headgate.supervisor.commands import DumpStacks, Exit, Kill, Spawn
from headgate.supervisor.runner_lifecycle import DUMP_TO_KILL_S, ENDS_WINDOW_S, LINK_LOST_GRACE_S


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


def test_a_runner_that_dies_once_a_minute_is_always_back_at_once(world: World) -> None:
    supervisor = world.supervisor()
    waits = []
    for _ in range(60):
        supervisor.start_runner()
        supervisor.pass_time_with_heartbeats(59.5)
        supervisor.core.runner_ended(supervisor.core.runner.incarnation, "killed by SIGKILL", world.now)
        waits.append(supervisor.core.runner.wake_at() - world.now)
        supervisor.pass_time(max(0.0, supervisor.core.runner.wake_at() - world.now))
    assert max(waits) < 0.5


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


def test_a_runner_that_closes_its_link_and_goes_on_is_killed_at_once(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.runner.link_closed(world.now)
    supervisor.pass_time(LINK_LOST_GRACE_S - 0.1)
    assert supervisor.take(Kill) == []
    supervisor.pass_time(0.1)
    assert supervisor.take(Kill) == [Kill("it has closed its link")]
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.pass_time(1.0)
    supervisor.start_runner()
    supervisor.pass_time(30.0 + DUMP_TO_KILL_S)
    assert supervisor.take(Kill) == [Kill("it did not end or answer in time")]


def test_a_runner_that_closes_its_link_in_a_drain_may_end_in_time(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.drain(world.now)
    supervisor.core.runner.link_closed(world.now)
    supervisor.pass_time(SETTINGS.drain_s)
    assert supervisor.take(Kill) == []


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


def test_a_runner_whose_answer_comes_after_a_long_outage_is_not_blamed_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_watchers(world, 1)
    # It tries again at once, and each try takes as long as a lock is waited for: the first step after the longest
    # silence is the one that stores the round.
    supervisor = world.supervisor(msgspec.structs.replace(SETTINGS, database_retry_wait_max_s=0.01))
    supervisor.start_runner()
    (spec,) = supervisor.created()
    store, began_at = world.store.store_slice, world.now

    def slow(*arguments: Any, **more: Any) -> StoredSlice:
        is_back = world.now >= began_at + 30.0
        world.now += 5.0  # the wait for a lock, which the step does not know of
        if not is_back:
            raise DatabaseAway("db", "database is locked")
        return store(*arguments, **more)

    monkeypatch.setattr(world.store, "store_slice", slow)
    supervisor.round(fired(spec, 0))
    while not supervisor.answers():
        world.now += 0.1
        supervisor.settle()
    supervisor.pass_time(DUMP_TO_KILL_S)
    assert supervisor.take(DumpStacks) == []
    supervisor.pass_time(30.0)
    assert len(supervisor.take(DumpStacks)) == 1, "silence counts again, from the answer"


def test_a_runner_that_says_something_after_its_stacks_were_asked_for_is_not_killed(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.pass_time(30.1)
    assert len(supervisor.take(DumpStacks)) == 1
    supervisor.heartbeat()
    supervisor.pass_time(29.0)
    assert supervisor.take(Kill) == []
    supervisor.pass_time(2.1)
    assert len(supervisor.take(Kill)) == 1


def test_the_time_to_write_stacks_counts_from_the_step_after_the_one_that_asked_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    world.now += 14.0
    supervisor.settle()
    world.now += 14.0
    supervisor.settle()
    world.now += 2.0
    asked_at = world.now
    poll = world.store.poll

    def slow(*arguments: Any) -> Poll:
        world.now += 5.0
        return poll(*arguments)

    monkeypatch.setattr(world.store, "poll", slow)
    world.store.add_watcher("new", "users.Trigger", {})
    while not supervisor.take(DumpStacks):
        supervisor.commands += supervisor.core.step(asked_at)
    monkeypatch.undo()
    supervisor.commands += supervisor.core.step(world.now)
    assert supervisor.take(Kill) == []
    supervisor.pass_time(DUMP_TO_KILL_S + 0.1)
    assert len(supervisor.take(Kill)) == 1


def test_a_supervisor_that_stood_still_does_not_blame_the_runner(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    world.now += 3600.0  # stopped, or the machine was suspended; what the runner said waits in the socket
    supervisor.settle()
    assert supervisor.take(DumpStacks) == []
    supervisor.heartbeat()
    supervisor.pass_time(1.0)
    assert supervisor.take(DumpStacks) == []


def test_stuck_triggers_have_the_runner_replaced_without_a_wait(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.created()
    supervisor.say(StateChanges(1, stuck=(trigger_id,)))
    assert len(supervisor.sent(Drain)) == 1
    supervisor.core.runner_ended(1, "exited with code 0", world.now)
    supervisor.start_runner()
    assert supervisor.created() == [], "it is held back"
    supervisor.pass_time(1.6)
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
    assert sorted(spec.trigger_id for spec in supervisor.created()) == others
    supervisor.pass_time(1.6)
    assert [spec.trigger_id for spec in supervisor.created()] == [stuck]


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


def test_a_runner_that_ends_again_and_again_is_published_until_that_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    heartbeat = world.store.heartbeat

    def noted(epoch: Epoch, status: str | None = None) -> None:
        heartbeat(epoch, status)
        written.extend([] if status is None else [status])

    def said() -> SupervisorStatus:
        epoch = supervisor.core.leases.epoch
        return world.store.inspect.supervisor_statuses([epoch])[epoch].status

    monkeypatch.setattr(world.store, "heartbeat", noted)
    supervisor = world.supervisor()
    wait_s = 0.0
    for ends in range(1, 9):
        supervisor.start_runner()
        how = "killed by SIGKILL; its last output was:\nso much"
        supervisor.core.runner_ended(supervisor.core.runner.incarnation, how, world.now)
        wait_s = supervisor.core.runner.wake_at() - world.now
        if ends < 8:
            supervisor.pass_time(wait_s)
    assert wait_s > 6.0
    supervisor.pass_time(5.0)
    assert said().runner_ends == RunnerEnds(8, ENDS_WINDOW_S, "killed by SIGKILL", round(wait_s, 1))
    supervisor.pass_time(wait_s - 5.0)
    supervisor.start_runner()
    supervisor.pass_time_with_heartbeats(10.0)
    assert said().runner_ends == RunnerEnds(8, ENDS_WINDOW_S, "killed by SIGKILL")
    written.clear()
    supervisor.pass_time_with_heartbeats(500.0)
    assert written == [], "nothing has changed"
    supervisor.pass_time_with_heartbeats(110.0)
    assert said() == SupervisorStatus(runner="running", incarnation=9)


def test_a_runner_that_ends_as_it_was_asked_to_is_not_published_as_dying(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.core.drain(world.now)
    supervisor.core.runner_ended(1, "exited with code 0", world.now)
    assert supervisor.core.runner.ends() is None
