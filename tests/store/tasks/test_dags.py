"""DAG files and runs in the store, and the values that tasks read."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography.fernet import Fernet
from tests.store import ends
from tests.store.harness import Query, register
from tests.supervisor.tasks_harness import WAIT, Tasks, import_errors, task_states

from headgate.protocol.messages.dags import XCOM_BYTES_MAX, DagSpec, TaskSpec, TaskState
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import BadKey, BadName, NoSuchRow, ValueRefused
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.store import Store
from headgate.store.tasks.values import VALUE_BYTES_MAX

S = TaskState


# --- files ---------------------------------------------------------------------------------------


def test_a_file_has_the_dags_it_had_when_it_was_parsed_last(store: Store, query: Query) -> None:
    epoch = register(store)
    one, two = DagSpec("one", tasks=(TaskSpec("a", "Op"),)), DagSpec("two", is_paused_upon_creation=True)
    store.tasks.save_file(epoch, "x.py", [two, one])
    store.tasks.save_file(epoch, "y.py", [DagSpec("three")])
    assert [(line.name, line.file, line.is_paused) for line in store.inspect.dags()] == [
        ("one", "x.py", False),
        ("three", "y.py", False),
        ("two", "x.py", True),
    ]
    assert store.inspect.dag("one")[1] == one
    first_ids = query("SELECT name, id FROM dag ORDER BY name")

    # "two" is gone, "three" moves; whoever unpaused a DAG finds it so after the next parse.
    store.tasks.set_paused("two", is_paused=False)
    store.tasks.save_file(epoch, "x.py", [one, DagSpec("three")])
    assert [(line.name, line.file) for line in store.inspect.dags()] == [("one", "x.py"), ("three", "x.py")]
    store.tasks.save_file(epoch, "y.py", [])
    store.tasks.save_file(epoch, "x.py", [one, two, DagSpec("three")])
    assert query("SELECT name, id FROM dag ORDER BY name") == first_ids
    assert not store.inspect.dags()[2].is_paused


def test_a_file_that_cannot_be_parsed_keeps_its_dags_and_says_why_until_it_can(store: Store) -> None:
    epoch = register(store)
    store.tasks.save_file(epoch, "x.py", [DagSpec("one")])
    store.tasks.save_import_error(epoch, "x.py", "first")
    store.tasks.save_import_error(epoch, "x.py", "NUL \0 and a surrogate \ud800" + "x" * ERROR_CHARS_MAX)
    (error,) = import_errors(store).values()
    assert error.startswith(r"NUL \x00 and a surrogate \ud800xxx")
    assert len(error) == ERROR_CHARS_MAX
    assert [line.name for line in store.inspect.dags()] == ["one"]
    store.tasks.save_file(epoch, "x.py", [DagSpec("one")])
    assert import_errors(store) == {}


def test_what_is_not_there_is_named(store: Store) -> None:
    for call, what in (
        (lambda: store.tasks.set_paused("x", is_paused=True), "there is no DAG named 'x'"),
        (lambda: store.tasks.create_run("x", "r"), "there is no DAG named 'x'"),
        (lambda: store.tasks.clear_many(DagRunId(7)), "there is no run named '7'"),
        (lambda: store.tasks.mark(TaskInstanceId(7), "failed"), "there is no task named '7'"),
        (lambda: store.tasks.variables.remove("x"), "there is no variable named 'x'"),
        (lambda: store.tasks.connections.remove("x"), "there is no connection named 'x'"),
    ):
        with pytest.raises(NoSuchRow, match=what):
            call()


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_of_one_name_is_created_once_with_all_tasks(store: Store, query: Query) -> None:
    specs = (
        TaskSpec("a", "Op", retries=2, retry_delay_s=1.5, retry_exponential_backoff=True, max_retry_delay_s=9.0),
        TaskSpec(
            "b", "Op", upstream=("a",), execution_timeout_s=4.5, priority_weight=-7, queue="q", pool="p", pool_slots=3
        ),
    )
    tasks = Tasks(store, query, tasks=specs)
    assert store.tasks.create_run("etl", "r1") is None
    assert store.tasks.create_run("etl", "r2", run_type="asset", conf=b"{}") not in (None, tasks.run)
    assert task_states(store, tasks.run) == {"a": S.NONE, "b": S.NONE}
    rows = query("SELECT * FROM task_instance WHERE dag_run_id = :run ORDER BY id", run=tasks.run)
    for row, spec in zip(rows, specs, strict=True):
        names = (
            *("task_id", "retries", "retry_delay_s", "max_retry_delay_s", "execution_timeout_s"),
            *("priority_weight", "queue", "pool", "pool_slots"),
        )
        assert {name: row[name] for name in names} == {name: getattr(spec, name) for name in names}
        assert bool(row["retry_exponential_backoff"]) == spec.retry_exponential_backoff
        assert (row["tries_max"], row["try_number"]) == (spec.retries + 1, 0)
    with pytest.raises(BadName):
        store.tasks.create_run("etl", " ")


def test_a_run_of_many_tasks_is_created_whole(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, tasks=tuple(TaskSpec(f"t{number}", "Op") for number in range(1337)))
    assert len(task_states(store, tasks.run)) == 1337


def test_a_run_ends_when_its_last_task_has_and_goes_on_when_one_is_cleared(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    token = tasks.run_it()
    assert tasks.plan().ended == {}
    assert ends.succeed(store.tasks, tasks.epoch, tasks.a, token)
    assert tasks.plan().ended == {tasks.run: "success"}
    assert tasks.plan().ended == {}
    (run,) = query("SELECT * FROM dag_run")
    assert run["state"] == "success"
    assert run["ended_at"] is not None
    assert tasks.clear_it() is S.NONE
    (run,) = query("SELECT * FROM dag_run")
    assert (run["state"], run["ended_at"]) == ("running", None)
    assert tasks.clear_it() is S.NONE


def test_a_run_follows_its_dag_but_for_what_is_with_a_worker_or_has_ended(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, tasks=tuple(TaskSpec(name, "Op") for name in "abcde"))
    _, trigger_id = tasks.defer_it()
    b, c = tasks.dispatch(limit=2)
    assert (b.task_id, c.task_id) == ("b", "c")
    ends.succeed(store.tasks, tasks.epoch, b.id, b.token, end="skipped")
    store.tasks.save_file(tasks.epoch, "etl.py", [DagSpec("etl", tasks=(TaskSpec("e", "Op"), TaskSpec("f", "Op")))])
    assert tasks.plan().removed == 2
    assert task_states(store, tasks.run) == {
        "a": S.REMOVED,
        "b": S.SKIPPED,
        "c": S.RUNNING,
        "d": S.REMOVED,
        "e": S.SCHEDULED,
        "f": S.SCHEDULED,
    }
    assert tasks.trigger(trigger_id)["finished_at"] is not None
    assert tasks.plan().removed == 0


# --- values --------------------------------------------------------------------------------------


def test_an_xcom_is_as_big_as_it_may_be_and_no_bigger(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    token = tasks.run_it()
    too_big = {"first": b"1", "model": b"x" * (XCOM_BYTES_MAX + 1)}
    with pytest.raises(ValueRefused, match=r"the XCom 'model' needs 49,153 bytes; the limit is 49,152"):
        ends.succeed(store.tasks, tasks.epoch, tasks.a, token, xcoms=too_big)
    assert tasks.state() is S.RUNNING
    assert ends.succeed(store.tasks, tasks.epoch, tasks.a, token, xcoms={"k": b"x" * XCOM_BYTES_MAX})
    assert [row["key"] for row in query("SELECT key FROM xcom")] == ["k"]


def test_variables_and_connections_are_encrypted_and_apart_from_each_other(
    store: Store, query: Query, database_url: str, secrets: Secrets
) -> None:
    store.tasks.variables.put("x", b"old value", description="what it is for")
    store.tasks.variables.put("x", b"new value")
    store.tasks.connections.put("x", b"postgresql://user:hunter2@host")
    assert store.tasks.variables.get("x") == b"new value"
    assert store.tasks.connections.get("x") == b"postgresql://user:hunter2@host"
    assert store.tasks.variables.get("y") is store.tasks.connections.get("y") is None
    stored = query("SELECT value FROM variable UNION ALL SELECT value FROM connection")
    assert len(stored) == 2
    assert not any(word in row["value"] for row in stored for word in ("value", "hunter2"))
    (listed,) = store.tasks.variables.listed()
    assert (listed.name, listed.description) == ("x", "")
    assert [row.name for row in store.tasks.connections.listed()] == ["x"]
    stranger = Secrets([Fernet.generate_key().decode()], source="another machine")
    with Store(open_engine(database_url), secrets=stranger) as other, pytest.raises(BadKey):
        other.tasks.connections.get("x")
    store.tasks.variables.remove("x")
    store.tasks.connections.remove("x")
    assert store.tasks.variables.get("x") is store.tasks.connections.get("x") is None


def test_values_that_are_too_big_or_badly_named_are_refused_by_name(store: Store) -> None:
    for put, what in ((store.tasks.variables.put, "variable"), (store.tasks.connections.put, "connection")):
        with pytest.raises(ValueRefused, match=rf"the {what} 'big' needs 65,537 bytes; the limit is 65,536"):
            put("big", b"x" * (VALUE_BYTES_MAX + 1))
        with pytest.raises(BadName, match=f"the name of a {what}"):
            put("", b"x")
        with pytest.raises(ValueRefused, match="description"):
            put("x", b"x", description="NUL \0")
    with pytest.raises(ValueRefused, match="a pool has 0 to 1,000,000 slots, not -1"):
        store.tasks.set_pool("p", -1)


def test_kwargs_of_a_waiting_task_are_encrypted(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    encrypted = [tasks.row()["next_kwargs"], tasks.trigger(trigger_id)["kwargs"]]
    assert not any(clear.decode() in text for text in encrypted for clear in (WAIT.kwargs, WAIT.next_kwargs))
    query("UPDATE task_instance SET next_kwargs = 'nothing that a key decrypts'")
    query(
        "UPDATE task_instance SET state = 'scheduled', trigger_id = NULL, token = NULL WHERE id = :id",
        id=tasks.a,
    )
    (task,) = tasks.dispatch()
    assert task.next_kwargs is None
    assert "cannot be decrypted" in task.error


@pytest.mark.parametrize("moment", [datetime.min, datetime.max])
def test_a_logical_date_that_some_time_zone_does_not_have_is_refused(store: Store, moment: datetime) -> None:
    """PostgreSQL tells it in the zone that it is set to, where it would be in the year 0 or 10000."""
    with pytest.raises(ValueRefused, match="must lie in the years 2 to 9998"):
        store.tasks.create_run("etl", "r2", logical_date=moment.replace(tzinfo=UTC))
