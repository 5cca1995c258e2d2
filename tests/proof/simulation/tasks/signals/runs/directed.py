"""Scenarios of runs for signals that are not drawn: the moments in which a run may be lost, or made or ended twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.proof.simulation.records import Faulted
from tests.proof.simulation.scenario import Fault, KillAtMark, Topology
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.faults import Act, Edit, FailAtVerb, KillAtVerb, Pause
from tests.proof.simulation.tasks.scenario import Dag, Leg, Task
from tests.proof.simulation.tasks.signals import records, world
from tests.proof.simulation.tasks.signals.directed import KEY
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.plans import Limits, Send, UserAct, UserSends
from tests.proof.simulation.tasks.signals.rules.directed import OTHER, ruled, sends
from tests.proof.simulation.tasks.signals.rules.plans import Rule
from tests.proof.simulation.tasks.signals.runs.checker import check
from tests.proof.simulation.tasks.signals.runs.plans import OnKey, RunsOn

DRAIN = Rule("drain", "STOP")
EACH = RunsOn((OnKey(KEY),))
SHORT = Task("a", attempts=((Leg(seconds=0.3),),))
LONG = Task("a", attempts=((Leg(seconds=2.0),),))


def judged(
    users: tuple[UserAct, ...],
    *faults: Fault,
    runs_on: RunsOn | None = EACH,
    tasks: tuple[Task, ...] = (SHORT,),
    runs_at: tuple[float, ...] = (),
    end_on: tuple[Rule, ...] = (),
    runs_max: int = 16,
    **options: Any,
) -> tuple[list[str], list[Any]]:
    """Run a DAG; return what is found, and the history."""
    dag = Dag("d1", tasks, runs_at, runs_max, runs_on, end_on)
    plan = SignalScenario(0, Topology(), dags=(dag,), users=users, faults=faults, **{"workers": 4, **options})
    history = world.run(plan)
    found = [str(finding) for finding in check(plan, history)]
    if any(isinstance(fault, KillAtMark | KillAtVerb | FailAtVerb) for fault in faults):
        if sum(isinstance(record, Faulted) for record in history) != len(faults):
            found.append("not all faults have come")
    return found, history


def runs_of(history: list[Any]) -> list[list[int]]:
    """Return the versions of each run that was made for signals, in the order of the runs."""
    made = [one.run for one in history if isinstance(one, of_tasks.RunMoved) and one.by == "create_event_runs"]
    taken = [one for one in history if isinstance(one, records.RunSignal) and one.run and not one.is_superseded]
    return [[one.version for one in taken if one.run == run] for run in dict.fromkeys(made)]


def made(expected: list[list[int]], users: tuple[UserAct, ...], *faults: Fault, **options: Any) -> list[str]:
    """Run it; return what is found, and of which versions there were runs if that is not as expected."""
    found, history = judged(users, *faults, **options)
    runs = runs_of(history)
    return found if runs == expected else [*found, f"there were runs of {runs}, and not of {expected}"]


def begun(history: list[Any], name: str) -> int:
    """Return how often a task of any run has begun, by its name in the DAG."""
    steps = [one for one in history if isinstance(one, of_tasks.StepBegan)]
    return sum(one.task.endswith(f"/{name}") for one in steps)


# --- a run for signals -----------------------------------------------------------------------------


def each_signal_has_a_run() -> list[str]:
    """Three come in one transaction and one later; others have another key, or are for one run alone."""
    users = (sends(0.8, "1", "2", "3"), sends(2.0, "4"), sends(1.0, "1", key=OTHER), sends(2.5, "5", of_run="d1/r1"))
    return made([[1], [2], [3], [4]], users, runs_at=(0.5,))


def a_predicate_says_which_signals_have_a_run() -> list[str]:
    """Two of three have the value."""
    return made([[1], [3]], (sends(0.8, "1", "2", "1"),), runs_on=RunsOn((OnKey(KEY, "1"),)))


def many_versions_are_held_against_a_dag_page_by_page() -> list[str]:
    """A page has one version."""
    users = (sends(0.8, "1", "2", "3", "4"),)
    return made([[1], [2], [3], [4]], users, limits=Limits(page=1, waits=1))


def a_run_is_made_once() -> list[str]:
    """A supervisor dies when it has written a run, the next when it has committed one; one does not hear of its run."""
    dying = KillAtMark("runs.of_events_written", 1), KillAtVerb("create_event_runs", 1, is_committed=True)
    users = (sends(0.8, "1"), sends(1.5, "2"), sends(3.0, "3"))
    return made([[1], [2], [3]], users, *dying, FailAtVerb("create_event_runs", 2, is_committed=True))


def what_waits_outlives_its_supervisor() -> list[str]:
    """The supervisor dies when a signal waits for a run; the next one before it holds another against the DAG."""
    dying = KillAtVerb("consider_signals", 1, is_committed=True), KillAtVerb("consider_signals", 2, is_committed=False)
    return made([[1], [2]], (sends(0.8, "1"), sends(3.0, "2")), *dying)


def signals_wait_while_their_dag_is_paused() -> list[str]:
    """Two are sent while it is paused, which have their runs then."""
    return made([[1], [2]], (sends(0.8, "1"), sends(1.5, "2")), Pause(0.3, "d1", 4.0))


def what_waits_outlives_a_change_of_the_file() -> list[str]:
    """The DAG is paused, a signal waits, and a task is taken out of its file and put back."""
    tasks = (SHORT, Task("c"))
    return made([[1]], (sends(0.8, "1"),), Pause(0.3, "d1", 4.0), Edit(1.5, "d1", "c", 1.0), tasks=tasks)


def runs_do_not_overlap() -> list[str]:
    """A DAG may have one run at a time, and three signals come at once."""
    return made([[1], [2], [3]], (sends(0.8, "1", "2", "3"),), runs_max=1, tasks=(LONG,))


def a_run_has_one_of_each() -> list[str]:
    """Two of the first key wait for one of the other, and one is left over."""
    both = RunsOn((OnKey(KEY), OnKey(OTHER)), "all")
    users = (sends(0.8, "1", "2"), sends(1.5, "3", key=OTHER), sends(3.0, "4"))
    return made([[1, 2, 1]], users, runs_on=both)


def a_batch_is_whole_or_due() -> list[str]:
    """Three make one of two at once, and one of one later."""
    batches = RunsOn((OnKey(KEY),), "batch", 2, 2.0)
    found, history = judged((sends(0.8, "1", "2", "3"),), runs_on=batches)
    moves = [one for one in history if isinstance(one, of_tasks.RunMoved) and one.by == "create_event_runs"]
    waited = [one.at > 2.7 for one in moves]
    return found if (runs_of(history), waited) == ([[1, 2], [3]], [False, True]) else [*found, f"{runs_of(history)}"]


def the_latest_stands_for_those_before() -> list[str]:
    """Three come at once; two while the one run of these is under way."""
    latest = RunsOn((OnKey(KEY),), "latest")
    users = (sends(0.8, "1", "2", "3"), sends(1.5, "4"), sends(1.8, "5"))
    return made([[3], [5]], users, runs_on=latest, runs_max=1, tasks=(LONG,))


# --- with a run ------------------------------------------------------------------------------------


def start(at: float, *values: str, dedup: str = "", unsure: int = 0) -> UserSends:
    """Return a user who sends these with a run."""
    return UserSends(at, tuple(Send(KEY, value, dedup) for value in values), start="d1", unsure=unsure)


def a_signal_starts_a_run_unless_one_is_open() -> list[str]:
    """The second is for the open run, the third has none any more, and is sent twice by a user who does not hear."""
    users = (start(0.5, "1"), start(1.5, "2"), start(6.0, "3", dedup="third", unsure=1))
    tasks = (LONG, ruled(Rule(KEY)))
    found, history = judged(users, runs_on=None, tasks=tasks)
    runs = {one.run for one in history if isinstance(one, of_tasks.RunMoved)}
    is_right = (len(runs), begun(history, "b")) == (2, 3)
    return found if is_right else [*found, f"there were {len(runs)} runs, and {begun(history, 'b')} starts"]


# --- since the run before --------------------------------------------------------------------------


def a_rule_goes_on_where_that_of_the_run_before_stood() -> list[str]:
    """One is sent in the first run, one between the two, and one in the second; one was there before both."""
    tasks = (LONG, ruled(Rule(KEY, since="last_run"), attempts=((Leg(seconds=0.2),),)))
    users = (sends(0.2, "1"), sends(1.0, "2"), sends(5.0, "3"), sends(7.5, "4"))
    found, history = judged(users, runs_on=None, tasks=tasks, runs_at=(0.5, 6.0))
    count = begun(history, "b")
    return found if count == 3 else [*found, f"it has begun {count} times"]


# --- what ends a run -------------------------------------------------------------------------------

WAITING = (ruled(Rule(KEY)),)  # of a run that ends by nothing else


def drains(*times: float) -> tuple[UserAct, ...]:
    """Return users who send what ends runs."""
    return tuple(sends(at, "1", key="drain") for at in times)


def a_signal_ends_its_run() -> list[str]:
    """One was sent before the run; the supervisor dies when it has written that the run is to end."""
    dying = KillAtMark("signals.run_ending", 1), KillAtVerb("plan", 3, is_committed=True)
    users = (*drains(0.2, 2.0), sends(1.0, "1"))
    found, history = judged(users, *dying, runs_on=None, tasks=WAITING, runs_at=(0.5,), end_on=(DRAIN,))
    ends = [one for one in history if isinstance(one, records.RunToEnd) and one.is_ending]
    return found if len(ends) == 1 and ends[0].at >= 2.0 else [*found, f"it was to end at {[one.at for one in ends]}"]


def a_signal_ends_a_run_once() -> list[str]:
    """A task of a run that is to end is cleared, so that it goes on, until another signal comes."""
    slow = ruled(Rule(KEY), attempts=((Leg(seconds=2.0),),))
    users = (sends(0.8, "1"), *drains(1.5, 7.0))
    clear = Act(1.0, "d1/r1/b", "clear", "running", 1.5)
    found, history = judged(users, clear, runs_on=None, tasks=(slow,), runs_at=(0.5,), end_on=(DRAIN,))
    ends = [round(one.at) for one in history if isinstance(one, records.RunToEnd) and one.is_ending]
    return found if ends == [2, 7] else [*found, f"it was to end at {ends}"]


def runs_that_a_signal_starts_and_one_ends() -> list[str]:
    """One run at a time: the second begins when a signal has ended the first, which does not end the second."""
    users = (sends(0.8, "1", "2"), *drains(3.0, 6.0))
    return made([[1], [2]], users, tasks=WAITING, end_on=(DRAIN,), runs_max=1)


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "a run for each": each_signal_has_a_run,
    "a value": a_predicate_says_which_signals_have_a_run,
    "page by page": many_versions_are_held_against_a_dag_page_by_page,
    "run in doubt": a_run_is_made_once,
    "waits and dead": what_waits_outlives_its_supervisor,
    "waits in a pause": signals_wait_while_their_dag_is_paused,
    "waits and edited": what_waits_outlives_a_change_of_the_file,
    "one at a time": runs_do_not_overlap,
    "one of each": a_run_has_one_of_each,
    "runs of batches": a_batch_is_whole_or_due,
    "latest run": the_latest_stands_for_those_before,
    "with a run": a_signal_starts_a_run_unless_one_is_open,
    "last run": a_rule_goes_on_where_that_of_the_run_before_stood,
    "ended by a signal": a_signal_ends_its_run,
    "ended once": a_signal_ends_a_run_once,
    "started and ended": runs_that_a_signal_starts_and_one_ends,
}
