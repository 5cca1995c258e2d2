"""A collector of OpenTelemetry in a thread: it takes what exporters send, or refuses it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.integration.conftest import keys as keys
from tests.integration.conftest import station as station
from tests.store.harness import Clock, OpenStore

from headgate.store.store import Store
from headgate.tracing.sender import Collector, open_collector


class CollectorServer(ThreadingHTTPServer):
    """What it was sent.

    ``refuses`` is a text: a request in which it occurs is answered with 400, for ``refusals_left`` times.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []
        self.refuses: bytes | None = None
        self.refusals_left = sys.maxsize
        self.is_away = False
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
        code = 404 if self.path != "/v1/traces" else 503 if server.is_away else 200
        if server.refuses is not None and server.refuses in body and server.refusals_left:
            server.refusals_left -= 1
            code = 400
        if code == 200 and body:
            server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(code)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(open_store: OpenStore, clock: Clock) -> Store:
    return open_store(clock=clock)


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
def collector(server: CollectorServer, monkeypatch: pytest.MonkeyPatch) -> Collector:
    """The collector, for a sender. One that is away is asked again within a tenth of a second, and then given up."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.1")
    return open_collector(f"{server.url}/v1/traces")
