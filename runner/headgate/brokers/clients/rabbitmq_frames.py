"""The properties of messages from their frames, as they were published: pika reads and writes some headers otherwise.

pika 1.4 cuts floats to whole numbers, cannot write any, and raises for a time beyond those of Python, in milliseconds
for example. That ends the connection: with each new one the broker delivers the same message again, and counts one more
delivery of all others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import pika
from pika import frame, spec
from pika.data import decode_short_string, encode_short_string

from headgate.brokers.clients.bodies import readable

__all__ = ["UNREAD", "ReadingConnection"]

UNREAD: Final = "headers that cannot be read"  # in place of the names of headers; the value is what came

_HEADERS: Final = spec.BasicProperties.FLAG_HEADERS
_BEFORE_HEADERS: Final = (spec.BasicProperties.FLAG_CONTENT_TYPE, spec.BasicProperties.FLAG_CONTENT_ENCODING)
_FIXED: Final = {
    kind.encode(): struct.Struct(f">{code}")
    for kind, code in zip("tbBUuIiLlfds", "?bBhHiIqqfdh", strict=True)
}  # fmt: skip
_BODY: Final = struct.Struct(">HHQ")  # class, weight, size
_FLAGS: Final = struct.Struct(">H")  # there is no second word of them before the fifteenth property
_SIZE: Final = struct.Struct(">I")
_TIME: Final = struct.Struct(">Q")
_DECIMAL: Final = struct.Struct(">Bi")

_Select: Any = pika.SelectConnection  # whose annotations do not hold
_Properties: Any = spec.BasicProperties


class ReadingConnection(_Select):  # type: ignore[misc]
    """A connection whose messages have their headers whole, or `UNREAD`, and that none of them ends."""

    def _read_frame(self) -> Any:
        data = self._frame_buffer
        if len(data) < spec.FRAME_HEADER_SIZE or data[0] != spec.FRAME_HEADER:
            return super()._read_frame()
        _, channel, size = struct.unpack_from(">BHL", data)
        end = spec.FRAME_HEADER_SIZE + size
        if len(data) <= end or data[end] != spec.FRAME_END:
            return super()._read_frame()  # it is not there yet, or no frame at all
        _, _, body_size = _BODY.unpack_from(data, spec.FRAME_HEADER_SIZE)
        properties = ReadProperties().decode(data[spec.FRAME_HEADER_SIZE + _BODY.size : end])
        return end + spec.FRAME_END_SIZE, frame.Header(channel, body_size, properties)


class ReadProperties(_Properties):  # type: ignore[misc]
    """Properties whose headers are read here, and are written again as they came, which pika cannot do with floats."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: dict[Any, Any] | None = None
        self._encoded: dict[Any, bytes] = {}  # the headers by their names, each value with its type

    def decode(self, encoded: bytes, offset: int = 0) -> ReadProperties:
        """Read properties; never raises for headers."""
        data = encoded[offset:]
        (flags,) = _FLAGS.unpack_from(data)
        if not flags & _HEADERS:
            super().decode(data)
            return self
        begin = _begin_of_headers(data)
        (size,) = _SIZE.unpack_from(data, begin)
        end = begin + _SIZE.size + size
        super().decode(_FLAGS.pack(flags & ~_HEADERS) + data[_FLAGS.size : begin] + data[end:])
        table = data[begin + _SIZE.size : end]
        try:
            found = _pairs(table)
        except (ValueError, struct.error, RecursionError):
            found = [(UNREAD, table, b"x" + _SIZE.pack(len(table)) + table)]
        self.headers = {name: value for name, value, _ in found}
        self._encoded = {name: whole for name, _, whole in found}
        return self

    def encode(self) -> list[bytes]:
        """Return the properties as bytes."""
        headers, self.headers = self.headers, None
        data = b"".join(super().encode())
        self.headers = headers
        if headers is None:
            return [data]
        table = b"".join(_short_text(name) + whole for name, whole in self._encoded.items())
        begin = _begin_of_headers(data)
        (flags,) = _FLAGS.unpack_from(data)
        before = _FLAGS.pack(flags | _HEADERS) + data[_FLAGS.size : begin]
        return [before, _SIZE.pack(len(table)), table, data[begin:]]

    def rename_header(self, name: str, new: str) -> None:
        """Give a header another name, if it is there."""
        if self.headers is not None and name in self.headers:
            self.headers[new], self._encoded[new] = self.headers.pop(name), self._encoded.pop(name)

    def add_header(self, name: str, text: str) -> None:
        """Add a header, or put another text in its place."""
        data = text.encode()
        self.headers = {**(self.headers or {}), name: text}
        self._encoded[name] = b"S" + _SIZE.pack(len(data)) + data


def _begin_of_headers(data: bytes) -> int:
    """Return where the table of headers begins in the bytes of properties, or would."""
    (flags,) = _FLAGS.unpack_from(data)
    at = _FLAGS.size
    for flag in _BEFORE_HEADERS:
        if flags & flag:
            at += 1 + data[at]
    return at


def _short_text(name: str | bytes) -> bytes:
    pieces: list[bytes] = []
    encode_short_string(pieces, name)
    return b"".join(pieces)


def _pairs(data: bytes) -> list[tuple[Any, Any, bytes]]:
    """Return the names and values of a table, each value as its bytes, too."""
    found, at = [], 0
    while at < len(data):
        name, begin = decode_short_string(data, at)
        value, at = _value(data, begin)
        found.append((name, value, data[begin:at]))
    return found


def _table(data: bytes) -> dict[Any, Any]:
    return {name: value for name, value, _ in _pairs(data)}


def _array(data: bytes) -> list[Any]:
    found, at = [], 0
    while at < len(data):
        value, at = _value(data, at)
        found.append(value)
    return found


def _value(data: bytes, at: int) -> tuple[Any, int]:
    """Return the value that begins with its type at this place, and the place behind it."""
    kind, at = data[at : at + 1], at + 1
    if (fixed := _FIXED.get(kind)) is not None:
        return fixed.unpack_from(data, at)[0], at + fixed.size
    if (sized := _SIZED.get(kind)) is not None:
        (size,) = _SIZE.unpack_from(data, at)
        begin = at + _SIZE.size
        if begin + size > len(data):
            raise ValueError("it ends before its size")
        return sized(data[begin : begin + size]), begin + size
    if kind == b"T":
        return _moment(*_TIME.unpack_from(data, at)), at + _TIME.size
    if kind == b"D":
        places, digits = _DECIMAL.unpack_from(data, at)
        return Decimal(digits).scaleb(-places), at + _DECIMAL.size
    if kind == b"V":
        return None, at
    raise ValueError(f"{kind!r} is no type of a value")


def _moment(seconds: int) -> datetime | int:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return seconds


_SIZED: Final[dict[bytes, Callable[[bytes], Any]]] = {b"S": readable, b"x": bytes, b"A": _array, b"F": _table}
