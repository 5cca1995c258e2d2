"""Where inputs come from: the frames of the golden captures, taken apart, mutated, and put together again.

An input is a list of parts and the way they are joined, so that a body can be changed inside a frame whose length
and CRC are right: what is wrong with the outer form is found out early, and what lies behind it would stay untested.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from headgate.protocol.framelog.log import Record, encode_record, read_frames
from headgate.protocol.link.framing import encode_frame
from headgate.protocol.link.runner_dialect import Direction

CAPTURED = Path(__file__).parents[2] / "replay" / "captured"
FILE_HEADER_BYTES = 16
FRAMES_PER_SEED_MAX = 30  # of a capture: long enough for a conversation, short enough to be mutated everywhere
FRAMING_BYTES_MAX = 1 + 0xFF * 16  # of a frame that passes the largest limit that the first byte of an input can set
INPUT_BYTES_MAX = 256 * 1024  # longer inputs are cut: they find nothing more, more slowly

_INTERESTING = [0, 1, 0x7F, 0x80, 0xC1, 0xCF, 0xDD, 0xDF, 0xFF]
_NUMBERS = [0, 1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)]
_TEXTS = ["", "\0", "x" * 600, "\U0010ffff", "$", "'; --", "1.1.1.1", "%s", "/", "\ud7ff", "é" * 300]

_TAGS = ["datetime", "date", "time", "timedelta", "decimal", "uuid", "bytes", "tuple", "set", "frozenset", "float"]
_TAGS += ["int", "dict", "nobody's", "$"]


@dataclass(frozen=True)
class Input:
    """Parts, and how they become the bytes a target is given."""

    parts: tuple[bytes, ...]
    join: Callable[[tuple[bytes, ...]], bytes]

    def data(self) -> bytes:
        return self.join(self.parts)[:INPUT_BYTES_MAX]


def _joined(parts: tuple[bytes, ...]) -> bytes:
    return b"".join(parts)


def _framed(parts: tuple[bytes, ...]) -> bytes:
    return b"".join(encode_frame(part, 2**24) for part in parts if part)


def _log_of(directions: tuple[Direction, ...], header: bytes) -> Callable[[tuple[bytes, ...]], bytes]:
    def join(parts: tuple[bytes, ...]) -> bytes:
        records = [
            encode_record(1000.0 + number, directions[number % len(directions)], 1, part)
            for number, part in enumerate(parts)
        ]
        return header + b"".join(records)

    return join


@cache
def _conversations() -> tuple[tuple[Record, ...], ...]:
    """The beginning of every incarnation 1 in the captures, and their handmade example."""
    found = []
    for path in sorted(CAPTURED.rglob("*.hgframe")):
        records = [item for item in read_frames(path) if isinstance(item, Record) and item.incarnation == 1]
        found.append(tuple(records[:FRAMES_PER_SEED_MAX]))
    return tuple(found)


def _bodies(conversation: tuple[Record, ...], direction: Direction) -> tuple[bytes, ...]:
    return tuple(record.body for record in conversation if record.direction is direction)


def seeds(target: str) -> list[Input]:
    """Return the inputs a target begins with."""
    conversations = _conversations()
    runner = [Input(_bodies(c, Direction.FROM_RUNNER), _framed) for c in conversations]
    supervisor = [Input(_bodies(c, Direction.FROM_SUPERVISOR), _framed) for c in conversations]
    match target:
        case "framing":
            fitting = [seed for seed in runner if max(map(len, seed.parts)) <= FRAMING_BYTES_MAX]
            return [Input((b"\xff", *seed.parts), lambda p: b"".join(p[:1])[:1] + _framed(p[1:])) for seed in fitting]
        case "message":
            one = {b"\0" + body for seed in runner for body in seed.parts}
            other = {b"\xff" + body for seed in supervisor for body in seed.parts}
            golden = (CAPTURED / "messages-v3.txt").read_text().splitlines()
            pinned = [bytes.fromhex(line.split()[1]) for line in golden if line and not line.startswith("#")]
            more = {side + body for body in pinned for side in (b"\0", b"\xff")}
            return [Input((body,), _joined) for body in sorted(one | other | more)]
        case "conversation-of-supervisor" | "link-of-runner":
            return supervisor
        case "frame-log" | "replay":
            header = next(CAPTURED.rglob("*.hgframe")).read_bytes()[:FILE_HEADER_BYTES]
            return [
                Input(tuple(record.body for record in c), _log_of(tuple(record.direction for record in c), header))
                for c in conversations
            ]
        case "value":
            return [Input((data,), _joined) for data in VALUES]
        case _:
            return runner


VALUES = [
    b'{"a":[1,2.5,null,true,"x"],"b":{"c":-1}}',
    b'{"$":"datetime","v":"2025-03-30T02:30:00+02:00[Europe/Berlin]"}',
    b'{"$":"time","v":"02:30:00.000001"}',
    b'{"$":"date","v":"2025-03-30"}',
    b'{"$":"timedelta","v":[1,2,3]}',
    b'{"$":"decimal","v":"0.10"}',
    b'{"$":"uuid","v":"12345678-1234-5678-1234-567812345678"}',
    b'{"$":"bytes","v":"' + base64.b64encode(b"bytes") + b'"}',
    b'{"$":"set","v":[1,{"$":"tuple","v":[2,{"$":"frozenset","v":[3]}]}]}',
    b'{"$":"float","v":"-inf"}',
    b'{"$":"int","v":"-0x1ffffffffffffffffffff"}',
    b'{"$":"dict","v":[[1,2],[{"$":"tuple","v":[]},"x"]]}',
    b"[" * 90 + b'{"$":"tuple","v":[]}' + b"]" * 90,
]


# --- mutations -----------------------------------------------------------------------------------


def mutated(one: Input, other: Input, randomness: random.Random) -> Input:
    """Return an input with a few random changes; ``other`` is one that pieces may be taken from."""
    parts = list(one.parts)
    for _ in range(randomness.choice((1, 1, 1, 2, 4))):
        _change_parts(parts, other.parts, randomness)
    if randomness.random() < 0.2:
        # Something is wrong with the outer form, too.
        whole = _changed_bytes(one.join(tuple(parts)), b"".join(other.parts), randomness)
        return Input((whole,), _joined)
    return Input(tuple(parts), one.join)


def _change_parts(parts: list[bytes], others: tuple[bytes, ...], randomness: random.Random) -> None:
    if not parts:
        parts.extend(others[:2])
        return
    index = randomness.randrange(len(parts))
    other = randomness.choice(others) if others else b""
    match randomness.randrange(10):
        case 0:
            del parts[index]
        case 1:
            parts.insert(index, parts[index])
        case 2:
            target = randomness.randrange(len(parts))
            parts[index], parts[target] = parts[target], parts[index]
        case 3:
            parts.insert(index, other)
        case 4 | 5 | 6:
            parts[index] = _changed_message(parts[index], randomness)
        case _:
            parts[index] = _changed_bytes(parts[index], other, randomness)


def _changed_message(body: bytes, randomness: random.Random) -> bytes:
    """Change one value somewhere inside a body or a JSON text, so that it is well formed still."""
    try:
        return msgspec.json.encode(_changed_value(msgspec.json.decode(body), randomness))
    except (msgspec.MsgspecError, UnicodeError, ValueError, OverflowError, RecursionError):
        pass
    for start in (0, 1):  # the target of messages has a byte for the direction in front
        try:
            decoded = msgspec.msgpack.decode(body[start:])
            return body[:start] + msgspec.msgpack.encode(_changed_value(decoded, randomness))
        except (msgspec.MsgspecError, UnicodeError, ValueError, OverflowError, RecursionError):
            continue
    return _changed_bytes(body, b"", randomness)


def _changed_value(value: object, randomness: random.Random) -> object:
    if isinstance(value, list) and value and randomness.random() < 0.9:
        index = randomness.randrange(len(value))
        if randomness.random() < 0.15:
            return [*value[: index + 1], *value[index:]] if randomness.random() < 0.5 else value[:index]
        return [*value[:index], _changed_value(value[index], randomness), *value[index + 1 :]]
    match value:
        case {"$": tag, "v": content} if randomness.random() < 0.3:
            return {"$": randomness.choice([*_TAGS, tag]), "v": content}
        case dict() if value:
            key = randomness.choice(list(value))
            return value | {key: _changed_value(value[key], randomness)}
        case bool():
            return not value
        case int() | float():
            return randomness.choice([*_NUMBERS, value + 1, value - 1, 0.5])
        case str():
            return randomness.choice([*_TEXTS, value + "x", value * 2])
        case bytes():
            return randomness.choice([b"", b"\0", value * 2, b'{"$":"x","v":1}'])
        case _:
            return randomness.choice([None, 1, "x", [], {}, True])


def _changed_bytes(data: bytes, other: bytes, randomness: random.Random) -> bytes:
    if not data:
        return other[:100]
    at = randomness.randrange(len(data))
    end = min(len(data), at + randomness.choice((1, 2, 4, 8, 64)))
    match randomness.randrange(8):
        case 0:
            return data[:at] + bytes([data[at] ^ (1 << randomness.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + bytes([randomness.choice(_INTERESTING)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at] + data[at:end] * randomness.choice((2, 3, 200)) + data[end:]
        case 4:
            return data[:at] + randomness.randbytes(end - at) + data[end:]
        case 5:
            return data[:at]
        case 6:
            number = randomness.choice(_NUMBERS) % 2**32
            return data[:at] + number.to_bytes(4, "big") + data[at + 4 :]
        case _:
            cut = randomness.randrange(len(other) + 1)
            return data[:at] + other[cut : cut + 200] + data[at:]
