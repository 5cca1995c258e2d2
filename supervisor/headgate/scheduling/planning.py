"""Decisions about the tasks of a run, from the states in which they are: which begin, which never will, and its end.

They depend on the states alone, and not on the order of the changes: every evaluation considers the whole run, so that
changes between two evaluations are not missed.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

import msgspec

from headgate.protocol.messages import maps
from headgate.protocol.messages.dags import DURATION_S_MAX, DagSpec, StartTrigger, TaskSpec, TaskState
from headgate.protocol.messages.maps import MapSpec
from headgate.protocol.messages.rules import STARTING, TaskRule
from headgate.scheduling import states, trigger_rules

_NO_STATES: frozenset[TaskState] = frozenset()
_NONE = frozenset({TaskState.NONE})
_SUCCESS = frozenset({TaskState.SUCCESS})
# Rules that a success never keeps from holding: what they ask of a task, its success gives.
RULES_OF_SUCCESS = frozenset(
    {"all_success", "all_done", "none_failed", "none_failed_min_one_success", "none_skipped", "always"}
)
_BECOMES: dict[trigger_rules.Readiness, frozenset[TaskState]] = {
    "run": frozenset({TaskState.SCHEDULED}),
    "upstream_failed": frozenset({TaskState.UPSTREAM_FAILED}),
    "skipped": frozenset({TaskState.SKIPPED}),
}
RunEnd = Literal["success", "failed"]


class Graph:
    """The tasks of a DAG, in an order in which each is preceded by all tasks upstream of it. Immutable."""

    def __init__(self, spec: DagSpec) -> None:
        self.spec = spec
        self.tasks = {task.task_id: task for task in spec.tasks}
        self.start_triggers: dict[str, StartTrigger] = {
            task.task_id: task.start_trigger for task in spec.tasks if task.start_trigger is not None
        }
        self.maps: dict[str, MapSpec] = {task.task_id: task.map for task in spec.tasks if task.map is not None}
        # Of each task that is expanded over elements, those that emit them; and of each that emits elements, those that
        # are expanded over just these, so that it need not be far ahead of them.
        self.emitters = {
            name: {one.task_id for one in maps.of_tasks(of.source) if isinstance(one, maps.Elements)}
            for name, of in self.maps.items()
        }
        # Tasks with rules about signals, and of these the ones that wait for a signal to start them.
        self.ruled = {task.task_id: task for task in spec.tasks if task.signals is not None}
        self.started_by_signals = {name for name, task in self.ruled.items() if task.signals and task.signals.starts}
        self.is_started_by_signals_alone = bool(self.tasks) and self.started_by_signals == self.tasks.keys()
        # Tasks whose ends meet rules.
        rules = [rule for task in spec.tasks if task.signals is not None for rule in task.signals.rules]
        self.watched = frozenset(rule.task_id for rule in rules if isinstance(rule, TaskRule))
        self.expanded_as_emitted = _expanded_as_emitted(self.tasks, self.maps)
        self.in_order = _in_order(self.tasks)
        # The tasks of each mapped group, in order.
        self.groups: dict[str, list[TaskSpec]] = {}
        for task in self.in_order:
            if task.group:
                self.groups.setdefault(task.group, []).append(task)
        # What a signal starts, whatever is upstream of it, says nothing about that: a failure there is the run's.
        judging = [
            task for task in spec.tasks if task.task_id not in self.started_by_signals or _has_necessary_only(task)
        ]
        above = {upstream for task in judging for upstream in task.upstream}
        self.leaves = tuple(task.task_id for task in spec.tasks if task.task_id not in above)


class Decisions(msgspec.Struct, frozen=True):
    """Result of `decide`: the task ids by their next state, and the end of the run, None if it does not end now."""

    scheduled: tuple[str, ...] = ()
    upstream_failed: tuple[str, ...] = ()
    upstream_skipped: tuple[str, ...] = ()
    end: RunEnd | None = None


def decide(
    graph: Graph,
    now: Mapping[str, frozenset[TaskState]],
    *,
    may_start: bool = True,
    may_end: bool = True,
    is_ending: bool = False,
) -> Decisions:
    """Evaluate the trigger rules of all tasks in ``none``; skips and failures are passed downstream at once.

    ``now`` has the states of the run's tasks: those of the DAG, and maybe some that it no longer has. A task has one
    state. A mapped one has those of its instances, and ``none`` as long as some are still to be made; the decision is
    about all in ``none``. Those of mapped groups are decided at each of their indexes, by `decide_index`. A run does
    not end before all have ended, but the end states of tasks that the DAG no longer has do not count. If ``may_start``
    is False, because the DAG is paused, no task begins.

    Tasks that signals start do not begin here. The run ends, and skips those that never began, when only such are left.
    If all of its tasks are such it ends when a user says so. If it ``is_ending`` those that have not begun are skipped
    at once, since tasks downstream of them may wait. If ``may_end`` is False something is left that may start one.
    """
    after = dict(now)
    decided: dict[trigger_rules.Readiness, list[str]] = {"run": [], "upstream_failed": [], "skipped": []}
    for task in graph.in_order:
        before = after.get(task.task_id, _NO_STATES)
        if TaskState.NONE not in before or task.group:
            continue
        above = _NO_STATES.union(*_ruling(graph, task, after))
        readiness = trigger_rules.ready(task.trigger_rule, above)
        if task.task_id in graph.started_by_signals and (readiness == "run" or not _has_necessary_only(task)):
            if not is_ending:
                continue
            readiness = "skipped"
        if readiness == "run" and task.map is not None:
            readiness = expandable(graph, task.map, after)
        if readiness == "wait" or (readiness == "run" and not may_start):
            continue
        after[task.task_id] = before - _NONE | _BECOMES[readiness]
        decided[readiness].append(task.task_id)
    end: RunEnd | None = None
    unfinished = {name for name, some in after.items() if not states.UNFINISHED.isdisjoint(some)}
    if may_end and _may_end(graph, unfinished, after, is_ending=is_ending):
        decided["skipped"] += sorted(unfinished)
        after |= dict.fromkeys(unfinished, _BECOMES["skipped"])
        is_broken = not all(states.FAILED.isdisjoint(after.get(leaf, _NO_STATES)) for leaf in graph.leaves)
        end = "failed" if is_broken else "success"
    return Decisions(tuple(decided["run"]), tuple(decided["upstream_failed"]), tuple(decided["skipped"]), end)


def _may_end(graph: Graph, unfinished: set[str], now: Mapping[str, frozenset[TaskState]], *, is_ending: bool) -> bool:
    """Whether a run ends with these tasks skipped: none, or such as wait for signals to start them."""
    if any(name not in graph.started_by_signals or now[name] != _NONE for name in unfinished):
        return False
    return is_ending or not graph.is_started_by_signals_alone


def _has_necessary_only(task: TaskSpec) -> bool:
    """Whether no signal starts a task against its trigger rule."""
    rules = () if task.signals is None else task.signals.rules
    return not any(rule.action in STARTING and rule.condition == "sufficient" for rule in rules)


def is_ready(graph: Graph, task: TaskSpec, now: Mapping[str, frozenset[TaskState]]) -> bool:
    """Whether the trigger rule of a task holds, whatever its own state."""
    return trigger_rules.ready(task.trigger_rule, _NO_STATES.union(*_ruling(graph, task, now))) == "run"


def decide_index(
    graph: Graph, group: str, now: Mapping[str, frozenset[TaskState]], at: Mapping[str, TaskState]
) -> dict[str, trigger_rules.Readiness]:
    """Evaluate the trigger rules of the tasks of a mapped group at one of its indexes.

    ``at`` has the states of its instances there, by task id, and ``now`` those of whole tasks: an instance waits for
    the others at its own index, and for tasks outside of the group. Return what becomes of those in ``none``; those
    that still wait are left out.
    """
    here: dict[str, frozenset[TaskState]] = {name: frozenset({state}) for name, state in at.items()}
    seen = ChainMap(here, cast(dict[str, frozenset[TaskState]], now))
    decided: dict[str, trigger_rules.Readiness] = {}
    for task in graph.groups[group]:
        if here.get(task.task_id) != _NONE:
            continue
        readiness = trigger_rules.ready(task.trigger_rule, _NO_STATES.union(*_ruling(graph, task, seen)))
        if readiness != "wait":
            here[task.task_id] = _BECOMES[readiness]
            decided[task.task_id] = readiness
    return decided


def _ruling(graph: Graph, task: TaskSpec, now: Mapping[str, frozenset[TaskState]]) -> Iterable[frozenset[TaskState]]:
    """Return the states of the upstream tasks as the trigger rule of a task sees them now.

    A task that is expanded over elements begins with the first of them: until the one that emits them has ended, it is
    taken to succeed, unless its success could have the rule say that no instance is to run.
    """
    emitters = graph.emitters.get(task.task_id, ()) if task.trigger_rule in RULES_OF_SUCCESS else ()
    for name in task.upstream:
        is_emitting = name in emitters and not states.UNFINISHED.isdisjoint(now[name])
        yield _SUCCESS if is_emitting else now[name]


def expandable(graph: Graph, spec: MapSpec, now: Mapping[str, frozenset[TaskState]]) -> trigger_rules.Readiness:
    """Return the next step of a mapped task whose trigger rule holds, by the tasks over whose output it is expanded.

    Nothing is known of what a task leaves that did not succeed. A mapped one leaves what those instances of it have
    left that did: all have to end, and it does not matter how.
    """
    sources = {source.task_id for source in maps.of_tasks(spec.source) if isinstance(source, maps.Output)}
    found = _NO_STATES.union(*(now[source] for source in sources))
    if not states.UNFINISHED.isdisjoint(found):
        return "wait"
    ended = _NO_STATES.union(*(now[source] for source in sources if source not in graph.maps))
    return trigger_rules.ready("all_success", ended)


def related(
    upstream_of: Mapping[str, Sequence[str]], task_ids: Iterable[str], *, upstream: bool, downstream: bool
) -> set[str]:
    """Return these tasks, with all that is upstream, downstream, or both, of any of them, at whatever distance.

    ``upstream_of`` has the direct upstream tasks of each task of the DAG; ids that it lacks have no relatives.
    """
    found = set(task_ids)
    roots = frozenset(found)
    if upstream:
        found |= _reached(upstream_of, roots)
    if downstream:
        downstream_of: dict[str, list[str]] = {}
        for task_id, above in upstream_of.items():
            for one in above:
                downstream_of.setdefault(one, []).append(task_id)
        found |= _reached(downstream_of, roots)
    return found


def _expanded_as_emitted(tasks: Mapping[str, TaskSpec], mapped: Mapping[str, MapSpec]) -> dict[str, list[str]]:
    """Return the tasks that are expanded over the elements of each task, and wait for nothing else that it leads to.

    Nor for its end: see `_ruling`.
    """
    found: dict[str, list[str]] = {}
    upstream_of = {name: task.upstream for name, task in tasks.items()}
    for name, spec in mapped.items():
        if isinstance(spec.source, maps.Elements) and tasks[name].trigger_rule in RULES_OF_SUCCESS:
            emitter = spec.source.task_id
            others = [one for one in tasks[name].upstream if one != emitter]
            if emitter not in related(upstream_of, others, upstream=True, downstream=False):
                found.setdefault(emitter, []).append(name)
    return found


def _in_order(tasks: Mapping[str, TaskSpec]) -> tuple[TaskSpec, ...]:
    """Return the tasks in topological order: depth first; without recursion, since a chain may be as long as a DAG."""
    done: set[str] = set()
    order: list[TaskSpec] = []
    for root in tasks:
        pending = [(root, False)]
        while pending:
            task_id, is_above_done = pending.pop()
            if task_id in done:
                continue
            if is_above_done:
                done.add(task_id)
                order.append(tasks[task_id])
                continue
            pending.append((task_id, True))
            pending += [(upstream, False) for upstream in tasks[task_id].upstream if upstream not in done]
    return tuple(order)


# --- retries -------------------------------------------------------------------------------------

_DOUBLINGS_MAX = 64  # more would exceed any limit on the delay, and overflow a float in the end


def retry_wait_s(tries: int, *, delay_s: float, is_exponential: bool, delay_max_s: float | None) -> float:
    """Return the seconds until the next try, after ``tries`` failed ones (at least one).

    With an exponential backoff the delay doubles from one try to the next. Never more than ``delay_max_s``, nor than
    the longest time that the database can hold.
    """
    assert tries >= 1
    if is_exponential:
        delay_s *= 2.0 ** min(tries - 1, _DOUBLINGS_MAX)
    return min(delay_s, DURATION_S_MAX if delay_max_s is None else delay_max_s)


def _reached(edges: Mapping[str, Sequence[str]], roots: Iterable[str]) -> set[str]:
    reached: set[str] = set()
    pending = list(roots)
    while pending:
        for one in edges.get(pending.pop(), ()):
            if one not in reached:
                reached.add(one)
                pending.append(one)
    return reached
