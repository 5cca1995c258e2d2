"""The checker of runs for signals, given histories by hand: each finding is found."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from tests.proof.simulation.scenario import Topology
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.scenario import Dag
from tests.proof.simulation.tasks.signals import records, world
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.rules.directed import sends
from tests.proof.simulation.tasks.signals.runs.checker import check
from tests.proof.simulation.tasks.signals.runs.directed import DRAIN, EACH, WAITING, drains, start

USERS = (sends(0.8, "1", "2"), *drains(3.0, 6.0), start(9.0, "3", dedup="third"), *drains(12.0, 15.0))
PLAN = SignalScenario(
    0, Topology(), dags=(Dag("d1", WAITING, (), 1, EACH, (DRAIN,)),), users=USERS, faults=(), workers=4
)


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


def changed(number: int, **fields: Any) -> tuple[Any, ...]:
    return with_one(number, msgspec.structs.replace(history()[number], **fields))


def kept() -> int:
    return places(records.RunSignal, version=2, run="")[0]


def taken() -> int:
    return places(records.RunSignal, version=2, run="d1/signal__2")[0]


def ends() -> list[int]:
    return places(records.RunToEnd, is_ending=True)


def test_an_ordinary_history_is_fine() -> None:
    assert kinds(history()) == set()
    runs = [record.run for record in history() if isinstance(record, of_tasks.RunMoved) and not record.is_ended]
    assert len(set(runs)) == len(ends()) == 4


def test_a_signal_that_is_not_kept_is_found() -> None:
    told = [one for one in history() if not (isinstance(one, records.RunSignal) and one.version == 2)]
    assert {"a signal passed over", "a run without cause"} <= kinds(told)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"version": 1}, "kept twice"),
        ({"rule": "another"}, "kept without cause"),
        ({"value": "7"}, "not what was sent"),
    ],
)
def test_what_is_kept_otherwise_is_found(fields: dict[str, Any], found: str) -> None:
    assert found in kinds(changed(kept(), **fields))


def test_signals_that_are_kept_out_of_order_are_found() -> None:
    first = places(records.RunSignal, version=1)[0]
    swapped = list(changed(first, version=2, value="2"))
    swapped[kept()] = msgspec.structs.replace(swapped[kept()], version=1, value="1")
    assert "kept out of order" in kinds(swapped)


def test_a_signal_that_waits_no_more_and_has_no_run_is_found() -> None:
    gone = msgspec.structs.replace(history()[kept()], is_gone=True)
    assert "a run lost" in kinds(with_one(kept() + 1, gone, history()[kept() + 1]))


def test_a_run_that_comes_late_is_found() -> None:
    """It is made in the transaction after the one in which the run before has ended."""
    begin = max(number for number in places(of_tasks.LookDone) if number < taken()) + 1
    late = [msgspec.structs.replace(one, at=one.at + 5.0) for one in history()[begin:]]
    look = of_tasks.LookDone(history()[taken()].at + 4.0, "plan")
    assert "a run lost" in kinds([*history()[:begin], look, *late])


def test_a_signal_that_is_in_two_runs_is_found() -> None:
    again = msgspec.structs.replace(history()[taken()], run="d1/signal__1")
    found = kinds(with_one(taken() + 1, again, history()[taken() + 1]))
    assert {"in two runs", "a run without cause"} <= found


def test_a_run_that_has_no_signal_is_found() -> None:
    assert "a run without cause" in kinds(with_one(taken()))


def test_a_run_of_a_paused_dag_is_found() -> None:
    paused = of_tasks.DagMoved(history()[taken()].at, "d1", is_paused=True)
    assert "a run while paused" in kinds(with_one(taken(), paused, history()[taken()]))


def test_a_run_beside_as_many_as_there_may_be_is_found() -> None:
    (end,) = places(of_tasks.RunMoved, run="d1/signal__1", is_ended=True)
    assert "too many runs" in kinds(with_one(end))


def test_a_run_that_was_to_be_started_with_a_signal_is_found() -> None:
    told = [one for one in history() if not (getattr(one, "run", "").startswith("d1/manual") or "manual" in str(one))]
    assert "not started" in kinds(told)


def test_a_run_that_is_started_beside_an_open_one_is_found() -> None:
    (starting,) = places(records.Starting, dag="d1")
    opened = of_tasks.RunMoved(history()[starting].at, "create_run", "d1/r9", "running", True, False)
    assert "started beside an open run" in kinds(with_one(starting, opened, history()[starting]))


def test_an_end_by_no_signal_is_found() -> None:
    (met, *_) = places(records.EndMet, version=0, run="d1/signal__1")
    assert "ended without cause" in kinds(with_one(met))


def test_an_end_that_is_taken_and_not_written_is_found() -> None:
    number = ends()[0]
    assert "an end lost" in kinds(with_one(number))


def test_an_end_that_comes_late_is_found() -> None:
    at = history()[ends()[0]].at
    told = [msgspec.structs.replace(one, at=one.at + 3.0) if one.at >= at else one for one in history()]
    number = next(number for number, one in enumerate(told) if one.at >= at + 3.0)
    assert "an end lost" in kinds([*told[:number], of_tasks.LookDone(at + 2.5, "plan"), *told[number:]])
