"""The collector: what it takes, what it refuses, and what it could not take at this moment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

WORDS_CHARS_MAX = 500
# Answers from 400 to 499 that say nothing of the spans: of logins, of the path, and of the moment.
_OF_NO_SPANS = frozenset({401, 403, 404, 405, 408, 425, 429})


class CollectorAway(Exception):
    """The collector could take nothing at this moment; the text says why."""


class CollectorUnusable(Exception):
    """There is no such collector: the variables of OpenTelemetry do not say how to reach one."""


class Collector:
    """Where spans are sent to, over OTLP with HTTP; ``OTEL_EXPORTER_OTLP_*`` say how, as for all that uses the SDK."""

    def __init__(self, url: str) -> None:
        """Raises `CollectorUnusable`."""
        self._session = _Session()
        self._said = _LastWords()
        logger = logging.getLogger("opentelemetry.exporter")
        logger.addHandler(self._said)
        logger.propagate = False  # what it says is said here
        try:
            self._exporter = OTLPSpanExporter(url, session=self._session)
            self._session.get_adapter(url)
            self._session.prepare_request(requests.Request("POST", url))
        except requests.RequestException:
            raise CollectorUnusable("it is not a URL of HTTP, which begins with http:// or https://") from None
        except (RuntimeError, ValueError, OSError) as error:
            raise CollectorUnusable(f"traces cannot be sent to it: {error}") from error

    def send(self, spans: Sequence[ReadableSpan]) -> str:
        """Send spans; return why they are refused, all or some, an empty text if they are not.

        Raises `CollectorAway`, and `CollectorUnusable` for headers that cannot be sent.
        """
        self._session.problem, self._session.answer, self._said.text = "", None, ""
        is_taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if self._session.has_bad_header:
            raise CollectorUnusable("a header of OTEL_EXPORTER_OTLP_HEADERS cannot be sent over HTTP")
        answer = self._session.answer
        if answer is None:
            if self._session.problem:
                raise CollectorAway(self._session.problem)
            return self._said.text or "they cannot be sent"  # for example, they are too many bytes
        if is_taken and answer.status_code < 300:
            return _left_out(answer.content)
        why = f"{answer.status_code} {answer.reason}: {answer.text}"[:WORDS_CHARS_MAX].rstrip(": \n")
        if 400 <= answer.status_code < 500 and answer.status_code not in _OF_NO_SPANS:
            return why
        raise CollectorAway(why)


def _left_out(body: bytes) -> str:
    try:
        partial = ExportTraceServiceResponse.FromString(body).partial_success
    except DecodeError:
        return ""
    if not partial.rejected_spans:
        return ""
    return f"{partial.rejected_spans:,} of these spans: {partial.error_message}"[:WORDS_CHARS_MAX]


class _Session(requests.Session):
    """Keeps the last answer, or why there was none, which the exporter does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.problem = ""
        self.has_bad_header = False  # it may be a secret, and its error has it in its text
        self.answer: requests.Response | None = None

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """Return what is to be sent."""
        try:
            prepared = super().prepare_request(request)
            for value in prepared.headers.values():
                str(value).encode("latin-1")  # as it is sent
        except (requests.exceptions.InvalidHeader, UnicodeEncodeError):
            self.has_bad_header = True
            raise
        return prepared

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send a request."""
        self.problem, self.answer = "no answer", None
        try:
            self.answer = super().send(request, **kwargs)
        except OSError as error:  # those of requests, and of a file that is missing
            _, _, parameters = request.path_url.partition("?")  # one may be a key
            self.problem = (str(error).replace(parameters, "...") if parameters else str(error))[:WORDS_CHARS_MAX]
            raise
        return self.answer


class _LastWords(logging.Handler):
    """Keeps what the exporter has said of what it does not send."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.text = record.getMessage()[:WORDS_CHARS_MAX]
