"""What users' code is answered: from the environment, from both databases, and never with more than it asked for."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography.fernet import Fernet
from tests.store import ends
from tests.store.harness import Query
from tests.supervisor.tasks_harness import S, Tasks

from headgate.protocol.messages import queries
from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.queries import (
    CreateRun,
    EncodedValue,
    GetConnection,
    GetTaskStates,
    GetVariable,
    GetXCom,
    RunCreated,
    SecretText,
    TaskStates,
)
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store
from headgate.supervisor.queries import QueryRefused, StoreQueries

MOMENT = datetime(2026, 3, 1, tzinfo=UTC)
URI = "pg://me:hunter22@h/db"


@pytest.fixture
def etl(store: Store, query: Query) -> Tasks:
    return Tasks(store, query, tasks=(TaskSpec("a", "Op"), TaskSpec("b", "Op", upstream=("a",))))


def test_a_variable_and_a_connection_of_the_database(store: Store) -> None:
    store.tasks.variables.put("Región", b"Norte")
    store.tasks.connections.put("db", URI.encode())
    answers = StoreQueries(store, {})
    assert answers.answer(GetVariable("Región"), dag_run_id=None) == SecretText("Norte")
    assert answers.answer(GetConnection("db"), dag_run_id=None) == SecretText(URI)
    assert answers.answer(GetVariable("db"), dag_run_id=None) == SecretText(None)
    assert answers.answer(GetConnection("Región"), dag_run_id=None) == SecretText(None)


def test_the_environment_comes_first(store: Store) -> None:
    store.tasks.variables.put("region", b"stored")
    store.tasks.connections.put("region", b"x://stored")
    answers = StoreQueries(
        store, {"HEADGATE_VAR_REGION": "north", "HEADGATE_CONN_REGION": "x://env", "HEADGATE_HOME": "/"}
    )
    assert answers.answer(GetVariable("region"), dag_run_id=None) == SecretText("north")
    assert answers.answer(GetConnection("ReGion"), dag_run_id=None) == SecretText("x://env")


def test_what_was_told_is_kept_out_of_lines(store: Store) -> None:
    store.tasks.connections.put("db", URI.encode())
    answers = StoreQueries(store, {"HEADGATE_VAR_TOKEN": "tok-12345"})
    line = b"hunter22 tok-12345"
    assert answers.secrets.hide_in_bytes(line) == line
    answers.answer(GetConnection("db"), dag_run_id=None)
    answers.answer(GetVariable("token"), dag_run_id=None)
    assert answers.secrets.hide_in_bytes(line) == b"*** ***"


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        (GetVariable(""), "the name of a variable must not be empty"),
        (GetVariable("a\0b"), "the name of a variable must not contain"),
        (GetConnection("x" * 251), "the name of a connection must not be longer than 250"),
        (GetXCom("a", "k"), "only a step of a task can ask"),
        (GetXCom("a\0", "k"), "the id of a task must not contain"),
        (GetTaskStates("no\0"), "the id of a DAG must not contain"),
        (GetTaskStates("etl", run_id="r\0"), "the run_id must not contain"),
        (GetTaskStates("etl", logical_date_s=1e300), "1e+300 is not a logical date"),
        (GetTaskStates("etl", logical_date_s=float("nan")), "nan is not a logical date"),
        (CreateRun("nowhere", "r"), "there is no DAG named 'nowhere'"),
        (CreateRun("etl", " r"), "the run_id must not be empty or begin"),
        (CreateRun("etl", "r", params=b"x" * (KWARGS_BYTES_MAX + 1)), "the conf has 1,048,577 bytes; the limit is"),
    ],
)
def test_a_query_that_has_no_answer_is_refused_with_its_reason(
    store: Store, query: queries.Query, problem: str
) -> None:
    with pytest.raises(QueryRefused) as refusal:
        StoreQueries(store, {}).answer(query, dag_run_id=None)
    assert problem in str(refusal.value)


def test_a_value_no_key_decrypts_is_refused_by_its_name(store: Store, database_url: str) -> None:
    store.tasks.variables.put("v", b"secret")
    other = Store(open_engine(database_url), secrets=Secrets([Fernet.generate_key().decode()], source="elsewhere"))
    with other, pytest.raises(QueryRefused, match="the variable 'v' cannot be decrypted"):
        StoreQueries(other, {}).answer(GetVariable("v"), dag_run_id=None)


def test_bytes_that_are_no_text_are_refused(store: Store) -> None:
    store.tasks.variables.put("v", b"\xff\xfe")
    answers = StoreQueries(store, {"HEADGATE_VAR_E": "\udcff"})
    for name in ("v", "e"):
        with pytest.raises(QueryRefused, match=f"the variable '{name}' is not UTF-8 text"):
            answers.answer(GetVariable(name), dag_run_id=None)


def test_an_answer_that_fits_no_frame_is_refused(store: Store) -> None:
    answers = StoreQueries(store, {"HEADGATE_VAR_BIG": "x" * 2000}, frame_bytes_max=2000)
    with pytest.raises(QueryRefused, match=r"the answer to the variable 'big' has 2,\d+ bytes; the limit is 1,936"):
        answers.answer(GetVariable("big"), dag_run_id=None)


def test_an_xcom_of_the_asking_steps_run_and_of_no_other(etl: Tasks) -> None:
    ends.succeed(etl.store.tasks, etl.epoch, etl.a, etl.run_it(), xcoms={"k": b"1"})
    other = etl.store.tasks.create_run("etl", "r2")
    answers = StoreQueries(etl.store, {})
    assert answers.answer(GetXCom("a", "k"), dag_run_id=etl.run) == EncodedValue(b"1")
    assert answers.answer(GetXCom("a", "k"), dag_run_id=other) == EncodedValue(None)
    assert answers.answer(GetXCom("b", "k"), dag_run_id=etl.run) == EncodedValue(None)


def test_a_run_is_created_once(etl: Tasks) -> None:
    answers = StoreQueries(etl.store, {})
    query = CreateRun("etl", "mine", params=b'{"n": 1}', logical_date_s=MOMENT.timestamp())
    assert answers.answer(query, dag_run_id=etl.run) == RunCreated(is_new=True)
    assert answers.answer(query, dag_run_id=etl.run) == RunCreated(is_new=False)
    own = CreateRun("etl", "own")
    asked = [
        answers.answer(own, dag_run_id=etl.run, asker=asker) for asker in ("etl r1 a", "etl r1 a", "etl r1 b", None)
    ]
    assert [one.is_new for one in asked if isinstance(one, RunCreated)] == [True, True, False, False]
    (row,) = etl.query("SELECT * FROM dag_run WHERE run_id = 'mine'")
    assert bytes(row["conf"]) == b'{"n": 1}'
    assert row["run_type"] == "manual"


def test_how_a_run_stands(etl: Tasks) -> None:
    etl.query("UPDATE dag_run SET started_at = created_date")
    answers = StoreQueries(etl.store, {})
    etl.run_it()
    everything = TaskStates("r1", "running", (("a", S.RUNNING), ("b", S.NONE)))
    assert answers.answer(GetTaskStates("etl", run_id="r1"), dag_run_id=None) == everything
    some = GetTaskStates("etl", run_id="r1", task_ids=("z", "b"))
    assert answers.answer(some, dag_run_id=None) == TaskStates("r1", "running", (("b", S.NONE),), missing=("z",))
    assert answers.answer(GetTaskStates("etl", run_id="r9"), dag_run_id=None) == TaskStates()
    assert answers.answer(GetTaskStates("other"), dag_run_id=None) == TaskStates(has_dag=False)


def test_of_several_runs_the_newest_of_a_logical_date_counts(etl: Tasks) -> None:
    for run_id, moment in (("x", MOMENT), ("y", MOMENT), ("z", None)):
        etl.store.tasks.create_run("etl", run_id, logical_date=moment)
    answers = StoreQueries(etl.store, {})

    def found(**which: float) -> str | None:
        answer = answers.answer(GetTaskStates("etl", **which), dag_run_id=None)  # type: ignore[arg-type]
        assert isinstance(answer, TaskStates)
        return answer.run_id

    assert found(logical_date_s=MOMENT.timestamp()) == "y"
    assert found() == "z"
    assert found(logical_date_s=0.0) is None


def test_a_run_that_waits_for_others_is_queued_and_a_dag_that_is_put_away_still_has_its_runs(etl: Tasks) -> None:
    answers = StoreQueries(etl.store, {})
    etl.query("UPDATE dag_run SET started_at = NULL")
    etl.store.tasks.save_file(etl.epoch, "etl.py", [DagSpec("another")])
    answer = answers.answer(GetTaskStates("etl"), dag_run_id=None)
    assert isinstance(answer, TaskStates)
    assert (answer.run_state, answer.has_dag) == ("queued", True)


def test_a_database_that_is_away_is_not_the_users_fault(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(name: str) -> None:
        raise DatabaseAway("db", "no answer")

    monkeypatch.setattr(store.tasks.variables, "get", away)
    with pytest.raises(DatabaseAway):
        StoreQueries(store, {}).answer(GetVariable("v"), dag_run_id=None)
