"""The server's side of Kafka's logins, for tests: SCRAM (RFC 5802) and OAUTHBEARER (RFC 7628), and who gives tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

HANDSHAKE, AUTHENTICATE = 17, 36  # numbers of requests, of which versions 0 and 1 are known
FAILED, UNKNOWN_MECHANISM = 58, 33
HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
ITERATIONS = 4_096
SALT = b"of the test"
NONCE = "of-the-server"


class Users:
    """The logins of one connection. ``passwords`` of SCRAM by name; ``tokens`` are the bearer tokens that are taken."""

    def __init__(self, passwords: dict[str, str], tokens: set[str], used: list[str]) -> None:
        self._passwords = passwords
        self._tokens = tokens
        self._used = used  # mechanisms of logins that were taken
        self._mechanism = ""
        self._first = ""  # what was said of SCRAM so far

    def answer(self, request: bytes) -> bytes | None:
        """Return the answer to a request about a login; None to others."""
        key, version, number, name_size = struct.unpack_from(">hhih", request)
        if key not in (HANDSHAKE, AUTHENTICATE):
            return None
        assert version <= 1, version
        body = request[10 + max(0, name_size) :]
        head = struct.pack(">i", number)
        if key == HANDSHAKE:
            self._mechanism = body[2:].decode()
            names = [*HASHES, "OAUTHBEARER"]
            listed = b"".join(struct.pack(">h", len(name)) + name.encode() for name in names)
            code = 0 if self._mechanism in names else UNKNOWN_MECHANISM
            return head + struct.pack(">hi", code, len(names)) + listed
        said = body[4:].decode()
        told = self._bearer(said) if self._mechanism == "OAUTHBEARER" else self._scram(said)
        lives = struct.pack(">q", 0) if version else b""
        if told is None:
            text = b"the login is refused"
            return head + struct.pack(">hh", FAILED, len(text)) + text + struct.pack(">i", 0) + lives
        return head + struct.pack(">hhi", 0, -1, len(told)) + told.encode() + lives

    def _bearer(self, said: str) -> str | None:
        if said.partition("auth=Bearer ")[2].rstrip("\x01") not in self._tokens:
            return None
        self._used.append(self._mechanism)
        return ""

    def _scram(self, said: str) -> str | None:
        fields = dict(field.split("=", 1) for field in said.removeprefix("n,,").split(","))
        if not self._first:
            salt = base64.b64encode(SALT).decode()
            answer = f"r={fields['r']}{NONCE},s={salt},i={ITERATIONS}"
            self._first = f"{said.removeprefix('n,,')},{answer}"
            return answer
        name = dict(field.split("=", 1) for field in self._first.split(",")[:1])["n"]
        kind = HASHES[self._mechanism]
        salted = hashlib.pbkdf2_hmac(kind, self._passwords.get(name, "").encode(), SALT, ITERATIONS)
        client, server = (hmac.digest(salted, text, kind) for text in (b"Client Key", b"Server Key"))
        everything = f"{self._first},{said.rpartition(',p=')[0]}".encode()
        signature = hmac.digest(hashlib.new(kind, client).digest(), everything, kind)
        proof = bytes(a ^ b for a, b in zip(client, signature, strict=True))
        if name not in self._passwords or base64.b64decode(said.rpartition(",p=")[2]) != proof:
            return None
        self._used.append(self._mechanism)
        return f"v={base64.b64encode(hmac.digest(server, everything, kind)).decode()}"


def token_of(subject: str) -> str:
    """Return a token that the client can read; it has no signature."""
    now = int(time.time())
    parts: tuple[dict[str, Any], ...] = ({"alg": "none"}, {"sub": subject, "iat": now, "exp": now + 3_600}, {})
    texts = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in parts)
    return ".".join(text.rstrip("=") for text in texts)


class TokenServer:
    """Gives tokens to the client of one id and secret, as OpenID Connect has it; `close` it."""

    def __init__(self, client: str, secret: str) -> None:
        self.token = token_of(client)
        self.asked: list[dict[str, list[str]]] = []  # the forms of all requests
        expected = "Basic " + base64.b64encode(f"{client}:{secret}".encode()).decode()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked.append(parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))
                is_client = self.headers["Authorization"] == expected
                given: dict[str, Any] = {"access_token": outer.token, "token_type": "Bearer", "expires_in": 3_600}
                body = json.dumps(given if is_client else {"error": "invalid_client"}).encode()
                self.send_response(200 if is_client else 401)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/token"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
