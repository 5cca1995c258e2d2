"""What must come of a scenario, said a second time and in other words than the code under test.

A trigger rule is a function of how all tasks upstream have ended. It may be decided earlier only where no further end
could change the answer, which is found out by trying all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import cache

from tests.proof.simulation.tasks.scenario import Dag, Leg, Task, TaskScenario, run_name

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
    return "failed" if any(states.get(leaf) in BROKEN for leaf in leaves) else "success"


# --- where nothing goes wrong ----------------------------------------------------------------------


def _attempt(legs: tuple[Leg, ...], task: Task) -> str:
    """Return how a try ends: as its task does (``branch``: well, with skips) or ``again`` where another may follow."""
    for leg in legs:
        if task.execution_timeout_s is not None and leg.seconds > task.execution_timeout_s:
            return "again"
        if leg.trouble in ("dies_before", "dies_after", "cut"):
            return "again"
        match leg.end:
            case "return":
                return "success"
            case "branch":
                return "branch"
            case "skip":
                return "skipped"
            case "give_up":
                return "failed"
            case "fail":
                return "again"
            case "defer":
                assert leg.wait is not None
                match leg.wait.end:
                    case "success" | "skipped":
                        return "success" if leg.wait.end == "success" else "skipped"
                    case "failed" | "raises" | "returns" | "never":
                        return "again"
                    case _:
                        continue
    raise AssertionError("the last leg does not defer")


def _outcome(task: Task) -> str:
    for number in range(1, task.retries + 2):
        end = _attempt(task.legs(number), task)
        if end != "again":
            return end
    return "failed"


def _skips(task: Task) -> tuple[str, ...]:
    """Return what a task skips that comes to the end of its branch."""
    return next((leg.skips for legs in task.attempts for leg in legs if leg.end == "branch"), ())


def states_of(dag: Dag) -> dict[str, str]:
    """Return how the tasks of a run end where nothing goes wrong but what their authors wrote."""
    states: dict[str, str] = {}
    skipped: set[str] = set()
    for task in dag.tasks:  # in an order in which each comes after what is upstream of it
        if task.name in skipped:
            states[task.name] = "skipped"
            continue
        decided = of_ended(task.rule, [states[name] for name in task.upstream])
        state = _outcome(task) if decided == "scheduled" else decided
        if state == "branch":
            skipped.update(_skips(task))
        states[task.name] = "success" if state == "branch" else state
    return states


def predicted(plan: TaskScenario) -> dict[str, str]:
    """Return how all tasks end, by their names; nothing where there are faults, or what is skipped may have begun."""
    found: dict[str, str] = {}
    for dag in plan.dags:
        skips = {name for task in dag.tasks for name in _skips(task)}
        if plan.faults or any(task.rule == "always" for task in dag.tasks if task.name in skips):
            continue
        states = states_of(dag)
        for number in range(1, len(dag.runs_at) + 1):
            found |= {f"{run_name(dag.name, number)}/{name}": state for name, state in states.items()}
    return found
