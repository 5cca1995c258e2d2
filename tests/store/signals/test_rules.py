"""Rules of tasks about signals: what starts, restarts and stops, by the state in which the task is (I29)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, OpenStore, Query, register
from tests.store.signals.test_sending import new
from tests.supervisor.tasks_harness import WAIT, S, Tasks, clear, instance_of, task_states

from headgate.protocol.messages.dags import DagSpec, StartTrigger, TaskSpec
from headgate.protocol.messages.rules import Overlap, Predicate, Rule, Rules, SignalRule, StoppedAs, TaskRule
from headgate.protocol.messages.signals import SIGNAL_TRIGGER, SignalWait
from headgate.protocol.values import decode_value, encode_value
from headgate.store.errors import NoSuchRow, SignalKeyInUse, ValueRefused
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.signals import sending
from headgate.store.store import Store
from headgate.store.tasks.dispatch import TaskToRun

GO = SignalRule("go")
AGAIN = SignalRule("again", action="RESTART")
HALT = SignalRule("halt", action="STOP")
PLAIN = TaskSpec("plain", "Op")


def is_(value: Any) -> Predicate:
    return Predicate("equal", encode_value(value, where="value"))


def ruled(
    *rules: Rule, name: str = "job", overlap: Overlap = "latest", stopped_as: StoppedAs = "skipped", **options: Any
) -> TaskSpec:
    return TaskSpec(name, "Op", signals=Rules(rules or (GO, AGAIN, HALT), overlap, stopped_as), **options)


class Jobs:
    """A run with tasks that have rules, and a supervisor that considers signals and evaluates runs."""

    def __init__(self, store: Store, query: Query, *tasks: TaskSpec) -> None:
        self.tasks = Tasks(store, query, tasks=tasks or (ruled(), PLAIN))
        self.store = store
        self.query = query
        self.settle()

    def send(self, key: str, *values: Any, **fields: Any) -> list[int]:
        """Send signals, and have them act; return their versions."""
        sent = self.store.signals.send([new(key, value, **fields) for value in values or (None,)])
        self.settle()
        return [one.version for one in sent]

    def settle(self) -> None:
        """Do what schedulers do until nothing is left to do."""
        epoch = self.tasks.epoch
        while True:
            planned = self.store.scheduling.plan(epoch)
            considered = self.store.scheduling.consider_signals(epoch)
            if not (planned.evaluated or considered.has_more or considered.tasks or considered.rules):
                return

    def states(self) -> dict[str, S]:
        return task_states(self.store, self.tasks.run)

    def state(self, name: str = "job") -> S:
        return self.states()[name]

    def id(self, name: str = "job") -> TaskInstanceId:
        return instance_of(self.store, self.tasks.run, name)

    def row(self, name: str = "job") -> dict[str, Any]:
        return self.tasks.row(self.id(name))

    def dispatch(self, name: str = "job") -> TaskToRun:
        """Have a worker run what is scheduled; return this task of it."""
        by_name = {task.task_id: task for task in self.tasks.dispatch()}
        return by_name[name]

    def end(self, task: TaskToRun, state: S = S.SUCCESS) -> None:
        """Have the worker end a step."""
        verbs = self.store.tasks
        if state is S.SUCCESS:
            assert ends.succeed(verbs, self.tasks.epoch, task.id, task.token)
        else:
            ends.fail(verbs, self.tasks.epoch, task.id, task.token, "it broke")
        self.settle()

    def end_plain(self) -> None:
        """End the task without rules, if the run has it."""
        if self.states().get("plain") is S.SCHEDULED:
            tasks = {task.task_id: task for task in self.tasks.dispatch()}
            self.end(tasks["plain"])

    def run_state(self) -> str:
        return str(self.query("SELECT state FROM dag_run WHERE id = :run", run=self.tasks.run)[0]["state"])

    def signals(self, name: str = "job") -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """The keys and values of the signals that have started a task, and of those before."""
        found = self.store.tasks.start_signals(self.id(name))
        return (
            [(one.key, decode_value(one.value)) for one in found.signals],
            [(one.key, decode_value(one.value)) for one in found.previous],
        )


@pytest.fixture
def jobs(store: Store, query: Query) -> Jobs:
    return Jobs(store, query)


# --- START by state -----------------------------------------------------------------------------


def test_a_task_waits_for_its_signal_and_not_for_its_trigger_rule(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, PLAIN, ruled(GO, upstream=("plain",)))
    jobs.end_plain()
    assert jobs.states() == {"plain": S.SUCCESS, "job": S.SKIPPED}, "its run has ended without it"


def test_a_start_begins_what_has_not_begun(jobs: Jobs) -> None:
    assert jobs.state() is S.NONE
    assert jobs.send("go", "now") == [1]
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals() == ([("go", "now")], [])
    task = jobs.dispatch()
    assert task.try_number == 1


def test_a_signal_that_does_not_meet_the_predicate_does_nothing(store: Store, query: Query) -> None:
    at_least = SignalRule("go", predicate=Predicate("at_least", b"3"))
    jobs = Jobs(store, query, ruled(at_least), PLAIN)
    jobs.send("go", 1, 2, "4")
    assert jobs.state() is S.NONE
    jobs.send("go", 1, 3, 2)
    assert jobs.signals() == ([("go", 3)], [])


def test_a_start_joins_a_start_that_no_worker_has_taken(jobs: Jobs) -> None:
    jobs.send("go", 1)
    jobs.send("go", 2)
    assert jobs.signals() == ([("go", 2)], [])
    jobs.end(jobs.dispatch())
    assert jobs.state() is S.SUCCESS


def test_a_start_of_what_runs_is_remembered_once(jobs: Jobs) -> None:
    jobs.send("go", 1)
    task = jobs.dispatch()
    jobs.send("go", 2, 3)
    jobs.send("go", 4)
    assert jobs.state() is S.RUNNING
    jobs.end(task)
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals() == ([("go", 4)], [("go", 1)])
    again = jobs.dispatch()
    assert again.try_number == 2
    jobs.end(again)
    assert jobs.state() is S.SUCCESS


def test_a_start_of_what_runs_is_forgotten_if_its_author_says_so(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, overlap="ignore"), PLAIN)
    jobs.send("go", 1)
    task = jobs.dispatch()
    jobs.send("go", 2)
    jobs.end(task)
    assert jobs.state() is S.SUCCESS
    jobs.send("go", 3)
    assert jobs.signals() == ([("go", 3)], [("go", 1)])


def test_a_task_starts_for_each_signal_if_its_author_says_so(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, overlap="each"), PLAIN)
    jobs.send("go", 1, 2)
    started = []
    jobs.send("go", 3)
    while jobs.state() is S.SCHEDULED:
        started.append(jobs.signals()[0])
        jobs.end(jobs.dispatch())
    assert started == [[("go", 1)], [("go", 2)], [("go", 3)]]
    assert jobs.row()["try_number"] == 3


def test_a_start_of_what_is_deferred_is_remembered(jobs: Jobs) -> None:
    jobs.send("go", 1)
    task = jobs.dispatch()
    assert ends.defer(jobs.store.tasks, jobs.tasks.epoch, task.id, task.token, WAIT)
    jobs.send("go", 2)
    assert jobs.state() is S.DEFERRED
    jobs.store.tasks.mark(jobs.id(), "success")
    jobs.settle()
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals()[0] == [("go", 2)]


def test_a_start_begins_the_next_try_of_what_waits_for_it(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, retries=1, retry_delay_s=3600.0), PLAIN)
    jobs.send("go", 1)
    jobs.end(jobs.dispatch(), S.FAILED)
    assert jobs.state() is S.UP_FOR_RETRY
    jobs.send("go", 2)
    assert jobs.state() is S.SCHEDULED
    task = jobs.dispatch()
    assert task.try_number == 2
    assert jobs.signals() == ([("go", 2)], [("go", 1)])
    jobs.end(task, S.FAILED)
    assert jobs.state() is S.FAILED, "it had one retry"


def test_a_start_of_what_has_ended_begins_it_anew_without_its_values(jobs: Jobs) -> None:
    jobs.send("go", 1)
    task = jobs.dispatch()
    assert ends.succeed(jobs.store.tasks, jobs.tasks.epoch, task.id, task.token, xcoms={"return_value": b'"left"'})
    jobs.settle()
    run = DagRunId(jobs.tasks.run)
    assert jobs.store.tasks.pull_xcom(run, "job", "return_value") == b'"left"'
    jobs.send("go", 2)
    assert jobs.state() is S.SCHEDULED
    assert jobs.store.tasks.pull_xcom(run, "job", "return_value") is None
    assert jobs.dispatch().try_number == 2


def test_a_task_that_starts_in_its_trigger_does_so_by_a_signal(store: Store, query: Query) -> None:
    start = StartTrigger("a.Trigger", b"{}", "resume", b"{}")
    jobs = Jobs(store, query, ruled(GO, start_trigger=start), PLAIN)
    assert jobs.state() is S.NONE
    jobs.send("go")
    assert jobs.state() is S.DEFERRED


def test_a_sensor_may_have_rules_as_well(store: Store, query: Query) -> None:
    wait = StartTrigger(SIGNAL_TRIGGER, b"{}", "execute", b"{}", signal=SignalWait("labels"))
    jobs = Jobs(store, query, ruled(GO, start_trigger=wait), PLAIN)
    jobs.send("labels", "early")
    assert jobs.state() is S.NONE
    jobs.send("go")
    assert jobs.state() is S.SUCCESS, "the signal that it waits for was sent since the run was created"


# --- RESTART and STOP ---------------------------------------------------------------------------


def test_a_restart_ends_what_runs_and_begins_it_anew(jobs: Jobs) -> None:
    jobs.send("go", 1)
    task = jobs.dispatch()
    jobs.send("again", 2)
    assert jobs.state() is S.RESTARTING
    jobs.send("go", 3)
    assert jobs.state() is S.RESTARTING, "its worker is not gone"
    assert not ends.succeed(jobs.store.tasks, jobs.tasks.epoch, task.id, task.token), "it came too late"
    jobs.settle()
    assert jobs.state() is S.SCHEDULED
    assert sorted(jobs.signals()[0]) == [("again", 2), ("go", 3)]
    jobs.end(jobs.dispatch())
    assert jobs.state() is S.SUCCESS


def test_a_restart_ends_the_trigger_of_what_is_deferred_and_begins_it_anew(jobs: Jobs) -> None:
    jobs.send("go")
    task = jobs.dispatch()
    assert ends.defer(jobs.store.tasks, jobs.tasks.epoch, task.id, task.token, WAIT)
    trigger_id = jobs.row()["trigger_id"]
    jobs.send("again")
    assert jobs.state() is S.SCHEDULED
    assert jobs.tasks.trigger(trigger_id)["removed_at"] is not None, "with its on_kill()"


@pytest.mark.parametrize("first", ["none", "ended"])
def test_a_restart_begins_what_does_not_run(jobs: Jobs, first: str) -> None:
    if first == "ended":
        jobs.send("go")
        jobs.end(jobs.dispatch())
    jobs.send("again")
    assert jobs.state() is S.SCHEDULED


@pytest.mark.parametrize(
    ("stopped_as", "state"), [("skipped", S.SKIPPED), ("success", S.SUCCESS), ("failed", S.FAILED)]
)
def test_a_stop_ends_what_runs_in_the_state_that_its_author_says(
    store: Store, query: Query, stopped_as: StoppedAs, state: S
) -> None:
    jobs = Jobs(store, query, ruled(stopped_as=stopped_as), PLAIN)
    jobs.send("go")
    task = jobs.dispatch()
    jobs.send("halt")
    assert jobs.state() is state
    assert jobs.row()["token"] is None
    assert not ends.succeed(store.tasks, jobs.tasks.epoch, task.id, task.token)
    assert jobs.row()["last_error"] == ("a signal stopped it" if state is S.FAILED else None)


@pytest.mark.parametrize("before", ["none", "scheduled", "deferred", "up_for_retry"])
def test_a_stop_ends_what_does_not_run(store: Store, query: Query, before: str) -> None:
    jobs = Jobs(store, query, ruled(retries=1), PLAIN)
    if before != "none":
        jobs.send("go")
    if before in ("deferred", "up_for_retry"):
        task = jobs.dispatch()
        if before == "deferred":
            assert ends.defer(jobs.store.tasks, jobs.tasks.epoch, task.id, task.token, WAIT)
        else:
            jobs.end(task, S.FAILED)
    assert jobs.state() is S(before)
    jobs.send("halt")
    assert jobs.state() is S.SKIPPED
    jobs.send("go")
    assert jobs.state() is S.SCHEDULED, "it may begin again"


def test_a_stop_of_what_has_ended_does_nothing(jobs: Jobs) -> None:
    jobs.send("go")
    jobs.end(jobs.dispatch())
    jobs.send("halt")
    assert jobs.state() is S.SUCCESS


def test_of_signals_that_come_together_the_last_counts(jobs: Jobs) -> None:
    """Nothing acts before all of them are there."""
    orders = list(itertools.permutations(("go", "halt")))
    for order in orders:
        for key in order:
            jobs.store.signals.send([new(key)])
        jobs.settle()
        assert jobs.state() is (S.SCHEDULED if order[-1] == "go" else S.SKIPPED), order


def test_a_stop_takes_back_a_start_that_was_remembered(jobs: Jobs) -> None:
    jobs.send("go")
    jobs.dispatch()
    jobs.send("go")
    jobs.send("halt")
    assert jobs.state() is S.SKIPPED


def test_a_task_with_a_stop_alone_begins_by_its_trigger_rule(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(HALT))
    assert jobs.state() is S.SCHEDULED
    jobs.send("halt")
    assert (jobs.state(), jobs.run_state()) == (S.SKIPPED, "success")


def test_a_signal_without_action_is_in_the_context_of_the_next_start(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, SignalRule("rate", action="NONE")), PLAIN)
    jobs.send("rate", 7)
    assert jobs.state() is S.NONE
    jobs.send("go")
    assert jobs.signals()[0] == [("go", None), ("rate", 7)]


# --- necessary ones -----------------------------------------------------------------------------

MODEL, LABELS = (SignalRule(key, condition="necessary") for key in ("model", "labels"))


def test_necessary_signals_start_a_task_together_and_with_its_trigger_rule(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, PLAIN, ruled(MODEL, LABELS, upstream=("plain",)), ruled(GO, name="other"))
    jobs.send("model", 1)
    jobs.send("model", 2)
    assert jobs.state() is S.NONE
    jobs.send("labels", 3)
    assert jobs.state() is S.NONE, "what is upstream has not ended"
    jobs.end_plain()
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals()[0] == [("model", 2), ("labels", 3)]


def test_each_start_needs_newer_versions_of_all_necessary_signals(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(MODEL, LABELS), PLAIN)
    jobs.send("model")
    jobs.send("labels")
    jobs.end(jobs.dispatch())
    jobs.send("model")
    assert jobs.state() is S.SUCCESS
    jobs.send("labels")
    assert jobs.state() is S.SCHEDULED


def test_a_task_of_necessary_signals_ends_with_what_is_upstream_of_it(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, PLAIN, ruled(MODEL, upstream=("plain",)))
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.end(tasks["plain"], S.FAILED)
    assert (jobs.state(), jobs.run_state()) == (S.UPSTREAM_FAILED, "failed")


# --- the ends of other tasks --------------------------------------------------------------------


def test_the_end_of_a_task_starts_another_each_time(store: Store, query: Query) -> None:
    follows = ruled(TaskRule("job", "success"), name="follows")
    jobs = Jobs(store, query, ruled(GO), follows, PLAIN)
    jobs.send("go")
    jobs.end(jobs.dispatch(), S.FAILED)
    assert jobs.state("follows") is S.NONE, "it has failed"
    for number in (2, 3):
        jobs.send("go")
        jobs.end(jobs.dispatch())
        assert jobs.state("follows") is S.SCHEDULED
        assert jobs.signals("follows")[0] == [("job", "success")]
        jobs.end(jobs.dispatch("follows"))
        assert jobs.row("follows")["try_number"] == number - 1


def test_a_failure_stops_what_runs_beside_it(store: Store, query: Query) -> None:
    watched = ruled(TaskRule("plain", "failed", "STOP"), name="watched")
    jobs = Jobs(store, query, PLAIN, watched)
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.end(tasks["plain"], S.FAILED)
    assert jobs.states() == {"plain": S.FAILED, "watched": S.SKIPPED}


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
    with pytest.raises(SignalKeyInUse):
        jobs.store.signals.forget("go")
    (waiting,) = jobs.store.signals.waiting("go", limit=10)
    assert (waiting.task_id, waiting.has_rule, waiting.seen_version) == ("job", True, 1)


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
