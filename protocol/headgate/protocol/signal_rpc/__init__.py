"""Signals over gRPC: the messages, which protobuf generates from ``signals.proto``, and what both sides know of them.

It needs protobuf, so only the two sides of gRPC import it: `headgate.signals.remote` and `headgate.signal_server`.
"""

from __future__ import annotations

from typing import Final

SEND: Final = "/headgate.signals.v1.Signals/Send"
LIST: Final = "/headgate.signals.v1.Signals/List"
LISTEN: Final = "/headgate.signals.v1.Signals/Listen"

AUTHORIZATION: Final = "authorization"  # the metadata that carries the token
BEARER: Final = "Bearer "
REFUSED: Final = "headgate-refused"  # trailing metadata of an answer that will be the same if the call is repeated

TOKEN_CHARS_MAX: Final = 1000


def sendable_token(text: str) -> str:
    """Return a token as both sides use it: without the line breaks at its end that files and variables have.

    Raises ValueError, whose text goes on from "the token", for one that no call could carry: spaces at the ends of
    metadata are lost on the way.
    """
    token = text.rstrip("\r\n")
    if not token:
        raise ValueError("is empty")
    if not (token.isascii() and token.isprintable()):
        raise ValueError("must be of printable ASCII characters, without line breaks in it")
    if token != token.strip():
        raise ValueError("must not begin or end with a space")
    if len(token) > TOKEN_CHARS_MAX:
        raise ValueError(f"must have no more than {TOKEN_CHARS_MAX:,} characters, not {len(token):,}")
    return token


# 1,000 signals with keys, dedups and namespaces of the longest, and their values; likewise a page of them.
REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
RESPONSE_BYTES_MAX: Final = 16 * 1024 * 1024

# A link without traffic is asked after whether it is still there; one that does not answer is closed.
KEEPALIVE_S: Final = 30
KEEPALIVE_ANSWER_S: Final = 10
KEEPALIVE_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),
)
