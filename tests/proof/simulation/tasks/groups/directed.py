"""Scenarios of groups that are not drawn: for promises about a moment that random ones meet by chance at most."""

from __future__ import annotations

from collections.abc import Callable

from tests.proof.simulation.scenario import Fault
from tests.proof.simulation.tasks import records
from tests.proof.simulation.tasks.groups.drawing import GroupAct
from tests.proof.simulation.tasks.maps.directed import ends_of, run_judged
from tests.proof.simulation.tasks.maps.plans import Emits, Mapped, Worklist
from tests.proof.simulation.tasks.scenario import Leg, Task

QUICK, SLOW = ((Leg(seconds=0.05),),), ((Leg(seconds=2.4),),)


def _ends(tasks: tuple[Task, ...], wanted: dict[str, list[str]], *faults: Fault, workers: int = 3) -> list[str]:
    """Run a DAG; return what is found, and whether instances have not ended as they should."""
    found, history = run_judged(tasks, *faults, workers=workers)
    ends = {name: ends_of(history, f"d1/r1/{name}") for name in wanted}
    return found if ends == wanted else [*found, f"the instances are {ends}"]


def an_index_has_to_do_with_no_other() -> list[str]:
    """One worker takes three indexes through a group, and the first task fails at the second of them."""
    slow = ((Leg(seconds=1.2),),)
    one = Task("a", attempts=slow, mapped=Mapped(count=3, group="g", ends=((1, "fail", 9),)))
    other = Task("b", ("a",), mapped=Mapped(count=3, group="g"))
    wanted = {"a": ["success", "failed", "success"], "b": ["success", "upstream_failed", "success"]}
    return _ends((one, other), wanted, workers=1)


def with_fail_fast_an_index_that_has_begun_goes_on() -> list[str]:
    """Of two indexes at once the first fails, while the second has done one of its two tasks."""
    fails = Mapped(count=4, group="g", window=2, fail_fast=True, ends=((0, "fail", 9),))
    plain = Mapped(count=4, group="g", window=2, fail_fast=True)
    one = Task("a", attempts=((Leg(seconds=0.4),),), mapped=fails)
    other = Task("b", ("a",), attempts=SLOW, mapped=plain)
    return _ends((one, other), {"a": ["failed", "success"], "b": ["upstream_failed", "success"]})


def a_task_that_emits_ends_after_all_instances() -> list[str]:
    """All elements are stored, and their instances have ended, long before the task ends that has emitted them."""
    source = Task("s", attempts=SLOW, emits=Emits(2, 2))
    each = Task("a", ("s",), attempts=QUICK, mapped=Mapped("s", is_of_elements=True))
    return _ends((source, each, Task("t", ("a",))), {"a": ["success"] * 2})


def an_outcome_that_comes_too_late_appends_nothing() -> list[str]:
    """An instance is cleared while its worker, which takes its time to stop, is about to append."""
    slow = ((Leg(seconds=1.2, trouble="stubborn"),),)
    # In its second try, after the clear, it would append something else.
    worklist = Worklist("a", 1, 9, ("a",), (("k1",), ()))
    found, history = run_judged(
        (Task("a", attempts=slow, mapped=Mapped(worklist=worklist)),),
        GroupAct(0.6, "d1/r1/a[0]", "clear", "running", 0.3),
        workers=3,
    )
    if not any(isinstance(record, records.StepRan) and record.appended for record in history):
        found.append("nobody would have appended")
    return found


def a_value_whose_instance_was_removed_gets_it_back() -> list[str]:
    """The second time there are fewer values; then one instance alone is cleared, and appends another one."""
    # By the number of its try: it appends two, none, and one.
    worklist = Worklist("a", 1, 9, ("a",), (("k1",), (), ("k2",)))
    tasks = (Task("a", attempts=QUICK, mapped=Mapped(worklist=worklist)), Task("t", ("a",)))
    clears = (
        GroupAct(2.0, "d1/r1/a", "clear", "success", downstream=True),
        GroupAct(4.0, "d1/r1/a[0]", "clear", "success"),
    )
    return _ends(tasks, {"a": ["success"] * 2}, *clears)


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "own index": an_index_has_to_do_with_no_other,
    "fail fast": with_fail_fast_an_index_that_has_begun_goes_on,
    "late end": a_task_that_emits_ends_after_all_instances,
    "late outcome": an_outcome_that_comes_too_late_appends_nothing,
    "removed": a_value_whose_instance_was_removed_gets_it_back,
}
