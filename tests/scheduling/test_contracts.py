"""Which runs events make, by contract: nothing is lost, and nothing is taken twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.messages.dags import EVENTS_PER_RUN_MAX, AssetSchedule
from headgate.scheduling import contracts
from headgate.scheduling.contracts import PAYLOAD_BYTES_PER_RUN_MAX, Backlog, Waiting

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ALL = AssetSchedule(("a", "b"))
EACH = AssetSchedule(("a", "b"), "each")
BATCH = AssetSchedule(("a", "b"), "batch", 3, 60.0)
LATEST = AssetSchedule(("a", "b"), "latest")


def events(*assets: int, age_s: float = 0.0, size: int = 10) -> list[Waiting]:
    return [Waiting(number, asset, NOW - timedelta(seconds=age_s), size) for number, asset in enumerate(assets, 1)]


def taken(schedule: AssetSchedule, waiting: list[Waiting], *, room: int = 10) -> list[tuple[list[int], list[int]]]:
    runs = contracts.runs_of(schedule, waiting, NOW, room=room)
    assert len({run.run_id for run in runs}) == len(runs)
    return [([e.event_id for e in run.events], [e.event_id for e in run.superseded]) for run in runs]


def test_all_waits_for_every_asset_and_takes_what_is_there() -> None:
    assert taken(ALL, events(1, 1, 1)) == []
    assert taken(ALL, events(1, 1, 2)) == [([1, 2, 3], [])]
    assert taken(ALL, events(1, 2), room=0) == []


def test_all_takes_no_more_than_one_run_can_but_always_one_of_each() -> None:
    (run,) = taken(ALL, events(*[1] * (EVENTS_PER_RUN_MAX + 5), 2))
    assert len(run[0]) == EVENTS_PER_RUN_MAX
    assert run[0][-1] == EVENTS_PER_RUN_MAX + 6  # the one of the second asset, though it came last
    (run,) = taken(ALL, events(1, 1, 2, size=PAYLOAD_BYTES_PER_RUN_MAX))
    assert run[0] == [1, 3]


def test_each_event_has_a_run() -> None:
    assert taken(EACH, events(1, 1, 2)) == [([1], []), ([2], []), ([3], [])]
    assert taken(EACH, events(1, 1, 2), room=2) == [([1], []), ([2], [])]


def test_a_batch_is_full_or_its_time_is_over() -> None:
    assert taken(BATCH, events(1, 1)) == []
    assert taken(BATCH, events(1, 1, 2, 2)) == [([1, 2, 3], [])]
    assert taken(BATCH, events(1, 1, age_s=60.0)) == [([1, 2], [])]
    assert taken(BATCH, events(1, 1, 1, 1, age_s=60.0)) == [([1, 2, 3], []), ([4], [])]
    assert taken(BATCH, events(*[1] * 7), room=1) == [([1, 2, 3], [])]
    assert taken(AssetSchedule(("a",), "batch", 3), events(1, 1, age_s=1e9)) == []


def test_the_latest_supersedes_the_others() -> None:
    assert taken(LATEST, events(1, 2, 1)) == [([3], [1, 2])]
    assert taken(LATEST, []) == []


@pytest.mark.parametrize("schedule", [ALL, EACH, BATCH, LATEST])
@given(
    assets=st.lists(st.sampled_from([1, 2]), max_size=30), age_s=st.sampled_from([0.0, 60.0]), room=st.integers(0, 9)
)
def test_no_event_is_in_two_runs_and_runs_are_made_where_something_is_ready(
    schedule: AssetSchedule, assets: list[int], age_s: float, room: int
) -> None:
    waiting = events(*assets, age_s=age_s)
    runs = taken(schedule, waiting, room=room)
    ids = [id_ for used, superseded in runs for id_ in (*used, *superseded)]
    assert len(ids) == len(set(ids))
    assert set(ids) <= {event.event_id for event in waiting}
    assert len(runs) <= room
    if waiting:
        backlog = Backlog(len(waiting), len(set(assets)), min(event.stored_at for event in waiting))
        assert bool(runs) == (contracts.is_ready(schedule, backlog, NOW) and room > 0)
