"""URIs of connections: their parts as they were meant, and no error that shows one."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.uris import HOSTS_MAX, URI_CHARS_MAX, UriParts, masked_uri, parse_uri


def test_every_part_is_decoded() -> None:
    parts = parse_uri("PostgreSQL://me%40work:p%40ss%3Aw%2Frd@Db.Example:5433/sales%20eu/x?sslmode=require&a=1&a=2&b=")
    assert parts == UriParts(
        scheme="postgresql",
        host="Db.Example",
        port=5433,
        login="me@work",
        password="p@ss:w/rd",
        schema="sales eu/x",
        extra={"sslmode": "require", "a": "2", "b": ""},
        hosts=(("Db.Example", 5433),),
    )


def test_several_hosts_are_kept_in_their_order_and_the_first_is_the_host() -> None:
    parts = parse_uri("kafka://me:p%2Cw,d@H1:9092,h2,[::1]:9093/?group=g")
    assert parts.hosts == (("H1", 9092), ("h2", None), ("::1", 9093))
    assert (parts.host, parts.port, parts.password) == ("H1", 9092, "p,w,d")


@pytest.mark.parametrize(
    ("uri", "host", "port", "schema"),
    [
        ("redis://", "", None, ""),
        ("redis://[::1]:6379/0", "::1", 6379, "0"),
        ("pg://%2FVar%2Frun/db", "/Var/run", None, "db"),
        ("file:///a/b", "", None, "a/b"),
        ("x://host:/", "host", None, ""),
    ],
)
def test_what_is_not_there_is_empty(uri: str, host: str, port: int | None, schema: str) -> None:
    parts = parse_uri(uri)
    assert (parts.host, parts.port, parts.schema, parts.login, parts.password) == (host, port, schema, "", "")


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_quoted_login_and_password_come_back(login: str, password: str) -> None:
    try:
        quoted = f"x://{quote(login, safe='')}:{quote(password, safe='')}@h/"
    except UnicodeEncodeError:  # a lone surrogate has no form
        return
    parts = parse_uri(quoted)
    assert (parts.login, parts.password, parts.host) == (login, password, "h")


@pytest.mark.parametrize(
    "uri",
    [
        "no uri, hunter22",
        "hunter22",
        "x://me:hunter22 @h",
        "x://me:hunter22\n@h",
        "x://me:hunter22#1@h/",
        "x://me:hunter22@h:port",
        "x://me@a:hunter22/x@h:1",
        "x://me:hunter22@h:99999",
        "x://me:hunter22@h:1,h2:99999",
        "x://me:hunter22@h:1,,h2",
        "x://me:hunter22@" + "h," * HOSTS_MAX + "h",
        "x://" + "hunter22" * URI_CHARS_MAX,
    ],
)
def test_a_text_that_is_no_uri_is_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(ValueError, match=r"it has|it is not a URI|its port|its host and port|a host") as refusal:
        parse_uri(uri)
    assert "hunter22" not in str(refusal.value)
    assert refusal.value.__context__ is None


def test_parts_do_not_show_themselves() -> None:
    assert repr(parse_uri("x://me:hunter22@h")) == "<UriParts of x://>"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://host/path", "http://host/path"),
        ("nats://t0ken@host", "nats://***@host"),  # it may be a token
        ("postgresql://postgres@host/shop", "postgresql://postgres@host/shop"),  # and there it is a role
        ("http://:p@host", "http://:***@host"),
        ("http://me:p%40ss@[::1]:80/x?a=1&b=", "http://me:***@[::1]:80/x?a=***&b=***"),
        ("kafka://me:p@h1:9092,h2", "kafka://me:***@h1:9092,h2"),
        ("s3cret", "***"),
        ("http://[", "***"),
        ("redis://me:p@s3cret/w@localhost", "***"),  # a part of the password stands where the host is
    ],
)
def test_a_uri_is_masked(uri: str, shown: str) -> None:
    assert masked_uri(uri, "***") == shown
