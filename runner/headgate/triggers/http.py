"""Triggers that send HTTP requests: one polls a URL, one reads the pages of an API."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any

import httpx2
import msgspec
import trio

from headgate.triggers.base import BaseTrigger, TriggerEvent
from headgate.triggers.paging import Page, PagedTrigger

__all__ = ["HttpPagesTrigger", "HttpTrigger", "HttpTriggerError"]

POLL_INTERVAL_S = 5.0
TIMEOUT_S = 10.0  # one try as a whole: name, connection, headers and body
TRIES_MAX = 5  # enough for a service to restart; one that is down is to be reported
BODY_BYTES_MAX = 256 * 1024  # well below the limit of an event, even if its text grows when it is encoded
PAGE_BYTES_MAX = 8 * 1024 * 1024  # in memory; how long an event may be decides `event_bytes_max`
HEADERS_KEPT = ("content-type", "date", "etag", "last-modified", "location", "retry-after")
NOT_THERE_YET = 404  # a resource that is not created yet; any other 4xx is permanent


class HttpTriggerError(Exception):
    """The URL could not be read: too many consecutive requests failed, or the response is not what it should be.

    ``url`` is without credentials, query and fragment.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url
        self.problem = problem


class HttpTrigger(BaseTrigger):
    """Fires once, when a request to ``url`` is answered with ``expected_status``.

    A try fails if there is no complete response within ``timeout_s`` seconds, if the connection fails, or if the
    response is an error status (400 and above) other than the expected one and 404. Any other response means *not yet*:
    the next try is ``poll_interval_s`` seconds later. ``tries_max`` consecutive failed tries raise HttpTriggerError, as
    does an expected response whose body exceeds ``BODY_BYTES_MAX``.

    Redirects are followed, unless a redirect is expected. The payload is ``{"status": int, "headers": {name: value},
    "body": str}`` with the headers of ``HEADERS_KEPT``. Raises ValueError for invalid arguments.
    """

    def __init__(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        expected_status: int = 200,
        poll_interval_s: float = POLL_INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        tries_max: int = TRIES_MAX,
    ) -> None:
        self.url = url
        self.method = method
        self.headers = dict(headers or {})
        self.expected_status = expected_status
        self.poll_interval_s = poll_interval_s
        self.timeout_s = timeout_s
        self.tries_max = tries_max
        self._shown_url = _without_secrets(url)
        if not (method.isascii() and method.isalpha()):
            raise ValueError(f"{method!r} is not an HTTP method")
        _check_headers(self.headers)
        if not 200 <= expected_status <= 599:
            raise ValueError(f"expected_status must be in 200..599, not {expected_status!r}")
        for argument, seconds in (("poll_interval_s", poll_interval_s), ("timeout_s", timeout_s)):
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"{argument} must be a positive number of seconds, not {seconds!r}")
        if tries_max < 1:
            raise ValueError(f"tries_max must be at least 1, not {tries_max!r}")

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class and all arguments of its constructor."""
        return self._classpath(), {
            "url": self.url,
            "method": self.method,
            "headers": dict(self.headers),
            "expected_status": self.expected_status,
            "poll_interval_s": self.poll_interval_s,
            "timeout_s": self.timeout_s,
            "tries_max": self.tries_max,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Send requests until one has the expected status, then yield one event."""
        payload = await self._poll()
        yield TriggerEvent(payload)

    async def _poll(self) -> dict[str, Any]:
        # Reading the certificates takes a good part of a second; it is done once for all triggers, in a thread.
        certificates = await trio.to_thread.run_sync(_certificates)
        failed_tries = 0
        redirects = not 300 <= self.expected_status < 400
        async with httpx2.AsyncClient(verify=certificates, timeout=None, follow_redirects=redirects) as client:
            while True:
                try:
                    payload = await self._try(client)
                except _TryFailed as failure:
                    failed_tries += 1
                    if failed_tries >= self.tries_max:
                        problem = f"{failed_tries} tries failed one after another, the last one: {failure}"
                        raise HttpTriggerError(self._shown_url, problem) from failure.__cause__
                else:
                    failed_tries = 0
                    if payload is not None:
                        return payload
                await trio.sleep(self.poll_interval_s)

    async def _try(self, client: httpx2.AsyncClient) -> dict[str, Any] | None:
        """Send one request: return the payload, or None for *not yet*."""
        try:
            # One limit for the whole try: the client's own timeouts restart with every piece received.
            with trio.fail_after(self.timeout_s):
                async with client.stream(self.method, self.url, headers=self.headers) as response:
                    if response.status_code == self.expected_status:
                        return await self._payload(response)
        except trio.TooSlowError as error:
            raise _TryFailed(f"no complete answer within {self.timeout_s:g} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _TryFailed(f"{type(error).__name__}: {error}") from error
        if response.status_code >= 400 and response.status_code != NOT_THERE_YET:
            raise _TryFailed(f"status {response.status_code}, where {self.expected_status} is expected")
        return None

    async def _payload(self, response: httpx2.Response) -> dict[str, Any]:
        body = await _body_of(response, BODY_BYTES_MAX)
        try:
            text = body.decode(response.charset_encoding or "utf-8", errors="replace")
        except LookupError:  # an unknown charset
            text = body.decode("utf-8", errors="replace")
        headers = {name: response.headers[name] for name in HEADERS_KEPT if name in response.headers}
        return {"status": response.status_code, "headers": headers, "body": text}


@dataclass
class HttpPagesTrigger(PagedTrigger):
    """Fires an event for each page of a JSON API, as a `PagedTrigger`; its cursors are URLs.

    ``rows`` names the field of the response that has the rows of the page; None: the whole response. The next page is
    that of the response's ``Link`` header with ``rel="next"``, or of the URL in the field ``next``, if it is given;
    relative URLs are resolved. A response that names none is the last page. The next page must be at the same scheme,
    host and port, because it gets the same headers.

    A try fails if there is no complete response within ``timeout_s`` seconds, if the connection fails, and if the
    response is an error status, longer than ``PAGE_BYTES_MAX`` or not of this form. Raises ValueError for invalid
    arguments.
    """

    url: str
    rows: str | None = None
    next: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        _without_secrets(self.url)
        _check_headers(self.headers)
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {self.timeout_s!r}")

    async def fetch(self, cursor: str | None) -> Page:
        """Send one request for the page at the URL ``cursor``, or the first page."""
        url = httpx2.URL(self.url if cursor is None else cursor)
        certificates = await trio.to_thread.run_sync(_certificates)
        with trio.fail_after(self.timeout_s):
            async with (
                httpx2.AsyncClient(verify=certificates, timeout=None) as client,
                client.stream("GET", url, headers=self.headers) as response,
            ):
                if not response.is_success:
                    raise HttpTriggerError(_without_secrets(str(url)), f"status {response.status_code}")
                body = await _body_of(response, PAGE_BYTES_MAX)
        try:
            return self._page_of(msgspec.json.decode(body), response)
        except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
            problem = f"not a page: {type(error).__name__}: {error}"
            raise HttpTriggerError(_without_secrets(str(url)), problem) from error

    def _page_of(self, content: Any, response: httpx2.Response) -> Page:
        rows = content if self.rows is None else content[self.rows]
        following: object = response.links.get("next", {}).get("url")
        if following is None and self.next is not None and isinstance(content, dict):
            following = content.get(self.next)
        if following is None or following == "":
            return Page(rows)
        if not isinstance(following, str):
            raise TypeError(f"the next page is {following!r:.200}, not a URL")
        following_url = response.url.join(following)
        here, there = ((url.scheme, url.host, url.port) for url in (response.url, following_url))
        if here != there:
            raise ValueError("the next page is at another scheme, host or port, which would get the headers")
        return Page(rows, next=str(following_url))


class _TryFailed(Exception):
    """One try failed; its cause, if any, is the client's error."""


async def _body_of(response: httpx2.Response, bytes_max: int) -> bytes:
    """Return the body. Raises `HttpTriggerError` if it is longer than ``bytes_max``."""
    body = bytearray()
    # A cancellation ends the client's nested generators from within; leaving the loop would abandon them.
    with trio.CancelScope() as reading:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > bytes_max:
                reading.cancel()
    if len(body) > bytes_max:
        raise HttpTriggerError(_without_secrets(str(response.url)), f"the body is longer than {bytes_max:,} bytes")
    return bytes(body)


def _check_headers(headers: dict[str, str]) -> None:
    for name, value in headers.items():
        # The value is not shown: it may be a password.
        if not name.isascii() or not value.isascii() or any(c in name + value for c in "\r\n\0"):
            raise ValueError(f"header {name!r} is not ASCII text on one line")


def _without_secrets(url: str) -> str:
    """Return the URL without secrets, for errors. Raises ValueError if it is not an HTTP URL."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError("url must start with http:// or https:// and name a host")
    port = "" if parsed.port is None else f":{parsed.port}"
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    return f"{parsed.scheme}://{host}{port}{parsed.path}"


@functools.cache
def _certificates() -> SSLContext:
    return httpx2.create_ssl_context()
