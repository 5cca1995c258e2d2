"""Messages as bytes: tagged msgpack arrays, and who may send which.

Encoders and decoders are built once, one decoder for each direction, so that a message that goes the
wrong way is refused before any of its content is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError
from headgate.protocol.link.session import Role
from headgate.protocol.messages.runner import (
    Drain,
    FromRunner,
    FromSupervisor,
    Hello,
    Reply,
    Request,
    Response,
    StateChanges,
    StateSync,
    Welcome,
)

Message = FromRunner | FromSupervisor

MESSAGE_TYPES: Final[dict[Role, tuple[type[Message], ...]]] = {
    Role.RUNNER: (Hello, StateChanges, Request),
    Role.SUPERVISOR: (Welcome, StateSync, Response, Drain, Reply),
}

_TAGS: Final[dict[Role, dict[str, str]]] = {
    role: {str(type_.__struct_config__.tag): type_.__name__ for type_ in types} for role, types in MESSAGE_TYPES.items()
}

_ENCODER = msgspec.msgpack.Encoder()
_FROM_RUNNER: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)
_FROM_SUPERVISOR: msgspec.msgpack.Decoder[FromSupervisor] = msgspec.msgpack.Decoder(FromSupervisor)
_PARTS: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])

# All that msgspec raises for bytes of any kind: RecursionError comes from deep nesting in a field that a
# newer peer appended and this side skips.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode_message(message: Message) -> bytes:
    """Return the body of the message's frame.

    Raises `LocalProtocolError` where a field has no form on the wire: a str with a lone surrogate, an int
    of more than 64 bits, an object of another type.
    """
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error


def decode_from_runner(body: bytes) -> FromRunner:
    """Return the runner's message in ``body``; raises `RemoteProtocolError` as `decode_message` does."""
    try:
        return _FROM_RUNNER.decode(body)
    except MALFORMED as error:
        raise _explain(Role.RUNNER, body, error) from error


def decode_from_supervisor(body: bytes) -> FromSupervisor:
    """Return the supervisor's message in ``body``; raises `RemoteProtocolError` as `decode_message` does."""
    try:
        return _FROM_SUPERVISOR.decode(body)
    except MALFORMED as error:
        raise _explain(Role.SUPERVISOR, body, error) from error


def decode_message(sender: Role, body: bytes) -> Message:
    """Return the message in ``body``, which ``sender`` sent.

    Raises `RemoteProtocolError` that says what is wrong: a malformed body, an unknown tag, or a message
    of the other direction.
    """
    return decode_from_runner(body) if sender is Role.RUNNER else decode_from_supervisor(body)


def _explain(sender: Role, body: bytes, error: BaseException) -> RemoteProtocolError:
    return explain_malformed(sender.value, sender.peer.value, _TAGS[sender], _TAGS[sender.peer], body, error)


def explain_malformed(
    sender: str, peer: str, sent: Mapping[str, str], received: Mapping[str, str], body: bytes, error: BaseException
) -> RemoteProtocolError:
    """Return what to raise for a body of ``sender`` that could not be decoded.

    ``sent`` and ``received`` are the names of the messages that ``sender`` and its peer may send, by their tags.
    """
    tag = _tag_of(body)
    if tag is None:
        return RemoteProtocolError(f"the {sender} sent a malformed body of {len(body):,} bytes: {error}")
    if tag in sent:
        return RemoteProtocolError(f"the {sender} sent a malformed {sent[tag]}: {error}")
    if tag in received:
        return RemoteProtocolError(f"the {sender} sent {received[tag]}, which only the {peer} may send")
    return RemoteProtocolError(f"the {sender} sent a message with the unknown tag {tag[:50]!r}")


def _tag_of(body: bytes) -> str | None:
    """Return the tag of a body that could not be decoded, None where there is none to be found."""
    try:
        parts = _PARTS.decode(body)
        return msgspec.msgpack.decode(parts[0], type=str) if parts else None
    except MALFORMED:
        return None
