"""Encoded values that are looked into without being decoded; `headgate.protocol.values` has encoded them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headgate.protocol.errors import ValueMalformed
from headgate.protocol.messages import MALFORMED
from headgate.protocol.tags import CONTENT, TAG
from headgate.protocol.values import DEPTH_MAX, describe_type

JSON_DEPTH_MAX: Final = 4 * DEPTH_MAX  # levels of JSON that these take, with the tags of a key and of a leaf

_COUNTED: Final = ("tuple", "dict")  # tagged values whose items have an order
_PAIR: Final = b'{"$":"tuple","v":%b}'
_JSON: Final = msgspec.json.Encoder()


def encoding_problem(data: bytes) -> str | None:
    """Return the problem with a value that another program has encoded, or None. Its tags are not looked at.

    Here it may be readable and elsewhere not: the decoder fails on what is nested deeply, the sooner the more calls it
    is called from. So no more than `JSON_DEPTH_MAX` levels are taken in (I9).
    """
    try:
        value = msgspec.json.decode(data)
    except MALFORMED as error:
        return f"is not JSON: {error}"
    if data.count(b"[") + data.count(b"{") > JSON_DEPTH_MAX and is_nested_deeper(value, JSON_DEPTH_MAX):
        return f"is nested deeper than {JSON_DEPTH_MAX} levels of JSON"
    return None


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as a decoder's ``object_pairs_hook``. Raises ValueError for a name that is there twice.

    The standard library's decoder lets the last one win, so that a value would be lost without a word.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is there twice in one object")
    return found


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether decoded JSON has more than ``levels`` levels of lists and dicts, empty ones included."""
    level = [value]
    for _ in range(levels + 1):
        level = [item for item in level if isinstance(item, list | dict)]
        if not level:
            return False
        level = [item for container in level for item in (container.values() if type(container) is dict else container)]
    return True


def count_items(data: bytes) -> int | None:
    """Return how many items an encoded list, tuple or dict has, without decoding them; None for any other value."""
    found = values_in(data)
    return None if found is None else len(found)


def values_in(data: bytes) -> list[bytes] | None:
    """Return the items of an encoded list, tuple or dict, each encoded as it is by itself; None for any other value.

    Those of a dict are tuples of key and value.
    """
    try:
        value: Any = msgspec.json.decode(data, type=list[msgspec.Raw] | dict[str, msgspec.Raw])
        if type(value) is list:
            return list(map(bytes, value))
        if TAG not in value:
            return [_PAIR % (b"[%b,%b]" % (_JSON.encode(key), bytes(item))) for key, item in value.items()]
        if (tag := msgspec.json.decode(value[TAG])) not in _COUNTED:
            return None
        items = map(bytes, msgspec.json.decode(value[CONTENT], type=list[msgspec.Raw]))
    except (*MALFORMED, KeyError):
        return None
    return list(items) if tag == "tuple" else [_PAIR % pair for pair in items]


def set_items(data: bytes, items: Mapping[str, bytes]) -> bytes:
    """Return an encoded dict of named arguments with further ones, encoded, in place of its own of these names.

    Raises `ValueMalformed` for any other value.
    """
    try:
        found = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except MALFORMED as error:
        raise ValueMalformed(f"this is not the JSON of named arguments: {error}") from error
    if TAG in found:
        raise ValueMalformed("these are no named arguments")
    return _JSON.encode(found | {name: msgspec.Raw(item) for name, item in items.items()})


def split_items(data: bytes, *, of_dict: str) -> list[bytes]:
    """Return the items of an encoded list or tuple, each encoded as it is by itself, without decoding them.

    Of a dict those of its item ``of_dict`` are meant. Raises `ValueMalformed`, with its type, for any other value.
    """
    name = "it"
    try:
        found = _split(data)
        if type(found) is dict:
            found, name = _split(found[of_dict]) if of_dict in found else "missing", f"its {of_dict!r}"
    except (*MALFORMED, KeyError) as error:
        raise ValueMalformed(f"this is not the JSON of a value: {error}") from error
    if type(found) is list:
        return [bytes(item) for item in found]
    raise ValueMalformed(f"{name} is {'a dict' if type(found) is dict else found}")


def _split(data: bytes | msgspec.Raw) -> list[msgspec.Raw] | dict[str, msgspec.Raw] | str:
    """Return the items of an encoded list, tuple or dict; the name of the type of any other value."""
    value = _SPLITTER.decode(data)
    if type(value) is not dict:
        return value if type(value) is list else "None" if value is None else describe_type(type(value))
    if TAG not in value:
        return value
    tag = msgspec.json.decode(value[TAG])
    if tag == "tuple":
        return msgspec.json.decode(value[CONTENT], type=list[msgspec.Raw])
    return f"{'an' if tag[0] in 'aeiou' else 'a'} {tag}"


_SPLITTER: Final = msgspec.json.Decoder(list[msgspec.Raw] | dict[str, msgspec.Raw] | str | int | float | bool | None)
