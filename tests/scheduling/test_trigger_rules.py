"""Trigger rules: what they say, and that they say it whatever the order is in which the upstream tasks end."""

from __future__ import annotations

from itertools import product

import pytest

from headgate.protocol.messages.dags import TRIGGER_RULES, TaskState, TriggerRule
from headgate.scheduling.planning import retry_wait_s
from headgate.scheduling.states import TERMINAL
from headgate.scheduling.trigger_rules import Readiness, ready

STATES = {
    "s": TaskState.SUCCESS,
    "f": TaskState.FAILED,
    "u": TaskState.UPSTREAM_FAILED,
    "k": TaskState.SKIPPED,
    "x": TaskState.REMOVED,
    ".": TaskState.RUNNING,
}
ANSWERS: dict[str, Readiness] = {"R": "run", "-": "wait", "K": "skipped", "U": "upstream_failed"}

UPSTREAM = ("", "s", "ss", "s.", "f", "f.", "sf", "u.", "uu", "k", "k.", "ks", "kf", "ku", ".")
TABLE = {
    "all_success": "R R R - U U U U U K - K U U -",
    "all_failed": "R K K K R - K - R K K K K K -",
    "all_done": "R R R - R - R - R R - R R R -",
    "all_skipped": "R K K K K K K K K R - K K K -",
    "one_success": "R R R R U - R - U K - R U U -",
    "one_failed": "R K K - R R R R R K - K R R -",
    "one_done": "R R R R R R R - U K - R R U -",
    "none_failed": "R R R - U U U U U R - R U U -",
    "none_failed_min_one_success": "R R R - U U U U U K - R U U -",
    "none_skipped": "R R R - R - R - R K K K K K -",
    "always": "R R R R R R R R R R R R R R R",
}


def test_the_table_has_every_rule() -> None:
    assert set(TABLE) == set(TRIGGER_RULES)


@pytest.mark.parametrize("rule", TRIGGER_RULES)
def test_a_rule_says_what_the_table_says(rule: TriggerRule) -> None:
    expected = {upstream: ANSWERS[letter] for upstream, letter in zip(UPSTREAM, TABLE[rule].split(), strict=True)}
    assert {upstream: ready(rule, [STATES[letter] for letter in upstream]) for upstream in UPSTREAM} == expected


@pytest.mark.parametrize("rule", TRIGGER_RULES)
def test_an_answer_is_never_changed_by_what_ends_later_and_given_as_soon_as_that_is_certain(rule: TriggerRule) -> None:
    for upstream in product(STATES.values(), repeat=3):
        open_places = [place for place, state in enumerate(upstream) if state not in TERMINAL]
        endings = set()
        for ends in product(sorted(TERMINAL), repeat=len(open_places)):
            ended = list(upstream)
            for place, state in zip(open_places, ends, strict=True):
                ended[place] = state
            endings.add(ready(rule, ended))
        assert "wait" not in endings
        answer = ready(rule, upstream)
        assert answer == "wait" or endings == {answer}, (rule, upstream)
        # To wait for all of them is what all_done means.
        assert answer != "wait" or len(endings) > 1 or rule == "all_done", (rule, upstream)


def test_a_retry_waits_as_long_as_the_task_says() -> None:
    plain = [retry_wait_s(tries, delay_s=5.0, is_exponential=False, delay_max_s=None) for tries in (1, 2, 9)]
    assert plain == [5.0, 5.0, 5.0]
    doubled = [retry_wait_s(tries, delay_s=5.0, is_exponential=True, delay_max_s=30.0) for tries in (1, 2, 3, 4, 5000)]
    assert doubled == [5.0, 10.0, 20.0, 30.0, 30.0]
    assert retry_wait_s(10_000, delay_s=5.0, is_exponential=True, delay_max_s=None) == 10 * 365 * 86_400.0
