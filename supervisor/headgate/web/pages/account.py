"""Logging in with a link that was printed, and out."""

from __future__ import annotations

from urllib.parse import quote

from starlette.responses import RedirectResponse, Response

from headgate.web.guard import cookie_name, session_of
from headgate.web.sessions import LINK_S_MAX, SESSION_S_MAX
from headgate.web.views import Answer, Page, View


def login(view: View) -> Answer:
    """Begin a session with the token of a link; without one, say where the link is to be found."""
    token = view.text("token")
    if token is None:
        return _login_page(view, said=view.text("said"))
    session = view.site.sessions.log_in(token)
    if session is None:
        return _login_page(view, said="used", status=403)
    answer = RedirectResponse(_place(view.text("next")), status_code=303)
    answer.set_cookie(
        cookie_name(view.site.port), session, max_age=int(SESSION_S_MAX), httponly=True, samesite="lax", path="/"
    )
    return answer


def print_link(view: View) -> Answer:
    """Print another link where the first one was printed. Who can read it there may see the pages."""
    token = view.site.sessions.asked_link()
    if token is not None:
        view.site.print_link(token)
    return RedirectResponse(f"/login?said={'printed' if token else 'wait'}", status_code=303)


def logout(view: View) -> Answer:
    """End the session of this browser."""
    view.site.sessions.end(session_of(view.request.headers, cookie_name(view.site.port)))
    answer: Response = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(cookie_name(view.site.port), path="/")
    return answer


def _login_page(view: View, *, said: str | None, status: int = 200) -> Page:
    values = {"said": said, "seconds": int(LINK_S_MAX), "next": view.text("next")}
    return Page("login.html", "Log in", values, status=status, lives=False)


def _place(wanted: str | None) -> str:
    """Return where to go after the login: a path of ours, and nothing else."""
    if wanted is None or not wanted.startswith("/") or wanted.startswith(("//", "/\\")):
        return "/"
    return quote(wanted, safe="/?&=%:+@~.,-_")
