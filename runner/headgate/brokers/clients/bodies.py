"""Bodies of messages: what the event has of one, and the key of a message that only its publisher can name."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from headgate.triggers.shared_stream import Undecodable

BODIES: Final = ("text", "json", "bytes")
KEY_CHARS_MAX: Final = 400  # an event's key has room for its position among those of one message, too
PLACE_CHARS_MAX: Final = 300  # of these; of a longer place the key has the beginning and a digest


def decoded_body(body: bytes, kind: str) -> Any:
    """Return a body as one of `BODIES`; an `Undecodable`, which is whole, if it is not that."""
    if kind == "bytes":
        return body
    try:
        return body.decode() if kind == "text" else json.loads(body)
    except UnicodeDecodeError as error:
        return Undecodable(f"the body is not UTF-8: {error.reason}", body)
    except (ValueError, RecursionError) as error:
        return Undecodable(f"the body is not JSON: {error}", body)


def field_of(body: bytes, name: str) -> str | int | None:
    """Return a field of a JSON object if it is a text or a number; None if there is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def message_key(place: str, name: object, body: bytes) -> str | None:
    """Return the key of a message that its publisher has given a name; None if it has not.

    The content belongs to it: a publisher that gives all messages one name loses none that differ.
    """
    if name is None or name == "":
        return None
    content = hashlib.blake2b(body, digest_size=8).hexdigest()
    if len(place) > PLACE_CHARS_MAX:
        place = f"{place[:200]}:{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}"
    key = f"{place}:{name}:{content}"
    if len(key) > KEY_CHARS_MAX:
        key = f"{place}:{hashlib.blake2b(str(name).encode(), digest_size=16).hexdigest()}:{content}"
    return key
