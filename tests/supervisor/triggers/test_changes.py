"""Changed watchers: each is started again with its new values, in its stream, which waits for it meanwhile."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.supervisor.core_harness import SETTINGS, Supervised, World, add_watchers, fired, stored
from tests.supervisor.triggers.test_holds import cancelled, hold, put_on_stream
from tests.supervisor.triggers.test_stream_owners import describe

from headgate.protocol.messages.runner import (
    AbsentSubscriber,
    CancelTrigger,
    FinishedTrigger,
    StateChanges,
    StateSync,
    TriggerSpec,
)
from headgate.protocol.values import decode_value
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.supervisor.triggers import leases

QUIET_S = 5.0
POLL_S = 2 * SETTINGS.lease.poll_interval_s  # two supervisors of a test have one store, so one may miss a notification


def kwargs_of(spec: TriggerSpec) -> Any:
    return decode_value(spec.kwargs)


def started(world: World, watchers: int) -> tuple[Supervised, list[TriggerSpec]]:
    """Return a supervisor whose triggers all run, on one stream."""
    put_on_stream(world, *add_watchers(world, watchers))
    supervisor = world.supervisor()
    supervisor.start_runner()
    return supervisor, supervisor.created()


def test_a_changed_watcher_is_started_with_its_new_kwargs_when_its_run_has_ended(world: World) -> None:
    supervisor, (spec, _) = started(world, 2)
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(1.1)
    assert supervisor.sent(StateSync) == [
        StateSync(
            to_cancel=(CancelTrigger(spec.trigger_id, "reassigned"),),
            absent=(AbsentSubscriber(spec.trigger_id, "abc"),),
        )
    ]
    supervisor.round(fired(spec, 0))
    assert stored(world) == [(spec.trigger_id, 0)], "its last events are stored as any others"
    assert supervisor.created() == []
    supervisor.round(finished=(cancelled(spec),))
    (again,) = supervisor.created()
    assert (again.trigger_id, kwargs_of(again), again.stream) == (spec.trigger_id, {"number": 7}, "abc")
    assert again.trigger_run_id != spec.trigger_run_id
    supervisor.pass_time(QUIET_S)
    assert supervisor.created() == [], "once"


def test_a_watcher_without_a_stream_is_restarted_alone(world: World) -> None:
    add_watchers(world, 2)
    supervisor = world.supervisor()
    supervisor.start_runner()
    specs = supervisor.created()
    describe(supervisor, "", *specs)
    world.store.restart_watcher("w1")
    supervisor.pass_time(1.1)
    syncs = [sync for sync in supervisor.sent(StateSync) if sync.to_cancel]
    assert syncs == [StateSync(to_cancel=(CancelTrigger(specs[1].trigger_id, "reassigned"),))]
    supervisor.round(finished=(cancelled(specs[1]),))
    assert [again.name for again in supervisor.created()] == ["w1"]


def test_a_change_of_the_stream_is_described_before_the_trigger_joins_another(world: World) -> None:
    supervisor, (spec, other) = started(world, 2)
    world.store.change_watcher("w0", kwargs={"path": "elsewhere"})
    supervisor.pass_time(1.1)
    supervisor.round(finished=(cancelled(spec),))
    (again,) = supervisor.created()
    assert again.stream == "abc", "so that the runner tells that it has another one"
    describe(supervisor, "xyz", again)
    (moved,) = supervisor.created()
    assert (moved.trigger_id, moved.stream, kwargs_of(moved)) == (spec.trigger_id, "xyz", {"path": "elsewhere"})
    claimed = world.store.claimed_triggers(supervisor.core.leases.epoch)
    assert [(one.id, one.stream) for one in claimed] == [(spec.trigger_id, "xyz"), (other.trigger_id, "abc")]


def test_a_change_while_the_run_ends_for_another_change_takes_the_newest_values(world: World) -> None:
    supervisor, (spec,) = started(world, 1)
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(1.1)
    world.store.change_watcher("w0", kwargs={"number": 8})
    supervisor.pass_time(1.1)
    supervisor.round(finished=(cancelled(spec),))
    assert [kwargs_of(again) for again in supervisor.created()] == [{"number": 8}]


def test_a_failing_watcher_that_is_changed_need_not_wait_for_its_next_try(world: World) -> None:
    supervisor, (spec,) = started(world, 1)
    for failures in range(6):
        supervisor.round(finished=(FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "failed", 0, "no"),))
        if failures < 5:
            supervisor.pass_time_with_heartbeats(40.0)
            (spec,) = supervisor.created()
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(1.1)
    assert [kwargs_of(again) for again in supervisor.created()] == [{"number": 7}]


def test_a_paused_watcher_that_is_changed_starts_with_the_new_values_when_it_is_resumed(world: World) -> None:
    supervisor, (spec,) = started(world, 1)
    world.store.pause_watcher("w0")
    supervisor.pass_time(1.1)
    supervisor.round(finished=(cancelled(spec),))
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(QUIET_S)
    assert supervisor.created() == []
    world.store.resume_watcher("w0")
    supervisor.pass_time(1.1)
    assert [kwargs_of(again) for again in supervisor.created()] == [{"number": 7}]


def test_a_change_does_not_end_the_quarantine_nor_the_wait_for_it(world: World) -> None:
    supervisor, (spec, _) = started(world, 2)
    hold(supervisor, spec.trigger_id)
    supervisor.round(finished=(cancelled(spec),))
    supervisor.sent(StateSync)
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(QUIET_S)
    assert [sync for sync in supervisor.sent(StateSync) if sync.to_create or sync.to_cancel] == []


def test_a_removed_watcher_that_was_changed_before_is_not_started_again(world: World) -> None:
    supervisor, (spec,) = started(world, 1)
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(1.1)
    world.store.remove_watcher("w0")
    supervisor.pass_time(1.1)
    supervisor.round(finished=(cancelled(spec),))
    supervisor.pass_time(QUIET_S)
    assert supervisor.created() == []


def test_a_watcher_that_had_returned_runs_again_when_it_is_restarted(world: World) -> None:
    supervisor, (spec,) = started(world, 1)
    supervisor.round(finished=(FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "returned", 1),))
    supervisor.pass_time(QUIET_S)
    assert supervisor.created() == []
    world.store.restart_watcher("w0")
    supervisor.pass_time(1.1)
    assert [again.trigger_id for again in supervisor.created()] == [spec.trigger_id]


def returned(spec: TriggerSpec) -> FinishedTrigger:
    return FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "returned", 1)


def test_a_watcher_that_returned_when_it_was_being_changed_runs_with_its_new_values(world: World) -> None:
    supervisor, (spec, _) = started(world, 2)
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(1.1)
    supervisor.sent(StateSync)
    supervisor.round(finished=(returned(spec),))
    syncs = supervisor.sent(StateSync)
    assert [sync.to_cancel for sync in syncs if sync.to_cancel] == [], "its stream waits until it is started"
    (again,) = [spec for sync in syncs for spec in sync.to_create]
    assert (kwargs_of(again), again.stream) == ({"number": 7}, "abc")
    supervisor.round(finished=(returned(again),))
    supervisor.pass_time(QUIET_S)
    assert supervisor.created() == [], "that one has returned"
    assert world.store.change_watcher("w0", max_deliveries=3).is_finished


def test_a_watcher_that_returned_before_its_restart_was_read_runs_again(world: World) -> None:
    supervisor, (spec, _) = started(world, 2)
    world.store.restart_watcher("w0")
    supervisor.round(finished=(returned(spec),))
    supervisor.pass_time(POLL_S)
    (again,) = supervisor.created()
    assert (again.trigger_id, again.stream) == (spec.trigger_id, "abc")
    supervisor.round(finished=(returned(again),))
    supervisor.pass_time(QUIET_S)
    assert supervisor.created() == [], "that one has returned"


def test_a_return_that_is_stored_after_the_restart_was_read_does_not_end_the_watcher(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, (spec, _) = started(world, 2)

    def away(*_: Any, **__: Any) -> Any:
        raise DatabaseAway("db", "no answer")

    with monkeypatch.context() as patches:
        patches.setattr(world.store, "store_slice", away)
        supervisor.core.receive(1, StateChanges(round=1, finished=(returned(spec),)), world.now)
        world.store.restart_watcher("w0")
        supervisor.pass_time(1.1)
        assert [sync.to_cancel for sync in supervisor.sent(StateSync) if sync.to_cancel] != [], "it was read"
    supervisor.pass_time(QUIET_S)
    assert [again.trigger_id for again in supervisor.created()] == [spec.trigger_id]


def test_a_watcher_that_returned_after_a_pause_was_ended_is_over(world: World) -> None:
    supervisor, (spec, _) = started(world, 2)
    world.store.pause_watcher("w0")
    supervisor.pass_time(1.1)
    world.store.resume_watcher("w0")
    supervisor.pass_time(1.1)
    supervisor.sent(StateSync)
    supervisor.round(finished=(returned(spec),))
    (sync,) = [sync for sync in supervisor.sent(StateSync) if sync.to_cancel or sync.to_create]
    assert sync.to_cancel == (CancelTrigger(spec.trigger_id, "timeout"),), "no stream waits for it"
    supervisor.pass_time(QUIET_S)
    assert supervisor.created() == []


def test_a_runner_that_dies_during_a_change_is_followed_by_one_with_the_new_values(world: World) -> None:
    supervisor, (spec, _) = started(world, 2)
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(1.1)
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.pass_time(1.0)
    supervisor.start_runner()
    assert [kwargs_of(again) for again in supervisor.created()] == [{"number": 7}, {"number": 1}]
    assert supervisor.core.assignments.is_running(spec.trigger_id)


def test_a_supervisor_that_takes_over_starts_what_the_user_asked_for(world: World) -> None:
    started(world, 1)
    world.store.change_watcher("w0", kwargs={"number": 7})
    world.now += 60.0
    later = world.supervisor(pid=2, is_gone=lambda row: True)
    later.start_runner()
    assert [kwargs_of(again) for again in later.created()] == [{"number": 7}]
    later.pass_time(QUIET_S)
    assert [sync.to_cancel for sync in later.sent(StateSync) if sync.to_cancel] == []


def test_a_change_whose_reading_may_have_been_committed_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, (spec,) = started(world, 1)
    take = world.store.take_changes
    lost = [True]

    def committed_without_an_answer(*arguments: Any) -> Any:
        found = take(*arguments)
        if lost:
            lost.clear()
            raise DatabaseAway("db", "no answer")
        return found

    monkeypatch.setattr(world.store, "take_changes", committed_without_an_answer)
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(QUIET_S)
    assert not lost
    supervisor.round(finished=(cancelled(spec),))
    assert [kwargs_of(again) for again in supervisor.created()] == [{"number": 7}]


def test_more_changes_than_are_read_at_once_are_all_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CHANGES_AT_ONCE_MAX", 2)
    supervisor, specs = started(world, 5)
    for number in range(5):
        world.store.restart_watcher(f"w{number}")
    supervisor.pass_time(1.1)
    cancelled_ids = [cancel.trigger_id for sync in supervisor.sent(StateSync) for cancel in sync.to_cancel]
    assert cancelled_ids == [spec.trigger_id for spec in specs]


# --- watchers that leave, or could not be started ------------------------------------------------


def moving(world: World) -> tuple[Supervised, TriggerSpec, Supervised]:
    """Return a supervisor that has read that its trigger is moved to another queue, and one that serves this."""
    supervisor, (spec,) = started(world, 1)
    fast = world.supervisor(msgspec.structs.replace(SETTINGS, queues=("fast",)), pid=2)
    fast.start_runner()
    world.store.change_watcher("w0", queue="fast")
    supervisor.pass_time(1.1)
    return supervisor, spec, fast


def test_a_watcher_that_is_moved_to_another_queue_is_left_to_a_supervisor_that_serves_it(world: World) -> None:
    supervisor, spec, fast = moving(world)
    assert [sync.to_cancel for sync in supervisor.sent(StateSync) if sync.to_cancel] == [
        (CancelTrigger(spec.trigger_id, "reassigned"),)
    ]
    fast.pass_time(POLL_S)
    assert fast.created() == [], "its run has not ended"
    supervisor.round(finished=(cancelled(spec),))
    supervisor.pass_time(1.1)
    fast.pass_time(POLL_S)
    (moved,) = fast.created()
    assert (moved.trigger_id, moved.stream) == (spec.trigger_id, "abc")
    assert supervisor.created() == []


def test_a_watcher_that_returned_when_it_was_being_moved_runs_in_its_new_queue(world: World) -> None:
    supervisor, spec, fast = moving(world)
    supervisor.round(finished=(returned(spec),))
    supervisor.pass_time(1.1)
    fast.pass_time(POLL_S)
    assert [moved.trigger_id for moved in fast.created()] == [spec.trigger_id]


def test_a_watcher_whose_kwargs_no_key_could_decrypt_starts_with_new_ones(world: World) -> None:
    other_keys = "OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg="
    add_watchers(world, 1)
    with world.engine.begin() as connection:
        foreign = Secrets([other_keys], source="a test").encrypt(b"{}")
        connection.exec_driver_sql("UPDATE trigger SET kwargs = ?", (foreign,))
    supervisor = world.supervisor()
    supervisor.start_runner()
    assert supervisor.created() == []
    world.store.change_watcher("w0", kwargs={"number": 7})
    supervisor.pass_time(1.1)
    assert [kwargs_of(spec) for spec in supervisor.created()] == [{"number": 7}]
