"""What every request passes before any page: the Host, the site it comes from, and the headers of every answer.

- The Host must name this machine, or be one of those that are set. Another one is a name that somebody has made to
  point here, so that a page of theirs may read ours (DNS rebinding).
- Pages for other machines are served over TLS, which ends at a proxy that is listed, unless it is set that they need
  not.
- A request that could change something must come from our own pages. That its user may do it is seen to where routes
  are answered (`headgate.web.app`).
- No answer may be framed, guessed at or kept, and no script, style or connection but our own is allowed.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headgate.supervisor.metrics.address import is_loopback
from headgate.web.senders import BadSender, Front

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
LOGIN = "/login"
NEXT_CHARS_MAX = 500  # as `headgate.web.views.QUERY_CHARS_MAX`: from a longer place one comes to the login all the same


_HELD = "\uffff"  # in place of a slash in a name, while a route is looked for: it is no character, so in no name
BROWSER = "-browser"  # ends the name of the cookie by which a browser is known that has logged in before


def cookie_name(port: int, *, is_https: bool = False) -> str:
    """Return the name of the cookie: browsers send those of one port to all ports of a machine.

    Over TLS it has the prefix with which browsers take it from this very host and over TLS alone.
    """
    return f"__Host-headgate-{port}" if is_https else f"headgate-{port}"


class Guard:
    """Passes requests on to an application, if they may be."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._is_host(headers.get("host")):
            text = "the Host of the request is not this machine, and none of web_hosts\n"
            return PlainTextResponse(text, status_code=421)
        try:
            sender = self._front.sender(scope)
        except BadSender as error:
            return PlainTextResponse(f"{error}\n", status_code=400)
        scope["headgate.sender"] = sender
        if not self._front.takes(scope, sender):
            text = "these pages are served over TLS, by a proxy of web_trusted_proxies\n"
            return PlainTextResponse(text, status_code=403)
        if scope["method"] not in ("GET", "HEAD") and not _is_from_here(headers):
            return PlainTextResponse("the request does not come from a page of this server\n", status_code=403)
        return None

    def _is_host(self, host: str | None) -> bool:
        if host is None:
            return False
        bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return is_loopback(bare) or bare.lower() in self._front.hosts


# --- paths ---------------------------------------------------------------------------------------
#
# The name of a run may have slashes, also ``/tasks/``, and our own links quote them. A server unquotes the path for
# routing, which makes them slashes as any other; what was sent is beside it. If a proxy has unquoted it, a path is
# taken as it is.


def parts_of(scope: Scope) -> list[str]:
    """Return the parts of the path of a request, unquoted."""
    raw, path = scope.get("raw_path") or b"", str(scope["path"])
    if b"%2f" in raw.lower():
        sent = raw.decode("ascii", "replace")
        if unquote(sent) == path:
            return [unquote(part) for part in sent.split("/")]
    return path.split("/")


def path_of(request: Request) -> str:
    """Return the path of a request, quoted: that of its URL would be unquoted twice."""
    return "/".join(quote(part, safe="@:+=~.") for part in parts_of(request.scope))


class Endpoint(Route):
    """A route in whose parts a quoted slash is one of the name, and not one between two parts."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether it takes a request, and with which parts of its path."""
        if scope["type"] != "http":
            return super().matches(scope)
        path = "/".join(part.replace("/", _HELD) for part in parts_of(scope))
        match, found = super().matches({**scope, "path": path})
        params: dict[str, Any] = found.get("path_params", {})
        for name, value in params.items():
            params[name] = value.replace(_HELD, "/")
        return match, found


def is_of_program(request: Request) -> bool:
    """Whether a program asks for JSON: a browser may ask for a page whose name ends like that."""
    return request.url.path.endswith(".json") and "text/html" not in request.headers.get("accept", "")


def to_login(request: Request) -> Response:
    """Send somebody who has not logged in to do so."""
    if is_of_program(request):
        return JSONResponse({"error": "log in first"}, status_code=401)
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"HX-Redirect": LOGIN})
    query = request.url.query
    wanted = path_of(request) + (f"?{query}" if query else "")
    comes_back = request.method == "GET" and len(wanted) <= NEXT_CHARS_MAX
    return RedirectResponse(f"{LOGIN}?next={quote(wanted, safe='')}" if comes_back else LOGIN, 303)


def session_of(headers: Headers, cookie: str) -> str:
    """Return the token of the session that a request names; "" if it names none."""
    # Not http.cookies, which stops at the first cookie of another program that is not as it should be.
    return cookie_parser(headers.get("cookie", "")).get(cookie, "")


def _is_from_here(headers: Headers) -> bool:
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site == "same-origin"
    return origin is not None and origin.partition("://")[2] == headers.get("host")
