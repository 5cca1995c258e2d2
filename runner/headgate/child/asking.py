"""Whom users' code asks: whatever a task's step or a trigger wants to know that only the supervisor knows.

A worker runs one step at a time, so whom to ask is one thing for the whole process, and threads that the step starts
can ask as well. A runner has many triggers; whom to ask is in the context that their tasks inherit. Operators,
`Variable` and the like call `ask`, triggers `ask_from_trigger`; the session of the process says who answers. Whatever
secret is in an answer is kept out of what this process writes from then on (`told`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias

import msgspec

from headgate.protocol.masking import SecretMask
from headgate.protocol.messages.questions import Answered, Question, TriggerQuestion
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX

Answerer: TypeAlias = Callable[[Question], Answered]
TriggerAnswerer: TypeAlias = Callable[[TriggerQuestion], Awaitable[Answered]]

QUESTION_BYTES_MAX: Final = KWARGS_BYTES_MAX + 64 * 1024  # the conf of a run, and names: far less than a frame

told: Final = SecretMask()  # the secrets this process was told; see `headgate.child.logs.render`


class NobodyToAsk(RuntimeError):
    """A question was asked where no step of a task is running."""

    def __init__(self, question: Question) -> None:
        super().__init__(
            f"{type(question).__name__} cannot be asked here: only while a step of a task runs, not when a DAG file "
            f"is parsed, nor after the step has ended; a trigger asks by its own async methods"
        )
        self.question = question


class NotAnswered(Exception):
    """The supervisor has no answer to a question; the text is its reason."""


class NoQuestion(ValueError):
    """A question cannot be asked as it is: a name of it is no text, or it is too long."""


_answerer: Answerer | None = None
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)


def ask(question: Question) -> Answered:
    """Ask the supervisor, and wait for what it answers. May be called in any thread of a step.

    Raises `NobodyToAsk` outside of a step, `NotAnswered` with the supervisor's reason, `NoQuestion`.
    """
    answerer = _answerer
    if answerer is None:
        raise NobodyToAsk(question)
    _check(question)
    answered = answerer(question)
    told.note(question, answered)
    return answered


@contextmanager
def answered_by(answerer: Answerer) -> Generator[None]:
    """Have ``answerer`` called for all questions meanwhile, of whatever thread."""
    global _answerer
    before, _answerer = _answerer, answerer
    try:
        yield
    finally:
        _answerer = before


def _check(question: Question) -> None:
    """Refuse what the supervisor could not read: its author is to see that, and nobody else to suffer from it (I9)."""
    try:
        data = _encoder.encode(question)
        _decoder.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NoQuestion(f"{type(question).__name__} cannot be asked: {error}") from None
    if len(data) > QUESTION_BYTES_MAX:
        raise NoQuestion(f"{type(question).__name__} has {len(data):,} bytes; the limit is {QUESTION_BYTES_MAX:,}")


# --- triggers ------------------------------------------------------------------------------------

_trigger_answerer: ContextVar[TriggerAnswerer | None] = ContextVar("headgate trigger answerer", default=None)


async def ask_from_trigger(question: TriggerQuestion) -> Answered:
    """Ask the supervisor from the code of a trigger. Raises as `ask` does."""
    answerer = _trigger_answerer.get()
    if answerer is None:
        raise NobodyToAsk(question)
    _check(question)
    answered = await answerer(question)
    told.note(question, answered)
    return answered


@contextmanager
def triggers_answered_by(answerer: TriggerAnswerer) -> Generator[None]:
    """Have ``answerer`` called for the questions of all tasks that are started meanwhile."""
    token = _trigger_answerer.set(answerer)
    try:
        yield
    finally:
        _trigger_answerer.reset(token)
