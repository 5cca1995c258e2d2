"""One request, as the functions of pages see it, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.presentation.moments import begin_of
from headgate.store.inspect.inspection import Inspection
from headgate.store.inspect.why_facts import Liveness
from headgate.store.signal_verbs import SignalVerbs
from headgate.web.cells import Column
from headgate.web.sessions import Sessions
from headgate.web.stores import Stores

ROWS_PER_PAGE = 50
QUERY_CHARS_MAX = 500  # of one value in a query


class BadRequest(Exception):
    """A part of the query is not what it has to be; the text says what was expected."""


class Site(msgspec.Struct, frozen=True):
    """What all requests share. ``database`` is its URL without password."""

    stores: Stores
    liveness: Liveness
    sessions: Sessions
    database: str
    log_folder: Path
    port: int
    print_link: Callable[[str], None] = lambda token: None


class Filter(msgspec.Struct, frozen=True):
    """One field of the form above a list. With ``options`` it is a choice, (value, text); otherwise a text."""

    name: str
    label: str
    value: str = ""
    options: tuple[tuple[str, str], ...] = ()
    placeholder: str = ""


class Page(msgspec.Struct, frozen=True):
    """A page: its template, its title, and the values for the template."""

    template: str
    title: str
    values: dict[str, Any] = {}
    status: int = 200
    lives: bool = True  # whether it is asked for again every few seconds


class Listing(msgspec.Struct, frozen=True):
    """A list: one page of its rows. As JSON all fields of the rows are shown.

    The next page begins beyond the row that has ``next_beyond``, an id or a name; None: this is the last one. ``intro``
    says what the list answers; ``empty`` what it means that there is nothing.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[msgspec.Struct]
    empty: str
    intro: str = ""
    filters: Sequence[Filter] = ()
    next_beyond: int | str | None = None
    next_text: str = f"Next {ROWS_PER_PAGE}"
    template: str = "list.html"
    values: dict[str, Any] = {}


class View:
    """One request: what it asks for, and where the answer is to be found."""

    def __init__(self, request: Request, site: Site, inspect: Inspection | None) -> None:
        self.request = request
        self.site = site
        self._inspect = inspect

    @property
    def inspect(self) -> Inspection:
        """The queries. A route that needs none is given none."""
        assert self._inspect is not None, "the route says that it needs no store"
        return self._inspect

    @property
    def signals(self) -> SignalVerbs:
        """The queries about signals."""
        return SignalVerbs(self.inspect.database)

    @cached_property
    def now(self) -> datetime:
        """The time by the database's clock."""
        return self.inspect.now()

    def part(self, name: str) -> str:
        """Return a part of the path, by the name that the route gives it."""
        return str(self.request.path_params[name])

    def text(self, name: str) -> str | None:
        """Return a value of the query; None if it is not there, or empty. Raises `BadRequest`."""
        value = self.request.query_params.get(name, "").strip()
        if len(value) > QUERY_CHARS_MAX or "\x00" in value:
            raise BadRequest(f"{name} has more than {QUERY_CHARS_MAX} characters, or one that no name has")
        return value or None

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """Return a value of the query that must be one of these. Raises `BadRequest`."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise BadRequest(f"{name} must be one of {', '.join(choices)}")
        return value

    def number(self, name: str) -> int | None:
        """Return a number of the query. Raises `BadRequest`."""
        return _number(name, self.text(name))

    def part_number(self, name: str) -> int:
        """Return a part of the path that is a number. Raises `BadRequest`."""
        found = _number(name, self.part(name))
        assert found is not None, "a part of a path is not empty"
        return found

    def since(self, name: str = "since") -> datetime | None:
        """Return the moment that a value of the query means: a moment, or a span before now. Raises `BadRequest`."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return begin_of(text, lambda: self.now)
        except ValueError as error:
            raise BadRequest(f"{name}: {error}") from None


Answer = Page | Listing | Response
Handler = Callable[[View], Answer]


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise BadRequest(f"{name} must be a number, not {text!r}")
    return int(text)


def cut(rows: Sequence[Any], by: str = "id") -> tuple[Sequence[Any], Any]:
    """Return the rows of one page, and the id after which the next begins, of rows read with one more than those.

    ``by``: the field that the rows are in the order of.
    """
    shown = rows[:ROWS_PER_PAGE]
    return shown, getattr(shown[-1], by) if len(rows) > ROWS_PER_PAGE else None
