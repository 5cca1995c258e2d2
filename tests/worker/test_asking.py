"""Asking: the answer comes from whoever runs the step, in any of its threads, and from nobody outside of it."""

from __future__ import annotations

import threading

import pytest

from headgate.protocol.questions import Answered, GetVariable, Question, SecretText
from headgate.runner.asking import NobodyToAsk, answered_by, ask


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
