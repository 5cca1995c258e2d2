"""Triggers that end for good: removed by a user, or of no use to their task any more."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from tests.store import ends
from tests.supervisor.core_harness import SETTINGS, Supervised, World, add_watchers, fired

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    CancelTrigger,
    FinishedTrigger,
    Hello,
    StateChanges,
    StateSync,
)
from headgate.protocol.messages.task_streams import StreamOptions
from headgate.protocol.values import encode_value
from headgate.store.errors import DatabaseAway
from headgate.store.ids import Epoch, TryName
from headgate.store.tables import trigger
from headgate.store.tasks.deferral import Deferral
from headgate.store.triggers.leases import ClaimedTrigger
from headgate.supervisor.commands import Spawn
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.logs.task_logs import TaskLogs
from headgate.supervisor.triggers import assignments
from headgate.supervisor.triggers.leases import Identity


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


def test_a_removed_trigger_keeps_its_owner_while_events_of_a_dead_runner_are_not_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader leaves a removed trigger as soon as it has no owner: then no event of it may come any more."""
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()

    def away(*args: object, **kwargs: object) -> None:
        raise DatabaseAway("here", "only for events")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "store_slice", away)
        supervisor.core.receive(1, StateChanges(1, (fired(spec, 0),)), world.now)
        supervisor.core.runner_ended(1, "killed by SIGKILL", world.now)
        world.store.remove_watcher("w0")
        supervisor.pass_time(5.0)
        assert owner_of(world, trigger_id) == supervisor.core.leases.epoch
    supervisor.pass_time(60.0)
    assert owner_of(world, trigger_id) is None
    assert [event.trigger_id for event in world.store.inspect.events()] == [trigger_id]


def owner_of(world: World, trigger_id: int) -> int | None:
    with world.store.database.reading() as tx:
        (owner,) = tx.connection.execute(select(trigger.c.triggerer_id).where(trigger.c.id == trigger_id)).one()
        return None if owner is None else int(owner)


class Said(TaskLogs):
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
    assert ends.defer(world.store.tasks, epoch, task.id, task.token, wait)
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
    for spec in assigned.start_due(Epoch(1), 1, 0.0):
        assigned.end_run(FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "returned", 1), 0.0)
    assert [assigned.task_of(number) for number in range(4)] == [None, None, *names[2:]]


class Waiting:
    """A task that waits for a trigger, which the runner of a supervisor has been given."""

    def __init__(self, world: World, stream: StreamOptions | None = None) -> None:
        self.world, self.verbs = world, world.store.tasks
        self.supervisor = world.supervisor()
        self.supervisor.start_runner()
        self.epoch = self.supervisor.core.leases.epoch
        task = TaskSpec("a", "Op", retries=1, retry_delay_s=0.0)
        self.verbs.save_file(self.epoch, "f.py", [DagSpec("d", tasks=(task,))])
        run = self.verbs.create_run("d", "r")
        assert run is not None
        world.store.scheduling.plan(self.epoch)
        (given,) = self.verbs.dispatch(self.epoch, limit=1, queues=("default",)).tasks
        self.task = given.id
        empty = encode_value({}, where="kwargs")
        self.wait = Deferral("a.B", empty, "resume", empty, timeout_s=3.0, stream=stream)
        ends.defer(self.verbs, self.epoch, given.id, given.token, self.wait)
        self.supervisor.pass_time(SETTINGS.lease.poll_interval_s - 3.0)
        (self.spec,) = self.supervisor.created()

    def fail_and_defer_again(self) -> None:
        """Have a step of the task fail, and its next try defer anew."""
        for _ in ("the step that fails", "the next try"):
            (given,) = self.verbs.dispatch(self.epoch, limit=1, queues=("default",)).tasks
            if given.next_method is None:
                ends.defer(self.verbs, self.epoch, given.id, given.token, self.wait)
            else:
                ends.fail(self.verbs, self.epoch, given.id, given.token, "boom")
                self.verbs.retry_due(self.epoch)

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


def test_a_trigger_whose_task_this_supervisor_has_timed_out_is_cancelled_in_its_next_step(world: World) -> None:
    waiting = Waiting(world)
    world.now += 3.0
    assert waiting.verbs.time_out(waiting.epoch) == [waiting.task]
    waiting.supervisor.core.leases.poll_soon()  # as the part for tasks has it done
    waiting.supervisor.settle()
    assert waiting.cancels() == [CancelTrigger(waiting.spec.trigger_id, "timeout")]
    waiting.ends("cancelled", "timeout")
    assert waiting.owner is None
    assert len(waiting.supervisor.core.assignments) == 0
    assert world.store.poll(waiting.epoch, ("default",)).ended == []


def test_a_trigger_whose_task_another_has_timed_out_is_cancelled_at_the_next_poll(world: World) -> None:
    waiting = Waiting(world)
    world.now += 3.0
    other = world.store.register_triggerer(
        hostname="h", pid=9, machine="m", process_started=0.0, capacity=1, queues=("of its own",)
    )
    assert waiting.verbs.time_out(other) == [waiting.task]
    waiting.supervisor.pass_time(SETTINGS.lease.poll_interval_s)
    assert waiting.cancels() == [CancelTrigger(waiting.spec.trigger_id, "timeout")]


def test_the_trigger_of_a_task_takes_one_event_and_that_of_a_watcher_any_number(world: World) -> None:
    waiting = Waiting(world)
    assert waiting.spec.takes_one_event
    add_watchers(world, 1)
    waiting.supervisor.pass_time(SETTINGS.lease.poll_interval_s)
    (spec,) = waiting.supervisor.created()
    assert not spec.takes_one_event


def test_a_trigger_that_has_fired_is_ended_by_its_runner_without_a_request(world: World) -> None:
    waiting = Waiting(world)
    waiting.supervisor.round(fired(waiting.spec, 0))
    waiting.supervisor.pass_time(SETTINGS.lease.poll_interval_s)
    assert world.store.poll(waiting.epoch, ("default",)).ended == [waiting.spec.trigger_id]
    waiting.ends("returned")
    waiting.supervisor.pass_time(2 * SETTINGS.lease.poll_interval_s)
    assert waiting.cancels() == []
    assert waiting.owner is None


def test_a_trigger_that_has_fired_is_not_started_again_though_it_fails_or_its_runner_dies(world: World) -> None:
    waiting = Waiting(world)
    waiting.supervisor.round(fired(waiting.spec, 0))
    waiting.supervisor.core.runner_ended(waiting.supervisor.core.runner.incarnation, "killed", world.now)
    waiting.supervisor.pass_time(1.0)
    waiting.supervisor.start_runner()
    waiting.supervisor.pass_time(2 * SETTINGS.lease.poll_interval_s)
    assert waiting.supervisor.created() == []
    assert waiting.owner is None
    assert len(waiting.supervisor.core.assignments) == 0


@pytest.mark.parametrize("outcome", ["cancelled", "returned", "failed"])
def test_a_stream_goes_on_with_its_trigger_once_the_run_of_the_try_before_has_ended(world: World, outcome: str) -> None:
    waiting = Waiting(world, StreamOptions())
    waiting.supervisor.round(fired(waiting.spec, 0))
    waiting.fail_and_defer_again()
    waiting.supervisor.core.leases.poll_soon()  # as the part for tasks has it done
    waiting.supervisor.settle()
    assert waiting.cancels() == [CancelTrigger(waiting.spec.trigger_id, "timeout")]
    waiting.supervisor.pass_time(2 * SETTINGS.lease.poll_interval_s)
    assert waiting.supervisor.created() == [], "its old run has not ended"
    waiting.ends(outcome, error="no" if outcome == "failed" else "")
    (again,) = waiting.supervisor.created()  # and not at the next poll
    assert again.trigger_id == waiting.spec.trigger_id
    assert again.trigger_run_id != waiting.spec.trigger_run_id
    waiting.supervisor.pass_time(2 * SETTINGS.lease.poll_interval_s)
    assert waiting.owner == waiting.epoch, "it is not released with the run that has ended"
    assert waiting.supervisor.core.assignments.is_running(again.trigger_id)


def test_a_trigger_that_is_claimed_anew_at_once_is_not_released_with_its_last_run(world: World) -> None:
    waiting = Waiting(world, StreamOptions())
    waiting.supervisor.round(fired(waiting.spec, 0))
    waiting.fail_and_defer_again()
    waiting.supervisor.core.leases.poll_soon()
    waiting.supervisor.settle()
    core, spec = waiting.supervisor.core, waiting.spec
    end = FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "returned", 1)
    core.receive(core.runner.incarnation, StateChanges(2, finished=(end,)), world.now)
    waiting.supervisor.commands += core.step(world.now)  # the end is stored, and the trigger is free
    core.leases.poll_soon()  # so it is claimed before anything else is done
    waiting.supervisor.settle()
    (again,) = waiting.supervisor.created()
    assert (again.trigger_id, waiting.owner) == (spec.trigger_id, waiting.epoch)
    assert core.assignments.is_running(again.trigger_id)


def test_an_event_that_is_stored_after_the_death_of_its_runner_ends_its_trigger(world: World) -> None:
    waiting = Waiting(world)
    core = waiting.supervisor.core
    core.receive(core.runner.incarnation, StateChanges(1, (fired(waiting.spec, 0),)), world.now)
    core.runner_ended(core.runner.incarnation, "killed", world.now)
    waiting.supervisor.pass_time(1.0)
    waiting.supervisor.start_runner()
    waiting.supervisor.pass_time(2 * SETTINGS.lease.poll_interval_s)
    assert waiting.supervisor.created() == []
    assert waiting.owner is None
    assert len(core.assignments) == 0


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
    waiting.supervisor.pass_time(2 * SETTINGS.lease.poll_interval_s)
    assert waiting.owner is None
    assert len(waiting.supervisor.core.assignments) == 0
