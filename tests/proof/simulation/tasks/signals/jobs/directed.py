"""Scenarios of jobs that are not drawn: moments of decisions, endless tasks and times that random ones miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tests.proof.simulation.scenario import (
    Drain,
    FreezeSupervisor,
    KillAtMark,
    KillSupervisor,
    StartBeside,
    TakeOver,
)
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.faults import Act, FailAtVerb, KillAtVerb
from tests.proof.simulation.tasks.scenario import Leg, Task
from tests.proof.simulation.tasks.signals.directed import KEY, judged
from tests.proof.simulation.tasks.signals.plans import OfSignals, Send, UserSends
from tests.proof.simulation.tasks.signals.rules.directed import MAIN, NAME, OTHER, ruled, sends, starts
from tests.proof.simulation.tasks.signals.rules.plans import Asks, Decides, EndsRun, OfCall, Rule, Ruled

from headgate.protocol.messages.rules import Action

ACTIONS: tuple[tuple[str, Action], ...] = (("1", "START"), ("2", "NONE"), ("3", "STOP"), ("4", "RESTART"))
EVER = Leg(seconds=1000.0)


def deciding(*rules: Rule, seconds: float = 0.1, troubles: tuple[OfCall, ...] = (), **options: Any) -> Task:
    """Return a task that decides: 1 starts it, 2 does nothing, 3 stops it, 4 restarts it, and over 5 it raises."""
    decides = Decides(ACTIONS, seconds, troubles, ("5",))
    of = OfSignals(ruled=Ruled(rules or (Rule(KEY),), options.pop("overlap", "latest"), decides=decides))
    return Task("b", **{"attempts": ((Leg(seconds=0.8),),), **options}, signals=of)


def endless(*attempts: Leg, name: str = "b", retries: int = 0) -> Task:
    """Return an endless task that ends with the task `MAIN`, whose tries do this."""
    rules = (Rule(ended=MAIN.name, action="STOP"),)
    of = OfSignals(ruled=Ruled(rules, stopped_as="success"))
    tries = tuple((leg,) for leg in attempts or (EVER,))
    return Task(name, retries=retries, attempts=tries, signals=of, endless=True)


def main(seconds: float) -> Task:
    """Return the task that holds the run open for so long, or longer, if its worker dies."""
    return Task(MAIN.name, retries=3, attempts=((Leg(seconds=seconds),),))


# --- decisions -------------------------------------------------------------------------------------


def an_operator_decides() -> list[str]:
    """It is to start, to do nothing, to restart, to stop, and to start again."""
    users = (sends(1.0, "2"), sends(1.3, "1"), sends(1.6, "4"), sends(1.9, "2"), sends(3.1, "3"), sends(4.0, "1"))
    return starts(3, deciding(attempts=((Leg(seconds=5.0),),)), users)


def signals_of_two_keys_are_decided_in_their_order() -> list[str]:
    """While the first is decided a stop and a start come, under two keys: the start is the last."""
    task = deciding(Rule(KEY), Rule(OTHER), seconds=0.5)
    return starts(2, task, (sends(1.0, "1"), sends(1.2, "3", key=OTHER), sends(1.3, "1")))


def a_decision_in_doubt_counts_once() -> list[str]:
    """The database goes away when it has committed a decision; another supervisor acts before it is stored again."""
    fails = FailAtVerb("settle_decisions", 1, is_committed=True)
    others = (StartBeside(1.3), FreezeSupervisor(1.65, 2.0))
    return starts(1, deciding(seconds=0.5), (sends(1.0, "1"),), fails, *others)


def a_decision_outlives_its_supervisor() -> list[str]:
    """The supervisor dies when it has decided, and before the commit; then when it has asked, and behind the commit."""
    kills = (
        KillAtMark("signals.decided_written", 1),
        KillAtMark("signals.decision_given", 2),
        KillAtVerb("settle_decisions", 2, is_committed=True),
    )
    return starts(2, deciding(), (sends(1.0, "1"), sends(3.5, "1")), *kills, main=main(9.0))


def what_fails_is_decided_again() -> list[str]:
    """The process dies at first, and then the code raises."""
    task = deciding(troubles=("dies", "raises"))
    return starts(1, task, (sends(1.0, "1"),), main=main(9.0))


def what_always_fails_is_given_up() -> list[str]:
    """The second of three is; the first counts at once, and the third when the second is given up."""
    user = UserSends(1.0, (Send(KEY, "1"), Send(KEY, "5"), Send(KEY, "1")))
    return starts(2, deciding(), (user,), main=main(9.0))


def tries_are_of_one_signal() -> list[str]:
    """The code fails about a signal, a stop passes over it, and it fails about the next one, as often as it may."""
    users = (sends(1.0, "5"), Asks(1.5037, NAME, "STOP"), sends(2.0, "5"), sends(9.0, "1"))
    return starts(1, deciding(), users, main=main(12.0))


def each_is_decided_for_itself() -> list[str]:
    """Four come in one transaction, of which the second does nothing."""
    return starts(3, deciding(overlap="each"), (sends(1.0, "1", "2", "1", "1"),), main=main(9.0))


def one_supervisor_asks() -> list[str]:
    """There are two, the code takes its time, and another task has questions as well."""
    other = msgspec.structs.replace(deciding(Rule(OTHER), seconds=0.3), name="c")
    users = (sends(1.0, "1"), *(sends(1.1 + number / 5, "2", key=OTHER) for number in range(8)))
    found, _ = judged((main(9.0), deciding(seconds=0.9), other), users, peers=True)
    return found


def a_stop_takes_back_what_is_being_decided() -> list[str]:
    """A user stops the task while its code decides about a start."""
    return starts(0, deciding(seconds=1.0), (sends(1.0, "1"), Asks(1.5037, NAME, "STOP")))


def a_start_behind_it_keeps_no_stop_waiting() -> list[str]:
    """In a run that is to end the code decides a stop and a start in one answer: the stop acts, and nothing begins."""
    users = (sends(1.0, "1"), EndsRun(1.5061, "d1/r1"), sends(1.9, "3", "1"))
    return starts(1, deciding(attempts=((Leg(seconds=9.0),),)), users, main=main(6.0))


def a_run_ends_when_what_was_passed_over_is_answered() -> list[str]:
    """A stop passes over what the code decides about; meanwhile all else ends, and the run waits for the answer."""
    return starts(0, deciding(seconds=2.0), (sends(1.0, "1"), Asks(1.5037, NAME, "STOP")), main=main(1.5))


def a_run_does_not_end_over_what_is_being_decided() -> list[str]:
    """All else ends while the code decides about a start."""
    return starts(1, deciding(seconds=1.5), (sends(1.2, "1"),), main=main(1.5))


def an_ended_run_decides_nothing() -> list[str]:
    """The run is to end while the code decides about a start."""
    users = (sends(1.2, "1"), EndsRun(1.5061, "d1/r1"))
    return starts(0, deciding(seconds=2.0), users, main=main(1.5))


# --- endless tasks ---------------------------------------------------------------------------------


def an_endless_task_is_moved() -> list[str]:
    """Its worker dies again and again, each time after a second; it waits a second, and then two, and four."""
    return starts(3, endless(Leg(seconds=1.0, trouble="dies_after")), (), main=main(9.0), endless_workers=1)


def a_drain_moves_an_endless_task_when_its_worker_is_gone() -> list[str]:
    """Its worker takes its time, and another supervisor has room."""
    found, history = judged((main(9.0), *_two(EVER)), (), StartBeside(1.0), Drain(2.0), endless_workers=2)
    ends = [one.how for one in history if isinstance(one, of_tasks.StepTold) and one.how == "lost"]
    return found if ends else [*found, "no worker was ended"]


def _two(leg: Leg) -> tuple[Task, Task]:
    stubborn = Leg(seconds=leg.seconds, trouble="stubborn")
    return endless(stubborn, name="b"), endless(stubborn, name="c")


def a_start_after_a_stop_waits_until_the_worker_is_gone() -> list[str]:
    """It takes its time, and two supervisors have room; the second one of the same is of a task that may end."""
    at_will = OfSignals(ruled=Ruled((Rule(ended=MAIN.name, action="STOP"),), stopped_as="success"))
    stubborn = ((Leg(seconds=1000.0, trouble="stubborn"),),)
    tasks = (main(9.0), endless(stubborn[0][0]), Task("c", attempts=stubborn, signals=at_will))
    users = tuple(
        ask
        for task in "bc"
        for at, again_at in ((2.0, 2.5037), (3.0, 3.5037))
        for ask in (Asks(at, f"d1/r1/{task}", "STOP"), Asks(again_at, f"d1/r1/{task}", "START"))
    )
    found, history = judged(tasks, users, peers=True, endless_workers=2)
    began = sum(isinstance(one, of_tasks.StepBegan) and one.task != "d1/r1/a" for one in history)
    return found if began == 4 else [*found, f"they have begun {began} times"]


def a_worker_is_ended_with_its_task() -> list[str]:
    """The supervisor that has the worker evaluates the run, too, so that nobody else tells it."""
    found, history = judged((main(2.0), endless()), (), endless_workers=1)
    (ended,) = (
        one.at
        for one in history
        if isinstance(one, of_tasks.Moved) and one.task == "d1/r1/b" and one.by == "plan" and one.old == "running"
    )
    (told,) = (one.at for one in history if isinstance(one, of_tasks.StepStopped))
    return found if told - ended < 1.0 else [*found, f"ended too late: {told - ended:.1f} s after its task"]


def what_was_ended_before_it_began_begins_again() -> list[str]:
    """The database goes away when it has committed a dispatch; a user marks and clears the task before it is found."""
    faults = (FailAtVerb("dispatch", 1, is_committed=True), Act(0.0, "d1/r1/a", "redo", "running"))
    found, history = judged((main(1.0),), (), *faults)
    began = sum(isinstance(one, of_tasks.StepBegan) for one in history)
    return found if began == 1 else [*found, f"it has begun {began} times"]


def another_supervisor_takes_an_endless_task_over() -> list[str]:
    """Three supervisors have a task each, and one of them is fenced."""
    tasks = (main(9.0), *(endless(name=name) for name in "bcd"))
    found, history = judged(tasks, (), TakeOver(2.0), TakeOver(4.0), peers=True, endless_workers=2)
    moved = {one.task for one in history if isinstance(one, of_tasks.Moved) and one.by == "adopt"}
    return found if moved else [*found, "nothing was taken over"]


def its_own_exceptions_cost_tries() -> list[str]:
    """It has two."""
    fails = Leg("fail", 0.5)
    return starts(2, endless(fails, fails, fails, retries=1), (), endless_workers=1)


def it_has_its_tries_again_when_it_has_run_well() -> list[str]:
    """It fails twice after more than a minute, the second time in its last try, and then at once."""
    long, fails = Leg("fail", 61.0), Leg("fail", 0.5)
    return starts(3, endless(long, long, fails, fails, retries=1), (), main=main(150.0), endless_workers=1)


# --- the time --------------------------------------------------------------------------------------


def starts_that_were_missed_are_one() -> list[str]:
    """Each second, and the supervisor stands still from 2.2 to 5.7 seconds."""
    task = ruled(Rule(every_s=1.0), attempts=((Leg(),),))
    return starts(4, task, (), FreezeSupervisor(2.2, 3.5), main=main(6.5))


def a_cron_expression_starts_at_its_times() -> list[str]:
    """Each minute, and there is no supervisor between 70 and 190 seconds; then what holds the run open begins anew."""
    task = ruled(Rule(cron="* * * * *"), attempts=((Leg(),),))
    return starts(3, task, (), KillSupervisor(70.0, down_s=120.0), main=main(90.0))


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "decided": an_operator_decides,
    "decided in order": signals_of_two_keys_are_decided_in_their_order,
    "decision in doubt": a_decision_in_doubt_counts_once,
    "decided and dead": a_decision_outlives_its_supervisor,
    "decided again": what_fails_is_decided_again,
    "given up": what_always_fails_is_given_up,
    "tries of one": tries_are_of_one_signal,
    "decided each": each_is_decided_for_itself,
    "one asks": one_supervisor_asks,
    "stopped while deciding": a_stop_takes_back_what_is_being_decided,
    "stopped before a start": a_start_behind_it_keeps_no_stop_waiting,
    "over what was passed over": a_run_ends_when_what_was_passed_over_is_answered,
    "over a decision": a_run_does_not_end_over_what_is_being_decided,
    "ended while deciding": an_ended_run_decides_nothing,
    "moved": an_endless_task_is_moved,
    "drained": a_drain_moves_an_endless_task_when_its_worker_is_gone,
    "stopped and started": a_start_after_a_stop_waits_until_the_worker_is_gone,
    "ended together": a_worker_is_ended_with_its_task,
    "ended in doubt": what_was_ended_before_it_began_begins_again,
    "taken over": another_supervisor_takes_an_endless_task_over,
    "own exceptions": its_own_exceptions_cost_tries,
    "runs well": it_has_its_tries_again_when_it_has_run_well,
    "missed": starts_that_were_missed_are_one,
    "cron": a_cron_expression_starts_at_its_times,
}
