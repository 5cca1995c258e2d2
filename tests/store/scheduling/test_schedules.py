"""Runs by the clock and by the events of assets, on a clock of the test's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import structlog.testing
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query, register
from tests.supervisor.tasks_harness import event_of
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, DagSpec, TaskSpec
from headgate.protocol.values import decode_value
from headgate.store.db.engine import open_engine
from headgate.store.scheduling import new_runs
from headgate.store.store import Store
from headgate.store.triggers import assets

DAY_S = 86_400.0


class World:
    """A store, its clock, and a supervisor."""

    def __init__(self, open_store: Callable[..., Store], query: Query) -> None:
        self.clock = Clock()
        self.store = open_store(clock=self.clock)
        self.query = query
        self.epoch = register(self.store)
        self._events = 0

    def save(self, schedule: Any, name: str = "d", **changes: Any) -> None:
        spec = DagSpec(name, schedule, **{"tasks": (TaskSpec("a", "Op"),), **changes})
        self.store.tasks.save_file(self.epoch, f"{name}.py", [spec])

    def due(self) -> list[str]:
        """Make what is due by the clock until nothing is; return the run ids."""
        made: list[str] = []
        while new := self.store.scheduling.create_due_runs(self.epoch).made:
            made += [run_id for _, run_id in new]
        return made

    def of_assets(self) -> list[str]:
        made: list[str] = []
        while new := self.store.scheduling.create_event_runs(self.epoch).made:
            made += [run_id for _, run_id in new]
        return made

    def end_all(self) -> None:
        self.store.scheduling.plan(self.epoch)
        for task in self.store.tasks.dispatch(self.epoch, limit=99, queues=QUEUES).tasks:
            ends.succeed(self.store.tasks, self.epoch, task.id, task.token)
        self.store.scheduling.plan(self.epoch)

    def watch(self, *names: str) -> list[int]:
        """Add a watcher per asset and have its trigger claimed; return the triggers' ids."""
        ids = [self.store.add_watcher(f"w-{name}", "a.B", {}, asset=name) for name in names]
        self.store.claim_triggers(self.epoch, limit=99, queues=QUEUES)
        return ids

    def fire(self, trigger_id: int, count: int = 1) -> None:
        for _ in range(count):
            self._events += 1
            event = event_of(trigger_id, self._events, index=self._events)
            self.store.store_slice(self.epoch, events=[event])

    def events_of(self, run_id: str, *, superseded: bool = False) -> list[int]:
        """Return what the events of a run say, in order."""
        rows = self.query(
            "SELECT payload, is_superseded FROM dag_run_event JOIN dag_run ON dag_run.id = dag_run_id "
            "JOIN trigger_event ON trigger_event.id = trigger_event_id WHERE run_id = :run ORDER BY trigger_event_id",
            run=run_id,
        )
        return [decode_value(bytes(row["payload"])) for row in rows if bool(row["is_superseded"]) is superseded]

    def waiting(self) -> int:
        return len(self.query("SELECT * FROM waiting_event"))


def no_query(statement: str, **parameters: Any) -> list[dict[str, Any]]:
    raise AssertionError("this test looks at no rows")


@pytest.fixture
def world(open_store: OpenStore, query: Query) -> World:
    return World(open_store, query)


# --- by the clock --------------------------------------------------------------------------------

DAILY = CronSchedule("0 0 * * *")


def test_a_run_is_made_at_the_end_of_its_interval_and_says_which_it_is(world: World) -> None:
    world.save(DAILY)
    assert world.due() == []
    assert world.store.scheduling.next_due(world.epoch).in_s == DAY_S
    world.clock.advance(DAY_S)
    assert world.store.scheduling.next_due(world.epoch).in_s == 0
    assert world.due() == ["scheduled__2026-01-01T00:00:00+00:00"]
    assert world.due() == []
    world.store.scheduling.plan(world.epoch)
    (task,) = world.store.tasks.dispatch(world.epoch, limit=1, queues=QUEUES).tasks
    first = datetime(2026, 1, 1, tzinfo=UTC)
    assert task.logical_date == first
    assert task.data_interval == (first, first + timedelta(days=1))
    assert (task.file, task.conf, task.asset_events) == ("d.py", None, ())


def test_without_catchup_only_the_latest_interval_has_a_run(world: World) -> None:
    world.save(DAILY)
    world.clock.advance(5.5 * DAY_S)
    assert world.due() == ["scheduled__2026-01-05T00:00:00+00:00"]
    world.clock.advance(DAY_S)
    world.end_all()
    assert world.due() == ["scheduled__2026-01-06T00:00:00+00:00"]


def test_with_catchup_all_have_one_and_never_more_at_once_than_may(world: World) -> None:
    start = datetime(2025, 12, 27, tzinfo=UTC).timestamp()
    world.save(DAILY, catchup=True, start_date_s=start, max_active_runs=2)
    days = []
    while made := world.due():
        assert len(made) <= 2
        days += [run_id[19:21] for run_id in made]
        world.end_all()
    assert days == ["27", "28", "29", "30", "31"]


def test_a_paused_dag_has_no_run_and_afterwards_only_the_latest(world: World) -> None:
    world.save(DAILY, is_paused_upon_creation=True)
    world.clock.advance(3.5 * DAY_S)
    assert world.due() == []
    assert world.store.scheduling.next_due(world.epoch).in_s is None
    world.store.tasks.set_paused("d", is_paused=False)
    assert world.due() == ["scheduled__2026-01-03T00:00:00+00:00"]


def test_another_schedule_begins_anew_and_the_same_one_goes_on(world: World) -> None:
    world.save(DAILY)
    world.clock.advance(DAY_S)
    world.save(DAILY, description="changed")
    assert world.due() == ["scheduled__2026-01-01T00:00:00+00:00"]
    world.save(CronSchedule("0 * * * *"))
    world.clock.advance(3600)
    world.end_all()
    assert world.due() == ["scheduled__2026-01-02T00:00:00+00:00"]  # of an hour, now
    world.save(None)
    world.clock.advance(DAY_S)
    assert world.due() == []
    assert world.store.scheduling.next_due(world.epoch).in_s is None


START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("catchup", "at_days", "cron", "then", "next_start"),
    [
        (True, 30.3, "0 1 * * *", [], "2026-01-31T01"),
        (False, 30.3, "0 1 * * *", [], "2026-01-31T01"),
        (True, 30.1, "0 * * * *", ["2026-01-31T00", "2026-01-31T01"], "2026-01-31T02"),  # without a gap
        (False, 30.1, "0 * * * *", ["2026-01-31T01"], "2026-01-31T02"),
        (True, 30.3, "0 0 * * 0", [], "2026-01-25T00"),  # the week that we are in
        (False, 30.3, "0 0 * * 0", [], "2026-01-25T00"),
    ],
)
def test_another_expression_makes_no_run_for_what_has_had_its_runs(
    world: World, catchup: bool, at_days: float, cron: str, then: list[str], next_start: str
) -> None:
    more: dict[str, Any] = {"start_date_s": START.timestamp(), "catchup": catchup, "max_active_runs": 99}
    world.save(DAILY, **more)
    world.clock.advance(at_days * DAY_S)
    assert len(world.due()) == (30 if catchup else 1)
    world.save(CronSchedule(cron), **more)
    assert [run_id.removeprefix("scheduled__")[:13] for run_id in world.due()] == then
    ((found,),) = [row.values() for row in world.query("SELECT next_interval_start FROM dag")]
    assert str(found).replace(" ", "T")[:13] == next_start


def test_an_expression_that_is_changed_before_the_first_run_begins_at_the_start_date(world: World) -> None:
    more: dict[str, Any] = {
        "start_date_s": START.timestamp() + DAY_S / 2,
        "catchup": True,
        "is_paused_upon_creation": True,
    }
    world.save(DAILY, **more)
    world.clock.advance(2.1 * DAY_S)
    world.save(CronSchedule("0 */6 * * *"), **more)
    world.store.tasks.set_paused("d", is_paused=False)
    assert [run_id.removeprefix("scheduled__")[8:13] for run_id in world.due()] == [
        "01T12",
        "01T18",
        "02T00",
        "02T06",
        "02T12",
        "02T18",
    ]


def test_a_start_date_that_is_moved_back_has_its_runs_and_soon_the_next_ones(world: World) -> None:
    hourly = CronSchedule("0 * * * *")
    world.save(hourly, start_date_s=START.timestamp(), catchup=True, max_active_runs=999)
    world.clock.advance(20.5 * DAY_S)
    assert len(world.due()) == 492
    world.save(hourly, start_date_s=START.timestamp() - 3_600, catchup=True, max_active_runs=999)
    create = partial(world.store.scheduling.create_due_runs, world.epoch)
    assert [made for _, made in create().made] == ["scheduled__2025-12-31T23:00:00+00:00"]
    passed = [create() for _ in range(3)]
    assert [(new.made, new.more) for new in passed] == [([], True), ([], True), ([], False)]
    world.clock.advance(3_600)
    assert world.due() == ["scheduled__2026-01-21T12:00:00+00:00"]


def test_an_interval_of_a_clock_change_has_one_run(world: World) -> None:
    world.clock.now = datetime(2026, 10, 24, 12, tzinfo=UTC)
    world.save(CronSchedule("30 2 * * *", "Europe/Berlin"))
    made = []
    for _ in range(48):
        world.clock.advance(3600)
        made += world.due()
        world.end_all()
    assert made == ["scheduled__2026-10-24T00:30:00+00:00", "scheduled__2026-10-25T00:30:00+00:00"]


def test_a_zone_that_this_machine_does_not_know_stops_that_dag_alone(world: World) -> None:
    world.save(CronSchedule("0 0 * * *", "Nowhere/Land"), name="bad")
    world.save(DAILY)
    world.clock.advance(DAY_S)
    assert world.due() == ["scheduled__2026-01-01T00:00:00+00:00"]


def test_two_schedulers_make_each_run_once(postgres_url: str, secrets: Any) -> None:
    world = World(lambda clock: Store(open_engine(postgres_url), secrets=secrets, clock=clock), no_query)
    start = world.clock.now.timestamp() - 4 * DAY_S
    for number in range(5):
        world.save(DAILY, name=f"d{number}", catchup=True, start_date_s=start)
    barrier, made = Barrier(3), []

    def work(_: int) -> None:
        with Store(open_engine(postgres_url), secrets=secrets, clock=world.clock) as store:
            barrier.wait(WITHIN_S)
            for _ in range(20):
                made.extend(store.scheduling.create_due_runs(world.epoch, limit=2).made)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    made += world.store.scheduling.create_due_runs(world.epoch, limit=99).made
    assert len(made) == len(set(made)) == 5 * 4


# --- by events -----------------------------------------------------------------------------------


def test_all_assets_have_to_have_an_event(world: World) -> None:
    world.save(AssetSchedule(("x", "y")))
    x, y = world.watch("x", "y")
    world.fire(x, 2)
    assert world.of_assets() == []
    world.fire(y)
    (run_id,) = world.of_assets()
    assert world.events_of(run_id) == [1, 2, 3]
    assert world.of_assets() == []
    assert world.waiting() == 0
    world.store.scheduling.plan(world.epoch)
    (task,) = world.store.tasks.dispatch(world.epoch, limit=1, queues=QUEUES).tasks
    assert [(event.asset, decode_value(event.payload)) for event in task.asset_events] == [("x", 1), ("x", 2), ("y", 3)]
    assert task.asset_events[0].stored_at == world.clock.now


def test_each_event_has_its_own_run_though_they_come_in_one_slice_and_again(world: World) -> None:
    world.save(AssetSchedule(("x",), "each"))
    (x,) = world.watch("x")
    events = [event_of(x, number, index=number) for number in range(3)]
    for _ in range(2):  # nobody knew whether the first commit arrived
        world.store.store_slice(world.epoch, events=events)
    made = world.of_assets()
    assert [world.events_of(run_id) for run_id in made] == [[0], [1], [2]]
    assert world.of_assets() == []


def test_a_batch_waits_for_its_number_or_its_time(world: World) -> None:
    world.save(AssetSchedule(("x",), "batch", 3, 60.0))
    (x,) = world.watch("x")
    world.fire(x, 2)
    assert world.of_assets() == []
    assert world.store.scheduling.next_due(world.epoch).in_s == 60.0
    world.fire(x, 2)
    (full,) = world.of_assets()
    assert world.events_of(full) == [1, 2, 3]
    world.clock.advance(60)
    (late,) = world.of_assets()
    assert world.events_of(late) == [4]
    assert world.store.scheduling.next_due(world.epoch).in_s is None


def test_the_latest_event_has_the_run_and_the_others_stand_with_it(world: World) -> None:
    world.save(AssetSchedule(("x",), "latest"))
    (x,) = world.watch("x")
    world.fire(x, 3)
    (run_id,) = world.of_assets()
    assert (world.events_of(run_id), world.events_of(run_id, superseded=True)) == ([3], [1, 2])
    world.store.scheduling.plan(world.epoch)
    (task,) = world.store.tasks.dispatch(world.epoch, limit=1, queues=QUEUES).tasks
    assert [decode_value(event.payload) for event in task.asset_events] == [3]


def test_events_wait_while_a_dag_is_paused_or_has_all_runs_it_may(world: World) -> None:
    world.save(AssetSchedule(("x",), "each"), max_active_runs=1)
    (x,) = world.watch("x")
    world.store.tasks.set_paused("d", is_paused=True)
    world.fire(x, 3)
    assert world.of_assets() == []
    world.store.tasks.set_paused("d", is_paused=False)
    seen = []
    while made := world.of_assets():
        assert len(made) == 1
        seen += world.events_of(made[0])
        world.end_all()
    assert seen == [1, 2, 3]


def test_every_dag_has_its_own_events_of_one_asset(world: World) -> None:
    world.save(AssetSchedule(("x",), "each"), name="one")
    world.save(AssetSchedule(("x",), "latest"), name="two")
    (x,) = world.watch("x")
    world.fire(x, 2)
    assert len(world.of_assets()) == 3


def test_a_dag_that_no_longer_waits_for_an_asset_has_no_run_of_it(world: World) -> None:
    world.save(AssetSchedule(("x", "y")))
    x, y = world.watch("x", "y")
    world.fire(x)
    world.save(AssetSchedule(("y",)))
    assert world.waiting() == 0
    world.fire(x)
    assert world.waiting() == 0
    world.fire(y)
    assert len(world.of_assets()) == 1


def test_events_of_triggers_without_an_asset_or_a_subscriber_wait_for_nothing(world: World) -> None:
    (x,) = world.watch("x")
    plain = world.store.add_watcher("plain", "a.B", {})
    world.store.claim_triggers(world.epoch, limit=9, queues=QUEUES)
    world.fire(x)
    world.fire(plain)
    assert world.waiting() == 0
    world.save(AssetSchedule(("x",), "each"))
    world.fire(x)
    assert len(world.of_assets()) == 1


def test_more_events_than_may_wait_are_dropped_and_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("triggers.assets", "scheduling.new_runs", "inspect.status_facts"):
        monkeypatch.setattr(f"headgate.store.{module}.WAITING_EVENTS_MAX", 5)
    assert assets.WAITING_EVENTS_MAX == 5
    world.save(AssetSchedule(("x",), "each"))
    (x,) = world.watch("x")
    world.store.tasks.set_paused("d", is_paused=True)
    world.fire(x, 8)
    assert world.store.scheduling.create_event_runs(world.epoch).dropped == {"d": 3}
    assert world.store.scheduling.create_event_runs(world.epoch).dropped == {}
    assert [row["dropped"] for row in world.query("SELECT dropped FROM asset_subscription")] == [3]
    assert "events_dropped" in [problem.reason for problem in world.store.inspect.status()]
    world.store.tasks.set_paused("d", is_paused=False)
    assert [world.events_of(run_id) for run_id in world.of_assets()] == [[4], [5], [6], [7], [8]]
    assert "events_dropped" not in [problem.reason for problem in world.store.inspect.status()], "it is over"


def test_the_events_of_one_asset_drop_no_other_assets_only_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("triggers.assets", "scheduling.new_runs"):
        monkeypatch.setattr(f"headgate.store.{module}.WAITING_EVENTS_MAX", 5)
    world.save(AssetSchedule(("a", "b", "c")))
    a, b, c = world.watch("a", "b", "c")
    world.fire(b)
    world.fire(a, 9)
    assert world.store.scheduling.create_event_runs(world.epoch).dropped == {"d": 5}
    world.fire(c)
    (run_id,) = world.of_assets()
    assert world.events_of(run_id) == [1, 8, 9, 10, 11], "of b the first one"


def test_events_that_wait_for_runs_of_another_schedule_are_told(world: World) -> None:
    world.save(AssetSchedule(("x",), "each"))
    (x,) = world.watch("x")
    world.store.tasks.set_paused("d", is_paused=True)
    world.fire(x, 4)
    with structlog.testing.capture_logs() as records:
        world.save(AssetSchedule(("y",), "each"))
        world.save(AssetSchedule(("x",), "each"))
    (told,) = [(one["dag"], one["events"]) for one in records if "make none" in one["event"]]
    assert told == ("d", 4)
    assert world.waiting() == 0


def test_a_run_of_the_same_name_by_hand_is_in_nobodys_way(world: World) -> None:
    world.save(AssetSchedule(("x",), "each"))
    (x,) = world.watch("x")
    world.fire(x)
    (row,) = world.query("SELECT id FROM trigger_event")
    world.store.tasks.create_run("d", f"asset__{row['id']}")
    assert world.of_assets() == [f"asset__{row['id']}__1"]


def test_nor_are_runs_of_all_the_names_that_come_next(world: World) -> None:
    world.save(AssetSchedule(("x",), "each"), max_active_runs=new_runs.SAME_NAME_MAX + 1)
    (x,) = world.watch("x")
    world.fire(x)
    (row,) = world.query("SELECT id FROM trigger_event")
    name = f"asset__{row['id']}"
    for taken in (name, *(f"{name}__{number}" for number in range(1, new_runs.SAME_NAME_MAX))):
        world.store.tasks.create_run("d", taken)
    (made,) = world.of_assets()
    assert made.startswith(f"{name}__")
    assert world.events_of(made) == [1]


def test_two_schedulers_give_each_event_one_run(postgres_url: str, secrets: Any) -> None:
    world = World(lambda clock: Store(open_engine(postgres_url), secrets=secrets, clock=clock), no_query)
    world.save(AssetSchedule(("x",), "each"), max_active_runs=1000)
    (x,) = world.watch("x")
    barrier, made = Barrier(3), []

    def work(number: int) -> None:
        with Store(open_engine(postgres_url), secrets=secrets, clock=world.clock) as store:
            if number == 0:
                store.claimed_triggers(world.epoch)
            barrier.wait(WITHIN_S)
            for index in range(30):
                if number == 0:
                    store.store_slice(world.epoch, events=[event_of(x, index, index=index)])
                else:
                    made.extend(store.scheduling.create_event_runs(world.epoch, limit=3).made)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    while new := world.store.scheduling.create_event_runs(world.epoch).made:
        made += new
    assert len(made) == len(set(made)) == 30
