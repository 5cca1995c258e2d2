"""Signatures of webhooks: that a request comes from who knows the secret, and is not an old one sent again.

Pure: no I/O, and the time is given. Signatures are compared in constant time. The schemes:

- ``standard``: Standard Webhooks (https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md),
  version ``v1``, a symmetric secret ``whsec_BASE64``.
- ``github``: ``X-Hub-Signature-256`` (https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries).
  Neither a time nor the id of the delivery is signed: whoever has seen a request can send it again under another id.
- ``stripe``: ``Stripe-Signature``, scheme ``v1`` (https://docs.stripe.com/webhooks/signature).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

SIGNATURES_MAX: Final = 16  # of one request that are looked at: senders that change their secret send a few
SECRET_BYTES_MIN: Final = 16
_STANDARD_PREFIX: Final = "whsec_"


class SignatureRefused(Exception):
    """A request is not signed as it must be. The text shows neither a secret nor a signature."""


class Request(NamedTuple):
    """What of a request is signed. ``headers``: by their names in lower case."""

    headers: Mapping[str, str]
    body: bytes


class Scheme(NamedTuple):
    """A way to sign. ``key``: where the id of the delivery is, if the user does not say so.

    ``headers``: those that belong to the message, and are the same at each attempt to deliver it. ``counters``: fields
    of a JSON body that are not.
    """

    secret_of: Callable[[str], bytes]
    check: Callable[[Request, Sequence[bytes], float, float], None]
    key: str
    headers: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()


def _standard_secret(text: str) -> bytes:
    try:
        secret = base64.b64decode(text.removeprefix(_STANDARD_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not text.startswith(_STANDARD_PREFIX) or not secret:
        raise ValueError(f"a secret of Standard Webhooks must be {_STANDARD_PREFIX} and Base64")
    return _long_enough(secret)


def _plain_secret(text: str) -> bytes:
    return _long_enough(text.encode())


def _long_enough(secret: bytes) -> bytes:
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"a secret must have at least {SECRET_BYTES_MIN} bytes")
    return secret


def _check_standard(request: Request, secrets: Sequence[bytes], now_s: float, tolerance_s: float) -> None:
    name, at = _header(request, "webhook-id"), _header(request, "webhook-timestamp")
    _check_time(at, now_s, tolerance_s)
    signed = f"{name}.{at}.".encode() + request.body
    given = [each[3:] for each in _header(request, "webhook-signature").split() if each.startswith("v1,")]
    expected = [base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in secrets]
    _compare(given, expected)


def _check_github(request: Request, secrets: Sequence[bytes], now_s: float, tolerance_s: float) -> None:
    given = _header(request, "x-hub-signature-256")
    expected = [f"sha256={hmac.new(secret, request.body, hashlib.sha256).hexdigest()}" for secret in secrets]
    _compare([given], expected)


def _check_stripe(request: Request, secrets: Sequence[bytes], now_s: float, tolerance_s: float) -> None:
    parts = [part.strip().partition("=") for part in _header(request, "stripe-signature").split(",")]
    at = next((value for name, _, value in parts if name == "t"), "")
    _check_time(at, now_s, tolerance_s)
    signed = f"{at}.".encode() + request.body
    given = [value for name, _, value in parts if name == "v1"]
    _compare(given, [hmac.new(secret, signed, hashlib.sha256).hexdigest() for secret in secrets])


def _header(request: Request, name: str) -> str:
    if not (value := request.headers.get(name, "")):
        raise SignatureRefused(f"the header {name} is missing")
    return value


def _check_time(text: str, now_s: float, tolerance_s: float) -> None:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise SignatureRefused("its time is not a number of seconds since 1970")
    if abs(now_s - int(text)) > tolerance_s:
        raise SignatureRefused(f"its time differs by more than {tolerance_s:g} s from ours")


def _compare(given: Sequence[str], expected: Sequence[str]) -> None:
    fits = False
    for each in given[:SIGNATURES_MAX]:
        for other in expected:
            fits |= hmac.compare_digest(each.encode(errors="replace"), other.encode())
    if not fits:
        raise SignatureRefused("its signature does not fit")


SCHEMES: Final[Mapping[str, Scheme]] = {
    "standard": Scheme(_standard_secret, _check_standard, "header:webhook-id", ("webhook-id",)),
    "github": Scheme(_plain_secret, _check_github, "header:x-github-delivery", ("x-github-delivery", "x-github-event")),
    # How many endpoints have not taken the event yet (https://docs.stripe.com/api/events/object).
    "stripe": Scheme(_plain_secret, _check_stripe, "json:id", counters=("pending_webhooks",)),
}
