"""Acts of users and of other supervisors, which a replay takes from the log; and cores that do not obey them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.replay.live import Live
from tests.supervisor.replay.replay_harness import assert_clean, fired, problem, replayed

from headgate.protocol.messages.runner import (
    AbsentSubscriber,
    CancelReason,
    CancelTrigger,
    DescribedTrigger,
    FinishedTrigger,
    RedeliveryEnd,
    RefusedEvent,
    StateSync,
)
from headgate.store.ids import Epoch
from headgate.store.triggers.leases import ClaimedTrigger
from headgate.supervisor.triggers.assignments import Assignments
from headgate.supervisor.triggers.holds import Holds
from headgate.supervisor.triggers.redrives import Redrives
from headgate.supervisor.triggers.releases import Releases

STREAM = "digest"


def begin(live: Live, *names: str, stream: str | None = None) -> None:
    """Watchers run; all in one stream, if it is given."""
    for name in names:
        live.store.add_watcher(name, "users.One", {"path": "/data"})
    live.start_runner()
    if stream is not None:
        specs = live.specs().values()
        live.round(described=tuple(DescribedTrigger(s.trigger_id, s.trigger_run_id, stream, "name") for s in specs))


def end_run(live: Live, name: str, *, outcome: Any = "cancelled") -> None:
    """The runner reports the end of the newest run of a watcher."""
    spec = live.specs()[name]
    reason: CancelReason | None = "reassigned" if outcome == "cancelled" else None
    live.round(finished=(FinishedTrigger(spec.trigger_id, spec.trigger_run_id, outcome, 0, reason=reason),))


def one_event(live: Live, name: str, index: int = 0) -> None:
    live.round(fired(live.specs()[name], index, key=f"{name}-{index}-{live.specs()[name].trigger_run_id}"))


def change_is_sent(live: Live) -> StateSync:
    return next(m for m in reversed(live.sent) if isinstance(m, StateSync) and m.to_cancel)


# --- what users do -------------------------------------------------------------------------------


def paused_and_resumed(live: Live, stream: str | None) -> dict[str, int]:
    begin(live, "one", "two", stream=stream)
    one_event(live, "one")
    live.store.pause_watcher("one")
    live.pass_time(1.5)
    assert change_is_sent(live) == StateSync(to_cancel=(CancelTrigger(1, "reassigned"),))
    end_run(live, "one")
    one_event(live, "two")
    live.store.resume_watcher("one")
    live.pass_time(1.5)
    one_event(live, "one")
    return {"paused": 1, "released": 1}


def changed(live: Live, stream: str | None) -> dict[str, int]:
    begin(live, "one", "two", stream=stream)
    live.store.change_watcher("one", classpath="users.Another", kwargs={"path": "/data/of/orders"})
    live.pass_time(1.5)
    absent = () if stream is None else (AbsentSubscriber(1, stream),)
    assert change_is_sent(live) == StateSync(to_cancel=(CancelTrigger(1, "reassigned"),), absent=absent)
    one_event(live, "two")
    end_run(live, "one")
    assert live.specs()["one"].classpath == "users.Another"
    one_event(live, "one")
    return {"changed": 1}


def restarted(live: Live, stream: str | None) -> dict[str, int]:
    begin(live, "one", "two", stream=stream)
    live.store.restart_watcher("one")
    live.pass_time(1.5)
    end_run(live, "one")
    one_event(live, "one")
    end_run(live, "one", outcome="returned")
    live.store.restart_watcher("one")
    live.pass_time(1.5)
    one_event(live, "one")
    return {"restarted": 2}


def changed_while_it_waits_for_its_next_try(live: Live, stream: str | None) -> dict[str, int]:
    begin(live, "one", "two", stream=stream)
    for name in ("one", "two"):
        end_run(live, name, outcome="failed")
    live.store.change_watcher("one", kwargs={"path": "/mended/now"})
    live.pass_time(5.0)
    one_event(live, "one")
    one_event(live, "two")
    return {"changed": 1}


def changed_while_its_runner_dies(live: Live, stream: str | None) -> dict[str, int]:
    begin(live, "one", "two", stream=stream)
    live.store.change_watcher("one", kwargs={"path": "/data/of/orders"})
    live.pass_time(1.5)
    live.start_runner()
    one_event(live, "one")
    live.store.change_watcher("two", classpath="users.Two")
    live.start_runner()
    one_event(live, "two")
    return {"changed": 2}


def changed_while_its_supervisor_is_dead(live: Live, stream: str | None) -> dict[str, int]:
    begin(live, "one", "two", stream=stream)
    live.store.change_watcher("one", kwargs={"path": "/data/of/orders"})
    live.start_supervisor()
    live.start_runner()
    one_event(live, "one")
    return {"changed": 1}


def paused_over_runners_and_supervisors(live: Live, stream: str | None) -> dict[str, int]:
    begin(live, "one", "two", "three", stream=stream)
    live.store.pause_watcher("one")
    live.pass_time(1.5)
    end_run(live, "one")
    live.store.pause_watcher("two")
    live.start_runner()
    one_event(live, "three")
    live.start_supervisor()
    live.start_runner()
    one_event(live, "three")
    for name in ("one", "two"):
        live.store.resume_watcher(name)
        live.pass_time(1.5)
        one_event(live, name)
    return {"paused": 2, "released": 2}


def paused_and_removed(live: Live, stream: str | None) -> dict[str, int]:
    begin(live, "one", "two", stream=stream)
    live.store.pause_watcher("one")
    live.pass_time(1.5)
    end_run(live, "one")
    live.store.remove_watcher("one")
    live.pass_time(1.5)
    one_event(live, "two")
    return {"paused": 1, "removed": 1}


def quarantined_and_mended(live: Live, stream: str | None) -> dict[str, int]:
    """It ends its runner; the next one is started without it, until a user has mended it."""
    begin(live, "one", "two", stream=stream)
    live.core.holds.begin(1, "quarantine", "it harms")
    live.settle()
    live.start_runner()
    one_event(live, "two")
    live.start_supervisor()
    live.start_runner()
    one_event(live, "two")
    live.store.change_watcher("one", classpath="users.Mended")
    live.store.release_trigger(1)
    live.pass_time(1.5)
    one_event(live, "one")
    return {"held": 1, "released": 1, "changed": 1} if stream else {"paused": 1, "released": 1, "changed": 1}


def braked(live: Live, stream: str | None) -> dict[str, int]:
    """The brake of too many bad messages; how many are too many for it is not in the log."""
    begin(live, "one", "two", stream=stream)
    end_run(live, "one", outcome="failed")
    live.core._send_if_running(live.core.holds.begin(1, "brake", "it fails too often"))
    live.settle()
    one_event(live, "two")
    live.store.release_trigger(1)
    live.pass_time(1.5)
    one_event(live, "one")
    return {"held": 1, "released": 1} if stream else {"paused": 1, "released": 1}


def bury(live: Live, name: str, key: str) -> int:
    """A message of a watcher becomes a dead letter; return its id."""
    spec = live.specs()[name]
    names = (spec.trigger_id, spec.trigger_run_id, -1 - len(key))
    letter = RefusedEvent(*names, 0, "bad", 2, b"{}", key, -1, is_whole=True, content="message")
    live.round(refused=(letter,))
    return live.store.inspect.dead_letters()[0].id


def redriven(live: Live, stream: str | None) -> dict[str, int]:
    """Two messages: one is handled, and on the other the trigger fails again."""
    begin(live, "one", "two", stream=stream)
    good, bad = bury(live, "one", "good"), bury(live, "one", "other")
    for letter in (good, bad):
        live.store.letters.redrive(letter, by="mara")
    live.pass_time(1.5)
    spec = live.specs()["one"]
    end = RedeliveryEnd(good, spec.trigger_id, spec.trigger_run_id, "handled")
    live.round(fired(spec, 0, key="good"), redriven=(end,))
    failed = FinishedTrigger(spec.trigger_id, spec.trigger_run_id, "failed", 1, "KeyError", message_key="other")
    live.round(finished=(failed,))
    live.pass_time(5.0)
    one_event(live, "one", 1)
    assert [row.state for row in live.store.inspect.dead_letters()] == ["open", "redriven"]
    return {"redriven": 2}


def redriven_while_its_runner_dies(live: Live, stream: str | None) -> dict[str, int]:
    """The next runner gets the message as well; the user has acted once."""
    begin(live, "one", "two", stream=stream)
    letter = bury(live, "two", "good")
    live.store.letters.redrive(letter, by="mara")
    live.pass_time(1.5)
    live.start_runner()
    spec = live.specs()["two"]
    live.round(redriven=(RedeliveryEnd(letter, spec.trigger_id, spec.trigger_run_id, "handled"),))
    one_event(live, "two")
    return {"redriven": 1}


ACTS: list[Callable[[Live, str | None], dict[str, int]]] = [
    paused_and_resumed,
    changed,
    restarted,
    changed_while_it_waits_for_its_next_try,
    changed_while_its_runner_dies,
    changed_while_its_supervisor_is_dead,
    paused_over_runners_and_supervisors,
    paused_and_removed,
    quarantined_and_mended,
    braked,
    redriven,
    redriven_while_its_runner_dies,
]


@pytest.mark.parametrize("stream", [None, STREAM], ids=["alone", "streamed"])
@pytest.mark.parametrize("act", ACTS)
def test_a_log_with_acts_of_users_replays_clean_and_counts_them(
    live: Live, act: Callable[[Live, str | None], dict[str, int]], stream: str | None
) -> None:
    expected = act(live, stream)
    result = assert_clean(live.files())
    assert result.acts == expected
    assert result.rows == len(list(live.store.inspect.events())) > 0


def test_a_trigger_moved_to_another_queue_is_left_to_another_supervisor(live: Live) -> None:
    begin(live, "one", "two")
    live.store.change_watcher("one", queue="gpu")
    live.pass_time(1.5)
    end_run(live, "one")
    live.start_runner()
    one_event(live, "two")
    assert assert_clean(live.files()).acts == {"paused": 1}


def test_a_log_that_begins_when_streams_are_known_and_a_trigger_is_held_replays_clean(live: Live) -> None:
    begin(live, "one", "two", "three", stream=STREAM)
    live.core.holds.begin(2, "quarantine", "it harms")
    live.settle()
    for path in live.files():
        path.unlink()
    live.start_supervisor()
    live.start_runner()
    one_event(live, "one")
    live.store.release_trigger(2)
    live.pass_time(1.5)
    one_event(live, "two")
    result = assert_clean(live.files())
    assert result.acts == {"held": 1, "released": 1}


def test_a_held_trigger_that_is_taken_over_while_the_runner_runs_is_awaited(live: Live) -> None:
    begin(live, "one")
    live.store.add_watcher("two", "users.One", {})
    live.store.pause_watcher("two")
    live.pass_time(1.5)
    one_event(live, "one")
    live.store.resume_watcher("two")
    live.pass_time(1.5)
    one_event(live, "two")
    assert_clean(live.files())


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_trigger_that_is_left_to_the_owner_of_its_stream_replays_clean(live: Live, comes_back: bool) -> None:
    who: dict[str, Any] = {"hostname": "other", "pid": 1, "machine": "m", "process_started": 0.0, "capacity": 9}
    other = live.store.register_triggerer(**who, queues=("default",))
    for name in ("one", "theirs", "three"):
        live.store.add_watcher(name, "users.One", {})
    (theirs,) = live.store.claim_triggers(other, limit=1, queues=("default",))
    live.store.store_slice(other, described=[DescribedTrigger(theirs.id, "run", STREAM, "name")])
    live.neighbours.add(other)
    live.start_runner()
    left, kept = (spec for name, spec in live.specs().items())
    on_stream = DescribedTrigger(left.trigger_id, left.trigger_run_id, STREAM, "name")
    alone = DescribedTrigger(kept.trigger_id, kept.trigger_run_id, "", "")
    live.round(described=(on_stream, alone))
    one_event(live, kept.name)
    one_event(live, kept.name, 1)
    if comes_back:
        live.store.release_triggerer(other)
        live.pass_time(5.0)
        assert {spec.stream for name, spec in live.specs().items() if name != kept.name} == {STREAM}
        one_event(live, theirs.name)
    live.start_runner()
    one_event(live, kept.name)
    assert assert_clean(live.files()).acts == {"owned elsewhere": 1}


# --- cores that do not obey ----------------------------------------------------------------------


def no_cancel_for_a_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "_sync", lambda self, held, others=(): None)


def a_held_trigger_starts_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Assignments, "_end_held_run", lambda self, assigned, now: self._wait(assigned, now))


def a_release_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Assignments, "release", lambda self, trigger_id, now: None)


def a_paused_trigger_is_awaited(patch: pytest.MonkeyPatch) -> None:
    honest = Assignments.hold
    patch.setattr(Assignments, "hold", lambda self, trigger_id, hold: honest(self, trigger_id, "brake"))


def a_change_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    honest = Assignments.change

    def change(self: Assignments, changed: ClaimedTrigger, now: float) -> Any:
        parts = honest(self, changed, now)
        return None if parts is None else (parts[0], None)

    patch.setattr(Assignments, "change", change)


def a_change_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    honest = Assignments.change

    def change(self: Assignments, changed: ClaimedTrigger, now: float) -> Any:
        before = self._assigned[changed.id].trigger
        return honest(self, msgspec.structs.replace(changed, classpath=before.classpath), now)

    patch.setattr(Assignments, "change", change)


def a_change_is_a_removal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Assignments, "change", lambda self, changed, now: (self.cancel(changed.id, "user"), None))


def a_pause_ends_its_neighbour_as_well(patch: pytest.MonkeyPatch) -> None:
    honest = Holds._sync

    def sync(self: Holds, held: dict[int, Any], others: Any = ()) -> StateSync | None:
        message = honest(self, held, others)
        more = self._assignments.cancel(2, "user") if message is not None else None
        if message is None or more is None:
            return message
        return msgspec.structs.replace(message, to_cancel=(*message.to_cancel, more))

    patch.setattr(Holds, "_sync", sync)


def a_removed_one_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Releases, "cancel", lambda self, trigger_ids, reason: ())


def a_redriven_message_is_not_given(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Redrives, "found", lambda self, trigger_ids: None)


def a_redriven_message_is_given_as_another(patch: pytest.MonkeyPatch) -> None:
    original = Redrives.step

    def step(self: Redrives, epoch: Epoch, now: float) -> StateSync | None:
        sync = original(self, epoch, now)
        given = () if sync is None else (msgspec.structs.replace(one, message=b"[]") for one in sync.redeliveries)
        return None if sync is None else StateSync(redeliveries=tuple(given))

    patch.setattr(Redrives, "step", step)


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Live, str | None], dict[str, int]], str]] = [
    (no_cancel_for_a_hold, paused_and_resumed, "the supervisor said StateSync, and the replay says nothing"),
    (a_held_trigger_starts_again, paused_and_resumed, "trigger 1 is held, and the replay starts it"),
    (a_release_is_not_noticed, paused_and_resumed, "the supervisor said StateSync, and the replay says nothing"),
    (a_paused_trigger_is_awaited, paused_and_resumed, "absent has 0 elements, replayed 1"),
    (a_change_is_not_awaited, changed, "absent has 1 elements, replayed 0"),
    (a_change_is_forgotten, changed, "classpath is 'users.Another', replayed 'users.One'"),
    (a_change_is_a_removal, changed, "reason is 'reassigned', replayed 'user'"),
    (a_pause_ends_its_neighbour_as_well, paused_and_resumed, "the replay cancels trigger 2, and the log does not"),
    (a_removed_one_is_kept, paused_and_removed, "trigger 1 is held, and the replay starts it"),
    (a_redriven_message_is_not_given, redriven, "the supervisor said StateSync, and the replay says nothing"),
    (a_redriven_message_is_given_as_another, redriven, "redeliveries[0].message is b'{}', replayed b'[]'"),
]


@pytest.mark.parametrize(("bug", "act", "expected"), BUGS, ids=[bug.__name__ for bug, _, _ in BUGS])
def test_no_act_hides_a_core_that_does_not_obey_it(
    live: Live,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    act: Callable[[Live, str | None], dict[str, int]],
    expected: str,
) -> None:
    act(live, STREAM)
    bug(monkeypatch)
    assert expected in problem(live.files())
    monkeypatch.undo()
    assert replayed(live.files()).is_clean
