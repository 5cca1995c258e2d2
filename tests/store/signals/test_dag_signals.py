"""Runs for signals: `OnSignal` schedules in the store (I32), and signals that end runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query, register
from tests.store.scheduling.test_schedules import no_query
from tests.store.signals.rules_harness import GO, is_, ruled
from tests.store.signals.test_sending import new
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.rules import SignalRule
from headgate.protocol.messages.schedules import SignalSchedule
from headgate.protocol.values import decode_value
from headgate.store.db.engine import open_engine
from headgate.store.errors import NoSuchRow, SignalKeyInUse
from headgate.store.ids import Epoch
from headgate.store.scheduling import considering
from headgate.store.signals import sending
from headgate.store.store import Store

EACH = SignalSchedule((GO,))


class Dags:
    """A store, its clock, and a supervisor that considers signals and makes runs."""

    def __init__(self, open_store: Callable[..., Store], query: Query) -> None:
        self.clock = Clock()
        self.store = open_store(clock=self.clock)
        self.query = query
        self.epoch = register(self.store)

    def save(self, schedule: Any, name: str = "d", **changes: Any) -> None:
        spec = DagSpec(name, schedule, **{"tasks": (TaskSpec("a", "Op"),), **changes})
        self.store.tasks.save_file(self.epoch, f"{name}.py", [spec])
        self.settle()

    def send(self, key: str = "go", *values: Any, **fields: Any) -> None:
        self.store.signals.send([new(key, value, **fields) for value in values or (None,)])

    def settle(self, **limits: int) -> list[str]:
        """Do what is to be done with signals until nothing is; return the ids of new runs, in their order."""
        made: list[str] = []
        while True:
            considered = self.store.scheduling.consider_signals(self.epoch)
            runs = self.store.scheduling.create_event_runs(self.epoch, **limits)
            made += [run_id for _, run_id in runs.made]
            if not (considered.has_more or runs.made):
                return made

    def end_all(self) -> None:
        self.store.scheduling.plan(self.epoch)
        for task in self.store.tasks.dispatch(self.epoch, limit=99, queues=QUEUES).tasks:
            ends.succeed(self.store.tasks, self.epoch, task.id, task.token)
        self.store.scheduling.plan(self.epoch)

    def runs(self, dag: str = "d") -> list[list[Any]]:
        """The values of the signals of each run of a DAG, in the order of the runs."""
        rows = self.query(
            "SELECT dag_run.id AS run, value FROM dag_run JOIN dag ON dag.id = dag_run.dag_id "
            "LEFT JOIN dag_signal ON dag_run.id = dag_run_id AND NOT is_superseded WHERE dag.name = :dag "
            "ORDER BY dag_run.id, dag_signal.id",
            dag=dag,
        )
        found: dict[int, list[Any]] = {}
        for row in rows:
            found.setdefault(row["run"], []).append(None if row["value"] is None else decode_value(bytes(row["value"])))
        return list(found.values())

    def waiting(self) -> int:
        return len(self.query("SELECT id FROM dag_signal WHERE dag_run_id IS NULL"))


@pytest.fixture
def dags(open_store: OpenStore, query: Query) -> Dags:
    return Dags(open_store, query)


# --- which signals, and which runs ---------------------------------------------------------------


def test_each_signal_since_the_dag_was_parsed_has_a_run(dags: Dags) -> None:
    dags.send("go", "early")
    dags.save(EACH)
    dags.send("go", 1, 2)
    dags.send("other", 3)
    made = dags.settle()
    assert made == [f"signal__{row['id']}" for row in dags.query("SELECT id FROM dag_signal ORDER BY id")]
    assert dags.settle() == []
    assert dags.runs() == [[1], [2]]
    dags.store.scheduling.plan(dags.epoch)
    first, second = dags.store.tasks.dispatch(dags.epoch, limit=9, queues=QUEUES).tasks
    assert (first.is_of_signals, first.run_id) == (True, made[0])
    (signal,) = dags.store.tasks.start_signals(second.id).of_run
    assert (signal.key, signal.version, decode_value(signal.value)) == ("go", 3, 2)


def test_with_latest_the_newest_signal_from_before_counts(dags: Dags) -> None:
    dags.send("go", 1, 2)
    dags.save(SignalSchedule((SignalRule("go", since="latest"),)))
    assert dags.runs() == [[2]]
    dags.save(SignalSchedule((SignalRule("go", since="latest"),)), description="changed")
    assert dags.runs() == [[2]], "a DAG that is parsed again goes on where it stood"


def test_only_what_meets_the_predicate_and_is_for_all_runs_has_a_run(dags: Dags) -> None:
    dags.save(SignalSchedule((SignalRule("go", predicate=is_("yes")),)))
    run = dags.store.tasks.create_run("d", "by hand")
    dags.send("go", "no", "yes")
    dags.send("go", "yes", dag_run=run)
    dags.settle()
    assert dags.runs() == [[None], ["yes"]]


def test_contracts_are_those_of_assets(dags: Dags) -> None:
    both = (GO, SignalRule("stay"))
    dags.save(SignalSchedule(both, "all"), "all")
    dags.save(SignalSchedule(both, "latest"), "latest")
    dags.save(SignalSchedule((GO,), "batch", 3, 60.0), "batch")
    dags.send("go", 1, 2)
    dags.settle()
    assert (dags.runs("all"), dags.runs("latest"), dags.runs("batch")) == ([], [[2]], [])
    dags.send("stay", 3)
    dags.settle()
    assert (dags.runs("all"), dags.runs("latest"), dags.runs("batch")) == ([[1, 2, 3]], [[2], [3]], [])
    due = dags.store.scheduling.next_due(dags.epoch).in_s
    assert due is not None
    assert 0 < due <= 60
    dags.clock.advance(60)
    assert (dags.store.scheduling.next_due(dags.epoch).in_s or 0) <= 0
    dags.settle()
    assert dags.runs("batch") == [[1, 2]]


def test_signals_wait_while_the_dag_is_paused_or_has_as_many_runs_as_it_may(dags: Dags) -> None:
    dags.save(EACH, max_active_runs=1)
    dags.store.tasks.set_paused("d", is_paused=True)
    dags.send("go", 1, 2)
    dags.settle()
    assert (dags.runs(), dags.waiting()) == ([], 2)
    dags.store.tasks.set_paused("d", is_paused=False)
    assert dags.store.scheduling.next_due(dags.epoch).has_waiting
    dags.settle()
    assert (dags.runs(), dags.waiting()) == ([[1]], 1)
    dags.end_all()
    dags.settle()
    assert dags.runs() == [[1], [2]]
    (line,) = dags.store.inspect.dags()
    assert (line.schedule, line.waiting_events) == ("each signal of 'go'", 0)


@pytest.mark.parametrize("change", ["paused", "another schedule"])
def test_a_run_is_made_by_the_terms_that_hold_behind_the_lock(
    dags: Dags, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The DAG is changed between the look at what waits and the lock of the DAG."""
    dags.save(EACH)
    dags.send("go", 1, 2)
    while dags.store.scheduling.consider_signals(dags.epoch).has_more:
        pass
    assert dags.waiting() == 2
    database = dags.store.scheduling.database
    leased = database.leased

    def changed_before(epoch: Epoch) -> Any:
        monkeypatch.undo()
        if change == "paused":
            dags.store.tasks.set_paused("d", is_paused=True)
        else:
            later = SignalSchedule(EACH.rules, "batch", batch_count=5)
            spec = DagSpec("d", later, tasks=(TaskSpec("a", "Op"),))
            dags.store.tasks.save_file(dags.epoch, "d.py", [spec])
        return leased(epoch)

    monkeypatch.setattr(database, "leased", changed_before)
    assert dags.store.scheduling.create_event_runs(dags.epoch).made == []
    assert database.leased == leased, "it was changed"
    assert dags.waiting() == 2


def test_a_rule_that_the_dag_has_no_more_leaves_nothing_that_waits(dags: Dags) -> None:
    dags.save(EACH)
    dags.store.tasks.set_paused("d", is_paused=True)
    dags.send("go", 1)
    dags.settle()
    dags.save(SignalSchedule((SignalRule("stay"),)))
    assert dags.waiting() == 0
    dags.save(None)
    dags.send("stay", 2)
    dags.store.tasks.set_paused("d", is_paused=False)
    dags.settle()
    assert dags.runs() == []


def test_more_than_may_wait_lose_the_oldest(dags: Dags, monkeypatch: pytest.MonkeyPatch) -> None:
    dags.save(EACH)
    dags.store.tasks.set_paused("d", is_paused=True)
    for module in ("signals.dag_signals", "scheduling.new_runs"):
        monkeypatch.setattr(f"headgate.store.{module}.WAITING_EVENTS_MAX", 2)
    dags.send("go", 1, 2, 3, 4, 5)
    while dags.store.scheduling.consider_signals(dags.epoch).has_more:
        pass
    assert dags.store.scheduling.create_event_runs(dags.epoch).dropped == {"d": 3}
    dags.store.tasks.set_paused("d", is_paused=False)
    dags.settle()
    assert dags.runs() == [[4], [5]]


def test_the_signals_of_one_rule_drop_no_other_rules_only_one(dags: Dags, monkeypatch: pytest.MonkeyPatch) -> None:
    dags.save(SignalSchedule((SignalRule("slow"), SignalRule("go")), "all"))
    for module in ("signals.dag_signals", "scheduling.new_runs"):
        monkeypatch.setattr(f"headgate.store.{module}.WAITING_EVENTS_MAX", 2)
    dags.store.tasks.set_paused("d", is_paused=True)
    dags.send("slow", 1)
    dags.send("go", 2, 3, 4, 5)
    while dags.store.scheduling.consider_signals(dags.epoch).has_more:
        pass
    assert dags.store.scheduling.create_event_runs(dags.epoch).dropped == {"d": 3}
    dags.store.tasks.set_paused("d", is_paused=False)
    dags.settle()
    assert dags.runs() == [[1, 5]]


def test_values_are_kept_though_their_signals_are_cleaned_away(dags: Dags, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "VERSIONS_KEPT_MAX", 1)
    monkeypatch.setattr(considering, "PAGE_VERSIONS_MAX", 1)
    dags.save(EACH)
    dags.send("go", 1, 2, 3)
    assert len(dags.query("SELECT id FROM signal")) == 3, "none that the DAG was not held against"
    dags.settle()
    dags.send("go", 4)
    assert len(dags.query("SELECT id FROM signal")) == 1
    dags.settle()
    assert dags.runs() == [[1], [2], [3], [4]]
    dags.end_all()
    dags.clock.advance(1e6)
    removed: dict[str, int] = {}
    for _, cleaned in dags.store.cleaning.clean(3600.0, kinds=["runs"]):
        removed |= cleaned.rows
    assert (removed["dag_run"], removed["dag_signal"]) == (4, 4)


def test_a_key_by_which_a_dag_has_runs_is_not_forgotten_and_says_so(dags: Dags) -> None:
    dags.save(EACH)
    dags.send()
    with pytest.raises(SignalKeyInUse, match="the key 'go' is in use: the DAG 'd' has runs for its signals"):
        dags.store.signals.forget("go")
    (waits,) = dags.store.signals.waiting("go", limit=9)
    assert (waits.dag, waits.run_id, waits.task_id, waits.has_rule) == ("d", None, None, True)


def test_a_dag_that_is_in_no_file_does_not_keep_its_key_and_goes_on_when_it_is_there_again(dags: Dags) -> None:
    dags.save(EACH)
    dags.store.tasks.save_file(dags.epoch, "d.py", [])
    dags.send("go", 1, 2)
    assert dags.settle() == []
    assert dags.waiting() == 2
    assert dags.store.signals.waiting("go", limit=9) == []
    assert dags.store.signals.forget("go") == 2
    dags.send("go", 3)
    dags.save(EACH)
    dags.settle()
    assert dags.runs() == [[1], [2], [3]], "each in one, also those whose key was forgotten"
    with pytest.raises(SignalKeyInUse, match="the DAG 'd' has runs"):
        dags.store.signals.forget("go")


def test_of_several_supervisors_one_makes_the_run_of_a_signal(postgres_url: str, secrets: Any) -> None:
    dags = Dags(lambda clock: Store(open_engine(postgres_url), secrets=secrets, clock=clock), no_query)
    dags.save(EACH, max_active_runs=1000)
    barrier = Barrier(3)

    def work(number: int) -> list[Any]:
        made = []
        with Store(open_engine(postgres_url), secrets=secrets, clock=dags.clock) as store:
            barrier.wait(WITHIN_S)
            for index in range(30):
                if number == 0:
                    store.signals.send([new("go", index)])
                store.scheduling.consider_signals(dags.epoch)
                made += store.scheduling.create_event_runs(dags.epoch, limit=3).made
        return made

    with ThreadPoolExecutor(3) as pool:
        made = [run_id for found in pool.map(work, range(3)) for _, run_id in found]
    made += dags.settle()
    assert len(made) == len(set(made)) == 30


def test_many_signals_for_one_dag_hold_up_the_runs_of_no_other(dags: Dags) -> None:
    for name in ("flooded", "third", "fourth"):
        dags.save(SignalSchedule((SignalRule(name),)), name, max_active_runs=1000)
    for key in ("flooded", "flooded", "flooded", "flooded", "third", "flooded", "flooded", "fourth", "flooded"):
        dags.send(key)
        dags.clock.advance(1)
    dags.store.scheduling.consider_signals(dags.epoch)
    first, second = (
        [name for name, _ in dags.store.scheduling.create_event_runs(dags.epoch, limit=2).made] for _ in range(2)
    )
    assert (first, second) == (["flooded", "third"], ["flooded", "fourth"])


# --- signals that end runs -----------------------------------------------------------------------

DRAIN = SignalRule("drain", action="STOP")


def run_of(dags: Dags, run_id: str) -> tuple[str, bool]:
    (row,) = dags.query("SELECT state, is_ending FROM dag_run WHERE run_id = :run", run=run_id)
    return row["state"], bool(row["is_ending"])


def plan(dags: Dags) -> None:
    while dags.store.scheduling.plan(dags.epoch).evaluated + dags.store.scheduling.consider_signals(dags.epoch).rules:
        pass
    dags.settle()


def test_a_signal_ends_a_run_of_tasks_that_signals_start(dags: Dags) -> None:
    dags.save(None, tasks=(ruled(GO, name="job"),), end_on=(DRAIN,))
    dags.store.tasks.create_run("d", "one")
    plan(dags)
    dags.send("drain")
    with pytest.raises(SignalKeyInUse, match="run one of d has a rule about it, by which it ends"):
        dags.store.signals.forget("drain")
    plan(dags)
    plan(dags)
    assert run_of(dags, "one")[0] == "success"
    run = dags.store.tasks.create_run("d", "two")
    plan(dags)
    assert run_of(dags, "two") == ("running", False), "what was sent before the run is for others"
    assert [row["state"] for row in dags.query("SELECT state FROM task_instance WHERE dag_run_id = :r", r=run)] == [
        "none"
    ]


def test_a_run_that_is_to_end_waits_for_what_is_under_way_and_stops_endless_tasks(dags: Dags) -> None:
    tasks = (TaskSpec("batch", "Op"), TaskSpec("ingest", "Op", endless=True), ruled(GO, name="job"))
    dags.save(None, tasks=tasks, end_on=(DRAIN,))
    dags.store.tasks.create_run("d", "one")
    plan(dags)
    (batch,) = dags.store.tasks.dispatch(dags.epoch, limit=1, queues=QUEUES).tasks
    dags.send("drain")
    plan(dags)
    plan(dags)
    assert run_of(dags, "one") == ("running", True)
    ends.succeed(dags.store.tasks, dags.epoch, batch.id, batch.token)
    plan(dags)
    states = {row["task_id"]: row["state"] for row in dags.query("SELECT task_id, state FROM task_instance")}
    assert states == {"batch": "success", "ingest": "success", "job": "skipped"}
    assert run_of(dags, "one")[0] == "success"


def test_a_rule_that_the_dag_gets_later_ends_its_open_runs(dags: Dags) -> None:
    dags.save(None, tasks=(ruled(GO, name="job"),))
    dags.store.tasks.create_run("d", "one")
    plan(dags)
    dags.save(None, tasks=(ruled(GO, name="job"),), end_on=(DRAIN,))
    plan(dags)
    dags.send("drain")
    plan(dags)
    plan(dags)
    assert run_of(dags, "one")[0] == "success"


# --- since the run before ------------------------------------------------------------------------


def test_a_rule_goes_on_where_that_of_the_run_before_stood(dags: Dags) -> None:
    rule = SignalRule("go", since="last_run")
    dags.save(None, tasks=(ruled(rule, name="job", overlap="each"), TaskSpec("plain", "Op")))
    dags.send("go", "before any run")
    dags.store.tasks.create_run("d", "one")
    plan(dags)
    dags.end_all()
    dags.send("go", 1)
    plan(dags)
    assert run_of(dags, "one")[0] == "success"
    dags.store.tasks.create_run("d", "two")
    dags.send("go", 2)
    plan(dags)
    started = []
    for _ in range(2):
        (task,) = [t for t in dags.store.tasks.dispatch(dags.epoch, limit=9, queues=QUEUES).tasks if t.task_id == "job"]
        started += [decode_value(one.value) for one in dags.store.tasks.start_signals(task.id).signals]
        ends.succeed(dags.store.tasks, dags.epoch, task.id, task.token)
        plan(dags)
    assert started == [1, 2]


def test_while_the_run_before_is_open_signals_count_since_the_creation_of_the_run(dags: Dags) -> None:
    rule = SignalRule("go", since="last_run")
    dags.save(None, tasks=(ruled(rule, name="job", overlap="each"),))
    dags.store.tasks.create_run("d", "one")
    plan(dags)
    dags.send("go", 1)
    dags.store.tasks.create_run("d", "two")
    dags.send("go", 2)
    plan(dags)
    tasks = dags.store.tasks.dispatch(dags.epoch, limit=9, queues=QUEUES).tasks
    found = {
        task.run_id: [decode_value(one.value) for one in dags.store.tasks.start_signals(task.id).signals]
        for task in tasks
    }
    assert found == {"one": [1], "two": [2]}


# --- a run with a signal -------------------------------------------------------------------------


def started_by(dags: Dags) -> dict[str, list[Any]]:
    """The signals with which the tasks of each run have started that can be dispatched now."""
    plan(dags)
    return {
        task.run_id: [decode_value(one.value) for one in dags.store.tasks.start_signals(task.id).signals]
        for task in dags.store.tasks.dispatch(dags.epoch, limit=9, queues=QUEUES).tasks
    }


def test_a_signal_starts_a_run_with_it_unless_one_is_open(dags: Dags) -> None:
    dags.save(None, tasks=(ruled(GO, name="job"),))
    dags.send("go", "before")
    signals = dags.store.signals
    (sent,), run_id = signals.send_and_start([new("go", 1)], "d")
    assert (sent.version, sent.is_new, run_id) == (2, True, f"manual__{dags.clock().isoformat()}")
    assert started_by(dags) == {run_id: [1]}
    (sent,), none = signals.send_and_start([new("go", 2, dedup="two")], "d")
    assert (sent.version, none, len(dags.runs())) == (3, None, 1)
    signals.end_run(dags.query("SELECT id FROM dag_run")[0]["id"])
    assert signals.send_and_start([new("go", 2, dedup="two")], "d")[1] is None, "it was sent before"
    (_, last), second = signals.send_and_start([new("go", 3), new("go", 4)], "d")
    assert (last.version, second) == (5, f"{run_id}__{str(second).rpartition('__')[2]}")
    assert started_by(dags) == {second: [4]}, "a run that is to end is not open"


def test_nothing_is_sent_for_a_dag_that_is_not_there(dags: Dags) -> None:
    with pytest.raises(NoSuchRow, match="no DAG named 'd'"):
        dags.store.signals.send_and_start([new("go", 1)], "d")
    assert dags.query("SELECT id FROM signal") == []


def test_of_several_who_start_a_run_one_does_and_each_signal_counts(postgres_url: str, secrets: Any) -> None:
    dags = Dags(lambda clock: Store(open_engine(postgres_url), secrets=secrets, clock=clock), no_query)
    dags.save(None, tasks=(ruled(GO, name="job", overlap="each"),))
    barrier = Barrier(4)

    def send(number: int) -> str | None:
        with Store(open_engine(postgres_url), secrets=secrets, clock=dags.clock) as store:
            barrier.wait(WITHIN_S)
            return store.signals.send_and_start([new("go", number)], "d")[1]

    with ThreadPoolExecutor(4) as pool:
        (run_id,) = [found for found in pool.map(send, range(4)) if found is not None]
    started: list[Any] = []
    for _ in range(4):
        plan(dags)
        (task,) = dags.store.tasks.dispatch(dags.epoch, limit=9, queues=QUEUES).tasks
        assert task.run_id == run_id
        started += [decode_value(one.value) for one in dags.store.tasks.start_signals(task.id).signals]
        ends.succeed(dags.store.tasks, dags.epoch, task.id, task.token)
    assert sorted(started) == [0, 1, 2, 3]
