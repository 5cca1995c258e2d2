"""Secrets out of text: every form in which one is likely to be written, and nothing else."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol import masking
from headgate.protocol.masking import MASK, SecretMask
from headgate.protocol.messages.queries import GetConnection, GetVariable, GetXCom, SecretText

SECRET = 'hünter "22"/&'


def mask_of(*secrets: str) -> SecretMask:
    mask = SecretMask()
    for secret in secrets:
        mask.add(secret)
    return mask


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        repr(SECRET),
        repr(SECRET.encode()),
        json.dumps(SECRET),
        json.dumps(SECRET, ensure_ascii=False),
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
        ascii(SECRET),
        *(base64.b64encode(before + SECRET.encode() + b":x").decode() for before in (b"", b"u:", b"me:")),
        *(base64.urlsafe_b64encode(before + SECRET.encode()).decode() for before in (b"", b"u:", b"me:")),
    ],
)
def test_a_secret_is_found_in_every_form(form: str) -> None:
    hidden = mask_of(SECRET).hide(f"before {form} after")
    assert "nter" not in hidden
    assert len(hidden) <= len("before  after") + len(MASK) + 14, "a few characters of its neighbours at most"
    assert hidden.startswith("before ")
    assert hidden.endswith(" after")
    assert MASK in hidden


@given(st.text(min_size=6), st.text(), st.text())
def test_no_text_keeps_a_secret(secret: str, before: str, after: str) -> None:
    if len(secret.strip()) < 6 or secret.strip() in f"{before}{MASK}{after}":
        return
    assert secret.strip() not in mask_of(secret).hide(before + secret + after) or MASK in secret


def test_a_short_one_is_left_alone() -> None:
    mask = mask_of("abcde", "")
    assert mask.hide("abcde fghij") == "abcde fghij"
    assert not mask


def test_the_longest_goes_first() -> None:
    assert mask_of("secret", "secret-and-more").hide("a secret-and-more b secret c") == "a *** b *** c"


def test_a_line_of_bytes_of_any_encoding() -> None:
    assert mask_of(SECRET).hide_in_bytes(b"\xff " + SECRET.encode() + b" \xfe") == b"\xff *** \xfe"


def test_a_secret_of_several_lines_is_found_line_by_line() -> None:
    mask = mask_of("-----BEGIN KEY-----\nMIIEowIBAAKCAQEA\n  wxyz1234==\n")
    assert mask.hide("line MIIEowIBAAKCAQEA, line wxyz1234==") == "line ***, line ***"


def test_the_texts_in_json_are_secrets_too() -> None:
    mask = mask_of('{"user": "administrator", "deep": [{"token": "tok-123456"}], "port": 123456, "on": true}')
    assert mask.hide("administrator tok-123456 123456") == "*** *** 123456"
    assert mask_of("[" * 100_000).hide("x") == "x"


def test_a_connections_password_uri_and_query_are_secrets() -> None:
    mask = SecretMask()
    uri = "pg://me:p%40ssword@h/db?token=abc%2Fdefg"
    mask.note(GetConnection("db"), SecretText(uri))
    for text in (uri, "p@ssword", "p%40ssword", "abc/defg", quote(uri, safe="")):
        assert mask.hide(f"<{text}>") == "<***>"
    assert mask.hide("me h db") == "me h db"


def test_a_login_without_a_password_may_be_a_token_but_not_where_it_is_a_role() -> None:
    mask = SecretMask()
    mask.note(GetConnection("broker"), SecretText("nats://t0ken%2Fof-nats@h:4222"))
    assert mask.hide("<t0ken/of-nats> <t0ken%2Fof-nats>") == "<***> <***>"
    for uri in ("postgresql://postgres@h/db", "redis://reader-1:hunter22@h"):
        mask.note(GetConnection("other"), SecretText(uri))
    assert mask.hide("postgresql table orders, reader-1") == "postgresql table orders, reader-1"


def test_a_connection_that_is_no_uri_is_a_secret_as_a_whole() -> None:
    mask = SecretMask()
    mask.note(GetConnection("db"), SecretText("no uri at all"))
    assert mask.hide("it is no uri at all!") == "it is ***!"


def test_only_secrets_are_noted() -> None:
    mask = SecretMask()
    mask.note(GetVariable("v"), SecretText(None))
    mask.note(GetXCom("t", "k"), SecretText("whatever"))
    assert not mask
    assert repr(mask_of("secret")) == "<SecretMask with 4 forms>"


def test_the_oldest_of_too_many_is_forgotten_and_a_new_look_keeps_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "FORMS_MAX", 20)
    mask = mask_of("the oldest", "kept by use")
    for number in range(4):
        mask.add(f"secret{number}")
    mask.add("kept by use")
    for number in range(3):
        mask.add(f"another{number}")
    assert mask.hide("the oldest, kept by use, another2") == "the oldest, ***, ***"
    assert repr(mask) == "<SecretMask with 20 forms>"


def test_secrets_that_are_too_long_together_are_forgotten_from_the_oldest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "FORMS_CHARS_MAX", 30_000)
    mask = mask_of("a" * 1_000, "b" * 1_000)
    mask.add("c" * 1_000)
    assert mask.hide("a" * 1_000) == mask.hide("b" * 1_000) == mask.hide("c" * 1_000) == "***"
    for letter in "defg":
        mask.add(letter * 1_000)
    assert mask.hide("a" * 1_000) == "a" * 1_000
    assert mask.hide("f" * 1_000) == mask.hide("g" * 1_000) == "***"


def test_apart_leaves_no_trace() -> None:
    mask = mask_of("before")
    with mask.apart():
        mask.add("meanwhile")
        assert mask.hide("before meanwhile") == "before ***"
    assert mask.hide("before meanwhile") == "*** meanwhile"


@given(st.text(min_size=6, max_size=20).filter(lambda text: len(text.strip()) >= 6), st.integers(1, 19))
def test_the_beginning_of_a_secret_at_an_end_is_seen(secret: str, length: int) -> None:
    data = secret.strip().encode("utf-8", "surrogatepass")
    begun = data[: min(length, len(data) - 1)]
    assert mask_of(secret).begun_at_end(b"\0\0" + begun) >= len(begun)


def test_an_end_that_begins_no_secret_is_none() -> None:
    assert mask_of("hunter2").begun_at_end(b"a hunter2") == 0
    assert mask_of("hunter2").begun_at_end(b"") == 0
    assert SecretMask().begun_at_end(b"h") == 0
