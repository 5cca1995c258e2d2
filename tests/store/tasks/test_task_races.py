"""Two connections that want the same task at the same moment: exactly one wins, in either order (I8).

The first one's transaction is held open at the point where it has done everything but commit; the second one begins,
and is known to wait, or to pass over. Nothing sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query, wait_until_blocked
from tests.supervisor.tasks_harness import WAIT, Tasks, body, clear, event_of, task_states
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.steps import Emitted, StepSucceeded, XCom
from headgate.store.db.engine import open_engine
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.errors import LeaseLost
from headgate.store.ids import TaskInstanceId
from headgate.store.store import Store
from headgate.store.tasks import deferral, task_rows
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import StepEnd
from headgate.store.triggers.events import insert_events

S = TaskState


class Race(Tasks):
    """A task and two stores on PostgreSQL, each with a connection of its own."""

    def __init__(self, url: str, one: Store, two: Store, clock: Clock) -> None:
        self.url, self.one, self.two, self.clock = url, one, two, clock
        super().__init__(one, self._query, execution_timeout_s=60.0)

    def _query(self, statement: str, **parameters: Any) -> list[dict[str, Any]]:
        with psycopg.connect(self.url, row_factory=dict_row) as connection:
            return connection.execute(statement.replace(":id", "%(id)s"), parameters).fetchall()

    def second_waits(self, first: Callable[[LeasedTx], object], second: Callable[[], Any]) -> Any:
        """Do ``first`` on one connection, begin ``second`` on the other, commit; return what the second one says."""
        with ThreadPoolExecutor(1) as pool:
            with self.one.database.leased(self.epoch) as tx:
                assert first(tx) not in (None, False, [])
                future: Future[Any] = pool.submit(second)
                wait_until_blocked(open_engine(self.url))
            return future.result(WITHIN_S)

    def second_passes_over(self, first: Callable[[LeasedTx], object], second: Callable[[], Any]) -> Any:
        """The same where the second one does not wait for what is locked."""
        with self.one.database.leased(self.epoch) as tx:
            assert first(tx) not in (None, False, [])
            return second()


@pytest.fixture
def race(postgres_url: str, secrets: Any) -> Iterator[Race]:
    clock = Clock()
    one, two = (Store(open_engine(postgres_url), secrets=secrets, clock=clock) for _ in range(2))
    with one, two:
        yield Race(postgres_url, one, two, clock)


def clear_in(tx: Tx, store: Store, run: int, task_id: str) -> bool:
    """Clear a task in a transaction that is held open; return whether it was cleared."""
    return task_id in body(store.tasks.clear_many)(tx, run, [task_id]).cleared


def defer_in(tx: LeasedTx, instance: TaskInstanceId, token: str) -> TaskState:
    """Defer a running task in a transaction that is held open; return its new state."""
    task = task_rows.locked(tx, instance, token=token, state=S.RUNNING)
    assert task is not None
    return deferral.defer(tx, task, WAIT)


def take_event(race: Race, trigger_id: int) -> Callable[[Tx], bool]:
    def take(tx: Tx) -> bool:
        event = event_of(trigger_id)
        insert_events(tx, [event], {})
        deferral.take_events(tx, [event], {trigger_id})
        return True

    return take


def store_event(race: Race, store: Store, trigger_id: int) -> None:
    store.store_slice(race.epoch, events=[event_of(trigger_id)])


def wait_in(race: Race, store: Store) -> int:
    """Have the task wait, and ``store`` be the one that runs its trigger; return the trigger's id."""
    _, trigger_id = race.defer_it()
    assert [trigger.id for trigger in store.claimed_triggers(race.epoch)] == [trigger_id]
    return trigger_id


# --- clear and event -----------------------------------------------------------------------------


def test_an_event_that_comes_while_a_clear_is_under_way_resumes_nothing(race: Race) -> None:
    trigger_id = wait_in(race, race.two)
    race.second_waits(
        lambda tx: clear_in(tx, race.one, race.run, "a"),
        lambda: store_event(race, race.two, trigger_id),
    )
    row = race.row()
    assert (row["state"], row["trigger_id"], row["event_id"], row["next_method"]) == ("none", None, None, None)
    assert len(list(race.one.inspect.events())) == 1  # it is in the log all the same
    trigger = race.trigger(trigger_id)
    assert trigger["removed_at"] is not None
    assert trigger["finished_at"] is None


def test_a_clear_that_comes_while_an_event_is_being_stored_clears_the_resumed_task(race: Race) -> None:
    trigger_id = wait_in(race, race.one)
    said = race.second_passes_over(take_event(race, trigger_id), lambda: race.two.tasks.clear_many(race.run, ["a"]))
    assert (said.cleared, said.is_busy, said.left.tasks) == ({}, True, ("a",))
    assert clear(race.two, race.run, "a") == {"a": S.NONE}
    row = race.row()
    assert (row["state"], row["event_id"], row["next_method"]) == ("none", None, None)
    trigger = race.trigger(trigger_id)
    assert trigger["finished_at"] is not None  # the event ended it; there is nothing to kill
    assert trigger["removed_at"] is None


# --- timeout and event ---------------------------------------------------------------------------


def test_an_event_that_comes_while_a_timeout_is_under_way_resumes_nothing(race: Race) -> None:
    trigger_id = wait_in(race, race.two)
    race.clock.advance(61)
    race.second_waits(
        lambda tx: body(race.one.tasks.time_out)(tx),
        lambda: store_event(race, race.two, trigger_id),
    )
    row = race.row()
    assert (row["state"], row["next_method"], row["event_id"]) == ("scheduled", "__fail__", None)


def test_a_timeout_passes_over_a_task_whose_event_is_being_stored(race: Race) -> None:
    trigger_id = wait_in(race, race.one)
    race.clock.advance(61)
    said = race.second_passes_over(take_event(race, trigger_id), lambda: race.two.tasks.time_out(race.epoch))
    assert said == []
    assert race.two.tasks.time_out(race.epoch) == []
    row = race.row()
    assert (row["state"], row["next_method"]) == ("scheduled", WAIT.next_method)
    assert row["event_id"] is not None


# --- mark and finish -----------------------------------------------------------------------------


def test_a_finish_that_comes_while_a_mark_is_under_way_changes_nothing(race: Race) -> None:
    token = race.run_it()
    said = race.second_waits(
        lambda tx: body(race.one.tasks.mark)(tx, race.a, "failed"),
        lambda: ends.succeed(race.two.tasks, race.epoch, race.a, token, xcoms={"return_value": b"1"}),
    )
    assert said is False
    assert race.state() is S.FAILED
    assert race.one.tasks.pull_xcom(race.run, "a", "return_value") is None


def ends_well(task: TaskInstanceId, token: str) -> StepEnd:
    return StepEnd(task, token, StepSucceeded((XCom("return_value", b"1"),)))


def test_a_mark_that_comes_while_the_task_is_finishing_changes_nothing(race: Race) -> None:
    token = race.run_it()
    said = race.second_waits(
        lambda tx: body(race.one.tasks._store_ends)(tx, [ends_well(race.a, token)]),
        lambda: race.two.tasks.mark(race.a, "failed"),
    )
    assert said is False
    assert race.state() is S.SUCCESS
    assert race.one.tasks.pull_xcom(race.run, "a", "return_value") == b"1"


# --- defer and clear, two events, two dispatchers ------------------------------------------------


def test_a_deferral_that_comes_while_a_clear_is_under_way_leaves_no_trigger_behind(race: Race) -> None:
    token = race.run_it()
    said = race.second_waits(
        lambda tx: clear_in(tx, race.one, race.run, "a"),
        lambda: ends.defer(race.two.tasks, race.epoch, race.a, token, WAIT),
    )
    assert said is False
    assert race.state() is S.NONE, "its worker is done with it"
    assert all(line.removed_at for line in race.one.inspect.triggers(with_ended=True))


def test_a_clear_that_comes_while_a_task_is_deferring_takes_its_trigger_with_it(race: Race) -> None:
    token = race.run_it()
    said = race.second_passes_over(
        lambda tx: defer_in(tx, race.a, token),
        lambda: race.two.tasks.clear_many(race.run, ["a"]),
    )
    assert (said.cleared, said.is_busy, said.left.tasks) == ({}, True, ("a",))
    assert clear(race.two, race.run, "a") == {"a": S.NONE}
    assert all(line.removed_at for line in race.one.inspect.triggers(with_ended=True))  # it was removed


def test_a_task_that_is_adopted_is_not_finished_by_its_worker_at_the_same_moment(race: Race) -> None:
    token = race.run_it()
    other = race.register()
    race.one.release_triggerer(race.epoch)  # its worker's answer is still on its way, under a lease that is not its own
    race.epoch, owner = other, race.epoch
    said = race.second_waits(
        lambda tx: body(race.one.tasks.adopt)(tx),
        lambda: ends.succeed(race.two.tasks, other, race.a, token),
    )
    assert said is False
    row = race.row()
    assert row["state"] == "failed"
    assert f"epoch {owner}" in row["last_error"]


def test_two_that_dispatch_at_once_share_no_task_and_no_slot(race: Race) -> None:
    race.plan()
    other = race.register()

    def dispatch(tx: LeasedTx) -> object:
        return body(race.one.tasks.dispatch)(tx, limit=10, queues=QUEUES).tasks

    said = race.second_passes_over(dispatch, lambda: race.two.tasks.dispatch(other, limit=10, queues=QUEUES))
    assert (said.tasks, said.passed_over) == ([], ("default_pool",))
    assert race.two.tasks.dispatch(other, limit=10, queues=QUEUES).passed_over == ()
    assert race.row()["triggerer_id"] == race.epoch


def test_a_dispatch_that_is_being_committed_is_waited_for_by_whoever_asks_what_it_gave(race: Race) -> None:
    """Its link was cut, and the server is still at its COMMIT."""
    race.plan()
    given: list[TaskToRun] = []

    def dispatch(tx: LeasedTx) -> object:
        given.extend(body(race.one.tasks.dispatch)(tx, limit=10, queues=QUEUES).tasks)
        return given

    assert race.second_waits(dispatch, lambda: race.two.tasks.owned_running(race.epoch)) == given


def test_what_a_fenced_supervisor_was_given_is_not_told_to_it(race: Race) -> None:
    race.run_it()
    assert race.two.fence_triggerers(race.register(), dead=[race.epoch]) == [race.epoch]
    with pytest.raises(LeaseLost):
        race.one.tasks.owned_running(race.epoch)


def test_a_dispatch_passes_over_a_task_that_is_being_cleared(race: Race) -> None:
    race.plan()
    said = race.second_passes_over(
        lambda tx: clear_in(tx, race.one, race.run, "a"),
        lambda: race.two.tasks.dispatch(race.epoch, limit=10, queues=QUEUES),
    )
    assert (said.tasks, said.passed_over) == ([], ())
    assert race.state() is S.NONE


def test_no_run_ends_over_a_task_that_is_being_cleared(race: Race) -> None:
    ends.succeed(race.one.tasks, race.epoch, race.a, race.run_it())
    said = race.second_waits(
        lambda tx: clear_in(tx, race.one, race.run, "a"),
        lambda: race.two.tasks.cancel_run(race.run),
    )
    assert (said.tasks, said.is_ended) == (0, False)
    (run,) = race.query("SELECT state, ended_at FROM dag_run")
    assert run == {"state": "running", "ended_at": None}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_later_task_that_has_emitted_is_not_locked_first(
    open_store: OpenStore, query: Query, database_url: str
) -> None:
    one, two = open_store(), open_store()
    tasks = Tasks(one, query, tasks=(TaskSpec("a", "Op"), TaskSpec("b", "Op", emits=True)))
    tasks.plan()
    a, b = sorted(tasks.dispatch(), key=lambda task: task.id)
    ends = [
        StepEnd(a.id, a.token, StepSucceeded()),
        StepEnd(b.id, b.token, StepSucceeded(emitted=Emitted(0, (b"1",)))),
    ]
    with ThreadPoolExecutor(1) as pool:
        with two.database.leased(tasks.register()) as tx:
            task_rows.locked(tx, a.id)  # as a slice does with the tasks of streams
            stored = pool.submit(one.tasks.store_ends, tasks.epoch, ends)
            wait_until_blocked(open_engine(database_url))
            task_rows.locked(tx, b.id)
        assert stored.result(WITHIN_S) == [S.SUCCESS, S.SUCCESS]
    assert set(task_states(one, tasks.run).values()) == {S.SUCCESS}
