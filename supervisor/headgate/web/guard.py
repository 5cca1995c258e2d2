"""What every request passes before any page: the Host, the login, and the headers of every answer.

- The Host must name this machine. Another one is a name that somebody has made to point here, so that a page of theirs
  may read ours (DNS rebinding).
- A route that is not open needs a session. A request that could change something must come from our own pages.
- No answer may be framed, guessed at or kept, and no script, style or connection but our own is allowed.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headgate.supervisor.metrics.address import is_loopback
from headgate.web.sessions import Sessions

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
OPEN_PREFIXES = ("/static/",)  # and `LOGIN` with what is below it


def cookie_name(port: int) -> str:
    """Return the name of the cookie: browsers send those of one port to all ports of a machine."""
    return f"headgate-{port}"


def is_open(path: str) -> bool:
    """Whether a path can be seen without a session."""
    return path == LOGIN or path.startswith((f"{LOGIN}/", *OPEN_PREFIXES))


class Guard:
    """Passes requests on to an application, if they may be."""

    def __init__(self, app: ASGIApp, *, sessions: Sessions, cookie: str) -> None:
        self._app = app
        self._sessions = sessions
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
        headers, path = Headers(scope=scope), scope["path"]
        if not _is_this_machine(headers.get("host")):
            return PlainTextResponse("the Host of the request is not this machine\n", status_code=421)
        if scope["method"] not in ("GET", "HEAD") and not _is_from_here(headers):
            return PlainTextResponse("the request does not come from a page of this server\n", status_code=403)
        if is_open(path) or self._sessions.is_open(session_of(headers, self._cookie)):
            return None
        if path.endswith(".json"):
            return JSONResponse({"error": "log in first"}, status_code=401)
        if headers.get("hx-request") == "true":
            return Response(status_code=401, headers={"HX-Redirect": LOGIN})
        query = scope["query_string"].decode("latin-1")
        wanted = path + (f"?{query}" if query else "")
        return RedirectResponse(f"{LOGIN}?next={quote(wanted, safe='')}", status_code=303)


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
