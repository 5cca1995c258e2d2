"""Which steps are given to busy workers: by the times of steps before, and never in the way of what needs a worker."""

from __future__ import annotations

import pytest

from headgate.protocol.messages.worker import BUNDLE_MAX
from headgate.scheduling import bundles
from headgate.scheduling.bundles import BUNDLE_S, NONE, Lookout, Places, Room, StepKind, StepTimes, room_behind

A, B = StepKind("d", "a", is_resumed=False), StepKind("d", "b", is_resumed=False)
RESUMED = StepKind("d", "a", is_resumed=True)


def times(**seconds: float) -> StepTimes:
    known = StepTimes()
    for name, took_s in seconds.items():
        known.note(StepKind("d", name, is_resumed=False), took_s)
    return known


def test_a_longer_time_counts_at_once_and_a_shorter_one_by_and_by() -> None:
    known = times(a=0.01)
    assert (known.of(A), known.of(B), known.of(RESUMED)) == (0.01, None, None)
    known.note(A, 5.0)
    assert known.of(A) == 5.0
    taken = []
    while (expected_s := known.of(A) or 0.0) > BUNDLE_S:
        taken.append(expected_s)
        known.note(A, 0.01)
    assert 10 < len(taken) < 20
    assert taken == sorted(taken, reverse=True)


def test_so_many_kinds_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "KINDS_MAX", 2)
    known = times(a=0.1, b=0.2)
    known.note(A, 0.1)
    known.note(StepKind("d", "c", is_resumed=False), 0.3)
    assert (known.of(A), known.of(B)) == (0.1, None)


def test_the_first_step_of_a_kind_gets_a_worker_for_itself() -> None:
    places = Places(times(), 2, [])
    assert places.most == 2 * BUNDLE_MAX
    assert [places.take(A, has_tries_left=True) for _ in range(3)] == [True, True, False]
    assert room_behind(None) == NONE


def test_short_steps_fill_the_time_of_each_worker_and_the_free_ones_first() -> None:
    places = Places(times(a=BUNDLE_S / 4), 2, [Room(3, BUNDLE_S)])
    taken = 0
    while places.take(A, has_tries_left=True):
        taken += 1
    assert taken == 2 * 4 + 3


def test_the_worker_that_is_free_first_gets_the_next_step() -> None:
    places = Places(times(a=0.01), 0, [Room(5, 0.02), Room(5, 0.05), Room(0, 1.0)])
    for _ in range(4):
        assert places.take(A, has_tries_left=True)
    assert places._rooms[0].steps + places._rooms[1].steps == 6
    assert places._rooms[0].seconds == pytest.approx(0.02 - 0.01 * (5 - places._rooms[0].steps))


def test_a_step_that_may_be_long_waits_for_a_worker() -> None:
    places = Places(times(a=0.01, b=2 * BUNDLE_S), 0, [Room(5, BUNDLE_S)])
    assert not places.take(A, has_tries_left=False), "its supervisor may die before it begins"
    assert not places.take(B, has_tries_left=True)
    assert not places.take(RESUMED, has_tries_left=True)
    assert places.take(A, has_tries_left=True)


def test_no_more_tasks_are_looked_at_than_were_short_lately() -> None:
    lookout, places = Lookout(), Places(times(a=0.0), 2, [])
    assert lookout.limit(places) == 3
    seen = []
    for _ in range(8):
        limit = lookout.limit(places)
        lookout.found(places, limit, limit)
        seen.append(limit)
    assert seen == [3, 4, 6, 10, 18, 34, 66, 2 * BUNDLE_MAX]
    lookout.found(places, 128, 12)
    assert lookout.limit(places) == 12
    lookout.found(places, 12, 2)
    assert lookout.limit(places) == 3
    busy = Places(times(), 0, [])
    assert lookout.limit(busy) == 0


def test_no_worker_has_more_than_so_many_steps() -> None:
    places = Places(times(a=0.0), 1, [])
    assert sum(places.take(A, has_tries_left=True) for _ in range(2 * BUNDLE_MAX)) == BUNDLE_MAX
