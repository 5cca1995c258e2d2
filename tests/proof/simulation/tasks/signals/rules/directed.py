"""Scenarios of rules that are not drawn: the moments in which a rule may be met, forgotten or met twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from tests.proof.simulation.records import Faulted
from tests.proof.simulation.scenario import Fault, FreezeSupervisor, KillAtMark
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.faults import Act, FailAtVerb, KillAtVerb, Pause
from tests.proof.simulation.tasks.scenario import Leg, Task, Wait
from tests.proof.simulation.tasks.signals.directed import KEY, RUN_AT, judged
from tests.proof.simulation.tasks.signals.plans import Forgets, Limits, OfSignals, Send, UserAct, UserSends
from tests.proof.simulation.tasks.signals.rules.plans import Asks, EndsRun, Rule, Ruled

OTHER = "other"
START = Rule(KEY)
STOP = Rule(OTHER, "STOP")
RESTART = Rule(OTHER, "RESTART")
NAME = "d1/r1/b"
MAIN = Task("a", attempts=((Leg(seconds=6.0),),))  # holds the run open


def ruled(*rules: Rule, overlap: Literal["latest", "each", "ignore"] = "latest", **task: Any) -> Task:
    """Return a task with rules."""
    return Task("b", **{"attempts": ((Leg(seconds=0.8),),), **task}, signals=OfSignals(ruled=Ruled(rules, overlap)))


def sends(at: float, *values: str, key: str = KEY, of_run: str = "") -> UserSends:
    """Return a user who sends these in one transaction."""
    return UserSends(at, tuple(Send(key, value, of_run=bool(of_run)) for value in values), of_run)


def starts(
    expected: int, task: Task, users: tuple[UserAct, ...], *faults: Fault, main: Task = MAIN, **options: Any
) -> list[str]:
    """Run it; return what is found, and how often the task has begun if that is not as expected."""
    found, history = judged((main, task), users, *faults, **options)
    steps = [one for one in history if isinstance(one, of_tasks.StepBegan) and one.task == NAME and one.leg == 0]
    waits = [one for one in history if isinstance(one, of_tasks.Waited) and one.task.endswith("/b")]
    begun = len(waits) if task.starts_in_trigger else len(steps)
    if any(isinstance(fault, KillAtMark | KillAtVerb | FailAtVerb) for fault in faults):
        if sum(isinstance(record, Faulted) for record in history) != len(faults):
            found.append("not all faults have come")
    return found if begun == expected else [*found, f"it has begun {begun} times, and not {expected}"]


# --- one start -------------------------------------------------------------------------------------


def a_signal_starts_a_task_once() -> list[str]:
    """One signal is from before the run, one comes later, and one has another value."""
    users = (sends(0.2, "1"), sends(1.5, "1"), sends(4.0, "2"))
    return starts(1, ruled(Rule(KEY, value="1")), users)


def what_is_sent_between_run_and_rules_counts() -> list[str]:
    """The run is created, and a signal sent, while the supervisor stands still."""
    return starts(1, ruled(START), (sends(1.0, "1"),), FreezeSupervisor(0.3, 1.5))


def a_rule_that_was_not_looked_at_still_is_after_a_start() -> list[str]:
    """The time starts the task with its run, in the transaction that makes its rules; a signal came before that."""
    rules, main = (Rule(every_s=8.0), START), Task("a", attempts=((Leg(seconds=4.0),),))
    return starts(2, ruled(*rules), (sends(1.0, "1"),), FreezeSupervisor(0.3, 1.5), main=main)


def with_latest_the_newest_from_before_the_run_starts() -> list[str]:
    """Two are from before the run, and one of them was to be the newest that counts."""
    return starts(1, ruled(Rule(KEY, since="latest")), (sends(0.1, "1"), sends(0.2, "2")))


def a_signal_for_another_run_starts_nothing() -> list[str]:
    """Of two runs the second is named."""
    users = (sends(2.0, "1", of_run="d1/r2"),)
    return starts(0, ruled(START), users, runs_at=(RUN_AT, 0.8))


def the_first_of_many_versions_meets() -> list[str]:
    """The rule is held against one version at a time, and only the first has its value."""
    users = (sends(1.5, "7", "1", "2", "3"),)
    return starts(1, ruled(Rule(KEY, value="7")), users, limits=Limits(page=1, waits=1))


def a_start_is_taken_in_its_transaction() -> list[str]:
    """The supervisor dies when it has written a start, before its commit, and the next one behind its commit."""
    kills = (KillAtMark("signals.action_written", 1), KillAtVerb("plan", 3, is_committed=True))
    return starts(1, ruled(START), (sends(2.0, "1"),), *kills)


def the_end_of_a_task_counts_from_when_it_ended() -> list[str]:
    """It is to stop the other one, the supervisor dies right behind it, and a start comes before there is another."""
    task = ruled(Rule(ended=MAIN.name, action="STOP"), RESTART)
    kill = KillAtVerb("succeed", 1, is_committed=True)
    main = Task(MAIN.name, attempts=((Leg(seconds=1.0),),))
    return starts(1, task, (sends(1.75, "1", key=OTHER),), kill, main=main)


def a_met_rule_outlives_its_supervisor() -> list[str]:
    """The supervisor dies when it has held a rule against a signal, and has committed that."""
    return starts(1, ruled(START), (sends(1.5, "1"),), KillAtVerb("consider_signals", 1, is_committed=True))


# --- while it is under way -------------------------------------------------------------------------


def a_start_is_remembered_while_it_runs() -> list[str]:
    """Two signals come while it runs, which are one start more."""
    return starts(2, ruled(START), (sends(1.0, "1"), sends(1.3, "2"), sends(1.5, "3")))


def a_start_is_remembered_while_it_is_deferred() -> list[str]:
    """A signal comes while its trigger waits."""
    legs = ((Leg("defer", wait=Wait("event", 1.0)), Leg()),)
    return starts(2, ruled(START, attempts=legs), (sends(1.0, "1"), sends(1.5, "2")))


def each_starts_as_often_as_there_are() -> list[str]:
    """Three come in one transaction and one while it runs."""
    users = (sends(1.0, "1", "2", "3"), sends(1.5, "4"))
    return starts(4, ruled(START, overlap="each"), users)


def each_waits_for_the_retries_of_the_one_before() -> list[str]:
    """The second comes while the task waits for its retry, which is of the first."""
    attempts = ((Leg("fail"),), (Leg(),))
    return starts(
        3,
        ruled(START, overlap="each", retries=1, retry_delay_s=2.0, attempts=attempts),
        (sends(1.0, "1"), sends(2.0, "2")),
    )


def ignored_is_what_comes_while_it_runs() -> list[str]:
    """One comes while it runs, and one after it."""
    users = (sends(1.0, "1"), sends(1.4, "2"), sends(4.0, "3"))
    return starts(2, ruled(START, overlap="ignore"), users)


def a_start_joins_one_that_waits_for_a_worker() -> list[str]:
    """The one worker is busy when both signals come."""
    main = Task("a", attempts=((Leg(seconds=4.0),),))
    return starts(1, ruled(START), (sends(1.5, "1"), sends(2.5, "2")), main=main, workers=1)


def a_remembered_start_outlives_a_pause() -> list[str]:
    """The DAG is paused while a start is remembered, longer than the rest of the run would take."""
    users = (sends(1.0, "1"), sends(1.4, "2"))
    main = Task("a", attempts=((Leg(seconds=1.0),),))
    return starts(2, ruled(START), users, Pause(1.5, "d1", 3.0), main=main)


def a_remembered_start_outlives_a_clear() -> list[str]:
    """The task is cleared while it runs, and a start is remembered; its clear alone starts nothing."""
    users = (sends(1.0, "1"), sends(1.4, "2"))
    return starts(2, ruled(START, attempts=((Leg(seconds=2.0),),)), users, Act(1.0, NAME, "clear", "running", 1.0))


def a_clear_alone_starts_nothing() -> list[str]:
    """The task is cleared when it has ended."""
    return starts(1, ruled(START), (sends(1.0, "1"),), Act(2.0, NAME, "clear", "success", 0.5))


def a_run_does_not_end_over_a_start() -> list[str]:
    """A start is remembered when all else has ended."""
    users = (sends(1.0, "1"), sends(1.5, "2"))
    return starts(2, ruled(START), users, main=Task("a", attempts=((Leg(seconds=1.2),),)))


def a_run_does_not_end_over_what_was_not_considered() -> list[str]:
    """A signal is sent right before the last task ends, and the supervisor has not heard of it."""
    return starts(1, ruled(START), (sends(1.64, "1"),), main=Task("a", attempts=((Leg(seconds=1.0),),)))


def a_retry_is_made_at_once() -> list[str]:
    """A signal comes while a task waits for a retry."""
    attempts = ((Leg("fail"),), (Leg(),))
    return starts(2, ruled(START, retries=1, retry_delay_s=3.0, attempts=attempts), (sends(1.0, "1"), sends(2.0, "2")))


def a_remembered_start_makes_the_retry() -> list[str]:
    """A signal comes while the first try runs, which fails."""
    attempts = ((Leg("fail", 1.5),), (Leg(),))
    return starts(2, ruled(START, retries=1, retry_delay_s=3.0, attempts=attempts), (sends(1.0, "1"), sends(2.0, "2")))


# --- necessary ones --------------------------------------------------------------------------------

BOTH = (Rule(KEY, condition="necessary"), Rule(OTHER, condition="necessary"))


def all_necessary_rules_and_what_is_upstream_start_together() -> list[str]:
    """Both signals come before what is upstream has ended; one more of the first starts nothing."""
    main = Task("a", attempts=((Leg(seconds=2.5),),))
    task, rest = ruled(*BOTH, upstream=("a",)), Task("c", attempts=((Leg(seconds=6.0),),))
    users = (sends(1.0, "1"), sends(2.0, "1", key=OTHER), sends(4.5, "2"))
    found, history = judged((main, task, rest), users)
    began = [one.at for one in history if isinstance(one, of_tasks.StepBegan) and one.task == NAME]
    return found if len(began) == 1 and began[0] > 3.0 else [*found, f"it has begun at {began}"]


def after_a_start_each_necessary_rule_needs_a_newer_version() -> list[str]:
    """The second of the one comes at once, that of the other later."""
    users = (sends(1.0, "1"), sends(1.1, "1", key=OTHER), sends(2.5, "2"), sends(4.0, "2", key=OTHER))
    return starts(2, ruled(*BOTH), users)


def a_run_does_not_end_over_what_its_last_ends_allow() -> list[str]:
    """The last task fails, what is below it never runs, and below that a signal has asked for a start.

    What never runs may have rules, too.
    """
    necessary = Ruled((Rule(KEY, condition="necessary"),))
    main, task = Task("a", attempts=((Leg("fail", 2.0),),)), ruled(*necessary.rules, upstream=("c",), rule="all_done")
    results: list[str] = []
    for signals in (None, OfSignals(ruled=necessary)):
        found, history = judged((main, Task("c", upstream=("a",), signals=signals), task), (sends(1.0, "1"),))
        began = [one.at for one in history if isinstance(one, of_tasks.StepBegan) and one.task == NAME]
        results += found if len(began) == 1 else [*found, f"it has begun at {began}"]
    return results


# --- stops and restarts ----------------------------------------------------------------------------


def a_stop_ends_what_runs() -> list[str]:
    """The task would run for long."""
    users = (sends(1.0, "1"), sends(2.0, "1", key=OTHER))
    return starts(1, ruled(START, STOP, attempts=((Leg(seconds=20.0),),)), users)


def a_stop_ends_what_is_deferred() -> list[str]:
    """Its trigger waits for long."""
    legs = ((Leg("defer", wait=Wait("event", 20.0)), Leg()),)
    return starts(1, ruled(START, STOP, attempts=legs), (sends(1.0, "1"), sends(2.0, "1", key=OTHER)))


def a_stop_takes_back_the_starts_before_it() -> list[str]:
    """Two starts and then a stop come in one transaction, which are looked at one by one."""
    user = UserSends(1.5, (Send(KEY, "1"), Send(KEY, "2"), Send(OTHER, "1")))
    return starts(0, ruled(START, STOP, overlap="each"), (user,))


def a_stop_takes_back_what_is_remembered() -> list[str]:
    """A start is remembered when the stop comes."""
    users = (sends(1.0, "1"), sends(1.2, "2"), sends(1.4, "1", key=OTHER))
    return starts(1, ruled(START, STOP, attempts=((Leg(seconds=3.0),),)), users)


def a_start_after_a_stop_begins_anew() -> list[str]:
    """Both come in one transaction while it runs."""
    rules = (Rule(KEY, value="1"), Rule(KEY, "STOP", "0"))
    return starts(2, ruled(*rules, attempts=((Leg(seconds=2.0),),)), (sends(1.0, "1"), sends(2.0, "0", "1")))


def a_restart_by_hand_behind_a_stop_begins_anew() -> list[str]:
    """Both come before the supervisor looks."""
    users = (sends(1.0, "1"), sends(2.01, "1", key=OTHER), Asks(2.02, NAME, "RESTART"))
    return starts(2, ruled(START, STOP, attempts=((Leg(seconds=3.0),),)), users)


def a_restart_ends_what_runs_and_begins_anew() -> list[str]:
    """The worker takes its time to stop."""
    attempts = ((Leg(seconds=5.0, trouble="stubborn"),), (Leg(),))
    users = (sends(1.0, "1"), sends(2.0, "1", key=OTHER))
    return starts(2, ruled(START, RESTART, attempts=attempts), users)


def a_restart_ends_a_trigger_and_begins_in_another() -> list[str]:
    """The task begins in its trigger."""
    legs = ((Leg("defer", wait=Wait("event", 1.5)), Leg()),)
    users = (sends(1.0, "1"), sends(2.0, "1", key=OTHER))
    return starts(2, ruled(START, RESTART, attempts=legs, starts_in_trigger=True), users)


# --- by hand, by ends, by the time, and the ends of runs -------------------------------------------


def users_start_and_stop() -> list[str]:
    """Three starts by hand, of which one is remembered, and a stop; one in a run that has ended."""
    main = Task("a", attempts=((Leg(seconds=3.0),),))
    users = (Asks(1.007, NAME, "START"), Asks(1.507, NAME, "START"), Asks(2.707, NAME, "STOP"))
    return starts(3, ruled(START), (*users, Asks(5.007, NAME, "START")), main=main)


def a_run_that_is_to_end_starts_nothing() -> list[str]:
    """All of its tasks are started by signals; one comes after its end was asked for."""
    first = Task("a", attempts=((Leg(seconds=2.0),),), signals=OfSignals(ruled=Ruled((Rule("third"),))))
    users = (sends(1.0, "1", key="third"), sends(1.1, "1"), EndsRun(2.507, "d1/r1"), sends(2.6, "2"))
    return starts(1, ruled(START), users, main=first)


def a_run_that_is_to_end_stops_what_it_is_told_to() -> list[str]:
    """A start comes behind the stop, and before the task would have ended by itself something else is sent."""
    rules = (Rule(KEY, value="1"), Rule(KEY, "STOP", "0"))
    users = (sends(1.0, "1"), EndsRun(1.507, "d1/r1"), sends(2.0, "0", "1"), sends(4.5, "1", key="third"))
    return starts(1, ruled(*rules, attempts=((Leg(seconds=5.0),),)), users)


def what_is_sent_to_an_ended_run_starts_nothing() -> list[str]:
    """The run ends, a signal is sent, and it goes on since a task is cleared; the next signal counts."""
    main = Task("a", attempts=((Leg(seconds=1.0),),))
    users = (sends(3.0, "1"), sends(4.6, "2"))
    return starts(1, ruled(START), users, Act(3.5, "d1/r1/a", "clear", "success", 0.5), main=main)


def a_key_may_be_forgotten_before_a_run_goes_on() -> list[str]:
    """The run has ended, its key is forgotten, and one more is sent; what is sent when it goes on is version 2."""
    main = Task("a", attempts=((Leg(seconds=1.0),),))
    users = (sends(0.8, "1"), sends(1.0, "1"), Forgets(3.6, KEY), sends(3.8, "2"), sends(4.7, "3"))
    clear = Act(4.0, "d1/r1/a", "clear", "success", 0.2)
    return starts(3, ruled(START, attempts=((Leg(),),)), users, clear, main=main)


def the_end_of_a_task_starts_another_each_time() -> list[str]:
    """The first fails, is cleared, and fails again."""
    first = Task("a", attempts=((Leg("fail", 0.5),),))
    rest = Task("c", attempts=((Leg(seconds=6.0),),))
    task = ruled(Rule(ended="a", state="failed"))
    found, history = judged((first, task, rest), (), Act(2.0, "d1/r1/a", "clear", "failed", 1.0))
    began = [one.at for one in history if isinstance(one, of_tasks.StepBegan) and one.task == NAME]
    return found if len(began) == 2 else [*found, f"it has begun at {began}"]


def the_time_starts_a_task_again_and_again() -> list[str]:
    """Every 1.5 seconds, in a run of some five."""
    main = Task("a", attempts=((Leg(seconds=5.0),),))
    return starts(4, ruled(Rule(every_s=1.5), attempts=((Leg(),),)), (), main=main)


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "started once": a_signal_starts_a_task_once,
    "before the rules": what_is_sent_between_run_and_rules_counts,
    "not looked at": a_rule_that_was_not_looked_at_still_is_after_a_start,
    "latest starts": with_latest_the_newest_from_before_the_run_starts,
    "another run": a_signal_for_another_run_starts_nothing,
    "first of many": the_first_of_many_versions_meets,
    "start in doubt": a_start_is_taken_in_its_transaction,
    "met and dead": a_met_rule_outlives_its_supervisor,
    "remembered": a_start_is_remembered_while_it_runs,
    "remembered deferred": a_start_is_remembered_while_it_is_deferred,
    "each": each_starts_as_often_as_there_are,
    "each and a retry": each_waits_for_the_retries_of_the_one_before,
    "ignored": ignored_is_what_comes_while_it_runs,
    "joined": a_start_joins_one_that_waits_for_a_worker,
    "paused": a_remembered_start_outlives_a_pause,
    "cleared": a_remembered_start_outlives_a_clear,
    "clear alone": a_clear_alone_starts_nothing,
    "over a start": a_run_does_not_end_over_a_start,
    "over a signal": a_run_does_not_end_over_what_was_not_considered,
    "retry at once": a_retry_is_made_at_once,
    "ended below": a_run_does_not_end_over_what_its_last_ends_allow,
    "retry remembered": a_remembered_start_makes_the_retry,
    "necessary": all_necessary_rules_and_what_is_upstream_start_together,
    "newer ones": after_a_start_each_necessary_rule_needs_a_newer_version,
    "stopped": a_stop_ends_what_runs,
    "stopped deferred": a_stop_ends_what_is_deferred,
    "taken back": a_stop_takes_back_the_starts_before_it,
    "remembered and stopped": a_stop_takes_back_what_is_remembered,
    "stop and start": a_start_after_a_stop_begins_anew,
    "stop and by hand": a_restart_by_hand_behind_a_stop_begins_anew,
    "restarted": a_restart_ends_what_runs_and_begins_anew,
    "restarted trigger": a_restart_ends_a_trigger_and_begins_in_another,
    "by hand": users_start_and_stop,
    "run to end": a_run_that_is_to_end_starts_nothing,
    "stopped at the end": a_run_that_is_to_end_stops_what_it_is_told_to,
    "ended run": what_is_sent_to_an_ended_run_starts_nothing,
    "forgotten": a_key_may_be_forgotten_before_a_run_goes_on,
    "end and dead": the_end_of_a_task_counts_from_when_it_ended,
    "by an end": the_end_of_a_task_starts_another_each_time,
    "by the time": the_time_starts_a_task_again_and_again,
}
