"""Whom users' synchronous code asks: whatever a task's step wants to know that only the supervisor knows.

A worker runs one step at a time, so whom to ask is one thing for the whole process, and threads that the step starts
can ask as well. Operators, `Variable` and the like call `ask`; the worker's session says who answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeAlias

from headgate.protocol.questions import Answered, Question

Answerer: TypeAlias = Callable[[Question], Answered]


class NobodyToAsk(RuntimeError):
    """A question was asked where no step of a task is running."""

    def __init__(self, question: Question) -> None:
        super().__init__(
            f"{type(question).__name__} cannot be asked here: only while a step of a task runs, "
            f"not when a DAG file is parsed, nor after the step has ended"
        )
        self.question = question


class NotAnswered(Exception):
    """The supervisor has no answer to a question; the text is its reason."""


_answerer: Answerer | None = None


def ask(question: Question) -> Answered:
    """Ask the supervisor, and wait for what it answers. May be called in any thread of a step.

    Raises `NobodyToAsk` outside of a step, `NotAnswered` with the supervisor's reason.
    """
    answerer = _answerer
    if answerer is None:
        raise NobodyToAsk(question)
    return answerer(question)


@contextmanager
def answered_by(answerer: Answerer) -> Generator[None]:
    """Have ``answerer`` called for all questions meanwhile, of whatever thread."""
    global _answerer
    before, _answerer = _answerer, answerer
    try:
        yield
    finally:
        _answerer = before
