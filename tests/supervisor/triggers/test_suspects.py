"""Who is to blame for the ends of runners: named by the black box, or found by halves."""

from __future__ import annotations

import math
import random

import pytest

from headgate.supervisor.triggers.suspects import (
    HARM_MAX,
    HARM_WINDOW_S,
    KILLER_KEYS_MAX,
    UNNAMED_WITHIN_S,
    Suspects,
    Verdict,
)


def suspects() -> Suspects:
    return Suspects(lambda harms: 2.0 ** (harms - 1))


def test_a_trigger_is_held_back_longer_each_time_and_then_quarantined() -> None:
    found = suspects()
    verdicts = [found.harmed(1, None, float(at)) for at in range(HARM_MAX)]
    assert verdicts == [Verdict(1, wait_s=1.0), Verdict(1, wait_s=2.0), Verdict(1, is_quarantined=True)]
    assert found.harmed(2, None, 3.0) == Verdict(2, wait_s=1.0)


def test_harm_is_forgotten_after_the_window_and_by_a_release() -> None:
    found = suspects()
    for at in range(10):
        assert not found.harmed(1, None, at * HARM_WINDOW_S / (HARM_MAX - 1) * 1.01).is_quarantined
    now = 20 * HARM_WINDOW_S
    for _ in range(HARM_MAX - 1):
        found.harmed(2, None, now)
    found.forget(2)
    assert found.harmed(2, None, now) == Verdict(2, wait_s=1.0)


def test_a_message_is_to_blame_before_its_trigger() -> None:
    found = suspects()
    for at in range(100):
        assert found.harmed(1, "one message", float(at)) == Verdict(1)
    for number in range(KILLER_KEYS_MAX - 1):
        assert found.harmed(1, f"another {number}", 100.0) == Verdict(1)
    assert found.harmed(1, "one too many", 100.0).is_quarantined


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100, 1000])
def test_a_killer_that_is_never_named_is_found_by_halves_and_nobody_else_is_accused(count: int) -> None:
    """The process ends a second after each start of the culprit; it lives as long as the culprit does not run."""
    everyone = list(range(count))
    culprit = random.Random(count).choice(everyone)
    found, now, ends = suspects(), 0.0, 0
    held_until: dict[int, float] = {}
    while True:
        running = {number for number in everyone if number not in found.held_back()}
        running -= {number for number, until in held_until.items() if until > now}
        found.restarted()
        found.started(now)
        while culprit not in running:
            now = min(found.wake_at(), *(until for until in held_until.values() if until > now), math.inf)
            assert now < math.inf, "the search has stopped, and the culprit is held back for ever"
            running |= {number for number, until in held_until.items() if until <= now}
            running |= set(found.released(now))
            found.started(now)
        now += 1.0
        ends += 1
        verdict = found.ended_unnamed(sorted(running, reverse=True), 1.0, now)
        if verdict is not None:
            assert verdict.trigger_id == culprit
            if verdict.is_quarantined:
                break
            held_until[culprit] = now + verdict.wait_s
        now += 0.1
    assert ends <= 2 + math.ceil(math.log2(max(count, 2))) + HARM_MAX


def test_two_ends_that_are_far_apart_begin_no_search() -> None:
    found, now = suspects(), 0.0
    for _ in range(20):
        now += UNNAMED_WITHIN_S + 1.0
        assert found.ended_unnamed([3, 2, 1], 20.0, now) is None
        assert not found.held_back()


def test_a_search_whose_suspects_are_all_acquitted_ends() -> None:
    found = suspects()
    found.ended_unnamed([2, 1], 1.0, 0.0)
    found.ended_unnamed([2, 1], 1.0, 1.0)
    assert found.held_back() == {2}
    found.ended_unnamed([3], 1.0, 2.0)  # neither runs: the cause was another one
    assert not found.held_back()
