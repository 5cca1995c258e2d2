"""A collector of OpenTelemetry in a thread: it takes what exporters send, or refuses it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.integration.conftest import keys as keys
from tests.integration.conftest import station as station
from tests.store.conftest import clock as clock
from tests.store.conftest import old as old

from headgate.store.store import Store
from headgate.tracing.collector import Collector


class CollectorServer(ThreadingHTTPServer):
    """What it was sent. ``refuses`` is a text: a request in which it occurs is answered with ``code``, and ``says``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []
        self.refuses: bytes | None = None
        self.code, self.says = 400, b""
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Span]:
        """All spans, in the order in which they came."""
        scopes = [scope for one in self.requests for of in one.resource_spans for scope in of.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    @property
    def resources(self) -> list[dict[str, str]]:
        """What the spans of each request are said to be of."""
        found = [of.resource for one in self.requests for of in one.resource_spans]
        return [{one.key: one.value.string_value for one in resource.attributes} for resource in found]


class _Handler(BaseHTTPRequestHandler):
    server: CollectorServer

    def do_POST(self) -> None:
        """Take one request."""
        body = self.rfile.read(int(self.headers["content-length"]))
        server = self.server
        code, says = 404 if self.path != "/v1/traces" else 200, b""
        if server.refuses is not None and server.refuses in body:
            code, says = server.code, server.says
        if code == 200:
            server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(code)
        self.send_header("content-length", str(len(says)))
        self.end_headers()
        self.wfile.write(says)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def store(old: Store) -> Store:
    return old


@pytest.fixture
def server() -> Iterator[CollectorServer]:
    """A collector that takes everything."""
    with CollectorServer() as server:
        thread = threading.Thread(target=server.serve_forever, name="collector")
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that cannot take something now is asked again for two seconds only; to be named first."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2")


@pytest.fixture
def collector(server: CollectorServer) -> Collector:
    """The collector, for a sender."""
    return Collector(f"{server.url}/v1/traces")
