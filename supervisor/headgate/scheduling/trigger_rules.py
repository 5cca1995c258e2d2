"""Whether a task may run, by the states of the tasks directly upstream of it.

The answer never depends on the order in which those end: it is given as soon as no later end could change it, and not
before (``all_done`` always waits for all of them). It depends only on which states there are, and not on how many tasks
are in them. Otherwise a task with a skipped and a failed upstream task would be
skipped or failed by chance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, assert_never

from headgate.protocol.messages.dags import TaskState, TriggerRule
from headgate.scheduling.states import TERMINAL

Readiness = Literal["run", "wait", "skipped", "upstream_failed"]


def ready(rule: TriggerRule, upstream_states: Iterable[TaskState]) -> Readiness:
    """Return the next step of a task in ``none`` whose upstream tasks are in these states.

    A task without upstream tasks runs, whatever its rule. An upstream task that was removed counts as skipped.
    """
    states = frozenset(upstream_states)
    success = TaskState.SUCCESS in states
    failed = TaskState.FAILED in states
    broken = failed or TaskState.UPSTREAM_FAILED in states
    skipped = TaskState.SKIPPED in states or TaskState.REMOVED in states
    is_done = states <= TERMINAL
    if not states:
        return "run"
    match rule:
        case "always":
            return "run"
        case "all_done":
            return "run" if is_done else "wait"
        case "all_success":
            return _unless(broken, "upstream_failed", is_done, "skipped" if skipped else "run")
        case "none_failed":
            return _unless(broken, "upstream_failed", is_done, "run")
        case "none_failed_min_one_success":
            return _unless(broken, "upstream_failed", is_done, "run" if success else "skipped")
        case "none_skipped":
            return _unless(skipped, "skipped", is_done, "run")
        case "all_failed":
            return _unless(success or skipped, "skipped", is_done, "run")
        case "all_skipped":
            return _unless(success or broken, "skipped", is_done, "run")
        case "one_success":
            return _unless(success, "run", is_done, "upstream_failed" if broken else "skipped")
        case "one_failed":
            return _unless(broken, "run", is_done, "skipped")
        case "one_done":
            return _unless(success or failed, "run", is_done, "upstream_failed" if broken else "skipped")
        case _:
            assert_never(rule)


def _unless(deciding: bool, decided: Readiness, is_done: bool, otherwise: Readiness) -> Readiness:
    """Return ``decided`` if any task is in a deciding state; if all have ended without, ``otherwise``."""
    if deciding:
        return decided
    return otherwise if is_done else "wait"
