"""Signatures of webhooks: the examples of their specifications, and what is refused."""

from __future__ import annotations

import base64
import hmac
from typing import Any

import pytest

from headgate.brokers.incoming.signatures import SCHEMES, Request, SignatureRefused

NOW = 1_614_265_330.0
STANDARD_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
# The example of the specification and its libraries.
STANDARD = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": "1614265330",
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}
STANDARD_BODY = b'{"test": 2432232314}'
# The example of GitHub's documentation.
GITHUB_SECRET = "It's a Secret to Everybody"
GITHUB = {"x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"}
GITHUB_BODY = b"Hello, World!"
STRIPE_SECRET = "whsec_0123456789abcdef"
STRIPE_BODY = b'{"id": "evt_1"}'


def stripe(at: str = "1614265330", secret: str = STRIPE_SECRET, scheme: str = "v1") -> str:
    return f"{scheme}={hmac.new(secret.encode(), f'{at}.'.encode() + STRIPE_BODY, 'sha256').hexdigest()}"


STRIPE = {"stripe-signature": f"t=1614265330,{stripe()},{stripe(scheme='v0')}"}
GOOD: dict[str, tuple[str, dict[str, str], bytes]] = {
    "standard": (STANDARD_SECRET, STANDARD, STANDARD_BODY),
    "github": (GITHUB_SECRET, GITHUB, GITHUB_BODY),
    "stripe": (STRIPE_SECRET, STRIPE, STRIPE_BODY),
}


def check(scheme: str, headers: dict[str, str], body: bytes, *secrets: str, now_s: float = NOW) -> None:
    known = SCHEMES[scheme]
    known.check(Request(headers, body), [known.secret_of(secret) for secret in secrets], now_s, 300.0)


@pytest.mark.parametrize("scheme", GOOD)
def test_what_is_signed_passes_also_with_an_earlier_secret_and_nothing_else_does(scheme: str) -> None:
    secret, headers, body = GOOD[scheme]
    other = "whsec_" + base64.b64encode(b"another secret of 32 bytes......").decode()
    check(scheme, headers, body, secret)
    check(scheme, headers, body, other, secret)
    for wrong in ((headers, body + b" ", secret), (headers, body, other), ({}, body, secret)):
        with pytest.raises(SignatureRefused):
            check(scheme, *wrong)
    for name in headers:
        for value in ("", "é", "0", "v1", "=", "t=,v1=", "sha256=", " , ", "9" * 5_000):
            with pytest.raises(SignatureRefused):
                check(scheme, {**headers, name: value}, body, secret)


@pytest.mark.parametrize("scheme", ["standard", "stripe"])
def test_what_is_old_or_of_the_future_is_refused(scheme: str) -> None:
    secret, headers, body = GOOD[scheme]
    for late_s in (-300, 300):
        check(scheme, headers, body, secret, now_s=NOW + late_s)
    for late_s in (-301, 301):
        with pytest.raises(SignatureRefused, match="differs by more than 300 s"):
            check(scheme, headers, body, secret, now_s=NOW + late_s)


def test_one_of_several_signatures_is_enough_of_the_first_ones() -> None:
    good = STANDARD["webhook-signature"]
    for count, passes in ((1, True), (15, True), (16, False), (5_000, False)):
        headers = {**STANDARD, "webhook-signature": " ".join(["v1a,x", *["v1,AAAA"] * count, good])}
        if passes:
            check("standard", headers, STANDARD_BODY, STANDARD_SECRET)
        else:
            with pytest.raises(SignatureRefused, match="does not fit"):
                check("standard", headers, STANDARD_BODY, STANDARD_SECRET)
    check("stripe", {"stripe-signature": f"t=1614265330,v1=00,{stripe()}"}, STRIPE_BODY, STRIPE_SECRET)


@pytest.mark.parametrize(
    ("scheme", "secret", "problem"),
    [
        ("standard", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "must be whsec_ and Base64"),
        ("standard", "whsec_", "must be whsec_ and Base64"),
        ("standard", "whsec_é", "must be whsec_ and Base64"),
        ("standard", "whsec_c2hvcnQ=", "at least 16 bytes"),
        ("github", "short", "at least 16 bytes"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused(scheme: str, secret: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        SCHEMES[scheme].secret_of(secret)
    assert secret not in str(refused.value) or secret == "whsec_"


def test_signatures_are_compared_in_constant_time(monkeypatch: Any) -> None:
    compared = []

    def note(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("headgate.brokers.incoming.signatures.hmac.compare_digest", note)
    headers = {**STANDARD, "webhook-signature": f"{STANDARD['webhook-signature']} v1,AAAA"}
    check("standard", headers, STANDARD_BODY, STANDARD_SECRET)
    assert len(compared) == 2, "also after one that fits"
