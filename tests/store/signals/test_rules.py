"""Rules of tasks about signals: what starts, restarts and stops, by the state in which the task is (I29)."""

from __future__ import annotations

import itertools

import pytest
from tests.store import ends
from tests.store.harness import Query
from tests.store.signals.rules_harness import AGAIN, GO, HALT, PLAIN, Jobs, ruled
from tests.store.signals.test_sending import new
from tests.store.tasks.streams_harness import Streams
from tests.supervisor.tasks_harness import WAIT, S

from headgate.protocol.messages.dags import StartTrigger, TaskSpec
from headgate.protocol.messages.rules import Rule, Rules, SignalRule, StoppedAs, TaskRule
from headgate.protocol.messages.signals import SIGNAL_TRIGGER, Predicate, SignalWait
from headgate.store.ids import DagRunId
from headgate.store.store import Store


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
    (line,) = [one for one in jobs.store.inspect.tasks(limit=10) if one.name == "job"]
    assert (line.try_number, line.tries_max, line.retries) == (2, 2, 0)
    why = jobs.store.inspect.why_task(jobs.store.inspect.find_task("etl", "r1", "job"))
    assert ("try", "2") in why.facts, "each of its tries is the last"
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


def failed_starts(jobs: Jobs) -> tuple[str, ...]:
    found = [one.details for one in jobs.store.inspect.status() if one.reason == "failed_starts"]
    return found[0] if found else ()


def test_a_start_that_has_failed_is_told_after_the_next_one(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, overlap="each"), PLAIN)
    jobs.send("go", 1, 2, 3)
    for end in (S.FAILED, S.SUCCESS, S.FAILED):
        assert all(": 1 start, " in one for one in failed_starts(jobs))
        jobs.end(jobs.dispatch(), end)
    assert jobs.state() is S.FAILED
    assert len(failed_starts(jobs)) == 1, "the last one has failed, too, and its row says so"
    jobs.send("go", 4)
    (line,) = failed_starts(jobs)
    assert ": 2 starts, " in line
    task = jobs.store.inspect.find_task("etl", "r1", "job")
    answer = jobs.store.inspect.why_task(task)
    assert answer.facts[-1] == ("also", "starts before the newest one failed: 'go': 2 starts, it broke")


def test_failed_starts_of_several_rules_are_those_of_one_task(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, AGAIN), PLAIN)
    for key in ("go", "again", "go"):
        jobs.send(key)
        jobs.end(jobs.dispatch(), S.FAILED)
    (line,) = failed_starts(jobs)
    assert ": 2 starts, " in line


def test_a_failed_task_that_a_user_starts_again_is_no_failed_start(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO), PLAIN)
    jobs.send("go", 1)
    jobs.end(jobs.dispatch(), S.FAILED)
    jobs.store.signals.ask(jobs.id(), "START")
    jobs.settle()
    assert jobs.state() is S.SCHEDULED
    assert failed_starts(jobs) == ()


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


def test_a_remembered_start_begins_the_next_try_of_what_has_failed(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, retries=1, retry_delay_s=3600.0), PLAIN)
    jobs.send("go", 1)
    task = jobs.dispatch()
    jobs.send("go", 2)
    assert jobs.state() is S.RUNNING
    jobs.end(task, S.FAILED)
    jobs.settle()
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals() == ([("go", 2)], [("go", 1)])


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
    assert (jobs.state(), jobs.taken) == (S.RESTARTING, 1)
    jobs.send("go", 3)
    assert (jobs.state(), jobs.taken) == (S.RESTARTING, 1), "its worker is not gone"
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
    assert (jobs.state(), jobs.taken) == (S.SCHEDULED, 1)
    assert jobs.tasks.trigger(trigger_id)["removed_at"] is not None, "with its on_kill()"


@pytest.mark.parametrize("first", ["none", "ended"])
def test_a_restart_begins_what_does_not_run(jobs: Jobs, first: str) -> None:
    if first == "ended":
        jobs.send("go")
        jobs.end(jobs.dispatch())
    jobs.send("again")
    assert (jobs.state(), jobs.taken) == (S.SCHEDULED, 0)


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
    assert (jobs.state(), jobs.taken) == (state, 1)
    assert jobs.row()["token"] is None
    assert not ends.succeed(store.tasks, jobs.tasks.epoch, task.id, task.token)
    assert jobs.row()["last_error"] == "a signal stopped it: 'halt', version 1"
    (line,) = [one for one in store.inspect.tasks(limit=10) if one.name == "job"]
    assert line.error == (line.last_error if state is S.FAILED else None), "it is an error only of what has failed"
    jobs.send("go")
    assert jobs.row()["last_error"] is None


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (None, "a user stopped it"),
        (TaskRule("plain", action="STOP"), "a rule stopped it: the end of plain"),
        (SignalRule("halt", "epochs", action="STOP"), "a signal stopped it: 'halt' of 'epochs', version 2"),
    ],
)
def test_a_task_that_was_stopped_says_by_what(store: Store, query: Query, rule: Rule | None, reason: str) -> None:
    jobs = Jobs(store, query, ruled(GO, *(() if rule is None else (rule,))), PLAIN, TaskSpec("other", "Op"))
    jobs.send("go")
    if rule is None:
        jobs.store.signals.ask(jobs.id(), "STOP")
        jobs.settle()
    elif isinstance(rule, TaskRule):
        jobs.end_plain()
    else:
        jobs.send("halt", 1, namespace="others")
        jobs.send("halt", 1, 2, namespace="epochs")
    assert (jobs.state(), jobs.row()["last_error"]) == (S.SKIPPED, reason)


def test_a_stop_ends_the_trigger_of_a_stream_that_has_an_event_for_its_task(store: Store, query: Query) -> None:
    tasks = Streams(store, query, signals=Rules((HALT,), "latest", "skipped"))
    tasks.stream_it()
    tasks.fire(1)
    assert tasks.state() is S.SCHEDULED
    store.signals.send([new("halt", None)])
    assert store.scheduling.consider_signals(tasks.epoch).rules == 1
    assert store.scheduling.plan(tasks.epoch).taken == 1, "its supervisor is to tell the runner"
    assert (tasks.state(), tasks.is_open()) == (S.SKIPPED, False)


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


def test_a_stop_takes_back_no_necessary_signal_that_was_sent_after_it(store: Store, query: Query) -> None:
    rest = TaskSpec("rest", "Op")  # which holds the run open
    jobs = Jobs(store, query, PLAIN, ruled(MODEL, LABELS, HALT, upstream=("plain",)), rest)
    store.signals.send([new("model", 1), new("halt"), new("labels", 2)])
    jobs.settle()
    assert jobs.state() is S.SKIPPED
    jobs.end_plain()
    assert jobs.state() is S.SKIPPED, "the stop has taken back the first"
    jobs.send("model", 3)
    assert jobs.signals()[0] == [("model", 3), ("labels", 2)]


def test_a_stop_between_necessary_signals_takes_back_the_first_though_all_are_there(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, PLAIN, ruled(MODEL, LABELS, HALT, upstream=("plain",)), TaskSpec("rest", "Op"))
    jobs.end_plain()
    store.tasks.set_paused("etl", is_paused=True)
    store.signals.send([new("model", 1), new("halt"), new("labels", 2)])
    jobs.settle()
    assert jobs.state() is S.SKIPPED
    store.tasks.set_paused("etl", is_paused=False)
    jobs.settle()
    assert jobs.state() is S.SKIPPED
    jobs.send("model", 3)
    assert jobs.signals()[0] == [("model", 3), ("labels", 2)]


def test_a_task_of_necessary_signals_ends_with_what_is_upstream_of_it(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, PLAIN, ruled(MODEL, upstream=("plain",)))
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.end(tasks["plain"], S.FAILED)
    assert (jobs.state(), jobs.run_state()) == (S.UPSTREAM_FAILED, "failed")


def test_a_run_does_not_end_over_a_start_that_its_last_ends_allow(store: Store, query: Query) -> None:
    below = TaskSpec("below", "Op", upstream=("plain",))
    job = ruled(MODEL, upstream=("below",), trigger_rule="all_done")
    jobs = Jobs(store, query, PLAIN, below, job)
    jobs.send("model")
    jobs.end(jobs.dispatch("plain"), S.FAILED)
    assert jobs.states() == {"plain": S.FAILED, "below": S.UPSTREAM_FAILED, "job": S.SCHEDULED}


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
