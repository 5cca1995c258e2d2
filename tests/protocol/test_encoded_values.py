"""Encoded values that are looked into, and not decoded: their items, and whether others have encoded them well."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.protocol import decode_value, encode_value
from headgate.protocol.encoded_values import (
    JSON_DEPTH_MAX,
    count_items,
    encoding_problem,
    set_items,
    split_items,
    values_in,
)
from headgate.protocol.errors import ValueMalformed


def wrapped(levels: int, before: bytes = b"[", after: bytes = b"]") -> bytes:
    return before * levels + b"1" + after * levels


@pytest.mark.parametrize("levels", [JSON_DEPTH_MAX + 1, 900, 20_000])
@pytest.mark.parametrize(("before", "after"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{},{"a":[', b'],"b":1}]')])
def test_json_that_is_nested_too_deeply_for_another_reader_is_refused(levels: int, before: bytes, after: bytes) -> None:
    problem = encoding_problem(wrapped(levels, before, after))
    assert problem is not None
    assert problem == f"is nested deeper than {JSON_DEPTH_MAX} levels of JSON" or problem.startswith("is not JSON: ")
    assert values_in(wrapped(20_000, before, after)) is None
    with pytest.raises(ValueMalformed):
        set_items(b'{"a":' + wrapped(20_000, before, after) + b"}", {})


def test_what_is_wide_or_just_as_deep_as_may_be_is_taken() -> None:
    assert encoding_problem(b"[" + b"[]," * 10_000 + b'{"a":"[[["}]') is None
    assert encoding_problem(wrapped(JSON_DEPTH_MAX)) is None
    assert encoding_problem(b'"' + b"[" * 1000 + b'"') is None


@pytest.mark.parametrize("data", [b"", b"{", b"abc", b'"\xff"', b"1e999", b"1 2"])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    assert (encoding_problem(data) or "").startswith("is not JSON: ")


@pytest.mark.parametrize(
    ("value", "items"),
    [([1, {"a": (2,)}], [1, {"a": (2,)}]), (("x",), ["x"]), ({"rows": []}, []), ({"rows": (b"x",), "n": 1}, [b"x"])],
)
def test_items_are_split_without_being_decoded(value: Any, items: list[Any]) -> None:
    found = split_items(encode_value(value, where="v"), of_dict="rows")
    assert [decode_value(item) for item in found] == items
    assert found == [encode_value(item, where="v") for item in items]


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ([1, {"a": (2,)}, None], [1, {"a": (2,)}, None]),
        ((b"x", "y"), [b"x", "y"]),
        ({"a": (1,), 'b"': 2}, [("a", (1,)), ('b"', 2)]),
        ({1: {2}, "$": 3}, [(1, {2}), ("$", 3)]),
        ([], []),
        ({}, []),
        ({1, 2}, None),
        ("ab", None),
        (3, None),
    ],
)
def test_the_items_over_which_a_task_is_expanded_are_each_encoded_as_by_itself(value: Any, items: Any) -> None:
    found = values_in(encode_value(value, where="v"))
    assert found == (None if items is None else [encode_value(item, where="v") for item in items])
    assert count_items(encode_value(value, where="v")) == (None if items is None else len(items))


def test_named_arguments_are_set_without_being_decoded() -> None:
    before = encode_value({"a": (1,), "b": 2}, where="v")
    after = set_items(before, {"b": encode_value({3: 4}, where="v"), "c": b"null"})
    assert decode_value(after) == {"a": (1,), "b": {3: 4}, "c": None}
    for data in (b"[]", b"{", encode_value({1: 2}, where="v")):
        with pytest.raises(ValueMalformed, match="named arguments"):
            set_items(data, {"a": b"1"})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("x", "it is a str"),
        (None, "it is None"),
        (2**70, "it is an int"),
        ({1, 2}, "it is a set"),
        ({1: 2}, "it is a dict"),
        ({"users": []}, "its 'rows' is missing"),
        ({"rows": {"a": 1}}, "its 'rows' is a dict"),
    ],
)
def test_what_has_no_items_is_named_by_its_type(value: Any, problem: str) -> None:
    with pytest.raises(ValueMalformed, match=f"^{problem}$"):
        split_items(encode_value(value, where="v"), of_dict="rows")
    with pytest.raises(ValueMalformed, match="not the JSON"):
        split_items(b"[", of_dict="rows")
