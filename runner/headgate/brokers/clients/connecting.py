"""What all clients do with a stored connection: refuse what they do not know, and make TLS of its options.

The options of TLS are the same for every broker: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile`` (paths), and
``ssl_check_hostname`` (``true`` or ``false``; the certificate itself is checked in any case).
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Final

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.triggers.named_values import Connection

TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_ALERT: Final = re.compile(r"\[SSL: (\w*ALERT\w*)\]")
TLS_OPTIONS: Final = (*TLS_FILES, "ssl_check_hostname")
ALERT_WAIT_S: Final = 2.0


def check_connection(connection: Connection, schemes: Mapping[str, bool], options: Sequence[str] = ()) -> None:
    """Check scheme and options. ``schemes``: whether each is one of TLS; ``options``: those beside TLS.

    Raises `BrokerMisconfigured`, which shows no value.
    """
    where = f"the connection {connection.name!r}"
    if connection.scheme not in schemes:
        known = " or ".join(f"{scheme}://" for scheme in schemes)
        raise BrokerMisconfigured(f"{where} must begin with {known}, not {connection.scheme}://")
    for option in connection.extra:
        if option not in (*options, *TLS_OPTIONS):
            known = ", ".join((*options, *TLS_OPTIONS))
            raise BrokerMisconfigured(f"{where} has the option {option!r}; the options are {known}")
    if not schemes[connection.scheme] and (given := [name for name in TLS_OPTIONS if name in connection.extra]):
        tls = next(scheme for scheme, is_tls in schemes.items() if is_tls)
        raise BrokerMisconfigured(f"{where} has options of TLS ({given[0]}), which begins with {tls}://")


def tls_files(connection: Connection) -> dict[str, str]:
    """Return the paths that the connection gives. Raises `BrokerMisconfigured` for one that cannot be read."""
    return readable_files(connection, TLS_FILES)


def readable_files(connection: Connection, options: Sequence[str]) -> dict[str, str]:
    """Return the paths that these options give. Raises `BrokerMisconfigured` for one that cannot be read."""
    paths: dict[str, str] = {name: connection.extra[name] for name in options if name in connection.extra}
    for option, path in paths.items():
        if not os.access(path, os.R_OK):
            raise BrokerMisconfigured(f"the connection {connection.name!r}: the file of {option} {path} cannot be read")
    return paths


def checks_host(connection: Connection) -> bool:
    """Return whether the certificate must name the host. Raises `BrokerMisconfigured`."""
    text = connection.extra.get("ssl_check_hostname", "true")
    if text not in ("true", "false"):
        raise BrokerMisconfigured(f"the connection {connection.name!r}: ssl_check_hostname must be true or false")
    return text == "true"


def tls_context(connection: Connection) -> ssl.SSLContext:
    """Return what TLS is made with, for a client that takes a context. Raises `BrokerMisconfigured`."""
    files = tls_files(connection)
    try:
        context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
        context.check_hostname = checks_host(connection)
        if "ssl_certfile" in files:
            context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"))
    except (ssl.SSLError, OSError) as error:
        raise BrokerMisconfigured(
            f"the connection {connection.name!r}: a file of TLS cannot be used: {error}"
        ) from None
    return context


def certificate_error(error: BaseException) -> str | None:
    """Return why a certificate was refused, by the server or by us; None if that is not why there is no connection."""
    seen: BaseException | None = error
    while seen is not None:
        for each in (seen, *seen.args):  # some clients keep the cause among the arguments only
            if isinstance(each, ssl.SSLCertVerificationError):
                return f"the certificate of the server is refused: {each.verify_message}"
            # Some keep the text of the cause only.
            if (alert := _ALERT.search(str(each))) is not None:
                return f"the server refuses our certificate: {alert.group(1)}"
        seen = seen.__cause__ or seen.__context__
    return None


def ask_for_refusal(connection: Connection, where: str, host: str, port: int, *, greets: bool = False) -> None:
    """Connect once more after a failure over TLS, and raise `BrokerMisconfigured` if our certificate is refused.

    With TLS 1.3 a server checks it after our side of the handshake has ended. A client that writes at once may find the
    connection closed before it reads why. This one writes nothing, and waits `ALERT_WAIT_S` at most. ``greets``: the
    server sends a line before TLS begins. Any other failure is the caller's, who has seen it already.
    """
    try:
        with socket.create_connection((host, port), ALERT_WAIT_S) as link:
            while greets and link.recv(1) not in (b"\n", b""):
                pass
            with tls_context(connection).wrap_socket(link, server_hostname=host) as encrypted:
                encrypted.recv(1)
    except OSError as error:
        if (refusal := certificate_error(error)) is not None:
            raise BrokerMisconfigured(f"{where}: {refusal}") from None
