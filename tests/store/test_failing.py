"""One of many fails as nobody foresaw: a verb says which one, writes nothing, and handles the others without it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import OperationalError
from tests.store import ends
from tests.store.harness import Clock, OpenStore, Query, register
from tests.store.signals.rules_harness import GO, Jobs, ruled
from tests.store.signals.test_sending import new
from tests.store.tasks.streams_harness import Streams, stream_wait
from tests.supervisor.tasks_harness import WAIT, S, Tasks, event_of, instance_of, task_states

from headgate.protocol.messages.dags import CronSchedule, DagSpec, SignalSchedule, TaskSpec
from headgate.protocol.messages.rules import ClockRule, Rules, SignalRule
from headgate.protocol.messages.task_streams import StreamOptions
from headgate.store.db.faults import PassedOver, blaming
from headgate.store.errors import DatabaseAway, ItemFailed, LeaseLost, SpecUnreadable
from headgate.store.scheduling import considering, new_runs, planning
from headgate.store.signals import ticks
from headgate.store.store import Store
from headgate.store.tables import dag
from headgate.store.tasks import deferral, outcomes, task_streams
from headgate.store.tasks.deferral import Deferral

AB = (TaskSpec("a", "Op"), TaskSpec("b", "Op"))
LATE = Deferral("a.B", WAIT.kwargs, "resume", WAIT.next_kwargs, timeout_s=60.0)


class Two:
    """Two rows of one kind that a verb handles in one transaction, of which the first fails."""

    def __init__(
        self,
        kind: str,
        bad: int,
        verb: Callable[[], Any],
        handled: Callable[[], Collection[int]],
        *,
        has_other: bool = True,
    ) -> None:
        self.kind, self.bad, self.verb, self.handled, self.has_other = kind, bad, verb, handled, has_other


def _fail(patch: pytest.MonkeyPatch, owner: Any, name: str, is_bad: Callable[..., bool]) -> None:
    """Have a function fail, after it has written, as a fault of ours would."""
    inner = getattr(owner, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        result = inner(*arguments, **options)
        if is_bad(*arguments):
            raise KeyError("nobody foresaw it")
        return result

    patch.setattr(owner, name, failing)


def _in_states(tasks: Tasks, *states: S) -> set[int]:
    found = {name for name, state in task_states(tasks.store, tasks.run).items() if state in states}
    return {instance_of(tasks.store, tasks.run, name) for name in found}


def runs(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    tasks = Tasks(store, query)
    second = store.tasks.create_run("etl", "r2")
    store.tasks.save_file(tasks.epoch, "etl.py", [DagSpec("etl", tasks=tasks.spec.tasks, max_active_runs=9)])
    assert second is not None

    def handled() -> set[int]:
        return {run for run in (tasks.run, second) if task_states(store, run)["a"] is S.SCHEDULED}

    _fail(patch, planning._Evaluation, "evaluate", lambda _, run: run.id == tasks.run)
    return Two("run", tasks.run, lambda: store.scheduling.plan(tasks.epoch), handled)


def _running(store: Store, query: Query, **options: Any) -> Tasks:
    tasks = Tasks(store, query, tasks=tuple(TaskSpec(name, "Op", **options) for name in "ab"))
    tasks.plan()
    return tasks


def retries(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    tasks = _running(store, query, retries=1, retry_delay_s=5.0)
    for task in tasks.dispatch():
        ends.fail(store.tasks, tasks.epoch, task.id, task.token, "it broke")
    clock.advance(5.0)
    _fail(patch, outcomes, "begin_next_try", lambda _, id_: id_ == tasks.a)
    return Two("task", tasks.a, lambda: store.tasks.retry_due(tasks.epoch), lambda: _in_states(tasks, S.SCHEDULED))


def timeouts(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    tasks = _running(store, query)
    for task in tasks.dispatch():
        ends.defer(store.tasks, tasks.epoch, task.id, task.token, LATE)
    clock.advance(60.0)
    _fail(patch, deferral, "_time_out", lambda _, task: task.id == tasks.a)
    return Two("task", tasks.a, lambda: store.tasks.time_out(tasks.epoch), lambda: _in_states(tasks, S.SCHEDULED))


def orphans(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    tasks = _running(store, query)
    tasks.dispatch()
    other = tasks.register()
    store.fence_triggerers(other, dead=[tasks.epoch])
    _fail(patch, outcomes, "_lose", lambda _, task, *more: task.id == tasks.a)
    return Two("task", tasks.a, lambda: store.tasks.adopt(other), lambda: _in_states(tasks, S.FAILED))


def batches(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("batch", count=9, seconds=10.0)))
    tasks.fire(1)
    clock.advance(10.0)
    _fail(patch, task_streams, "settle", lambda _, task, *more: task.id == tasks.a)
    return Two(
        "task",
        tasks.a,
        lambda: store.tasks.begin_due_batches(tasks.epoch),
        lambda: _in_states(tasks, S.SCHEDULED),
        has_other=False,
    )


def dates(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    epoch = register(store)
    start = clock.now.timestamp() - 4 * 86_400.0
    for name in "ab":
        daily = DagSpec(name, CronSchedule("0 0 * * *"), tasks=AB, catchup=True, start_date_s=start)
        store.tasks.save_file(epoch, f"{name}.py", [daily])
    (bad, other) = (row["id"] for row in query("SELECT id FROM dag ORDER BY name"))
    _fail(patch, new_runs, "_create_scheduled", lambda _, due, *more: due.id == bad)

    def handled() -> set[int]:
        return {int(row["dag_id"]) for row in query("SELECT dag_id FROM dag_run")} & {bad, other}

    return Two("DAG", bad, lambda: store.scheduling.create_due_runs(epoch), handled)


def event_runs(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    epoch = register(store)
    for name in "ab":
        each = SignalSchedule((SignalRule("go"),), "each")
        store.tasks.save_file(epoch, f"{name}.py", [DagSpec(name, each, tasks=AB)])
    store.scheduling.consider_signals(epoch)
    store.signals.send([new("go")])
    while store.scheduling.consider_signals(epoch).has_more:
        pass
    (bad, other) = (row["id"] for row in query("SELECT id FROM dag ORDER BY name"))
    _fail(patch, new_runs, "_create_from_events", lambda _, dag_row, *more: dag_row == bad)

    def handled() -> set[int]:
        return {int(row["dag_id"]) for row in query("SELECT dag_id FROM dag_run")} & {bad, other}

    return Two("DAG", bad, lambda: store.scheduling.create_event_runs(epoch), handled)


def _waits(query: Query, task_id: int) -> int:
    (row,) = query("SELECT id FROM signal_wait WHERE task_instance_id = :id", id=task_id)
    return int(row["id"])


def rules_of_keys(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    jobs = Jobs(store, query, ruled(GO), ruled(GO, name="other"))
    bad = _waits(query, jobs.id())
    store.signals.send([new("go")])
    _fail(patch, considering._Looks, "look_for_rule", lambda _, wait: wait.id == bad)

    def handled() -> set[int]:
        return {int(row["id"]) for row in query("SELECT id FROM signal_wait WHERE met_version IS NOT NULL")}

    return Two("rule", bad, lambda: store.scheduling.consider_signals(jobs.tasks.epoch), handled)


def rules_of_times(store: Store, query: Query, clock: Clock, patch: pytest.MonkeyPatch) -> Two:
    tasks = Tasks(store, query, tasks=tuple(TaskSpec(n, "Op", signals=Rules((ClockRule(60.0),))) for n in "ab"))
    tasks.plan()
    clock.advance(60.0)
    bad = _waits(query, tasks.a)
    _fail(patch, ticks, "_meet", lambda _, id_, *more: id_ == bad)

    def handled() -> set[int]:
        return {int(row["id"]) for row in query("SELECT id FROM signal_wait WHERE met_version > 1")}

    return Two("rule", bad, lambda: store.scheduling.tick(tasks.epoch), handled)


SCENES = (runs, retries, timeouts, orphans, batches, dates, event_runs, rules_of_keys, rules_of_times)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_one_that_fails_is_named_and_the_others_go_on_without_it(
    open_store: OpenStore, query: Query, monkeypatch: pytest.MonkeyPatch, scene: Callable[..., Two]
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    with monkeypatch.context() as patch:
        two = scene(store, query, clock, patch)
        with pytest.raises(ItemFailed, match="KeyError: 'nobody foresaw it'") as failed:
            two.verb()
        assert (failed.value.kind, failed.value.id) == (two.kind, two.bad)
        assert isinstance(failed.value.__cause__, KeyError)
        assert set(two.handled()) == set(), "nothing was written"
        store.scheduling.passed_over.add(two.kind, two.bad)
        two.verb()
        others = set(two.handled())
        assert two.bad not in others
        assert bool(others) == two.has_other, "the other one is handled"
    two.verb()
    assert set(two.handled()) == others, "while it is passed over it waits"
    store.scheduling.passed_over.remove(two.kind, two.bad)
    two.verb()
    assert set(two.handled()) == {two.bad, *others}


def test_as_many_as_fit_a_transaction_hold_up_nothing_while_they_are_passed_over(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    runs = [tasks.run, *(store.tasks.create_run("etl", f"r{number}") for number in range(2, 6))]
    store.tasks.save_file(tasks.epoch, "etl.py", [DagSpec("etl", tasks=tasks.spec.tasks, max_active_runs=9)])
    for run in runs[:3]:
        store.scheduling.passed_over.add("run", run or 0)
    after, seen = planning.FROM_FIRST, 0
    for _ in range(4):
        planned = store.scheduling.plan(tasks.epoch, after=after, limit=2)
        after, seen = planned.next_after, seen + planned.scheduled
    assert seen == 2
    assert [task_states(store, run or 0)["a"] for run in runs] == [S.NONE] * 3 + [S.SCHEDULED] * 2


def test_a_rule_that_cannot_be_read_as_it_is_stored_fails_alone(store: Store, query: Query) -> None:
    """Not a fault of a test's own: a row of a newer version, or one that a hand has changed."""
    jobs = Jobs(store, query, ruled(GO), ruled(GO, name="other"))
    bad = _waits(query, jobs.id())
    query("UPDATE signal_wait SET predicate = :odd WHERE id = :id", odd=b"\xc1", id=bad)
    store.signals.send([new("go")])
    with pytest.raises(ItemFailed) as failed:
        jobs.settle()
    assert (failed.value.kind, failed.value.id) == ("rule", bad)
    assert store.scheduling.name_of("rule", bad) == "rule about the signals 'go' of the run etl r1"
    store.scheduling.passed_over.add("rule", bad)
    jobs.settle()
    assert (jobs.state("job"), jobs.state("other")) == (S.NONE, S.SCHEDULED)


def test_a_task_that_cannot_take_its_event_is_named_and_nothing_of_the_slice_is_stored(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    with monkeypatch.context() as patch:
        _fail(patch, deferral, "take_event", lambda _, event: event.trigger_id == trigger_id)
        with pytest.raises(ItemFailed) as failed:
            store.store_slice(tasks.epoch, events=[event_of(trigger_id)])
    assert (failed.value.kind, failed.value.id) == ("trigger", trigger_id)
    assert query("SELECT * FROM trigger_event") == []
    assert tasks.state() is S.DEFERRED


# --- who is to blame -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [LeaseLost(3), DatabaseAway("db", "gone"), SpecUnreadable("etl", "odd")])
def test_what_no_row_is_to_blame_for_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, blaming("run", 1):
        raise error
    assert raised.value is error


def test_the_first_block_that_an_error_leaves_says_whose_it_is() -> None:
    with pytest.raises(ItemFailed) as failed, blaming("run", 1), blaming("task", 2):
        raise AssertionError
    assert (failed.value.kind, failed.value.id, failed.value.reason) == ("task", 2, "AssertionError:")


def test_rows_that_the_database_refuses_are_to_blame_and_a_statement_that_fails_is_not(store: Store) -> None:
    epoch = register(store)
    with pytest.raises(ItemFailed, match=r"(?i)null"), store.database.leased(epoch) as tx, blaming("DAG", 7):
        tx.connection.execute(insert(dag).values(name=None))
    with pytest.raises(DatabaseAway), store.database.leased(epoch) as tx, blaming("DAG", 7):
        raise OperationalError("SELECT 1", {}, Exception("the server is gone"), connection_invalidated=True)


def test_only_so_many_are_read_that_enough_are_left() -> None:
    passed_over = PassedOver()
    for id_ in (1, 2, 2):
        passed_over.add("run", id_)
    rows = [(1,), (2,), (3,), (4,), (5,)]
    limits: list[int] = []

    def run(*, limit: int) -> Any:
        limits.append(limit)
        return SimpleNamespace(fetchall=lambda: rows[:limit])

    assert passed_over.read("run", 2, run) == [(3,), (4,)]
    assert passed_over.read("task", 2, run) == [(1,), (2,)]
    assert limits == [4, 2]
    assert passed_over.has("run", 1)
    passed_over.remove("run", 1)
    assert not passed_over.has("run", 1)
    assert not passed_over.has("DAG", None)


@pytest.mark.parametrize(
    ("kind", "name"), [("run", "run etl r1"), ("task", "task etl r1 a"), ("DAG", "DAG etl"), ("rule", "rule 9")]
)
def test_they_are_named_as_commands_take_them(store: Store, query: Query, kind: str, name: str) -> None:
    tasks = Tasks(store, query)
    (of_dag,) = query("SELECT id FROM dag")
    ids = {"run": tasks.run, "task": tasks.a, "DAG": of_dag["id"], "rule": 9}
    assert store.scheduling.name_of(kind, ids[kind]) == name
    assert store.scheduling.name_of("run", 99) == "run 99"
