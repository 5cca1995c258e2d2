"""Asking: the answer comes from whoever runs the step, in any of its threads, and from nobody outside of it."""

from __future__ import annotations

import threading

import pytest
import trio

from headgate.child.queries import (
    QUERY_BYTES_MAX,
    InvalidQuery,
    NoQueryHandler,
    QueryFailed,
    queries_handled_by,
    secrets,
    send_query,
    send_query_from_trigger,
    trigger_queries_handled_by,
)
from headgate.protocol.messages.queries import (
    CreateRun,
    EncodedValue,
    GetConnection,
    GetVariable,
    Query,
    QueryResult,
    SecretText,
    TriggerQuery,
)
from headgate.protocol.messages.steps import StepFailed, StepSkipped
from headgate.tasks import Connection, ConnectionMissing, PythonOperator, TaskSkipped, Variable, VariableMissing
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step
from headgate.triggers.base import BaseTrigger


def test_outside_of_a_step_there_is_nobody_to_ask() -> None:
    with pytest.raises(NoQueryHandler, match=r"GetVariable cannot be sent here: only while a step of a task runs"):
        send_query(GetVariable("v"))


def test_every_thread_of_a_step_may_ask() -> None:
    asked: list[Query] = []
    answers: list[QueryResult] = []

    def answer(query: Query) -> QueryResult:
        asked.append(query)
        return SecretText("x")

    with queries_handled_by(answer):
        thread = threading.Thread(target=lambda: answers.append(send_query(GetVariable("v"))))
        thread.start()
        thread.join()
    assert (asked, answers) == ([GetVariable("v")], [SecretText("x")])
    with pytest.raises(NoQueryHandler):
        send_query(GetVariable("v"))


# --- what is no query --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        (GetVariable(5), "Expected `str`, got `int`"),  # type: ignore[arg-type]
        (GetVariable("\ud800"), "surrogates not allowed"),
        (GetVariable(object()), "Encoding objects of type object is unsupported"),  # type: ignore[arg-type]
        (CreateRun("d", "r", b"x" * QUERY_BYTES_MAX), "the limit is 1,114,112"),
    ],
)
def test_what_the_supervisor_could_not_read_is_not_sent(query: Query, problem: str) -> None:
    asked: list[Query] = []

    def answer(query: Query) -> QueryResult:
        asked.append(query)
        return SecretText("x")

    with queries_handled_by(answer), pytest.raises(InvalidQuery, match=problem):
        send_query(query)
    assert asked == []


# --- values by their names ------------------------------------------------------------------------

VALUES = {"v": "hunter22", "json": '{"a": ["deep-secret"]}', "bad": "{password1"}
URIS = {"db": "PG://me:pa%2Fss-word@h:5/x%20y?token=tok%2F123", "bad": "password1 of h"}


def values(query: Query) -> QueryResult:
    match query:
        case GetVariable(name):
            return SecretText(VALUES.get(name))
        case GetConnection(name):
            return SecretText(URIS.get(name))
        case _:
            return EncodedValue(None)


def test_a_task_reads_variables() -> None:
    with secrets.apart(), queries_handled_by(values):
        assert Variable.get("v") == Variable.get("v", default="x") == "hunter22"
        assert Variable.get("none", default=None) is None
        assert Variable.get_json("json") == {"a": ["deep-secret"]}
        assert Variable.get_json("none", default=[]) == []
        assert secrets.hide("hunter22 deep-secret") == "*** ***"
        with pytest.raises(VariableMissing, match=r"there is no variable 'none': .* HEADGATE_VAR_NONE"):
            Variable.get("none")
        with pytest.raises(VariableMissing):
            Variable.get_json("none")
        with pytest.raises(ValueError, match=r"^the variable 'bad' is not JSON: line 1, column 2$") as refusal:
            Variable.get_json("bad")
        assert refusal.value.__context__ is None


def test_a_task_reads_connections() -> None:
    with secrets.apart(), queries_handled_by(values):
        connection = Connection.get("db")
        assert (connection.scheme, connection.host, connection.port, connection.schema) == ("pg", "h", 5, "x y")
        assert (connection.login, connection.password, connection.extra) == ("me", "pa/ss-word", {"token": "tok/123"})
        assert connection.uri == URIS["db"]
        assert repr(connection) == (
            "Connection(name='db', scheme='pg', host='h', port=5, schema='x y', hosts=(('h', 5),))"
        )
        assert secrets.hide(f"{connection.password} {connection.uri} tok/123") == "*** *** ***"
        with pytest.raises(ConnectionMissing, match=r"there is no connection 'none': .* HEADGATE_CONN_NONE"):
            Connection.get("none")
        with pytest.raises(ValueError, match="the connection 'bad' cannot be read: it has spaces") as refusal:
            Connection.get("bad")
        assert "password1" not in str(refusal.value)


@pytest.mark.parametrize("error", [TaskSkipped, ValueError])
def test_a_secret_is_in_no_outcome_of_a_step(error: type[Exception]) -> None:
    def call() -> None:
        raise error(f"{Variable.get('v')} is wrong, and so is {Connection.get('db').password}")

    with secrets.apart(), queries_handled_by(values):
        operator = PythonOperator(task_id="t", python_callable=call)
        outcome = run_step(operator, make_context(operator, run_id="r"))
    assert isinstance(outcome, StepSkipped | StepFailed)
    assert "*** is wrong, and so is ***" in (outcome.reason if isinstance(outcome, StepSkipped) else outcome.error)
    assert "hunter22" not in str(outcome)
    assert "pa/ss-word" not in str(outcome)


def test_an_answer_of_another_kind_is_none() -> None:
    with queries_handled_by(lambda query: EncodedValue(None)), pytest.raises(QueryFailed, match="EncodedValue, not"):
        Variable.get("v")


# --- triggers -------------------------------------------------------------------------------------


class Trigger(BaseTrigger):
    def serialize(self) -> tuple[str, dict[str, object]]:
        return "a.B", {}

    async def run(self):  # type: ignore[no-untyped-def]
        yield


async def test_a_trigger_reads_them_with_its_own_methods() -> None:
    async def answer(query: TriggerQuery) -> QueryResult:
        await trio.lowlevel.checkpoint()
        return values(query)

    trigger = Trigger()
    with secrets.apart(), trigger_queries_handled_by(answer):
        assert await trigger.get_variable("v") == "hunter22"
        assert await trigger.get_variable("none", default=3) == 3
        assert await trigger.get_variable_json("json") == {"a": ["deep-secret"]}
        assert (await trigger.get_connection("db")).password == "pa/ss-word"
        assert secrets.hide("hunter22 pa/ss-word") == "*** ***"
        with pytest.raises(VariableMissing):
            await trigger.get_variable("none")
        with pytest.raises(InvalidQuery):
            await trigger.get_variable(5)  # type: ignore[arg-type]
        with pytest.raises(NoQueryHandler, match="a trigger uses its own async methods"):
            Variable.get("v")
    with pytest.raises(NoQueryHandler):
        await send_query_from_trigger(GetVariable("v"))
