"""Rules by which signals start, restart and stop tasks: `On`, its predicates, and `SignalOperator`."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from headgate.protocol.messages.rules import (
    Action,
    ClockRule,
    Condition,
    EndState,
    Overlap,
    Rule,
    Rules,
    SignalRule,
    StoppedAs,
    TaskRule,
)
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE, SIGNAL_BYTES_MAX, Predicate, Since
from headgate.protocol.messages.signals import Comparison as _Comparison
from headgate.protocol.values import encode_value
from headgate.signals.base import Signal


class SignalAction(enum.StrEnum):
    """What a signal does to a task.

    ``START`` starts it; one that is under way starts once more when it has ended. ``RESTART`` ends what is under way
    before. ``STOP`` ends it. ``NONE`` does nothing; a start has the signal in its context.
    """

    NONE = "NONE"
    START = "START"
    RESTART = "RESTART"
    STOP = "STOP"


class SignalCondition(enum.StrEnum):
    """Whether a signal acts by itself, or together with all others that are necessary, and the task's trigger rule."""

    SUFFICIENT = "sufficient"
    NECESSARY = "necessary"


NONE: Final = SignalAction.NONE
START: Final = SignalAction.START
RESTART: Final = SignalAction.RESTART
STOP: Final = SignalAction.STOP
SUFFICIENT: Final = SignalCondition.SUFFICIENT
NECESSARY: Final = SignalCondition.NECESSARY


@dataclass(frozen=True)
class TaskEnded:
    """The end of another task of the run, in place of a key: in this ``state``, or in any."""

    task_id: str
    state: EndState | None = None


@dataclass(frozen=True)
class Every:
    """The time, in place of a key: when the run begins, and then whenever ``interval`` has passed again."""

    interval: timedelta


@dataclass(frozen=True)
class On:
    """A rule: what a signal under ``key`` does to the task that has the rule, if its value meets the ``predicate``.

    Signals count that were sent since the run was created; with ``since="latest"`` the newest one before that counts as
    well. In place of a key there may be the end of another task, `TaskEnded`, or the time, `Every`; these have no
    predicate.
    """

    key: str | TaskEnded | Every
    predicate: Predicate | None = None
    action: SignalAction = START
    condition: SignalCondition = SUFFICIENT
    namespace: str = DEFAULT_NAMESPACE
    since: Since = "run"

    def to_rule(self) -> Rule:
        """Return the rule as the supervisor gets it. Raises TypeError and ValueError, which say what is wrong."""
        action: Action = SignalAction(self.action).value
        condition: Condition = SignalCondition(self.condition).value
        if isinstance(self.key, TaskEnded | Every):
            if (self.predicate, self.namespace, self.since) != (None, DEFAULT_NAMESPACE, "run"):
                raise ValueError(f"{type(self.key).__name__}(...) has no predicate, no namespace, and no since")
        if isinstance(self.key, Every):
            if not isinstance(self.key.interval, timedelta):
                raise TypeError(f"the interval of Every must be a timedelta, not {self.key.interval!r:.100}")
            return ClockRule(self.key.interval.total_seconds(), action, condition)
        if isinstance(self.key, TaskEnded):
            if self.key.state not in (None, "success", "failed", "skipped", "upstream_failed"):
                raise ValueError(f"{self.key.state!r:.100} is not a state in which a task ends")
            return TaskRule(_text(self.key.task_id, "task_id"), self.key.state, action, condition)
        if self.predicate is not None and not isinstance(self.predicate, Predicate):
            raise TypeError(f"the predicate must be made by a function as equal(), not {self.predicate!r:.100}")
        if self.since not in ("run", "latest"):
            raise ValueError(f"since must be 'run' or 'latest', not {self.since!r:.100}")
        namespace = _text(self.namespace, "namespace")
        return SignalRule(_text(self.key, "key"), namespace, self.predicate, action, condition, self.since)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the {what} of a signal must be a str, not {value!r:.100}")
    return value


# --- predicates ----------------------------------------------------------------------------------


def equal(value: Any) -> Predicate:
    """The value of the signal is this one. The order of the keys in dicts does not matter."""
    return _predicate("equal", value)


def one_of(*values: Any) -> Predicate:
    """The value is one of these."""
    return _predicate("one_of", list(values))


def at_least(value: float | str) -> Predicate:
    """The value is this number, or a larger one; or a text that is not before this one in the order of Unicode."""
    return _predicate("at_least", value)


def at_most(value: float | str) -> Predicate:
    """The value is this number, or a smaller one; or a text that is not behind this one."""
    return _predicate("at_most", value)


def above(value: float | str) -> Predicate:
    """The value is a number, or a text, that is larger than this one."""
    return _predicate("above", value)


def below(value: float | str) -> Predicate:
    """The value is a number, or a text, that is smaller than this one."""
    return _predicate("below", value)


def starts_with(text: str) -> Predicate:
    """The value is a text that begins with this one."""
    return _predicate("starts_with", text)


def field(path: str, predicate: Predicate) -> Predicate:
    """The value is a dict, and the part of it at this path, with dots between keys, meets the predicate."""
    return Predicate(predicate.test, predicate.operand, (*path.split("."), *predicate.path))


def _predicate(test: _Comparison, operand: Any) -> Predicate:
    return Predicate(test, encode_value(operand, where=test, bytes_max=SIGNAL_BYTES_MAX))


# --- the operator --------------------------------------------------------------------------------


class SignalOperator:
    """An operator with rules about signals; every operator is one. The names are those of Airflow's proposal."""

    def __init__(self) -> None:
        self._signals: list[On] = []

    def set_signal(self, signal: On | Signal) -> None:
        """Add a rule. A plain `Signal` starts the task when one with this key and value is sent.

        Raises TypeError and ValueError.
        """
        if isinstance(signal, Signal):
            signal = On(signal.key, equal(signal.value))
        if not isinstance(signal, On):
            raise TypeError(f"a rule about a signal is made by On(key, ...), not {signal!r:.100}")
        signal.to_rule()
        self._signals.append(signal)

    def signals(self) -> tuple[On, ...]:
        """Return the rules."""
        return tuple(self._signals)


def rules_of(signals: Iterable[On], overlap: Overlap, stopped_as: StoppedAs) -> Rules | None:
    """Return the rules of a task as the supervisor gets them; None if there are none."""
    rules = tuple(signal.to_rule() for signal in signals)
    return Rules(rules, overlap, stopped_as) if rules else None
