"""Drift in the core: questions reach the runner and answers the database, and a stream that goes on costs little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.supervisor.core_harness import Supervised, World, add_watchers, cut_off

from headgate.protocol.messages.runner import (
    DescribedLane,
    DescribedStream,
    DescribedTrigger,
    LaneProgress,
    RunnerFigures,
    StateChanges,
    StateSync,
    StreamFigures,
)
from headgate.store.facts.drift import StreamDrift
from headgate.supervisor.triggers.drift import ANSWER_S, STORE_INTERVAL_S

DIGEST = "d" * 40


@pytest.fixture
def supervisor(world: World) -> Supervised:
    """It runs a stream, of a watcher."""
    add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    supervisor.round(described=(DescribedTrigger(spec.trigger_id, spec.trigger_run_id, DIGEST, "the log"),))
    supervisor.created()
    return supervisor


@pytest.fixture
def written(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times, in seconds, at which drift was stored."""
    times: list[int] = []
    note_drift = world.store.note_drift

    def note(epoch: Any, progress: Mapping[str, Any], described: Mapping[str, Any]) -> Any:
        times.append(int(world.now))
        return note_drift(epoch, progress, described)

    monkeypatch.setattr(world.store, "note_drift", note)
    return times


def figures(at: int, *, began: int = 0, begun_at: float = 1.0, **fields: Any) -> RunnerFigures:
    lane = LaneProgress("0", (began,), begun_at, advanced=(at,), asked=(at,), **fields)
    return RunnerFigures((StreamFigures(DIGEST, "the log", progress=(lane,)),), 1)


def of(world: World) -> StreamDrift:
    stream_id = world.store.inspect.find_stream("w0")
    return world.store.inspect.drift([stream_id])[stream_id]


def questions(supervisor: Supervised) -> Sequence[str]:
    return [digest for sync in supervisor.sent(StateSync) for digest in sync.describe]


def test_a_stream_that_goes_on_is_stored_once_in_a_while_and_one_at_rest_never(
    world: World, supervisor: Supervised, written: list[int]
) -> None:
    began_at = int(world.now)
    for second in range(12):
        supervisor.round(figures=figures(second))
        supervisor.pass_time(1.0)
    assert written[0] == began_at, "where a reader has begun is stored at once"
    gaps = [later - earlier for earlier, later in pairwise(written)]
    assert len(gaps) == 2
    assert min(gaps) >= STORE_INTERVAL_S
    supervisor.pass_time_with_heartbeats(STORE_INTERVAL_S)
    count = len(written)
    assert of(world).known[0].at == (11,)
    for _ in range(30):
        supervisor.round(figures=figures(11))
        supervisor.pass_time(1.0)
    assert len(written) == count


def test_a_question_goes_to_the_runner_once_and_its_answer_into_the_database(
    world: World, supervisor: Supervised
) -> None:
    world.store.ask_drift([world.store.inspect.find_stream("w0")])
    supervisor.pass_time_with_heartbeats(12)
    assert questions(supervisor) == [DIGEST]
    answer = DescribedStream(DIGEST, (DescribedLane("0", committed=(9,), before=(3,), after=(4,)),), 1)
    supervisor.say(StateChanges(99, streams=(answer,)))
    report = of(world).report
    assert report is not None
    assert report.verdict == "moved by others"
    assert of(world).asked_at is None
    assert supervisor.core.drift.level(DIGEST) == 3
    # The user accepts it: that is asked anew, and heard of.
    world.store.ask_drift([world.store.inspect.find_stream("w0")], accepts=True)
    supervisor.pass_time_with_heartbeats(6)
    assert questions(supervisor) == [DIGEST]
    supervisor.say(StateChanges(100, streams=(DescribedStream(DIGEST, (DescribedLane("0"),), 1),)))
    assert supervisor.core.drift.level(DIGEST) == 0


def test_a_runner_that_does_not_answer_is_asked_again_and_so_is_the_next_one(
    world: World, supervisor: Supervised
) -> None:
    world.store.ask_drift([world.store.inspect.find_stream("w0")])
    supervisor.pass_time_with_heartbeats(ANSWER_S / 2)
    assert questions(supervisor) == [DIGEST]
    supervisor.pass_time_with_heartbeats(ANSWER_S)
    assert questions(supervisor) == [DIGEST]
    supervisor.core.runner_ended(1, "killed", world.now)
    supervisor.pass_time(12.0)
    drift = of(world)
    assert drift.report is not None
    assert drift.report.error == "no runner is running at this moment"
    assert drift.asked_at is None, "nobody was there to be asked, and that is an answer"
    world.store.ask_drift([drift.stream_id])
    supervisor.start_runner()
    supervisor.pass_time_with_heartbeats(6)
    assert questions(supervisor) == [DIGEST]


def test_what_was_moved_while_no_runner_read_is_found_at_once(
    world: World, supervisor: Supervised, written: list[int]
) -> None:
    supervisor.round(figures=figures(40))
    supervisor.core.runner_ended(1, "killed", world.now)
    supervisor.pass_time(5.0)
    supervisor.start_runner()
    written.clear()
    supervisor.round(figures=figures(45, began=45, begun_at=2.0, is_ours=False))
    assert written == [int(world.now)]
    assert [found.verdict for found in of(world).found] == ["moved by others"]
    assert supervisor.core.drift.level(DIGEST) == 3


def test_a_database_that_is_away_costs_no_answer(
    world: World, supervisor: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        cut_off(world, patch)
        patch.setattr(world.store, "note_drift", world.store.store_slice)
        supervisor.round(figures=figures(7))
        supervisor.pass_time_with_heartbeats(3)
    supervisor.pass_time_with_heartbeats(20)
    assert of(world).known[0].at == (7,)


def test_what_a_reader_has_given_up_is_not_held_against_where_it_begins_again(
    world: World, supervisor: Supervised
) -> None:
    supervisor.round(figures=figures(7))
    supervisor.pass_time_with_heartbeats(STORE_INTERVAL_S)
    # A producer without a lane says nothing; one that has given its lane up says that.
    supervisor.round(figures=RunnerFigures((StreamFigures(DIGEST, "the log"),), 1))
    supervisor.pass_time_with_heartbeats(STORE_INTERVAL_S)
    assert of(world).known[0].at == (7,)
    supervisor.round(figures=RunnerFigures((StreamFigures(DIGEST, "the log", progress=(LaneProgress("0"),)),), 1))
    supervisor.pass_time_with_heartbeats(STORE_INTERVAL_S)
    assert of(world).known == ()
    supervisor.round(figures=figures(99, began=99, begun_at=2.0, is_ours=False))
    supervisor.pass_time_with_heartbeats(1)
    assert (of(world).known[0].at, of(world).found) == ((99,), ())
