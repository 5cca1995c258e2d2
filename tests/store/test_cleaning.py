"""What is old and needed by nobody is deleted, and nothing else: not while supervisors work beside it, either."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import update
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query, register, wait_until_blocked
from tests.supervisor.tasks_harness import WAIT, S, Tasks, clear, event_of, instance_of
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import AssetSchedule, DagSpec, TaskSpec
from headgate.protocol.messages.runner import FinishedTrigger, FiredEvent, StateChanges, StateSync
from headgate.protocol.messages.steps import Emitted, StepSucceeded
from headgate.protocol.values import encode_value
from headgate.store import cleaning
from headgate.store.cleaning import KINDS, Kind
from headgate.store.db.engine import open_engine
from headgate.store.errors import LeaseLost
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tables import triggerer
from headgate.store.tasks.outcomes import StepEnd
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.intake import Intake

DAY_S = 86_400.0
TABLES = (
    *("dag", "dag_run", "task_instance", "xcom", "dag_run_event", "waiting_event", "asset_subscription", "trigger"),
    *("trigger_event", "redelivery", "asset_watcher", "triggerer", "dead_letter", "strike"),
    "letter_action",
)


# What is deleted unless somebody asks for more, and dead letters.
UNASKED: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "keyed_events")


def clean(store: Store, days: float, *, kinds: tuple[Kind, ...] = UNASKED, **options: Any) -> dict[str, int]:
    deleted: Counter[str] = Counter()
    for _, cleaned in store.cleaning.clean(days * DAY_S, kinds=kinds, **options):
        deleted.update(cleaned.rows)
    return dict(deleted)


def counts(query: Query) -> dict[str, int]:
    return {table: int(query(f'SELECT count(*) AS n FROM "{table}"')[0]["n"]) for table in TABLES}


def fired(trigger: int, index: int, *, key: str | None = None, run: str = "run") -> FiredEvent:
    payload = encode_value(index if key is None else key, where="p")  # a redelivered message has the same
    return FiredEvent(trigger, f"{run}-{trigger}", index, 0, payload, key=key)


def claim_watcher(store: Store, epoch: Epoch, name: str = "w", **options: Any) -> int:
    trigger = store.add_watcher(name, "a.B", {}, **options)
    assert trigger in [one.id for one in store.claim_triggers(epoch, limit=10, queues=QUEUES)]
    return trigger


# --- runs ----------------------------------------------------------------------------------------


def test_an_ended_run_goes_with_all_that_only_it_refers_to(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    token, trigger = tasks.defer_it()
    old.store_slice(
        tasks.epoch, events=[event_of(trigger)], finished=[FinishedTrigger(trigger, f"run-{trigger}", "returned", 1)]
    )
    (again,) = tasks.dispatch()
    assert again.event is not None
    ends.succeed(old.tasks, tasks.epoch, tasks.a, again.token, xcoms={"k": b"1"})
    old.tasks.cancel_run(tasks.run)
    old.release_triggers(tasks.epoch, [trigger])
    clock.pass_days(40)
    young = old.tasks.create_run("etl", "r2")

    deleted = clean(old, 30)

    assert deleted == {"xcom": 1, "task_instance": 1, "dag_run": 1, "trigger_event": 1, "trigger": 1}
    assert [row["id"] for row in query("SELECT id FROM dag_run")] == [young]
    assert clean(old, 30) == {}
    assert token


def test_the_elements_of_a_run_go_with_it(old: Store, query: Query, clock: Clock) -> None:
    tasks = Tasks(old, query, emits=True)
    token = tasks.run_it()
    emitted = Emitted(0, (b"1", b"2"))
    assert old.tasks.emit(tasks.epoch, tasks.a, token, emitted) is not None
    old.tasks.store_ends(tasks.epoch, [StepEnd(tasks.a, token, StepSucceeded(emitted=Emitted(2, (b"3",))))])
    tasks.plan()
    clock.advance(100 * DAY_S)
    deleted = clean(old, 30)
    assert {name: deleted[name] for name in ("element", "emitter", "task_instance")} == {
        "element": 3,
        "emitter": 1,
        "task_instance": 1,
    }


def test_a_run_that_has_not_ended_stays_however_old_it_is(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    tasks.defer_it()
    before = counts(query)
    clock.pass_days(400)

    assert clean(old, 30) == {}
    assert counts(query) == before
    assert tasks.state() is S.DEFERRED


def test_a_run_that_ended_lately_stays(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    clock.pass_days(40)
    old.tasks.cancel_run(tasks.run)

    assert "dag_run" not in clean(old, 30)
    clock.pass_days(31)
    assert clean(old, 30)["dag_run"] == 1


def test_the_event_that_resumed_a_task_stays_as_long_as_the_task(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    _, trigger = tasks.defer_it()
    finished = [FinishedTrigger(trigger, f"run-{trigger}", "returned", 1)]
    old.store_slice(tasks.epoch, events=[event_of(trigger, 5)], finished=finished)
    old.release_triggers(tasks.epoch, [trigger])
    clock.pass_days(40)
    old.heartbeat(tasks.epoch)

    assert clean(old, 30) == {}
    (resumed,) = tasks.dispatch()
    assert resumed.event == b"5"


def test_a_removed_dag_goes_once_it_has_no_runs(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    old.tasks.save_file(tasks.epoch, "etl.py", [])
    clock.pass_days(40)
    old.tasks.cancel_run(tasks.run)
    assert "dag" not in clean(old, 30)
    clock.pass_days(31)

    deleted = clean(old, 30)

    assert (deleted["dag_run"], deleted["dag"]) == (1, 1)


# --- events and triggers -------------------------------------------------------------------------


def test_of_an_open_trigger_the_newest_event_and_all_keys_stay(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    plain, keyed = claim_watcher(old, tasks.epoch, "plain"), claim_watcher(old, tasks.epoch, "keyed")
    events = [fired(plain, index) for index in range(5)] + [fired(keyed, index, key=f"k{index}") for index in range(5)]
    old.store_slice(tasks.epoch, events=events)
    clock.pass_days(40)
    old.heartbeat(tasks.epoch)

    assert clean(old, 30, kinds=("events", "triggers")) == {"trigger_event": 4}

    newest = old.last_event(plain)
    assert newest is not None
    assert newest.payload == b"4"
    again = old.store_slice(tasks.epoch, events=[fired(keyed, 9, key="k0", run="later")])
    assert (again.stored, again.redelivered) == (0, 1)


def test_keys_go_only_when_they_are_named_and_never_the_newest(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    keyed, plain = claim_watcher(old, tasks.epoch, "keyed"), claim_watcher(old, tasks.epoch, "plain")
    old.store_slice(tasks.epoch, events=[fired(plain, index) for index in range(3)])
    old.store_slice(tasks.epoch, events=[fired(keyed, index, key=f"k{index}") for index in range(5)])
    old.store_slice(tasks.epoch, events=[fired(keyed, 5, key="k0", run="again")])  # of which a redelivery is counted
    clock.now += timedelta(days=31)
    assert clean(old, 32, kinds=("keyed_events",)) == {}
    assert clean(old, 30, kinds=("keyed_events",)) == {"redelivery": 1, "trigger_event": 4}
    rows = query("SELECT key FROM trigger_event WHERE trigger_id = :keyed", keyed=keyed)
    assert [row["key"] for row in rows] == ["k4"]
    assert len(query("SELECT * FROM trigger_event WHERE trigger_id = :plain", plain=plain)) == 3
    assert old.last_event(keyed) is not None


def test_what_a_dag_still_has_to_run_for_stays(old: Store, clock: Clock, query: Query) -> None:
    epoch = Tasks(old, query).epoch
    schedule = AssetSchedule(("orders",), "each")
    spec = DagSpec("react", schedule, tasks=(TaskSpec("x", "Op"),))
    old.tasks.save_file(epoch, "react.py", [spec])
    old.tasks.set_paused("react", is_paused=True)
    trigger = claim_watcher(old, epoch, asset="orders")
    old.store_slice(epoch, events=[fired(trigger, index) for index in range(3)])
    clock.pass_days(40)
    old.heartbeat(epoch)

    assert clean(old, 30, kinds=("events",)) == {}

    old.tasks.set_paused("react", is_paused=False)
    while old.scheduling.create_event_runs(epoch).made:
        pass
    assert clean(old, 30, kinds=("events",)) == {}, "the runs were made for them"
    assert counts(query)["dag_run_event"] == 3


def test_a_removed_watcher_goes_with_its_events_when_nobody_runs_it(old: Store, clock: Clock, query: Query) -> None:
    epoch = Tasks(old, query).epoch
    trigger = claim_watcher(old, epoch)
    old.store_slice(epoch, events=[fired(trigger, index, key=f"k{index}") for index in range(3)])
    old.store_slice(epoch, events=[fired(trigger, 7, key="k0", run="again")])
    old.remove_watcher("w")
    clock.pass_days(40)
    old.heartbeat(epoch)

    assert clean(old, 30) == {}, "its owner has not cancelled it yet"
    old.release_triggers(epoch, [trigger])

    assert clean(old, 30) == {"redelivery": 1, "trigger_event": 3, "asset_watcher": 1, "trigger": 1}


def test_a_watcher_that_is_there_stays_though_its_trigger_has_finished(old: Store, clock: Clock, query: Query) -> None:
    epoch = Tasks(old, query).epoch
    trigger = claim_watcher(old, epoch)
    old.store_slice(epoch, finished=[FinishedTrigger(trigger, "run", "returned", 1)])
    old.release_triggers(epoch, [trigger])
    clock.pass_days(40)

    assert clean(old, 30) == {}
    assert [line.name for line in old.inspect.triggers()] == ["w"]


def test_a_supervisor_that_left_goes_once_nothing_refers_to_it(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    left, gone = tasks.register(), tasks.register()
    old.release_triggerer(left)
    claim_watcher(old, gone)
    assert old.fence_triggerers(tasks.epoch, dead=[gone]) == [gone]
    clock.pass_days(40)
    old.heartbeat(tasks.epoch)

    assert clean(old, 30) == {"triggerer": 1}
    old.remove_watcher("w")
    clock.pass_days(31)
    old.heartbeat(tasks.epoch)
    assert clean(old, 30) == {"asset_watcher": 1, "trigger": 1, "triggerer": 1}
    old.heartbeat(tasks.epoch)


def test_strikes_go_when_they_are_old_and_all_of_them_with_their_trigger(
    old: Store, clock: Clock, query: Query
) -> None:
    tasks = Tasks(old, query)
    trigger_id, other = claim_watcher(old, tasks.epoch), claim_watcher(old, tasks.epoch, "other")
    for key in ("old", "mended", "mended"):
        old.strike_message(tasks.epoch, trigger_id, key, f"run {key} 1", "x")
    old.strike_message(tasks.epoch, other, "old", "run other", "x")
    clock.pass_days(40)
    old.heartbeat(tasks.epoch)
    old.strike_message(tasks.epoch, trigger_id, "mended", "run 2", "x")

    assert clean(old, 30, is_tried_only=True) == clean(old, 30) == {"strike": 2}
    assert [row["key"] for row in query("SELECT key FROM strike")] == ["mended"]
    assert clean(old, 30) == {}
    old.remove_watcher("w")
    old.release_triggers(tasks.epoch, [trigger_id])
    clock.pass_days(31)
    old.heartbeat(tasks.epoch)
    without_ages = tuple(kind for kind in UNASKED if kind != "strikes")
    assert clean(old, 30, kinds=without_ages) == {"strike": 1, "asset_watcher": 1, "trigger": 1}


# --- supervisors that do not know what they have stored ------------------------------------------


HOUR_S = 3600.0


def fenced_by(store: Store, older_than_s: float, **options: Any) -> list[int]:
    return [epoch for _, cleaned in store.cleaning.clean(older_than_s, **options) for epoch in cleaned.fenced]


def test_what_a_supervisor_stored_without_hearing_of_it_is_not_stored_again_after_a_clean(
    old: Store, clock: Clock, query: Query
) -> None:
    """Its link was cut, and it is alone. It may have renewed its lease a moment after that commit."""
    epoch = Tasks(old, query).epoch
    trigger = claim_watcher(old, epoch)
    events = [fired(trigger, index) for index in range(3)]
    old.store_slice(epoch, events=events)
    clock.now += timedelta(seconds=5)
    old.heartbeat(epoch)
    clock.now += timedelta(seconds=HOUR_S - 4)

    assert fenced_by(old, HOUR_S) == [epoch]

    (left,) = query("SELECT sequence_index FROM trigger_event")
    with pytest.raises(LeaseLost):
        old.store_slice(epoch, events=events)
    assert query("SELECT sequence_index FROM trigger_event") == [left]
    assert fenced_by(old, HOUR_S) == []


def test_a_supervisor_is_not_fenced_for_a_silence_that_is_short_beside_what_is_deleted(
    old: Store, clock: Clock, query: Query
) -> None:
    epoch = Tasks(old, query).epoch
    trigger = claim_watcher(old, epoch)
    clock.now += timedelta(seconds=HOUR_S / 2)
    assert fenced_by(old, 0.0) == []
    assert fenced_by(old, HOUR_S) == []
    clock.pass_days(1)
    assert fenced_by(old, 30 * DAY_S) == []
    old.store_slice(epoch, events=[fired(trigger, 0)])


def test_a_try_tells_who_would_be_fenced_and_fences_nobody(old: Store, clock: Clock, query: Query) -> None:
    epoch = Tasks(old, query).epoch
    clock.pass_days(1)
    assert fenced_by(old, HOUR_S, is_tried_only=True) == [epoch]
    old.heartbeat(epoch)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("returns", ["writes", "beats"])
def test_a_supervisor_that_writes_this_moment_is_waited_for(
    old: Store, clock: Clock, open_store: OpenStore, query: Query, database_url: str, returns: str
) -> None:
    epoch, other = Tasks(old, query).epoch, open_store(clock=clock)
    clock.pass_days(1)
    with ThreadPoolExecutor(1) as pool:
        with old.database.writing() if returns == "beats" else old.database.leased(epoch) as tx:
            if returns == "beats":
                lease = update(triggerer).where(triggerer.c.id == epoch)
                tx.connection.execute(lease.values(latest_heartbeat=tx.now))
            cleaning = pool.submit(fenced_by, other, HOUR_S)
            wait_until_blocked(open_engine(database_url))
        assert cleaning.result(WITHIN_S) == ([] if returns == "beats" else [epoch])


# --- how -----------------------------------------------------------------------------------------


def test_a_try_counts_and_deletes_nothing(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query)
    old.tasks.cancel_run(tasks.run)
    clock.pass_days(40)
    before = counts(query)

    tried = clean(old, 30, is_tried_only=True)

    assert counts(query) == before
    assert tried == {"task_instance": 1, "dag_run": 1} == clean(old, 30)


def test_no_transaction_looks_at_more_rows_than_it_may(old: Store, clock: Clock, query: Query) -> None:
    epoch = Tasks(old, query).epoch
    trigger = claim_watcher(old, epoch)
    old.store_slice(epoch, events=[fired(trigger, index) for index in range(25)])
    clock.pass_days(40)
    old.heartbeat(epoch)

    batches = [
        cleaned.rows.get("trigger_event", 0)
        for _, cleaned in old.cleaning.clean(30 * DAY_S, kinds=["events"], rows_max=10)
    ]

    assert batches == [10, 10, 4, 0]


def test_it_stops_at_the_first_rows_that_are_young(old: Store, clock: Clock, query: Query) -> None:
    epoch = Tasks(old, query).epoch
    trigger = claim_watcher(old, epoch)
    old.store_slice(epoch, events=[fired(trigger, index) for index in range(10)])
    clock.pass_days(40)
    old.heartbeat(epoch)
    old.store_slice(epoch, events=[fired(trigger, index) for index in range(10, 60)])

    batches = [
        cleaned.rows.get("trigger_event", 0)
        for _, cleaned in old.cleaning.clean(30 * DAY_S, kinds=["events"], rows_max=5)
    ]

    assert batches == [5, 5, 0]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_what_another_is_changing_is_left_for_the_next_time(
    old: Store, clock: Clock, open_store: OpenStore, query: Query
) -> None:
    from headgate.store.tasks import task_rows

    tasks = Tasks(old, query)
    old.tasks.cancel_run(tasks.run)
    clock.pass_days(40)
    with open_store().database.writing() as tx:
        assert task_rows.locked(tx, tasks.a) is not None
        assert clean(old, 30) == {}

    assert clean(old, 30) == {"task_instance": 1, "dag_run": 1}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_task_that_is_cleared_while_its_run_is_deleted_is_no_more(
    old: Store, clock: Clock, open_store: OpenStore, query: Query
) -> None:
    """Whoever locks first wins: the clear here, after which the run is a running one and stays."""
    tasks = Tasks(old, query)
    old.tasks.cancel_run(tasks.run)
    clock.pass_days(40)
    clear(open_store(clock=clock), tasks.run, "a")

    assert clean(old, 30) == {}
    assert tasks.state() is S.NONE


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_event_that_comes_while_a_dag_that_waited_for_it_is_deleted_is_stored_and_not_dead_lettered(
    old: Store, clock: Clock, open_store: OpenStore, database_url: str
) -> None:
    """It is to wait for the DAG, whose row is gone once the clean has committed: it is refused, for the moment."""
    other = open_store(clock=clock)
    react = DagSpec("react", AssetSchedule(("orders",), "each"), tasks=(TaskSpec("x", "Op"),))
    epoch = register(other)
    other.tasks.save_file(epoch, "react.py", [react])
    other.tasks.save_file(epoch, "react.py", [])
    clock.pass_days(40)
    trigger = claim_watcher(other, epoch, asset="orders")
    intake = Intake(other, slice_events_max=500, retry=DatabaseRetry("events", 1.0, 8.0))
    intake.add_frame(1, StateChanges(1, (msgspec.structs.replace(fired(trigger, 0), seq=7),)))

    with ThreadPoolExecutor(1) as pool:
        with old.database.writing() as tx:
            deleted = cleaning.clean_batch(tx, "dags", clock.now - timedelta(days=30), after_id=0, rows_max=100)
            assert deleted.rows["dag"] == 1
            refused = pool.submit(intake.step, epoch, 0.0)
            wait_until_blocked(open_engine(database_url))
        assert refused.result(WITHIN_S) is None
    stored = intake.step(epoch, 0.0)

    assert stored is not None
    assert stored.answer == StateSync(1, persisted=(7,))
    assert [row.trigger_id for row in other.inspect.events()] == [trigger]
    assert other.inspect.dead_letters() == []


def test_a_deferred_task_is_resumed_in_the_middle_of_a_clean(
    old: Store, clock: Clock, open_store: OpenStore, query: Query
) -> None:
    tasks = Tasks(old, query)
    old.tasks.cancel_run(tasks.run)
    clock.pass_days(40)
    other = open_store(clock=clock)
    run = other.tasks.create_run("etl", "r2")
    assert run is not None
    tasks.run, tasks.a = run, instance_of(other, run, "a")
    tasks.store = other
    epoch = tasks.epoch = tasks.register()
    waits: int | None = None

    deleted: Counter[str] = Counter()
    for kind, cleaned in old.cleaning.clean(30 * DAY_S, rows_max=1):
        deleted.update(cleaned.rows)
        if waits is None:
            _, waits = tasks.defer_it(WAIT)
        elif kind == "triggers" and tasks.state() is S.DEFERRED:
            other.store_slice(epoch, events=[event_of(waits, "came")])

    assert deleted["dag_run"] == 1
    (resumed,) = tasks.dispatch()
    assert (resumed.id, resumed.event) == (tasks.a, b'"came"')
