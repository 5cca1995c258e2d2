"""Redriven messages in the core: given to the run of their trigger, a few at a time, until they are settled."""

from __future__ import annotations

import msgspec
import pytest
from tests.supervisor.core_harness import SETTINGS, Supervised, World, add_watchers, fired
from tests.supervisor.triggers.test_holds import cancelled

from headgate.protocol.messages.runner import (
    PASSED_OVER_POSITION,
    FinishedTrigger,
    Redelivery,
    RedeliveryEnd,
    RefusedEvent,
    RunnerSettings,
    StateSync,
    TriggerSpec,
)
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store
from headgate.store.triggers.redrives import REDELIVERIES_BYTES_MAX, REDELIVERIES_MAX
from headgate.store.triggers.watchers import MAX_DELIVERIES
from headgate.supervisor.triggers.redrives import TRIGGERS_A_STEP

LOOK_S = 1.1  # after which a write of another process is noticed
RETRY_S = 3.0  # after which a trigger that failed once is started again


def bury(world: World, supervisor: Supervised, spec: TriggerSpec, *keys: str, message: bytes = b"{}") -> list[int]:
    """Have messages passed over; return the ids of their letters."""
    for key in keys:
        names = (spec.trigger_id, f"run of {key}", -1)
        letter = RefusedEvent(*names, 0, "bad", len(message), message, key, PASSED_OVER_POSITION, True, "message")
        world.store.store_slice(supervisor.core.leases.epoch, refused=[letter])
    return [row.id for row in reversed(world.store.inspect.dead_letters(len(keys)))]


def redrive(world: World, letters: list[int]) -> None:
    for letter in letters:
        world.store.letters.redrive(letter, by="mara")


def given(supervisor: Supervised) -> list[Redelivery]:
    return [one for sync in supervisor.sent(StateSync) for one in sync.redeliveries]


def end(supervisor: Supervised, redeliveries: list[Redelivery]) -> None:
    ends = (RedeliveryEnd(one.letter_id, one.trigger_id, one.trigger_run_id, "handled") for one in redeliveries)
    supervisor.round(redriven=tuple(ends))


def restart_runner(supervisor: Supervised) -> None:
    supervisor.core.runner_ended(supervisor.core.runner.incarnation, "killed by SIGKILL", supervisor.world.now)
    supervisor.pass_time(RETRY_S)
    supervisor.start_runner()


def states(world: World) -> list[str]:
    return [row.state for row in world.store.inspect.dead_letters(1000)]


@pytest.fixture
def supervisor(world: World) -> Supervised:
    add_watchers(world, 2)
    supervisor = world.supervisor()
    supervisor.start_runner()
    return supervisor


@pytest.fixture
def spec(supervisor: Supervised) -> TriggerSpec:
    return supervisor.created()[0]


def test_a_message_is_given_once_to_the_run_of_its_trigger(
    world: World, supervisor: Supervised, spec: TriggerSpec
) -> None:
    (letter,) = bury(world, supervisor, spec, "k", message=b"[1]")
    redrive(world, [letter])
    supervisor.pass_time(LOOK_S)
    (one,) = given(supervisor)
    assert one == Redelivery(letter, spec.trigger_id, spec.trigger_run_id, "k", b"[1]")
    supervisor.pass_time(3 * SETTINGS.lease.poll_interval_s)
    assert given(supervisor) == []
    end(supervisor, [one])
    assert states(world) == ["redriven"]
    supervisor.pass_time(3 * SETTINGS.lease.poll_interval_s)
    assert given(supervisor) == []


def test_many_messages_are_given_a_few_at_a_time_and_the_next_when_half_are_settled(
    world: World, supervisor: Supervised, spec: TriggerSpec
) -> None:
    letters = bury(world, supervisor, spec, *(f"k{number:02}" for number in range(2 * REDELIVERIES_MAX + 3)))
    redrive(world, letters)
    supervisor.pass_time(LOOK_S)
    first = given(supervisor)
    assert [one.letter_id for one in first] == letters[:REDELIVERIES_MAX]
    half = REDELIVERIES_MAX // 2
    end(supervisor, first[: half - 1])
    assert given(supervisor) == []
    end(supervisor, first[half - 1 : half])
    second = given(supervisor)
    assert [one.letter_id for one in second] == letters[REDELIVERIES_MAX : 2 * REDELIVERIES_MAX]
    end(supervisor, first[half:] + second)
    third = given(supervisor)
    end(supervisor, third)
    assert [one.letter_id for one in third] == letters[2 * REDELIVERIES_MAX :]
    assert set(states(world)) == {"redriven"}
    assert supervisor.core.redrives.wake_at() is None


def test_each_trigger_gets_its_own(world: World) -> None:
    add_watchers(world, 2)
    supervisor = world.supervisor()
    supervisor.start_runner()
    one, other = supervisor.created()
    letters = bury(world, supervisor, one, "a") + bury(world, supervisor, other, "b")
    redrive(world, letters)
    supervisor.pass_time(LOOK_S)
    assert [(each.trigger_id, each.letter_id) for each in given(supervisor)] == [
        (one.trigger_id, letters[0]),
        (other.trigger_id, letters[1]),
    ]


def test_the_next_run_gets_what_the_last_one_did_not_settle(
    world: World, supervisor: Supervised, spec: TriggerSpec
) -> None:
    letters = bury(world, supervisor, spec, "good", "bad", "later")
    redrive(world, letters)
    supervisor.pass_time(LOOK_S)
    first = given(supervisor)
    end(supervisor, first[:1])
    failed = FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "failed", 0, "KeyError: amount", message_key="bad")
    supervisor.round(finished=(failed,))
    assert given(supervisor) == [], "it does not run"
    supervisor.pass_time(RETRY_S)
    syncs = supervisor.sent(StateSync)
    (again,) = [spec for sync in syncs for spec in sync.to_create]
    (one,) = [one for sync in syncs for one in sync.redeliveries]
    assert (one.letter_id, one.trigger_run_id) == (letters[2], again.trigger_run_id)
    end(supervisor, [one])
    assert states(world) == ["redriven", "open", "redriven"]
    assert again.passed_over == (), "one failure of a message that is redriven passes the trigger over nothing"


def test_the_next_run_is_not_passed_over_a_message_that_was_handled(
    world: World, supervisor: Supervised, spec: TriggerSpec
) -> None:
    failures = (
        FinishedTrigger(spec.trigger_id, f"run {number} of {key}", "failed", 0, "KeyError", message_key=key)
        for key in ("k", "other")
        for number in range(MAX_DELIVERIES)
    )
    supervisor.round(finished=tuple(failures))
    restart_runner(supervisor)
    (again, _) = supervisor.created()
    assert again.passed_over == ("k", "other")
    letters = bury(world, supervisor, spec, "k")
    redrive(world, letters)
    supervisor.pass_time(LOOK_S)
    end(supervisor, given(supervisor))
    restart_runner(supervisor)
    assert supervisor.created()[0].passed_over == ("other",)


def test_a_dead_runner_costs_the_message_that_it_worked_on_nothing_but_time(
    world: World, supervisor: Supervised, spec: TriggerSpec
) -> None:
    (letter,) = bury(world, supervisor, spec, "k")
    redrive(world, [letter])
    supervisor.pass_time(LOOK_S)
    assert len(given(supervisor)) == 1
    restart_runner(supervisor)
    (one,) = given(supervisor)
    assert one.letter_id == letter
    assert one.trigger_run_id != spec.trigger_run_id
    end(supervisor, [one])
    assert states(world) == ["redriven"]


def test_the_late_end_of_an_earlier_run_counts_and_gives_nothing_twice(
    world: World, supervisor: Supervised, spec: TriggerSpec
) -> None:
    """Its report was on its way when the runner died: it is stored before the next run is started."""
    letters = bury(world, supervisor, spec, "a", "b")
    redrive(world, letters)
    supervisor.pass_time(LOOK_S)
    first = given(supervisor)
    end(supervisor, first[:1])
    restart_runner(supervisor)
    assert [one.letter_id for one in given(supervisor)] == letters[1:]


def test_a_message_waits_until_its_trigger_is_released(world: World, supervisor: Supervised, spec: TriggerSpec) -> None:
    (letter,) = bury(world, supervisor, spec, "k")
    world.store.pause_watcher(spec.name)
    supervisor.pass_time(LOOK_S)
    supervisor.round(finished=(cancelled(spec),))
    redrive(world, [letter])
    supervisor.pass_time(2 * SETTINGS.lease.poll_interval_s)
    assert given(supervisor) == []
    world.store.resume_watcher(spec.name)
    supervisor.pass_time(LOOK_S)
    assert [one.letter_id for one in given(supervisor)] == [letter]


def test_a_supervisor_that_takes_over_gives_what_the_first_one_left(
    world: World, supervisor: Supervised, spec: TriggerSpec
) -> None:
    (letter,) = bury(world, supervisor, spec, "k")
    redrive(world, [letter])
    supervisor.pass_time(LOOK_S)
    assert len(given(supervisor)) == 1
    other = world.supervisor()
    other.start_runner()
    world.store.fence_triggerers(other.core.leases.epoch, dead=[supervisor.core.leases.epoch])
    other.pass_time(2 * SETTINGS.lease.poll_interval_s)
    (one,) = given(other)
    end(other, [one])
    assert states(world) == ["redriven"]


def test_a_message_longer_than_a_frame_is_open_again_with_the_reason(world: World) -> None:
    small = msgspec.structs.replace(SETTINGS, runner=RunnerSettings(frame_bytes_max=8192))
    add_watchers(world, 1)
    supervisor = world.supervisor(settings=small)
    supervisor.start_runner()
    (spec,) = supervisor.created()
    long, short = (
        bury(world, supervisor, spec, "long", message=b'"%s"' % (b"x" * 9000)),
        bury(world, supervisor, spec, "short"),
    )
    redrive(world, long + short)
    supervisor.pass_time(LOOK_S)
    assert [one.letter_id for one in given(supervisor)] == short
    (_, action) = world.store.inspect.dead_letter(long[0]).actions
    assert (action.action, action.note) == ("failed", "the message has 9,002 bytes, and a frame takes 4,096")


def test_a_database_that_is_away_is_asked_again(
    world: World, supervisor: Supervised, spec: TriggerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    (letter,) = bury(world, supervisor, spec, "k")
    redrive(world, [letter])
    original = Store.redriving_letters
    tries: list[float] = []

    def away(self: Store, *args: object, **kwargs: object) -> object:
        tries.append(world.now)
        if len(tries) < 3:
            raise DatabaseAway("db", "gone")
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "redriving_letters", away)
    supervisor.pass_time(SETTINGS.lease.poll_interval_s)
    assert [one.letter_id for one in given(supervisor)] == [letter]
    assert tries[0] < tries[1] < tries[2]
    supervisor.round(fired(spec, 0))


def test_a_database_that_goes_away_while_a_long_message_is_refused_costs_the_others_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = msgspec.structs.replace(SETTINGS, runner=RunnerSettings(frame_bytes_max=8192))
    add_watchers(world, 1)
    supervisor = world.supervisor(settings=small)
    supervisor.start_runner()
    (spec,) = supervisor.created()
    letters = bury(world, supervisor, spec, "short") + bury(
        world, supervisor, spec, "long", message=b'"%s"' % (b"x" * 9000)
    )
    redrive(world, letters)
    original = Store.end_redeliveries
    tries: list[float] = []

    def away(self: Store, *args: object) -> None:
        tries.append(world.now)
        if len(tries) == 1:
            raise DatabaseAway("db", "gone")
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "end_redeliveries", away)
    supervisor.pass_time(SETTINGS.lease.poll_interval_s)
    assert len(tries) == 2
    assert [one.letter_id for one in given(supervisor)] == letters[:1]


@pytest.mark.parametrize(
    ("triggers", "message_bytes", "given_at_once"),
    [(2 * TRIGGERS_A_STEP + 1, 2, TRIGGERS_A_STEP), (3, REDELIVERIES_BYTES_MAX // 2, 2)],
    ids=["many", "large"],
)
def test_the_messages_of_many_triggers_are_given_in_several_steps(
    world: World, triggers: int, message_bytes: int, given_at_once: int
) -> None:
    """The lease and the rounds wait for no more than one step, and a step holds no more than this in memory."""
    add_watchers(world, triggers)
    supervisor = world.supervisor(settings=msgspec.structs.replace(SETTINGS, capacity=triggers))
    supervisor.start_runner()
    specs = supervisor.created()
    message = b'"%s"' % (b"x" * (message_bytes - 2))
    for spec in specs:
        redrive(world, bury(world, supervisor, spec, spec.name, message=message))
    supervisor.pass_time(LOOK_S)
    syncs = [[one.trigger_id for one in sync.redeliveries] for sync in supervisor.sent(StateSync) if sync.redeliveries]
    assert [len(sync) for sync in syncs][:-1] == [given_at_once] * (triggers // given_at_once)
    assert sorted(trigger_id for sync in syncs for trigger_id in sync) == [spec.trigger_id for spec in specs]


def test_nothing_is_kept_of_a_trigger_that_is_gone(world: World, supervisor: Supervised, spec: TriggerSpec) -> None:
    redrive(world, bury(world, supervisor, spec, "k"))
    supervisor.pass_time(LOOK_S)
    assert len(given(supervisor)) == 1
    world.store.remove_watcher(spec.name)
    supervisor.pass_time(LOOK_S)
    supervisor.round(finished=(msgspec.structs.replace(cancelled(spec), reason="user"),))
    supervisor.pass_time(LOOK_S)
    assert len(supervisor.core.redrives) == 0
