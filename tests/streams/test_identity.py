"""The identity of a shared stream: the same for equal keys, and in every process."""

from __future__ import annotations

import ast
import enum
import os
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.messages.runner import STREAM_NAME_CHARS_MAX
from headgate.streams.identity import DIGEST_HEX_CHARS, identify


class Colour(enum.Enum):
    RED = "red"


class Word(enum.StrEnum):
    RED = "red"


class Place(NamedTuple):
    folder: str
    number: int


@dataclass(frozen=True)
class Key:
    folder: str
    tags: frozenset[str]
    note: str = field(default="", compare=False)


class WithAddress:
    pass


class WithSet:
    def __repr__(self) -> str:
        return f"WithSet({frozenset({'a', 'b'})})"


# Run in processes of their own, which differ in the order of sets.
PROGRAM = """
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import PurePosixPath
from uuid import UUID

from headgate.streams.identity import identify


@dataclass(frozen=True)
class Key:
    tags: frozenset[str]


keys = [("inbox", "/orders", 7), frozenset({"a", "b", "c", "d", ("e", 2)}), Key(frozenset({"p", "q", "r"})),
    PurePosixPath("/a"), date(2025, 1, 2), UUID(int=5), Decimal("0.10"), (), "a\\udc80\\0", 2**80, 1.5, b"x",
    datetime(2025, 1, 1, tzinfo=UTC)]
print([identify(key).digest for key in keys])
"""


def test_every_process_computes_the_same_digests_whatever_its_hash_seed() -> None:
    printed = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        printed.append(subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True))
    assert printed[0] == printed[1]
    digests = ast.literal_eval(printed[0])
    assert len(set(digests)) == len(digests)
    # The database keeps digests: a later version has to compute the same.
    assert digests[0] == identify(("inbox", "/orders", 7)).digest == "3c51e7140f8c3c7a22bcfa5db3365cafe8669258"


_parts = st.one_of(
    st.text(max_size=3),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1.0, 0.5, Decimal("0.5"), Decimal("1.00"), Fraction(1, 2), Fraction(2)]),
    st.binary(max_size=2),
    st.sampled_from([Word.RED, "red", Colour.RED, date(2025, 1, 1)]),
    st.sampled_from(
        [datetime(2025, 1, 1, 12, tzinfo=UTC), datetime(2025, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))]
    ),
)
_keys = st.recursive(
    _parts,
    lambda inner: st.one_of(
        st.tuples(inner),
        st.tuples(inner, inner),
        st.frozensets(inner, max_size=3),
        st.builds(Place, st.sampled_from(["f", "g"]), st.integers(0, 1)),
    ),
    max_leaves=4,
)


@given(_keys, _keys)
def test_keys_have_the_same_digest_if_and_only_if_they_are_equal(one: Hashable, other: Hashable) -> None:
    if one == other:
        assert identify(one) == identify(other)
        assert hash(identify(one)) == hash(identify(other))
    elif "nan" not in repr(one):
        assert identify(one) != identify(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (("q", 1), ("q", Decimal("1.00"))),
        (0.5, Fraction(1, 2)),
        (Word.RED, "red"),
        (Place("f", 1), ("f", 1)),
        (Key("f", frozenset("ab"), note="x"), Key("f", frozenset("ba"), note="y")),
    ],
)
def test_equal_keys_of_different_types_are_one_stream(one: Hashable, other: Hashable) -> None:
    assert one == other
    assert identify(one) == identify(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", 1),
        (b"a", "a"),
        (("a", "b"), ("ab",)),
        (("a",), frozenset({"a"})),
        (Colour.RED, "red"),
        ("a\\udc80", "a\udc80"),
        ("None", None),
        (PurePosixPath("/a"), "/a"),
    ],
)
def test_different_keys_are_different_streams(one: Hashable, other: Hashable) -> None:
    assert identify(one) != identify(other)


@pytest.mark.parametrize(("key", "problem"), [(WithAddress(), "address"), (("a", WithSet()), "a set")])
def test_a_key_that_differs_from_process_to_process_is_refused_by_the_name_of_its_class(
    key: Hashable, problem: str
) -> None:
    with pytest.raises(TypeError, match=rf"test_identity\.With(Address|Set) whose repr contains .*{problem}"):
        identify(key)


def test_a_key_that_is_not_hashable_is_refused() -> None:
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        identify(["a"])  # type: ignore[arg-type]


def test_a_key_that_is_nested_too_deeply_is_refused() -> None:
    key: Hashable = "a"
    for _ in range(200):
        key = (key,)
    with pytest.raises(TypeError, match="nested deeper than 100 levels"):
        identify(key)


def test_a_decimal_of_any_size_has_a_digest_at_once() -> None:
    assert identify(Decimal("1e999999999")) != identify(Decimal("1e-999999999"))


def test_the_name_is_short_text_that_every_database_stores() -> None:
    identity = identify("a\0\udc80" * STREAM_NAME_CHARS_MAX)
    assert len(identity.name) <= STREAM_NAME_CHARS_MAX
    identity.name.encode()
    assert "\0" not in identity.name
    assert len(identity.digest) == DIGEST_HEX_CHARS
    assert repr(identify(("inbox", "/a"))) == "('inbox', '/a')"
