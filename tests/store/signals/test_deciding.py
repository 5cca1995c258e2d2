"""What users' code decides about signals: asked in order, stored once, and acted on as any other rule (I29)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.store.harness import Clock, Query
from tests.store.signals.rules_harness import PLAIN, Jobs, ruled
from tests.store.signals.test_rules_of_runs import why
from tests.supervisor.tasks_harness import S

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.rules import Action, Rules, SignalRule
from headgate.protocol.messages.signals import Predicate
from headgate.protocol.values import decode_value
from headgate.store.ids import DagRunId
from headgate.store.inspect import status_facts
from headgate.store.scheduling import deciding
from headgate.store.scheduling.deciding import Question
from headgate.store.store import Store
from headgate.store.tasks.outcomes import LOADED_AGAIN_S

DRIFT = SignalRule("drift")
LABELS = SignalRule("labels", predicate=Predicate("at_least", b"3"))


def asking(*rules: SignalRule, **options: Any) -> TaskSpec:
    spec = ruled(*rules or (DRIFT, LABELS), **options)
    assert spec.signals is not None
    return TaskSpec("job", "Op", signals=Rules(spec.signals.rules, spec.signals.overlap, asks=True))


@pytest.fixture
def store(old: Store) -> Store:
    return old


@pytest.fixture
def jobs(store: Store, query: Query) -> Jobs:
    return Jobs(store, query, asking(), PLAIN)


def ask(jobs: Jobs) -> Question | None:
    questions = jobs.store.scheduling.ask(jobs.tasks.epoch, limit=9)
    assert len(questions) < 2
    return questions[0] if questions else None


def asked(question: Question | None) -> list[tuple[str, int, Any]]:
    signals = () if question is None else question.signals
    return [(one.key, one.version, decode_value(one.value)) for one in signals]


def answer(
    jobs: Jobs, question: Question | None, actions: Sequence[Action], error: str = "", *, is_unloaded: bool = False
) -> deciding.Settled | None:
    assert question is not None
    settle = jobs.store.scheduling.settle_decisions
    settled = settle(jobs.tasks.epoch, question, actions, error, is_unloaded=is_unloaded)
    jobs.settle()
    return settled


def test_signals_of_all_keys_that_meet_rules_are_asked_about_at_once_in_their_order(jobs: Jobs, clock: Clock) -> None:
    for key, value in (("drift", 1), ("labels", 2), ("labels", 5), ("other", 9), ("drift", 2)):
        jobs.send(key, value)
        clock.advance(1)
    assert jobs.state() is S.NONE, "nothing acts before it is decided"
    question = ask(jobs)
    assert asked(question) == [("drift", 1, 1), ("labels", 2, 5), ("drift", 2, 2)]
    assert question is not None
    assert (question.name.task_id, question.name.try_number, question.file) == ("job", 1, "etl.py")
    answer(jobs, question, ["NONE", "START", "NONE"])
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals()[0] == [("drift", 2), ("labels", 5)]
    assert ask(jobs) is None


def test_what_a_worker_has_left_undecided_is_asked_again_and_what_comes_meanwhile_behind_it(jobs: Jobs) -> None:
    jobs.send("drift", 1, 2, 3)
    question = ask(jobs)
    jobs.send("drift", 4)
    answer(jobs, question, ["START", "STOP"])
    assert jobs.state() is S.SKIPPED, "the stop takes back the start"
    question = ask(jobs)
    assert asked(question) == [("drift", 3, 3), ("drift", 4, 4)]
    answer(jobs, question, ["START", "NONE"])
    assert jobs.signals()[0] == [("drift", 3)]


def test_a_start_that_waits_is_taken_back_by_a_stop_that_is_decided_later(jobs: Jobs) -> None:
    jobs.send("drift", 1)
    answer(jobs, ask(jobs), ["START"])
    jobs.dispatch()
    jobs.send("drift", 2)
    answer(jobs, ask(jobs), ["START"])
    jobs.send("drift", 3)
    answer(jobs, ask(jobs), ["STOP"])
    assert jobs.state() is S.SKIPPED


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stop_acts_in_a_pause_though_a_start_behind_it_waits(jobs: Jobs, at_once: bool) -> None:
    jobs.send("drift", 1)
    answer(jobs, ask(jobs), ["START"])
    jobs.dispatch()
    jobs.store.tasks.set_paused("etl", is_paused=True)
    jobs.send("labels", 5)
    jobs.send("drift", 2, 3)
    question = ask(jobs)
    assert asked(question) == [("labels", 1, 5), ("drift", 2, 2), ("drift", 3, 3)]
    if at_once:
        answer(jobs, question, ["START", "STOP", "START"])
    else:  # both are stored before the run is evaluated
        assert question is not None
        jobs.store.scheduling.settle_decisions(jobs.tasks.epoch, question, ["START", "STOP"])
        jobs.store.scheduling.consider_signals(jobs.tasks.epoch)
        answer(jobs, ask(jobs), ["START"])
    assert jobs.state() is S.SKIPPED
    assert jobs.run_state() == "running"
    jobs.store.tasks.set_paused("etl", is_paused=False)
    jobs.settle()
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals()[0] == [("drift", 3)], "what was decided before the stop is taken back"


def test_each_start_is_decided_when_the_one_before_has_begun(store: Store, query: Query) -> None:
    jobs = Jobs(store, query, asking(DRIFT, overlap="each"), PLAIN)
    jobs.send("drift", 1, 2, 3)
    question = ask(jobs)
    assert asked(question) == [("drift", 1, 1)]
    answer(jobs, question, ["NONE"])
    for version in (2, 3):
        question = ask(jobs)
        assert asked(question) == [("drift", version, version)]
        answer(jobs, question, ["START"])
        assert jobs.signals()[0] == [("drift", version)]
        jobs.end(jobs.dispatch())
    assert ask(jobs) is None


def test_what_cannot_be_decided_is_tried_three_times_and_then_does_nothing(jobs: Jobs, clock: Clock) -> None:
    jobs.send("drift", 1, 2)
    assert answer(jobs, ask(jobs), ["START"], "ValueError: bad") == deciding.Settled(tries=1)
    assert jobs.state() is S.SCHEDULED, "what was decided before it counts"
    for tries in (2, 3):
        assert ask(jobs) is None
        clock.advance(deciding.AGAIN_S - 1)
        due = jobs.store.scheduling.next_due(jobs.tasks.epoch)
        assert (due.ask_in_s, ask(jobs)) == (1.0, None)
        clock.advance(1)
        question = ask(jobs)
        assert asked(question) == [("drift", 2, 2)]
        assert answer(jobs, question, [], "ValueError: bad") == deciding.Settled(tries == 3, tries)
    row = jobs.query("SELECT * FROM signal_wait WHERE key = 'drift'")[0]
    assert row["decision_error"] == "version 2, try 3 of 3: ValueError: bad"
    assert (row["seen_version"], row["ask_at"]) == (2, None)
    (told,) = jobs.store.signals.waiting("drift", limit=9)
    assert (told.is_asked, told.error) == (False, row["decision_error"])
    (problem,) = (one for one in jobs.store.inspect.status() if one.reason == "undecided_signals")
    assert (problem.severity, problem.next) == ("attention", "headgate why etl r1 job")
    assert problem.text == (
        "on_signal of 1 task could not decide about 1 signal, which did nothing; the newest 0.0 s ago: "
        "etl r1 job: version 2, try 3 of 3: ValueError: bad"
    )
    jobs.send("drift", 3)
    answer(jobs, ask(jobs), [], "ValueError: again")
    (rule,) = [text for name, text in why(jobs).facts if name == "rule" and "'drift'" in text]
    assert rule == (
        "on_signal decides: 'drift'; held against 2 of 3 versions; version 2 does nothing; it is asked about the next; "
        "it failed: version 3, try 1 of 3: ValueError: again; it could not decide about 1 signal"
    )
    clock.advance(deciding.AGAIN_S)
    answer(jobs, ask(jobs), ["RESTART"])
    assert jobs.store.signals.waiting("drift", limit=9)[0].error is None


def test_what_was_given_up_is_told_for_a_day_also_if_its_run_has_ended(jobs: Jobs, clock: Clock) -> None:
    for key, value in (("drift", 1), ("labels", 4)):
        jobs.send(key, value)
        for _ in range(deciding.TRIES_MAX):
            answer(jobs, ask(jobs), [], f"ValueError: {key}")
            clock.advance(deciding.AGAIN_S)
    assert (why(jobs).reason, jobs.state()) == ("undecided", S.NONE)
    jobs.end_plain()
    assert (jobs.run_state(), jobs.state()) == ("success", S.SKIPPED)
    answer_now = why(jobs)
    assert (answer_now.reason, answer_now.headline) == (
        "undecided",
        "its on_signal could not decide about signals, which do nothing: "
        "'drift': 1 signal, version 1, try 3 of 3: ValueError: drift; "
        "'labels', at_least 3: 1 signal, version 1, try 3 of 3: ValueError: labels",
    )
    assert answer_now.next == (
        "`headgate tasks logs etl r1 job` has all errors; once the file is mended: `headgate signals send drift`, "
        "`headgate signals send labels VALUE`, or `headgate tasks start etl r1 job`"
    )
    (problem,) = (one for one in jobs.store.inspect.status() if one.reason == "undecided_signals")
    assert problem.details == ("etl r1 job: 2 signals, 2.0 s ago: version 1, try 3 of 3: ValueError: labels",)
    clock.advance(status_facts.TROUBLE_OF_RULES_S)
    assert "undecided_signals" not in [one.reason for one in jobs.store.inspect.status()]


def test_tries_of_a_signal_that_was_passed_over_are_not_those_of_the_next(jobs: Jobs, clock: Clock) -> None:
    jobs.send("drift", 1)
    assert answer(jobs, ask(jobs), [], "ValueError: bad") == deciding.Settled(tries=1)
    clock.advance(1)
    jobs.store.signals.ask(jobs.id(), "STOP")
    jobs.settle()
    clock.advance(1)
    jobs.send("drift", 2)
    clock.advance(deciding.AGAIN_S)
    question = ask(jobs)
    assert asked(question) == [("drift", 2, 2)]
    assert answer(jobs, question, [], "ValueError: bad") == deciding.Settled(tries=1)


def test_a_signal_waits_for_a_dag_file_that_cannot_be_loaded(jobs: Jobs, clock: Clock) -> None:
    jobs.send("drift", 1)
    for _ in range(deciding.TRIES_MAX + 1):
        assert answer(jobs, ask(jobs), [], "SyntaxError: half", is_unloaded=True) == deciding.Settled()
        assert ask(jobs) is None
        clock.advance(LOADED_AGAIN_S)
    (told,) = jobs.store.signals.waiting("drift", limit=9)
    assert told.error == "version 1, its DAG file cannot be loaded: SyntaxError: half"
    answer(jobs, ask(jobs), ["START"])
    assert jobs.state() is S.SCHEDULED
    assert jobs.store.signals.waiting("drift", limit=9)[0].error is None


def test_an_answer_counts_once_and_only_where_the_rules_stand_as_they_stood(jobs: Jobs, clock: Clock) -> None:
    jobs.send("drift", 1)
    question = ask(jobs)
    assert asked(ask(jobs)) == [("drift", 1, 1)], "a supervisor may not know that it has asked"
    assert answer(jobs, question, ["START"]) is not None
    jobs.end(jobs.dispatch())
    assert answer(jobs, question, ["START"]) is None
    assert jobs.state() is S.SUCCESS
    jobs.send("drift", 2)
    question = ask(jobs)
    clock.advance(1)
    jobs.store.signals.ask(jobs.id(), "STOP")
    jobs.settle()
    assert answer(jobs, question, ["START"]) is None
    assert (jobs.state(), jobs.row()["try_number"], ask(jobs)) == (S.SUCCESS, 1, None), "the stop came behind it"


def test_a_run_does_not_end_over_signals_that_are_to_be_decided(jobs: Jobs) -> None:
    jobs.send("drift", 1)
    jobs.end_plain()
    assert jobs.run_state() == "running"
    assert why(jobs).reason == "asks_on_signal"
    answer(jobs, ask(jobs), ["NONE"])
    assert (jobs.run_state(), jobs.state()) == ("success", S.SKIPPED)


def test_a_run_ends_when_what_was_passed_over_is_answered(jobs: Jobs, clock: Clock) -> None:
    jobs.send("drift", 1)
    question = ask(jobs)
    clock.advance(1)
    jobs.store.signals.ask(jobs.id(), "STOP")
    jobs.settle()
    jobs.end_plain()
    assert jobs.run_state() == "running", "the question is open"
    assert answer(jobs, question, ["START"]) is None
    assert ask(jobs) is None
    jobs.settle()
    assert (jobs.run_state(), jobs.state()) == ("success", S.SKIPPED)


def test_nobody_has_a_question_that_was_passed_over_once_it_is_answered(
    store: Store, query: Query, clock: Clock
) -> None:
    jobs = Jobs(store, query, asking(overlap="each"), PLAIN)
    jobs.send("drift", 1)
    question = ask(jobs)
    clock.advance(1)
    jobs.store.signals.ask(jobs.id(), "STOP")
    jobs.settle()
    clock.advance(1)
    for key, value in (("labels", 4), ("drift", 2)):
        jobs.send(key, value)
        clock.advance(1)
    assert answer(jobs, question, ["START"]) is None
    question = ask(jobs)
    assert asked(question) == [("labels", 1, 4)], "each by itself"
    assert answer(jobs, question, [], "ValueError: bad") == deciding.Settled(tries=1)
    assert jobs.store.scheduling.next_due(jobs.tasks.epoch).ask_in_s == pytest.approx(deciding.AGAIN_S, abs=0.1)


def test_a_supervisor_asks_what_another_does_not_ask_any_more(jobs: Jobs) -> None:
    other = jobs.tasks.register()
    jobs.send("drift", 1)
    question = ask(jobs)
    jobs.send("labels", 4)
    assert jobs.store.scheduling.ask(other, limit=9) == [], "also not about another key of the task"
    assert jobs.store.scheduling.next_due(other).ask_in_s is None
    jobs.store.fence_triggerers(other, dead=[jobs.tasks.epoch])
    (again,) = jobs.store.scheduling.ask(other, limit=9)
    assert asked(again) == [("drift", 1, 1), ("labels", 1, 4)]
    assert question is not None


def test_signals_wait_while_the_file_of_their_dag_is_gone(jobs: Jobs, store: Store) -> None:
    jobs.send("drift", 1)
    store.tasks.save_file(jobs.tasks.epoch, "etl.py", ())
    assert ask(jobs) is None
    store.signals.end_run(DagRunId(jobs.tasks.run))
    assert asked(ask(jobs)) == [("drift", 1, 1)], "it is to end, and this must not keep it from that"


def test_an_operator_that_decides_no_more_leaves_it_to_its_rules(jobs: Jobs, store: Store) -> None:
    jobs.send("drift", 1)
    store.tasks.save_file(jobs.tasks.epoch, "etl.py", [DagSpec("etl", tasks=(ruled(DRIFT, LABELS), PLAIN))])
    jobs.settle()
    assert (jobs.state(), ask(jobs)) == (S.SCHEDULED, None)
