"""What becomes of bodies, also of empty ones, and the key that a publisher's name makes."""

from __future__ import annotations

import pytest

from headgate.brokers.clients.bodies import KEY_CHARS_MAX, decoded_body, field_of, message_key
from headgate.triggers.shared_stream import Undecodable


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (b"", "text", ""),
        (b"", "bytes", b""),
        (b"\xff", "bytes", b"\xff"),
        ("Å".encode(), "text", "Å"),
        (b"0", "json", 0),
    ],
)
def test_an_empty_body_is_one_as_any_other(body: bytes, kind: str, expected: object) -> None:
    assert decoded_body(body, kind) == expected


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"", "json", "not JSON"),
        (b"\xff", "text", "not UTF-8"),
        (b"\xff", "json", ""),
        (b"[" * 100_000, "json", "JSON"),
    ],
)
def test_what_cannot_be_decoded_is_kept_whole(body: bytes, kind: str, says: str) -> None:
    found = decoded_body(body, kind)
    assert isinstance(found, Undecodable)
    assert says in found.reason
    assert found.is_whole


def test_a_field_is_a_name_if_it_is_a_text_or_a_number() -> None:
    assert field_of(b'{"id": "a", "n": 7}', "id") == "a"
    assert field_of(b'{"id": "a", "n": 7}', "n") == 7
    for body in (b'{"id": true}', b'{"id": null}', b'{"id": [1]}', b"[]", b"", b"\xff"):
        assert field_of(body, "id") is None


def test_one_name_for_all_messages_names_each_that_differs_and_no_key_is_too_long() -> None:
    assert message_key("q", None, b"a") is None
    assert message_key("q", "", b"a") is None
    assert message_key("q", "id", b"a") == message_key("q", "id", b"a") != message_key("q", "id", b"b")
    long = [message_key(place * 500, name * 5_000, b"a") for place in "pq" for name in "nm"]
    assert len(set(long)) == 4
    assert all(key is not None and len(key) <= KEY_CHARS_MAX for key in long)
