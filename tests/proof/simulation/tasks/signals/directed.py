"""Scenarios of signals that are not drawn: for promises about a moment that random ones meet by chance at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.proof.simulation.records import Faulted
from tests.proof.simulation.scenario import Fault, FreezeSupervisor, KillAtMark, Topology
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.faults import Act, Edit, FailAtVerb
from tests.proof.simulation.tasks.scenario import Dag, Leg, Task, Wait
from tests.proof.simulation.tasks.signals import records, world
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.plans import (
    Cleans,
    Limits,
    Listens,
    OfSignals,
    Send,
    Sensor,
    UserAct,
    UserSends,
    Watcher,
)
from tests.proof.simulation.tasks.signals.runs.checker import check

KEY = "k"
RUN_AT = 0.5


def sensor(name: str, wait: Sensor, *upstream: str) -> Task:
    """Return a task that waits for a signal."""
    leg = Leg("defer", wait=Wait("never", timeout_s=wait.timeout_s))
    return Task(
        name, upstream, starts_in_trigger=True, attempts=((leg, Leg()),), signals=OfSignals(sensor=wait), priority=9
    )


def judged(
    tasks: tuple[Task, ...],
    users: tuple[UserAct, ...] = (),
    *faults: Fault,
    runs_at: tuple[float, ...] = (RUN_AT,),
    **options: Any,
) -> tuple[list[str], list[Any]]:
    """Run runs of one DAG of these tasks; return what is found, and the history."""
    dag = Dag("d1", tasks, runs_at)
    plan = SignalScenario(0, Topology(), dags=(dag,), users=users, faults=faults, **{"workers": 4, **options})
    history = world.run(plan)
    return [str(finding) for finding in check(plan, history)], history


def versions_of(history: list[Any]) -> dict[str, str]:
    """Return by which version each sensor has ended."""
    moved = [record for record in history if isinstance(record, of_tasks.XComsMoved)]
    return {record.task: dict(record.values)["version"] for record in moved if "version" in dict(record.values)}


def _ends(
    expected: dict[str, str],
    tasks: tuple[Task, ...],
    users: tuple[UserAct, ...],
    *faults: Fault,
    **options: Any,
) -> list[str]:
    """Run it; return what is found, and by which versions the sensors have ended if that is not as expected."""
    found, history = judged(tasks, users, *faults, **options)
    ended = versions_of(history)
    return found if ended == expected else [*found, f"the sensors have ended by {ended}"]


def _user(at: float, *values: str, dedup: str = "", of_run: str = "") -> UserSends:
    return UserSends(at, tuple(Send(KEY, value, dedup, of_run=bool(of_run)) for value in values), of_run)


# --- sensors ---------------------------------------------------------------------------------------


def what_is_sent_before_a_sensor_begins_counts_from_the_run_on() -> list[str]:
    """A sensor begins two seconds after its run; one signal is from before the run, and two are from in between."""
    slow = Task("a", attempts=((Leg(seconds=2.0),),))
    tasks = (slow, sensor("b", Sensor(KEY), "a"), sensor("c", Sensor(KEY, "3"), "a"))
    users = (_user(0.2, "3"), _user(1.0, "2"), _user(1.5, "3"))
    return _ends({"d1/r1/b": "2", "d1/r1/c": "3"}, tasks, users)


def with_latest_the_newest_from_before_the_run_counts() -> list[str]:
    """Two are from before the run; a sensor for another value waits for a later one."""
    tasks = (sensor("a", Sensor(KEY, since="latest")), sensor("b", Sensor(KEY, "1", since="latest")))
    return _ends({"d1/r1/a": "2", "d1/r1/b": "3"}, tasks, (_user(0.1, "1"), _user(0.2, "2"), _user(2.0, "1")))


def latest_is_the_newest_that_the_run_may_consider() -> list[str]:
    """The newest signal from before the second run is for the first run alone."""
    users = (_user(0.2, "1"), _user(1.0, "2", of_run="d1/r1"))
    tasks = (sensor("a", Sensor(KEY, since="latest")),)
    return _ends({"d1/r1/a": "1", "d1/r2/a": "1"}, tasks, users, runs_at=(0.5, 1.5))


def values_are_equal_whatever_the_order_of_their_keys() -> list[str]:
    """The value that is waited for has its keys in another order."""
    tasks = (sensor("a", Sensor(KEY, '{"a":1,"b":2}')),)
    return _ends({"d1/r1/a": "2"}, tasks, (_user(1.0, '{"a":1,"b":3}', '{"b":2,"a":1}'),))


def a_signal_for_one_run_ends_no_sensor_of_another() -> list[str]:
    """Two runs wait, and the first signal is for the second of them."""
    users = (_user(1.5, "1", of_run="d1/r2"), _user(2.5, "1"))
    return _ends({"d1/r1/a": "2", "d1/r2/a": "1"}, (sensor("a", Sensor(KEY)),), users, runs_at=(0.5, 0.7))


def place_and_end_of_a_wait_are_one_transaction() -> list[str]:
    """The supervisor dies when it has ended a wait, before its commit; its first look found nothing."""
    return _ends({"d1/r1/a": "1"}, (sensor("a", Sensor(KEY)),), (_user(1.5, "1"),), KillAtMark("signals.considered", 2))


def many_waits_are_looked_at_one_after_the_other() -> list[str]:
    """Four sensors wait, and one transaction looks at one of them, and at one version."""
    tasks = tuple(sensor(name, Sensor(KEY, "3")) for name in "abcd")
    expected = {f"d1/r1/{name}": "3" for name in "abcd"}
    return _ends(expected, tasks, (_user(1.5, "1", "2", "3"),), limits=Limits(page=1, waits=1))


def versions_that_a_wait_needs_are_not_trimmed() -> list[str]:
    """Twelve signals are sent while the supervisor stands still; eight are kept, and the first is the one."""
    users = (_user(2.0, "7"), *(_user(2.0 + number / 10, "1", "2", "1") for number in range(1, 5)))
    frozen = FreezeSupervisor(1.5, 3.0)
    return _ends({"d1/r1/a": "1"}, (sensor("a", Sensor(KEY, "7")),), users, frozen, limits=Limits(kept=8))


def versions_that_a_wait_needs_are_not_cleaned() -> list[str]:
    """A user cleans all that is old while the supervisor stands still; the first version is the one."""
    users = (_user(2.0, "7"), _user(2.1, "1"), _user(2.2, "1"), Cleans(2.5, 0.0))
    return _ends({"d1/r1/a": "1"}, (sensor("a", Sensor(KEY, "7")),), users, FreezeSupervisor(1.5, 3.0))


def a_task_that_its_dag_had_not_yet_counts_from_the_time_of_the_run() -> list[str]:
    """The sensor is taken out of its file before the run, and put back behind the second signal."""
    tasks = (Task("a", attempts=((Leg(seconds=4.0),),)), sensor("b", Sensor(KEY)))
    return _ends({"d1/r1/b": "2"}, tasks, (_user(0.2, "1"), _user(1.0, "2")), Edit(0.1, "d1", "b", 2.0))


# --- senders ---------------------------------------------------------------------------------------


def _sent(history: list[Any]) -> list[str]:
    return [record.value for record in history if isinstance(record, records.SignalStored)]


def _check_sent(found: list[str], history: list[Any], expected: list[str]) -> list[str]:
    sent = _sent(history)
    return found if sent == expected else [*found, f"there are {sent}"]


def an_outcome_in_doubt_sends_its_signals_once() -> list[str]:
    """The database goes away when it has committed an outcome with a signal."""
    task = Task("a", attempts=((Leg(),),), signals=OfSignals(with_outcome=((Send(KEY, "1"),),)))
    found, history = judged((task,), (), FailAtVerb("succeed", 1, is_committed=True))
    return _check_sent(found, history, ["1"])


def a_send_in_doubt_is_the_same_version() -> list[str]:
    """The database goes away when it has committed what a step sends at once."""
    task = Task("a", attempts=((Leg(),),), signals=OfSignals(now=(Send(KEY, "1"), Send(KEY, "2"))))
    found, history = judged((task,), (), FailAtVerb("send_signals", 1, is_committed=True))
    return _check_sent(found, history, ["1", "2"])


def a_try_that_fails_sends_nothing_with_its_outcome() -> list[str]:
    """The first try fails, and both would send with their outcomes."""
    of_task = OfSignals(now=(Send(KEY, "1", "x"),), with_outcome=((Send(KEY, "2"),),))
    task = Task("a", retries=1, attempts=((Leg("fail"),), (Leg(),)), signals=of_task)
    found, history = judged((task,))
    return _check_sent(found, history, ["1", "2"])


def an_outcome_that_comes_too_late_sends_nothing() -> list[str]:
    """A task is cleared while its worker, which takes its time to stop, is about to send with its outcome."""
    of_task = OfSignals(with_outcome=((Send(KEY, "2"),),))
    task = Task("a", attempts=((Leg(seconds=1.2, trouble="stubborn"),),), signals=of_task)
    found, history = judged((task,), (), Act(0.5, "d1/r1/a", "clear", "running", 0.4))
    if sum(isinstance(record, of_tasks.StepRan) and bool(record.signals) for record in history) != 2:
        found.append("the old worker was stopped before its outcome")
    return _check_sent(found, history, ["2"])


def a_step_whose_task_was_cleared_sends_nothing() -> list[str]:
    """A task is cleared while it listens; its worker, which takes its time to stop, hears a signal and would send."""
    of_task = OfSignals(listens=Listens(KEY, timeout_s=2.0, most=1), then=(Send("other", "2"),))
    task = Task("a", attempts=((Leg(trouble="stubborn"),), (Leg(),)), signals=of_task)
    found, history = judged((task,), (_user(2.0, "1"),), Act(1.0, "d1/r1/a", "redo", "running"))
    token = next(record.token for record in history if isinstance(record, of_tasks.StepBegan))
    asked = [record for record in history if isinstance(record, records.Sends) and record.who == token]
    refused = [record for record in history if isinstance(record, records.Refused) and record.token == token]
    if not asked or not refused:
        found.append("the old step did not ask")
    return found


def an_event_of_a_watcher_is_one_signal_however_often_it_comes() -> list[str]:
    """The supervisor dies twice when it has stored events of a watcher, which fires all of them again."""
    watcher = Watcher("w1", KEY, 4, 0.3, long=(1,))
    task = Task("a", attempts=((Leg(seconds=4.0),),))
    kills = (KillAtMark("signals.sent_committed", 1), KillAtMark("signals.sent_committed", 3))
    found, history = judged((task,), (), *kills, watchers=(watcher,))
    if sum(isinstance(record, Faulted) for record in history) != 2:
        found.append("it has not died twice")
    return [*found] if len(_sent(history)) == 4 else [*found, f"there are {_sent(history)}"]


# --- listeners -------------------------------------------------------------------------------------


def a_listener_hears_all_versions_in_order() -> list[str]:
    """One listens from the first version on, one for those to come, one for the third; an answer has one version."""
    of_all = (
        Listens(KEY, after=0, timeout_s=2.0),
        Listens(KEY, timeout_s=2.0, watches=True),
        Listens(KEY, version=3, timeout_s=4.0),
    )
    tasks = tuple(
        Task(name, attempts=((Leg(),),), signals=OfSignals(listens=one))
        for name, one in zip("abc", of_all, strict=True)
    )
    users = (_user(0.2, "1", "1"), _user(1.5, "2", "3"), _user(2.0, "4"))
    found, history = judged(tasks, users, limits=Limits(heard=1))
    names = {record.token: record.task for record in history if isinstance(record, of_tasks.StepBegan)}
    heard: dict[str, tuple[int, ...]] = {}
    for record in history:
        if isinstance(record, records.Listened):
            heard[names[record.token]] = heard.get(names[record.token], ()) + record.versions
    expected = {"d1/r1/a": (1, 2, 3, 4, 5), "d1/r1/b": (3, 4, 5), "d1/r1/c": (3,)}
    return found if heard == expected else [*found, f"not heard: {heard}"]


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "between": what_is_sent_before_a_sensor_begins_counts_from_the_run_on,
    "latest": with_latest_the_newest_from_before_the_run_counts,
    "latest of its own": latest_is_the_newest_that_the_run_may_consider,
    "equal": values_are_equal_whatever_the_order_of_their_keys,
    "one run": a_signal_for_one_run_ends_no_sensor_of_another,
    "considered": place_and_end_of_a_wait_are_one_transaction,
    "many waits": many_waits_are_looked_at_one_after_the_other,
    "trimmed": versions_that_a_wait_needs_are_not_trimmed,
    "cleaned": versions_that_a_wait_needs_are_not_cleaned,
    "new in its DAG": a_task_that_its_dag_had_not_yet_counts_from_the_time_of_the_run,
    "outcome in doubt": an_outcome_in_doubt_sends_its_signals_once,
    "send in doubt": a_send_in_doubt_is_the_same_version,
    "failed try": a_try_that_fails_sends_nothing_with_its_outcome,
    "late outcome": an_outcome_that_comes_too_late_sends_nothing,
    "old step": a_step_whose_task_was_cleared_sends_nothing,
    "redelivered": an_event_of_a_watcher_is_one_signal_however_often_it_comes,
    "listeners": a_listener_hears_all_versions_in_order,
}
