"""The checker of tasks, given histories by hand: each finding is found, and an ordinary history is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.proof.simulation import records as of_pair
from tests.proof.simulation.scenario import Topology
from tests.proof.simulation.tasks import records, world
from tests.proof.simulation.tasks.scenario import Dag, Leg, Task, TaskScenario, Wait
from tests.proof.simulation.tasks.streams.checker import check

TASK = "d1/r1/a"
LEGS = (Leg("defer", 0.5, Wait("event", 0.5), pushes=True), Leg(seconds=0.5, pushes=True))
PLAN = TaskScenario(0, Topology(), dags=(Dag("d1", (Task("a", attempts=(LEGS,)),), (0.5,)),))


def history() -> list[Any]:
    return world.run(PLAN)


def kinds(told: list[Any]) -> set[str]:
    return {finding.kind for finding in check(PLAN, told)}


def index(told: list[Any], kind: type, **fields: Any) -> int:
    return next(
        number
        for number, record in enumerate(told)
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in fields.items())
    )


def changed(told: list[Any], number: int, **fields: Any) -> list[Any]:
    return [*told[:number], msgspec.structs.replace(told[number], **fields), *told[number + 1 :]]


def test_an_ordinary_history_is_fine() -> None:
    assert kinds(history()) == set()


@pytest.mark.parametrize(
    ("kind", "which", "fields", "found"),
    [
        (records.Moved, {"by": "defer"}, {"said": "token-9"}, "a late answer counted"),
        (records.Moved, {"by": "dispatch"}, {"by": "fail"}, "no such transition"),
        (records.Moved, {"by": "store_slice"}, {"event": 7}, "resumed by another's event"),
        (records.Moved, {"by": "store_slice"}, {"method": "__fail__"}, "resumed without a cause"),
        (records.Moved, {"by": "store_slice"}, {"by": "time_out"}, "timed out early"),
        (records.Moved, {"by": "plan"}, {"try_number": 2}, "too many tries"),
        (records.Moved, {"by": "plan"}, {"state": "skipped"}, "wrong by its rule"),
        (records.TriggerMoved, {"end": "finished"}, {"end": ""}, "a trigger left open"),
        (records.XComsMoved, {}, {"values": ()}, "lost XComs"),
        (records.StepBegan, {}, {"token": "token-9"}, "a step of nobody's"),
        (records.StepBegan, {"leg": 1}, {"event": 9}, "resumed by another's event"),
        (records.StepBegan, {"leg": 1}, {"leg": 0}, "resumed twice"),
        (records.StepRan, {"leg": 1}, {"outcome": "failed"}, "not what the step came to"),
        (records.RunMoved, {"is_ended": True}, {"state": "failed"}, "a run ended wrongly"),
        (records.AllRested, {}, {"in_time": False}, "stuck"),
        (of_pair.Wrote, {"verb": "store_ends"}, {"epoch": 1}, "written without a lease"),
    ],
)
def test_what_should_not_be_is_found(kind: type, which: Any, fields: Any, found: str) -> None:
    told = [of_pair.Fenced(0.0, 1), *history()]
    assert found in kinds(changed(told, index(told, kind, **which), **fields))


def test_a_step_that_begins_twice_is_found() -> None:
    told = history()
    number = index(told, records.StepBegan)
    assert "a step began twice" in kinds([*told[: number + 1], *told[number:]])


def test_an_on_kill_that_no_user_asked_for_is_found() -> None:
    told = history()
    number = index(told, records.EventFired)
    assert "on_kill without a user" in kinds([*told[:number], records.KillHookCalled(1.0, TASK, 0), *told[number:]])


def test_a_task_that_is_never_resumed_is_found() -> None:
    told = history()
    number = index(told, records.Moved, by="store_slice")
    assert "never resumed" in kinds([*told[:number], told[-1]])


def test_more_slots_in_use_than_a_pool_has_are_found() -> None:
    plan = msgspec.structs.replace(PLAN, pool_slots=0)
    assert "pool overcommitted" in {finding.kind for finding in check(plan, world.run(PLAN))}


def test_what_changes_at_rest_is_found() -> None:
    told = history()
    assert "moved at rest" in kinds([*told, records.LookDone(told[-1].at, "succeed")])


def test_a_dead_letter_is_found() -> None:
    assert "an event was dead-lettered" in kinds([records.LetterStored(0.0, 1, 1, -1), *history()])


def test_a_second_event_of_one_run_of_a_trigger_is_found() -> None:
    told = history()
    number = index(told, records.EventFired)
    assert "fired after its first event" in kinds([*told[: number + 1], *told[number:]])


def test_a_trigger_that_runs_again_after_its_event_is_found() -> None:
    told = history()
    number = index(told, records.StepBegan, leg=1)
    again = records.Waited(told[number].at, TASK, 0, 1, 99)
    assert "ran again after its event" in kinds([*told[:number], again, *told[number:]])


def test_a_step_that_begins_after_the_end_of_its_try_is_found() -> None:
    (dag,) = PLAN.dags
    (task,) = dag.tasks
    hurried = msgspec.structs.replace(dag, tasks=(msgspec.structs.replace(task, execution_timeout_s=0.6),))
    plan = msgspec.structs.replace(PLAN, dags=(hurried,))
    assert "began after the end of its try" in {finding.kind for finding in check(plan, history())}
