"""What people look at: DAGs, runs, tasks and triggers, page by page, and the facts behind a "why"."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from tests.store import ends
from tests.store.harness import Query, register
from tests.supervisor.tasks_harness import WAIT, S, Tasks

from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, DagSpec, TaskSpec
from headgate.protocol.values import encode_value
from headgate.scheduling.why import RunnerEnds
from headgate.store.errors import NoSuchRow
from headgate.store.facts.supervisor_status import SupervisorStatus, encode_status
from headgate.store.inspect.dags import schedule_text
from headgate.store.inspect.why_facts import Liveness
from headgate.store.store import Store

LATER = datetime(2100, 1, 1, tzinfo=UTC)


# --- DAGs ----------------------------------------------------------------------------------------


def test_a_dag_is_listed_with_its_runs_and_a_broken_file_with_its_error(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    store.tasks.save_import_error(tasks.epoch, "etl.py", "SyntaxError: here")
    store.tasks.save_import_error(tasks.epoch, "new.py", "Traceback\nNameError")
    store.scheduling.plan(tasks.epoch)
    store.tasks.create_run("etl", "r2")

    etl, new = store.inspect.dags()

    assert (etl.name, etl.active_runs, etl.queued_runs, etl.last_run) == ("etl", 1, 1, "r2")
    assert (etl.tasks, etl.last_run_state, etl.import_error) == (1, "queued", "SyntaxError: here")
    assert (new.name, new.file, new.import_error) == (None, "new.py", "Traceback\nNameError")
    assert [line.name for line in store.inspect.dags(is_paused=False)] == ["etl"]
    assert store.inspect.dags(is_paused=True) == []
    assert len(store.inspect.dags(limit=1)) == 1


def test_a_dag_that_is_not_there_is_told_with_the_names_that_may_be_meant(store: Store, query: Query) -> None:
    Tasks(store, query)

    with pytest.raises(NoSuchRow, match=r"no DAG named 'elt'; did you mean etl\?"):
        store.inspect.dag("elt")
    with pytest.raises(NoSuchRow, match=r"no DAG named 'zzz'$"):
        store.inspect.dag("zzz")


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (None, "none"),
        (CronSchedule("0 3 * * *"), "0 3 * * *"),
        (CronSchedule("0 3 * * *", "Europe/Berlin"), "0 3 * * * (Europe/Berlin)"),
        (AssetSchedule(("a", "b")), "an event of all of a, b"),
        (AssetSchedule(("a",), "each"), "each event of a"),
        (AssetSchedule(("a",), "batch", 3, 60.0), "3 events or after 60 s of a"),
        (AssetSchedule(("a",), "latest"), "the latest event of a"),
    ],
)
def test_a_schedule_is_written_as_people_say_it(schedule: CronSchedule | AssetSchedule | None, text: str) -> None:
    assert schedule_text(DagSpec("d", schedule)) == text


# --- runs and tasks ------------------------------------------------------------------------------


@pytest.fixture
def many(store: Store, query: Query) -> Tasks:
    """Six runs ``r1`` to ``r6`` of one DAG with two tasks, and one of another DAG."""
    tasks = Tasks(store, query, tasks=(TaskSpec("a", "Op"), TaskSpec("b", "Op", upstream=("a",))))
    for number in range(2, 7):
        store.tasks.create_run("etl", f"r{number}")
    store.tasks.save_file(tasks.epoch, "other.py", [DagSpec("other", tasks=(TaskSpec("x", "Op"),))])
    store.tasks.create_run("other", "o1")
    return tasks


def test_runs_come_newest_first_and_page_by_page(many: Tasks) -> None:
    inspect = many.store.inspect
    first = inspect.runs(dag="etl", limit=4)
    rest = inspect.runs(dag="etl", beyond_id=first[-1].id)

    assert [run.run_id for run in [*first, *rest]] == ["r6", "r5", "r4", "r3", "r2", "r1"]
    assert first[0].tasks == {"none": 2}
    assert [run.run_id for run in inspect.runs(limit=1)] == ["o1"]


def test_runs_are_found_by_state_and_age(many: Tasks) -> None:
    inspect = many.store.inspect
    many.store.tasks.cancel_run(many.run)

    assert [run.run_id for run in inspect.runs(dag="etl", states=["failed"])] == ["r1"]
    assert len(inspect.runs(dag="etl", states=["queued", "failed"])) == 6
    assert inspect.runs(since=LATER) == []
    assert len(inspect.runs(since=LATER - timedelta(days=100 * 365))) == 7
    with pytest.raises(NoSuchRow, match="DAG"):
        inspect.runs(dag="nothing")


def test_tasks_of_a_run_come_in_its_order_and_those_of_many_newest_first(many: Tasks) -> None:
    inspect = many.store.inspect

    (a,) = inspect.tasks(dag="etl", run_id="r1", limit=1)
    (b,) = inspect.tasks(dag="etl", run_id="r1", beyond_id=a.id)
    assert (a.task_id, b.task_id) == ("a", "b")
    newest = inspect.tasks(dag="etl", limit=3)
    assert [(task.run_id, task.task_id) for task in newest] == [("r6", "b"), ("r6", "a"), ("r5", "b")]
    assert [task.run_id for task in inspect.tasks(dag="etl", beyond_id=newest[-1].id, limit=1)] == ["r5"]
    many.run_it()
    assert [task.run_id for task in inspect.tasks(states=[S.RUNNING])] == ["r1"]


def test_a_task_is_found_by_its_names_and_latest_is_the_newest_run(many: Tasks) -> None:
    inspect = many.store.inspect

    assert inspect.find_task("etl", "r1", "a").id == many.a
    assert inspect.find_task("etl", "latest", "a").run_id == "r6"
    for names, message in (
        (("elt", "r1", "a"), "no DAG named 'elt'; did you mean etl"),
        (("etl", "rr1", "a"), "no run named 'rr1' in the DAG etl; did you mean r1"),
        (("etl", "r1", "aa"), "no task named 'aa' in the run r1 of etl; did you mean a"),
    ):
        with pytest.raises(NoSuchRow, match=message):
            inspect.find_task(*names)


def test_a_run_that_is_named_latest_is_found_by_its_name(many: Tasks) -> None:
    many.store.tasks.create_run("etl", "latest")
    many.store.tasks.create_run("etl", "r7")

    assert many.store.inspect.run("etl", "latest").line.run_id == "latest"


def test_a_task_is_shown_with_its_xcoms_and_what_is_upstream_of_it(many: Tasks) -> None:
    inspect = many.store.inspect
    token = many.run_it()
    ends.succeed(many.store.tasks, many.epoch, many.a, token, xcoms={"k": encode_value(5, where="x")})

    a = inspect.task(inspect.find_task("etl", "r1", "a"))
    b = inspect.task(inspect.find_task("etl", "r1", "b"))

    assert (a.line.state, a.xcoms, a.upstream) == (S.SUCCESS, {"k": b"5"}, {})
    assert (b.upstream, b.trigger_rule, b.operator) == ({"a": S.SUCCESS}, "all_success", "Op")


def test_a_task_that_its_dag_no_longer_has_is_shown_all_the_same(many: Tasks) -> None:
    many.store.tasks.save_file(many.epoch, "etl.py", [])

    detail = many.store.inspect.task(many.store.inspect.find_task("etl", "r1", "a"))
    assert detail.line.task_id == "a"
    many.store.tasks.save_file(many.epoch, "etl.py", [DagSpec("etl", tasks=(TaskSpec("b", "Op"),))])
    detail = many.store.inspect.task(many.store.inspect.find_task("etl", "r1", "a"))
    assert (detail.operator, detail.upstream) == (None, None)


def test_pools_say_what_is_in_use_and_what_waits(many: Tasks) -> None:
    many.store.tasks.set_pool("small", 1)
    many.run_it()

    default, small = many.store.inspect.pools()

    assert (default.name, default.used, default.tasks, default.waiting) == ("default_pool", 1, 1, 6)
    assert (small.name, small.slots, small.used) == ("small", 1, 0)


# --- triggers ------------------------------------------------------------------------------------


def test_triggers_say_whose_they_are_and_ended_ones_only_when_asked_for(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    store.add_watcher("orders", "a.B", {})
    _, waits = tasks.defer_it()
    lone = add_orphan(query)

    by_id = {line.id: line for line in store.inspect.triggers()}
    assert (by_id[waits].dag, by_id[waits].run_id, by_id[waits].task_id) == ("etl", "r1", "a")
    assert "orders" in {line.name for line in by_id.values()}
    assert by_id[lone].name == f"trigger-{lone}"
    assert [line.id for line in store.inspect.orphans()] == [lone]
    assert [line.id for line in store.inspect.slow(longer_than_s=0.0)] == [waits]
    assert store.inspect.slow(longer_than_s=3600.0) == []
    store.tasks.mark(tasks.a, "success")
    assert waits not in {line.id for line in store.inspect.triggers()}
    assert waits in {line.id for line in store.inspect.triggers(with_ended=True)}


def test_orphans_are_removed_by_a_user_without_an_epoch(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, waits = tasks.defer_it()
    watcher = store.add_watcher("orders", "a.B", {})
    lone = add_orphan(query)

    assert store.tasks.remove_orphans() == [lone]

    assert store.tasks.remove_orphans() == []
    assert {line.id for line in store.inspect.triggers()} == {waits, watcher}


def add_orphan(query: Query) -> int:
    query(
        "INSERT INTO \"trigger\" (classpath, kwargs, created_date) VALUES ('a.B', 'x', '2026-01-01 00:00:00.000000+00')"
    )
    (row,) = query('SELECT max(id) AS id FROM "trigger"')
    # As SQLite's times are written: without an offset.
    query('UPDATE "trigger" SET created_date = (SELECT max(latest_heartbeat) FROM triggerer) WHERE id = :id', **row)
    return int(row["id"])


def test_a_trigger_is_found_by_its_number_or_its_watcher(store: Store) -> None:
    id_ = store.add_watcher("orders", "a.B", {"n": 1})

    find = store.inspect.find_trigger
    assert find(str(id_)) == find(f"trigger-{id_}") == find("orders") == id_
    assert store.inspect.trigger(id_).events == 0
    assert store.inspect.trigger_kwargs(id_) == b'{"n":1}'
    for unknown in ("nobody", "99999", "9" * 30, "٣"):
        with pytest.raises(NoSuchRow):
            find(unknown)


# --- why -----------------------------------------------------------------------------------------


def test_the_facts_of_a_why_are_those_of_the_database(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    ref = store.inspect.find_task("etl", "r1", "a")

    def reason() -> str:
        return store.inspect.why_task(ref).reason

    assert reason() == "run_queued"
    store.scheduling.plan(tasks.epoch)
    assert reason() == "no_free_worker"
    store.tasks.set_paused("etl", is_paused=True)
    assert reason() == "dag_paused"
    store.tasks.set_paused("etl", is_paused=False)
    store.tasks.set_pool("default_pool", 0)
    assert reason() == "larger_than_pool"
    store.tasks.set_pool("default_pool", 1)
    (given,) = tasks.dispatch()
    assert reason() == "running"
    ends.defer(store.tasks, tasks.epoch, given.id, given.token, WAIT)
    assert reason() == "unclaimed"
    (claimed,) = store.claim_triggers(tasks.epoch, limit=1, queues=["default"])
    assert reason() == "running"
    assert store.inspect.why_trigger(claimed.id).reason == "running"
    query("UPDATE triggerer SET latest_heartbeat = :then", then="2026-01-01 00:00:00.000000")
    assert reason() == "owner_silent"
    store.release_triggerer(tasks.epoch)
    assert reason() == "no_supervisor"


def test_a_why_knows_what_a_scheduler_has_failed_with(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    ref = store.inspect.find_task("etl", "r1", "a")
    status = SupervisorStatus(passed_over=(("run etl r1", "KeyError: 'x'"),), passed_over_in_all=1)
    store.heartbeat(tasks.epoch, encode_status(status))
    answer = store.inspect.why_task(ref)
    assert answer.reason == "passed_over"
    assert "the run etl r1, and passes over it for a while: KeyError: 'x'" in answer.headline
    store.heartbeat(tasks.epoch, encode_status(SupervisorStatus()))
    assert store.inspect.why_task(ref).reason == "run_queued"


def test_a_why_of_a_trigger_knows_that_the_runner_of_its_supervisor_ends_again_and_again(
    store: Store, query: Query
) -> None:
    epoch = register(store)
    trigger_id = store.add_watcher("w", "a.B", {})
    store.claim_triggers(epoch, limit=1, queues=["default"])
    ends = RunnerEnds(3, 600.0, "killed by SIGKILL", 8.0)
    store.heartbeat(epoch, encode_status(SupervisorStatus(runner="absent", runner_ends=ends)))
    answer = store.inspect.why_trigger(trigger_id)
    assert answer.reason == "runner_ends"
    assert f"the runner of supervisor {epoch} (pid 1 on h), which runs it, has {ends}" == answer.headline
    assert [problem.reason for problem in store.inspect.status()] == ["runner_ends"]
    store.heartbeat(epoch, encode_status(SupervisorStatus(runner="running")))
    assert store.inspect.why_trigger(trigger_id).reason == "running"
    assert store.inspect.status() == []


def test_a_supervisor_that_drains_is_told(store: Store, query: Query) -> None:
    epoch = register(store)
    trigger_id = store.add_watcher("w", "a.B", {})
    store.claim_triggers(epoch, limit=1, queues=["default"])
    store.heartbeat(epoch, encode_status(SupervisorStatus(is_draining=True)))
    answer = store.inspect.why_trigger(trigger_id)
    assert answer.reason == "owner_drains"
    assert "alive, draining, last heartbeat" in dict(answer.facts)["owner"]
    assert [(problem.severity, problem.reason) for problem in store.inspect.status()] == [("attention", "draining")]
    assert [line.state for line in store.inspect.triggerers()] == ["draining"]
    register(store)
    assert [problem.severity for problem in store.inspect.status()] == ["notice"]
    liveness = Liveness(is_gone=lambda row: row.id == epoch)
    assert store.inspect.why_trigger(trigger_id, liveness=liveness).reason == "owner_gone"
    assert [line.state for line in store.inspect.triggerers(liveness=liveness)] == ["running", "gone"]


def test_a_why_of_a_dag_knows_that_its_runs_cannot_be_made(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    store.tasks.save_file(tasks.epoch, "nightly.py", [DagSpec("nightly", schedule=CronSchedule("0 3 * * *", "UTC"))])
    failed = tuple((f"DAG {name}", "KeyError: 'x'") for name in ("etl", "nightly"))
    store.heartbeat(tasks.epoch, encode_status(SupervisorStatus(passed_over=failed, passed_over_in_all=2)))
    nightly = store.inspect.why_dag("nightly")
    assert nightly.reason == "passed_over"
    assert "has failed with the DAG nightly, and passes over it for a while: KeyError: 'x'" in nightly.headline
    by_hand = store.inspect.why_dag("etl")
    assert by_hand.reason == "by_hand", "it has no schedule"
    assert [text for name, text in by_hand.facts if name == "also"] == [
        nightly.headline.partition(": ")[2].replace("nightly", "etl")
    ]
    store.release_triggerer(tasks.epoch)
    assert store.inspect.why_dag("nightly").headline == "the DAG nightly: no supervisor is alive"
    register(store, workers=0)
    assert store.inspect.why_dag("nightly").reason == "no_workers"
    assert store.inspect.why_dag("etl").reason == "by_hand"


def test_a_supervisor_whose_process_is_gone_is_not_alive_whatever_its_heartbeat(store: Store, query: Query) -> None:
    epoch = register(store, pid=4711)
    trigger_id = store.add_watcher("w", "a.B", {})
    store.claim_triggers(epoch, limit=1, queues=["default"])
    liveness = Liveness(is_gone=lambda row: row.pid == 4711)
    answer = store.inspect.why_trigger(trigger_id, liveness=liveness)
    assert (answer.reason, answer.headline) == (
        "owner_gone",
        f"the process of its owner, supervisor {epoch} (pid 4711 on h), is gone, and no other is alive",
    )
    register(store, pid=4712)
    assert "another supervisor fences it" in store.inspect.why_trigger(trigger_id, liveness=liveness).next


def test_a_heartbeat_in_the_future_is_called_so(store: Store, query: Query) -> None:
    epoch = register(store)
    trigger_id = store.add_watcher("w", "a.B", {})
    store.claim_triggers(epoch, limit=1, queues=["default"])
    query("UPDATE triggerer SET latest_heartbeat = :then", then="2100-01-01 00:00:00.000000")
    (owner,) = [text for name, text in store.inspect.why_trigger(trigger_id).facts if name == "owner"]
    assert "last heartbeat in " in owner
    assert "because the database's clock was set back, so it may not be alive" in owner


def test_a_pool_that_others_hold_is_named_with_its_holders(store: Store, query: Query) -> None:
    two = (TaskSpec("a", "Op"), TaskSpec("b", "Op"))
    tasks = Tasks(store, query, tasks=two)
    store.tasks.set_pool("default_pool", 1)
    store.scheduling.plan(tasks.epoch)
    (given,) = tasks.dispatch()
    waiting = "b" if given.task_id == "a" else "a"

    answer = store.inspect.why_task(store.inspect.find_task("etl", "r1", waiting))

    assert answer.reason == "pool_full"
    assert ("holders", f"etl r1 {given.task_id} (1)") in answer.facts
