"""Rules of tasks where several things meet: pauses, ends that no worker has made, runs that go on (I29)."""

from __future__ import annotations

from typing import Literal

import pytest
from tests.store import ends
from tests.store.harness import Clock, OpenStore, Query
from tests.store.signals.rules_harness import GO, HALT, PLAIN, Jobs, ruled
from tests.store.signals.test_sending import new
from tests.supervisor.tasks_harness import S, Tasks, clear

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.maps import MapSpec, Values
from headgate.protocol.messages.rules import Overlap, SignalRule, TaskRule
from headgate.store.ids import DagRunId
from headgate.store.scheduling import considering, planning
from headgate.store.signals import subscriptions
from headgate.store.store import Store

BELOW = TaskSpec("below", "Op", upstream=("plain",))


@pytest.fixture
def jobs(store: Store, query: Query) -> Jobs:
    return Jobs(store, query)


# --- what waits, and the end of the run ---------------------------------------------------------


def test_a_run_does_not_end_over_a_start_that_waits_for_its_paused_dag(jobs: Jobs) -> None:
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.store.tasks.set_paused("etl", is_paused=True)
    jobs.send("go", 1)
    jobs.end(tasks["plain"])
    assert (jobs.state(), jobs.run_state()) == (S.NONE, "running")
    jobs.store.tasks.set_paused("etl", is_paused=False)
    jobs.settle()
    assert jobs.signals()[0] == [("go", 1)]


def test_a_start_by_hand_in_a_run_that_has_ended_waits_for_its_paused_dag(jobs: Jobs) -> None:
    jobs.end_plain()
    jobs.store.tasks.set_paused("etl", is_paused=True)
    jobs.store.signals.ask(jobs.id("plain"), "START")
    jobs.settle()
    assert jobs.run_state() == "running"
    jobs.store.tasks.set_paused("etl", is_paused=False)
    jobs.settle()
    assert jobs.state("plain") is S.SCHEDULED


def test_a_run_that_is_to_end_does_so_with_what_is_downstream_of_what_never_began(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO), TaskSpec("after", "Op", upstream=("job",)))
    assert store.signals.end_run(DagRunId(jobs.tasks.run))
    jobs.settle()
    assert jobs.states() == {"job": S.SKIPPED, "after": S.SKIPPED}
    assert jobs.run_state() == "success"


def test_tasks_that_remember_a_start_do_not_keep_others_from_theirs(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "TASKS_PER_RUN_MAX", 1)
    jobs = Jobs(store, query, ruled(GO), ruled(SignalRule("other"), name="second"))
    jobs.send("go")
    jobs.dispatch()
    jobs.store.signals.send([new("go"), new("other")])
    epoch = jobs.tasks.epoch
    while jobs.store.scheduling.consider_signals(epoch).has_more:
        pass
    looks = [jobs.store.scheduling.plan(epoch).evaluated for _ in range(10)]
    assert jobs.states() == {"job": S.RUNNING, "second": S.SCHEDULED}
    assert looks[-1] == 0, "a run with what is remembered is looked at when something happens"


# --- the ends of tasks --------------------------------------------------------------------------


def test_an_end_that_the_scheduler_decides_meets_a_rule_before_the_run_ends(store: Store, query: Query) -> None:
    rule = TaskRule("below", "upstream_failed")
    jobs = Jobs(store, query, PLAIN, BELOW, ruled(rule, name="help"))
    jobs.end(jobs.dispatch("plain"), S.FAILED)
    assert jobs.states() == {"plain": S.FAILED, "below": S.UPSTREAM_FAILED, "help": S.SCHEDULED}


def test_an_end_without_a_new_try_meets_a_rule_again(store: Store, query: Query) -> None:
    rule = TaskRule("below", "upstream_failed")
    jobs = Jobs(store, query, PLAIN, BELOW, ruled(rule, name="help"), TaskSpec("other", "Op"))
    jobs.end(jobs.dispatch("plain"), S.FAILED)
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.end(tasks["help"])
    assert jobs.state("help") is S.SUCCESS
    clear(jobs.store, jobs.tasks.run, "plain", "below")
    jobs.settle()
    assert jobs.state("help") is S.SUCCESS
    jobs.end(jobs.dispatch("plain"), S.FAILED)
    assert jobs.state("help") is S.SCHEDULED


def test_what_ended_before_a_run_goes_on_meets_no_rule(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO), ruled(TaskRule("job"), name="follows"), PLAIN)
    jobs.end_plain()
    assert jobs.states() == {"job": S.SKIPPED, "follows": S.SKIPPED, "plain": S.SUCCESS}
    clear(jobs.store, jobs.tasks.run, "plain")
    jobs.settle()
    assert jobs.states() == {"job": S.SKIPPED, "follows": S.SKIPPED, "plain": S.SCHEDULED}


def test_an_end_that_is_noticed_late_is_before_what_was_sent_after_it(old: Store, query: Query, clock: Clock) -> None:
    """Nobody evaluates the run for a while: the signal starts the task again that the end has stopped."""
    watched = ruled(TaskRule("plain", "success", "STOP"), SignalRule("again", action="RESTART"), name="watched")
    jobs = Jobs(old, query, PLAIN, watched)
    (plain,) = jobs.tasks.dispatch()
    assert ends.succeed(old.tasks, jobs.tasks.epoch, plain.id, plain.token)
    clock.advance(1)
    old.signals.send([new("again", 1)])
    clock.advance(1)
    jobs.settle()
    assert (jobs.state("watched"), jobs.signals("watched")[0]) == (S.SCHEDULED, [("again", 1)])


def test_a_mapped_task_ends_with_the_last_of_its_instances(old: Store, query: Query, clock: Clock) -> None:
    mapped = TaskSpec("plain", "Op", map=MapSpec(Values(2)))
    watched = ruled(TaskRule("plain", "success", "STOP"), SignalRule("again", action="RESTART"), name="watched")
    jobs = Jobs(old, query, mapped, watched)
    first, last = jobs.tasks.dispatch()
    assert ends.succeed(old.tasks, jobs.tasks.epoch, first.id, first.token)
    clock.advance(1)
    old.signals.send([new("again", 1)])
    clock.advance(1)
    assert ends.succeed(old.tasks, jobs.tasks.epoch, last.id, last.token)
    jobs.settle()
    assert jobs.state("watched") is S.SKIPPED, "the end came after the signal"


def test_a_signal_counts_that_is_sent_before_a_run_that_goes_on_was_looked_at(jobs: Jobs) -> None:
    jobs.end_plain()
    jobs.store.signals.send([new("go", "too late")])
    clear(jobs.store, jobs.tasks.run, "plain")
    jobs.store.signals.send([new("go", "in time")])
    jobs.settle()
    assert jobs.signals()[0] == [("go", "in time")]


# --- the order of signals -----------------------------------------------------------------------


@pytest.mark.parametrize("is_one_call", [False, True])
@pytest.mark.parametrize(("first", "last", "state"), [("go", "halt", S.SKIPPED), ("halt", "go", S.SCHEDULED)])
def test_signals_of_one_moment_act_in_the_order_in_which_they_were_sent(
    open_store: OpenStore, query: Query, first: str, last: str, state: S, *, is_one_call: bool
) -> None:
    """SQLite's clock has milliseconds."""
    jobs = Jobs(open_store(clock=Clock()), query, ruled(GO, HALT), PLAIN)
    jobs.send(first)
    sent = [new(first), new(last)]
    for some in [sent] if is_one_call else [[one] for one in sent]:
        jobs.store.signals.send(some)
    jobs.settle()
    assert jobs.state() is state


# --- one start for each signal ------------------------------------------------------------------


def test_a_stop_takes_back_all_starts_before_it_if_each_signal_has_one(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, HALT, overlap="each"), PLAIN)
    jobs.send("go", 1)
    jobs.dispatch()
    jobs.send("go", 2, 3)
    jobs.send("halt")
    assert jobs.state() is S.SKIPPED
    jobs.send("go", 4)
    assert jobs.signals()[0] == [("go", 4)]


@pytest.mark.parametrize("overlap", ["latest", "each"])
def test_what_a_stop_takes_back_is_not_among_the_signals_of_the_start_after_it(
    store: Store, query: Query, overlap: Overlap
) -> None:
    other, note = SignalRule("other"), SignalRule("note", action="NONE")
    jobs = Jobs(store, query, ruled(other, GO, HALT, note, overlap=overlap))
    jobs.send("go", 1)
    jobs.end(jobs.dispatch())
    jobs.store.signals.send([new("other", 2), new("note", 2), new("halt"), new("go", 3)])
    jobs.settle()
    assert jobs.signals() == ([("go", 3)], [("go", 1)])


def test_signals_of_several_rules_start_a_task_one_after_the_other(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO, SignalRule("other"), overlap="each"), PLAIN)
    jobs.store.signals.send([new("other", 1), new("go", 2)])
    jobs.settle()
    started = []
    while jobs.state() is S.SCHEDULED:
        started += jobs.signals()[0]
        jobs.end(jobs.dispatch())
    assert sorted(started) == [("go", 2), ("other", 1)]
    assert jobs.row()["try_number"] == 2


def test_rules_whose_dag_file_changes_the_overlap_follow_it(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO), PLAIN)
    jobs.send("go", 1)
    each = ruled(GO, overlap="each")
    jobs.store.tasks.save_file(jobs.tasks.epoch, "etl.py", [DagSpec("etl", tasks=(each, PLAIN))])
    jobs.settle()
    jobs.send("go", 2, 3)
    started = []
    while jobs.state() is S.SCHEDULED:
        started += jobs.signals()[0]
        jobs.end(jobs.dispatch())
    assert started == [("go", 1), ("go", 2), ("go", 3)]


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_a_rule_that_was_not_held_against_all_still_is_when_its_task_has_started(
    store: Store, query: Query, is_by_hand: bool
) -> None:
    # More than a page was sent before the rule was made, so that its key is not marked for it.
    jobs = Jobs(store, query, ruled(GO), PLAIN)
    jobs.send("late", *range(1, considering.PAGE_VERSIONS_MAX + 4))
    late = ruled(GO, SignalRule("late"))
    jobs.store.tasks.save_file(jobs.tasks.epoch, "etl.py", [DagSpec("etl", tasks=(late, PLAIN))])
    if is_by_hand:
        store.signals.ask(jobs.id(), "START")  # in the transaction that makes the rule
    jobs.settle()
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals()[0] == [("late", considering.PAGE_VERSIONS_MAX + 3)]
    for task in jobs.tasks.dispatch():
        jobs.end(task)
    assert jobs.state() is S.SUCCESS
    assert jobs.run_state() == "success", "nothing is left that was not considered"


# --- what is decided about rare cases ------------------------------------------------------------


def test_a_start_that_is_ignored_is_forgotten_without_what_is_necessary(store: Store, query: Query) -> None:
    needed = [SignalRule(key, condition="necessary") for key in ("one", "two")]
    jobs = Jobs(store, query, ruled(GO, *needed, overlap="ignore"), PLAIN)
    jobs.send("go", 1)
    task = jobs.dispatch()
    jobs.send("one", "kept")
    jobs.send("go", 2)
    jobs.end(task)
    assert jobs.state() is S.SUCCESS, "the start is forgotten"
    jobs.send("two", "and this")
    assert jobs.signals()[0] == [("one", "kept"), ("two", "and this")]
    task = jobs.dispatch()
    jobs.send("one", "while it runs")
    jobs.send("two", "while it runs")
    jobs.end(task)
    assert jobs.state() is S.SUCCESS, "both together have asked for a start, which is forgotten"


@pytest.mark.parametrize(
    ("rules", "state"),
    [((GO, SignalRule("go", action="STOP")), S.SKIPPED), ((SignalRule("go", action="STOP"), GO), S.SCHEDULED)],
)
def test_a_signal_that_meets_several_rules_acts_by_them_in_their_order(
    store: Store, query: Query, rules: tuple[SignalRule, ...], state: S
) -> None:
    jobs = Jobs(store, query, ruled(*rules), PLAIN)
    jobs.send("go", 1)
    assert jobs.state() is state


def test_a_clear_takes_back_that_a_run_is_to_end(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO), PLAIN)
    jobs.dispatch("plain")
    assert store.signals.end_run(DagRunId(jobs.tasks.run))
    assert clear(store, jobs.tasks.run, "plain")
    jobs.send("go", 1)
    assert jobs.state() is S.SCHEDULED
    assert jobs.run_state() == "running"


def test_the_rules_of_a_large_run_are_made_in_several_transactions(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "NEW_MAX", 2)
    tasks = Tasks(store, query, tasks=(ruled(name="one"), ruled(name="two"), PLAIN))
    counts: list[int] = []
    while (planned := store.scheduling.plan(tasks.epoch)).evaluated:
        counts.append(query("SELECT count(*) AS n FROM signal_wait")[0]["n"])
    assert planned.left == 0
    assert counts == [2, 4, 6]


def test_one_transaction_reads_a_limited_number_of_bytes(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(considering, "CONSIDERED_BYTES_MAX", 100)
    keys = [f"key {number}" for number in range(5)]
    jobs = Jobs(store, query, *(ruled(SignalRule(key), name=f"job{at}") for at, key in enumerate(keys)), PLAIN)
    store.signals.send([new(key, "x" * 60) for key in keys])
    met: list[int] = []
    while (found := store.scheduling.consider_signals(jobs.tasks.epoch)).has_more:
        met.append(found.rules)
    assert met == [2, 2, 1]
    jobs.settle()
    assert {jobs.state(f"job{at}") for at in range(5)} == {S.SCHEDULED}


def test_a_stop_says_whether_there_is_anything_to_stop(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, ruled(GO), PLAIN)
    plain = jobs.id("plain")
    assert store.signals.ask(plain, "STOP")
    jobs.settle()
    assert jobs.state("plain") is S.SKIPPED
    assert not store.signals.ask(plain, "STOP")
    assert store.signals.ask(plain, "START")
    assert store.signals.ask(plain, "STOP"), "it takes the start back"
    jobs.settle()
    assert jobs.state("plain") is S.SKIPPED


@pytest.mark.parametrize("action", ["START", "RESTART"])
def test_a_task_that_begins_in_a_run_that_is_to_end_does_not_start_once_more_by_what_a_user_had_asked(
    store: Store, query: Query, action: Literal["START", "RESTART"]
) -> None:
    jobs = Jobs(store, query, ruled(GO), PLAIN, TaskSpec("other", "Op"))
    taken = {task.task_id: task for task in jobs.tasks.dispatch()}
    if action == "START":
        assert clear(store, jobs.tasks.run, "plain")
        ends.lose_worker(store.tasks, jobs.tasks.epoch, taken["plain"].id, taken["plain"].token, "gone")
    store.signals.ask(jobs.id("plain"), action)
    if action == "RESTART":
        jobs.settle()
        assert jobs.state("plain") is S.RESTARTING
        ends.lose_worker(store.tasks, jobs.tasks.epoch, taken["plain"].id, taken["plain"].token, "gone")
    assert store.signals.end_run(DagRunId(jobs.tasks.run))
    jobs.settle()
    jobs.end(jobs.dispatch("plain"))
    assert clear(store, jobs.tasks.run, "other"), "so the run is not to end any more"
    jobs.settle()
    assert jobs.state("plain") is S.SUCCESS
