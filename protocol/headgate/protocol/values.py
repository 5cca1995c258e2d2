"""Encoding of authors' values (kwargs, payloads) as readable JSON, from which an equal value is decoded.

Values that JSON can represent are written unchanged. All others are written as an object of two members, a tag and
the content::

    datetime, date, time    {"$": "datetime", "v": "2025-03-30T02:30:00+02:00[Europe/Berlin]"}
    timedelta               {"$": "timedelta", "v": [days, seconds, microseconds]}
    Decimal, UUID           {"$": "decimal", "v": "0.10"}
    bytes                   {"$": "bytes", "v": "<base64>"}
    tuple, set, frozenset   {"$": "tuple", "v": [...]}
    nan, inf, -inf          {"$": "float", "v": "nan"}
    int beyond 64 bits      {"$": "int", "v": "-0x1f..."}     (many readers of JSON would round it)
    some dicts              {"$": "dict", "v": [[key, value], ...]}
    registered types        {"$": "<name>", "v": <result of encode>}

A dict is tagged if a key is not a str or is "$", so an author's dict is never mistaken for a tag. Types are compared
exactly: an instance of a subclass would be decoded as an instance of its base, so it is refused unless its class is
registered. Sets are written in the order of their encoded elements, so that equal values give equal bytes.

A datetime keeps its UTC offset. The name of a `datetime.timezone` is lost, because it does not matter for equality. A
`zoneinfo.ZoneInfo` is written as its key.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec

from headgate.protocol.errors import ValueMalformed, ValueNotSerializable, ValueTooLong
from headgate.protocol.messages import MALFORMED
from headgate.protocol.messages.runner import REFUSED_HEAD_BYTES_MAX
from headgate.protocol.tags import CONTENT, NUMBERS, TAG, tagged, text_of

# Levels of nested containers. A tagged dict takes three levels of JSON for one of these, and the JSON decoder fails
# near 1000; authors' values have a handful.
DEPTH_MAX = 100
PATH_KEY_CHARS_MAX = 60  # the part of a long key that the path in an error shows

_LEAVES: Final = frozenset({str, bool, type(None)})  # types whose every value JSON can represent
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1

_JSON: Final = msgspec.json.Encoder()


# --- registered types ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Registered:
    name: str
    type_: type[Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    @property
    def source(self) -> list[str]:
        """The names of the modules that define it; they stay the same if a module is edited and reloaded."""
        return [getattr(part, "__module__", "") for part in (self.type_, self.encode, self.decode)]


_BUILT_IN: Final = frozenset(
    {"datetime", "date", "time", "timedelta", "decimal", "uuid", "bytes", "tuple", "set", "frozenset", "float"}
    | {"int", "dict"}
)
_TYPES: Final = frozenset(
    {str, bool, type(None), int, float, list, dict, tuple, set, frozenset, bytes}
    | {datetime, date, time, timedelta, Decimal, UUID}
)
_VIEWS: Final = tuple(map(type, ({}.keys(), {}.values(), {}.items())))
_LISTABLE: Final = frozenset({range, map, filter, zip, enumerate, reversed, types.GeneratorType, *_VIEWS})
_registered_by_type: Final[dict[type[Any], _Registered]] = {}
_registered_by_name: Final[dict[str, _Registered]] = {}


def register(type_: type[Any], name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Allow values of exactly ``type_`` in kwargs and payloads, under the tag ``name``.

    ``encode`` turns an instance into a value that can be encoded; ``decode`` turns that back into the instance.
    Register a type in the module that defines it, so that every process that imports it can decode it. If a module is
    reloaded, its call replaces the earlier one. Raises ValueError if the name or the type is taken already.
    """
    if not name:
        raise ValueError("a registered type needs a name")
    registered, earlier = _Registered(name, type_, encode, decode), _registered_by_name.get(name)
    if name in _BUILT_IN or (earlier is not None and earlier.source != registered.source):
        raise ValueError(f"the name {name!r} is taken")
    if type_ in _TYPES or _registered_by_type.get(type_, earlier) is not earlier:
        raise ValueError(f"{type_!r} has a form already")
    if earlier is not None:
        del _registered_by_type[earlier.type_]
    _registered_by_type[type_] = registered
    _registered_by_name[name] = registered


# --- encoding ------------------------------------------------------------------------------------


def encode_value(value: Any, *, where: str, bytes_max: int | None = None) -> bytes:
    """Return ``value`` as bytes, from which `decode_value` returns an equal value of the same types.

    ``where`` is the name of the value in errors, for example ``payload``. Raises `ValueNotSerializable` with the path
    of the part at fault, and `ValueTooLong` for more than ``bytes_max`` bytes (I11).
    """
    try:
        data = _JSON.encode(value if _is_plain(value, DEPTH_MAX) else _Tagger().tag(value, where, 0))
    except UnicodeEncodeError:
        # The encoder does not tell which str is at fault: the slow walk finds it.
        _Tagger(check_text=True).tag(value, where, 0)
        raise ValueNotSerializable(where, "contains a str with a lone surrogate") from None
    except RecursionError:
        # Below the limit of depth it still fails if the caller has used up nearly all of the stack.
        raise ValueNotSerializable(where, "is nested too deeply for the stack it is encoded on") from None
    if bytes_max is not None and len(data) > bytes_max:
        raise ValueTooLong(where, len(data), bytes_max, data[:REFUSED_HEAD_BYTES_MAX])
    return data


def _is_plain(value: Any, depth_left: int) -> bool:
    """Return whether ``value`` needs no tags. This is the fast path: almost all values are plain."""
    kind = type(value)
    if kind in _LEAVES:
        return True
    if kind is int:
        return bool(_INT_MIN <= value <= _INT_MAX)
    if kind is float:
        return math.isfinite(value)
    if depth_left == 0:
        return False
    if kind is dict:
        if TAG in value:
            return False
        for key, item in value.items():
            if type(key) is not str or (type(item) not in _LEAVES and not _is_plain(item, depth_left - 1)):
                return False
        return True
    if kind is list:
        for item in value:
            if type(item) not in _LEAVES and not _is_plain(item, depth_left - 1):
                return False
        return True
    return False


class _Tagger:
    """Turns one value into plain JSON types with tags, or raises with the path of the part at fault."""

    __slots__ = ("_ancestors", "_check_text")

    def __init__(self, *, check_text: bool = False) -> None:
        self._check_text = check_text
        self._ancestors: set[int] = set()  # ids of the containers around the current part

    def tag(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is str:
            return self._text(value, path)
        if kind in _LEAVES:
            return value
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else tagged("int", hex(value))
        if kind is float:
            return value if math.isfinite(value) else tagged("float", str(value))
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return scalar(value, path)
        return self._nested(value, path, depth)

    def _nested(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        registered = _registered_by_type.get(kind)
        if registered is None and kind not in _TYPES:
            # A class of headgate's may say what to give in its place.
            hint = ": make a list of it" if kind in _LISTABLE else getattr(kind, "encode_hint", "")
            raise ValueNotSerializable(path, f"is {describe_type(kind)}{hint}")
        if id(value) in self._ancestors:
            raise ValueNotSerializable(path, "contains itself")
        if depth == DEPTH_MAX:
            raise ValueNotSerializable(path, f"is nested deeper than {DEPTH_MAX} levels")
        self._ancestors.add(id(value))
        try:
            if registered is not None:
                return self._registered(registered, value, path, depth)
            if kind is dict:
                return self._dict(value, path, depth)
            if kind is list or kind is tuple:
                items = [self.tag(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
                return items if kind is list else tagged("tuple", items)
            elements = [self.tag(element, f"an element of {path}", depth + 1) for element in value]
            return tagged(kind.__name__, sorted(elements, key=self._sort_key))
        finally:
            self._ancestors.discard(id(value))

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if TAG not in value and all(type(key) is str for key in value):
            return {
                self._text(key, f"a key of {path}"): self.tag(item, _item_path(path, key), depth + 1)
                for key, item in value.items()
            }
        return tagged(
            "dict",
            [
                [self.tag(key, f"a key of {path}", depth + 1), self.tag(item, _item_path(path, key), depth + 1)]
                for key, item in value.items()
            ],
        )

    def _registered(self, registered: _Registered, value: Any, path: str, depth: int) -> Any:
        try:
            content = registered.encode(value)
        except Exception as error:
            problem = f"is {describe_type(type(value))}, whose registered encode raised {_describe_error(error)}"
            raise ValueNotSerializable(path, problem) from error
        return tagged(registered.name, self.tag(content, f"{path} (encoded as {registered.name!r})", depth + 1))

    def _text(self, value: str, path: str) -> str:
        if self._check_text:
            try:
                value.encode()
            except UnicodeEncodeError as error:
                problem = f"is a str with a lone surrogate at position {error.start}"
                raise ValueNotSerializable(path, problem) from None
        return value

    def _sort_key(self, element: Any) -> bytes:
        return _JSON.encode(element)


def _tag_moment(value: datetime | time, path: str) -> dict[str, Any]:
    tag = type(value).__name__
    zone = value.tzinfo
    if zone is None or type(zone) is timezone:
        return tagged(tag, value.isoformat())
    if type(zone) is ZoneInfo and zone.key is not None:
        return tagged(tag, f"{value.isoformat()}[{zone.key}]")
    kind = "a ZoneInfo without a key" if type(zone) is ZoneInfo else describe_type(type(zone))
    problem = f"is a {tag} whose tzinfo is {kind}, not a datetime.timezone or a zoneinfo.ZoneInfo"
    raise ValueNotSerializable(path, problem)


_SCALARS: Final[dict[type[Any], Callable[[Any, str], dict[str, Any]]]] = {
    datetime: _tag_moment,
    time: _tag_moment,
    date: lambda value, path: tagged("date", value.isoformat()),
    timedelta: lambda value, path: tagged("timedelta", [value.days, value.seconds, value.microseconds]),
    Decimal: lambda value, path: tagged("decimal", str(value)),
    UUID: lambda value, path: tagged("uuid", str(value)),
    bytes: lambda value, path: tagged("bytes", base64.b64encode(value).decode()),
}


def _item_path(path: str, key: Any) -> str:
    # Other keys are shown by type only: their repr may raise, take long or, for a huge int, not exist.
    kind = type(key)
    if kind is str or kind is bytes:
        return f"{path}[{key[:PATH_KEY_CHARS_MAX]!a}]"
    if kind in _LEAVES or kind is float or (kind is int and _INT_MIN <= key <= _INT_MAX):
        return f"{path}[{key!r}]"
    return f"{path}[<{kind.__name__}>]"


def describe_type(kind: type[Any]) -> str:
    if kind is types.FunctionType:
        return "a function"
    if kind.__module__ == "builtins":
        article = "an" if kind.__name__[0] in "aeiou" else "a"
        return f"{article} {kind.__name__}"
    return f"a <class '{kind.__module__}.{kind.__qualname__}'>"


def _describe_error(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the __str__ of an author's exception may raise
        return type(error).__name__


# --- decoding ------------------------------------------------------------------------------------


def decode_value(data: bytes) -> Any:
    """Return the value that `encode_value` has encoded.

    Raises `ValueMalformed` if the bytes are not JSON, if a tag is unknown (its type is not registered in this process),
    or if the content does not fit its tag.
    """
    try:
        value = msgspec.json.decode(data)
    except MALFORMED as error:
        raise ValueMalformed(f"this is not the JSON of a value: {error}") from error
    # These are the only two spellings of a tag in JSON.
    if b'"$"' in data or b"\\u0024" in data:
        return _untag(value, 0)
    return value


def _untag(value: Any, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueMalformed(f"the value is nested deeper than {DEPTH_MAX} levels")
    if type(value) is list:
        return [_untag(item, depth + 1) for item in value]
    if type(value) is not dict:
        return value
    if TAG not in value:
        return {key: _untag(item, depth + 1) for key, item in value.items()}
    tag = value[TAG]
    if type(tag) is not str or value.keys() != {TAG, CONTENT}:
        raise ValueMalformed('an object with the member "$" is not a tag and its content')
    content = value[CONTENT]
    reader = _READERS.get(tag)
    registered = _registered_by_name.get(tag)
    if reader is None and registered is None:
        raise ValueMalformed(f"no type is registered under {tag!r}")
    try:
        if reader is not None:
            return reader(content, depth)
        assert registered is not None
        return registered.decode(_untag(content, depth + 1))
    except ValueMalformed:
        raise
    except Exception as error:
        # A registered decode may raise anything; the readers raise whatever the types' constructors do.
        raise ValueMalformed(f"the content of a {tag!r} is malformed: {_describe_error(error)}") from error


def _list_of(content: Any) -> list[Any]:
    if type(content) is not list:
        raise ValueError("it is not a list")
    return content


_OFFSET_BELOW_A_SECOND: Final = re.compile(r"([+-])00:00:00\.(\d{6})$")


def _read_moment(kind: Callable[[str], Any], content: Any) -> Any:
    text, bracket, zone_name = text_of(content).partition("[")
    value = kind(text)
    if not bracket:
        # CPython (at least 3.11 to 3.13) reads an offset of less than a second as UTC.
        tiny = _OFFSET_BELOW_A_SECOND.search(text)
        return value.replace(tzinfo=timezone(timedelta(microseconds=int("".join(tiny.groups()))))) if tiny else value
    if zone_name[-1:] != "]":
        raise ValueError("the name of the time zone must end with ']'")
    zone = ZoneInfo(zone_name[:-1])
    there = value.replace(tzinfo=zone)
    # In an hour that the clock shows twice, the offset decides about `fold`.
    if value.utcoffset() is not None and there.utcoffset() != value.utcoffset():
        other = there.replace(fold=1)
        return other if other.utcoffset() == value.utcoffset() else there
    return there


def _read_elements(kind: type[Any], content: Any, depth: int) -> Any:
    elements = [_untag(element, depth + 1) for element in _list_of(content)]
    value = kind(elements)
    if len(value) != len(elements):
        raise ValueError("two of its elements are equal")
    return value


def _read_dict(content: Any, depth: int) -> dict[Any, Any]:
    pairs = [_list_of(pair) for pair in _list_of(content)]
    value = {_untag(key, depth + 1): _untag(item, depth + 1) for key, item in pairs}
    if len(value) != len(pairs):
        raise ValueError("two of its keys are equal")
    return value


def _read_timedelta(content: Any) -> timedelta:
    days, seconds, microseconds = _list_of(content)
    return timedelta(days=days, seconds=seconds, microseconds=microseconds)


def _read_bytes(content: Any) -> bytes:
    try:
        return base64.b64decode(text_of(content), validate=True)
    except binascii.Error as error:
        raise ValueError(f"it is not base64: {error}") from None


def _read_number(read: Callable[[Any], Any], content: Any, _depth: int) -> Any:
    return read(content)


_READERS: Final[dict[str, Callable[[Any, int], Any]]] = {
    "datetime": lambda content, depth: _read_moment(datetime.fromisoformat, content),
    "date": lambda content, depth: date.fromisoformat(text_of(content)),
    "time": lambda content, depth: _read_moment(time.fromisoformat, content),
    "timedelta": lambda content, depth: _read_timedelta(content),
    "uuid": lambda content, depth: UUID(text_of(content)),
    "bytes": lambda content, depth: _read_bytes(content),
    "tuple": lambda content, depth: tuple(_untag(item, depth + 1) for item in _list_of(content)),
    "set": lambda content, depth: _read_elements(set, content, depth),
    "frozenset": lambda content, depth: _read_elements(frozenset, content, depth),
    "dict": _read_dict,
    **{tag: partial(_read_number, read) for tag, read in NUMBERS.items()},
}
assert _READERS.keys() == _BUILT_IN
