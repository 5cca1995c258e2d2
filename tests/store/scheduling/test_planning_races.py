"""Schedulers at the same moment, and ends of tasks while their run is evaluated: no change is missed, no deadlock.

On PostgreSQL, with real connections; one is held open where it has done everything but commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from tests.store import ends
from tests.store.harness import QUEUES, Clock, wait_until_blocked
from tests.store.scheduling.test_planning import chain
from tests.store.tasks.test_task_races import Race, clear_in
from tests.supervisor.tasks_harness import S, body, instance_of, task_states
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.steps import StepSucceeded
from headgate.store.db.engine import open_engine
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import LeasedTx
from headgate.store.scheduling import planning
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd

DAG = DagSpec("chain", tasks=chain("a", "b"))


class Planning(Race):
    """A chain of two, the first task of which runs."""

    def __init__(self, url: str, one: Store, two: Store, clock: Clock) -> None:
        super().__init__(url, one, two, clock)
        one.scheduling.plan(self.epoch)
        one.tasks.mark(self.a, "success")
        one.scheduling.plan(self.epoch)
        one.tasks.save_file(self.epoch, "chain.py", [DAG])
        run = one.tasks.create_run("chain", "r1")
        assert run is not None
        self.chain = run
        one.scheduling.plan(self.epoch)
        (task,) = one.tasks.dispatch(self.epoch, limit=9, queues=QUEUES).tasks
        self.first, self.token = task.id, task.token

    def evaluate(self, tx: LeasedTx) -> bool:
        body(self.one.scheduling.plan)(tx)
        return True

    def mark_run(self) -> None:
        """Have the run evaluated once more, though nothing has happened."""
        self.one.tasks.set_paused("chain", is_paused=False)

    def states(self) -> dict[str, str]:
        return {name: state.value for name, state in task_states(self.one, self.chain).items()}


@pytest.fixture
def race(postgres_url: str, secrets: Any) -> Iterator[Planning]:
    clock = Clock()
    one, two = (Store(open_engine(postgres_url), secrets=secrets, clock=clock) for _ in range(2))
    with one, two:
        yield Planning(postgres_url, one, two, clock)


def test_an_end_that_comes_during_a_look_is_seen_by_the_next_one(race: Planning) -> None:
    race.mark_run()
    assert race.second_waits(race.evaluate, lambda: ends.succeed(race.two.tasks, race.epoch, race.first, race.token))
    assert race.states() == {"a": "success", "b": "none"}  # the look had not seen it
    assert race.one.scheduling.plan(race.epoch).scheduled == 1


def test_a_look_that_comes_while_a_task_ends_does_not_wait_and_the_next_one_sees_it(race: Planning) -> None:
    race.mark_run()
    ended = StepEnd(race.first, race.token, StepSucceeded())
    looked = race.second_passes_over(
        lambda tx: body(race.one.tasks._store_ends)(tx, [ended]),
        lambda: race.two.scheduling.plan(race.epoch),
    )
    assert (looked.evaluated, looked.scheduled) == (1, 0)
    assert race.one.scheduling.plan(race.epoch).scheduled == 1


def test_a_task_that_another_has_locked_keeps_the_run_marked_even_if_that_one_gives_up(race: Planning) -> None:
    ends.succeed(race.one.tasks, race.epoch, race.first, race.token)

    class GivesUp(Exception):
        pass

    def clear_and_give_up() -> None:
        with race.one.database.writing() as tx:
            clear_in(tx, race.one, race.chain, "b")
            looked = race.two.scheduling.plan(race.epoch)
            # The run's own row is locked by the clear, and passed over.
            assert looked.evaluated == 0
            raise GivesUp

    with pytest.raises(GivesUp):
        clear_and_give_up()
    assert race.two.scheduling.plan(race.epoch).scheduled == 1


def test_a_locked_task_alone_leaves_the_mark(race: Planning) -> None:
    ends.succeed(race.one.tasks, race.epoch, race.first, race.token)
    second = instance_of(race.one, race.chain, "b")
    with race.one.database.writing() as tx:
        tx.connection.exec_driver_sql(f"SELECT 1 FROM task_instance WHERE id = {second} FOR UPDATE")
        looked = race.two.scheduling.plan(race.epoch)
        assert (looked.scheduled, looked.left) == (0, 1)
    assert race.two.scheduling.plan(race.epoch).scheduled == 1


def test_no_run_begins_beyond_the_limit_while_the_dag_is_locked(race: Planning) -> None:
    spec = DagSpec("one", max_active_runs=1, tasks=(TaskSpec("a", "Op"),))
    race.one.tasks.save_file(race.epoch, "one.py", [spec])
    race.one.tasks.create_run("one", "first")
    said = race.second_passes_over(race.evaluate, lambda: create_and_plan(race))
    assert (said.scheduled, said.left) == (0, 1)
    race.one.scheduling.plan(race.epoch)
    rows = race.query("SELECT run_id, started_at FROM dag_run WHERE run_id IN ('first', 'second')")
    assert {row["run_id"]: row["started_at"] is not None for row in rows} == {"first": True, "second": False}


def create_and_plan(race: Planning) -> Any:
    race.two.tasks.create_run("one", "second")
    return race.two.scheduling.plan(race.epoch)


def together(count: int, work: Callable[[int], None]) -> None:
    """Have threads begin at the same moment; raise what any of them raises."""
    start = Barrier(count)

    def one(number: int) -> None:
        start.wait(WITHIN_S)
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(one, number) for number in range(count)]:
            future.result(WITHIN_S)


def test_two_schedulers_and_workers_bring_many_runs_to_their_end(
    postgres_url: str, secrets: Any, race: Planning
) -> None:
    """Four threads plan, dispatch, fail, skip and clear whatever they find, until nothing is left to do."""
    ends.succeed(race.one.tasks, race.epoch, race.first, race.token)
    tasks = (
        *chain("a", "b"),
        *(TaskSpec(f"c{number}", "Op", upstream=("b",)) for number in range(4)),
        TaskSpec("end", "Op", upstream=tuple(f"c{number}" for number in range(4)), trigger_rule="none_failed"),
    )
    race.one.tasks.save_file(race.epoch, "many.py", [DagSpec("many", max_active_runs=3, tasks=tasks)])
    runs = [race.one.tasks.create_run("many", f"m{number}") for number in range(12)]
    ran: dict[tuple[str, str], int] = {}
    most: list[int] = []

    def left(store: Store) -> int:
        with store.database.reading() as tx:
            statement = "SELECT count(*) FROM dag_run WHERE ended_at IS NULL"
            return int(tx.connection.exec_driver_sql(statement).scalar_one())

    def work(number: int) -> None:
        with Store(open_engine(postgres_url), secrets=secrets) as store:
            while left(store):
                store.scheduling.plan(race.epoch, limit=3)
                with store.database.reading() as tx:
                    statement = (
                        "SELECT count(*) FROM dag_run JOIN dag ON dag.id = dag_id WHERE dag.name = 'many' "
                        "AND started_at IS NOT NULL AND ended_at IS NULL"
                    )
                    most.append(int(tx.connection.exec_driver_sql(statement).scalar_one()))
                given = store.tasks.dispatch(race.epoch, limit=2, queues=QUEUES).tasks
                for task in given:
                    key = (task.run_id, task.task_id)
                    ran[key] = ran.get(key, 0) + 1
                    skips = ("c0", "c1") if task.task_id == "b" and number % 2 else ()
                    assert ends.succeed(store.tasks, race.epoch, task.id, task.token, skips=skips)

    together(4, work)
    rows = race.query("SELECT state, needs_look FROM dag_run")
    assert len(rows) == len(runs) + 2
    assert {(row["state"], row["needs_look"]) for row in rows} == {("success", False)}
    assert max(most) <= 3
    assert set(ran.values()) == {1}
    last = race.query("SELECT state, count(*) AS n FROM task_instance WHERE task_id = 'end' GROUP BY state")
    assert last == [{"state": S.SUCCESS.value, "n": 12}]


# --- the statement that locks runs shows all else as it was before -------------------------------

ADVISORY = 4711  # the number of a lock by which that statement is held up, between its snapshot and the lock


def unpause(race: Planning) -> None:
    race.two.tasks.set_paused("chain", is_paused=False)


def change_file(race: Planning) -> None:
    race.two.tasks.save_file(race.epoch, "chain.py", [DagSpec("chain", tasks=chain("a", "c"))])


def ask_for_a_start(race: Planning) -> None:
    race.two.signals.ask(instance_of(race.two, race.chain, "b"), "START")


@pytest.mark.parametrize(
    ("has_ended", "change", "states"),
    [
        (True, unpause, {"a": "success", "b": "scheduled"}),
        (False, change_file, {"a": "running", "b": "removed", "c": "none"}),
        (False, ask_for_a_start, {"a": "running", "b": "scheduled"}),
    ],
)
def test_a_change_while_the_dirty_runs_are_read_is_not_missed(
    race: Planning,
    monkeypatch: pytest.MonkeyPatch,
    has_ended: bool,
    change: Callable[[Planning], None],
    states: dict[str, str],
) -> None:
    race.mark_run()
    if has_ended:
        ends.succeed(race.one.tasks, race.epoch, race.first, race.token)
        race.one.tasks.set_paused("chain", is_paused=True)
    read_dirty: Any = planning._DIRTY.for_all._statement
    held_up = read_dirty.where(text(f"pg_advisory_xact_lock_shared({ADVISORY}) IS NOT NULL"))
    monkeypatch.setattr(planning._DIRTY, "for_all", Prepared(held_up))
    with ThreadPoolExecutor(1) as pool, psycopg.connect(race.url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", (ADVISORY,))
        planned = pool.submit(race.one.scheduling.plan, race.epoch)
        wait_until_blocked(open_engine(race.url))
        change(race)
        other.commit()
        assert planned.result(WITHIN_S).evaluated >= 1
    monkeypatch.undo()
    race.one.scheduling.plan(race.epoch)
    assert race.states() == states


def test_runs_that_are_left_do_not_hold_up_younger_ones(race: Planning) -> None:
    """As many as one evaluation takes may keep their flags, because rows of them are locked: it goes on behind them."""
    store = race.one
    store.tasks.mark(race.first, "success")
    younger = store.tasks.create_run("chain", "r2")
    with psycopg.connect(race.url) as other:
        second = instance_of(store, race.chain, "b")
        other.execute("SELECT id FROM task_instance WHERE id = %s FOR UPDATE", (second,))
        left = store.scheduling.plan(race.epoch, limit=1)
        assert (left.left, left.has_more, left.next_after) == (1, True, race.chain)
        behind = store.scheduling.plan(race.epoch, after=left.next_after, limit=9)
        assert (behind.evaluated, behind.next_after) == (1, 0)
        assert behind.has_more, "those that were left come again"
        assert store.inspect.run("chain", "r2").line.started_at is not None
    assert younger is not None
    assert store.scheduling.plan(race.epoch).scheduled == 1
