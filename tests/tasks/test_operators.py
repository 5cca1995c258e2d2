"""Branches and short circuits: what of the tasks below they leave out."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.protocol.messages.steps import StepFailed, StepOutcome, StepSucceeded
from headgate.tasks import DAG, BranchPythonOperator, EmptyOperator, ShortCircuitOperator, task
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step
from headgate.tasks.operator import BaseOperator


def step(operator: BaseOperator) -> StepOutcome:
    return run_step(operator, make_context(operator, run_id="run-1"))


def skips(operator: BaseOperator) -> tuple[str, ...]:
    outcome = step(operator)
    assert isinstance(outcome, StepSucceeded)
    return outcome.skips


def branching(choice: Any) -> BranchPythonOperator:
    """A branch above left, right and both; left is above both as well, and end is below all."""
    with DAG("orders"):
        branch = BranchPythonOperator(task_id="branch", python_callable=lambda: choice)
        left, right, both, end = (EmptyOperator(task_id=name) for name in ("left", "right", "both", "end"))
        branch >> [left, right, both] >> end
        left >> both
    return branch


@pytest.mark.parametrize(
    ("choice", "skipped"),
    [
        ("left", ("right",)),
        ("right", ("both", "left")),
        ("both", ("left", "right")),
        (["left", "right"], ()),
        ({"right", "both"}, ("left",)),
        (None, ("both", "left", "right")),
        ([], ("both", "left", "right")),
    ],
)
def test_a_branch_skips_what_it_does_not_choose_but_not_what_is_below_its_choice(
    choice: Any, skipped: tuple[str, ...]
) -> None:
    assert skips(branching(choice)) == skipped


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ("end", "ValueError: the branch chose end; the directly downstream tasks are: both, left, right"),
        (["left", "wrong"], "ValueError: the branch chose wrong; "),
        (7, "TypeError: a branch must return a task_id, a list of them, or None, not 7"),
        ([7], "TypeError: a branch must return a task_id"),
        ({"left": 1}, "TypeError: a branch must return a task_id"),
    ],
)
def test_a_branch_that_chooses_what_is_not_there_fails(choice: Any, problem: str) -> None:
    outcome = step(branching(choice))
    assert isinstance(outcome, StepFailed)
    assert outcome.error.startswith(problem)


@pytest.mark.parametrize(
    ("condition", "ignore_rules", "skipped"),
    [
        (True, True, ()),
        ("yes", False, ()),
        (False, True, ("end", "left", "right")),
        (None, True, ("end", "left", "right")),
        ([], False, ("left", "right")),
    ],
)
def test_a_short_circuit_cuts_off_what_is_below(condition: Any, ignore_rules: bool, skipped: tuple[str, ...]) -> None:
    with DAG("orders"):
        circuit = ShortCircuitOperator(
            task_id="circuit", python_callable=lambda: condition, ignore_downstream_trigger_rules=ignore_rules
        )
        left, right = EmptyOperator(task_id="left"), EmptyOperator(task_id="right")
        EmptyOperator(task_id="beside") >> circuit >> [left, right] >> EmptyOperator(task_id="end")
    assert skips(circuit) == skipped


def test_branches_and_short_circuits_can_be_decorated_functions() -> None:
    @task.branch
    def choose() -> str:
        return "left"

    @task.short_circuit(task_id="circuit")
    def never() -> bool:
        return False

    with DAG("orders") as dag:
        choose() >> [EmptyOperator(task_id="left"), EmptyOperator(task_id="right")]
        never() >> EmptyOperator(task_id="below")
    assert skips(dag.tasks["choose"]) == ("right",)
    assert skips(dag.tasks["circuit"]) == ("below",)


def test_an_empty_task_succeeds_with_nothing() -> None:
    assert step(EmptyOperator(task_id="nothing")) == StepSucceeded()


def test_an_operator_without_execute_fails_and_says_so() -> None:
    outcome = step(BaseOperator(task_id="base"))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "NotImplementedError: BaseOperator does not override execute"
