"""Rules of tasks about signals, as data: which signals count, and what they do. The supervisor decides by them alone.

A task may have several rules. A *sufficient* one acts by itself. The *necessary* ones act together, once each of them
is met, and the task's trigger rule holds. A predicate says which values count; without one all do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headgate.protocol.messages import MALFORMED, WireStruct
from headgate.protocol.messages.signals import (
    DEFAULT_NAMESPACE,
    SIGNAL_BYTES_MAX,
    Comparison,
    Predicate,
    Since,
    address_problem,
)
from headgate.protocol.tags import CONTENT, NUMBER_CHARS_MAX, TAG, is_long_number, number_of

RULES_MAX: Final = 64  # of one task: each is a row in each of its runs
PATH_PARTS_MAX: Final = 20  # of the place of a value within a signal's
PATH_PART_CHARS_MAX: Final = 250
EVERY_S_MIN: Final = 1.0  # between two starts of a periodic task: each costs two transactions
CRON_CHARS_MAX: Final = 250
EVERY_S_MAX: Final = 10 * 365 * 86_400.0

Action: TypeAlias = Literal["NONE", "START", "RESTART", "STOP"]
Condition: TypeAlias = Literal["sufficient", "necessary"]
Overlap: TypeAlias = Literal["latest", "each", "ignore"]
StoppedAs: TypeAlias = Literal["skipped", "success", "failed"]
# The states that end a task, as far as a task that was not removed can end.
EndState: TypeAlias = Literal["success", "failed", "skipped", "upstream_failed"]


class SignalRule(WireStruct, frozen=True, tag="signal"):
    """What a signal under ``key`` does to a task, if its value meets the predicate; part of `Rules`."""

    key: str
    namespace: str = DEFAULT_NAMESPACE
    predicate: Predicate | None = None
    action: Action = "START"
    condition: Condition = "sufficient"
    since: Since = "run"


class TaskRule(WireStruct, frozen=True, tag="task"):
    """What the end of another task of the run does to a task; part of `Rules`. No ``state``: any of its ends."""

    task_id: str
    state: EndState | None = None
    action: Action = "START"
    condition: Condition = "sufficient"


class ClockRule(WireStruct, frozen=True, tag="clock"):
    """The task starts with its run, and again every ``every_s`` seconds; part of `Rules`."""

    every_s: float
    action: Action = "START"
    condition: Condition = "sufficient"


class CronRule(WireStruct, frozen=True, tag="clock_cron"):
    """The task starts at the times of a cron expression, while its run is open; part of `Rules`."""

    cron: str
    timezone: str = "UTC"
    action: Action = "START"
    condition: Condition = "sufficient"


Rule: TypeAlias = SignalRule | TaskRule | ClockRule | CronRule


class Rules(WireStruct, frozen=True):
    """The rules of a task; part of `TaskSpec`.

    ``overlap`` says what becomes of a start while the task is under way: with ``latest`` it starts once more when it
    has ended, with ``each`` as often as there were signals, with ``ignore`` not at all. ``stopped_as`` is the state of
    a task that was stopped, also by hand: without a rule this is all that is said. If the task ``asks``, users' code
    decides in a worker what each signal does that meets a rule about a key; the action of the rule says only whether
    the task waits for a signal to start it.
    """

    rules: tuple[Rule, ...]
    overlap: Overlap = "latest"
    stopped_as: StoppedAs = "skipped"
    asks: bool = False

    @property
    def starts(self) -> bool:
        """Whether the task waits for a signal to start it, and not for its trigger rule alone."""
        return any(rule.action in STARTING for rule in self.rules)


def stopped_as_default(*, is_endless: bool) -> StoppedAs:
    """Return the state in which a stop leaves a task that does not say it."""
    return "success" if is_endless else "skipped"


STARTING: Final = frozenset({"START", "RESTART"})
_ENCODER: Final = msgspec.msgpack.Encoder()


def rule_name(rule: Rule) -> str:
    """Return a short text that only equal rules have: their order in the file may change."""
    return hashlib.sha256(_ENCODER.encode(rule)).hexdigest()[:32]


def encode_predicate(predicate: Predicate | None) -> bytes | None:
    """Return a predicate as bytes."""
    return None if predicate is None else _ENCODER.encode(predicate)


_PREDICATE: Final[msgspec.msgpack.Decoder[Predicate]] = msgspec.msgpack.Decoder(Predicate)


def decode_predicate(data: bytes | None) -> Predicate | None:
    """Return what `encode_predicate` has encoded."""
    return None if data is None else _PREDICATE.decode(data)


# --- whether it is met ---------------------------------------------------------------------------

_MISSING: Final = object()
_DECODER: Final = msgspec.json.Decoder()


def is_met(predicate: Predicate | None, value: bytes) -> bool:
    """Whether an encoded value meets a predicate. No type of a user's is made: both are compared in their JSON form.

    One that cannot be read meets none.
    """
    if predicate is None:
        return True
    try:
        found = _DECODER.decode(value)
    except MALFORMED:
        return False
    for part in predicate.path:
        found = found.get(part, _MISSING) if isinstance(found, dict) else _MISSING
    if found is _MISSING:
        return False
    return _holds(predicate.test, found, _DECODER.decode(predicate.operand))


def _holds(test: Comparison, found: Any, operand: Any) -> bool:
    if test == "equal":
        return _is_same(found, operand)
    if test == "one_of":
        return any(_is_same(found, one) for one in operand)
    if test == "starts_with":
        return isinstance(found, str) and found.startswith(operand)
    pair = _in_order(found, operand)
    if pair is None:
        return False
    one, other = pair
    match test:
        case "at_least":
            return bool(one >= other)
        case "at_most":
            return bool(one <= other)
        case "above":
            return bool(one > other)
        case _:
            return bool(one < other)


def _is_same(one: Any, other: Any) -> bool:
    # To Python True is 1; to who sends a flag, or a number, they are different things.
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    if (number := number_of(one)) is not None:  # before others: some are objects in their JSON form
        return bool(one == other) or number == number_of(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def _in_order(one: Any, other: Any) -> tuple[Any, Any] | None:
    """Return two values as they can be compared, if they are both numbers, or both text; None otherwise."""
    if isinstance(one, str) and isinstance(other, str):
        return one, other
    numbers = number_of(one), number_of(other)
    return None if None in numbers else numbers


# --- the check -----------------------------------------------------------------------------------


def predicate_problem(predicate: Predicate) -> str | None:
    """Return the problem with a predicate, or None."""
    if len(predicate.path) > PATH_PARTS_MAX:
        return f"its field has {len(predicate.path)} parts; the limit is {PATH_PARTS_MAX}"
    for part in predicate.path:
        if not 0 < len(part) <= PATH_PART_CHARS_MAX:
            return f"a part of its field must have 1..{PATH_PART_CHARS_MAX} characters, not {len(part):,}"
    if len(predicate.operand) > SIGNAL_BYTES_MAX:
        return (
            f"the value of {predicate.test} needs {len(predicate.operand):,} bytes; the limit is {SIGNAL_BYTES_MAX:,}"
        )
    try:
        operand = _DECODER.decode(predicate.operand)
    except MALFORMED as error:
        return f"the value of {predicate.test} is not encoded: {error}"
    match predicate.test:
        case "equal":
            return None
        case "one_of":
            return None if isinstance(operand, list) and operand else "one_of needs one value at least"
        case "starts_with":
            return None if isinstance(operand, str) else f"starts_with is for text, not {_shown(operand)}"
        case test:
            if _in_order(operand, operand) is not None:
                return None
            if is_long_number(operand):
                return f"the number of {test} must have {NUMBER_CHARS_MAX:,} characters at most"
            return f"{test} is for numbers and text, not {_shown(operand)}"


def _shown(operand: Any) -> str:
    """Return an operand for people: one with a tag as its author's type, and not in the form in which it is stored."""
    if isinstance(operand, dict) and isinstance(tag := operand.get(TAG), str):
        return f"{tag} {operand.get(CONTENT)!r:.60}"
    return f"{operand!r:.60}"


def rules_problem(rules: Rules) -> str | None:
    """Return the problem with the rules of a task by themselves, or None."""
    if len(rules.rules) > RULES_MAX:
        return f"has {len(rules.rules)} rules about signals; the limit is {RULES_MAX}"
    if len(set(map(rule_name, rules.rules))) != len(rules.rules):
        return "has the same rule about a signal twice"
    for rule in rules.rules:
        if rule.condition == "necessary" and rule.action not in STARTING:
            return f"a necessary signal starts or restarts its task, together with others; its action is {rule.action}"
        if isinstance(rule, ClockRule | CronRule):
            if isinstance(rule, CronRule):
                if not (0 < len(rule.cron) <= CRON_CHARS_MAX and 0 < len(rule.timezone) <= CRON_CHARS_MAX):
                    return f"a cron expression and its time zone must have 1..{CRON_CHARS_MAX} characters"
            elif not EVERY_S_MIN <= rule.every_s <= EVERY_S_MAX:
                return f"every must be {EVERY_S_MIN:.0f} s to {EVERY_S_MAX:.0f} s, not {rule.every_s} s"
            if rule.condition == "necessary" or rule.action not in STARTING:
                return "what happens every so often starts or restarts the task by itself"
        if not isinstance(rule, SignalRule):
            continue
        if rules.asks and rule.condition == "necessary":
            return f"on_signal decides about each signal by itself: the rule about {rule.key!a:.60} cannot be necessary"
        if (problem := signal_rule_problem(rule)) is not None:
            return problem
    return None


def signal_rule_problem(rule: SignalRule) -> str | None:
    """Return the problem with the key of a rule and its predicate, or None."""
    if (problem := address_problem(rule.key, rule.namespace)) is not None:
        return problem
    if rule.predicate is not None and (problem := predicate_problem(rule.predicate)) is not None:
        return f"the rule about the signal {rule.key!a:.60}: {problem}"
    return None


def end_rules_problem(rules: Sequence[SignalRule]) -> str | None:
    """Return the problem with the rules that end the runs of a DAG, or None."""
    if len(rules) > RULES_MAX:
        return f"end_on has {len(rules)} rules about signals; the limit is {RULES_MAX}"
    if len(set(map(rule_name, rules))) != len(rules):
        return "end_on has the same rule about a signal twice"
    for rule in rules:
        if (rule.action, rule.condition) != ("STOP", "sufficient"):
            return f"the rule about {rule.key!a:.60} in end_on ends the run, each by itself"
        if (problem := signal_rule_problem(rule)) is not None:
            return f"end_on: {problem}"
    return None
