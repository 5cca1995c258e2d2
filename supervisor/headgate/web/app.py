"""The application: the table of routes, made to answer requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from urllib.parse import parse_qsl, urlencode

import jinja2
import structlog
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from headgate.presentation.values import json_line, readable
from headgate.store.access.audit import Actor, Role
from headgate.store.access.users import User
from headgate.store.errors import (
    BadKey,
    DatabaseAway,
    NoSuchInstance,
    NoSuchRow,
    NoSuchWatcher,
    StoreError,
    UnusableKey,
)
from headgate.store.inspect.audit import AuditRow
from headgate.web import rendering
from headgate.web.acts import RANKS, may
from headgate.web.guard import Endpoint, Guard, cookie_name, is_of_program, path_of, session_of, to_login
from headgate.web.refusals import Refusals
from headgate.web.routes import ROUTES, Route
from headgate.web.senders import sender_of
from headgate.web.sessions import form_token, is_form_token
from headgate.web.views import ROWS_PER_PAGE, Answer, BadRequest, Listing, Page, Site, View

log = structlog.get_logger(__name__)

NOT_FOUND = (NoSuchRow, NoSuchInstance, NoSuchWatcher)
FORM_BYTES_MAX = 256 * 1024
FIELDS_MAX = 100
ACT_SHOWN_S_MAX = 60.0  # that a page says what was done on it
PAYLOADS = frozenset({"payload", "payload_head", "conf", "value", "edited_payload"})  # for operators alone
STATIC_CACHE = "public, max-age=31536000, immutable"  # its URL has its hash


def make_app(site: Site, routes: tuple[Route, ...] = ROUTES) -> Starlette:
    """Return the application that serves these routes."""
    pages = _Pages(site, routes)
    endpoints = [Endpoint("/static/{name:path}", pages.static, methods=["GET"])]
    for route in routes:
        if route.is_list:
            endpoints.append(Endpoint(f"{route.path}.json", pages.endpoint(route, as_json=True), methods=["GET"]))
        if route.action is not None and site.writer is None:
            continue  # nobody may do anything
        answer = pages.endpoint(route)
        endpoint = answer if route.method == "GET" else pages.taking_form(answer)
        endpoints.append(Endpoint(route.path, endpoint, methods=[route.method]))
    app = Starlette(
        routes=endpoints,
        middleware=[Middleware(Guard, front=site.front)],
        exception_handlers={HTTPException: pages.http_error},
        lifespan=pages.serving,
    )
    app.router.redirect_slashes = False  # it would send browsers to the scheme that a proxy speaks with us
    return app


class _Pages:
    """Makes answers of what the functions of pages return."""

    def __init__(self, site: Site, routes: tuple[Route, ...]) -> None:
        self._site = site
        self._refusals = None if site.writer is None else Refusals(site.writer)
        self._static = rendering.read_static()
        self._menus = {role: _menu(routes, role) for role in RANKS}
        self._templates = rendering.environment(self._static, database=site.database, rows_per_page=ROWS_PER_PAGE)

    @asynccontextmanager
    async def serving(self, _: Starlette) -> AsyncGenerator[None]:
        """Write the refusals that wait, as long as pages are served, and those that are left at the end."""
        if self._refusals is None:
            yield
            return
        writing = asyncio.create_task(self._refusals.write_on())
        try:
            yield
        finally:
            writing.cancel()
            await run_in_threadpool(self._refusals.write_waiting, is_end=True)

    def endpoint(self, route: Route, *, as_json: bool = False) -> Callable[..., Response]:
        """Return the function of a route, which is called in a thread."""

        def answer(request: Request, form: Mapping[str, str] | None = None) -> Response:
            request.scope["headgate.is_json"] = as_json
            try:
                session, user = self._who(request, route)
                refusal = self._refusal(request, route, user, session, form)
                if refusal is not None:
                    return refusal
                if route.action is not None:
                    return self._act(request, route, user, form)
                with self._site.stores.one() if route.reads else nullcontext() as store:
                    view = View(request, self._site, None if store is None else store.inspect, user=user, form=form)
                    return self._response(view, route.handler(view), route)
            except BadRequest as error:
                return self._error(request, 400, "This is not what was expected", str(error))
            except NOT_FOUND as error:
                return self._error(request, 404, "There is no such thing", str(error))
            except DatabaseAway as error:
                return self._away(request, error)
            except StoreError as error:
                if route.action is not None:  # the verb says why it refuses
                    needs_key = isinstance(error, BadKey | UnusableKey)
                    hint = f"; pages have no encryption key: use `headgate {route.action}`" if needs_key else ""
                    return self._error(request, 409, "This cannot be done", f"{error}{hint}")
                return self._away(request, error)
            except Exception as error:  # here, so that also this answer has the headers of `headgate.web.guard`
                return self._fault(request, error)

        return answer

    @staticmethod
    def taking_form(answer: Callable[..., Response]) -> Callable[[Request], Awaitable[Response]]:
        """Return the function of a route that is sent a form."""

        async def take(request: Request) -> Response:
            body = bytearray()
            try:
                async for part in request.stream():
                    body += part
                    if len(body) > FORM_BYTES_MAX:
                        text = f"the form has more than {FORM_BYTES_MAX:,} bytes\n"
                        return PlainTextResponse(text, status_code=413)
            except ClientDisconnect:  # nobody reads the answer
                return PlainTextResponse("the form did not come whole\n", status_code=400)
            try:
                pairs = parse_qsl(
                    body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX
                )
            except ValueError:
                return PlainTextResponse("this is no form of these pages\n", status_code=400)
            return await run_in_threadpool(answer, request, dict(pairs))

        return take

    def _who(self, request: Request, route: Route) -> tuple[str, User | None]:
        """Return what tells this session from others, and its user; None if nobody is known."""
        sender = sender_of(request.scope)
        if sender.user:  # whom a proxy names, whatever cookies the browser has
            user = None if route.role == "nobody" else self._site.sessions.named(sender.user)
            return f"{self._site.front.secret} {sender.user}", user
        session = session_of(request.headers, cookie_name(self._site.port, is_https=sender.is_https))
        return session, None if route.role == "nobody" else self._site.sessions.find(session)

    def _refusal(
        self, request: Request, route: Route, user: User | None, session: str, form: Mapping[str, str] | None
    ) -> Response | None:
        """Return the answer to a request that its user may not make; None if it may be made."""
        if route.role == "nobody":
            return None
        sender = sender_of(request.scope)
        if user is None and sender.user:
            text = f"The proxy names {sender.user}, who is no user of these pages: `headgate users add` makes one."
            return self._error(request, 403, "You may not see this", text)
        if user is None:
            return to_login(request)
        request.scope["headgate.user"] = user
        request.scope["headgate.form_token"] = form_token(session)
        if not may(user.role, route.role):
            if route.action is not None and self._refusals is not None:
                self._refusals.note(Actor(user.name, user.role, "web", sender.address), route.action, route.path)
            text = f"This is for the role {route.role}; {user.name} has the role {user.role}."
            return self._error(request, 403, "You may not do this", text)
        if route.method == "POST" and not is_form_token(session, (form or {}).get("token", "")):
            return self._error(
                request, 403, "This form is of another session", "Load the page again, and send its form."
            )
        return None

    def _act(self, request: Request, route: Route, user: User | None, form: Mapping[str, str] | None) -> Response:
        """Do what a form asks for, in a store that is opened for it."""
        assert user is not None
        assert self._site.writer is not None, "there is no such route without it"
        actor = Actor(user.name, user.role, "web", sender_of(request.scope).address)
        with self._site.writer.store(actor) as store:
            view = View(request, self._site, store.inspect, user=user, form=form, store=store)
            return self._response(view, route.handler(view), route)

    def static(self, request: Request) -> Response:
        """Return a file that pages use."""
        found = self._static.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("there is no such file\n", status_code=404)
        is_this = request.query_params.get("v") == found.version
        headers = {"Content-Type": found.content_type, "Cache-Control": STATIC_CACHE if is_this else "no-cache"}
        return Response(found.data, headers=headers)

    def http_error(self, request: Request, error: Exception) -> Response:
        """Answer a request that no route takes."""
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return self._error(request, 404, "There is no such page", f"Nothing is at {request.url.path}.")
        answer = self._error(request, error.status_code, "This cannot be done", str(error.detail))
        answer.headers.update(error.headers or {})  # which methods there are
        return answer

    # --- answers ---

    def _response(self, view: View, answer: Answer, route: Route) -> Response:
        if isinstance(answer, Response):
            return answer
        request = view.request
        if isinstance(answer, Listing):
            if request.scope["headgate.is_json"]:
                return self._json(view, answer)
            answer = Page(answer.template, answer.title, self._list_values(view, answer, route))
        values = answer.values | {"as_of": view.now if route.reads else None}
        shows_act = route.reads and route.method == "GET" and view.may("operator")  # it is a row of the audit
        if shows_act and (act_id := view.number("act")) is not None:
            values["did"] = _just_done(view, act_id)
        return self._html(request, answer.template, answer.title, values, status=answer.status, lives=answer.lives)

    def _list_values(self, view: View, listing: Listing, route: Route) -> dict[str, Any]:
        asked = _asked(view.request)
        here = path_of(view.request)
        first = {name: value for name, value in asked.items() if name != "beyond" and value}
        more = None if listing.next_beyond is None else first | {"beyond": str(listing.next_beyond)}
        return listing.values | {
            "listing": listing,
            "first_url": _with_query(here, first) if "beyond" in asked else None,
            "next_url": None if more is None else _with_query(here, more),
            "json_url": _with_query(f"{here}.json", asked) if route.is_list else None,
            "is_filtered": any(one.value for one in listing.filters),
        }

    def _json(self, view: View, listing: Listing) -> Response:
        hidden = frozenset() if view.may("operator") else PAYLOADS
        rows = [rendering.masked(_without(readable(row), hidden)) for row in listing.rows]
        told = {"as_of": view.now.isoformat(), "rows": rows, "next_beyond": listing.next_beyond}
        return Response(json_line(told), media_type="application/json")

    def _html(
        self, request: Request, template: str, title: str, values: dict[str, Any], *, status: int = 200, lives: bool
    ) -> Response:
        is_fragment = request.headers.get("hx-request") == "true"
        here = path_of(request)
        url = _with_query(here, _asked(request))
        user = request.scope.get("headgate.user")
        values = values | {
            "menu": self._menus["admin" if user is None else user.role],  # to a stranger each link is one to the login
            "title": title,
            "layout": "fragment.html" if is_fragment else "base.html",
            "here": here,
            "asked": request.query_params.get("q"),
            "url": url,
            "lives": lives,
            "user": user,
            "form_token": request.scope.get("headgate.form_token", ""),
        }
        for name in ("as_of", "did", "acts"):
            values.setdefault(name, None)
        try:
            body = self._templates.get_template(template).render(values)
        except jinja2.TemplateError as error:
            return self._fault(request, error)
        return HTMLResponse(body, status_code=status)

    def _away(self, request: Request, error: StoreError) -> Response:
        """Answer a request that the database did not; a stranger is not told which database it is."""
        log.warning("a page could not be made", path=request.url.path, error=str(error))
        text = str(error) if "headgate.user" in request.scope else "The log of this process says why."
        return self._error(request, 503, "The database does not answer as it should", text)

    def _fault(self, request: Request, error: Exception) -> Response:
        """Answer a request whose page has a mistake, which the log tells."""
        log.error("a page failed", path=request.url.path, exc_info=error)
        if request.scope.get("headgate.has_failed"):  # that of the error, too
            return PlainTextResponse("this page has a mistake\n", status_code=500)
        request.scope["headgate.has_failed"] = True
        return self._error(request, 500, "This page has a mistake", "The log of this process has its traceback.")

    def _error(self, request: Request, status: int, title: str, text: str) -> Response:
        text = rendering.mask_passwords(text)
        if request.scope.get("headgate.is_json", is_of_program(request)):
            return JSONResponse({"error": text}, status_code=status)
        return self._html(request, "error.html", title, {"text": text}, status=status, lives=False)


def _menu(routes: Sequence[Route], role: Role) -> dict[str, list[tuple[str, str]]]:
    """Return the links of the menu that a role may follow, with their words, by their headings."""
    menu: dict[str, list[tuple[str, str]]] = {}
    for route in routes:
        if route.nav and may(role, route.role):
            menu.setdefault(route.nav, []).append((route.path, route.title))
    return menu


def _just_done(view: View, act_id: int) -> AuditRow | None:
    """Return what this user has just done; None if that is some time ago, as when the page is loaded once more."""
    done = view.inspect.act(act_id)
    is_new = done is not None and (view.now - done.at).total_seconds() <= ACT_SHOWN_S_MAX
    return done if done is not None and is_new and done.actor == view.user.name else None


def _asked(request: Request) -> dict[str, str]:
    """Return what a page was asked for, which other links repeat; an act is told once."""
    return {name: value for name, value in request.query_params.items() if name != "act"}


def _without(row: Any, names: Collection[str]) -> Any:
    return {name: value for name, value in row.items() if name not in names} if isinstance(row, dict) else row


def _with_query(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path
