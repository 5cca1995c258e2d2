"""Marks: nothing while nobody arms them, and each named one stands in the production code exactly where it says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.protocol import marks

ROOT = Path(__file__).parents[3]
REACHED = re.compile(r"marks\.(?:reach|in_halves)\(\"([a-z_.]+)\"")


@pytest.fixture
def reached() -> Iterator[list[str]]:
    names: list[str] = []
    marks.arm(names.append)
    yield names
    marks.disarm()


def test_an_unarmed_mark_does_nothing_and_data_stays_whole() -> None:
    marks.reach("store.committed")
    data = b"whole"
    assert next(iter(marks.in_halves("store.committed", data))) is data


def test_an_armed_mark_calls_back_until_it_is_disarmed(reached: list[str]) -> None:
    marks.reach("store.committed")
    marks.disarm()
    marks.reach("store.committed")
    assert reached == ["store.committed"]


def test_the_second_half_comes_only_after_the_mark(reached: list[str]) -> None:
    halves = iter(marks.in_halves("runner.frame_half_sent", b"12345"))
    assert next(halves) == b"12"
    assert reached == []
    assert next(halves) == b"345"
    assert reached == ["runner.frame_half_sent"]


def test_every_mark_stands_once_in_the_code_of_its_side() -> None:
    places: Counter[str] = Counter()
    all_marks = (
        *(marks.MARKS, marks.TASK_MARKS, marks.POISON_MARKS, marks.REDELIVERY_MARKS, marks.RUNAWAY_MARKS),
        *(marks.LETTER_MARKS, marks.CONSUMER_MARKS, marks.TASK_STREAM_MARKS, marks.MAP_MARKS),
        *(marks.SIGNAL_MARKS, marks.BELL_MARKS, marks.BUNDLE_MARKS, marks.ENDLESS_MARKS),
    )
    known = {name: mark for some in all_marks for name, mark in some.items()}
    assert len(known) == sum(map(len, all_marks))
    roots = {
        "protocol": {"supervisor"},
        "runner": {"runner", "worker"},
        "supervisor": {"supervisor", "command", "consumer"},
    }
    for root, sides in roots.items():
        for path in (ROOT / root).rglob("*.py"):
            if path.name == "marks.py":
                continue
            for name in REACHED.findall(path.read_text()):
                places[name] += 1
                assert known[name].side in sides, f"{name} stands in {path}"
    assert places == Counter(dict.fromkeys(known, 1))
    assert len(marks.MARKS) >= 14
