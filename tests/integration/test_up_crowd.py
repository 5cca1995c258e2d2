"""Many at once: a thousand tasks that defer together, and hundreds of clears that race an event."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from tests.integration.conftest import StartStation
from tests.store import ends
from tests.store.harness import OpenStore, Query
from tests.supervisor.tasks_harness import WAIT, S, Tasks, clear, event_of
from tests.waiting import ALL_WITHIN_S, wait_until

from headgate.protocol.messages.dags import DEFAULT_POOL, DagSpec, TaskSpec

pytestmark = pytest.mark.campaign

RUNS, TASKS = 10, 100  # a thousand tasks in all
WORKERS = 4
RACES = 500

DAGS = f"""
from headgate.tasks import DAG
from users_tasks import Crowd

with DAG("crowd", max_active_runs={RUNS}):
    for number in range({TASKS}):
        Crowd(task_id=f"t{{number}}", pool="narrow")
"""


def test_a_thousand_tasks_defer_at_once_and_each_is_resumed_once_within_few_slots(start_station: StartStation) -> None:
    station = start_station(workers=str(WORKERS))
    station.store.tasks.set_pool("narrow", WORKERS)
    station.write("crowd.py", DAGS)
    station.wait_dag("crowd")
    begun = time.monotonic()
    runs = [station.run("crowd") for _ in range(RUNS)]
    most = 0

    def are(state: str) -> int:
        nonlocal most
        rows = station.query("SELECT state, count(*) AS n FROM task_instance GROUP BY state")
        counts = {row["state"]: int(row["n"]) for row in rows}
        most = max(most, counts.get("running", 0))
        return counts.get(state, 0)

    def wait_all(state: str) -> None:
        wait_until(lambda: are(state) == RUNS * TASKS, lambda: f"{are(state)} tasks are {state}", ALL_WITHIN_S)

    wait_all("deferred")
    deferred_s = time.monotonic() - begun
    fired_at = time.monotonic()
    for run in runs:
        run.say("fire")
    wait_all("success")
    print(f"all were deferred after {deferred_s:.1f} s, and had ended {time.monotonic() - fired_at:.1f} s later")
    once = {f"t{n} {word}": 1 for n in range(TASKS) for word in ("execute", "resumed")}
    assert [Counter(run.journal()) for run in runs] == [once] * RUNS
    assert most <= WORKERS
    assert station.stop() == 0


def test_of_a_clear_and_an_event_exactly_one_wins_each_time(open_store: OpenStore, query: Query) -> None:
    """Two stores, each with a connection and a thread of its own, released together by a barrier."""
    clearing, firing = open_store(), open_store()
    tasks = Tasks(clearing, query)
    clearing.tasks.cancel_run(tasks.run)
    race = DagSpec("race", max_active_runs=RACES, tasks=(TaskSpec("t", "Op"),))
    clearing.tasks.save_file(tasks.epoch, "race.py", [race])
    clearing.tasks.set_pool(DEFAULT_POOL, RACES)
    for number in range(RACES):
        clearing.tasks.create_run("race", f"r{number}")
    assert tasks.plan().scheduled == RACES
    for task in tasks.dispatch(limit=RACES):
        assert ends.defer(clearing.tasks, tasks.epoch, task.id, task.token, WAIT)
    firing.claim_triggers(tasks.epoch, limit=RACES, queues=("default",))
    waiting = {
        row["id"]: row["trigger_id"]
        for row in query("SELECT id, trigger_id FROM task_instance WHERE state = 'deferred'")
    }
    runs = {row["id"]: row["dag_run_id"] for row in query("SELECT id, dag_run_id FROM task_instance")}
    assert len(waiting) == RACES
    barrier = threading.Barrier(2)
    problems: list[BaseException] = []

    def fire() -> None:
        try:
            for trigger_id in waiting.values():
                barrier.wait()
                firing.store_slice(tasks.epoch, events=[event_of(trigger_id)])
        except BaseException as error:
            problems.append(error)
            barrier.abort()

    thread = threading.Thread(target=fire)
    thread.start()
    for task_id in waiting:
        barrier.wait()
        assert clear(clearing, runs[task_id], "t") == {"t": S.NONE}
    thread.join()
    assert problems == []
    first = Counter[str]()
    rows = {row["id"]: row for row in query("SELECT * FROM task_instance")}
    triggers = {row["id"]: row for row in query("SELECT * FROM trigger")}
    for task_id, trigger_id in waiting.items():
        row, trigger = rows[task_id], triggers[trigger_id]
        # The clear is the last word on the task; the trigger says who was first: the event finished it, or the clear
        # removed it. Never both, never none.
        assert (row["state"], row["trigger_id"], row["event_id"], row["next_method"]) == ("none", None, None, None)
        assert (trigger["finished_at"] is None) != (trigger["removed_at"] is None)
        first["event" if trigger["removed_at"] is None else "clear"] += 1
    assert len(list(clearing.inspect.events())) == RACES, "an event is stored whoever was first"
    assert first["event"] > 0
    assert first["clear"] > 0
    # None is stuck: all of them begin anew.
    assert tasks.plan().scheduled == RACES
    assert len(tasks.dispatch(limit=RACES)) == RACES
