"""What a producer may return, before any of it is used."""

from __future__ import annotations

import pytest

from headgate.protocol.messages.runner import KEY_CHARS_MAX
from headgate.streams.checks import message_key


@pytest.mark.parametrize("key", [None, "k", "k" * KEY_CHARS_MAX])
def test_a_key_of_a_message_is_kept(key: str | None) -> None:
    assert message_key(key, object()) == key


@pytest.mark.parametrize(
    ("key", "error", "says"),
    [
        (7, TypeError, "object.event_key must return a str or None, not a value of type int"),
        ("", ValueError, "object.event_key returned '': a message without a name has None"),
        ("k" * (KEY_CHARS_MAX + 1), ValueError, "object.event_key returned 513 characters; the limit is 512"),
    ],
)
def test_what_is_no_key_is_refused(key: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}$"):
        message_key(key, object())
