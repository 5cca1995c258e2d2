"""Encoding of messages as tagged msgpack arrays, and the message types that each side of a link may send.

Each link has one decoder for each direction, built once, so a message of the wrong direction is refused before any of
its content is decoded.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Union

import msgspec

from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError
from headgate.protocol.messages import MALFORMED, WireStruct

_ENCODER = msgspec.msgpack.Encoder()
_PARTS: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Role(enum.Enum):
    """One side of a link: the supervisor, or the child of that link."""

    RUNNER = "runner"
    WORKER = "worker"
    SUPERVISOR = "supervisor"


class Wire:
    """The messages of one link. ``types`` are those that each of its two sides may send."""

    def __init__(self, types: Mapping[Role, tuple[type[WireStruct], ...]]) -> None:
        first, second = types
        self.types = types
        self._peers = {first: second, second: first}
        self._tags = {
            role: {str(type_.__struct_config__.tag): type_.__name__ for type_ in kinds} for role, kinds in types.items()
        }
        self._decoders: dict[Role, msgspec.msgpack.Decoder[Any]] = {
            role: msgspec.msgpack.Decoder(Union[kinds])  # noqa: UP007  # the members are known at run time alone
            for role, kinds in types.items()
        }

    def peer(self, role: Role) -> Role:
        """Return the other side of the link. Raises KeyError for a role that is not one of its sides."""
        return self._peers[role]

    def decode(self, sender: Role, body: bytes) -> Any:
        """Return the message in ``body``, one of ``types[sender]``.

        Raises `RemoteProtocolError` for a malformed body, an unknown tag, or a message of the other direction.
        """
        try:
            return self._decoders[sender].decode(body)
        except MALFORMED as error:
            raise self._explain(sender, body, error) from error

    def _explain(self, sender: Role, body: bytes, error: BaseException) -> RemoteProtocolError:
        side, peer = sender.value, self.peer(sender)
        tag = _tag_of(body)
        if tag is None:
            return RemoteProtocolError(f"the {side} sent a malformed body of {len(body):,} bytes: {error}")
        if tag in self._tags[sender]:
            return RemoteProtocolError(f"the {side} sent a malformed {self._tags[sender][tag]}: {error}")
        if tag in self._tags[peer]:
            return RemoteProtocolError(f"the {side} sent {self._tags[peer][tag]}, which only the {peer.value} may send")
        return RemoteProtocolError(f"the {side} sent a message with the unknown tag {tag[:50]!r}")


def encode_message(message: WireStruct) -> bytes:
    """Return the body of the message's frame.

    Raises `LocalProtocolError` if a field cannot be encoded: a str with a lone surrogate, an int of more than 64 bits,
    an object of another type.
    """
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error


def _tag_of(body: bytes) -> str | None:
    """Return the tag of a body that could not be decoded; None if it has none."""
    try:
        parts = _PARTS.decode(body)
        return msgspec.msgpack.decode(parts[0], type=str) if parts else None
    except MALFORMED:
        return None
