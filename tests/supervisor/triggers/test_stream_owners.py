"""The core and the streams of its triggers: it starts only those of its own streams, and all of these together."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import update
from tests.supervisor.core_harness import SETTINGS, Supervised, World, add_watchers

from headgate.protocol.messages.runner import (
    AbsentSubscriber,
    CancelTrigger,
    DescribedTrigger,
    FinishedTrigger,
    StateSync,
    TriggerSpec,
)
from headgate.store.tables import stream, trigger
from headgate.supervisor.triggers.leases import FAIR_WAIT_S


def description(spec: TriggerSpec, digest: str) -> DescribedTrigger:
    return DescribedTrigger(spec.trigger_id, spec.trigger_run_id, digest, f"name of {digest}")


def describe(supervised: Supervised, digest: str, *specs: TriggerSpec) -> None:
    supervised.round(described=tuple(description(spec, digest) for spec in specs))


def started(world: World, *, pid: int = 1, capacity: int = 10) -> Supervised:
    settings = msgspec.structs.replace(SETTINGS, capacity=capacity)
    supervised = world.supervisor(settings, pid=pid, is_gone=lambda row: row.pid in dead)
    supervised.start_runner()
    return supervised


dead: set[int] = set()


@pytest.fixture(autouse=True)
def all_alive() -> None:
    dead.clear()


def polled(supervised: Supervised) -> list[TriggerSpec]:
    supervised.pass_time_with_heartbeats(SETTINGS.lease.poll_interval_s + FAIR_WAIT_S)
    return supervised.created()


def test_a_trigger_is_started_without_a_stream_then_described_then_started_with_it(world: World) -> None:
    add_watchers(world, 1)
    supervised = started(world)
    (spec,) = supervised.created()
    assert spec.stream is None
    describe(supervised, "d1", spec)
    (again,) = supervised.created()
    assert (again.trigger_id, again.stream) == (spec.trigger_id, "d1")
    assert again.trigger_run_id != spec.trigger_run_id


def test_the_triggers_of_a_stream_start_together_when_all_of_them_are_described(world: World) -> None:
    add_watchers(world, 3)
    supervised = started(world)
    one, two, three = supervised.created()
    describe(supervised, "d1", one)
    describe(supervised, "", two)  # it runs on
    assert supervised.created() == []
    describe(supervised, "d1", three)
    assert [spec.trigger_id for spec in supervised.created()] == [one.trigger_id, three.trigger_id]


def test_a_trigger_that_fails_before_it_is_described_holds_up_no_stream(world: World) -> None:
    add_watchers(world, 2)
    supervised = started(world)
    one, two = supervised.created()
    describe(supervised, "d1", one)
    failed = FinishedTrigger(two.trigger_id, two.trigger_run_id, "failed", 0, "no such module")
    supervised.round(finished=(failed,))
    assert [spec.trigger_id for spec in supervised.created()] == [one.trigger_id]


def test_triggers_that_are_started_later_hold_up_no_stream(world: World) -> None:
    add_watchers(world, 2)
    supervised = started(world)
    one, two = supervised.created()
    describe(supervised, "d1", one)
    world.store.add_watcher("later", "users.Trigger", {})
    (three,) = polled(supervised)
    describe(supervised, "", two)
    assert [spec.trigger_id for spec in supervised.created()] == [one.trigger_id]
    assert three.stream is None


def test_a_new_runner_gets_the_streams_that_are_known(world: World) -> None:
    add_watchers(world, 3)
    supervised = started(world)
    one, two, three = supervised.created()
    describe(supervised, "d1", one, two)
    supervised.core.runner_ended(1, "killed", world.now)
    supervised.pass_time(1.0)
    supervised.start_runner()
    assert {spec.trigger_id: spec.stream for spec in supervised.created()} == {three.trigger_id: None}
    # The stream waits for the third, which may be of it.
    third = TriggerSpec(three.trigger_id, f"1.2.{three.trigger_id}.4", "", "", b"")
    describe(supervised, "", third)
    assert {spec.trigger_id: spec.stream for spec in supervised.created()} == {
        one.trigger_id: "d1",
        two.trigger_id: "d1",
    }


def test_four_watchers_added_one_after_another_all_run_on_one_of_two_supervisors_and_move_together(
    world: World,
) -> None:
    first, second = started(world, pid=1), started(world, pid=2)
    ids = []
    running: dict[int, Supervised] = {}
    for number in range(4):
        ids.append(world.store.add_watcher(f"w{number}", "users.Trigger", {}))
        for _ in range(4):
            for supervised in (first, second) if number % 2 else (second, first):
                for spec in polled(supervised):
                    if spec.stream is None:
                        describe(supervised, "d1", spec)
                    else:
                        running[spec.trigger_id] = supervised
    assert set(running) == set(ids)
    owner = running[ids[0]]
    assert all(supervised is owner for supervised in running.values())

    dead.add(1 if owner is first else 2)
    heir = second if owner is first else first
    created = [spec for _ in range(3) for spec in polled(heir)]
    assert {spec.trigger_id: spec.stream for spec in created} == dict.fromkeys(ids, "d1")
    # In one message, so that the stream begins with all of them.
    assert len({spec.trigger_run_id.split(".")[0] for spec in created}) == 1


def test_a_trigger_that_is_left_to_another_supervisor_frees_its_room(world: World) -> None:
    first = started(world, pid=1, capacity=10)
    world.store.add_watcher("a", "users.Trigger", {})
    (spec,) = polled(first)
    describe(first, "d1", spec)
    first.created()
    second = started(world, pid=2, capacity=1)
    first_id = world.store.add_watcher("b", "users.Trigger", {})
    (other,) = polled(second)
    describe(second, "d1", other)
    assert second.created() == []
    assert second.core.assignments.owned == 0
    assert [one.trigger_id for one in polled(first)] == [first_id]


def test_a_trigger_that_a_user_removes_while_it_is_described_is_released(world: World) -> None:
    add_watchers(world, 1)
    supervised = started(world)
    (spec,) = supervised.created()
    world.store.remove_watcher("w0")
    supervised.pass_time(SETTINGS.lease.poll_interval_s + 0.1)
    assert supervised.sent(StateSync)[-1].to_cancel == (CancelTrigger(spec.trigger_id, "user"),)
    describe(supervised, "d1", spec)
    supervised.settle()
    assert supervised.created() == []
    assert supervised.core.assignments.owned == 0
    assert world.store.inspect.trigger(spec.trigger_id).line.triggerer_id is None


def test_a_trigger_of_the_wrong_queue_is_not_started_and_tried_again_later(world: World) -> None:
    settings = msgspec.structs.replace(SETTINGS, queues=("a", "b"))
    supervised = world.supervisor(settings)
    supervised.start_runner()
    supervised.settle()
    world.store.add_watcher("a", "users.Trigger", {}, queue="a")
    (one,) = polled(supervised)
    describe(supervised, "d1", one)
    (running,) = supervised.created()
    world.store.add_watcher("b", "users.Trigger", {}, queue="b")
    (two,) = polled(supervised)
    describe(supervised, "d1", two)
    assert supervised.created() == []
    line = world.store.inspect.trigger(two.trigger_id).line
    assert line.failure_count == 1
    assert "served in the queue 'a', but its own queue is 'b'" in (line.last_error or "")
    supervised.pass_time_with_heartbeats(SETTINGS.retry_wait_s + 1)
    (again,) = supervised.created()
    assert (again.trigger_id, again.stream) == (two.trigger_id, None)
    # It runs as soon as the other one is gone.
    world.store.remove_watcher("a")
    supervised.pass_time(SETTINGS.lease.poll_interval_s + 0.1)
    gone = FinishedTrigger(one.trigger_id, running.trigger_run_id, "cancelled", 0, reason="user")
    supervised.round(finished=(gone,))
    supervised.settle()
    describe(supervised, "d1", again)
    assert [(spec.trigger_id, spec.stream) for spec in supervised.created()] == [(two.trigger_id, "d1")]


def test_a_stream_larger_than_the_capacity_is_run_by_a_supervisor_that_owns_nothing(world: World) -> None:
    ids = add_watchers(world, 4)
    with world.store.database.writing() as tx:
        row = {"digest": "d1", "name": "n", "queue": "default", "created_date": tx.now}
        tx.connection.execute(stream.insert().values(row))
        tx.connection.execute(update(trigger).values(stream_id=1))
    supervised = started(world, capacity=2)
    assert [spec.trigger_id for spec in supervised.created()] == ids
    assert world.supervisor(msgspec.structs.replace(SETTINGS, capacity=2), pid=2).core.assignments.owned == 0


# --- those that cannot be started ---------------------------------------------------------------


def with_one_unreadable(world: World) -> tuple[Supervised, int, int]:
    """Return a supervisor that cannot read one of two triggers of a stream, which another one has described."""
    ids = add_watchers(world, 2)
    first = started(world)
    describe(first, "d1", *first.created())
    world.store.release_triggerer(first.core.leases.epoch)
    with world.engine.begin() as connection:
        connection.execute(update(trigger).where(trigger.c.id == ids[0]).values(kwargs="of another key"))
    supervised = started(world, pid=2)
    supervised.pass_time_with_heartbeats(3)
    return supervised, ids[0], ids[1]


def absences(supervised: Supervised) -> list[AbsentSubscriber | CancelTrigger]:
    """Return for whom streams are to wait, or not any more, as it was sent."""
    found: list[AbsentSubscriber | CancelTrigger] = []
    for message in supervised.sent(StateSync):
        found += [*message.to_cancel, *message.absent]
    return found


def test_a_stream_waits_for_a_trigger_that_cannot_be_read_here(world: World) -> None:
    supervised, lost, other = with_one_unreadable(world)
    (start,) = [message for message in supervised.sent(StateSync) if message.to_create]
    assert [spec.trigger_id for spec in start.to_create] == [other]
    assert start.absent == (AbsentSubscriber(lost, "d1"),)
    # Until a user pauses it, or goes on with it, or removes it.
    poll_s = 2 * SETTINGS.lease.poll_interval_s
    world.store.pause_watcher("w0")
    supervised.pass_time_with_heartbeats(poll_s)
    assert absences(supervised) == [CancelTrigger(lost, "reassigned")]
    world.store.resume_watcher("w0")
    supervised.pass_time_with_heartbeats(poll_s)
    assert absences(supervised) == [AbsentSubscriber(lost, "d1")]
    supervised.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervised.pass_time_with_heartbeats(SETTINGS.respawn_wait_max_s)
    supervised.start_runner()
    (start,) = [message for message in supervised.sent(StateSync) if message.to_create]
    assert start.absent == (AbsentSubscriber(lost, "d1"),), "the next runner knows it as well"
    world.store.remove_watcher("w0")
    supervised.pass_time_with_heartbeats(poll_s)
    assert absences(supervised) == [CancelTrigger(lost, "user")]


def test_a_trigger_that_can_be_read_again_is_started_and_its_stream_goes_on(world: World) -> None:
    supervised, lost, _ = with_one_unreadable(world)
    supervised.created()
    world.store.change_watcher("w0", kwargs={"number": 7})
    assert [spec.trigger_id for spec in polled(supervised)] == [lost]


def test_a_stream_waits_for_a_trigger_whose_new_values_cannot_be_read_here(world: World) -> None:
    ids = add_watchers(world, 2)
    supervised = started(world)
    describe(supervised, "d1", *supervised.created())
    one, _ = supervised.created()
    world.store.change_watcher("w0", kwargs={"number": 7})
    with world.engine.begin() as connection:
        connection.execute(update(trigger).where(trigger.c.id == ids[0]).values(kwargs="of a newer key"))
    poll_s = 2 * SETTINGS.lease.poll_interval_s
    supervised.pass_time_with_heartbeats(poll_s)
    waits = AbsentSubscriber(ids[0], "d1")
    assert absences(supervised) == [CancelTrigger(ids[0], "reassigned"), waits]
    supervised.round(
        finished=(FinishedTrigger(one.trigger_id, one.trigger_run_id, "cancelled", 0, reason="reassigned"),)
    )
    supervised.pass_time_with_heartbeats(poll_s)
    assert absences(supervised) == [waits], "when it is claimed again"
