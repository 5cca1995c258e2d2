"""What a scenario says of rules: those of a task, and what users ask for by hand."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import cache
from typing import Any, Literal

from tests.proof.simulation.scenario import Part

from headgate.protocol.messages.rules import Action, Condition, EndState, Overlap, StoppedAs, rule_name
from headgate.protocol.messages.signals import Since
from headgate.signals.rules import Every, On, SignalAction, SignalCondition, TaskEnded, equal

STARTING = frozenset(("START", "RESTART"))
BY_HAND = "by hand"  # how the rows of rules that stand for users begin


class Rule(Part, frozen=True):
    """A signal under ``key`` does this to a task, if it has this value, as the text of its JSON; None: with any.

    In place of a key: the end of the task ``ended``, as ``state`` if that is set; or the time, each ``every_s``, or at
    the times of a cron expression.
    """

    key: str = ""
    action: Action = "START"
    value: str | None = None
    condition: Condition = "sufficient"
    since: Since = "run"
    ended: str = ""
    state: EndState | None = None
    every_s: float = 0.0
    cron: str = ""

    @property
    def name(self) -> str:
        """What the database has for it."""
        return _name_of(self)

    @property
    def starts(self) -> bool:
        """Whether it starts its task."""
        return self.action in STARTING

    @property
    def is_of_clock(self) -> bool:
        """Whether it is about the time."""
        return bool(self.every_s or self.cron)

    def on(self) -> On:
        """Return it as an author writes it."""
        about: str | TaskEnded | Every = self.key
        if self.ended:
            about = TaskEnded(self.ended, self.state)
        elif self.is_of_clock:
            about = Every(self.cron or timedelta(seconds=self.every_s))
        predicate = None if self.value is None else equal(json.loads(self.value))
        action, condition = SignalAction(self.action), SignalCondition(self.condition)
        return On(about, predicate, action, condition, since=self.since)


@cache
def _name_of(rule: Rule) -> str:
    return rule_name(rule.on().to_rule())


# What becomes of a call of ``on_signal``, or of the process that it is called in.
OfCall = Literal["", "raises", "nonsense", "dies", "hangs"]


class Decides(Part, frozen=True):
    """The task's operator decides about signals itself, each within ``seconds``: by value, and else NONE.

    ``troubles`` are those of its calls, by their number in one task of one run. Values of ``bad`` always have it raise.
    """

    actions: tuple[tuple[str, Action], ...]
    seconds: float = 0.0
    troubles: tuple[OfCall, ...] = ()
    bad: tuple[str, ...] = ()

    def action(self, value: str) -> Action:
        """Return what a signal does with this value, as the text of its JSON; if it cannot be decided that is NONE."""
        return "NONE" if value in self.bad else dict(self.actions).get(value, "NONE")

    def trouble(self, call: int) -> OfCall:
        """Return what becomes of a call, by its number from 0 on."""
        return self.troubles[call] if call < len(self.troubles) else ""


class Ruled(Part, frozen=True):
    """The rules of a task. If it ``decides``, what they say about keys is only whether it waits for a signal."""

    rules: tuple[Rule, ...]
    overlap: Overlap = "latest"
    stopped_as: StoppedAs = "skipped"
    decides: Decides | None = None

    @property
    def starts(self) -> bool:
        """Whether a signal starts the task, and its trigger rule alone does not."""
        return any(rule.starts for rule in self.rules)

    @property
    def is_sufficient(self) -> bool:
        """Whether one signal starts it whatever is upstream."""
        return any(rule.starts and rule.condition == "sufficient" for rule in self.rules)

    def options(self) -> dict[str, Any]:
        """Return the options of the operator."""
        return {
            "signals": [rule.on() for rule in self.rules],
            "overlap": self.overlap,
            "stopped_as": self.stopped_as,
        }


class Asks(Part, frozen=True):
    """A user has a task start, restart or stop."""

    at: float
    task: str
    action: Literal["START", "RESTART", "STOP"]


class EndsRun(Part, frozen=True):
    """A user says that a run is to end."""

    at: float
    run: str
