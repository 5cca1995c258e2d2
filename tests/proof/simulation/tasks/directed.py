"""Scenarios of tasks that are not drawn: for promises about a moment, which random ones meet by chance at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.proof.simulation.records import Faulted
from tests.proof.simulation.scenario import Fault, FreezeSupervisor, StartBeside, Topology
from tests.proof.simulation.tasks import records, world
from tests.proof.simulation.tasks.faults import Act, FailAtVerb, KillAtVerb, Pause
from tests.proof.simulation.tasks.scenario import Dag, Leg, Task, TaskScenario, Wait
from tests.proof.simulation.tasks.streams.checker import check

TASK = "d1/r1/a"
LOOKS = 8  # of a supervisor, until a run of one task has ended


def judged(task: Task, *faults: Fault, latency_s: float = 0.0) -> tuple[list[str], list[Any]]:
    """Run one run of one task; return what is found, and the history."""
    topology = Topology(latency_s=latency_s)
    plan = TaskScenario(0, topology, dags=(Dag("d1", (task,), (0.5,)),), workers=3, faults=faults)
    history = world.run(plan)
    return [str(finding) for finding in check(plan, history)], history


def _states(history: Sequence[Any]) -> list[str]:
    return [record.state for record in history if isinstance(record, records.Moved) and record.old != record.state]


def the_answer_of_an_earlier_worker_changes_nothing() -> list[str]:
    """A user marks a task and clears it; a new worker gets it when the old one has answered."""
    task = Task("a", attempts=((Leg(seconds=1.2, trouble="stubborn"),),))
    found, history = judged(task, Act(0.5, TASK, "redo", "running", 0.4))
    ends = [record for record in history if isinstance(record, records.StepTold) and record.how == "ended"]
    if len(ends) != 2 or _states(history).count("running") != 2:
        found.append("the old worker did not answer, or there was no new one")
    return found


def an_outcome_in_doubt_is_stored_once() -> list[str]:
    """The database goes away when it has committed an outcome, and another supervisor runs the next try meanwhile."""
    task = Task("a", retries=1, attempts=((Leg("fail", 1.0),), (Leg(seconds=4.0),)))
    others = (StartBeside(1.0), FreezeSupervisor(1.7, 2.0))
    found, history = judged(task, FailAtVerb("fail", 1, is_committed=True), *others)
    began = [record.supervisor for record in history if isinstance(record, records.StepBegan)]
    return found if began == [1, 2] else [*found, f"it was begun by {began}"]


def what_is_cleared_while_it_runs_begins_anew() -> list[str]:
    """A user clears a task that runs, and its worker succeeds before it is stopped."""
    task = Task("a", attempts=((Leg(seconds=1.2, trouble="stubborn"),),))
    found, history = judged(task, Act(0.5, TASK, "clear", "running", 0.4))
    if _states(history)[-4:] != ["none", "scheduled", "running", "success"] or "restarting" not in _states(history):
        found.append(f"it was {_states(history)}")
    return found


def a_trigger_is_over_with_its_first_event() -> list[str]:
    """A trigger would fire three events in one round."""
    found, history = judged(Task("a", attempts=((Leg("defer", wait=Wait("events", 0.5)), Leg()),)))
    if (stored := sum(isinstance(record, records.EventStored) for record in history)) != 1:
        found.append(f"there were {stored} events")
    return found


def no_step_begins_after_the_end_of_its_try() -> list[str]:
    """A task is resumed while another has the only slot of its pool, for longer than the time of its try."""
    waiting = Task("a", execution_timeout_s=1.5, priority=2, attempts=((Leg("defer", wait=Wait("event", 0.5)), Leg()),))
    holding = Task("b", attempts=((Leg(seconds=4.0),),))
    plan = TaskScenario(0, Topology(), dags=(Dag("d1", (waiting, holding), (0.5,)),), workers=3, pool_slots=1)
    history = world.run(plan)
    found = [str(finding) for finding in check(plan, history)]
    states = [record.state for record in history if isinstance(record, records.Moved) and record.task == TASK]
    if states[-1] != "failed":
        found.append(f"it was {states}")
    return found


def a_dispatch_whose_answer_is_lost_loses_no_task() -> list[str]:
    """The database goes away when it has committed a dispatch."""
    found, history = judged(Task("a", attempts=((Leg(seconds=0.4),),)), FailAtVerb("dispatch", 1, is_committed=True))
    if sum(isinstance(record, records.StepBegan) for record in history) != 1:
        found.append("the step was not begun once")
    return found


def a_look_that_was_cut_short_is_taken_again() -> list[str]:
    """A supervisor dies before one of its looks at runs, each time before another one."""
    for nth in range(1, LOOKS + 1):
        killing = KillAtVerb("plan", nth, is_committed=False)
        found, _ = judged(Task("a", attempts=((Leg(seconds=0.4),),)), killing)
        if found:
            return found
    return []


def an_outcome_waits_for_the_database() -> list[str]:
    """The database goes away when an outcome is to be stored."""
    found, history = judged(Task("a", attempts=((Leg(seconds=0.4),),)), FailAtVerb("succeed", 1, is_committed=False))
    if not any(isinstance(record, Faulted) for record in history):
        found.append("the database was never away")
    return found


def a_step_is_ended_when_its_execution_timeout_is_over() -> list[str]:
    """A step takes four times as long as its task may."""
    found, history = judged(Task("a", execution_timeout_s=1.5, attempts=((Leg(seconds=6.0),),)))
    if _states(history)[-1] != "failed":
        found.append(f"late: it was {_states(history)}")
    return found


def nothing_begins_in_a_paused_dag() -> list[str]:
    """A run is asked for while its DAG is paused; it begins when the DAG goes on."""
    found, history = judged(Task("a"), Pause(0.25, "d1", 3.0))
    if next(record.at for record in history if isinstance(record, records.StepBegan)) < 3.25:
        found.append("it did not wait")
    return found


def what_waits_behind_a_long_step_goes_to_another_worker() -> list[str]:
    """Two tasks that are known to be short are given to one worker, and the first one turns out long."""
    long, short = Task("a", priority=2, retries=1, attempts=((Leg(seconds=6.0),),)), Task("b", retries=1)
    plan = TaskScenario(0, Topology(), dags=(Dag("d1", (long, short), (0.5,)),), workers=1)
    history = world.run(plan)
    found = [str(finding) for finding in check(plan, history)]
    states = [record.state for record in history if isinstance(record, records.Moved) and record.task == "d1/r1/b"]
    if not any(isinstance(record, records.StepTold) and record.how == "returned" for record in history):
        found.append("it was not given to the same worker")
    if states[-3:] != ["scheduled", "running", "success"] or states.count("running") != 2:
        found.append(f"it was {states}")
    return found


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "bundle": what_waits_behind_a_long_step_goes_to_another_worker,
    "outcome in doubt": an_outcome_in_doubt_is_stored_once,
    "redo": the_answer_of_an_earlier_worker_changes_nothing,
    "clear": what_is_cleared_while_it_runs_begins_anew,
    "events": a_trigger_is_over_with_its_first_event,
    "no time left": no_step_begins_after_the_end_of_its_try,
    "deadline": a_step_is_ended_when_its_execution_timeout_is_over,
    "pause": nothing_begins_in_a_paused_dag,
    "look": a_look_that_was_cut_short_is_taken_again,
    "outcome": an_outcome_waits_for_the_database,
    "dispatch in doubt": a_dispatch_whose_answer_is_lost_loses_no_task,
}
