"""The lease as the core keeps it (I10): what an answer says of it, what follows when it is lost, who takes over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.supervisor.core_harness import SETTINGS, World, add_watchers, cut_off, fired, stored

from headgate.protocol.messages.runner import (
    CancelTrigger,
    Drain,
    FinishedTrigger,
    RunnerFigures,
    StateChanges,
    StateSync,
    StreamFigures,
)
from headgate.store.errors import DatabaseAway
from headgate.store.facts.supervisor_status import StreamStatus, SupervisorStatus, encode_status, published
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.supervisor import commands
from headgate.supervisor.commands import EXIT_CUT_OFF, DumpStacks, Exit, Kill
from headgate.supervisor.triggers.leases import ADVANCE_SHARE, FAIR_WAIT_S

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
    (sure_s,) = supervisor.leases()
    assert sure_s is not None
    assert sure_s > LASTS_S - SETTINGS.database_retry_wait_max_s - 1.0


def test_what_is_stored_is_confirmed_whether_the_lease_lasts_or_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()

    def away(epoch: Epoch, status: str | None) -> None:
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


def test_a_supervisor_that_is_cut_off_for_too_long_gives_up_what_it_holds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off_max_s = 2 * SETTINGS.lease.silence_max_s
    lease = msgspec.structs.replace(SETTINGS.lease, cut_off_max_s=cut_off_max_s)
    supervisor = world.supervisor(settings=msgspec.structs.replace(SETTINGS, lease=lease))
    supervisor.start_runner()
    with monkeypatch.context() as patch:
        cut_off(world, patch)
        supervisor.pass_time_with_heartbeats(cut_off_max_s - SETTINGS.lease.heartbeat_s - 1)
    supervisor.pass_time_with_heartbeats(2 * SETTINGS.lease.heartbeat_s)  # a shorter one does not count
    supervisor.take(Exit)
    with monkeypatch.context() as patch:
        cut_off(world, patch)
        supervisor.pass_time_with_heartbeats(cut_off_max_s - SETTINGS.lease.heartbeat_s - 1)
        assert supervisor.take(Exit) == []
        supervisor.pass_time(2 * SETTINGS.lease.heartbeat_s)
    assert [type(command) for command in supervisor.commands[-2:]] == [Kill, Exit]
    assert supervisor.take(Exit)[0].code == EXIT_CUT_OFF


def test_a_drain_that_is_cut_off_ends_by_its_own_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = msgspec.structs.replace(SETTINGS.lease, cut_off_max_s=SETTINGS.lease.silence_max_s + 1)
    settings = msgspec.structs.replace(SETTINGS, lease=lease, drain_s=10 * SETTINGS.lease.silence_max_s)
    supervisor = world.supervisor(settings=settings)
    supervisor.start_runner()
    cut_off(world, monkeypatch)
    supervisor.core.drain(world.now)
    supervisor.pass_time_with_heartbeats(5 * SETTINGS.lease.silence_max_s)
    assert supervisor.take(Exit) == []


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


def test_the_triggers_of_a_silent_supervisor_are_taken_over_and_it_writes_nothing_more(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    silent = world.supervisor()
    silent.start_runner()
    (spec,) = silent.created()
    other = world.supervisor(pid=2)
    other.start_runner()
    other.pass_time_with_heartbeats(29.0)
    assert other.created() == []
    other.pass_time_with_heartbeats(7.0)
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


def test_more_triggers_than_one_claim_takes_start_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.supervisor.triggers.leases.CLAIM_TRIGGERS_MAX", 2)
    add_watchers(world, 5)
    supervisor = world.supervisor()
    supervisor.start_runner()
    syncs = [sync for sync in supervisor.sent(StateSync) if sync.to_create]
    assert [len(sync.to_create) for sync in syncs] == [5]


def test_no_more_triggers_than_the_capacity_are_claimed(world: World) -> None:
    add_watchers(world, 13)
    one = world.supervisor()
    one.start_runner()
    assert len(one.created()) == SETTINGS.capacity
    other = world.supervisor(pid=2)
    other.start_runner()
    assert len(other.core.assignments) == 2  # its share, as long as the first one might want some, too
    assert other.created() == [], "what the others leave may belong to these, and all of a stream begin together"
    other.pass_time(FAIR_WAIT_S + SETTINGS.lease.look_interval_s)
    assert len(other.created()) == 3


def test_room_that_becomes_free_is_used_at_once_although_nobody_else_writes(world: World) -> None:
    add_watchers(world, 13)
    supervisor = world.supervisor()
    supervisor.start_runner()
    specs = supervisor.created()
    supervisor.round(finished=tuple(FinishedTrigger(s.trigger_id, s.trigger_run_id, "returned", 1) for s in specs[:2]))
    supervisor.pass_time(SETTINGS.lease.listen_pause_max_s)
    assert len(supervisor.created()) == 2
    assert SETTINGS.lease.listen_pause_max_s < SETTINGS.lease.poll_interval_s, "or this would show nothing"


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

    def noted_heartbeat(epoch: Epoch, status: str | None) -> None:
        calls.append("heartbeat")
        heartbeat(epoch, status)

    monkeypatch.setattr(world.store, "store_slice", slow_store)
    monkeypatch.setattr(world.store, "heartbeat", noted_heartbeat)
    supervisor.round(*(fired(spec, index) for index in range(30)))
    assert calls.count("slice") == 6
    longest = max(len(part) for part in "".join(call[0] for call in calls).split("h"))
    assert longest <= 2, f"a heartbeat is due every 5 s, and a slice takes 4: {calls}"


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
    assert steps < 20 * 6, "a look every 0.5 s, as no bell rings for a database in memory, and the duties"
    assert 0 < len(asked) <= 20, "a query a second at most"


def test_what_a_supervisor_says_of_itself_goes_with_heartbeats_and_only_if_it_has_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_watchers(world, 1)
    supervisor = world.supervisor()
    written: list[str | None] = []
    heartbeat = world.store.heartbeat

    def noted(epoch: Epoch, status: str | None = None) -> None:
        heartbeat(epoch, status)
        written.append(status)

    monkeypatch.setattr(world.store, "heartbeat", noted)
    supervisor.start_runner()
    epoch = supervisor.core.leases.epoch

    def said() -> SupervisorStatus:
        with world.store.database.reading() as tx:
            return published(tx, [epoch])[epoch].status

    supervisor.pass_time_with_heartbeats(30.0)
    assert len(written) == 6
    assert [status is None for status in written] == [False, *[True] * 5]
    assert said() == SupervisorStatus(runner="running", incarnation=1, owned=1, running=1)
    figures = RunnerFigures((StreamFigures("d" * 40, "the log", in_flight=3, lag=7),), 1)
    supervisor.round(figures=figures)
    supervisor.pass_time_with_heartbeats(10.0)
    assert [status is None for status in written[6:]] == [False, True]
    assert said().streams == (StreamStatus("d" * 40, in_flight=3, lag=7),)
    supervisor.core.runner_ended(1, "killed", world.now)
    supervisor.pass_time(1.0)
    supervisor.start_runner()
    supervisor.core.receive(1, StateChanges(9, figures=figures), world.now)  # of the runner that is gone
    supervisor.pass_time_with_heartbeats(5.0)
    assert (said().incarnation, said().streams) == (2, ())


def test_what_does_not_fit_is_left_out_from_the_end() -> None:
    streams = tuple(StreamStatus(f"{number:040}", last_error="e" * 300) for number in range(200))
    kept = msgspec.json.decode(encode_status(SupervisorStatus(streams=streams, streams_in_all=200)))
    assert kept["streams_in_all"] == 200
    assert [one["stream"] for one in kept["streams"]] == [one.stream for one in streams[: len(kept["streams"])]]
    assert 50 < len(kept["streams"]) < 200


@pytest.mark.parametrize("name", ["задача" * 300, 'rule about "quotes" ' * 100])
def test_names_of_what_is_passed_over_that_do_not_fit_are_left_out(name: str) -> None:
    """One that is told is better than none, and the heartbeat must not fail for it."""
    streams = tuple(StreamStatus(f"{number:040}") for number in range(200))
    over = tuple((f"{name} {number}", '"' * 300) for number in range(20))
    status = SupervisorStatus(streams=streams, streams_in_all=200, passed_over=over, passed_over_in_all=25)
    kept = msgspec.json.decode(encode_status(status), type=SupervisorStatus)
    assert 0 < len(kept.passed_over) < 20
    assert kept.passed_over == over[: len(kept.passed_over)]
    assert len(kept.streams) > 50
    assert kept.passed_over_told().startswith(f"the {name} 0 (and 24 more): ")


def test_a_name_that_is_longer_than_all_there_is_room_for_is_counted() -> None:
    status = SupervisorStatus(passed_over=(("n" * 40_000, "error"),), passed_over_in_all=1)
    kept = msgspec.json.decode(encode_status(status), type=SupervisorStatus)
    assert kept.passed_over == ()
    assert kept.passed_over_told() == "1 with names that are too long"
