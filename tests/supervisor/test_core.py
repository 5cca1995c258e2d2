"""The core on a real store in memory and a clock of the test: messages in, commands out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.supervisor.core_harness import SETTINGS, World, add_watchers, fired, stored

from headgate.protocol.link.splitting import split_sync
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import (
    FinishedTrigger,
    RunnerSettings,
    StateChanges,
    StateSync,
)
from headgate.protocol.values import encode_value
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.supervisor.runner_lifecycle import RunnerState

SMALL_FRAMES = msgspec.structs.replace(SETTINGS, runner=RunnerSettings(frame_bytes_max=1000))


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
