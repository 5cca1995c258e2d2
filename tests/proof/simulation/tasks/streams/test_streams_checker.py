"""The checker of streams, given histories by hand: each finding is found, and an ordinary history is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.proof.history.stream_history import chain_of
from tests.proof.simulation.scenario import Topology
from tests.proof.simulation.tasks import records, world
from tests.proof.simulation.tasks.scenario import Dag, Leg, Task, TaskScenario
from tests.proof.simulation.tasks.streams.checker import check
from tests.proof.simulation.tasks.streams.plans import Call, Stream

TASK = "d1/r1/a"
LEGS = (Leg("defer", streams=True), Leg())


def plan_of(stream: Stream, retries: int = 1) -> TaskScenario:
    task = Task("a", retries=retries, attempts=(LEGS,), stream=stream)
    return TaskScenario(0, Topology(), dags=(Dag("d1", (task,), (0.5,)),))


# Three steps: the first fails behind its first event of two, the third has the rest of them, and its end.
PLAN = plan_of(Stream("batch", 2, ahead=4, total=4, gap_s=0.1, calls=(Call("fails_late"),)))
SKIPPING = plan_of(Stream("each", 1, poison="skip", total=2, seconds=0.3, unfit=(0,)), retries=0)
LATEST = plan_of(Stream("latest", 1, total=4, seconds=0.3))


def history(plan: TaskScenario = PLAN) -> list[Any]:
    return world.run(plan)


def kinds(told: Sequence[Any], plan: TaskScenario = PLAN) -> set[str]:
    return {finding.kind for finding in check(plan, told)}


def all_of(told: Sequence[Any], kind: type, /, **fields: Any) -> list[int]:
    return [
        number
        for number, record in enumerate(told)
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in fields.items())
    ]


def changed(told: list[Any], number: int, /, **fields: Any) -> list[Any]:
    return [*told[:number], msgspec.structs.replace(told[number], **fields), *told[number + 1 :]]


@pytest.mark.parametrize("plan", [PLAN, SKIPPING, LATEST])
def test_an_ordinary_history_is_fine(plan: TaskScenario) -> None:
    told = history(plan)
    assert kinds(told, plan) == set()
    assert all_of(told, records.StepGot)


def test_the_state_of_a_stream_is_a_chain_over_all_its_numbers() -> None:
    told = history()
    (last,) = [told[number] for number in all_of(told, records.StreamMoved, place=4)]
    assert last.left == f"4 {chain_of(4)}"


@pytest.mark.parametrize(
    ("kind", "which", "fields", "found"),
    [
        (records.StepGot, {"place": 1}, {"rows": (1, 2)}, "handled twice"),
        (records.StepGot, {"place": 1}, {"rows": (3, 4)}, "event left out"),
        (records.StepGot, {"place": 1}, {"rows": (3, 2)}, "out of order"),
        (records.StepGot, {"place": 1}, {"left": "1 another"}, "state of another history"),
        (records.StepGot, {"place": 0}, {"is_over": True}, "ended before its last event"),
        (records.StepGot, {"place": 0}, {"rows": (1,)}, "a step before its batch"),
        (records.StreamMoved, {"place": 1}, {"place": 2, "handled": 2}, "event left out"),
        (records.StreamMoved, {"place": 1}, {"place": 0}, "place not moved"),
        (records.StreamMoved, {"place": 3}, {"place": 0}, "handled twice"),
        (records.StreamMoved, {"place": 3}, {"left": "3 another"}, "state of another history"),
        (records.StreamMoved, {"ended_as": "returned"}, {"ended_as": "failed"}, "ended by another run"),
        (records.EventStored, {"number": 1}, {"number": 0}, "handled twice"),
        (records.EventStored, {"number": 1}, {"number": 2}, "event left out"),
        (records.StepRan, {"handled_to": 1}, {"reported": 2}, "not what its handler said"),
        (records.Moved, {"by": "fail"}, {"tries_max": 5}, "tries not given back"),
    ],
)
def test_what_should_not_be_is_found(kind: type, which: Any, fields: Any, found: str) -> None:
    told = history()
    assert found in kinds(changed(told, all_of(told, kind, **which)[0], **fields))


def test_a_place_that_moves_by_itself_is_found() -> None:
    told = history()
    number = all_of(told, records.StreamMoved, place=1)[0]
    moved = msgspec.structs.replace(told[number], by="plan", said="")
    assert "a place that nobody came to" in kinds([*told[:number], moved, records.LookDone(moved.at, "plan")])


def test_more_events_than_may_wait_are_found() -> None:
    plan = plan_of(msgspec.structs.replace(PLAN.task(TASK).stream or Stream(), ahead=1))
    assert "beyond its credit" in kinds(history(), plan)


def test_a_task_that_waits_though_its_batch_is_whole_is_found() -> None:
    told = history()
    number = all_of(told, records.Moved, old="deferred", state="scheduled")[0]
    assert "left waiting" in kinds([*told[:number], records.LookDone(told[number].at, "store_slice")])


def test_an_event_of_an_old_run_is_found() -> None:
    told = history()
    first, *_, last = all_of(told, records.EventStored, kind="event")
    later = changed(told, all_of(told, records.EventStored, number=2)[0], run="another")
    assert told[first].run != "another"
    assert "an old run goes on" in kinds(changed(later, last, run=told[first].run))


def test_a_stream_that_ends_twice_in_one_try_is_found() -> None:
    told = history()
    ran = all_of(told, records.StepRan, has_ended=True)[0]
    earlier = all_of(told, records.StepRan, outcome="handled")[0]
    assert earlier < ran
    assert "ended twice" in kinds(changed(told, earlier, has_ended=True))


def test_a_letter_that_no_rule_asks_for_is_found_and_one_that_is_missing() -> None:
    told = history(SKIPPING)
    (number,) = all_of(told, records.LetterStored)
    assert "passed over" in kinds([*told[:number], *told[number + 1 :]], SKIPPING)
    assert "passed over" in kinds(changed(told, number, number=1), SKIPPING)
    letter = records.LetterStored(told[-1].at, 9, told[number].trigger, 1)
    assert "passed over" in kinds([*told, letter, records.LookDone(told[-1].at, "fail")], SKIPPING)


def test_a_step_of_latest_that_gets_an_older_event_is_found() -> None:
    told = history(LATEST)
    number = all_of(told, records.StepGot)[-1]
    assert told[number].rows == (4,)
    assert "not the newest" in kinds(changed(told, number, rows=(3,)), LATEST)
