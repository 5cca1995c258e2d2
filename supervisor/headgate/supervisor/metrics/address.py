"""Where to listen, and the addresses of others."""

from __future__ import annotations

import ipaddress
import re

import msgspec

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORT_MAX = 65535
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


class Address(msgspec.Struct, frozen=True):
    """Where to listen. ``host`` is a name or an address, without brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address in ``HOST:PORT``, with IPv6 addresses in brackets. Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or not port.isdecimal() or int(port) > PORT_MAX or (":" in bare and bare == host):
        raise ValueError(f"{text!r} is not HOST:PORT, for example 127.0.0.1:8781 or [::1]:8781")
    return Address(bare, int(port))


def check_host(text: str) -> None:
    """Raise `ValueError` for what is neither the name of a host nor an address, for example for one with a port."""
    if _HOST.fullmatch(text) is None:
        try:
            ipaddress.ip_address(text)
        except ValueError:
            raise ValueError(f"{text!r} is no name of a host such as ops.example.org, without a port") from None


def parse_network(text: str) -> Network:
    """Return an address, or a network such as ``10.1.0.0/16``. Raises `ValueError`."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither an address nor a network such as 10.1.0.0/16") from None


def plain_address(text: str) -> str:
    """Return an address of IPv4 as such, also if a socket of IPv6 has it; any other text as it is."""
    try:
        mapped = getattr(ipaddress.ip_address(text), "ipv4_mapped", None)
    except ValueError:
        return text
    return text if mapped is None else str(mapped)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own, which no other reaches."""
    if host.lower() in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
