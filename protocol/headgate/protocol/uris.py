"""Parser for the URIs of connections.

The form is ``scheme://login:password@host:port/schema?key=value``. All parts except the scheme are optional; special
characters in a part are percent-encoded. A cluster has several hosts, ``h1:9092,h2:9092``. `urllib.parse.urlsplit` does
not fit, because it changes the case of the host, which may be the path of a socket, and knows one host only.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, unquote

import msgspec

URI_CHARS_MAX: Final = 64 * 1024  # as long as a stored connection may be
PORT_MAX: Final = 65_535
# Schemes whose login is a name also without a password: "postgres" is one, and in many lines by itself.
ROLES: Final = frozenset({"postgresql", "postgres"})
HOSTS_MAX: Final = 100  # of one URI: clients take a few to find the others by

_URI: Final = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?"
)
_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]*))?")


class UriParts(msgspec.Struct, frozen=True):
    """The parts of a URI; '' or None for a missing one. ``schema`` is its path without the first slash.

    ``hosts`` are all its hosts with their ports, in order; ``host`` and ``port`` are the first of them.
    """

    scheme: str
    host: str
    port: int | None
    login: str
    password: str
    schema: str
    extra: dict[str, str]
    hosts: tuple[tuple[str, int | None], ...] = ()

    @property
    def token(self) -> str:
        """A login without a password, which may be a secret (NATS, HTTP); '' if there is none, and for `ROLES`."""
        return "" if self.password or self.scheme in ROLES else self.login

    def __repr__(self) -> str:
        return f"<UriParts of {self.scheme}://>"  # it may be shown in a traceback, and must not reveal a password


def parse_uri(text: str) -> UriParts:
    """Return the decoded parts of a URI. If its query has a key twice, the last value counts.

    Raises ValueError. Its text shows no part of the URI, because a password may be anywhere in it.
    """
    if len(text) > URI_CHARS_MAX:
        raise ValueError(f"it has {len(text):,} characters; the limit is {URI_CHARS_MAX:,}")
    if not text.isprintable() or " " in text:
        raise ValueError("it has spaces or control characters, which must be percent-encoded")
    found = _URI.fullmatch(text)
    if found is None:
        problem = "a '#' in a password must be written %23" if "#" in text else "it must begin with a scheme and ://"
        raise ValueError(f"it is not a URI (scheme://login:password@host:port/path?key=value): {problem}")
    if "@" in found["path"]:  # most probably the password ends there
        raise ValueError(
            "it has an '@' behind a '/'; a '/' or '@' in a password, or in a path, must be percent-encoded"
        )
    user, at, place = found["authority"].rpartition("@")
    login, _, password = user.partition(":") if at else ("", "", "")
    hosts = tuple(_host_and_port(part) for part in _parts_of(place))
    return UriParts(
        scheme=found["scheme"].lower(),
        host=hosts[0][0] if hosts else "",
        port=hosts[0][1] if hosts else None,
        login=unquote(login),
        password=unquote(password),
        schema=unquote(found["path"].removeprefix("/")),
        extra=dict(parse_qsl(found["query"] or "", keep_blank_values=True)),
        hosts=hosts,
    )


def masked_uri(text: str, mask: str) -> str:
    """Return a URI without its password, the values of its query, and its token.

    A text that is not a URI is masked altogether.
    """
    try:
        parts = parse_uri(text)
    except ValueError:
        return mask
    found = _URI.fullmatch(text)
    assert found is not None, "it was parsed"
    user, at, place = found["authority"].rpartition("@")
    login, colon, _ = user.partition(":")
    shown = f"{login}:{mask}" if colon else mask if parts.token else login
    query = "&".join(f"{name}={mask}" for name in parts.extra)
    return f"{found['scheme']}://{shown + at if user else ''}{place}{found['path']}" + (f"?{query}" if query else "")


def _parts_of(place: str) -> list[str]:
    """Return the texts of the hosts. Raises ValueError for an empty one in a list, and for too many."""
    parts = place.split(",") if place else []
    if len(parts) > 1 and "" in parts:
        raise ValueError("a host between two commas is missing")
    if len(parts) > HOSTS_MAX:
        raise ValueError(f"it has {len(parts):,} hosts; the limit is {HOSTS_MAX:,}")
    return parts


def _host_and_port(text: str) -> tuple[str, int | None]:
    """Return one host and its port, decoded. Raises ValueError."""
    where = _HOST_AND_PORT.fullmatch(text)
    if where is None:
        raise ValueError("its host and port cannot be read; a ':', '/' or '@' in a password must be percent-encoded")
    port = int(where["port"]) if where["port"] else None
    if port is not None and port > PORT_MAX:
        raise ValueError(f"its port must be 0..{PORT_MAX}")
    return unquote(where["host"].strip("[]")), port
