"""Who sent a request: the address of the browser, whether it came over TLS, and the user that a proxy names.

A proxy in front may say all three by headers. They are believed only if the connection itself comes from an address
that is listed as a proxy: whoever reaches the pages in another way may write into them what they like.
"""

from __future__ import annotations

import re
import secrets
from ipaddress import ip_address

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from headgate.supervisor.metrics.address import Network, is_loopback, plain_address

NAME_CHARS_MAX = 400  # of a user that a proxy names
HOPS_MAX = 20  # of X-Forwarded-For
_WITH_PORT = re.compile(r"([0-9.]+):[0-9]+|\[([^]]+)\](?::[0-9]+)?")  # as some proxies write an address


class BadSender(Exception):
    """A listed proxy says something that cannot be taken as it stands; the text says what."""


class Sender(msgspec.Struct, frozen=True):
    """Who sent a request. ``user``: whom a listed proxy names, "" if it names nobody, None if none is to name one."""

    address: str
    is_https: bool = False
    user: str | None = None


class Front(msgspec.Struct, frozen=True):
    """What stands before the pages.

    ``hosts``: names by which browsers reach them, besides those of this machine. ``proxies``: who is believed.
    ``user_header``: the header in which these name the user. ``needs_tls``: requests of other machines are answered
    only if a listed proxy says that they came over TLS. ``has_links``: one may log in by a link that is printed.
    ``secret``: from which the tokens of forms are made for users who have no session here.
    """

    hosts: frozenset[str] = frozenset()
    proxies: tuple[Network, ...] = ()
    user_header: str | None = None
    needs_tls: bool = False
    has_links: bool = True
    secret: str = msgspec.field(default_factory=lambda: secrets.token_urlsafe(32))

    def __repr__(self) -> str:
        return f"Front(hosts={sorted(self.hosts)}, proxies={self.proxies}, user_header={self.user_header!r})"

    def sender(self, scope: Scope) -> Sender:
        """Return who sent a request. Raises `BadSender`."""
        address = _peer(scope)
        if not self._is_proxy(address):
            return Sender(address)
        headers = Headers(scope=scope)
        return Sender(self._client(headers, address), _is_https(headers), self._user(headers))

    def takes(self, scope: Scope, sender: Sender) -> bool:
        """Whether a request comes over TLS, as far as it has to, or from this machine itself."""
        if not self.needs_tls or sender.is_https:
            return True
        peer = _peer(scope)
        return is_loopback(peer) and not self._is_proxy(peer)

    def _is_proxy(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self.proxies)

    def _client(self, headers: Headers, peer: str) -> str:
        """Return the last address that no listed proxy has: those before it the browser may have written itself."""
        hops = [hop.strip() for line in headers.getlist("x-forwarded-for") for hop in line.split(",")][-HOPS_MAX:]
        found = peer
        for hop in reversed(hops):
            with_port = _WITH_PORT.fullmatch(hop)
            address = hop if with_port is None else with_port[1] or with_port[2]
            try:
                ip_address(address)
            except ValueError:
                break  # nothing beyond it can be known
            found = plain_address(address)
            if not self._is_proxy(found):
                break
        return found

    def _user(self, headers: Headers) -> str | None:
        if self.user_header is None:
            return None
        named = headers.getlist(self.user_header)
        if len(named) > 1:
            raise BadSender(
                f"the proxy sent {self.user_header} {len(named)} times: it has to remove that of the browser"
            )
        try:
            name = named[0].encode("latin-1").decode().strip() if named else ""
        except UnicodeDecodeError:
            raise BadSender(f"{self.user_header} is not in UTF-8") from None
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise BadSender(f"{self.user_header} has no name of a user")
        return name


def sender_of(scope: Scope) -> Sender:
    """Return who sent a request, as the guard has found out."""
    found = scope["headgate.sender"]
    assert isinstance(found, Sender)
    return found


def _peer(scope: Scope) -> str:
    """Return the address from which a connection comes; "" if it has none."""
    peer = scope.get("client")
    return "" if peer is None else plain_address(str(peer[0]))


def _is_https(headers: Headers) -> bool:
    said = [word.strip().lower() for line in headers.getlist("x-forwarded-proto") for word in line.split(",")]
    return bool(said) and all(word == "https" for word in said)
