"""Values: what an author hands over comes back as it was, or is refused with the place of the fault."""

from __future__ import annotations

import enum
import math
import struct
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate.protocol import decode_value, encode_value, register
from headgate.protocol.encoded_values import encoding_problem
from headgate.protocol.errors import ValueMalformed, ValueNotSerializable, ValueTooLong
from headgate.protocol.values import DEPTH_MAX

ZONE = "Test/Central"


@pytest.fixture(scope="module", autouse=True)
def zone_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A zone with summer time of our own, as a fresh machine may have no time zone database."""
    folder: Path = tmp_path_factory.mktemp("zones")
    header = struct.pack("!4s1s15x6L", b"TZif", b"2", 0, 0, 0, 0, 1, 4)
    block = header + struct.pack("!lBB4s", 3600, 0, 0, b"CET\0")
    (folder / "Test").mkdir()
    (folder / ZONE).write_bytes(block + block + b"\nCET-1CEST,M3.5.0,M10.5.0/3\n")
    zoneinfo.reset_tzpath([folder])
    yield
    zoneinfo.reset_tzpath()
    ZoneInfo.clear_cache()


def round_trip(value: Any) -> Any:
    return decode_value(encode_value(value, where="value"))


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type and content all the way down; 1, 1.0 and True are not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(same(a, b) for b in other) for a in one)
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, Decimal):
        return str(one) == str(other)
    if isinstance(one, datetime | time):
        return one.isoformat() == other.isoformat() and str(one.tzinfo) == str(other.tzinfo)
    return bool(one == other)


def zones() -> st.SearchStrategy[tzinfo | None]:
    offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
    return st.none() | st.just(UTC) | offsets | st.builds(ZoneInfo, st.just(ZONE))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(),
    st.binary(),
    st.decimals(),
    st.uuids(),
    st.dates(),
    st.timedeltas(),
    st.builds(lambda moment, zone: moment.replace(tzinfo=zone), st.datetimes(), zones()),
    st.builds(lambda moment, zone: moment.replace(tzinfo=zone), st.times(), zones()),
)
# A signalling NaN cannot be hashed.
HASHABLE = LEAVES.filter(lambda leaf: not isinstance(leaf, Decimal) or not leaf.is_snan())
HASHABLE = HASHABLE | st.lists(HASHABLE, max_size=3).map(tuple) | st.frozensets(HASHABLE, max_size=3)
TEXT_KEYS = st.text() | st.sampled_from(["$", "v", "$$"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT_KEYS, inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(value=VALUES)
@example(value=[1, True, 1.0, 0, False, 0.0, -0.0, math.inf, -math.inf, math.nan])
@example(value={"$": "datetime", "v": "2025-01-01"})
@example(value={"$": {"$": 1, "v": 2}, 1: "one"})
@example(value=[2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**5000])
@example(value=[Decimal("0.10"), Decimal("-0"), Decimal("1E+9"), Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity")])
@example(value=[datetime.min, datetime.max, date.min, time.max, timedelta.min, timedelta.max])
@example(value=[(), set(), frozenset(), {}, [], "", b"", UUID(int=0)])
@example(value=[time(0, tzinfo=timezone(timedelta(microseconds=us))) for us in (1, -1, 999_999, -999_999)])
@example(value=[datetime(2026, 1, 1, tzinfo=timezone(timedelta(microseconds=us))) for us in (1, -999_999, 1_000_001)])
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(round_trip(value), value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: key != "$"), inner),
)


@settings(deadline=None)
@given(value=PLAIN)
def test_what_json_has_is_written_as_json(value: Any) -> None:
    assert encode_value(value, where="value") == msgspec.json.encode(value)


@settings(deadline=None)
@given(value=st.sets(st.text() | st.integers(), max_size=6))
def test_equal_sets_are_written_alike(value: set[Any]) -> None:
    again = set(sorted(value, key=repr, reverse=True))
    assert encode_value(again, where="value") == encode_value(value, where="value")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (datetime(2025, 1, 2, 3, 4, 5), '{"$":"datetime","v":"2025-01-02T03:04:05"}'),
        (datetime(2025, 1, 2, tzinfo=UTC), '{"$":"datetime","v":"2025-01-02T00:00:00+00:00"}'),
        (date(2025, 1, 2), '{"$":"date","v":"2025-01-02"}'),
        (time(3, 4), '{"$":"time","v":"03:04:00"}'),
        (timedelta(days=-1, seconds=2), '{"$":"timedelta","v":[-1,2,0]}'),
        (Decimal("0.10"), '{"$":"decimal","v":"0.10"}'),
        (UUID(int=1), '{"$":"uuid","v":"00000000-0000-0000-0000-000000000001"}'),
        (b"\x00\xff", '{"$":"bytes","v":"AP8="}'),
        ((1, [2]), '{"$":"tuple","v":[1,[2]]}'),
        ({2, 1}, '{"$":"set","v":[1,2]}'),
        (frozenset("a"), '{"$":"frozenset","v":["a"]}'),
        (math.nan, '{"$":"float","v":"nan"}'),
        (2**64, '{"$":"int","v":"0x10000000000000000"}'),
        ({1: "a"}, '{"$":"dict","v":[[1,"a"]]}'),
        ({"$": "a"}, '{"$":"dict","v":[["$","a"]]}'),
        ({"a": [{"b": (1,)}]}, '{"a":[{"b":{"$":"tuple","v":[1]}}]}'),
    ],
)
def test_the_tagged_form_is_what_it_was(value: Any, written: str) -> None:
    """Values are stored: what is written today must be read for ever."""
    assert encode_value(value, where="value").decode() == written
    assert same(decode_value(written.encode()), value)


def test_an_hour_that_comes_twice_is_told_apart() -> None:
    for fold, offset in ((0, "+02:00"), (1, "+01:00")):
        moment = datetime(2025, 10, 26, 2, 30, fold=fold, tzinfo=ZoneInfo(ZONE))
        data = encode_value(moment, where="value")
        assert f"2025-10-26T02:30:00{offset}[{ZONE}]" in data.decode()
        back = decode_value(data)
        assert (back.fold, back.tzinfo, back.utcoffset()) == (fold, ZoneInfo(ZONE), moment.utcoffset())


# --- refusals --------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class OddZone(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(0)

    dst = utcoffset

    def tzname(self, moment: datetime | None) -> str:
        return "odd"


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"callback": test_an_hour_that_comes_twice_is_told_apart}, "kwargs['callback'] is a function"),
        ({"a": [0, 1, 2, object()]}, "kwargs['a'][3] is an object"),
        ({"a": lambda: 0}, "kwargs['a'] is a function"),
        ({"a": range(3)}, "kwargs['a'] is a range: make a list of it"),
        ({"a": {}.keys()}, "kwargs['a'] is a dict_keys: make a list of it"),
        ((1, (n for n in [1])), "kwargs[1] is a generator: make a list of it"),
        ({"a": bytearray()}, "kwargs['a'] is a bytearray"),
        ({"a": 1j}, "kwargs['a'] is a complex"),
        ([Point(1, 2)], rf"kwargs[0] is a <class '{__name__}.Point'>"),
        ({"a": {"b": Colour.RED}}, rf"kwargs['a']['b'] is a <class '{__name__}.Colour'>"),
        ([Text("x")], rf"kwargs[0] is a <class '{__name__}.Text'>"),
        ({Text("x"): 1}, rf"a key of kwargs is a <class '{__name__}.Text'>"),
        (OrderedDict(), "kwargs is a <class 'collections.OrderedDict'>"),
        ({int}, "an element of kwargs is a type"),
        ({1: object()}, "kwargs[1] is an object"),
        ({(1, 2): object()}, "kwargs[<tuple>] is an object"),
        ({"k" * 100: object()}, "kwargs['" + "k" * 60 + "'] is an object"),
        ({10**5000: object()}, "kwargs[<int>] is an object"),
        ({None: object()}, "kwargs[None] is an object"),
        ({b"k": object()}, "kwargs[b'k'] is an object"),
        ({"a": "x\ud800"}, "kwargs['a'] is a str with a lone surrogate at position 1"),
        ([("\udfff",)], "kwargs[0][0] is a str with a lone surrogate at position 0"),
        ({"\ud800": 1}, "a key of kwargs is a str with a lone surrogate at position 0"),
        ({1: {"\ud800": 1}}, "a key of kwargs[1] is a str with a lone surrogate at position 0"),
        (
            [datetime(2025, 1, 1, tzinfo=OddZone())],
            f"kwargs[0] is a datetime whose tzinfo is a <class '{__name__}.OddZone'>, "
            "not a datetime.timezone or a zoneinfo.ZoneInfo",
        ),
    ],
)
def test_what_has_no_form_is_refused_with_its_place(value: Any, problem: str) -> None:
    with pytest.raises(ValueNotSerializable) as caught:
        encode_value(value, where="kwargs")
    assert str(caught.value) == problem
    assert str(caught.value) == f"{caught.value.path} {caught.value.problem}"


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop += [loop, loop]
    with pytest.raises(ValueNotSerializable, match=r"^payload\['a'\]\[1\] contains itself$"):
        encode_value({"a": loop}, where="payload")
    mapping: dict[Any, Any] = {}
    mapping[1] = (mapping,)
    with pytest.raises(ValueNotSerializable, match=r"^payload\[1\]\[0\] contains itself$"):
        encode_value(mapping, where="payload")


def test_a_part_that_stands_in_two_places_is_no_cycle() -> None:
    part = [(1,)]
    assert round_trip([part, part]) == [part, part]


def nested(wrap: Callable[[Any], Any], levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = wrap(value)
    return value


WRAPS: list[Callable[[Any], Any]] = [
    lambda value: [value],
    lambda value: {"a": value},
    lambda value: (value,),
    lambda value: {1: value},
    lambda value: frozenset([value]),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_nesting_is_limited_alike_for_every_container(wrap: Callable[[Any], Any]) -> None:
    deepest = nested(wrap, DEPTH_MAX)
    assert round_trip(deepest) == deepest
    assert encoding_problem(encode_value(deepest, where="payload")) is None
    with pytest.raises(ValueNotSerializable, match=r"is nested deeper than 100 levels$"):
        encode_value(wrap(deepest), where="payload")


def test_a_value_over_the_limit_is_refused_with_its_size_and_head() -> None:
    assert encode_value("x" * 98, where="payload", bytes_max=100) == b'"' + b"x" * 98 + b'"'
    with pytest.raises(ValueTooLong, match="payload needs 5,002 bytes; the limit is 100") as caught:
        encode_value("x" * 5000, where="payload", bytes_max=100)
    assert (caught.value.value_bytes, caught.value.bytes_max) == (5002, 100)
    assert caught.value.head == b'"' + b"x" * 4095


# --- registered types ------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    from headgate.protocol import values

    monkeypatch.setattr(values, "_registered_by_type", {})
    monkeypatch.setattr(values, "_registered_by_name", {})


@pytest.mark.usefixtures("registered")
def test_a_registered_type_travels_wherever_it_stands() -> None:
    register(Point, "test.point", lambda point: (point.x, point.y), lambda pair: Point(*pair))
    value = {"a": [Point(1, Decimal(2))], "b": {Point(Point(3, 4), None): frozenset([Point(5, 6)])}}
    back = round_trip(value)
    assert back == value
    assert type(back["a"][0]) is Point
    assert encode_value(Point(1, 2), where="value") == b'{"$":"test.point","v":{"$":"tuple","v":[1,2]}}'


@pytest.mark.usefixtures("registered")
def test_a_type_or_a_name_is_registered_once() -> None:
    register(Point, "test.point", tuple, Point._make)
    for type_, name in ((Text, "test.point"), (Text, "datetime"), (Text, ""), (Point, "other"), (dict, "my dict")):
        with pytest.raises(ValueError, match=r"is taken|has a form already|needs a name"):
            register(type_, name, str, str)
    assert round_trip(Point(1, 2)) == Point(1, 2)
    with pytest.raises(ValueNotSerializable):
        encode_value(Text("x"), where="value")


@pytest.mark.usefixtures("registered")
def test_a_module_that_is_loaded_anew_registers_its_types_anew() -> None:
    source = """
from headgate.protocol import register

class Money:
    def __init__(self, cents):
        self.cents = cents

register(Money, "test.money", lambda money: money.cents, lambda cents: Money(cents))
"""
    modules: list[dict[str, Any]] = [{"__name__": "shop"}, {"__name__": "shop"}]
    for module in modules:
        exec(source, module)
    old, new = (module["Money"] for module in modules)
    assert old is not new
    assert type(round_trip(new(5))) is new
    with pytest.raises(ValueNotSerializable):
        encode_value(old(5), where="kwargs")
    with pytest.raises(ValueError, match=r"'test\.money' is taken"):
        exec(source, {"__name__": "another.shop"})


@pytest.mark.usefixtures("registered")
def test_a_registered_type_that_fails_is_refused_with_its_place() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(value: Any) -> Any:
        raise KeyError("no") if value.x else Unspeakable

    register(Point, "test.point", fail, Point._make)
    for x, shown in ((1, "KeyError: 'no'"), (0, "Unspeakable")):
        with pytest.raises(ValueNotSerializable, match=rf"^value\[0\] is .*Point'>, whose .* encode raised {shown}$"):
            encode_value([Point(x, 2)], where="value")
    with pytest.raises(ValueMalformed, match=r"^the content of a 'test.point' is malformed: TypeError: "):
        decode_value(b'{"$":"test.point","v":[1]}')


@pytest.mark.usefixtures("registered")
def test_a_registered_type_that_never_ends_is_refused() -> None:
    register(Point, "test.point", lambda point: [Point(point.x, point.y)], Point._make)
    with pytest.raises(ValueNotSerializable, match="deeper than 100 levels"):
        encode_value(Point(1, 2), where="value")


@pytest.mark.usefixtures("registered")
def test_what_a_registered_type_turns_into_is_checked_too() -> None:
    register(Point, "test.point", lambda point: {"x": object()}, Point._make)
    with pytest.raises(ValueNotSerializable, match=r"^value \(encoded as 'test.point'\)\['x'\] is an object$"):
        encode_value(Point(1, 2), where="value")


# --- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not the JSON of a value"),
        (b"{", "not the JSON of a value"),
        (b"NaN", "not the JSON of a value"),
        (b'"\xff"', "not the JSON of a value"),
        (b"1 2", "not the JSON of a value"),
        (b"1e400", "not the JSON of a value"),
        (b"[" * 100_000, "not the JSON of a value"),
        (b"9" * 5000, "not the JSON of a value"),
        (b'{"$":"date"}', "not a tag and its content"),
        (b'{"$":"date","v":"2025-01-01","w":1}', "not a tag and its content"),
        (b'{"$":1,"v":2}', "not a tag and its content"),
        (b'{"\\u0024":1}', "not a tag and its content"),
        (b'{"$":"test.unknown","v":2}', "no type is registered under 'test.unknown'"),
        (b'[{"$":"date","v":1}]', "content of a 'date' is malformed: ValueError: it is not a str"),
        (b'{"$":"date","v":"tomorrow"}', "content of a 'date' is malformed"),
        (b'{"$":"datetime","v":"2025-01-01T00:00:00[Test/Central"}', "content of a 'datetime' is malformed"),
        (b'{"$":"datetime","v":"2025-01-01T00:00:00[No/Where]"}', "content of a 'datetime' is malformed"),
        (b'{"$":"datetime","v":"2025-01-01T00:00:00[../../etc/passwd]"}', "content of a 'datetime' is malformed"),
        (b'{"$":"time","v":"25:00"}', "content of a 'time' is malformed"),
        (b'{"$":"timedelta","v":[1,2]}', "content of a 'timedelta' is malformed"),
        (b'{"$":"timedelta","v":[1e300,2,3]}', "content of a 'timedelta' is malformed"),
        (b'{"$":"decimal","v":"1,5"}', "content of a 'decimal' is malformed"),
        (b'{"$":"uuid","v":"1"}', "content of a 'uuid' is malformed"),
        (b'{"$":"bytes","v":"???"}', "content of a 'bytes' is malformed"),
        (b'{"$":"float","v":"x"}', "content of a 'float' is malformed"),
        (b'{"$":"int","v":"0xg"}', "content of a 'int' is malformed"),
        (b'{"$":"tuple","v":{}}', "content of a 'tuple' is malformed: ValueError: it is not a list"),
        (b'{"$":"set","v":[[]]}', "content of a 'set' is malformed"),
        (b'{"$":"set","v":[1,1]}', "two of its elements are equal"),
        (b'{"$":"dict","v":[[1,2,3]]}', "content of a 'dict' is malformed"),
        (b'{"$":"dict","v":[[1,2],[1,3]]}', "two of its keys are equal"),
        (b'{"$":"tuple","v":[' * 101 + b"{}" + b"]}" * 101, "nested deeper than 100 levels"),
    ],
)
def test_malformed_data_is_refused_with_what_is_wrong(data: bytes, problem: str) -> None:
    with pytest.raises(ValueMalformed, match=problem):
        decode_value(data)


@given(data=st.binary(max_size=50))
def test_garbage_raises_nothing_but_value_malformed(data: bytes) -> None:
    try:
        decode_value(data)
    except ValueMalformed:
        pass


TAGS = st.sampled_from(["datetime", "time", "timedelta", "decimal", "bytes", "set", "dict", "int", "float", "tuple"])


@settings(deadline=None)
@given(value=st.recursive(PLAIN, lambda inner: st.fixed_dictionaries({"$": TAGS, "v": inner | st.lists(inner)})))
def test_tags_with_any_content_raise_nothing_but_value_malformed(value: Any) -> None:
    try:
        decode_value(msgspec.json.encode(value))
    except ValueMalformed:
        pass
