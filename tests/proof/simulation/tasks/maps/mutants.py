"""Deliberate bugs in mapped tasks: each breaks one promise, and the simulation has to find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import select, update
from tests.proof.simulation.mutants import Mutant, Patch
from tests.proof.simulation.tasks.maps.directed import DIRECTED

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import Available
from headgate.scheduling import map_states
from headgate.store.scheduling import expansion
from headgate.store.tables import task_instance
from headgate.store.tasks import dispatch, run_states, user_actions

_C = task_instance.c


def _window_ignored() -> Sequence[Patch]:
    original: Any = expansion.expand

    def expand(tx: Any, seen: Any, task: Any, mapped: Any, *, limit: int) -> Any:
        wide = msgspec.structs.replace(task.map, window=100)
        return original(tx, seen, msgspec.structs.replace(task, map=wide), mapped, limit=limit)

    return [(expansion, "expand", expand)]


def _an_index_is_left_out() -> Sequence[Patch]:
    original: Any = run_states.own_map

    def own_map(tx: Any, own: Any) -> Any:
        found = original(tx, own)
        return found._replace(made=found.made + (found.made == 1))

    return [(run_states, "own_map", own_map)]


def _ended_with_its_first_window() -> Sequence[Patch]:
    original: Any = expansion.available

    def available(tx: Any, seen: Any, owns: Any, tasks: Any, mapped: Any) -> Available:
        there = original(tx, seen, owns, tasks, mapped)
        return Available(min(there.length, tasks[0].map.window), is_complete=True)

    return [(expansion, "available", available)]


def _removed_instances_count() -> Sequence[Patch]:
    def together(own: frozenset[TaskState], instances: frozenset[TaskState]) -> frozenset[TaskState]:
        return instances | (own - {TaskState.SUCCESS}) or own

    return [(map_states, "together", together)]


def _fail_fast_forgets_what_is_scheduled() -> Sequence[Patch]:
    def stop(tx: Any, seen: Any, task_id: str, *, limit: int) -> int:
        return 0

    return [(expansion, "stop", stop)]


def _clear_keeps_the_length() -> Sequence[Patch]:
    original: Any = user_actions.clear_one

    def clear(tx: Any, task: Any, streams: Any) -> Any:
        known = tx.connection.execute(select(_C.map_length).where(_C.id == task.id)).scalar_one()
        state = original(tx, task, streams)
        tx.connection.execute(update(task_instance).where(_C.id == task.id).values(map_length=known))
        return state

    return [(user_actions, "clear_one", clear)]


def _room_of_a_task_is_given_to_each() -> Sequence[Patch]:
    original: Any = dispatch.fit

    def fit(candidates: Sequence[Any], *rest: Any) -> Any:
        return original([msgspec.structs.replace(one, active_room=None) for one in candidates], *rest)

    return [(dispatch, "fit", fit)]


def _begun_while_another_restarts() -> Sequence[Patch]:
    original: Any = expansion.expand

    def expand(tx: Any, seen: Any, task: Any, mapped: Any, *, limit: int) -> Any:
        states = {name: some - {TaskState.RESTARTING} for name, some in seen.mapped.items()}
        return original(tx, seen._replace(mapped=states), task, mapped, limit=limit)

    return [(expansion, "expand", expand)]


MUTANTS = {
    "window-ignored": Mutant("no more begin than the window takes", "more than its window", _window_ignored, 100),
    "an-index-is-left-out": Mutant("indexes have no gap", "a value left out", _an_index_is_left_out, 100),
    "ended-with-its-first-window": Mutant(
        "every value has an instance", "a value left out", _ended_with_its_first_window, 100
    ),
    "removed-instances-count": Mutant(
        "removed instances count for nothing",
        "wrong by its rule",
        _removed_instances_count,
        directed="cleared with its source",
    ),
    "fail-fast-forgets-what-is-scheduled": Mutant(
        "fail_fast skips what has not begun",
        "began after too many failures",
        _fail_fast_forgets_what_is_scheduled,
        directed="fail fast",
    ),
    "clear-keeps-the-length": Mutant(
        "values are counted again after a clear",
        "instance of no value",
        _clear_keeps_the_length,
        directed="cleared with its source",
    ),
    "room-of-a-task-is-given-to-each": Mutant(
        "no more instances are with workers than may", "more at once than may", _room_of_a_task_is_given_to_each, 200
    ),
    "begun-while-another-restarts": Mutant(
        "no instance begins anew before old workers are gone",
        "began while another restarts",
        _begun_while_another_restarts,
        directed="restarting",
    ),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())
