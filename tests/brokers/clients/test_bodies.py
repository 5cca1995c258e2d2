"""What becomes of bodies, also of empty ones, and the key that a publisher's name makes."""

from __future__ import annotations

from decimal import Decimal

import pytest

from headgate.brokers.clients.bodies import KEY_CHARS_MAX, decoded_body, event_of, field_of, message_key
from headgate.protocol.values import decode_value, encode_value
from headgate.triggers.shared_stream import Undecodable


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (b"", "text", ""),
        (b"", "bytes", b""),
        (b"\xff", "bytes", b"\xff"),
        ("Å".encode(), "text", "Å"),
        (b"0", "json", 0),
        (b'{"a": 1.25, "b": -0.0, "c": 1e3, "d": 0.1}', "json", {"a": 1.25, "b": 0.0, "c": 1000.0, "d": 0.1}),
        (b"123456789012345678.91", "json", Decimal("123456789012345678.91")),
        (b"[1e400, 9007199254740993]", "json", [Decimal("1e400"), 9007199254740993]),
        (b'"\\ud83d\\ude00"', "json", "\N{GRINNING FACE}"),
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
        (b"[" * 91 + b"]" * 91, "json", "it is nested deeper than 90 levels"),
        (b'{"a":' * 150 + b"1" + b"}" * 150, "json", "it is nested deeper than 90 levels"),
        (b'{"a": NaN}', "json", "it has NaN, which is no value of JSON"),
        (b"[-Infinity]", "json", "it has -Infinity"),
        (b"1e" + b"9" * 30, "json", "a number beyond all limits"),
        (b"9" * 5000, "json", "JSON"),
        (b'[{"id": 1, "amount": 5, "id": 2}]', "json", "the name 'id' is there twice in one object"),
        (b'{"a": "\\ud800"}', "json", "surrogates not allowed"),
        (b'{"\\udfff": 1}', "json", "surrogates not allowed"),
        ('{"a": 1}'.encode("utf-16"), "json", "not UTF-8"),
    ],
)
def test_what_cannot_be_decoded_is_kept_whole(body: bytes, kind: str, says: str) -> None:
    found = decoded_body(body, kind)
    assert isinstance(found, Undecodable)
    assert says in found.reason
    assert found.is_whole


def test_what_is_nested_as_deep_as_may_be_can_be_stored_with_what_is_around_it() -> None:
    flat = b"[" + b"[],{}," * 100 + b"0]"
    for body in (b"[" * 90 + b"]" * 90, b'{"a":' * 90 + b"1" + b"}" * 90, flat):
        event = event_of(decoded_body(body, "json"), {"headers": {}})
        assert decode_value(encode_value([event, {"of": event}], where="payload"))[0] == event


def test_the_rest_of_a_message_is_not_lost_with_its_body() -> None:
    rest = {"headers": {"a": "b"}}
    assert event_of(1, rest) == {"body": 1, "headers": {"a": "b"}}
    event = event_of(Undecodable("no JSON", b"{"), rest)
    assert event == Undecodable("no JSON", {"body": b"{", "headers": {"a": "b"}})


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
