"""What rules about signals do to a task: the table, the order of what is asked for, and the end of a run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState
from headgate.protocol.messages.rules import Action, Condition, Rules, SignalRule, rule_name
from headgate.scheduling import planning, signal_rules
from headgate.scheduling.planning import Decisions, Graph
from headgate.scheduling.signal_rules import Decided, Decision, Met, Wanted
from headgate.scheduling.states import TERMINAL

S = TaskState
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
START, RESTART, STOP = Wanted(True, False), Wanted(True, True), Wanted(False, True)


def at(seconds: float, place: int = 0) -> signal_rules.Moment:
    return NOON + timedelta(seconds=seconds), 1, place


def act(want: Wanted, state: S, **changes: Any) -> str:
    options: dict[str, Any] = {"is_resumed": False, "may_start": True, "overlap": "latest"}
    return signal_rules.act(want, state, **options | changes)


@pytest.mark.parametrize(
    ("state", "start", "restart", "stop"),
    [
        (S.NONE, "begin", "begin", "stop"),
        (S.SCHEDULED, "join", "join", "stop"),
        (S.RUNNING, "wait", "end_and_begin", "stop"),
        (S.DEFERRED, "wait", "end_and_begin", "stop"),
        (S.UP_FOR_RETRY, "begin", "begin", "stop"),
        (S.RESTARTING, "wait", "wait", "wait"),
        (S.SUCCESS, "begin", "begin", "drop"),
        (S.FAILED, "begin", "begin", "drop"),
        (S.SKIPPED, "begin", "begin", "drop"),
        (S.UPSTREAM_FAILED, "begin", "begin", "drop"),
        (S.REMOVED, "drop", "drop", "drop"),
    ],
)
def test_the_table(state: S, start: str, restart: str, stop: str) -> None:
    assert [act(want, state) for want in (START, RESTART, STOP)] == [start, restart, stop]
    # While the DAG is paused nothing begins, and nothing that would begin is lost.
    held = "drop" if state is S.REMOVED else "wait"
    assert [act(want, state, may_start=False) for want in (START, RESTART)] == [held, held]
    assert act(STOP, state, may_start=False) == stop


def test_a_task_that_was_resumed_is_not_starting() -> None:
    assert act(START, S.SCHEDULED, is_resumed=True) == "wait"
    assert act(RESTART, S.SCHEDULED, is_resumed=True) == "end_and_begin"


def test_overlaps() -> None:
    assert [act(START, state, overlap="ignore") for state in (S.RUNNING, S.DEFERRED)] == ["drop", "drop"]
    assert act(START, S.SCHEDULED, overlap="each") == "wait"
    assert act(START, S.UP_FOR_RETRY, overlap="each") == "wait", "its next try is of the start before"
    assert act(RESTART, S.UP_FOR_RETRY, overlap="each") == "begin"
    assert act(RESTART, S.RUNNING, overlap="ignore") == "end_and_begin"
    for state in TERMINAL - {S.REMOVED}:
        assert act(START, state, overlap="ignore") == "begin"


@pytest.mark.parametrize(
    ("actions", "wanted"),
    [
        ((), None),
        (("START",), START),
        (("START", "START"), START),
        (("RESTART", "START"), RESTART),
        (("START", "STOP"), STOP),
        (("STOP", "START"), RESTART),
        (("STOP", "START", "STOP"), STOP),
    ],
)
def test_several_requests_come_to_one(actions: tuple[Action, ...], wanted: Wanted | None) -> None:
    assert signal_rules.wanted([Met(action, at(number)) for number, action in enumerate(actions)]) == wanted


def test_requests_are_in_the_order_of_their_signals_and_not_of_their_rules() -> None:
    go, halt, note = SignalRule("go"), SignalRule("halt", action="STOP"), SignalRule("note", action="NONE")
    rules = Rules((halt, go, note))
    met = {rule_name(go): at(1), rule_name(halt): at(2), rule_name(note): at(3), "unknown": at(4)}
    by_hand = [Met("RESTART", at(1.5))]
    found = signal_rules.asked(rules, met, by_hand, is_ready=True)
    assert [one.action for one in found] == ["START", "RESTART", "STOP"]


@pytest.mark.parametrize(("is_ready", "has_both", "asks"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_necessary_ones_ask_once_all_are_met_and_the_trigger_rule_holds(
    is_ready: bool, has_both: bool, asks: int
) -> None:
    model, labels = SignalRule("model", condition="necessary"), SignalRule("labels", condition="necessary")
    met = {rule_name(model): at(1)} | ({rule_name(labels): at(2)} if has_both else {})
    found = signal_rules.asked(Rules((model, labels)), met, [], is_ready=is_ready)
    assert found == [Met("START", at(2), frozenset({rule_name(model), rule_name(labels)}))] * asks


@pytest.mark.parametrize(
    ("model", "labels", "halted", "actions"),
    [
        (1, 2, 3, ["START", "STOP"]),
        (2, 3, 1, ["STOP", "START"]),
        (1, 3, 2, ["STOP"]),  # the first of them is taken back, and they ask for nothing without it
        (1, 2, 2, ["START", "STOP"]),  # one signal that does both does it in the order of the rules
        (2, 2, 2, ["START", "STOP"]),
    ],
)
def test_a_stop_between_necessary_signals_takes_back_the_first_of_them(
    model: float, labels: float, halted: float, actions: list[Action]
) -> None:
    needed = [SignalRule(key, condition="necessary") for key in ("model", "labels")]
    halt = SignalRule("halt", action="STOP")
    times = (model, labels, halted)
    met = {
        rule_name(rule): at(time, place) for place, (rule, time) in enumerate(zip((*needed, halt), times, strict=True))
    }
    found = signal_rules.asked(Rules((*needed, halt)), met, [], is_ready=True)
    assert [one.action for one in found] == actions


@pytest.mark.parametrize(
    ("actions", "later"),
    [
        (("START",), ""),
        (("START", "START", "START"), "12"),
        (("START", "RESTART", "START"), "2"),
        (("START", "STOP", "START", "START"), "3"),
        (("RESTART", "STOP"), ""),
    ],
)
def test_starts_are_put_off_if_each_signal_has_one(actions: tuple[Action, ...], later: str) -> None:
    asked = [Met(action, at(number), frozenset({str(number)})) for number, action in enumerate(actions)]
    assert signal_rules.put_off(asked, "each") == frozenset(later)
    assert signal_rules.put_off(asked, "latest") == frozenset()


@pytest.mark.parametrize(
    ("actions", "comes_to", "stopped_by"),
    [
        ("START", "START", None),
        ("NONE NONE", "NONE", None),
        ("START NONE", "START", None),
        ("NONE START START", "START", None),
        ("RESTART START", "RESTART", None),
        ("START STOP", "STOP", None),
        ("STOP NONE START", "START", 0),
        ("RESTART STOP START", "START", 1),
        ("STOP START STOP NONE START START", "START", 2),
        ("STOP RESTART START", "RESTART", 0),
        ("STOP START STOP", "STOP", None),
    ],
)
def test_decisions_about_one_rule_come_to_one_and_the_stop_before_it(
    actions: str, comes_to: str, stopped_by: int | None
) -> None:
    made = cast("list[Action]", actions.split())
    decisions = [Decision(one, at(number)[:2], number, b"") for number, one in enumerate(made)]
    found = signal_rules.together(decisions)
    assert found is not None
    assert found.action == comes_to
    assert found.stopped_at == (None if stopped_by is None else at(stopped_by)[:2])
    rest = [signal_rules.together(decisions[:some]) for some in range(1, len(decisions))]
    again = [signal_rules.together([one, *decisions[some:]]) for some, one in enumerate(rest, 1) if one is not None]
    assert again == [found] * len(rest), "wherever it was stored in between"
    rule = SignalRule("go")
    name = rule_name(rule)
    stopped_at = None if found.stopped_at is None else (*found.stopped_at, 0)
    does = {name: Decided(found.action, stopped_at)}
    asked = signal_rules.asked(Rules((rule,)), {name: (*found.at, 0)}, [], is_ready=True, decided=does)
    each = [Met(one, at(number)) for number, one in enumerate(made) if one != "NONE"]
    assert signal_rules.wanted(asked) == signal_rules.wanted(each), "as if each had acted"


@pytest.mark.parametrize(
    ("actions", "acting"),
    [((), 0), (("START", "RESTART"), 0), (("START", "STOP", "RESTART", "START"), 2), (("STOP", "START", "STOP"), 3)],
)
def test_a_stop_takes_back_what_was_asked_for_before_it(actions: tuple[Action, ...], acting: int) -> None:
    asked = [Met(action, at(number)) for number, action in enumerate(actions)]
    assert list(signal_rules.to_last_stop(asked)) == asked[:acting]


# --- the end of a run ---------------------------------------------------------------------------


def graph(*tasks: TaskSpec) -> Graph:
    return Graph(DagSpec("d", tasks=tasks))


JOB = TaskSpec("job", "Op", signals=Rules((SignalRule("go"),)))
PLAIN = TaskSpec("plain", "Op")


def decide(of: Graph, *, may_end: bool = True, is_ending: bool = False, **now: S) -> Decisions:
    states = {name: frozenset({state}) for name, state in now.items()}
    return planning.decide(of, states, may_end=may_end, is_ending=is_ending)


def test_a_task_that_signals_start_does_not_begin_by_its_trigger_rule() -> None:
    assert decide(graph(JOB, PLAIN), job=S.NONE, plain=S.NONE) == Decisions(scheduled=("plain",))


def test_a_run_ends_without_what_no_signal_has_started() -> None:
    of = graph(JOB, PLAIN)
    assert decide(of, job=S.NONE, plain=S.SUCCESS) == Decisions(upstream_skipped=("job",), end="success")
    assert decide(of, job=S.NONE, plain=S.SUCCESS, may_end=False) == Decisions()
    assert decide(of, job=S.RUNNING, plain=S.SUCCESS) == Decisions()
    assert decide(of, job=S.FAILED, plain=S.SUCCESS) == Decisions(end="failed")


def test_a_run_of_such_tasks_alone_ends_if_it_is_to_end() -> None:
    of = graph(JOB)
    assert decide(of, job=S.NONE) == Decisions()
    assert decide(of, job=S.NONE, is_ending=True) == Decisions(upstream_skipped=("job",), end="success")
    assert decide(of, job=S.SUCCESS) == Decisions(), "another signal may start it again"
    assert decide(of, job=S.SUCCESS, is_ending=True) == Decisions(end="success")
    assert decide(graph()) == Decisions(end="success")


def test_what_is_below_such_a_task_keeps_the_run_open() -> None:
    of = graph(JOB, TaskSpec("report", "Op", upstream=("job",)))
    assert decide(of, job=S.NONE, report=S.NONE) == Decisions()
    assert decide(of, job=S.SUCCESS, report=S.NONE) == Decisions(scheduled=("report",))


def test_a_task_of_necessary_signals_alone_follows_what_is_upstream_of_it_if_that_fails() -> None:
    necessary = SignalRule("model", condition="necessary")
    for rules, expected in (
        ((necessary,), ("job",)),
        ((necessary, SignalRule("go")), ()),
        ((necessary, SignalRule("go", action="STOP")), ("job",)),
    ):
        of = graph(PLAIN, TaskSpec("job", "Op", upstream=("plain",), signals=Rules(rules)))
        assert decide(of, plain=S.FAILED, job=S.NONE, may_end=False).upstream_failed == expected


@pytest.mark.parametrize(("condition", "end"), [("sufficient", "failed"), ("necessary", "success")])
def test_a_failure_above_what_a_signal_starts_is_the_runs_unless_that_has_to_do_with_it(
    condition: Condition, end: str
) -> None:
    publish = TaskSpec("publish", "Op", upstream=("job",), signals=Rules((SignalRule("go", condition=condition),)))
    of = graph(PLAIN, TaskSpec("job", "Op"), publish)
    assert decide(of, plain=S.SUCCESS, job=S.FAILED, publish=S.SUCCESS).end == end
