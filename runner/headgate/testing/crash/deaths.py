"""The plan of the kills of a crash test, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from headgate.brokers.filelog import FileLogTrigger
from headgate.protocol import marks
from headgate.testing.crash.journal import is_journaled
from headgate.triggers.base import BaseTrigger

Victim = marks.Side | Literal["broker"]

SKIPS = (1, 0, 2)  # how often a mark is passed before the first kill at it, the second, and so on
DELAY_S_MAX = 0.1  # a random wait before a kill at no mark, so that kills do not follow the rhythm of the looks


class Death(NamedTuple):
    """One SIGKILL: the process that is killed, and the mark at which; at a random moment if ``mark`` is None.

    A broker has no marks, and is started again at once.

    The mark is passed ``skips`` times before.
    """

    victim: Victim
    mark: str | None
    delay_s: float
    skips: int = 0

    def __str__(self) -> str:
        return f"{self.victim}, {self.mark or 'at a random moment'}"


def plan_deaths(count: int, trigger: BaseTrigger, seed: int, *, has_broker: bool = False) -> list[Death]:
    """Return the kills in order: every other one at a mark, of both processes, all marks before any is repeated.

    With ``has_broker`` every third one is of the broker.
    """
    randomness = random.Random(seed)
    names = [name for name, mark in marks.MARKS.items() if mark.when == "flow" and _is_passed(name, trigger)]
    waiting: list[str] = []
    deaths = []
    for number in range(count):
        delay_s = randomness.uniform(0, DELAY_S_MAX)
        if has_broker and number % 3 == 1:
            deaths.append(Death("broker", None, delay_s))
        elif number % 2 == 0:
            waiting = waiting or randomness.sample(names, len(names))
            mark = waiting.pop()
            deaths.append(Death(marks.MARKS[mark].side, mark, delay_s))
        else:
            deaths.append(Death(randomness.choice(("runner", "runner", "supervisor")), None, delay_s))
    return deaths


def plan_deaths_of_tasks(count: int, seed: int, names: Sequence[str]) -> list[Death]:
    """Return the kills in order: each at one of these marks, all of them before any is repeated.

    The first kill at a mark is when it is reached for the second time: the first step of a task only defers, perhaps.
    """
    randomness = random.Random(seed)
    known = marks.MARKS | marks.TASK_MARKS | marks.BUNDLE_MARKS | marks.TASK_STREAM_MARKS | marks.MAP_MARKS
    waiting: list[str] = []
    deaths = []
    for number in range(count):
        waiting = waiting or randomness.sample(names, len(names))
        mark = waiting.pop()
        deaths.append(Death(known[mark].side, mark, 0.0, SKIPS[number // len(names) % len(SKIPS)]))
    return deaths


def _is_passed(mark: str, trigger: BaseTrigger) -> bool:
    """Whether a pair that runs this trigger reaches the mark."""
    place = mark.partition(".")[0]
    if place == "capture":
        return False  # nothing is captured
    if place == "filelog":
        return isinstance(trigger, FileLogTrigger)
    # A runner whose trigger has no producer advances nothing.
    return place != "group" or is_journaled(trigger)
