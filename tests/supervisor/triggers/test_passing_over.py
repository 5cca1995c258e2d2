"""A message that a trigger fails on again and again is passed over, and the trigger goes on at once."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import update
from tests.supervisor.core_harness import Supervised, World, add_watchers

from headgate.protocol.link.splitting import split_sync
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import (
    PASSED_OVER_KEYS_MAX,
    CancelTrigger,
    FinishedTrigger,
    StateChanges,
    StateSync,
    TriggerSpec,
)
from headgate.store.ids import Epoch
from headgate.store.tables import trigger
from headgate.store.triggers.leases import ClaimedTrigger
from headgate.store.triggers.strikes import BRAKE_IN_A_ROW
from headgate.supervisor.triggers.assignments import Assignments

MAX_DELIVERIES = 5  # of a watcher, by default
CHANGES = StateChanges(1)


def start(world: World, *, pid: int = 1) -> tuple[Supervised, TriggerSpec]:
    supervisor = world.supervisor(pid=pid, is_gone=lambda row: True)
    supervisor.start_runner()
    (spec,) = supervisor.created()
    return supervisor, spec


def fail(supervisor: Supervised, spec: TriggerSpec, key: str | None) -> tuple[TriggerSpec, float]:
    """Have the run fail on a message; return the next start of the trigger, and the seconds that it took."""
    failure = FinishedTrigger(
        spec.trigger_id, spec.trigger_run_id, "failed", 0, error="ValueError: no", message_key=key
    )
    supervisor.round(finished=(failure,))
    failed_at = supervisor.world.now
    while supervisor.core.assignments.running() == 0:
        supervisor.pass_time(0.1)
    (again,) = supervisor.created()
    return again, supervisor.world.now - failed_at


def test_after_the_last_delivery_the_trigger_is_started_without_the_message_and_after_the_first_wait(
    world: World,
) -> None:
    add_watchers(world, 1)
    supervisor, spec = start(world)
    waits = []
    for _ in range(MAX_DELIVERIES):
        assert spec.passed_over == ()
        spec, wait_s = fail(supervisor, spec, "poison")
        waits.append(wait_s)
    assert spec.passed_over == ("poison",)
    assert waits[-2] >= 8.0
    assert waits[-1] <= 1.7
    (row,) = world.store.inspect.triggers()
    assert row.failure_count == 0


def test_failures_without_a_message_go_on_waiting_longer(world: World) -> None:
    add_watchers(world, 1)
    supervisor, spec = start(world)
    waits = []
    for _ in range(MAX_DELIVERIES + 1):
        spec, wait_s = fail(supervisor, spec, None)
        waits.append(wait_s)
    assert spec.passed_over == ()
    assert waits[-1] >= 32.0


def test_without_order_each_message_has_its_own_waits(world: World) -> None:
    """Each run may meet another one first, so none would have had its tries for hours."""
    add_watchers(world, 1)
    supervisor, spec = start(world)
    messages = [f"poison {number}" for number in range(4)]
    waits = []
    for _ in range(MAX_DELIVERIES):
        for key in messages:
            spec, wait_s = fail(supervisor, spec, key)
            waits.append(wait_s)
    assert set(spec.passed_over) == set(messages)
    assert max(waits) <= 9.0
    assert sum(waits) <= 4 * (1 + 2 + 4 + 8 + 1) * 1.2


def test_each_message_has_its_own_strikes(world: World) -> None:
    add_watchers(world, 1)
    supervisor, spec = start(world)
    for key in ("a", "b", "c") * (MAX_DELIVERIES - 1):
        spec, _ = fail(supervisor, spec, key)
        assert spec.passed_over == ()
    for key in ("b", "a"):
        spec, _ = fail(supervisor, spec, key)
    assert spec.passed_over == ("b", "a")


def test_the_next_runner_and_the_next_supervisor_pass_over_the_same_messages(world: World) -> None:
    add_watchers(world, 1)
    supervisor, spec = start(world)
    for _ in range(MAX_DELIVERIES):
        spec, _ = fail(supervisor, spec, "poison")
    supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.pass_time(1.0)
    supervisor.start_runner()
    assert [spec.passed_over for spec in supervisor.created()] == [("poison",)]
    _, spec = start(world, pid=2)
    assert spec.passed_over == ("poison",)


def test_a_report_that_is_stored_after_the_death_of_its_runner_is_known_to_the_next_runner(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_watchers(world, 1)
    supervisor, spec = start(world)
    for _ in range(MAX_DELIVERIES - 1):
        spec, _ = fail(supervisor, spec, "poison")
    failure = FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "failed", 0, error="x", message_key="poison")
    with monkeypatch.context() as patch:
        patch.setattr(supervisor.core.intake, "step", lambda epoch, now: None)
        supervisor.core.receive(1, msgspec.structs.replace(CHANGES, finished=(failure,)), world.now)
        supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
    supervisor.pass_time(1.0)
    supervisor.start_runner()
    assert [spec.passed_over for spec in supervisor.created()] == [("poison",)]


# --- the brake -----------------------------------------------------------------------------------


def test_a_trigger_that_fails_on_one_message_after_the_other_is_held_until_it_is_released(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    with world.engine.begin() as connection:
        connection.execute(update(trigger).values(max_deliveries=1))
    supervisor, spec = start(world)
    for number in range(BRAKE_IN_A_ROW):
        spec, _ = fail(supervisor, spec, f"k{number}")
    supervisor.sent(StateSync)
    failure = FinishedTrigger(trigger_id, spec.trigger_run_id, "failed", 0, error="ValueError: no", message_key="last")
    supervisor.round(finished=(failure,))
    assert CancelTrigger(trigger_id, "reassigned") in [c for sync in supervisor.sent(StateSync) for c in sync.to_cancel]
    supervisor.pass_time_with_heartbeats(60.0)
    assert supervisor.created() == []

    assert world.store.release_trigger(trigger_id) == "brake"
    supervisor.pass_time_with_heartbeats(10.0)
    (spec,) = supervisor.created()
    assert spec.passed_over[-1] == "last"


# --- limits --------------------------------------------------------------------------------------


def assignments(frame_bytes_max: int) -> Assignments:
    return Assignments(retry_wait_s=1.0, retry_wait_max_s=8.0, healthy_s=60.0, frame_bytes_max=frame_bytes_max)


def claimed(*keys: str) -> ClaimedTrigger:
    return ClaimedTrigger(1, "w", "a.B", b"{}", "default", 0, passed_over=keys)


def started(assigned: Assignments) -> tuple[str, ...]:
    (spec,) = assigned.start_due(Epoch(1), 1, 0.0)
    return spec.passed_over


def test_a_spec_names_no_more_than_the_newest_messages() -> None:
    assigned = assignments(16 * 1024 * 1024)
    keys = [f"key {number}" for number in range(PASSED_OVER_KEYS_MAX + 1)]
    assigned.assign([claimed(*keys[:-1])], 0.0)
    assigned.pass_over(1, keys[-1])
    assigned.pass_over(4711, "of a trigger that is not owned")
    assert started(assigned) == tuple(keys[1:])


def test_a_message_passed_over_again_is_named_once_and_is_the_newest() -> None:
    assigned = assignments(16 * 1024 * 1024)
    assigned.assign([claimed("a", "b", "c")], 0.0)
    assigned.pass_over(1, "a")
    assert started(assigned) == ("b", "c", "a")


@pytest.mark.parametrize("frame_bytes_max", [300, 320, 1000, 5000])
def test_a_spec_with_long_keys_fits_a_frame(frame_bytes_max: int) -> None:
    assigned = assignments(frame_bytes_max)
    keys = tuple("é" * 100 + str(number) for number in range(20))
    assert assigned.assign([claimed(*keys)], 0.0) == []
    specs = assigned.start_due(Epoch(1), 1, 0.0)
    (piece,) = split_sync(StateSync(to_create=specs), frame_bytes_max)
    assert len(encode_message(piece)) <= frame_bytes_max
    room = (frame_bytes_max - 300) // 410
    assert specs[0].passed_over == (keys[-room:] if room else ())
