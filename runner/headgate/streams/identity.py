"""The identity of a shared stream: the same text for the same key, in every process and on every machine.

A key is any hashable value of the author's. Its own hash and equality mean nothing in another process, so a stream is
known by the digest of a canonical form of its key. Keys that Python takes for equal have the same digest if they are
made of these:

- text, bytes, None, and numbers: ``1``, ``1.0``, ``True`` and ``Decimal("1.00")`` are the same
- dates, times and other values that `headgate.protocol.values` can encode; aware datetimes are compared in UTC
- tuples and frozensets of these, named tuples as plain ones
- instances of subclasses of the types above, for example members of a ``StrEnum``
- dataclasses: the class, and the fields that its comparison uses

Every other part is known by its class and its ``repr``. A ``repr`` that differs from process to process would split the
stream, so one with an address, or with a set, is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import re
from collections.abc import Hashable
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import msgspec

from headgate.child.error_text import storable
from headgate.protocol.errors import ValueNotSerializable
from headgate.protocol.messages.runner import STREAM_NAME_CHARS_MAX
from headgate.protocol.values import DEPTH_MAX, encode_value
from headgate.triggers.base import BaseEventTrigger, BaseTrigger

DIGEST_HEX_CHARS = 40  # 160 bits: no two keys meet by chance
DECIMAL_DIGITS_MAX = 1000  # a Decimal of a larger or smaller magnitude is known by its text

_JSON: Final = msgspec.json.Encoder()
_ADDRESS: Final = re.compile(r"\bat 0x[0-9a-fA-F]+")
_SET: Final = re.compile(r"\b(?:frozen)?set\(\{")


class StreamIdentity(msgspec.Struct, frozen=True):
    """The stream of a key. ``name`` is the key for people; two identities are equal if their ``digest`` is."""

    digest: str
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamIdentity) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return self.name


def identify(key: Hashable) -> StreamIdentity:
    """Return the identity of the stream of ``key``, which is not None.

    Raises `TypeError` if the key is not hashable, or a part of it has no form that is the same in every process; and
    whatever methods of the author's classes raise.
    """
    hash(key)
    digest = hashlib.sha256(_JSON.encode(_form(key, DEPTH_MAX))).hexdigest()[:DIGEST_HEX_CHARS]
    return StreamIdentity(digest, storable(repr(key)[:STREAM_NAME_CHARS_MAX])[:STREAM_NAME_CHARS_MAX])


def stream_of(trigger: BaseTrigger) -> StreamIdentity | None:
    """Return the identity of the shared stream of a trigger; None if it reads none. Raises as `identify` does."""
    key = trigger.shared_stream_key() if isinstance(trigger, BaseEventTrigger) else None
    return None if key is None else identify(key)


def _form(part: Any, depth_left: int) -> list[Any]:
    """Return the canonical form of a part of a key: its kind, then its content, in types of JSON."""
    if depth_left == 0:
        raise TypeError(f"shared_stream_key() is nested deeper than {DEPTH_MAX} levels")
    if isinstance(part, str):
        return ["text", str.__str__(part).encode("unicode_escape").decode()]
    if isinstance(part, (int, float, Decimal, Fraction)):
        return _number(part)
    if isinstance(part, bytes):
        return ["bytes", part.hex()]
    if isinstance(part, tuple):
        return ["tuple", *[_form(item, depth_left - 1) for item in part]]
    if isinstance(part, frozenset):
        return ["set", *sorted([_form(item, depth_left - 1) for item in part], key=_JSON.encode)]
    if isinstance(part, datetime) and part.utcoffset() is not None:
        return ["moment", part.astimezone(UTC).isoformat()]
    kind = type(part)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(part, enum.Enum):
        return ["enum", name, part.name]
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.eq:  # type: ignore[attr-defined]
        fields = [getattr(part, field.name) for field in dataclasses.fields(kind) if field.compare]
        return ["dataclass", name, *[_form(field, depth_left - 1) for field in fields]]
    try:
        return ["value", _in_order(msgspec.json.decode(encode_value(part, where="shared_stream_key()")))]
    except ValueNotSerializable:
        return ["repr", name, _checked_repr(part, name)]


def _number(part: float | Decimal | Fraction) -> list[Any]:
    """Return the same form for equal numbers of different types."""
    if isinstance(part, (float, Decimal)) and not math.isfinite(part):
        return ["number", str(part).lower()]
    if isinstance(part, Decimal) and abs(part.adjusted()) > DECIMAL_DIGITS_MAX:
        return ["decimal", str(part)]  # its ratio would take too long
    numerator, denominator = part.as_integer_ratio()
    return ["number", hex(numerator), hex(denominator)]


def _checked_repr(part: Any, name: str) -> str:
    text = repr(part)
    problem = "the address of an object" if _ADDRESS.search(text) else "a set" if _SET.search(text) else ""
    if problem:
        raise TypeError(
            f"shared_stream_key() contains a {name} whose repr contains {problem}, which differs from process to "
            f"process: {text[:STREAM_NAME_CHARS_MAX]}; return text, numbers, or tuples of these"
        )
    return text.encode("unicode_escape").decode()


def _in_order(form: Any) -> Any:
    """Sort what `encode_value` writes in the order of insertion: members of objects, and pairs of other dicts."""
    if isinstance(form, list):
        return [_in_order(item) for item in form]
    if not isinstance(form, dict):
        return form
    in_order = {key: _in_order(form[key]) for key in sorted(form)}
    if in_order.get("$") in ("dict", "set", "frozenset"):
        in_order["v"] = sorted(in_order["v"], key=_JSON.encode)
    return in_order
