"""Stored values made readable: as JSON for programs, and as text for people."""

from __future__ import annotations

import base64
import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec

from headgate.protocol.messages import MALFORMED
from headgate.protocol.values import decode_value

# Of a whole number that is shown in decimals, about 4,200 of them: Python refuses to write those of a longer one. That
# is shown in hexadecimal, as it is stored.
INT_BITS_SHOWN: Final = 14_000


def json_line(value: Any) -> str:
    """Return a value as JSON on one line; what JSON does not have is made readable first."""
    plain = readable(value)
    try:
        return msgspec.json.encode(plain).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_escaped(plain)).decode()


def payload(data: bytes | None) -> Any:
    """Return a stored payload as it may be shown; never raises.

    A value of a type that only the user's program knows is shown as it is stored.
    """
    if data is None:
        return None
    try:
        return readable(decode_value(data))
    except Exception:
        try:
            return msgspec.json.decode(data)
        except MALFORMED:
            return _text_of_bytes(data)


def readable(value: Any) -> Any:
    """Return the value as JSON can hold it: times in ISO 8601, numbers and ids as text, bytes as text or base64."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if value.bit_length() <= INT_BITS_SHOWN else hex(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta() | Decimal() | UUID():
            return str(value)
        case bytes() | bytearray() | memoryview():
            return _text_of_bytes(bytes(value))
        case dict():
            return {key if isinstance(key, str) else json_line(key): readable(item) for key, item in value.items()}
        case list() | tuple():
            return [readable(item) for item in value]
        case set() | frozenset():
            return sorted((readable(item) for item in value), key=json_line)
        case msgspec.Struct():
            return readable(msgspec.structs.asdict(value))
        case _:
            return str(value)


def _text_of_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode()


def _escaped(value: Any) -> Any:
    """Return a readable value whose lone surrogates are written as escapes."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_escaped(key): _escaped(item) for key, item in value.items()}
        case list():
            return [_escaped(item) for item in value]
        case _:
            return value
