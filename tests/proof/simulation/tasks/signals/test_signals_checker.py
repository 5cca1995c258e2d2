"""The checker of signals, given histories by hand: each finding is found; and seeds draw all that there is."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import msgspec
import pytest
from tests.proof.simulation.scenario import Topology
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.scenario import Dag, Leg, Task
from tests.proof.simulation.tasks.signals import drawing, plans, records, world
from tests.proof.simulation.tasks.signals.directed import KEY, sensor
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.jobs import drawing as jobs_drawing
from tests.proof.simulation.tasks.signals.plans import Listens, OfSignals, Send, Sensor, UserSends, Watcher
from tests.proof.simulation.tasks.signals.rules import drawing as rules_drawing
from tests.proof.simulation.tasks.signals.rules.checker import check
from tests.proof.simulation.tasks.signals.runs import drawing as runs_drawing

from headgate.protocol.messages.rules import Action, Condition, Overlap, StoppedAs
from headgate.protocol.messages.schedules import RunContract
from headgate.protocol.messages.signals import Since

SEEDS = 200
OF_RULES = (rules_drawing.NAME, jobs_drawing.NAME, runs_drawing.NAME)
OF_SENDER = OfSignals(now=(Send(KEY, "1", "x1"),), with_outcome=((Send(KEY, "2"),),))
OF_LISTENER = OfSignals(listens=Listens(KEY, after=0, most=3))
TASKS = (
    Task("a", attempts=((Leg(seconds=1.2),),), signals=OF_SENDER),
    sensor("b", Sensor(KEY, "3")),
    Task("c", attempts=((Leg(),),), signals=OF_LISTENER),
)
PLAN = SignalScenario(
    0,
    Topology(),
    dags=(Dag("d1", TASKS, (0.5,)),),
    workers=4,
    watchers=(Watcher("w1", "other", 2, 0.3),),
    users=(UserSends(2.5, (Send(KEY, "3", "x2"),)),),
)


@cache
def history() -> tuple[Any, ...]:
    return tuple(world.run(PLAN))


def kinds(told: Any) -> set[str]:
    return {finding.kind for finding in check(PLAN, told)}


def index(kind: type, **fields: Any) -> int:
    return next(
        number
        for number, record in enumerate(history())
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in fields.items())
    )


def changed(number: int, **fields: Any) -> tuple[Any, ...]:
    told = history()
    return (*told[:number], msgspec.structs.replace(told[number], **fields), *told[number + 1 :])


def without(number: int) -> tuple[Any, ...]:
    return (*history()[:number], *history()[number + 1 :])


def test_an_ordinary_history_is_fine() -> None:
    assert kinds(history()) == set()
    stored = [record.key for record in history() if isinstance(record, records.SignalStored)]
    assert sorted(stored) == [KEY, KEY, KEY, "other", "other"]


@pytest.mark.parametrize(
    ("kind", "which", "fields", "found"),
    [
        (records.SignalStored, {"key": KEY}, {"version": 2}, "version missing"),
        (records.SignalStored, {"key": KEY, "version": 2}, {"version": 1}, "version twice"),
        (records.SignalStored, {"key": KEY, "version": 3}, {"dedup": "x1"}, "version twice"),
        (records.SignalStored, {"by": "store_ends"}, {"dedup": "x9"}, "sent without its outcome"),
        (records.SignalStored, {"by": "store_ends"}, {"dedup": "x9"}, "version missing"),
        (records.SignalStored, {"by": "send_signals"}, {"said": "token-99"}, "sent by an old step"),
        (records.SignalStored, {"by": "send_signals"}, {"value": "9"}, "a signal of nobody's"),
        (records.SignalStored, {"by": "send_signals"}, {"run": "d1/r1"}, "a signal of nobody's"),
        (records.SignalStored, {"by": plans.A_USER}, {"dedup": "x9"}, "a signal of nobody's"),
        (records.SignalStored, {"key": "other"}, {"value": "9"}, "an event not sent"),
        (records.Sent, {"key": KEY}, {"version": 9}, "version missing"),
        (records.Sent, {"dedup": "x2"}, {"version": 1}, "version twice"),
        (records.Answered, {}, {"versions": ()}, "not heard"),
        (records.Answered, {}, {"seen": 9}, "not heard"),
        (records.Answered, {}, {"after": 1}, "not heard"),
        (records.Listened, {}, {"versions": (2,)}, "not heard"),
        (of_tasks.XComsMoved, {"task": "d1/r1/b"}, {"values": (("version", "2"),)}, "considered before its time"),
        (of_tasks.XComsMoved, {"task": "d1/r1/b"}, {"values": (("version", "3"),)}, "not what was sent"),
        (of_tasks.Moved, {"by": "consider_signals"}, {"at": 9.0}, "late"),
        (
            of_tasks.Moved,
            {"by": "consider_signals"},
            {"by": "time_out", "state": "scheduled", "at": 39.0},
            "overlooked",
        ),
    ],
)
def test_what_should_not_be_is_found(kind: type, which: Any, fields: Any, found: str) -> None:
    number = index(kind, **which)
    if kind is of_tasks.Moved and "at" in fields:  # and all that follows it
        later = [msgspec.structs.replace(record, at=max(record.at, fields["at"])) for record in history()[number + 1 :]]
        assert found in kinds((*changed(number, **fields)[: number + 1], *later))
        return
    assert found in kinds(changed(number, **fields))


def test_a_version_above_one_that_fits_is_not_considered() -> None:
    number = index(records.SignalStored, dedup="x1")
    told = [msgspec.structs.replace(one, value="3") if n == number else one for n, one in enumerate(history())]
    assert "not considered" in kinds(told)


def test_an_event_that_is_two_signals_is_found() -> None:
    number = index(records.SignalStored, key="other", version=2)
    again = msgspec.structs.replace(history()[number], version=3, dedup="again")
    assert kinds((*history()[: number + 1], again, *history()[number + 1 :])) == {"an event sent twice"}


def test_an_event_that_is_no_signal_is_found() -> None:
    assert "an event not sent" in kinds(without(index(records.SignalStored, key="other", version=2)))


def test_an_event_that_was_never_stored_is_found() -> None:
    stored = [number for number, one in enumerate(history()) if isinstance(one, of_tasks.EventStored)]
    signals = [n for n, one in enumerate(history()) if isinstance(one, records.SignalStored) and one.key == "other"]
    gone = {stored[-1], signals[-1]}
    assert kinds([one for number, one in enumerate(history()) if number not in gone]) == {"an event not sent"}


def test_a_version_that_goes_while_a_sensor_needs_it_is_found() -> None:
    number = index(records.SignalStored, dedup="x2")
    at = history()[number].at
    for gone in (records.SignalsDropped(at, "clean", KEY, (3,)), records.KeyForgotten(at, "forget", KEY)):
        assert "gone too early" in kinds((*history()[: number + 1], gone, *history()[number + 1 :]))


def test_a_sensor_that_is_ended_twice_is_found() -> None:
    trigger = next(one.trigger for one in history() if isinstance(one, of_tasks.Moved) and one.state == "deferred")
    number = index(of_tasks.EventStored, trigger=trigger)
    assert kinds((*history()[: number + 1], history()[number], *history()[number + 1 :])) == {"considered twice"}


def test_a_version_that_nobody_needs_may_go() -> None:
    number = index(records.SignalStored, dedup="x2")
    dropped = records.SignalsDropped(history()[number].at, "clean", KEY, (1, 2))
    assert kinds((*history()[: number + 1], dropped, *history()[number + 1 :])) == set()


def test_a_version_that_a_listener_was_not_told_of_is_found() -> None:
    number = index(records.ListenedOut)
    last = max(n for n, one in enumerate(history()) if isinstance(one, records.Answered))
    told = changed(number, timed_out=True, at=9.0)
    assert "not heard" in kinds([one for n, one in enumerate(told) if n not in (last, last + 1)])


def test_a_step_that_is_refused_though_its_task_is_its_own_is_found() -> None:
    number, sends = next(
        (n, one) for n, one in enumerate(history()) if isinstance(one, records.Sends) and one.who != plans.A_USER
    )
    refused = records.Refused(sends.at, sends.who, "d1/r1/a", "no")
    assert "refused" in kinds((*history()[: number + 1], refused, *history()[number + 1 :]))


def test_seeds_draw_every_kind_of_sender_sensor_listener_and_act() -> None:
    drawn = [drawing.draw(seed) for seed in range(SEEDS)]
    tasks = [task for plan in drawn for dag in plan.dags for task in dag.tasks]
    of_signals = [task.signals for task in tasks if task.signals is not None]
    of_others = [task for plan in drawn for dag in plan.dags if dag.name not in OF_RULES for task in dag.tasks]
    assert all(task.signals is not None for task in of_others)
    sensors = [one.sensor for one in of_signals if one.sensor is not None]
    assert {one.since for one in sensors} == {"run", "latest"}
    assert {one.value is None for one in sensors} == {one.soft_fail for one in sensors} == {True, False}
    listeners = [one.listens for one in of_signals if one.listens is not None]
    assert {one.watches for one in listeners} == {one.version is None for one in listeners} == {True, False}
    sends = [
        send for one in of_signals for send in (*one.now, *one.then, *(s for some in one.with_outcome for s in some))
    ]
    assert {bool(one.dedup) for one in sends} == {one.of_run for one in sends} == {True, False}
    acts = {type(act) for plan in drawn for act in plan.users}
    assert acts == set(get_args(plans.UserAct))
    ruled = [one.ruled for one in of_signals if one.ruled is not None]
    rules = [rule for one in ruled for rule in one.rules]
    assert {one.overlap for one in ruled} == set(get_args(Overlap))
    assert {one.stopped_as for one in ruled} == set(get_args(StoppedAs))
    assert {rule.action for rule in rules} == set(get_args(Action))
    assert {rule.condition for rule in rules} == set(get_args(Condition))
    assert {bool(rule.key) for rule in rules} == {bool(rule.ended) for rule in rules} == {True, False}
    assert any(rule.every_s for rule in rules)
    assert any(act.unsure for plan in drawn for act in plan.users if isinstance(act, plans.UserSends))
    assert any(watcher.long for plan in drawn for watcher in plan.watchers)
    assert any(watcher.sends for plan in drawn for watcher in plan.watchers)
    assert any(not plan.faults for plan in drawn)
    assert any(plan.peers for plan in drawn)


def test_seeds_draw_every_kind_of_run_for_signals() -> None:
    drawn = [drawing.draw(seed) for seed in range(SEEDS)]
    dags = [dag for plan in drawn for dag in plan.dags if dag.name == runs_drawing.NAME]
    assert {dag.runs_on.contract for dag in dags if dag.runs_on is not None} == set(get_args(RunContract))
    assert {len(dag.end_on) for dag in dags} == {0, 1, 2}
    assert min(dag.max_active_runs for dag in dags) == 1
    rules = [rule for dag in dags for task in dag.tasks if task.ruled is not None for rule in task.ruled.rules]
    assert {rule.since for rule in rules} == set(get_args(Since))
    assert any(isinstance(act, UserSends) and act.start for plan in drawn for act in plan.users)
