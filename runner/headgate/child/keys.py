"""Keys of events and messages: text that can be sent and stored, the same for the same message each time."""

from __future__ import annotations

import hashlib

from headgate.child.error_text import storable
from headgate.protocol.messages.runner import KEY_CHARS_MAX


def is_storable_key(key: object) -> bool:
    """Whether the key of an event can be sent and stored as it is."""
    if key is None:
        return True
    if not isinstance(key, str) or len(key) > KEY_CHARS_MAX:
        return False
    return (key.isascii() and "\0" not in key) or storable(key) == key  # the first is true of most, and cheap


def storable_key(key: object) -> str | None:
    """Return the key, unchanged if it can be stored, else escaped and with a digest; None for what is no text.

    Without the digest, two keys that begin alike would be taken for one.
    """
    if not isinstance(key, str):
        return None
    if is_storable_key(key):
        return str.__str__(key)
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{storable(key[:KEY_CHARS_MAX])[: KEY_CHARS_MAX - len(digest) - 1]}#{digest}"
