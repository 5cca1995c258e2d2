"""Failures in a row are over once a trigger has run well for a while: in the store, and for its next wait."""

from __future__ import annotations

import pytest
from tests.supervisor.core_harness import SETTINGS, Supervised, World, add_watchers, cut_off

from headgate.protocol.messages.runner import FinishedTrigger, TriggerSpec
from headgate.store.errors import DatabaseAway

HEALTHY_S = SETTINGS.respawn_healthy_s


def fail(supervisor: Supervised, spec: TriggerSpec) -> TriggerSpec:
    supervisor.round(finished=(FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "failed", 0, error="x"),))
    while supervisor.core.assignments.running() == 0:
        supervisor.pass_time(0.1)
    (again,) = supervisor.created()
    return again


def failures(world: World) -> int:
    (row,) = world.store.inspect.triggers()
    return row.failure_count


@pytest.fixture
def failing(world: World) -> Supervised:
    """A supervisor whose one trigger has failed three times, and runs again."""
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    for _ in range(3):
        spec = fail(supervisor, spec)
    assert failures(world) == 3
    return supervisor


def test_a_trigger_that_has_run_well_for_long_enough_does_not_count_as_failing(
    world: World, failing: Supervised
) -> None:
    failing.pass_time_with_heartbeats(HEALTHY_S - 1.0)
    assert failures(world) == 3
    failing.pass_time_with_heartbeats(2.0)
    assert failures(world) == 0
    (row,) = world.store.inspect.triggers()
    assert row.last_error == "x", "what happened last is still known"


def test_a_trigger_that_fails_again_before_that_still_counts_as_failing(world: World, failing: Supervised) -> None:
    failing.pass_time_with_heartbeats(HEALTHY_S - 2.0)
    (assigned,) = failing.core.assignments._assigned.values()
    spec = TriggerSpec(assigned.trigger.id, assigned.trigger_run_id, "", "", b"")
    fail(failing, spec)
    failing.pass_time_with_heartbeats(HEALTHY_S - 2.0)
    assert failures(world) == 4


def test_the_failures_of_a_trigger_that_was_taken_over_are_forgotten_by_the_new_owner(
    world: World, failing: Supervised
) -> None:
    other = world.supervisor(pid=2, is_gone=lambda row: True)
    other.start_runner()
    assert len(other.created()) == 1
    other.pass_time_with_heartbeats(HEALTHY_S + 1.0)
    assert failures(world) == 0


def test_it_is_tried_again_if_the_database_is_away(
    world: World, failing: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def away(*_: object) -> None:
        tries.append(world.now)
        raise DatabaseAway("db", "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "reset_failures", away)
        failing.pass_time_with_heartbeats(HEALTHY_S + 5.0)
        assert 2 <= len(tries) <= 10
    failing.pass_time_with_heartbeats(5.0)
    assert failures(world) == 0


def test_nothing_is_written_while_nothing_has_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    add_watchers(world, 2)
    supervisor = world.supervisor()
    supervisor.start_runner()

    def never(*_: object) -> None:
        raise AssertionError("no trigger has failed")

    monkeypatch.setattr(world.store, "reset_failures", never)
    supervisor.pass_time_with_heartbeats(HEALTHY_S + 5.0)
    assert supervisor.core.recoveries.wake_at() is None


def test_a_core_that_is_cut_off_rests(world: World, failing: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(world, monkeypatch)
    failing.pass_time(20.0)
