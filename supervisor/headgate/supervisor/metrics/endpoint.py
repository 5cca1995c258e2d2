"""The thread that answers ``/metrics``, ``/livez`` and ``/readyz`` over HTTP.

It never touches the core or the database: it asks the loop (`headgate.supervisor.metrics.asking`). Requests cannot
change anything, and what they get holds no payload, no name of a trigger and no secret.
"""

from __future__ import annotations

import json
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog

from headgate.supervisor.metrics.address import Address, is_loopback
from headgate.supervisor.metrics.asking import TURN_MAX_S, Loop
from headgate.supervisor.metrics.exposition import render

log = structlog.get_logger(__name__)

REQUEST_S_MAX = 10.0  # for a client to send its request, and to take the answer
REQUESTS_MAX = 8  # at a time; further connections are closed
BACKLOG = 16


class Endpoint:
    """A listening socket and its threads, which end with the process. `close` it.

    Raises `OSError` if the address cannot be listened on.
    """

    def __init__(self, address: Address, loop: Loop) -> None:
        self._server = _Server(address, loop)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = BACKLOG
    allow_reuse_address = True

    def __init__(self, address: Address, loop: Loop) -> None:
        self.address_family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.loop = loop
        self.is_loopback = address.is_loopback
        self._free = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__((str(where[0]), int(where[1])), _Handler)

    def server_bind(self) -> None:
        # The base class looks the host's name up, which may take long, for a name that nobody reads.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "headgate", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics failed", client=str(client_address), exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = REQUEST_S_MAX
    server_version = "headgate"
    sys_version = ""

    def do_GET(self) -> None:
        if self.server.is_loopback and not _is_this_machine(self.headers.get("Host")):
            # A page in a browser on this machine, whose name was made to point here (DNS rebinding).
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "the Host of the request is not this machine\n")
            return
        answers = {"/metrics": self._metrics, "/livez": self._alive, "/readyz": self._ready}
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, "there are /metrics, /livez and /readyz\n")
        else:
            answer()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _metrics(self) -> None:
        report = self.server.loop.ask() or self.server.loop.said_last()
        if report is None:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, self._busy())
            return
        body, content_type = render(report.snapshot, self.headers.get("Accept", ""))
        self._send(HTTPStatus.OK, body, content_type)

    def _alive(self) -> None:
        is_alive = self.server.loop.turns_for_s() < TURN_MAX_S
        self._send(HTTPStatus.OK if is_alive else HTTPStatus.SERVICE_UNAVAILABLE, "ok\n" if is_alive else self._busy())

    def _ready(self) -> None:
        report = self.server.loop.ask()
        if report is None:
            checks = {"loop": {"ok": False, "says": self._busy().strip()}}
        else:
            checks = {name: {"ok": holds, "says": words} for name, (holds, words) in report.checks.items()}
        is_ready = report is not None and report.is_ready
        body = json.dumps({"ready": is_ready, "checks": checks}, indent=1) + "\n"
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        self._send(status, body, "application/json")

    def _busy(self) -> str:
        return f"{self.server.loop.name} has been busy for {self.server.loop.turns_for_s():.1f} s\n"

    def _send(self, status: HTTPStatus, body: str | bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("a request for metrics", client=self.client_address[0], said=format % args)


def _is_this_machine(header: str | None) -> bool:
    """Whether a Host names this machine; a client that sends none is not a browser."""
    if header is None:
        return True
    host = header.strip()
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(bare)
