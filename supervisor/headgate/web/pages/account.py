"""Logging in, with a link that was printed or with a password, and out."""

from __future__ import annotations

from urllib.parse import quote

from starlette.responses import RedirectResponse, Response

from headgate.store.access.users import SESSION_S_MAX
from headgate.web.guard import cookie_name, session_of
from headgate.web.sessions import LINK_S_MAX
from headgate.web.views import Answer, Page, View


def login(view: View) -> Answer:
    """Begin a session with the token of a link; without one, say where the link is to be found."""
    token = view.text("token")
    if token is None:
        return _login_page(view, said=view.text("said"))
    if not view.site.links.use(token):
        return _login_page(view, said="used", status=403)
    return _logged_in(view, view.site.sessions.begin_local(address_of(view)), view.text("next"))


def log_in(view: View) -> Answer:
    """Begin a session of a user, if this is the password."""
    session = view.site.sessions.log_in(view.field("name") or "", view.field("password") or "", address_of(view))
    if session is None:
        return _login_page(view, said="wrong", status=403)
    return _logged_in(view, session, view.field("next"))


def address_of(view: View) -> str:
    """Return the address from which a browser came."""
    client = view.request.client
    return "" if client is None else client.host


def _logged_in(view: View, session: str, wanted: str | None) -> Answer:
    answer = RedirectResponse(_place(wanted), status_code=303)
    answer.set_cookie(
        cookie_name(view.site.port), session, max_age=int(SESSION_S_MAX), httponly=True, samesite="lax", path="/"
    )
    return answer


def print_link(view: View) -> Answer:
    """Print another link where the first one was printed. Who can read it there may see the pages."""
    token = view.site.links.asked()
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
    values = {
        "said": said,
        "seconds": int(LINK_S_MAX),
        "next": view.text("next") or view.field("next"),
        "has_passwords": view.site.writer is not None,
    }
    return Page("login.html", "Log in", values, status=status, lives=False)


def _place(wanted: str | None) -> str:
    """Return where to go after the login: a path of ours, and nothing else."""
    if wanted is None or not wanted.startswith("/") or wanted.startswith(("//", "/\\")):
        return "/"
    return quote(wanted, safe="/?&=%:+@~.,-_")
