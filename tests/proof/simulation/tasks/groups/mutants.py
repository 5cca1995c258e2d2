"""Deliberate bugs in groups, loops, worklists and elements: each breaks one promise, and the simulation finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tests.proof.simulation.mutants import Mutant, Patch
from tests.proof.simulation.tasks.groups.directed import DIRECTED

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import Available, Worklist
from headgate.scheduling import planning
from headgate.scheduling.states import UNFINISHED
from headgate.store.scheduling import expansion, groups
from headgate.store.tasks import elements, outcomes

_States = Mapping[str, frozenset[TaskState]]


# --- an index for itself ---------------------------------------------------------------------------


def _an_index_waits_for_all() -> Sequence[Patch]:
    original = planning.decide_index

    def decide_index(graph: Any, group: str, now: _States, at: Mapping[str, TaskState]) -> dict[str, Any]:
        waits = {
            task.task_id
            for task in graph.groups[group]
            if any(above in at and not UNFINISHED.isdisjoint(now[above]) for above in task.upstream)
        }
        found = original(graph, group, now, at)
        return {name: readiness for name, readiness in found.items() if name not in waits}

    return [(planning, "decide_index", decide_index)]


def _others_have_a_say() -> Sequence[Patch]:
    original = planning.decide_index

    def decide_index(graph: Any, group: str, now: _States, at: Mapping[str, TaskState]) -> dict[str, Any]:
        failed = {
            name: TaskState.FAILED for name in at if TaskState.FAILED in now[name] and at[name] is not TaskState.NONE
        }
        return original(graph, group, now, {**at, **failed})

    return [(planning, "decide_index", decide_index)]


def _a_failed_index_goes_on() -> Sequence[Patch]:
    original = planning.decide_index

    def decide_index(graph: Any, group: str, now: _States, at: Mapping[str, TaskState]) -> dict[str, Any]:
        fine = {name: TaskState.SUCCESS if state is TaskState.FAILED else state for name, state in at.items()}
        return original(graph, group, now, fine)

    return [(planning, "decide_index", decide_index)]


def _the_window_is_of_one_task() -> Sequence[Patch]:
    original: Any = groups._Look._count_indexes

    def count_indexes(self: Any, some: frozenset[TaskState]) -> int:
        every, self._tasks = self._tasks, self._tasks[:1]
        try:
            return int(original(self, some))
        finally:
            self._tasks = every

    return [(groups._Look, "_count_indexes", count_indexes)]


def _fail_fast_ends_what_has_begun() -> Sequence[Patch]:
    original: Any = groups._Look._at

    def at_indexes(self: Any, indexes: Sequence[int]) -> Any:
        for index, at, ids in original(self, indexes):
            yield index, at if self._stopped is None else dict.fromkeys(ids, TaskState.NONE), ids

    return [(groups._Look, "_at", at_indexes)]


def _an_end_is_not_looked_at_again() -> Sequence[Patch]:
    original = groups.advance

    def advance(*arguments: Any, **options: Any) -> groups.Advanced:
        return original(*arguments, **options)._replace(has_ended=False)

    return [(groups, "advance", advance)]


def _ended_after_all_instances() -> Sequence[Patch]:
    original: Any = expansion.expand

    def expand(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **options)._replace(is_done=True)

    return [(expansion, "expand", expand)]


# --- lists that grow -------------------------------------------------------------------------------


def _ended_while_an_instance_runs() -> Sequence[Patch]:
    original: Any = expansion._of_worklist

    def of_worklist(tx: Any, seen: Any, source: Worklist, tasks: Any, made: int) -> Available:
        there = original(tx, seen, source, tasks, made)
        return Available(there.length, made >= there.length)

    return [(expansion, "_of_worklist", of_worklist)]


def _an_iteration_too_early() -> Sequence[Patch]:
    original: Any = expansion._of_worklist

    def of_worklist(tx: Any, seen: Any, source: Worklist, tasks: Any, made: int) -> Available:
        there: Available = original(tx, seen, source, tasks, made)
        is_early = source.is_loop and not there.is_complete and there.length < source.length_max
        return Available(there.length + is_early, there.is_complete)

    def begin(self: Any, *arguments: Any) -> None:
        look(self, *arguments)
        self._spec = msgspec.structs.replace(self._spec, window=2)

    look: Any = groups._Look.__init__
    return [(expansion, "_of_worklist", of_worklist), (groups._Look, "__init__", begin)]


def _late_outcomes_append() -> Sequence[Patch]:
    original, append = outcomes._store_elements, outcomes._append

    def store_elements(tx: Any, ends: Sequence[Any]) -> None:
        original(tx, ends)
        append(tx, ends)

    def append_none(*_arguments: Any) -> None:
        pass

    return [(outcomes, "_store_elements", store_elements), (outcomes, "_append", append_none)]


def _keys_are_not_unique() -> Sequence[Patch]:
    original = elements.append

    def append(tx: Any, instance: Any, appended: Any) -> None:
        original(tx, instance, msgspec.structs.replace(appended, keys=(None,) * len(appended.keys)))

    return [(elements, "append", append)]


def _emitted_by_place_alone() -> Sequence[Patch]:
    """Each try emits its elements behind those that are there, whatever their keys are."""

    def new_by_key(tx: Any, instance: Any, some: Sequence[bytes], keys: Sequence[Any]) -> list[tuple[bytes, None]]:
        return [(value, None) for value in some]

    def has_keys(tx: Any, instance: Any) -> bool:
        return True

    return [(elements, "_new_by_key", new_by_key), (elements, "_has_keys", has_keys)]


def _no_limit() -> Sequence[Patch]:
    original = elements.append

    def append(tx: Any, instance: Any, appended: Any) -> None:
        original(tx, instance, msgspec.structs.replace(appended, length_max=1000))

    return [(elements, "append", append)]


MUTANTS = {
    "an-index-waits-for-all": Mutant(
        "I26: no other index has a say", "waits for another index", _an_index_waits_for_all, directed="own index"
    ),
    "others-have-a-say": Mutant(
        "I26: by the rule at its own index", "wrong by its rule", _others_have_a_say, directed="own index"
    ),
    "a-failed-index-goes-on": Mutant(
        "I26: a failure ends its own index", "wrong by its rule", _a_failed_index_goes_on, 100
    ),
    "the-window-is-of-one-task": Mutant(
        "I26: the window counts indexes", "more than its window", _the_window_is_of_one_task, 100
    ),
    "fail-fast-ends-what-has-begun": Mutant(
        "with fail_fast, what has begun goes on",
        "wrong by its rule",
        _fail_fast_ends_what_has_begun,
        directed="fail fast",
    ),
    "an-end-is-not-looked-at-again": Mutant(
        "what waits for a group goes on", "stuck", _an_end_is_not_looked_at_again, 100
    ),
    "ended-after-all-instances": Mutant(
        "what waits for elements goes on", "stuck", _ended_after_all_instances, directed="late end"
    ),
    "ended-while-an-instance-runs": Mutant(
        "I27: ended when nobody can append", "ended while one could append", _ended_while_an_instance_runs, 100
    ),
    "an-iteration-too-early": Mutant(
        "an iteration begins when its gate says so", "instance of no value", _an_iteration_too_early, 100
    ),
    "late-outcomes-append": Mutant(
        "I27: appended with the outcome, or not at all",
        "not what was appended",
        _late_outcomes_append,
        directed="late outcome",
    ),
    "keys-are-not-unique": Mutant("I27: a key is there once", "not what was appended", _keys_are_not_unique, 100),
    "emitted-by-place-alone": Mutant(
        "I24: an element is one by its key", "emitted twice", _emitted_by_place_alone, 100
    ),
    "no-limit": Mutant("no more is appended than may be", "beyond its limit", _no_limit, 100),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())
