"""Which signals count for a run with rules, its end, and starts by hand (I29)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.store import ends
from tests.store.harness import QUEUES, OpenStore, Query, register
from tests.store.signals.rules_harness import AGAIN, GO, HALT, PLAIN, Jobs, is_, ruled
from tests.store.signals.test_sending import new
from tests.supervisor.tasks_harness import S, Tasks, clear, task_states

from headgate.protocol.messages.dags import DagSpec
from headgate.protocol.messages.rules import SignalRule, TaskRule
from headgate.protocol.messages.signals import Predicate
from headgate.scheduling.why import Answer
from headgate.store.errors import NoSuchRow, SignalKeyInUse, ValueRefused
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.signals import sending
from headgate.store.store import Store


@pytest.fixture
def jobs(store: Store, query: Query) -> Jobs:
    return Jobs(store, query)


# --- which versions count -----------------------------------------------------------------------


def test_signals_count_from_the_creation_of_the_run_on(store: Store, query: Query) -> None:
    store.signals.send([new("go", "early"), new("late", "early")])
    late = ruled(SignalRule("late", since="latest"), name="late")
    tasks = Tasks(store, query, tasks=(ruled(GO), late, PLAIN))
    store.signals.send([new("go", "between")])  # before anything of the run was looked at
    jobs = Jobs.__new__(Jobs)
    jobs.tasks, jobs.store, jobs.query = tasks, store, query
    jobs.settle()
    assert jobs.signals()[0] == [("go", "between")]
    assert jobs.signals("late")[0] == [("late", "early")]


def test_a_signal_of_another_run_starts_nothing(jobs: Jobs) -> None:
    other = jobs.store.tasks.create_run("etl", "other")
    jobs.store.signals.send([new("go", dag_run=other)])
    jobs.settle()
    assert jobs.state() is S.NONE
    assert task_states(jobs.store, int(other or 0))["job"] is S.SCHEDULED


def test_a_rule_that_its_dag_gets_later_counts_from_the_creation_of_the_run(jobs: Jobs) -> None:
    jobs.send("later", 1)
    rules = ruled(GO, AGAIN, HALT, SignalRule("later"))
    jobs.store.tasks.save_file(jobs.tasks.epoch, "etl.py", [DagSpec("etl", tasks=(rules, PLAIN))])
    jobs.settle()
    assert jobs.signals()[0] == [("later", 1)]


def test_rules_in_another_order_are_not_held_against_the_same_signals_again(jobs: Jobs) -> None:
    jobs.send("go", 1)
    jobs.end(jobs.dispatch())
    jobs.store.tasks.save_file(jobs.tasks.epoch, "etl.py", [DagSpec("etl", tasks=(ruled(HALT, GO), PLAIN))])
    jobs.settle()
    assert jobs.state() is S.SUCCESS
    assert len(jobs.query("SELECT * FROM signal_wait WHERE rule IS NOT NULL")) == 2


def test_nothing_starts_while_the_dag_is_paused_and_its_signals_wait(jobs: Jobs) -> None:
    jobs.store.tasks.set_paused("etl", is_paused=True)
    jobs.send("go", 1)
    assert jobs.state() is S.NONE
    jobs.store.tasks.set_paused("etl", is_paused=False)
    jobs.settle()
    assert jobs.signals()[0] == [("go", 1)]


def test_a_stop_holds_in_a_paused_dag(jobs: Jobs) -> None:
    jobs.send("go")
    jobs.dispatch()
    jobs.store.tasks.set_paused("etl", is_paused=True)
    jobs.send("halt")
    assert jobs.state() is S.SKIPPED


@pytest.mark.parametrize("start", ["go", "again"])
def test_a_stop_holds_in_a_paused_dag_whatever_start_comes_behind_it(jobs: Jobs, start: str) -> None:
    jobs.send("go", 1)
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.end(tasks["plain"])
    jobs.store.tasks.set_paused("etl", is_paused=True)
    jobs.store.signals.send([new("halt"), new(start, 2)])
    jobs.settle()
    assert (jobs.state(), jobs.run_state()) == (S.SKIPPED, "running")
    jobs.store.tasks.set_paused("etl", is_paused=False)
    jobs.settle()
    assert jobs.signals()[0] == [(start, 2)]


@pytest.mark.parametrize("change", [{"predicate": is_("go")}, {"action": "RESTART"}], ids=["predicate", "action"])
def test_a_rule_that_is_another_one_in_the_file_goes_on_where_it_was(jobs: Jobs, change: dict[str, Any]) -> None:
    jobs.send("go", "go", "stay")
    jobs.end(jobs.dispatch())
    assert jobs.signals()[0] == [("go", "stay")]
    changed = msgspec.structs.replace(GO, **change)
    jobs.store.tasks.save_file(jobs.tasks.epoch, "etl.py", [DagSpec("etl", tasks=(ruled(changed, HALT), PLAIN))])
    jobs.settle()
    assert jobs.state() is S.SUCCESS, "it is not held against the same signals again"
    jobs.send("go", "go")
    assert jobs.signals() == ([("go", "go")], [("go", "stay")])


def test_what_is_remembered_is_not_forgotten_with_another_predicate(jobs: Jobs) -> None:
    jobs.send("go", 1)
    task = jobs.dispatch()
    jobs.send("go", 2)
    changed = msgspec.structs.replace(GO, predicate=is_("go"))
    jobs.store.tasks.save_file(jobs.tasks.epoch, "etl.py", [DagSpec("etl", tasks=(ruled(changed), PLAIN))])
    jobs.settle()
    jobs.end(task)
    assert jobs.signals()[0] == [("go", 2)]


# --- the end of a run ---------------------------------------------------------------------------


def test_a_run_ends_with_the_tasks_that_no_signal_starts(jobs: Jobs) -> None:
    jobs.end_plain()
    assert (jobs.states(), jobs.run_state()) == ({"job": S.SKIPPED, "plain": S.SUCCESS}, "success")
    jobs.send("go")
    assert jobs.state() is S.SKIPPED, "its run has ended"
    assert jobs.query("SELECT is_unseen FROM signal_key WHERE is_unseen") == [], "nothing is looked at again and again"


def test_a_run_does_not_end_over_a_task_that_a_signal_has_started(jobs: Jobs) -> None:
    jobs.send("go")
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.end(tasks["plain"])
    assert jobs.run_state() == "running"
    jobs.end(tasks["job"])
    assert jobs.run_state() == "success"


def test_a_signal_that_was_sent_before_the_end_of_the_run_still_starts_its_task(jobs: Jobs) -> None:
    """The end of the last other task and the signal are there, and the scheduler looks at the run first."""
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    assert ends.succeed(jobs.store.tasks, jobs.tasks.epoch, tasks["plain"].id, tasks["plain"].token)
    jobs.store.signals.send([new("go")])
    planned = jobs.store.scheduling.plan(jobs.tasks.epoch)
    assert (planned.ended, planned.left) == ({}, 1)
    jobs.settle()
    assert (jobs.state(), jobs.run_state()) == (S.SCHEDULED, "running")


def test_a_run_of_tasks_that_signals_start_stays_open_until_a_user_ends_it(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled())
    jobs.send("go")
    task = jobs.dispatch()
    jobs.send("go")
    assert store.signals.end_run(DagRunId(jobs.tasks.run))
    jobs.settle()
    assert jobs.run_state() == "running", "what is under way goes on"
    jobs.end(task)
    assert (jobs.state(), jobs.run_state()) == (S.SUCCESS, "success")
    assert not store.signals.end_run(DagRunId(jobs.tasks.run))


def test_what_was_sent_after_the_end_of_a_run_does_not_count_when_it_goes_on(jobs: Jobs) -> None:
    jobs.end_plain()
    assert jobs.run_state() == "success"
    jobs.send("go", "too late")
    clear(jobs.store, jobs.tasks.run, "plain")
    jobs.settle()
    assert (jobs.state(), jobs.state("plain")) == (S.SKIPPED, S.SCHEDULED)
    jobs.send("go", "again")
    assert jobs.signals()[0] == [("go", "again")]


def test_a_cancelled_run_starts_nothing(jobs: Jobs) -> None:
    while not jobs.store.tasks.cancel_run(DagRunId(jobs.tasks.run)).is_ended:
        pass
    jobs.send("go")
    assert (jobs.state(), jobs.run_state()) == (S.FAILED, "failed")


def test_what_a_rule_has_not_seen_is_kept(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "VERSIONS_KEPT_MAX", 2)
    jobs.store.signals.send([new("go", number) for number in range(5)])
    assert len(jobs.query("SELECT * FROM signal")) == 5
    jobs.settle()
    jobs.send("go", 5)
    assert len(jobs.query("SELECT * FROM signal")) == 2


def test_a_key_is_not_forgotten_while_a_rule_of_a_run_is_about_it(jobs: Jobs) -> None:
    jobs.send("go")
    with pytest.raises(SignalKeyInUse, match="the task job of run r1 of etl has a rule about it"):
        jobs.store.signals.forget("go")
    (waiting,) = jobs.store.signals.waiting("go", limit=10)
    assert (waiting.task_id, waiting.has_rule, waiting.seen_version) == ("job", True, 1)


def test_a_run_that_goes_on_takes_what_is_sent_from_then_on_when_its_key_was_forgotten(jobs: Jobs) -> None:
    jobs.send("go", 1, 2)
    for task in jobs.tasks.dispatch():
        jobs.end(task)
    assert jobs.run_state() == "success"
    assert jobs.store.signals.forget("go") == 2
    jobs.send("go", 3)
    clear(jobs.store, jobs.tasks.run, "plain")
    jobs.settle()
    assert (jobs.state(), jobs.run_state()) == (S.SUCCESS, "running"), "it was sent while the run had ended"
    jobs.send("go", 4)
    assert (jobs.state(), jobs.signals()) == (S.SCHEDULED, ([("go", 4)], [("go", 2)]))


# --- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["job", "plain"])
def test_a_user_starts_restarts_and_stops_any_task(jobs: Jobs, task: str) -> None:
    jobs.store.signals.ask(jobs.id(task), "START")
    jobs.settle()
    assert jobs.state(task) is S.SCHEDULED
    first = jobs.dispatch(task)
    jobs.store.signals.ask(jobs.id(task), "RESTART")
    jobs.settle()
    assert jobs.state(task) is S.RESTARTING
    ends.succeed(jobs.store.tasks, jobs.tasks.epoch, first.id, first.token)
    jobs.settle()
    assert jobs.state(task) is S.SCHEDULED
    jobs.store.signals.ask(jobs.id(task), "STOP")
    jobs.settle()
    assert jobs.state(task) is S.SKIPPED
    assert jobs.signals(task) == ([], []), "no signal has started it"


def test_a_start_by_hand_opens_a_run_that_has_ended(jobs: Jobs) -> None:
    jobs.end_plain()
    jobs.store.signals.ask(jobs.id(), "STOP")
    jobs.settle()
    assert jobs.run_state() == "success"
    jobs.store.signals.ask(jobs.id(), "START")
    jobs.settle()
    assert (jobs.state(), jobs.run_state()) == (S.SCHEDULED, "running")
    jobs.end(jobs.dispatch())
    assert jobs.run_state() == "success"


def test_what_cannot_be_asked_for_is_refused(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled())
    with pytest.raises(NoSuchRow):
        store.signals.ask(TaskInstanceId(10**9), "START")
    store.signals.end_run(DagRunId(jobs.tasks.run))
    with pytest.raises(ValueRefused, match="the run is to end"):
        store.signals.ask(jobs.id(), "START")


# --- supervisors --------------------------------------------------------------------------------


def test_of_two_supervisors_one_starts_the_task(jobs: Jobs, open_store: OpenStore) -> None:
    other = open_store()
    epoch = register(other, hostname="other")
    jobs.store.signals.send([new("go", 1)])
    while other.scheduling.consider_signals(epoch).has_more:
        pass
    other.scheduling.plan(epoch)
    jobs.settle()
    assert jobs.row()["try_number"] == 1
    assert [task.task_id for task in other.tasks.dispatch(epoch, limit=10, queues=QUEUES).tasks] == ["job", "plain"]


# --- why ----------------------------------------------------------------------------------------


def why(jobs: Jobs, name: str = "job") -> Answer:
    (ref,) = jobs.store.inspect.find_tasks("etl", "r1", name)
    return jobs.store.inspect.why_task(ref)


def test_why_says_for_which_signals_a_task_waits(store: Store, query: Query) -> None:
    ready = SignalRule("ready", predicate=Predicate("at_least", b"3", ("n",)))
    model, labels = (SignalRule(key, "ns", condition="necessary") for key in ("model", "labels"))
    jobs = Jobs(store, query, ruled(ready, model, labels, TaskRule("plain", "failed", "STOP"), upstream=()), PLAIN)
    jobs.send("ready", {"n": 1})
    jobs.send("model", 1, namespace="ns")
    answer = why(jobs)
    assert answer.reason == "waits_for_signal"
    assert answer.headline == (
        "it is started by a signal, and none has met its rules: 'ready', n at_least 3; or 'labels' of 'ns'"
    )
    assert answer.next == (
        "`headgate signals send ready VALUE`, `headgate signals send labels --namespace ns` sends one; "
        "`headgate tasks start etl r1 job` starts it without a signal"
    )
    assert [text for name, text in answer.facts if name == "rule"] == [
        "START: 'ready', n at_least 3; held against 1 of 1 versions",
        "START, necessary: 'model' of 'ns'; held against 1 of 1 versions; met by version 1, which has not acted",
        "START, necessary: 'labels' of 'ns'; held against 0 of 0 versions",
        "STOP: the end of plain as failed",
    ]
    assert store.signals.end_run(DagRunId(jobs.tasks.run))
    assert why(jobs).reason == "run_ending"


def test_why_tells_of_a_start_that_is_remembered_and_of_one_by_hand(jobs: Jobs) -> None:
    jobs.send("go")
    jobs.dispatch()
    jobs.send("go")
    jobs.store.signals.ask(jobs.id(), "RESTART")
    facts = [text for name, text in why(jobs).facts if name == "rule"]
    assert facts[:2] == [
        "RESTART: a user asks for it; met by version 1, which has not acted",
        "START: 'go'; held against 2 of 2 versions; met by version 2, which has not acted",
    ]


def test_why_of_a_task_that_waits_for_what_is_upstream_as_well(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, PLAIN, ruled(SignalRule("model", condition="necessary"), upstream=("plain",)))
    jobs.send("model")
    assert why(jobs).reason == "upstream"
    jobs.store.tasks.set_paused("etl", is_paused=True)
    assert why(jobs).reason == "dag_paused"


def test_why_says_that_a_clear_starts_nothing_that_waits_for_a_signal(jobs: Jobs) -> None:
    jobs.send("go")
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.end(tasks["job"])
    assert why(jobs).next == "nothing; a signal may start it again, or `headgate tasks start etl r1 job`"
    jobs.end(tasks["plain"])
    assert why(jobs).next == "nothing; `headgate tasks start etl r1 job` starts it again", "its run has ended"
    assert ("rule", "START: 'go'") in why(jobs).facts


def test_why_of_a_retry_that_a_clear_would_take_back(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, retries=1, retry_delay_s=3600.0), PLAIN)
    jobs.send("go")
    jobs.end(jobs.dispatch(), S.FAILED)
    assert why(jobs).next.endswith("; `headgate tasks start etl r1 job` begins it at once")


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_why_of_an_ended_task_that_starts_after_a_pause(jobs: Jobs, is_by_hand: bool) -> None:
    jobs.send("go")
    jobs.end(jobs.dispatch())
    jobs.store.tasks.set_paused("etl", is_paused=True)
    assert why(jobs).reason == "ended"
    if is_by_hand:
        jobs.store.signals.ask(jobs.id(), "START")
    else:
        jobs.send("go")
    assert (why(jobs).reason, why(jobs).next) == ("dag_paused", "`headgate dags unpause etl`")
