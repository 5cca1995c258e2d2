"""Golden frames: one message of each kind, and its body in hex as it once was on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headgate.protocol.link.wire import Wire, encode_message
from headgate.protocol.messages import WireStruct

CAPTURED = Path(__file__).parents[1] / "replay" / "captured"


def read_golden(name: str) -> dict[str, bytes]:
    """Return the bodies in a file of ``name hex`` lines, by name."""
    lines = (CAPTURED / name).read_text().splitlines()
    return {key: bytes.fromhex(body) for key, body in (line.split() for line in lines if not line.startswith("#"))}


def fields_at_default(messages: Iterable[msgspec.Struct]) -> list[tuple[str, str]]:
    """Return (struct, field) wherever a field is at its default: there the order of fields would not be pinned."""

    def structs_in(value: Any) -> list[msgspec.Struct]:
        if isinstance(value, tuple):
            return [struct for item in value for struct in structs_in(item)]
        if isinstance(value, msgspec.Struct):
            return [value, *structs_in(msgspec.structs.astuple(value))]
        return []

    return [
        (type(struct).__name__, field.name)
        for struct in structs_in(tuple(messages))
        for field in msgspec.structs.fields(struct)
        if getattr(struct, field.name) == field.default
    ]


def check_golden(wire: Wire, messages: Mapping[str, WireStruct], name: str, file: str) -> None:
    """Check that a message has its golden frame, which is decoded to it, and that each frame of the file has one."""
    golden, message = read_golden(file), messages[name]
    (sender,) = (role for role, kinds in wire.types.items() if type(message) in kinds)
    assert encode_message(message) == golden[name]
    assert wire.decode(sender, golden[name]) == message
    assert golden.keys() == messages.keys()
