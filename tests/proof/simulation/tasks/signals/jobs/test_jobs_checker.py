"""The checker of jobs, given histories by hand: each finding is found; and seeds draw all that there is."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import msgspec
import pytest
from tests.proof.simulation.scenario import KillSupervisor, StartBeside, Topology
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.scenario import Dag, Leg, Task
from tests.proof.simulation.tasks.signals import drawing, records, world
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.jobs.checker import check
from tests.proof.simulation.tasks.signals.jobs.directed import deciding, endless, main
from tests.proof.simulation.tasks.signals.jobs.drawing import NAME
from tests.proof.simulation.tasks.signals.plans import OfSignals
from tests.proof.simulation.tasks.signals.rules.directed import sends
from tests.proof.simulation.tasks.signals.rules.plans import OfCall, Rule, Ruled

from headgate.protocol.messages.rules import Action

SEEDS = 200
EVERY = Task("t", attempts=((Leg(),),), signals=OfSignals(ruled=Ruled((Rule(every_s=1.0),))))
TASKS = (main(4.0), deciding(), endless(Leg(seconds=1.0, trouble="dies_after"), name="e"), EVERY)
USERS = (sends(1.0, "1"), sends(2.0, "1", "2"), sends(3.0, "1"))
PLAN = SignalScenario(
    0, Topology(), dags=(Dag("d1", TASKS, (0.5,)),), users=USERS, faults=(), workers=4, endless_workers=1
)
# The first supervisor dies, and a second one takes over what it has.
TAKEN = msgspec.structs.replace(PLAN, faults=(StartBeside(0.7), KillSupervisor(1.0, down_s=30.0)))


@cache
def _history_of(is_taken: bool) -> tuple[Any, ...]:
    return tuple(world.run(TAKEN if is_taken else PLAN))


def history(plan: SignalScenario = PLAN) -> tuple[Any, ...]:
    return _history_of(plan is TAKEN)


def kinds(told: Any, plan: SignalScenario = PLAN) -> set[str]:
    return {finding.kind for finding in check(plan, told)}


def places(kind: type, plan: SignalScenario = PLAN, **fields: Any) -> list[int]:
    return [
        number
        for number, record in enumerate(history(plan))
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in fields.items())
    ]


def changed(number: int, **fields: Any) -> tuple[Any, ...]:
    told = history()
    return (*told[:number], msgspec.structs.replace(told[number], **fields), *told[number + 1 :])


def without(number: int, plan: SignalScenario = PLAN) -> tuple[Any, ...]:
    return (*history(plan)[:number], *history(plan)[number + 1 :])


def test_ordinary_histories_are_fine() -> None:
    assert kinds(history()) == kinds(history(TAKEN), TAKEN) == set()
    assert [history()[number].version for number in places(records.Decided)] == [1, 2, 3, 4]
    assert len(places(of_tasks.Moved, task="d1/r1/e", by="lose_worker", state="scheduled")) > 1
    assert places(of_tasks.Moved, TAKEN, task="d1/r1/e", by="adopt", state="scheduled")
    assert places(records.Ticked, task="d1/r1/t", version=4)


def test_what_acts_and_was_not_decided_is_found() -> None:
    assert "decided by nobody" in kinds(without(places(records.Decided)[0]))


def test_another_decision_is_found() -> None:
    number = places(records.Undecided, by="settle_decisions", met=1)[0]
    assert "not what was decided" in kinds(changed(number, decided="STOP"))
    assert "not what was decided" in kinds(changed(places(records.Decided)[0], action="STOP"))


def test_what_is_passed_over_is_found() -> None:
    nothing = next(number for number in places(records.Decided) if history()[number].action == "NONE")
    assert "not decided" in kinds(without(nothing))


def test_a_signal_that_is_given_up_before_its_third_try_is_found() -> None:
    number = places(records.Undecided, by="settle_decisions", met=1)[0]
    assert "given up too early" in kinds(changed(number, decided="NONE", given_up=1))


def test_questions_in_another_order_or_about_what_is_decided_are_found() -> None:
    number = places(records.Questioned)[1]
    assert "decided out of order" in kinds(changed(number, signals=history()[number].signals[::-1]))
    assert "decided again" in kinds(changed(number, signals=(("k", 1),)))


def test_two_questions_at_a_time_are_found() -> None:
    number = places(records.Questioned)[0]
    again = msgspec.structs.replace(history()[number], token="other", supervisor=2)
    assert "asked twice" in kinds((*history()[: number + 1], again, *history()[number + 1 :]))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"next_at": 9.0}, "out of step"),
        ({"next_at": 1.0}, "a missed start was made up"),
        ({"version": 5}, "a missed start was made up"),
    ],
)
def test_a_time_that_is_not_that_of_the_rule_is_found(fields: dict[str, Any], found: str) -> None:
    assert found in kinds(changed(places(records.Ticked, version=3)[0], **fields))


def test_starts_that_come_early_or_late_or_not_at_all_are_found() -> None:
    third = places(records.Ticked, version=3)[0]
    early = [msgspec.structs.replace(one, at=one.at - 0.9) for one in history()[third:]]
    assert "started early" in kinds((*history()[:third], *early))
    late = [msgspec.structs.replace(one, at=one.at + 3.0) for one in history()[third:]]
    assert "start lost" in kinds((*history()[:third], *late))


def test_a_time_in_an_ended_run_is_found() -> None:
    last = places(records.Ticked, next_at=None)[-1]
    assert "started without cause" in kinds(changed(last, next_at=20.0))


def test_a_move_that_costs_a_try_is_found() -> None:
    number = places(of_tasks.Moved, task="d1/r1/e", by="lose_worker", state="scheduled")[0]
    assert "a move cost a try" in kinds(changed(number, tries_max=0))
    assert "a move cost a try" in kinds(changed(number, state="failed"))


def test_a_second_worker_is_found() -> None:
    gone = [one for one in history() if not isinstance(one, records.WorkerGone)]
    assert "on two workers" in kinds(gone)


def test_a_task_of_a_supervisor_that_lives_is_found() -> None:
    over = [one for one in history(TAKEN) if not isinstance(one, records.LeaseOver)]
    assert {"taken from the living"} <= kinds(over, TAKEN)


def test_seeds_draw_every_kind_of_job() -> None:
    drawn = [drawing.draw(seed) for seed in range(SEEDS)]
    tasks = [task for plan in drawn for dag in plan.dags if dag.name == NAME for task in dag.tasks]
    ruled = [task.ruled for task in tasks if task.ruled is not None]
    decides = [one.decides for one in ruled if one.decides is not None]
    assert {action for one in decides for _, action in one.actions} == set(get_args(Action))
    assert {call for one in decides for call in one.troubles} == set(get_args(OfCall))
    assert {bool(one.bad) for one in decides} == {True, False}
    assert {leg.end for task in tasks if task.endless for legs in task.attempts for leg in legs} == {"return", "fail"}
    assert any(rule.every_s for one in ruled for rule in one.rules)
