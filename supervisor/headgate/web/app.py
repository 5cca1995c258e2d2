"""The application: the table of routes, made to answer requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlencode

import jinja2
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route as Endpoint

from headgate.presentation.values import json_line, readable
from headgate.store.errors import NoSuchInstance, NoSuchRow, NoSuchWatcher, StoreError
from headgate.web import rendering
from headgate.web.guard import Guard, cookie_name
from headgate.web.routes import ROUTES, Route
from headgate.web.views import ROWS_PER_PAGE, Answer, BadRequest, Listing, Page, Site, View

log = structlog.get_logger(__name__)

NOT_FOUND = (NoSuchRow, NoSuchInstance, NoSuchWatcher)
STATIC_CACHE = "public, max-age=31536000, immutable"  # its URL has its hash


def make_app(site: Site, routes: tuple[Route, ...] = ROUTES) -> Starlette:
    """Return the application that serves these routes."""
    pages = _Pages(site, routes)
    endpoints = [Endpoint("/static/{name:path}", pages.static, methods=["GET"])]
    for route in routes:
        if route.is_list:
            endpoints.append(Endpoint(f"{route.path}.json", pages.endpoint(route, as_json=True), methods=["GET"]))
        endpoints.append(Endpoint(route.path, pages.endpoint(route), methods=[route.method]))
    return Starlette(
        routes=endpoints,
        middleware=[Middleware(Guard, sessions=site.sessions, cookie=cookie_name(site.port))],
        exception_handlers={HTTPException: pages.http_error},
    )


class _Pages:
    """Makes answers of what the functions of pages return."""

    def __init__(self, site: Site, routes: tuple[Route, ...]) -> None:
        self._site = site
        self._static = rendering.read_static()
        menu: dict[str, list[tuple[str, str]]] = {}
        for route in routes:
            if route.nav:
                menu.setdefault(route.nav, []).append((route.path, route.title))
        self._templates = rendering.environment(
            self._static, menu=menu, database=site.database, rows_per_page=ROWS_PER_PAGE
        )

    def endpoint(self, route: Route, *, as_json: bool = False) -> Callable[[Request], Response]:
        """Return the function of a route, which is called in a thread."""

        def answer(request: Request) -> Response:
            request.scope["headgate.is_json"] = as_json
            try:
                with self._site.stores.one() if route.reads else nullcontext() as store:
                    view = View(request, self._site, None if store is None else store.inspect)
                    return self._response(view, route.handler(view), route)
            except BadRequest as error:
                return self._error(request, 400, "This is not what was expected", str(error))
            except NOT_FOUND as error:
                return self._error(request, 404, "There is no such thing", str(error))
            except StoreError as error:
                log.warning("a page could not be made", path=request.url.path, error=str(error))
                return self._error(request, 503, "The database does not answer as it should", str(error))
            except Exception as error:  # here, so that also this answer has the headers of `headgate.web.guard`
                return self._fault(request, error)

        return answer

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
        return self._error(request, error.status_code, "This cannot be done", str(error.detail))

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
        return self._html(request, answer.template, answer.title, values, status=answer.status, lives=answer.lives)

    def _list_values(self, view: View, listing: Listing, route: Route) -> dict[str, Any]:
        asked = dict(view.request.query_params)
        here = view.request.url.path
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
        rows = [rendering.masked(readable(row)) for row in listing.rows]
        told = {"as_of": view.now.isoformat(), "rows": rows, "next_beyond": listing.next_beyond}
        return Response(json_line(told), media_type="application/json")

    def _html(
        self, request: Request, template: str, title: str, values: dict[str, Any], *, status: int = 200, lives: bool
    ) -> Response:
        is_fragment = request.headers.get("hx-request") == "true"
        url = _with_query(request.url.path, dict(request.query_params))
        values = values | {
            "title": title,
            "layout": "fragment.html" if is_fragment else "base.html",
            "here": request.url.path,
            "asked": request.query_params.get("q"),
            "url": url,
            "lives": lives,
        }
        values.setdefault("as_of", None)
        try:
            body = self._templates.get_template(template).render(values)
        except jinja2.TemplateError as error:
            return self._fault(request, error)
        return HTMLResponse(body, status_code=status)

    def _fault(self, request: Request, error: Exception) -> Response:
        """Answer a request whose page has a mistake, which the log tells."""
        log.error("a page failed", path=request.url.path, exc_info=error)
        return self._error(request, 500, "This page has a mistake", "The log of this process has its traceback.")

    def _error(self, request: Request, status: int, title: str, text: str) -> Response:
        text = rendering.mask_passwords(text)
        if request.scope.get("headgate.is_json") or request.url.path.endswith(".json"):
            return JSONResponse({"error": text}, status_code=status)
        return self._html(request, "error.html", title, {"text": text}, status=status, lives=False)


def _with_query(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path
