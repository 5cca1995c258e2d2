"""Asking: the answer comes from whoever runs the step, in any of its threads, and from nobody outside of it."""

from __future__ import annotations

import threading

import pytest
import trio

from headgate.child.asking import (
    QUESTION_BYTES_MAX,
    NobodyToAsk,
    NoQuestion,
    NotAnswered,
    answered_by,
    ask,
    ask_from_trigger,
    told,
    triggers_answered_by,
)
from headgate.protocol.messages.questions import (
    Answered,
    CreateRun,
    EncodedValue,
    GetConnection,
    GetVariable,
    Question,
    SecretText,
    TriggerQuestion,
)
from headgate.protocol.messages.steps import StepFailed, StepSkipped
from headgate.tasks import Connection, ConnectionMissing, PythonOperator, TaskSkipped, Variable, VariableMissing
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step
from headgate.triggers.base import BaseTrigger


def test_outside_of_a_step_there_is_nobody_to_ask() -> None:
    with pytest.raises(NobodyToAsk, match=r"GetVariable cannot be asked here: only while a step of a task runs"):
        ask(GetVariable("v"))


def test_every_thread_of_a_step_may_ask() -> None:
    asked: list[Question] = []
    answers: list[Answered] = []

    def answer(question: Question) -> Answered:
        asked.append(question)
        return SecretText("x")

    with answered_by(answer):
        thread = threading.Thread(target=lambda: answers.append(ask(GetVariable("v"))))
        thread.start()
        thread.join()
    assert (asked, answers) == ([GetVariable("v")], [SecretText("x")])
    with pytest.raises(NobodyToAsk):
        ask(GetVariable("v"))


# --- what is no question --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        (GetVariable(5), "Expected `str`, got `int`"),  # type: ignore[arg-type]
        (GetVariable("\ud800"), "surrogates not allowed"),
        (GetVariable(object()), "Encoding objects of type object is unsupported"),  # type: ignore[arg-type]
        (CreateRun("d", "r", b"x" * QUESTION_BYTES_MAX), "the limit is 1,114,112"),
    ],
)
def test_what_the_supervisor_could_not_read_is_not_sent(question: Question, problem: str) -> None:
    asked: list[Question] = []

    def answer(question: Question) -> Answered:
        asked.append(question)
        return SecretText("x")

    with answered_by(answer), pytest.raises(NoQuestion, match=problem):
        ask(question)
    assert asked == []


# --- values by their names ------------------------------------------------------------------------

VALUES = {"v": "hunter22", "json": '{"a": ["deep-secret"]}', "bad": "{password1"}
URIS = {"db": "PG://me:pa%2Fss-word@h:5/x%20y?token=tok%2F123", "bad": "password1 of h"}


def values(question: Question) -> Answered:
    match question:
        case GetVariable(name):
            return SecretText(VALUES.get(name))
        case GetConnection(name):
            return SecretText(URIS.get(name))
        case _:
            return EncodedValue(None)


def test_a_task_reads_variables() -> None:
    with told.apart(), answered_by(values):
        assert Variable.get("v") == Variable.get("v", default="x") == "hunter22"
        assert Variable.get("none", default=None) is None
        assert Variable.get_json("json") == {"a": ["deep-secret"]}
        assert Variable.get_json("none", default=[]) == []
        assert told.hide("hunter22 deep-secret") == "*** ***"
        with pytest.raises(VariableMissing, match=r"there is no variable 'none': .* HEADGATE_VAR_NONE"):
            Variable.get("none")
        with pytest.raises(VariableMissing):
            Variable.get_json("none")
        with pytest.raises(ValueError, match=r"^the variable 'bad' is no JSON: line 1, column 2$") as refusal:
            Variable.get_json("bad")
        assert refusal.value.__context__ is None


def test_a_task_reads_connections() -> None:
    with told.apart(), answered_by(values):
        connection = Connection.get("db")
        assert (connection.scheme, connection.host, connection.port, connection.schema) == ("pg", "h", 5, "x y")
        assert (connection.login, connection.password, connection.extra) == ("me", "pa/ss-word", {"token": "tok/123"})
        assert connection.uri == URIS["db"]
        assert repr(connection) == "Connection(name='db', scheme='pg', host='h', port=5, login='me', schema='x y')"
        assert told.hide(f"{connection.password} {connection.uri} tok/123") == "*** *** ***"
        with pytest.raises(ConnectionMissing, match=r"there is no connection 'none': .* HEADGATE_CONN_NONE"):
            Connection.get("none")
        with pytest.raises(ValueError, match="the connection 'bad' cannot be read: it has spaces") as refusal:
            Connection.get("bad")
        assert "password1" not in str(refusal.value)


@pytest.mark.parametrize("error", [TaskSkipped, ValueError])
def test_a_secret_is_in_no_outcome_of_a_step(error: type[Exception]) -> None:
    def call() -> None:
        raise error(f"{Variable.get('v')} is wrong, and so is {Connection.get('db').password}")

    with told.apart(), answered_by(values):
        operator = PythonOperator(task_id="t", python_callable=call)
        outcome = run_step(operator, make_context(operator, run_id="r"))
    assert isinstance(outcome, StepSkipped | StepFailed)
    assert "*** is wrong, and so is ***" in (outcome.reason if isinstance(outcome, StepSkipped) else outcome.error)
    assert "hunter22" not in str(outcome)
    assert "pa/ss-word" not in str(outcome)


def test_an_answer_of_another_kind_is_none() -> None:
    with answered_by(lambda question: EncodedValue(None)), pytest.raises(NotAnswered, match="EncodedValue, not"):
        Variable.get("v")


# --- triggers -------------------------------------------------------------------------------------


class Trigger(BaseTrigger):
    def serialize(self) -> tuple[str, dict[str, object]]:
        return "a.B", {}

    async def run(self):  # type: ignore[no-untyped-def]
        yield


async def test_a_trigger_reads_them_with_its_own_methods() -> None:
    async def answer(question: TriggerQuestion) -> Answered:
        await trio.lowlevel.checkpoint()
        return values(question)

    trigger = Trigger()
    with told.apart(), triggers_answered_by(answer):
        assert await trigger.get_variable("v") == "hunter22"
        assert await trigger.get_variable("none", default=3) == 3
        assert await trigger.get_variable_json("json") == {"a": ["deep-secret"]}
        assert (await trigger.get_connection("db")).password == "pa/ss-word"
        assert told.hide("hunter22 pa/ss-word") == "*** ***"
        with pytest.raises(VariableMissing):
            await trigger.get_variable("none")
        with pytest.raises(NoQuestion):
            await trigger.get_variable(5)  # type: ignore[arg-type]
        with pytest.raises(NobodyToAsk, match="a trigger asks by its own async methods"):
            Variable.get("v")
    with pytest.raises(NobodyToAsk):
        await ask_from_trigger(GetVariable("v"))
