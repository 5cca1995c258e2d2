"""Schedulers that look at one mapped task at the same moment: no instance is made twice, and none is left out.

On PostgreSQL, with real connections; one is held open where it has done everything but commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Clock
from tests.store.scheduling.test_expansion import Maps
from tests.store.scheduling.test_planning_races import together
from tests.store.tasks.test_task_races import Race
from tests.supervisor.tasks_harness import Tasks, body

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.maps import MapSpec, Output, Values
from headgate.protocol.messages.steps import StepSucceeded, XCom
from headgate.protocol.values import encode_value
from headgate.store.db.engine import open_engine
from headgate.store.db.transaction import LeasedTx
from headgate.store.scheduling import expansion
from headgate.store.store import Store
from headgate.store.tasks import run_states
from headgate.store.tasks.outcomes import StepEnd

VALUES = 40
TASKS = (
    TaskSpec("each", "Op", map=MapSpec(Values(VALUES), window=3)),
    TaskSpec("again", "Op", upstream=("each",), map=MapSpec(Output("each", "return_value"), window=5)),
    TaskSpec("total", "Op", upstream=("again",)),
)


class Expanding(Race, Maps):
    """A run with one map over the other, of which the first has a window of instances that are scheduled."""

    def __init__(self, url: str, one: Store, two: Store, clock: Clock) -> None:
        self.url, self.one, self.two, self.clock = url, one, two, clock
        Tasks.__init__(self, one, self._query, tasks=TASKS)
        self.plan()

    def _query(self, statement: str, **parameters: Any) -> list[dict[str, Any]]:
        return super()._query(statement.replace(":name", "%(name)s"), **parameters)

    def evaluate(self, tx: LeasedTx) -> bool:
        body(self.one.scheduling.plan)(tx)
        return True


@pytest.fixture
def race(postgres_url: str, secrets: Any) -> Iterator[Expanding]:
    clock = Clock()
    one, two = (Store(open_engine(postgres_url), secrets=secrets, clock=clock) for _ in range(2))
    with one, two:
        yield Expanding(postgres_url, one, two, clock)


def test_a_run_whose_instances_another_is_making_is_passed_over(race: Expanding) -> None:
    (first, *_) = race.dispatch(limit=3)
    assert ends.succeed(race.one.tasks, race.epoch, first.id, first.token)
    looked = race.second_passes_over(race.evaluate, lambda: race.two.scheduling.plan(race.epoch))
    assert (looked.evaluated, looked.instances) == (0, 0)
    assert race.instances() == ["success", "running", "running", "scheduled"]
    assert race.two.scheduling.plan(race.epoch).instances == 0, "there is nothing left to make"


def test_an_instance_that_ends_while_others_are_made_has_the_run_looked_at_again(race: Expanding) -> None:
    (first, second, _) = race.dispatch(limit=3)
    assert ends.succeed(race.one.tasks, race.epoch, first.id, first.token)
    race.second_waits(race.evaluate, lambda: ends.succeed(race.two.tasks, race.epoch, second.id, second.token))
    assert race.instances() == ["success", "success", "running", "scheduled"], "the look had not seen it"
    assert race.two.scheduling.plan(race.epoch).instances == 1
    assert race.instances() == ["success", "success", "running", "scheduled", "scheduled"]


def test_a_look_that_comes_while_an_instance_ends_makes_none_and_the_next_one_does(race: Expanding) -> None:
    (first, *_) = race.dispatch(limit=3)
    race.one.tasks.set_paused("etl", is_paused=False)  # have the run looked at
    ended = StepEnd(first.id, first.token, StepSucceeded())
    looked = race.second_passes_over(
        lambda tx: body(race.one.tasks._store_ends)(tx, [ended]), lambda: race.two.scheduling.plan(race.epoch)
    )
    assert looked.instances == 0
    assert race.two.scheduling.plan(race.epoch).instances == 1


@pytest.mark.parametrize("given", [1, 2, 3])
def test_instances_that_go_to_workers_during_a_look_are_counted_and_none_is_taken_for_one_to_make(
    race: Expanding, given: int
) -> None:
    (first,) = race.dispatch(limit=1)
    assert ends.succeed(race.one.tasks, race.epoch, first.id, first.token)
    race.plan()
    race.one.tasks.set_paused("etl", is_paused=False)  # have the run looked at
    with race.one.database.leased(race.epoch) as tx:
        seen = run_states.read(tx, race.run)
        assert len(race.two.tasks.dispatch(race.epoch, limit=given, queues=QUEUES).tasks) == given
        expanded = expansion.expand(tx, seen, TASKS[0], ("each", "again"), limit=10)
        assert expanded.begin == []
    assert len(race.instances()) == 4


def test_a_task_that_another_is_clearing_is_expanded_afterwards(race: Expanding) -> None:
    (first, *_) = race.dispatch(limit=3)
    assert ends.succeed(race.one.tasks, race.epoch, first.id, first.token)
    with race.one.database.writing() as tx:
        tx.connection.exec_driver_sql("SELECT 1 FROM task_instance WHERE map_index = -1 FOR UPDATE")
        looked = race.two.scheduling.plan(race.epoch)
        assert (looked.instances, looked.left) == (0, 1)
    assert race.two.scheduling.plan(race.epoch).instances == 1


def test_an_instance_that_is_not_to_begin_is_not_waited_for_while_a_user_acts_on_it(race: Expanding) -> None:
    each = TaskSpec("each", "Op", map=MapSpec(Values(VALUES), window=3, fail_fast=True))
    race.one.tasks.save_file(race.epoch, "etl.py", [DagSpec("etl", tasks=(each, *TASKS[1:]))])
    (first, *_) = race.dispatch(limit=1)
    ends.fail(race.one.tasks, race.epoch, first.id, first.token, "boom")
    with race.one.database.writing() as tx:
        tx.connection.exec_driver_sql("SELECT 1 FROM task_instance WHERE map_index = 1 FOR UPDATE")
        assert race.two.scheduling.plan(race.epoch).left == 1
        assert race.instances() == ["failed", "scheduled", "upstream_failed"]
    race.plan()
    assert race.instances() == ["failed", *["upstream_failed"] * 2]


def test_schedulers_and_workers_bring_every_value_to_its_one_instance(
    postgres_url: str, secrets: Any, race: Expanding
) -> None:
    """Four threads look, dispatch and end whatever they find, until nothing is left to do."""
    ran: Counter[tuple[str, int, int]] = Counter()
    begun: list[int] = []

    def left(store: Store) -> int:
        with store.database.reading() as tx:
            statement = "SELECT count(*) FROM dag_run WHERE ended_at IS NULL"
            return int(tx.connection.exec_driver_sql(statement).scalar_one())

    def unfinished(store: Store) -> int:
        with store.database.reading() as tx:
            statement = (
                "SELECT count(*) FROM task_instance WHERE task_id = 'each' AND map_index >= 0 "
                "AND state IN ('scheduled', 'running', 'up_for_retry')"
            )
            return int(tx.connection.exec_driver_sql(statement).scalar_one())

    def work(number: int) -> None:
        with Store(open_engine(postgres_url), secrets=secrets) as store:
            while left(store):
                store.scheduling.plan(race.epoch)
                begun.append(unfinished(store))
                for task in store.tasks.dispatch(race.epoch, limit=2, queues=QUEUES).tasks:
                    ran[task.task_id, task.map_index, task.try_number] += 1
                    left_there = (XCom("return_value", encode_value(task.map_index, where="value")),)
                    end = StepEnd(task.id, task.token, StepSucceeded(left_there))
                    store.tasks.store_ends(race.epoch, [end])

    together(4, work)
    assert race.ended() == "success"
    assert race.instances() == race.instances("again") == ["success"] * VALUES
    once = [(name, index, 1) for name in ("each", "again") for index in range(VALUES)]
    assert ran == Counter([*once, ("total", -1, 1)])
    assert max(begun) <= 3
