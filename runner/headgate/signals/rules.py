"""Rules by which signals start, restart and stop tasks: `On`, its predicates, and `SignalOperator`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar

from headgate.protocol.messages.rules import (
    Action,
    ClockRule,
    Condition,
    CronRule,
    EndState,
    Overlap,
    Rule,
    Rules,
    SignalRule,
    StoppedAs,
    TaskRule,
    is_met,
    stopped_as_default,
)
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE, SIGNAL_BYTES_MAX, Predicate, Since
from headgate.protocol.messages.signals import Comparison as _Comparison
from headgate.protocol.values import encode_value
from headgate.signals.cron import read_cron
from headgate.signals.versions import Signal, SignalVersion, UnreadableValue

_E = TypeVar("_E", bound=enum.StrEnum)


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
    """The time, in place of a key: when the run begins, and then whenever ``interval`` has passed again.

    Or a cron expression: the times that it says while the run is open, in the time zone of the DAG.
    """

    interval: timedelta | str


@dataclass(frozen=True)
class On:
    """A rule: what a signal under ``key`` does to the task that has the rule, if its value meets the ``predicate``.

    Signals count that were sent since the run was created; with ``since="latest"`` the newest one before that counts as
    well, and with ``"last_run"`` those that the same rule of the run before was not held against any more. In place of
    a key there may be the end of another task, `TaskEnded`, or the time, `Every`; these have no
    predicate.
    """

    key: str | TaskEnded | Every
    predicate: Predicate | None = None
    action: SignalAction = START
    condition: SignalCondition = SUFFICIENT
    namespace: str = DEFAULT_NAMESPACE
    since: Since = "run"

    def to_rule(self, timezone: str = "UTC") -> Rule:
        """Return the rule as the supervisor gets it. Raises TypeError and ValueError, which say what is wrong.

        ``timezone`` is that of the DAG.
        """
        action: Action = _one_of(SignalAction, self.action, "action").value
        condition: Condition = _one_of(SignalCondition, self.condition, "condition").value
        if isinstance(self.key, TaskEnded | Every):
            if (self.predicate, self.namespace, self.since) != (None, DEFAULT_NAMESPACE, "run"):
                raise ValueError(f"{type(self.key).__name__}(...) has no predicate, no namespace, and no since")
        if isinstance(self.key, Every):
            if isinstance(self.key.interval, str):
                return CronRule(read_cron(self.key.interval, timezone), timezone, action, condition)
            if not isinstance(self.key.interval, timedelta):
                expected = "a timedelta or a cron expression"
                raise TypeError(f"the interval of Every must be {expected}, not {self.key.interval!r:.100}")
            return ClockRule(self.key.interval.total_seconds(), action, condition)
        if isinstance(self.key, TaskEnded):
            if self.key.state not in (None, "success", "failed", "skipped", "upstream_failed"):
                raise ValueError(f"{self.key.state!r:.100} is not a state in which a task ends")
            return TaskRule(_text(self.key.task_id, "task_id"), self.key.state, action, condition)
        if self.predicate is not None and not isinstance(self.predicate, Predicate):
            raise TypeError(f"the predicate must be made by a function as equal(), not {self.predicate!r:.100}")
        if self.since not in ("run", "latest", "last_run"):
            raise ValueError(f"since must be 'run', 'latest' or 'last_run', not {self.since!r:.100}")
        namespace = _text(self.namespace, "namespace")
        return SignalRule(_text(self.key, "key"), namespace, self.predicate, action, condition, self.since)


@dataclass(frozen=True)
class OnSignal:
    """The schedule of a DAG: a run for each signal under ``key`` whose value meets the ``predicate``.

    In a list there is a run when each of them has had a signal; in an `Each`, `Batch` or `Latest` these words count, as
    for assets. Signals count that are sent after the DAG was parsed with this for the first time; with
    ``since="latest"`` the newest one before that counts as well.
    """

    key: str
    predicate: Predicate | None = None
    namespace: str = DEFAULT_NAMESPACE
    since: Literal["parsed", "latest"] = "parsed"

    def to_rule(self) -> SignalRule:
        """Return it as the supervisor gets it. Raises TypeError and ValueError, which say what is wrong."""
        if self.since not in ("parsed", "latest"):
            raise ValueError(f"the since of OnSignal must be 'parsed' or 'latest', not {self.since!r:.100}")
        if not isinstance(self.key, str):
            raise TypeError(f"the key of OnSignal must be a str, not {self.key!r:.100}")
        since: Since = "latest" if self.since == "latest" else "run"
        rule = On(self.key, self.predicate, namespace=self.namespace, since=since).to_rule()
        assert isinstance(rule, SignalRule), "its key is a text"
        return rule


def end_rule(rule: On) -> SignalRule:
    """Return a rule that ends runs as the supervisor gets it. Raises TypeError and ValueError."""
    if not isinstance(rule, On) or not isinstance(rule.key, str):
        raise TypeError(f"end_on takes rules about signals, as On('drain'), not {rule!r:.100}")
    if rule.action not in (START, STOP) or rule.condition != SUFFICIENT:
        raise ValueError(f"a rule of end_on ends the run by itself; {rule!r:.100} has another action or condition")
    found = replace(rule, action=STOP).to_rule()
    assert isinstance(found, SignalRule), "its key is a text"
    return found


def _one_of(kind: type[_E], value: str, what: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        expected = ", ".join(kind)
        raise ValueError(f"the {what} of a rule must be one of {expected}, not {value!r:.100}") from None


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
    if not isinstance(predicate, Predicate):
        raise TypeError(f"a part of a value meets a predicate, as at_least(3), not {predicate!r:.100}")
    return Predicate(predicate.test, predicate.operand, (*_text(path, "field").split("."), *predicate.path))


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

    def on_signal(self, signal: SignalVersion) -> SignalAction:
        """Return what a signal does to the task, which meets one of its rules about keys.

        For a subclass to override: then it is called for each, in a process for that alone, in the order in which they
        were sent. It may be called twice for one signal, and one answer counts. As it is here no code is called: the
        supervisor itself does what the first rule says that the signal meets.
        """
        for one in self._signals:
            is_about = (one.key, one.namespace) == (signal.key, signal.namespace)
            if is_about and (one.predicate is None or is_met(one.predicate, _encoded(signal.value))):
                return SignalAction(one.action)
        return NONE

    @property
    def decides(self) -> bool:
        """Whether the class overrides `on_signal`."""
        return type(self).on_signal is not SignalOperator.on_signal


def _encoded(value: Any) -> bytes:
    if isinstance(value, UnreadableValue):
        return value.data  # as the supervisor holds it against the rule
    return encode_value(value, where="the value of a signal", bytes_max=SIGNAL_BYTES_MAX)


def decide(operator: SignalOperator, signal: SignalVersion) -> SignalAction:
    """Return what `on_signal` of an operator says. Raises TypeError for anything but an action."""
    action = operator.on_signal(signal)
    # An action is a text, and so is its name.
    if isinstance(action, str) and action in SignalAction.__members__:
        return SignalAction(action)
    expected = ", ".join(f"SignalAction.{name}" for name in SignalAction.__members__)
    raise TypeError(f"{type(operator).__name__}.on_signal returned {action!r:.100}; expected one of {expected}")


def rules_of(
    operator: SignalOperator, overlap: Overlap, stopped_as: StoppedAs, *, is_endless: bool, timezone: str = "UTC"
) -> Rules | None:
    """Return the rules of a task as the supervisor gets them; None if there are none. ``timezone`` is its DAG's.

    An endless one may say without any how a stop by hand leaves it.
    """
    rules = tuple(signal.to_rule(timezone) for signal in operator.signals())
    says_how = is_endless and stopped_as != stopped_as_default(is_endless=True)
    return Rules(rules, overlap, stopped_as, operator.decides and bool(rules)) if rules or says_how else None
