"""Tasks that wait for signals: which versions count, each once, and nothing falls in between (I28)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.store.signals.test_retention import clean
from tests.store.signals.test_sending import new, versions
from tests.supervisor.tasks_harness import S, Tasks, clear, instance_of, task_states
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import DagSpec, StartTrigger, TaskSpec
from headgate.protocol.messages.signals import SIGNAL_TRIGGER, Predicate, SentSignal, SignalWait, Since
from headgate.protocol.values import encode_value
from headgate.store.db.engine import open_engine
from headgate.store.errors import SignalKeyInUse
from headgate.store.ids import DagRunId
from headgate.store.scheduling import considering
from headgate.store.signals import sending
from headgate.store.store import Store

NEW = object()


def sensor(
    name: str = "wait", value: Any = NEW, *, since: Since = "run", namespace: str = "default", **options: Any
) -> TaskSpec:
    encoded = None if value is NEW else encode_value(value, where="value")
    wait = SignalWait("labels", namespace, encoded, since)
    start = StartTrigger(SIGNAL_TRIGGER, b"{}", "execute", b"{}", options.pop("timeout_s", None), signal=wait)
    return TaskSpec(name, "SignalSensor", start_trigger=start, **options)


class Waits:
    """A run with sensors, and a supervisor that considers signals."""

    def __init__(self, store: Store, query: Query, *tasks: TaskSpec, begins: bool = True) -> None:
        self.tasks = Tasks(store, query, tasks=tasks or (sensor(),))
        self.store = store
        self.query = query
        if begins:
            self.tasks.plan()

    def send(self, *values: Any, **fields: Any) -> list[int]:
        return [one.version for one in self.store.signals.send([new("labels", value, **fields) for value in values])]

    def consider(self, store: Store | None = None) -> int:
        """Consider all there is to consider; return how many tasks have ended."""
        ended = 0
        while (found := (store or self.store).scheduling.consider_signals(self.tasks.epoch)).has_more or found.tasks:
            ended += found.tasks
        assert self.query("SELECT * FROM signal_wait WHERE is_fresh") == []
        return ended

    def states(self, run: int | None = None) -> dict[str, S]:
        return task_states(self.store, run or self.tasks.run)

    def value(self, name: str = "wait") -> tuple[Any, Any]:
        """What a sensor has left: the value and the version."""
        read = self.store.tasks.pull_xcom
        return tuple(read(DagRunId(self.tasks.run), name, key) for key in ("return_value", "version"))  # type: ignore[return-value]


@pytest.fixture
def waits(store: Store, query: Query) -> Waits:
    return Waits(store, query)


def test_a_task_that_waits_in_the_database_has_no_log(waits: Waits) -> None:
    def no_log() -> str | None:
        return waits.store.inspect.task(waits.store.inspect.find_task("etl", "r1", "wait")).no_log

    assert no_log() == "it waits for its signal in the database: nothing runs that could write a log"
    waits.store.tasks.mark(instance_of(waits.store, waits.tasks.run, "wait"), "success")
    assert no_log() is not None


def test_a_signal_ends_the_task_that_waits_and_its_value_is_the_tasks(waits: Waits) -> None:
    assert waits.states() == {"wait": S.DEFERRED}
    assert waits.consider() == 0
    waits.send({"n": 1})
    assert waits.consider() == 1
    assert waits.states() == {"wait": S.SUCCESS}
    assert waits.value() == (b'{"n":1}', b"1")
    assert waits.query("SELECT * FROM signal_wait") == []
    assert waits.query("SELECT is_unseen FROM signal_key")[0]["is_unseen"] in (False, 0)
    assert waits.tasks.plan().ended == {waits.tasks.run: "success"}


def test_no_supervisor_claims_the_trigger_of_a_wait(waits: Waits) -> None:
    store, epoch = waits.store, waits.tasks.epoch
    assert store.claim_triggers(epoch, limit=10, queues=(*QUEUES, "signals", "")) == []
    assert not store.poll(epoch, QUEUES).claimable
    assert store.count_claimable(epoch, QUEUES) == 0
    assert store.tasks.remove_orphans() == []


def test_only_a_fitting_value_ends_the_wait_and_the_order_of_keys_does_not_matter(store: Store, query: Query) -> None:
    waits = Waits(store, query, sensor(value={"a": 1, "b": [2]}))
    waits.send("a", {"a": 1}, {"b": [2], "a": 1}, {"a": 1, "b": [2]})
    assert waits.consider() == 1
    assert waits.value()[1] == b"3"


def test_the_first_that_meets_a_predicate_ends_the_wait(store: Store, query: Query) -> None:
    wait = SignalWait("labels", predicate=Predicate("above", b"2"))
    start = StartTrigger(SIGNAL_TRIGGER, b"{}", "execute", b"{}", signal=wait)
    waits = Waits(store, query, TaskSpec("wait", "SignalSensor", start_trigger=start))
    waits.send(1, "3", 2, 4, 5)
    assert waits.consider() == 1
    assert waits.value() == (b"4", b"4")


def test_a_value_none_is_waited_for_and_leaves_no_value(store: Store, query: Query) -> None:
    waits = Waits(store, query, sensor(value=None))
    waits.send(0, "", None)
    assert waits.consider() == 1
    assert waits.value() == (None, b"3")


def test_what_was_sent_before_the_run_does_not_count(store: Store, query: Query) -> None:
    store.signals.send([new("labels", "old"), new("labels", "older")])
    waits = Waits(store, query)
    assert waits.consider() == 0
    waits.send("new")
    assert waits.consider() == 1
    assert waits.value() == (b'"new"', b"3")


def test_what_was_sent_after_the_run_was_created_and_before_the_task_began_counts(store: Store, query: Query) -> None:
    waits = Waits(store, query, begins=False)
    waits.send("early")
    waits.tasks.plan()
    assert waits.consider() == 1
    assert waits.value() == (b'"early"', b"1")


def test_with_since_latest_the_newest_before_the_run_counts_and_no_older(store: Store, query: Query) -> None:
    store.signals.send([new("labels", "old"), new("labels", "newest")])
    waits = Waits(store, query, sensor(since="latest"), sensor("old", "old", since="latest"))
    assert waits.consider() == 1
    assert waits.value() == (b'"newest"', b"2")
    assert waits.states()["old"] is S.DEFERRED
    waits.send("old")
    assert waits.consider() == 1


def test_a_signal_for_one_run_ends_the_waits_of_that_run_alone(waits: Waits) -> None:
    other = waits.store.tasks.create_run("etl", "other")
    assert other is not None
    waits.tasks.plan()
    waits.send("for the other", dag_run=other)
    assert waits.consider() == 1
    assert (waits.states()["wait"], waits.states(other)["wait"]) == (S.DEFERRED, S.SUCCESS)
    waits.send("for all")
    assert waits.consider() == 1
    assert waits.value() == (b'"for all"', b"2")


def test_namespaces_are_apart(store: Store, query: Query) -> None:
    waits = Waits(store, query, sensor(namespace="mine"))
    waits.send(1)
    assert waits.consider() == 0
    waits.send(2, namespace="mine")
    assert waits.consider() == 1


def test_many_waits_are_considered_in_several_transactions(store: Store, query: Query) -> None:
    waits = Waits(store, query, *(sensor(f"t{number}", number % 2) for number in range(25)))
    waits.send(0)
    ended = [store.scheduling.consider_signals(waits.tasks.epoch, limit=4) for _ in range(14)]
    assert sum(one.tasks for one in ended) == 13
    assert not ended[-1].has_more
    assert set(waits.states().values()) == {S.SUCCESS, S.DEFERRED}
    waits.send(1)
    assert waits.consider() == 12


def test_a_value_behind_many_others_is_found(store: Store, query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(considering, "PAGE_VERSIONS_MAX", 3)
    waits = Waits(store, query, sensor(value="x"))
    waits.send(*range(7))
    assert waits.consider() == 0
    waits.send(*range(4), "x", "x")
    assert waits.consider() == 1
    assert waits.value()[1] == b"12"


def test_a_task_that_is_cleared_waits_anew_from_the_creation_of_its_run_on(waits: Waits) -> None:
    clear(waits.store, waits.tasks.run, "wait")
    waits.tasks.plan()
    waits.send("a")
    assert waits.consider() == 1
    waits.send("b")
    clear(waits.store, waits.tasks.run, "wait")
    waits.tasks.plan()
    assert waits.consider() == 1
    assert waits.value() == (b'"a"', b"1")
    assert waits.query("SELECT * FROM signal_wait") == []


def test_a_wait_that_times_out_is_resumed_to_fail_and_no_signal_ends_it(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    waits = Waits(store, query, sensor(timeout_s=60.0))
    clock.advance(61)
    assert store.tasks.time_out(waits.tasks.epoch) == [waits.tasks.a]
    waits.send("late")
    assert waits.consider() == 0
    (task,) = waits.tasks.dispatch()
    assert task.next_method == "__fail__"


def test_a_task_that_a_file_has_got_meanwhile_counts_from_the_time_of_the_run(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    store.signals.send([new("labels", "old")])
    clock.advance(1)
    waits = Waits(store, query, TaskSpec("a", "Op"))
    clock.advance(1)
    waits.send("new")
    store.tasks.save_file(waits.tasks.epoch, "etl.py", [DagSpec("etl", tasks=(TaskSpec("a", "Op"), sensor()))])
    waits.tasks.plan()
    assert waits.consider() == 1
    assert waits.value() == (b'"new"', b"2")


# --- nothing falls in between ---------------------------------------------------------------------


def test_a_version_that_is_committed_while_a_wait_begins_is_considered(
    postgres_url: str, secrets: Any, query: Query, store: Store
) -> None:
    if store.database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    waits = Waits(store, query, begins=False)
    with Store(open_engine(postgres_url), secrets=secrets) as other, other.database.writing() as tx:
        sending.send(tx, [new("labels", "between")])
        waits.tasks.plan()  # it does not wait, and does not see the signal
        assert waits.states() == {"wait": S.DEFERRED}
        assert store.scheduling.consider_signals(waits.tasks.epoch).tasks == 0
    assert waits.consider() == 1
    assert waits.value() == (b'"between"', b"1")


def test_a_version_that_is_committed_after_the_creation_of_the_run_counts_though_it_was_begun_before(
    postgres_url: str, secrets: Any, query: Query, store: Store
) -> None:
    if store.database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    store.signals.send([new("labels", "old")])
    with Store(open_engine(postgres_url), secrets=secrets) as other, other.database.writing() as tx:
        sending.send(tx, [new("labels", "begun before")])
        waits = Waits(store, query)
        assert waits.store.scheduling.consider_signals(waits.tasks.epoch).tasks == 0
    assert waits.consider() == 1
    assert waits.value() == (b'"begun before"', b"2")


def test_a_key_is_not_unmarked_while_it_is_sent_to(postgres_url: str, secrets: Any, query: Query, store: Store) -> None:
    if store.database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    waits = Waits(store, query, sensor(value="x"))
    waits.send("a")
    with Store(open_engine(postgres_url), secrets=secrets) as other, other.database.writing() as tx:
        sending.send(tx, [new("labels", "x")])
        for _ in range(3):
            assert store.scheduling.consider_signals(waits.tasks.epoch).tasks == 0
    assert waits.consider() == 1


@pytest.mark.usefixtures("patient_sqlite")
def test_every_wait_ends_while_others_send_begin_and_consider(
    store: Store, query: Query, open_store: OpenStore
) -> None:
    count = 20
    waits = Waits(store, query, *(sensor(f"t{number}", number) for number in range(count)), begins=False)
    epochs = [waits.tasks.epoch, waits.tasks.register()]
    failed: list[BaseException] = []
    done = threading.Event()

    def consider(epoch: Any) -> None:
        try:
            mine = open_store()
            while not done.is_set():
                mine.scheduling.consider_signals(epoch, limit=3)
        except BaseException as error:
            failed.append(error)

    def send() -> None:
        try:
            mine = open_store()
            for number in reversed(range(count)):
                mine.signals.send([new("labels", number), new("other", number)])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=consider, args=(epoch,)) for epoch in epochs]
    sender = threading.Thread(target=send)
    for thread in (*threads, sender):
        thread.start()
    waits.tasks.plan()
    sender.join(WITHIN_S)
    done.set()
    for thread in threads:
        thread.join(WITHIN_S)
    assert failed == []
    waits.consider()
    assert set(waits.states().values()) == {S.SUCCESS}
    events = query("SELECT trigger_id FROM trigger_event")
    assert len(events) == len({row["trigger_id"] for row in events}) == count


# --- what is kept, and forgotten ------------------------------------------------------------------


def test_what_a_wait_has_not_seen_is_neither_trimmed_nor_cleaned(
    open_store: OpenStore, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "VERSIONS_KEPT_MAX", 2)
    clock = Clock()
    store = open_store(clock=clock)
    waits = Waits(store, query, sensor(value="x"))
    for value in ("x", 2, 3, 4):
        waits.send(value)
    clock.pass_days(40)
    assert clean(store, 30) == 0
    assert len(versions(store, "labels")) == 4
    waits.tasks.epoch = waits.tasks.register()  # it was silent for so long that the clean has fenced it
    assert waits.consider() == 1
    assert clean(store, 30) == 0, "if the sensor is cleared, it waits for these again"
    waits.tasks.plan()
    assert clean(store, 30) == 3
    assert versions(store, "labels") == [(4, 4)]


def test_a_key_that_a_run_counts_on_is_not_forgotten(waits: Waits) -> None:
    waits.send("a")
    with pytest.raises(SignalKeyInUse, match="the key 'labels' is in use: the task wait of run r1 of etl waits for it"):
        waits.store.signals.forget("labels")
    waits.consider()
    with pytest.raises(SignalKeyInUse, match="run r1 of etl has not ended, and may come to wait for it"):
        waits.store.signals.forget("labels")
    waits.tasks.plan()
    assert waits.store.signals.forget("labels") == 1
    assert waits.store.signals.send([new("labels")]) == [SentSignal(1, True)]


def test_a_clean_of_runs_and_triggers_takes_their_waits_with_them(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    waits = Waits(store, query)
    store.tasks.cancel_run(waits.tasks.run)
    clock.pass_days(40)
    deleted: dict[str, int] = {}
    for _, cleaned in store.cleaning.clean(30 * 86_400.0):
        deleted |= cleaned.rows
    assert deleted["signal_start"] == 1
    assert deleted["signal_wait"] == 1
    assert query("SELECT * FROM signal_wait") == query("SELECT * FROM signal_start") == []


def test_why_says_what_a_sensor_waits_for(waits: Waits) -> None:
    store = waits.store
    task = store.inspect.find_task("etl", "r1", "wait")
    answer = store.inspect.why_task(task)
    text = str(answer)
    assert "it waits for a signal under the key 'labels', later than version 0; the newest is 0" in text
    waits.send("a", dag_run=DagRunId(waits.tasks.run + 1))
    assert "the newest is 1" in str(store.inspect.why_task(task))
    assert [problem for problem in store.inspect.status() if "signals" in str(problem)] == []


def test_the_commit_of_a_wait_that_is_repeated_changes_nothing(waits: Waits) -> None:
    waits.send("a")
    assert waits.consider() == 1
    assert waits.consider() == 0
    assert instance_of(waits.store, waits.tasks.run, "wait") == waits.tasks.a
    assert len(waits.query("SELECT * FROM trigger_event")) == 1
