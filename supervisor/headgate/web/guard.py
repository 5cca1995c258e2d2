"""What every request passes before any page: the Host, the site it comes from, and the headers of every answer.

- The Host must name this machine. Another one is a name that somebody has made to point here, so that a page of theirs
  may read ours (DNS rebinding).
- A request that could change something must come from our own pages. That its user may do it is seen to where routes
  are answered (`headgate.web.app`).
- No answer may be framed, guessed at or kept, and no script, style or connection but our own is allowed.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headgate.supervisor.metrics.address import is_loopback

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


def cookie_name(port: int) -> str:
    """Return the name of the cookie: browsers send those of one port to all ports of a machine."""
    return f"headgate-{port}"


class Guard:
    """Passes requests on to an application, if they may be."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
        if not _is_this_machine(headers.get("host")):
            return PlainTextResponse("the Host of the request is not this machine\n", status_code=421)
        if scope["method"] not in ("GET", "HEAD") and not _is_from_here(headers):
            return PlainTextResponse("the request does not come from a page of this server\n", status_code=403)
        return None


def path_of(request: Request) -> str:
    """Return the path of a request, quoted: that of its URL would be unquoted twice."""
    return quote(request.scope["path"], safe="/@:+=~.")


def to_login(request: Request) -> Response:
    """Send somebody who has not logged in to do so."""
    if request.url.path.endswith(".json"):
        return JSONResponse({"error": "log in first"}, status_code=401)
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"HX-Redirect": LOGIN})
    query = request.url.query
    wanted = path_of(request) + (f"?{query}" if query else "")
    comes_back = request.method == "GET" and len(wanted) <= NEXT_CHARS_MAX
    return RedirectResponse(f"{LOGIN}?next={quote(wanted, safe='')}" if comes_back else LOGIN, 303)


def session_of(headers: Headers, cookie: str) -> str:
    """Return the token of the session that a request names; "" if it names none."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(cookie)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _is_from_here(headers: Headers) -> bool:
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site == "same-origin"
    return origin is not None and origin.partition("://")[2] == headers.get("host")


def _is_this_machine(host: str | None) -> bool:
    if host is None:
        return False
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(bare)
