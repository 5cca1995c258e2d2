"""Held triggers: owned and not started, with their stream waiting unless a user has paused them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sqlalchemy import insert, update
from tests.supervisor.core_harness import Supervised, World, add_watchers

from headgate.protocol.messages.runner import (
    AbsentSubscriber,
    CancelTrigger,
    DescribedTrigger,
    FinishedTrigger,
    StateSync,
    TriggerSpec,
)
from headgate.store.errors import DatabaseAway
from headgate.store.tables import stream, trigger


def put_on_stream(world: World, *trigger_ids: int) -> None:
    with world.engine.begin() as connection:
        row = insert(stream).values(digest="abc", name="orders", queue="default", created_date=world.clock())
        stream_id = connection.execute(row.returning(stream.c.id)).scalar_one()
        on_it = update(trigger).where(trigger.c.id.in_(trigger_ids))
        connection.execute(on_it.values(stream_id=stream_id))


def cancelled(spec: TriggerSpec) -> FinishedTrigger:
    return FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "cancelled", 0, reason="reassigned")


def hold(supervisor: Supervised, trigger_id: int) -> None:
    message = supervisor.core.holds.begin(trigger_id, "quarantine", "it harms")
    supervisor.core._send_if_running(message)
    supervisor.settle()


def test_a_paused_watcher_is_cancelled_and_started_again_when_it_is_resumed(world: World) -> None:
    first, second = add_watchers(world, 2)
    put_on_stream(world, first, second)
    supervisor = world.supervisor()
    supervisor.start_runner()
    spec = supervisor.created()[0]
    world.store.pause_watcher("w0")
    supervisor.pass_time(1.1)
    assert supervisor.sent(StateSync) == [StateSync(to_cancel=(CancelTrigger(first, "reassigned"),))]
    supervisor.round(finished=(cancelled(spec),))
    supervisor.pass_time(5.0)
    assert supervisor.created() == []
    world.store.resume_watcher("w0")
    supervisor.pass_time(1.1)
    (again,) = supervisor.created()
    assert again.trigger_id == first
    assert again.trigger_run_id != spec.trigger_run_id


def test_a_resumed_watcher_is_started_only_when_its_earlier_run_has_ended(world: World) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    world.store.pause_watcher("w0")
    supervisor.pass_time(1.1)
    world.store.resume_watcher("w0")
    supervisor.pass_time(1.1)
    assert supervisor.created() == []
    supervisor.round(finished=(cancelled(spec),))
    assert [again.trigger_id for again in supervisor.created()] == [spec.trigger_id]


def test_the_stream_of_a_quarantined_trigger_waits_for_it_from_its_cancellation_on(world: World) -> None:
    first, second = add_watchers(world, 2)
    put_on_stream(world, first, second)
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.created()
    hold(supervisor, first)
    (sync,) = supervisor.sent(StateSync)
    assert sync.to_cancel == (CancelTrigger(first, "reassigned"),)
    assert sync.absent == (AbsentSubscriber(first, "abc"),)
    assert world.store.poll(supervisor.core.leases.epoch, ("default",)).held == {first: "quarantine"}


def test_no_stream_waits_for_a_trigger_that_returned_when_it_was_being_held(world: World) -> None:
    first, second = add_watchers(world, 2)
    put_on_stream(world, first, second)
    supervisor = world.supervisor()
    supervisor.start_runner()
    spec, other = supervisor.created()
    hold(supervisor, first)
    supervisor.sent(StateSync)
    ended = FinishedTrigger(other.trigger_id, other.trigger_run_id, "returned", 0)
    returned = FinishedTrigger(first, spec.trigger_run_id, "returned", 0)
    supervisor.round(finished=(msgspec.structs.replace(returned, trigger_run_id="1.1.1.0"),))
    supervisor.round(finished=(ended,))
    assert not any(sync.to_cancel for sync in supervisor.sent(StateSync)), "for the one that returned by itself, none"
    supervisor.round(finished=(returned,))
    (sync,) = [sync for sync in supervisor.sent(StateSync) if sync.to_cancel]
    assert sync.to_cancel == (CancelTrigger(first, "timeout"),)


def test_a_new_runner_knows_with_its_first_triggers_for_whom_their_stream_waits(world: World) -> None:
    first, second = add_watchers(world, 2)
    put_on_stream(world, first, second)
    supervisor = world.supervisor()
    supervisor.start_runner()
    hold(supervisor, first)
    supervisor.sent(StateSync)
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.pass_time(1.0)
    supervisor.start_runner()
    (sync,) = [sync for sync in supervisor.sent(StateSync) if sync.to_create or sync.absent]
    assert [spec.trigger_id for spec in sync.to_create] == [second]
    assert sync.absent == (AbsentSubscriber(first, "abc"),)


def test_a_supervisor_that_takes_over_waits_for_those_that_were_held_before(world: World) -> None:
    first, second = add_watchers(world, 2)
    put_on_stream(world, first, second)
    earlier = world.supervisor()
    earlier.start_runner()
    hold(earlier, first)
    world.now += 60.0
    later = world.supervisor(pid=2, is_gone=lambda row: True)
    later.start_runner()
    (sync,) = [sync for sync in later.sent(StateSync) if sync.to_create or sync.absent]
    assert [spec.trigger_id for spec in sync.to_create] == [second]
    assert sync.absent == (AbsentSubscriber(first, "abc"),)


def test_a_held_trigger_that_is_claimed_later_is_absent_before_its_stream_starts(world: World) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    supervisor.round(described=(DescribedTrigger(spec.trigger_id, spec.trigger_run_id, "", ""),))
    supervisor.sent(StateSync)
    late = [world.store.add_watcher(name, "users.Trigger", {}) for name in ("late", "later")]
    put_on_stream(world, *late)
    with world.engine.begin() as connection:
        connection.execute(update(trigger).where(trigger.c.id == late[0]).values(hold="quarantine"))
    supervisor.pass_time(1.1)
    absent, started = supervisor.sent(StateSync)
    assert absent == StateSync(absent=(AbsentSubscriber(late[0], "abc"),))
    assert [spec.trigger_id for spec in started.to_create] == [late[1]]


def test_a_pause_ends_the_wait_for_a_quarantined_trigger(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    put_on_stream(world, trigger_id)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    hold(supervisor, trigger_id)
    supervisor.round(finished=(cancelled(spec),))
    supervisor.sent(StateSync)
    world.store.pause_watcher("w0")
    supervisor.pass_time(1.1)
    assert supervisor.sent(StateSync) == [StateSync(to_cancel=(CancelTrigger(trigger_id, "reassigned"),))]


def test_removing_a_held_watcher_ends_the_wait_and_releases_it(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    put_on_stream(world, trigger_id)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    hold(supervisor, trigger_id)
    supervisor.round(finished=(cancelled(spec),))
    supervisor.sent(StateSync)
    world.store.remove_watcher("w0")
    supervisor.pass_time(1.1)
    assert supervisor.sent(StateSync) == [StateSync(to_cancel=(CancelTrigger(trigger_id, "user"),))]
    assert world.store.poll(supervisor.core.leases.epoch, ("default",)).removed == []


def test_a_hold_takes_effect_at_once_and_is_stored_when_the_database_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    is_away = True
    store_hold = world.store.hold_trigger

    def sometimes(*arguments: Any) -> bool:
        if is_away:
            raise DatabaseAway("db", "no answer")
        return store_hold(*arguments)

    monkeypatch.setattr(world.store, "hold_trigger", sometimes)
    hold(supervisor, trigger_id)
    supervisor.round(finished=(cancelled(spec),))
    world.store.add_watcher("other", "users.Trigger", {})  # so that polls look
    supervisor.pass_time(3.0)
    assert [created.name for created in supervisor.created()] == ["other"], "polls that do not know it release nothing"
    is_away = False
    supervisor.pass_time(10.0)
    assert world.store.inspect.watchers()[1].hold == "quarantine"
