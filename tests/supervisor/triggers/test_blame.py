"""The end of a runner as the core takes it: the culprit is recorded and held back, all others start again at once."""

from __future__ import annotations

from typing import Any

import pytest
from tests.supervisor.core_harness import Supervised, World, add_watchers
from tests.supervisor.triggers.test_holds import put_on_stream

from headgate.protocol.black_box import Record
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.messages.runner import AbsentSubscriber, StateSync
from headgate.store.errors import DatabaseAway
from headgate.store.triggers.strikes import KILLS_MAX
from headgate.supervisor.triggers.suspects import HARM_MAX


def end(supervisor: Supervised, record: Record | None, *, ended_itself: bool = True) -> None:
    incarnation, now = supervisor.core.runner.incarnation, supervisor.world.now
    supervisor.core.runner_ended(incarnation, "exited with code 3", now, ended_itself=ended_itself, record=record)


def restart(supervisor: Supervised) -> list[StateSync]:
    """Return what the next runner gets at its start, which is within a second."""
    supervisor.sent(StateSync)
    died_at = supervisor.world.now
    supervisor.pass_time(supervisor.core.runner.wake_at() - died_at)
    assert supervisor.world.now - died_at < 1.0
    supervisor.start_runner()
    return supervisor.sent(StateSync)


def started(syncs: list[StateSync]) -> dict[int, str]:
    return {spec.trigger_id: spec.trigger_run_id for sync in syncs for spec in sync.to_create}


def start(world: World, watchers: int) -> tuple[Supervised, dict[int, str]]:
    add_watchers(world, watchers)
    supervisor = world.supervisor()
    supervisor.start_runner()
    return supervisor, started(supervisor.sent(StateSync))


def search(supervisor: Supervised) -> dict[int, str]:
    """Have two runners end without a name, so soon after one another that a search begins; return what runs then."""
    end(supervisor, None)
    restart(supervisor)
    end(supervisor, None)
    return started(restart(supervisor))


def test_a_trigger_that_ends_its_runner_is_held_back_while_the_others_start_at_once(world: World) -> None:
    supervisor, runs = start(world, 3)
    culprit, *others = runs
    end(supervisor, Record(runs[culprit]))
    assert sorted(started(restart(supervisor))) == others
    row = world.store.inspect.watchers()[0]
    assert row.failure_count == 1
    assert row.last_error == "the runner ended while it executed this trigger: exited with code 3"
    supervisor.pass_time(1.6)
    assert list(started(supervisor.sent(StateSync))) == [culprit]


def test_a_runner_that_was_killed_for_want_of_memory_has_a_cause_and_a_plain_sigkill_has_none(world: World) -> None:
    supervisor, runs = start(world, 3)
    culprit = next(iter(runs))
    for _ in range(HARM_MAX + 1):
        incarnation, box = supervisor.core.runner.incarnation, Record(runs[culprit])
        supervisor.core.runner_ended(incarnation, "killed by SIGKILL", world.now, record=box)
        supervisor.pass_time(supervisor.core.runner.wake_at() - world.now)
        supervisor.start_runner()
        runs = started(supervisor.sent(StateSync))
        assert len(runs) == 3
    incarnation, box = supervisor.core.runner.incarnation, Record(runs[culprit])
    how = "killed by SIGKILL for want of memory; its last output was:\nso much"
    supervisor.core.runner_ended(incarnation, how, world.now, ended_itself=True, record=box)
    assert culprit not in started(restart(supervisor))
    row = world.store.inspect.watchers()[0]
    assert row.last_error == "the runner ended while it executed this trigger: killed by SIGKILL for want of memory"


def test_a_trigger_that_ends_it_again_and_again_is_quarantined_and_the_respawn_does_not_slow_down(world: World) -> None:
    supervisor, runs = start(world, 3)
    culprit, *others = runs
    for _ in range(HARM_MAX):
        end(supervisor, Record(runs[culprit]))
        runs = started(restart(supervisor))
        assert sorted(runs) == others
        supervisor.pass_time(6.0)
        runs |= started(supervisor.sent(StateSync))
    assert culprit not in runs
    row = world.store.inspect.watchers()[0]
    assert row.hold == "quarantine"
    assert row.hold_reason is not None
    assert "exited with code 3" in row.hold_reason
    world.store.release_trigger(culprit)
    supervisor.pass_time(1.1)
    (run_id,) = started(supervisor.sent(StateSync)).values()
    end(supervisor, Record(run_id))
    restart(supervisor)
    assert world.store.inspect.watchers()[0].hold is None, "the release has forgotten its harm"


def test_the_stream_of_a_trigger_that_is_held_back_waits_for_it(world: World) -> None:
    first, second = add_watchers(world, 2)
    put_on_stream(world, first, second)
    supervisor = world.supervisor()
    supervisor.start_runner()
    runs = started(supervisor.sent(StateSync))
    end(supervisor, Record(runs[first]))
    (sync,) = [sync for sync in restart(supervisor) if sync.to_create]
    assert [spec.trigger_id for spec in sync.to_create] == [second]
    assert sync.absent == (AbsentSubscriber(first, "abc"),)


def test_a_message_that_ends_the_runner_is_struck_and_its_trigger_starts_with_the_others(world: World) -> None:
    supervisor, runs = start(world, 2)
    culprit = next(iter(runs))
    for kills in range(1, KILLS_MAX + 1):
        end(supervisor, Record(runs[culprit], "berlin:4711"))
        specs = {spec.trigger_id: spec for sync in restart(supervisor) for spec in sync.to_create}
        runs = {trigger_id: spec.trigger_run_id for trigger_id, spec in specs.items()}
        assert len(runs) == 2
        assert specs[culprit].passed_over == (("berlin:4711",) if kills == KILLS_MAX else ())
    assert world.store.inspect.watchers()[0].hold is None


def test_a_message_that_is_never_passed_over_has_its_trigger_quarantined(world: World) -> None:
    culprit = world.store.add_watcher("bad", "users.Trigger", {}, max_deliveries=0)
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    runs = started(supervisor.sent(StateSync))
    for _ in range(KILLS_MAX):
        assert culprit in runs
        end(supervisor, Record(runs[culprit], "k"))
        runs = started(restart(supervisor))
    assert list(runs) == [other for other in runs if other != culprit]
    row = next(each for each in world.store.inspect.watchers() if each.name == "bad")
    assert row.hold == "quarantine"
    assert row.hold_reason is not None
    assert row.hold_reason.startswith(
        "its message k has ended the runner 3 times, and is not passed over because max_deliver"
    )


def test_a_message_that_is_to_be_passed_over_is_not_given_again_before_that_is_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, runs = start(world, 1)
    strike, is_away = world.store.strike_message, True

    def sometimes(*arguments: Any) -> Any:
        if is_away:
            raise DatabaseAway("db", "no answer")
        return strike(*arguments)

    monkeypatch.setattr(world.store, "strike_message", sometimes)
    end(supervisor, Record(next(iter(runs.values())), "berlin:4711"))
    assert started(restart(supervisor)) == {}
    supervisor.pass_time(5.0)
    assert started(supervisor.sent(StateSync)) == {}
    is_away = False
    supervisor.pass_time(10.0)
    assert len(started(supervisor.sent(StateSync))) == 1


@pytest.mark.parametrize("record", [Record("garbage"), Record("1.1.1.99"), None])
def test_a_record_of_no_current_run_names_nobody(world: World, record: Record | None) -> None:
    supervisor, runs = start(world, 2)
    end(supervisor, record)
    assert sorted(started(restart(supervisor))) == sorted(runs)


def test_a_record_of_an_earlier_incarnation_is_not_believed(world: World) -> None:
    supervisor, earlier = start(world, 2)
    end(supervisor, None, ended_itself=False)
    later = started(restart(supervisor))
    end(supervisor, Record(next(iter(earlier.values()))))
    assert sorted(started(restart(supervisor))) == sorted(later)
    assert [row.failure_count for row in world.store.inspect.watchers()] == [0, 0]


def test_a_signal_from_outside_is_nobodys_fault_however_often_it_comes(world: World) -> None:
    supervisor, runs = start(world, 2)
    for _ in range(HARM_MAX):
        end(supervisor, Record(next(iter(runs.values()))), ended_itself=False)
        runs = started(restart(supervisor))
        assert len(runs) == 2
    assert [row.failure_count for row in world.store.inspect.watchers()] == [0, 0]


def test_a_broken_protocol_is_not_blamed_on_what_ran_when_the_runner_was_killed(world: World) -> None:
    supervisor, runs = start(world, 2)
    supervisor.core.protocol_failed(RemoteProtocolError("no such tag"))
    end(supervisor, Record(next(iter(runs.values()))))
    assert sorted(started(restart(supervisor))) == sorted(runs)


def test_ends_that_name_nobody_are_searched_by_halves_until_one_trigger_is_quarantined(world: World) -> None:
    """The process ends whenever the third of four triggers runs, and the box never names it."""
    supervisor, running = start(world, 4)
    culprit = sorted(running)[2]
    for _ in range(60):
        if culprit in running:
            supervisor.pass_time(0.5)
            end(supervisor, None)
            running = started(restart(supervisor))
        else:
            supervisor.pass_time(1.0)
            supervisor.heartbeat()
            running |= started(supervisor.sent(StateSync))
    holds = {row.trigger_id: row.hold for row in world.store.inspect.watchers()}
    assert holds == {number: "quarantine" if number == culprit else None for number in holds}
    assert sorted(running) == sorted(set(holds) - {culprit}), "all others run"


@pytest.mark.parametrize("removed", [[1], [2], [0, 1], [0, 1, 2]])
def test_a_search_goes_on_without_triggers_that_are_removed_meanwhile(world: World, removed: list[int]) -> None:
    supervisor, runs = start(world, 4)
    running = search(supervisor)
    assert len(running) == 2
    for number in removed:
        world.store.remove_watcher(f"w{number}")
    supervisor.pass_time_with_heartbeats(20.0)
    running |= started(supervisor.sent(StateSync))
    left = [trigger_id for number, trigger_id in enumerate(sorted(runs)) if number not in removed]
    assert set(left) <= running.keys(), "all that are left run"


def test_a_search_does_not_keep_the_core_awake_while_nothing_may_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that the database does not answer holds up all starts."""
    supervisor, runs = start(world, 4)
    running = search(supervisor)

    def away(*_: object, **__: object) -> None:
        raise DatabaseAway("the test", "away")

    monkeypatch.setattr(world.store, "claim_triggers", away)
    world.store.add_watcher("late", "users.Trigger", {})
    supervisor.pass_time_with_heartbeats(10.0)  # `Supervised.settle` fails if the core never comes to rest
    monkeypatch.undo()
    supervisor.pass_time_with_heartbeats(20.0)
    running |= started(supervisor.sent(StateSync))
    assert runs.keys() < running.keys()
