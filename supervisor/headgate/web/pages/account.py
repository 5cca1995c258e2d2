"""Logging in, with a link that was printed or with a password, and out; and one's own account."""

from __future__ import annotations

from urllib.parse import quote

from starlette.responses import RedirectResponse, Response

from headgate.store.access.users import BROWSER_KNOWN_S, PASSWORD_CHARS_MIN, SESSION_S_MAX
from headgate.web.cells import Column, path
from headgate.web.guard import BROWSER, cookie_name, session_of
from headgate.web.pages.acting import done
from headgate.web.senders import sender_of
from headgate.web.sessions import LINK_S_MAX
from headgate.web.views import Answer, BadRequest, Page, View


def login(view: View) -> Answer:
    """Begin a session with the token of a link; without one, say where the link is to be found."""
    token = view.text("token")
    if token is None:
        return _login_page(view, said=view.text("said"))
    if not (view.site.front.has_links and view.site.links.use(token)):
        return _login_page(view, said="used", status=403)
    answer = RedirectResponse(_place(view.text("next")), status_code=303)
    _set_cookie(view, answer, _cookie(view), view.site.sessions.begin_local(view.address), SESSION_S_MAX)
    return answer


def log_in(view: View) -> Answer:
    """Begin a session of a user, if this is the password."""
    name, password = view.field("name") or "", view.exact("password")
    found = view.site.sessions.log_in(name, password, view.address, _browser_of(view))
    if found is None:
        return _login_page(view, said="wrong", status=403)
    answer = RedirectResponse(_place(view.field("next")), status_code=303)
    _set_cookie(view, answer, _cookie(view), found.session, SESSION_S_MAX)
    _set_cookie(view, answer, _cookie(view) + BROWSER, found.browser, BROWSER_KNOWN_S)
    return answer


def _cookie(view: View) -> str:
    """Return the name of the cookie of this site's sessions."""
    return cookie_name(view.site.port, is_https=sender_of(view.request.scope).is_https)


def _session_of(view: View) -> str:
    return session_of(view.request.headers, _cookie(view))


def _browser_of(view: View) -> str:
    """Return the token by which this browser is known; "" if nobody has logged in with it."""
    return session_of(view.request.headers, _cookie(view) + BROWSER)


def _set_cookie(view: View, answer: Response, name: str, value: str, seconds: float) -> None:
    is_https = sender_of(view.request.scope).is_https
    answer.set_cookie(name, value, max_age=int(seconds), httponly=True, samesite="lax", path="/", secure=is_https)


def print_link(view: View) -> Answer:
    """Print another link where the first one was printed. Who can read it there may see the pages."""
    token = view.site.links.asked() if view.site.front.has_links else None
    if token is not None:
        view.site.print_link(token)
    return RedirectResponse(f"/login?said={'printed' if token else 'wait'}", status_code=303)


def logout(view: View) -> Answer:
    """End the session of this browser."""
    view.site.sessions.end(_session_of(view))
    answer: Response = RedirectResponse("/login", status_code=303)
    _set_cookie(view, answer, _cookie(view), "", 0)
    return answer


# --- one's own account ---------------------------------------------------------------------------


def account(view: View) -> Answer:
    """Show who one is, and the browsers that are logged in."""
    user, session = view.user, _session_of(view)
    how = "by a link" if user.is_local else "by the proxy" if user.is_named else "by a password"
    is_writing = view.site.writer is not None
    sessions = view.access.own_sessions(session) if is_writing and not user.is_named else []
    values = {
        "facts": (("user", user.name), ("role", user.role), ("logged in", how)),
        "said": view.text("said"),
        "has_password": is_writing and not (user.is_local or user.is_named),
        "chars_min": PASSWORD_CHARS_MIN,
        "sessions": sessions,
        "columns": SESSION_COLUMNS,
    }
    return Page("account.html", "Account", values, lives=False)


def change_password(view: View) -> Answer:
    """Give oneself another password, with the present one."""
    user = view.user
    if user.is_local or user.is_named:
        raise BadRequest("nobody who has logged in by a link or by a proxy has a password here")
    new = view.exact("new")
    if new != view.exact("again"):
        raise BadRequest("the new password was not written twice in the same way")
    access, browser = view.store.access, _browser_of(view)
    is_done = access.change_password(user.name, view.exact("password"), new, view.address, browser, _session_of(view))
    return RedirectResponse(path("account", said="changed" if is_done else "wrong"), status_code=303)


def end_sessions(view: View) -> Answer:
    """End one of one's own sessions, or all but this one."""
    if view.user.is_named:  # a cookie that the browser has may be of somebody else
        raise BadRequest("nobody who is named by a proxy has sessions here")
    which = None if view.field("session") is None else view.given_number("session")
    view.store.access.end_own_sessions(view.user.name, _session_of(view), which)
    return done(view, "account")


SESSION_COLUMNS = (
    Column("used", lambda row: row.used_at),
    Column("since", lambda row: row.began_at),
    Column("from", lambda row: row.address),
    Column("which", lambda row: "this browser" if row.is_this else None),
)


def _login_page(view: View, *, said: str | None, status: int = 200) -> Page:
    values = {
        "said": said,
        "seconds": int(LINK_S_MAX),
        "next": view.text("next") or view.field("next"),
        "has_passwords": view.site.writer is not None,
        "has_links": view.site.front.has_links,
    }
    return Page("login.html", "Log in", values, status=status, lives=False)


def _place(wanted: str | None) -> str:
    """Return where to go after the login: a path of ours, and nothing else."""
    if wanted is None or not wanted.startswith("/") or wanted.startswith(("//", "/\\")):
        return "/"
    return quote(wanted, safe="/?&=%:+@~.,-_")
