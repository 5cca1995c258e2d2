"""The checker of rules, given histories by hand: each finding is found."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from tests.proof.simulation.scenario import Topology
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.scenario import Dag, Leg
from tests.proof.simulation.tasks.signals import records, world
from tests.proof.simulation.tasks.signals.directed import KEY, RUN_AT
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.rules.checker import check
from tests.proof.simulation.tasks.signals.rules.directed import MAIN, NAME, OTHER, START, STOP, ruled, sends

TASK = ruled(START, STOP, attempts=((Leg(seconds=0.8),), (Leg(seconds=0.8),), (Leg(seconds=3.0),)))
USERS = (sends(1.0, "1"), sends(1.4, "2"), sends(3.5, "3"), sends(4.5, "1", key=OTHER))
PLAN = SignalScenario(0, Topology(), dags=(Dag("d1", (MAIN, TASK), (RUN_AT,)),), users=USERS, faults=(), workers=4)


@cache
def history() -> tuple[Any, ...]:
    return tuple(world.run(PLAN))


def kinds(told: Any) -> set[str]:
    return {finding.kind for finding in check(PLAN, told)}


def places(kind: type, **fields: Any) -> list[int]:
    return [
        number
        for number, record in enumerate(history())
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in fields.items())
    ]


def with_one(number: int, *new: Any) -> tuple[Any, ...]:
    return (*history()[:number], *new, *history()[number + 1 :])


def starts() -> list[int]:
    return places(records.RulesMoved, task=NAME)


def later_from(number: int, seconds: float) -> list[Any]:
    """Have all that follows a record happen later."""
    late = [msgspec.structs.replace(one, at=one.at + seconds) for one in history()[number:]]
    return [*history()[:number], *late]


def test_an_ordinary_history_is_fine() -> None:
    assert kinds(history()) == set()
    assert [history()[number].starts[0][1] for number in starts()] == [1, 2, 3]
    assert len(places(of_tasks.Moved, task=NAME, state="skipped")) == 1


@pytest.mark.parametrize(("start", "version", "found"), [(0, 9, "started without cause"), (1, 1, "acted twice")])
def test_a_start_by_a_version_that_is_none_of_its_own_is_found(start: int, version: int, found: str) -> None:
    number = starts()[start]
    one = history()[number]
    assert found in kinds(with_one(number, msgspec.structs.replace(one, starts=((START.name, version),))))


def test_a_start_by_nothing_is_found() -> None:
    assert "started without cause" in kinds(with_one(starts()[1]))


def test_a_stop_by_nothing_is_found() -> None:
    assert "stopped without cause" in kinds(with_one(places(records.SignalStored, key=OTHER)[0]))


@pytest.mark.parametrize(("before", "found"), [(2, "start lost"), (None, "stopped and running")])
def test_what_is_late_where_nothing_goes_wrong_is_found(before: int | None, found: str) -> None:
    acted = starts()[2] if before == 2 else places(of_tasks.Moved, task=NAME, state="skipped")[0]
    assert found in kinds(later_from(acted, 2.0))


def test_a_start_with_what_was_sent_before_a_stop_is_found() -> None:
    """The stop that has ended the second start was sent behind what the third begins with."""
    third, stop = starts()[2], places(records.SignalStored, key=OTHER)[0]
    ended = places(of_tasks.Moved, task=NAME, by="succeed")[1]
    sent = places(records.SignalStored, key=KEY, version=3)[0]
    told = list(history())
    by_stop = msgspec.structs.replace(told[ended], by="plan", about="", said="", state="skipped")
    look = of_tasks.LookDone(told[ended].at, "plan")
    rest = [one for one in told[ended + 1 : third] if one is not told[sent]]
    told[ended:third] = [told[sent], told[stop], by_stop, look, *rest]
    assert "a start came back" in kinds(told)


def test_a_run_that_ends_over_a_start_is_found() -> None:
    """It ends when the second start is remembered, and its tasks are said to have ended."""
    sent = places(records.SignalStored, key=KEY, version=2)[0]
    at = history()[sent].at
    rows = {one.task: one for one in history()[:sent] if isinstance(one, of_tasks.Moved)}
    ends = [
        msgspec.structs.replace(row, at=at, by="mark_success", old=row.state, state="success", token="")
        for row in rows.values()
    ]
    run = of_tasks.RunMoved(at, "plan", "d1/r1", "success", is_started=True, is_ended=True)
    told = (*history()[: sent + 1], *ends, of_tasks.LookDone(at, "mark_success"), run, of_tasks.LookDone(at, "plan"))
    assert "a run ended too early" in kinds(told)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (of_tasks.DagMoved(3.5, "d1", is_paused=True), "began while paused"),
        (records.RunEnding(3.5, "d1/r1"), "began in a run that ends"),
    ],
)
def test_a_start_that_is_not_to_be_is_found(what: Any, found: str) -> None:
    number = starts()[2]
    assert found in kinds(with_one(number, what, history()[number]))
