"""Rules about signals as data: when a predicate is met, and what is no rule."""

from __future__ import annotations

import math
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import DagSpec, TaskSpec, check_dag
from headgate.protocol.messages.maps import MapSpec, Values
from headgate.protocol.messages.rules import (
    RULES_MAX,
    ClockRule,
    Rule,
    Rules,
    SignalRule,
    TaskRule,
    decode_predicate,
    encode_predicate,
    is_met,
    rule_name,
    rules_problem,
)
from headgate.protocol.messages.signals import SIGNAL_BYTES_MAX, Comparison, Predicate
from headgate.protocol.tags import NUMBER_CHARS_MAX
from headgate.protocol.values import encode_value


def predicate(test: Comparison, operand: Any, *path: str) -> Predicate:
    return Predicate(test, encode_value(operand, where="operand", bytes_max=2 * SIGNAL_BYTES_MAX), path)


@pytest.mark.parametrize(
    ("test", "operand", "met", "not_met"),
    [
        ("equal", "yes", ["yes"], ["Yes", "", None, ["yes"], True]),
        ("equal", 1, [1, 1.0], [True, "1", 2]),
        ("equal", None, [None], [0, "", False, []]),
        ("equal", {"a": 1, "b": [2]}, [{"b": [2], "a": 1}], [{"a": 1}, {"a": 1, "b": [2], "c": 3}]),
        ("equal", {"a": [True]}, [{"a": [True]}], [{"a": [1]}, {"a": [1.0]}, {"a": [True, True]}, {"b": [True]}]),
        ("equal", [1, {"n": Decimal("2.0")}], [[1.0, {"n": 2}]], [[True, {"n": 2}], [1, {"n": 3}], [1]]),
        ("one_of", [[False]], [[False]], [[0], False]),
        ("one_of", ["a", 2, None], ["a", 2, None], ["b", True, [], ["a"]]),
        ("at_least", 3, [3, 3.5, 10**6], [2, 2.9, "3", "4", None, True, [3]]),
        ("at_most", 3, [3, -1], [3.1, "2", None, False]),
        ("above", 0.5, [0.6, 1], [0.5, 0, True, "1"]),
        ("below", 0.5, [0.4, -2], [0.5, 1, False, ""]),
        ("at_least", 3, [2**64, 10**400, math.inf, Decimal("3.0")], [math.nan, -math.inf, -(10**400), Decimal("2.9")]),
        ("below", 2**64, [2**64 - 1, 0.5, -math.inf, Decimal("1E+19")], [2**64, math.inf, Decimal("1E+20"), "1"]),
        ("above", Decimal("0.1"), [0.1, 1, Decimal("0.11"), 2**64], [Decimal("0.10"), 0.0999, Decimal("sNaN"), "0.2"]),
        ("at_most", math.inf, [math.inf, 10**400, Decimal("1E+99999")], [math.nan, Decimal("NaN"), "", timedelta(1)]),
        ("equal", 1, [Decimal("1.0")], [Decimal("1.1"), Decimal("NaN")]),
        ("equal", Decimal("0.10"), [Decimal("0.1")], [0.1, "0.1", {"$": "decimal", "v": "0.10"}]),
        ("equal", math.nan, [math.nan], [math.inf, None]),
        ("one_of", [2**64, (1,)], [2**64, (1,)], [[1], 2**64 + 1, 1]),
        ("at_least", "m", ["m", "n", "ma"], ["l", "M", 13, None]),
        ("starts_with", "ord", ["ord", "orders"], ["Ord", "", None, 1, ["ord"], {"ord": 1}]),
    ],
)
def test_a_predicate_is_met(test: Comparison, operand: Any, met: list[Any], not_met: list[Any]) -> None:
    one = decode_predicate(encode_predicate(predicate(test, operand)))
    assert [value for value in met if not is_met(one, encode_value(value, where="v"))] == []
    assert [value for value in not_met if is_met(one, encode_value(value, where="v"))] == []


def test_a_part_of_the_value_meets_a_predicate() -> None:
    one = predicate("above", 0.2, "drift", "mean")
    for value, is_it in (
        ({"drift": {"mean": 0.3}}, True),
        ({"drift": {"mean": 0.1}}, False),
        ({"drift": 0.3}, False),
        ({"drift": {}}, False),
        ([{"drift": {"mean": 0.3}}], False),
        (0.3, False),
    ):
        assert is_met(one, encode_value(value, where="v")) is is_it, value


@pytest.mark.parametrize("value", [b"abc", b'"\xff"', b"[" * 20_000 + b"]" * 20_000], ids=["text", "bytes", "deep"])
def test_a_value_that_cannot_be_read_meets_no_predicate(value: bytes) -> None:
    assert not is_met(predicate("equal", 1), value)
    assert is_met(None, value)


@pytest.mark.parametrize(
    "value",
    [
        b'{"$":"int","v":7}',
        b'{"$":"int","v":"seven"}',
        b'{"$":"int","v":"0x' + b"f" * NUMBER_CHARS_MAX + b'"}',
        b'{"$":"decimal","v":"x"}',
        b'{"$":["int"],"v":"0x7"}',
        b'{"$":"int","v":"0x7","w":0}',
        b'{"$":"uuid","v":"7"}',
    ],
)
def test_a_number_that_cannot_be_read_is_not_compared(value: bytes) -> None:
    assert not is_met(predicate("at_least", 3), value)
    assert not is_met(predicate("equal", 7), value)


def test_without_a_predicate_any_value_counts() -> None:
    assert is_met(None, b"null")
    assert decode_predicate(encode_predicate(None)) is None


def test_only_equal_rules_have_the_same_name() -> None:
    rules: list[Rule] = [
        SignalRule("k"),
        SignalRule("k", namespace="n"),
        SignalRule("k", action="STOP"),
        SignalRule("k", predicate=predicate("equal", 1)),
        SignalRule("k", predicate=predicate("equal", 1, "a")),
        SignalRule("k", condition="necessary"),
        SignalRule("k", since="latest"),
        TaskRule("k"),
        TaskRule("k", "failed"),
    ]
    assert len(set(map(rule_name, rules))) == len(rules)
    assert rule_name(SignalRule("k")) == rule_name(SignalRule("k", namespace="default"))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (tuple(SignalRule(f"k{number}") for number in range(RULES_MAX + 1)), "has 65 rules"),
        ((SignalRule("k"), SignalRule("k")), "the same rule about a signal twice"),
        ((SignalRule(""),), "the key of a signal '' must have 1..512 characters"),
        ((SignalRule("a\0b"),), "must not contain"),
        ((SignalRule("k", namespace=""),), "the namespace"),
        ((SignalRule("k", action="STOP", condition="necessary"),), "its action is STOP"),
        ((TaskRule("t", action="NONE", condition="necessary"),), "its action is NONE"),
        ((SignalRule("k", predicate=predicate("at_least", None)),), "at_least is for numbers and text, not None"),
        ((SignalRule("k", predicate=predicate("above", True)),), "above is for numbers and text, not True"),
        ((SignalRule("k", predicate=predicate("at_least", date(2026, 1, 2))),), "and text, not date '2026-01-02'"),
        ((SignalRule("k", predicate=predicate("above", 10**9000)),), "the number of above must have 5,000 char"),
        (
            (SignalRule("k", predicate=predicate("above", {"a": "x" * 9000})),),
            "above is for numbers and text, not {'a'",
        ),
        ((SignalRule("k", predicate=predicate("above", (9,) * 9000)),), "above is for numbers and text, not tuple [9"),
        ((SignalRule("k", predicate=predicate("below", math.nan)),), "below is for numbers and text, not float 'nan'"),
        ((SignalRule("k", predicate=predicate("at_most", {"$": 1})),), "numbers and text, not dict [['$', 1]]"),
        ((SignalRule("k", predicate=predicate("starts_with", (1,))),), "starts_with is for text, not tuple [1]"),
        ((SignalRule("k", predicate=predicate("starts_with", 3)),), "starts_with is for text, not 3"),
        ((SignalRule("k", predicate=predicate("one_of", [])),), "one_of needs one value at least"),
        ((SignalRule("k", predicate=Predicate("equal", b"{")),), "the value of equal is not encoded"),
        ((SignalRule("k", predicate=predicate("equal", "x" * SIGNAL_BYTES_MAX)),), "the limit is 49,152"),
        ((ClockRule(0.5),), "every must be 1 s to"),
        ((ClockRule(5.0, action="STOP"),), "starts or restarts the task by itself"),
        ((ClockRule(5.0, condition="necessary"),), "starts or restarts the task by itself"),
        ((SignalRule("k", predicate=predicate("equal", 1, "")),), "a part of its field must have 1..250 characters"),
        ((SignalRule("k", predicate=predicate("equal", 1, *"a" * 21)),), "its field has 21 parts; the limit is 20"),
    ],
)
def test_what_is_no_rule_is_told(rules: tuple[Rule, ...], words: str) -> None:
    assert words in str(rules_problem(Rules(rules)))
    with pytest.raises(DagMalformed, match="task 't'"):
        check_dag(DagSpec("d", tasks=(TaskSpec("t", "Op", signals=Rules(rules)),)))


def dag(**rules: Rule) -> DagSpec:
    return DagSpec("d", tasks=tuple(TaskSpec(name, "Op", signals=Rules((rule,))) for name, rule in rules.items()))


def test_rules_about_tasks_are_checked_with_the_dag() -> None:
    check_dag(dag(a=SignalRule("k"), b=TaskRule("a")))
    check_dag(dag(a=TaskRule("b", action="STOP"), b=TaskRule("a", action="STOP")))
    with pytest.raises(DagMalformed, match="a rule about the end of 'c', which is not a task of this DAG"):
        check_dag(dag(a=SignalRule("k"), b=TaskRule("c")))
    with pytest.raises(DagMalformed, match=r"starts by its own end, (a >> b >> a|b >> a >> b)"):
        check_dag(dag(a=TaskRule("b"), b=TaskRule("a", "success", "RESTART")))
    with pytest.raises(DagMalformed, match="starts by its own end, a >> a"):
        check_dag(dag(a=TaskRule("a")))


def test_a_mapped_task_has_no_rules() -> None:
    mapped = TaskSpec("t", "Op", signals=Rules((SignalRule("k"),)), map=MapSpec(Values(2)))
    with pytest.raises(DagMalformed, match="is mapped, and cannot have rules about signals"):
        check_dag(DagSpec("d", tasks=(mapped,)))
