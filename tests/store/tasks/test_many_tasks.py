"""What users do to many tasks at once: clear a part of a run, cancel all of it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import OpenStore, Query
from tests.supervisor.tasks_harness import S, Tasks, event_of, instance_of, task_states

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.store.errors import NoSuchRow
from headgate.store.store import Store

#  a ─▶ b ─▶ d
#  └──▶ c ─▶─┘    e
DIAMOND = (
    TaskSpec("a", "Op"),
    TaskSpec("b", "Op", upstream=("a",)),
    TaskSpec("c", "Op", upstream=("a",)),
    TaskSpec("d", "Op", upstream=("b", "c")),
    TaskSpec("e", "Op"),
)


@pytest.fixture
def ended(store: Store, query: Query) -> Tasks:
    """A run all of whose tasks have ended: ``b`` has failed, ``d`` is upstream_failed, the others succeeded."""
    tasks = Tasks(store, query, tasks=DIAMOND)
    for name in "abce":
        store.tasks.mark(instance_of(store, tasks.run, name), "failed" if name == "b" else "success")
    assert tasks.plan().ended == {tasks.run: "failed"}
    return tasks


def states(tasks: Tasks) -> str:
    found = task_states(tasks.store, tasks.run)
    return " ".join(f"{name}:{found[name].value}" for name in sorted(found))


def run_row(tasks: Tasks) -> dict[str, Any]:
    (row,) = tasks.query("SELECT * FROM dag_run WHERE id = :id", id=tasks.run)
    return row


# --- a failed task that counts as succeeded ------------------------------------------------------


def test_a_failed_task_that_is_marked_as_succeeded_lets_the_rest_go_on(ended: Tasks, store: Store) -> None:
    assert store.tasks.mark(instance_of(store, ended.run, "b"), "success")
    assert states(ended) == "a:success b:success c:success d:none e:success"
    assert run_row(ended)["state"] == "running"
    headline = store.inspect.why_task(store.inspect.find_task("etl", "r1", "b")).headline
    assert headline.endswith(" ago: a user marked it as succeeded after it had failed")
    ended.plan()
    assert states(ended) == "a:success b:success c:success d:scheduled e:success"


def test_the_last_that_failed_ends_its_run_as_succeeded(ended: Tasks, store: Store) -> None:
    store.tasks.mark(instance_of(store, ended.run, "b"), "success")
    ended.plan()
    store.tasks.mark(instance_of(store, ended.run, "d"), "failed")
    assert ended.plan().ended == {ended.run: "failed"}
    assert store.tasks.mark(instance_of(store, ended.run, "d"), "success")
    assert ended.plan().ended == {ended.run: "success"}


def test_what_failed_because_of_another_may_count_as_succeeded_alone(ended: Tasks, store: Store) -> None:
    assert store.tasks.mark(instance_of(store, ended.run, "d"), "success")
    assert states(ended) == "a:success b:failed c:success d:success e:success"
    assert ended.plan().ended == {ended.run: "success"}, "its last tasks say how a run has ended"


def test_what_is_below_another_failure_fails_again(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, tasks=DIAMOND)
    for name in "abce":
        store.tasks.mark(instance_of(store, tasks.run, name), "failed" if name in "bc" else "success")
    tasks.plan()
    store.tasks.mark(instance_of(store, tasks.run, "b"), "success")
    assert tasks.plan().ended == {tasks.run: "failed"}
    assert states(tasks) == "a:success b:success c:failed d:upstream_failed e:success"


def test_what_has_succeeded_or_is_marked_as_failed_stays_as_it_is(ended: Tasks, store: Store) -> None:
    assert not store.tasks.mark(instance_of(store, ended.run, "a"), "success")
    for name in ("a", "b", "d"):
        assert not store.tasks.mark(instance_of(store, ended.run, name), "failed")
    assert run_row(ended)["state"] == "failed"


# --- clear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "options", "cleared"),
    [
        (["b"], {}, "b"),
        (["b"], {"downstream": True}, "bd"),
        (["b"], {"upstream": True}, "ab"),
        (["d"], {"upstream": True}, "abcd"),
        (["a"], {"downstream": True, "only_failed": True}, "bd"),
        (["e", "b"], {}, "be"),
        ([], {"only_failed": True}, "bd"),
        ([], {}, "abcde"),
    ],
)
def test_a_clear_takes_the_tasks_and_their_relatives_and_the_run_goes_on(
    ended: Tasks, names: list[str], options: dict[str, Any], cleared: str
) -> None:
    before = task_states(ended.store, ended.run)

    answer = ended.store.tasks.clear_many(ended.run, names, **options)

    assert "".join(sorted(answer.cleared)) == cleared
    assert (answer.left, answer.as_before) == (None, ())
    expected = {name: S.NONE if name in cleared else state for name, state in before.items()}
    assert task_states(ended.store, ended.run) == expected
    row = run_row(ended)
    assert (row["state"], row["ended_at"], bool(row["needs_look"])) == ("running", None, True)


def test_a_clear_of_a_name_that_the_run_lacks_changes_nothing(ended: Tasks) -> None:
    before = states(ended)

    with pytest.raises(NoSuchRow, match="'z'"):
        ended.store.tasks.clear_many(ended.run, ["a", "z"])

    assert states(ended) == before
    assert run_row(ended)["state"] == "failed"


def test_a_clear_of_nothing_leaves_the_run_ended(ended: Tasks) -> None:
    answer = ended.store.tasks.clear_many(ended.run, ["a"], only_failed=True)

    assert answer.cleared == {}
    assert run_row(ended)["state"] == "failed"


def test_a_task_that_is_being_cleared_already_is_told_apart(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, tasks=DIAMOND)
    tasks.run_it()

    assert store.tasks.clear_many(tasks.run, ["a"]).cleared == {"a": S.RESTARTING}
    assert store.tasks.clear_many(tasks.run, ["a", "b"]).as_before == ("a",)


# --- cancel --------------------------------------------------------------------------------------


def test_a_cancel_ends_all_that_is_unfinished_and_the_run(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, tasks=DIAMOND)
    e = instance_of(store, tasks.run, "e")
    store.tasks.mark(e, "success")
    _, trigger = tasks.defer_it()

    answer = store.tasks.cancel_run(tasks.run)

    assert (answer.tasks, answer.is_ended) == (4, True)
    assert states(tasks) == "a:failed b:failed c:failed d:failed e:success"
    assert run_row(tasks)["state"] == "failed"
    # Its owner is told to cancel it, with on_kill().
    assert store.poll(tasks.epoch, ["default"]).removed == [trigger]
    assert tasks.row()["last_error"] == "a user cancelled its run"


def test_a_worker_whose_run_was_cancelled_has_the_task_no_more_and_its_answer_is_too_late(
    store: Store, query: Query
) -> None:
    tasks = Tasks(store, query, retries=3)
    token = tasks.run_it()

    store.tasks.cancel_run(tasks.run)

    assert store.tasks.owned(tasks.epoch) == []
    assert ends.succeed(store.tasks, tasks.epoch, tasks.a, token) is False
    assert tasks.state() is S.FAILED


def test_an_event_that_comes_after_the_cancel_resumes_nothing(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger = tasks.defer_it()

    store.tasks.cancel_run(tasks.run)
    store.store_slice(tasks.epoch, events=[event_of(trigger)])

    assert tasks.state() is S.FAILED


def test_a_run_that_was_cancelled_before_lets_the_next_one_of_its_dag_begin(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    store.tasks.save_file(tasks.epoch, "etl.py", [DagSpec("etl", tasks=(TaskSpec("a", "Op"),), max_active_runs=1)])
    waiting = store.tasks.create_run("etl", "r2")
    tasks.plan()
    (row,) = query("SELECT started_at FROM dag_run WHERE id = :id", id=waiting)
    assert row["started_at"] is None

    assert store.tasks.cancel_run(tasks.run).is_ended
    tasks.plan()

    (row,) = query("SELECT started_at FROM dag_run WHERE id = :id", id=waiting)
    assert row["started_at"] is not None


def test_a_cancel_again_changes_nothing(ended: Tasks) -> None:
    before = states(ended)

    answer = ended.store.tasks.cancel_run(ended.run)

    assert (answer.tasks, answer.is_ended) == (0, True)
    assert not answer.is_busy
    assert states(ended) == before


# --- beside others -------------------------------------------------------------------------------


@pytest.fixture
def held(store: Store, query: Query, open_store: OpenStore) -> tuple[Tasks, Any]:
    """A run, and a transaction of somebody else that has its task ``b`` locked."""
    tasks = Tasks(store, query, tasks=DIAMOND)
    other = open_store()
    b = instance_of(store, tasks.run, "b")
    return tasks, (other, b)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_what_another_is_changing_is_passed_over_and_told(held: tuple[Tasks, Any]) -> None:
    from headgate.store.tasks import task_rows

    tasks, (other, b) = held
    with other.database.writing() as tx:
        assert task_rows.locked(tx, b) is not None
        cancelled = tasks.store.tasks.cancel_run(tasks.run)
        cleared = tasks.store.tasks.clear_many(tasks.run)

    assert (cancelled.tasks, cancelled.is_ended) == (4, False)
    assert sorted(cleared.cleared) == ["a", "c", "d", "e"]
    assert cleared.is_busy
    assert cleared.left is not None
    assert cleared.left.tasks == ("b",)
    assert tasks.store.tasks.cancel_run(tasks.run).is_ended
