"""What is said of a trigger that cannot be constructed: the nearest name, the argument, the line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.protocol.messages.checks import CheckTrigger, OtherTrigger, TriggerChecked
from headgate.protocol.values import encode_value
from headgate.runner import checking

SOURCE = """
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

class Good(BaseTrigger):
    def __init__(self, *, count, start=0):
        pass
    def serialize(self):
        return "users.Good", {}
    async def run(self):
        yield TriggerEvent(1)

class Anything(Good):
    def __init__(self, **kwargs):
        pass

class NoArguments(Good):
    def __init__(self):
        pass

class BadKey(BaseEventTrigger):
    def serialize(self):
        return "users.BadKey", {}
    def shared_stream_key(self):
        return object()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    (tmp_path / "checkable.py").write_text(SOURCE)
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "__init__.py").write_text("")
    (tmp_path / "nested" / "inside.py").write_text(SOURCE)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def problem(tmp_path: Path) -> Callable[..., str]:
    """Return what is said of a classpath and kwargs."""

    def ask(classpath: str, **kwargs: Any) -> str:
        return checking.check(CheckTrigger(classpath, encode_value(kwargs, where="kwargs"), (str(tmp_path),))).problem

    return ask


def test_what_can_be_constructed_has_no_problem(problem: Callable[..., str]) -> None:
    assert problem("checkable.Good", count=1) == ""
    assert problem("checkable.Anything", whatever=1) == ""
    assert problem("nested.inside.NoArguments") == ""


def test_a_broken_neighbour_is_no_problem_of_what_is_checked(problem: Callable[..., str]) -> None:
    def log(limit: int) -> bytes:
        return encode_value({"path": "log", "group": "g", "line_bytes_max": limit}, where="kwargs")

    classpath = "headgate.brokers.filelog.FileLogTrigger"
    others = (
        OtherTrigger("gone", "no.such.Class", b"{}"),
        OtherTrigger("garbled", classpath, b"{"),
        OtherTrigger("refused", classpath, b'{"group": "../g"}'),
        OtherTrigger("same", classpath, log(20)),
        OtherTrigger("other", classpath, log(10)),
    )
    note = "the watcher other reads the same stream, with line_bytes_max=10, not 20"
    assert checking.check(CheckTrigger(classpath, log(20), others=others)) == TriggerChecked(notes=(note,))


@pytest.mark.parametrize(
    ("classpath", "near"),
    [
        ("checkabel.Good", "checkable.Good"),
        ("checkable.Goood", "checkable.Good"),
        ("nested.insidee.Good", "nested.inside.Good"),
        ("nested.inside.Goood", "nested.inside.Good"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(problem: Callable[..., str], classpath: str, near: str) -> None:
    assert problem(classpath, count=1).endswith(f"; did you mean {near}?")


def test_a_name_that_is_near_to_nothing_is_answered_without_a_guess(problem: Callable[..., str]) -> None:
    assert "did you mean" not in problem("checkable.Qqqqqqqqq")
    assert problem("nope.Nope").startswith("nope.Nope: there is no module 'nope'; is its folder among import_paths")


def test_arguments_that_are_not_taken_or_lacking_are_named(problem: Callable[..., str]) -> None:
    assert problem("checkable.Good", cuont=1) == (
        "checkable.Good has no argument 'cuont'; did you mean 'count'? (it takes count, start)"
    )
    assert problem("checkable.Good") == "checkable.Good needs the argument 'count' (it takes count, start)"
    assert problem("checkable.NoArguments", count=1) == "checkable.NoArguments has no argument 'count' (it takes none)"


def test_a_key_of_a_stream_that_no_process_can_share_is_a_problem(problem: Callable[..., str]) -> None:
    assert "the address of an object" in problem("checkable.BadKey")
