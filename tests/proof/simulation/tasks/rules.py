"""Trigger rules and the ends of runs, stated a second time and in other words than the code under test.

A trigger rule is a function of how all tasks upstream have ended. It may be decided earlier only where no further end
could change the answer, which is found out by trying all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import cache

ENDS = ("success", "failed", "skipped", "upstream_failed")
ENDED = frozenset((*ENDS, "removed"))
BROKEN = frozenset(("failed", "upstream_failed"))
SKIPPED = frozenset(("skipped", "removed"))


def of_ended(rule: str, ends: Iterable[str]) -> str:
    """Return ``scheduled``, ``upstream_failed`` or ``skipped`` for a task all of whose upstream tasks have ended."""
    above = set(ends)
    broken, skipped, fine = above & BROKEN, above & SKIPPED, "success" in above
    if not above or rule in ("always", "all_done"):
        return "scheduled"
    if rule in ("all_success", "none_failed", "none_failed_min_one_success") and broken:
        return "upstream_failed"
    if rule in ("one_success", "one_done") and not fine and not (rule == "one_done" and "failed" in above):
        return "upstream_failed" if broken else "skipped"
    may_run = {
        "all_success": not skipped,
        "none_failed": True,
        "none_failed_min_one_success": fine,
        "one_success": fine,
        "one_done": fine or "failed" in above,
        "one_failed": bool(broken),
        "none_skipped": not skipped,
        "all_failed": not fine and not skipped,
        "all_skipped": not fine and not broken,
    }
    return "scheduled" if may_run[rule] else "skipped"


@cache
def decision(rule: str, above: tuple[str, ...]) -> str:
    """Return what becomes of a task now, by the states of all that is upstream of it: ``none`` for nothing yet."""
    is_ended = [state in ENDED for state in above]
    if all(is_ended) or rule == "always":
        return of_ended(rule, above)
    if rule == "all_done":
        return "none"
    fixed = [state for state, has in zip(above, is_ended, strict=True) if has]
    answers = {of_ended(rule, (*fixed, *rest)) for rest in itertools.product(ENDS, repeat=len(above) - len(fixed))}
    return answers.pop() if len(answers) == 1 else "none"


def end_of_run(states: Mapping[str, str], upstream: Mapping[str, tuple[str, ...]]) -> str:
    """Return how a run ends whose tasks have ended so: by those that nothing is downstream of."""
    above = {name for names in upstream.values() for name in names}
    leaves = upstream.keys() - above
    # An instance of a mapped task counts as the task.
    broken = {name.partition("[")[0] for name, state in states.items() if state in BROKEN}
    return "success" if leaves.isdisjoint(broken) else "failed"
