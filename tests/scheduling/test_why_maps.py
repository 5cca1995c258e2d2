"""The sentences about mapped tasks, from any facts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.scheduling.test_why import ALIVE

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.why import MapFacts, Pool, TaskFacts
from headgate.scheduling.why_tasks import explain_task

S = TaskState
USERS = {"upstream": (("users", S.RUNNING),)}
DONE = {"upstream": (("users", S.SUCCESS),)}


def enrich(state: TaskState, of: MapFacts, **facts: Any) -> TaskFacts:
    facts = {"map_state": state, **DONE, **facts}
    return TaskFacts("etl", "r1", "enrich", state, Pool("default_pool", 4), map=of, **facts)


def counted(window: int = 256, **facts: Any) -> MapFacts:
    counts = facts.pop("counts", {})
    return MapFacts(window, facts.pop("made", sum(counts.values())), counts=counts, **facts)


FULL = {"success": 44, "scheduled": 250, "running": 6}


@pytest.mark.parametrize(
    ("facts", "reason", "headline"),
    [
        (
            enrich(S.NONE, counted(counts=FULL, length=12_345)),
            "window_full",
            "expanded 300 of 12,345; window 256 full: 250 scheduled, 6 running",
        ),
        (
            enrich(S.NONE, counted(counts={"success": 44, "running": 9}, length=12_345)),
            "window_full",
            "expanded 53 of 12,345; window 256 has 9: 9 running",
        ),
        (
            enrich(S.NONE, counted(counts={"success": 44}, length=12_345)),
            "expanding",
            "expanded 44 of 12,345: 256 may begin now",
        ),
        (
            enrich(S.NONE, counted(sources=("users",)), **USERS),
            "source",
            "it waits for users, over whose output it is expanded",
        ),
        # With elements it does not wait for their end, and may be as far as they are.
        (
            enrich(S.NONE, counted(counts={"success": 3}, emitters=("users",), emitted=3), **USERS),
            "elements",
            "expanded 3, all that users has emitted so far",
        ),
        (
            enrich(S.NONE, counted(counts={"success": 3}, emitters=("users",), emitted=9), **USERS),
            "expanding",
            "expanded 3 of 9 that are emitted so far: 256 may begin now",
        ),
        (
            enrich(S.NONE, counted(emitters=("users",)), trigger_rule="one_failed", **USERS),
            "upstream",
            "it waits for 1 of 1 upstream tasks: users (running)",
        ),
        (
            enrich(S.NONE, counted(is_held=True)),
            "held",
            "an action of a user on its instances has not ended: until then none of them begins",
        ),
        (
            enrich(S.SUCCESS, counted(counts=FULL, length=300)),
            "instances",
            "300 instances are made: 250 scheduled, 6 running; 44 success",
        ),
        (
            enrich(S.SUCCESS, counted(counts={"failed": 1, "success": 56}, length=1000, stopped_by="fail_fast")),
            "ended",
            "it waits for nothing: stopped by fail_fast after 57 of 1,000, 56 success, 1 failed",
        ),
        (enrich(S.FAILED, counted(), last_error="no list"), "unexpandable", "it cannot be expanded: no list"),
        (
            enrich(S.FAILED, counted(), last_error="a user marked it as failed"),
            "ended",
            "it failed in try 0: a user marked it as failed",
        ),
        # An instance that was cleared waits for its turn as long as the task is expanded, and then for nothing.
        (
            enrich(S.NONE, counted(counts=FULL | {"none": 1}, length=400), map_index=17),
            "window_full",
            "expanded 301 of 400; window 256 full: 1 none, 250 scheduled, 6 running",
        ),
        (
            enrich(S.NONE, counted(counts={"none": 1}, length=1), map_index=0, map_state=S.SUCCESS),
            "about_to",
            "nothing holds it up: it is about to be scheduled",
        ),
        # Its rule knows of a failed instance upstream before the others have ended.
        (
            enrich(S.NONE, counted(), **USERS, seen={"users": frozenset({S.RUNNING, S.FAILED})}),
            "about_to",
            "nothing holds it up: it is about to be upstream_failed",
        ),
    ],
)
def test_why_a_mapped_task_waits(facts: TaskFacts, reason: str, headline: str) -> None:
    answer = explain_task(facts, [ALIVE])
    assert (answer.reason, answer.headline) == (reason, headline)


def test_without_a_supervisor_that_is_said_first() -> None:
    for state in (S.NONE, S.SUCCESS):
        answer = explain_task(enrich(state, counted(counts=FULL, length=300)), [])
        assert answer.reason == "no_supervisor"
    assert explain_task(enrich(S.SUCCESS, counted(counts={"success": 3}, length=3)), []).reason == "ended"
    assert explain_task(enrich(S.NONE, counted(is_held=True)), []).reason == "held"
