"""`On` and its predicates as authors write them, what their task's spec says, and what `run_task` makes of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import check_dag
from headgate.protocol.messages.rules import ClockRule, CronRule, Rules, SignalRule, TaskRule
from headgate.protocol.messages.signals import Predicate
from headgate.signals import (
    NECESSARY,
    RESTART,
    STOP,
    Every,
    On,
    Signal,
    SignalAction,
    SignalOperator,
    SignalVersion,
    TaskEnded,
    above,
    at_least,
    equal,
    field,
    one_of,
    starts_with,
)
from headgate.signals.versions import UnreadableValue, value_of
from headgate.tasks import DAG, BaseOperator, BashOperator, Context, task
from headgate.testing import run_on_signal, run_task


class Job(BaseOperator):
    def execute(self, context: Context) -> Any:
        return [(one.key, one.value, one.version) for one in context["signals"]]


def test_rules_are_data_in_the_spec_of_their_task() -> None:
    job = Job(
        task_id="job",
        signals=[
            On("samples", at_least(10_000)),
            On("schema", action=RESTART, namespace="ns", since="latest"),
            On("drift", field("model.mean", above(0.2)), STOP),
            On("labels", one_of("a", "b"), condition=NECESSARY),
            On(TaskEnded("ingest", "failed"), action=STOP),
            On(TaskEnded("ingest")),
        ],
        overlap="each",
        stopped_as="success",
    )
    job.set_signal(Signal("recheck", "yes"))
    job.set_signal(On("name", starts_with("ord")))
    spec = job.to_spec()
    assert spec.signals == Rules(
        (
            SignalRule("samples", predicate=Predicate("at_least", b"10000")),
            SignalRule("schema", "ns", action="RESTART", since="latest"),
            SignalRule("drift", predicate=Predicate("above", b"0.2", ("model", "mean")), action="STOP"),
            SignalRule("labels", predicate=Predicate("one_of", b'["a","b"]'), condition="necessary"),
            TaskRule("ingest", "failed", "STOP"),
            TaskRule("ingest"),
            SignalRule("recheck", predicate=Predicate("equal", b'"yes"')),
            SignalRule("name", predicate=Predicate("starts_with", b'"ord"')),
        ),
        "each",
        "success",
    )
    assert [signal.key for signal in job.signals()][-2:] == ["recheck", "name"]
    assert Job(task_id="plain").to_spec().signals is None


def test_every_operator_is_a_signal_operator_and_functions_take_rules() -> None:
    assert issubclass(BashOperator, SignalOperator)
    with DAG("d", default_args={"overlap": "ignore"}) as dag:
        BashOperator(task_id="shell", bash_command="true", signals=[On("go")])

        @task(signals=[On("go"), On(TaskEnded("shell"), action=STOP)])
        def work() -> None: ...

        work()
    check_dag(dag.to_spec())
    specs = {spec.task_id: spec.signals for spec in dag.to_spec().tasks}
    assert specs["shell"] == Rules((SignalRule("go"),), "ignore")
    assert specs["work"] == Rules((SignalRule("go"), TaskRule("shell", action="STOP")), "ignore")


def test_a_periodic_task_has_a_rule_about_the_time() -> None:
    five = timedelta(minutes=5)
    job = Job(task_id="job", every=five, signals=[On(Every(2 * five), action=RESTART)])
    spec = job.to_spec()
    assert spec.signals == Rules((ClockRule(600.0, "RESTART"), ClockRule(300.0)))
    assert spec.signals.starts
    with DAG("nightly", timezone="Europe/Berlin"):
        job = Job(task_id="job", every="@daily", signals=[On(Every(" 5  4 * * *"), action=RESTART)])
    rules = (CronRule("5 4 * * *", "Europe/Berlin", "RESTART"), CronRule("0 0 * * *", "Europe/Berlin"))
    assert job.to_spec().signals == Rules(rules)


def test_actions_are_those_of_the_proposal() -> None:
    assert [action.value for action in SignalAction] == ["NONE", "START", "RESTART", "STOP"]
    assert On("k", action=SignalAction("RESTART")).to_rule() == SignalRule("k", action="RESTART")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"signals": On("k", at_least(1))}, r"signals must be a list of rules: write \[On\(\.\.\.\)\]$"),
        ({"signals": "go"}, "signals must be list or tuple, not 'go'"),
        ({"signals": ["go"]}, r"signals: a rule about a signal is made by On\(key, ...\), not 'go'"),
        ({"signals": [On(7)]}, "signals: the key of a signal must be a str, not 7"),  # type: ignore[arg-type]
        ({"signals": [On("")]}, "the key of a signal '' must have 1..512 characters"),
        ({"signals": [On("k", 3)]}, r"the predicate must be made by a function as equal\(\), not 3"),  # type: ignore[arg-type]
        (
            {"signals": [On("k", action="BEGIN")]},  # type: ignore[arg-type]
            "the action of a rule must be one of NONE, START, RESTART, STOP, not 'BEGIN'",
        ),
        (
            {"signals": [On("k", condition="both")]},  # type: ignore[arg-type]
            "the condition of a rule must be one of sufficient, necessary, not 'both'",
        ),
        ({"signals": [On("k", since="ever")]}, "since must be 'run', 'latest' or 'last_run', not 'ever'"),  # type: ignore[arg-type]
        ({"signals": [On("k", namespace="")]}, "the namespace"),
        ({"signals": [On(TaskEnded("t", "running"))]}, "'running' is not a state in which a task ends"),  # type: ignore[arg-type]
        ({"signals": [On(TaskEnded("t"), equal(1))]}, r"TaskEnded\(...\) has no predicate"),
        ({"signals": [On(Every(timedelta(minutes=1)), namespace="n")]}, r"Every\(...\) has no predicate, no namespace"),
        ({"signals": [On(Every(5))]}, "Every must be a timedelta or a cron expression, not 5"),  # type: ignore[arg-type]
        ({"every": 5}, "every must be timedelta or str or None, not 5"),
        ({"every": "* *"}, r"signals: the cron expression '\* \*' must have 5 fields, not 2"),
        ({"every": timedelta(0)}, "every must be 1 s to"),
        ({"signals": [On("k", action=STOP, condition=NECESSARY)]}, "its action is STOP"),
        ({"signals": [On("k")], "overlap": "all"}, "overlap must be one of latest, each, ignore, not 'all'"),
        ({"signals": [On("k")], "stopped_as": "done"}, "stopped_as must be one of skipped, success, failed"),
    ],
)
def test_what_is_no_rule_is_refused_when_the_file_is_parsed(options: Any, problem: str) -> None:
    with pytest.raises(DagMalformed, match=problem):
        Job(task_id="job", **options)


def test_a_value_that_cannot_be_encoded_is_refused_at_its_line() -> None:
    with pytest.raises(Exception, match="equal"):
        equal(object())


def test_a_part_of_a_value_needs_a_name_and_a_predicate() -> None:
    with pytest.raises(TypeError, match=r"a part of a value meets a predicate, as at_least\(3\), not 3"):
        field("a", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the field of a signal must be a str, not 3"):
        field(3, at_least(1))  # type: ignore[arg-type]


def test_a_mapped_task_has_no_rules() -> None:
    with pytest.raises(DagMalformed, match="is mapped, and cannot have rules about signals"), DAG("d"):
        BashOperator.partial(task_id="each", signals=[On("go")]).expand(bash_command=["true", "false"])


class Gate(Job):
    def on_signal(self, signal: SignalVersion) -> SignalAction:
        if signal.value == "bad":
            raise ValueError("bad")
        return RESTART if signal.value > 3 else super().on_signal(signal)


def test_the_action_of_a_rule_is_that_of_its_namespace_and_of_values_that_cannot_be_read() -> None:
    job = Job(task_id="j", signals=[On("k", at_least(1), namespace="other", action=STOP), On("k", action=RESTART)])
    assert job.on_signal(SignalVersion("k", 1)) == RESTART
    assert job.on_signal(SignalVersion("k", 1, namespace="other")) == STOP
    assert job.on_signal(SignalVersion("k", 0, namespace="other")) == SignalAction.NONE
    unknown = value_of(b'{"$": "of a class that is not here", "v": 1}')
    assert isinstance(unknown, UnreadableValue)
    assert job.on_signal(SignalVersion("k", unknown, namespace="other")) == SignalAction.NONE


def test_an_operator_that_decides_itself_says_so_in_its_spec() -> None:
    gate = Gate(task_id="gate", signals=[On("rate", at_least(1), action=STOP), On(TaskEnded("other"))])
    assert gate.to_spec().signals == Rules(
        (SignalRule("rate", predicate=Predicate("at_least", b"1"), action="STOP"), TaskRule("other")), asks=True
    )
    assert run_on_signal(gate, {"rate": [0, 5, 2], "unrelated": [9]}) == [RESTART, STOP]
    assert Gate(task_id="gate").to_spec().signals is None
    with pytest.raises(ValueError, match="bad"):
        run_on_signal(Gate(task_id="gate", signals=[On("rate")]), {"rate": ["bad"]})
    with pytest.raises(DagMalformed, match="on_signal decides about each signal by itself: the rule about 'rate'"):
        Gate(task_id="gate", signals=[On("rate", condition=NECESSARY)])


def test_a_test_says_with_which_signals_a_task_starts() -> None:
    job = Job(task_id="job", signals=[On("rate", at_least(3)), On("other")])
    result = run_task(job, signals={"rate": [1, 5, 2], "unrelated": [9]})
    assert result.value == [("rate", 5, 2)]
    assert run_task(Job(task_id="plain"), signals={"rate": [1]}).value == []
