"""One request, as the functions of pages see it, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.presentation.moments import begin_of
from headgate.store.access.audit import Action, Role
from headgate.store.access.users import AccessVerbs, User
from headgate.store.inspect.inspection import Inspection
from headgate.store.inspect.why_facts import Liveness
from headgate.store.signal_verbs import SignalVerbs
from headgate.store.store import Store
from headgate.web.acts import ACTS, Act, Field, may
from headgate.web.cells import Column
from headgate.web.senders import Front, sender_of
from headgate.web.sessions import Links, Sessions
from headgate.web.stores import Stores
from headgate.web.writing import Writer

ROWS_PER_PAGE = 50
QUERY_CHARS_MAX = 500  # of one value in a query


class BadRequest(Exception):
    """A part of the query is not what it has to be; the text says what was expected."""


class Site(msgspec.Struct, frozen=True):
    """What all requests share. ``database`` is its URL without password. Without a ``writer`` nobody does anything.

    ``front``: what stands before it.
    """

    stores: Stores
    liveness: Liveness
    sessions: Sessions
    database: str
    log_folder: Path
    port: int
    links: Links = msgspec.field(default_factory=Links)
    writer: Writer | None = None
    print_link: Callable[[str], None] = lambda token: None
    front: Front = msgspec.field(default_factory=Front)


Filter = Field  # one field of the form above a list


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

    def __init__(
        self,
        request: Request,
        site: Site,
        inspect: Inspection | None,
        *,
        user: User | None = None,
        form: Mapping[str, str] | None = None,
        store: Store | None = None,
    ) -> None:
        self.request = request
        self.site = site
        self._inspect = inspect
        self._user = user
        self._form = form or {}
        self._store = store

    @property
    def inspect(self) -> Inspection:
        """The queries. A route that needs none is given none."""
        assert self._inspect is not None, "the route says that it needs no store"
        return self._inspect

    @property
    def signals(self) -> SignalVerbs:
        """The queries about signals."""
        return SignalVerbs(self.inspect.database)

    @property
    def access(self) -> AccessVerbs:
        """The queries about users and sessions."""
        return AccessVerbs(self.inspect.database)

    @property
    def user(self) -> User:
        """Who asks. A route that is for nobody has none."""
        assert self._user is not None, "the route is for nobody"
        return self._user

    @property
    def address(self) -> str:
        """The address from which the browser came."""
        return sender_of(self.request.scope).address

    @property
    def store(self) -> Store:
        """The store in which an act of this user is done."""
        assert self._store is not None, "the route does nothing"
        return self._store

    def may(self, least: Role) -> bool:
        """Whether whoever asks has at least this role."""
        return self._user is not None and may(self._user.role, least)

    def acts(self, *wanted: Act) -> tuple[Act, ...]:
        """Return those of these acts that this user may do on this site."""
        if self.site.writer is None:
            return ()
        return tuple(act for act in wanted if self.may(ACTS[act.action]))

    # --- what a form says ------------------------------------------------------------------------

    def field(self, name: str) -> str | None:
        """Return a field of the form that was sent; None if it is not there, or empty. Raises `BadRequest`."""
        value = self._form.get(name, "").strip()
        if "\x00" in value:
            raise BadRequest(f"{name} has a character that no name has")
        return value or None

    def exact(self, name: str) -> str:
        """Return a field of the form as it was written, with the spaces around it; "" if it is not there."""
        return self._form.get(name, "")

    def given(self, name: str) -> str:
        """Return a field of the form that has to be there. Raises `BadRequest`."""
        value = self.field(name)
        if value is None:
            raise BadRequest(f"{name} is missing")
        return value

    def given_number(self, name: str) -> int:
        """Return a field that has to be a number. Raises `BadRequest`."""
        found = _number(name, self.given(name))
        assert found is not None, "it is given"
        return found

    @property
    def is_confirmed(self) -> bool:
        """Whether the form is one that `confirm` has made."""
        return self.field("confirmed") is not None

    def confirm(
        self,
        action: Action,
        title: str,
        lines: Sequence[str],
        label: str,
        *,
        more: Mapping[str, str] | None = None,
        goes_on: bool = False,
    ) -> Page:
        """Return a page that says what would be done, with the same form once more.

        ``goes_on``: it is a part of something that is under way, and the page sends the form by itself if it can.
        """
        about = {name: value for name, value in self._form.items() if name != "token"} | dict(more or {})
        values = {"lines": lines, "act": Act(action, label, about | {"confirmed": "1"}), "goes_on": goes_on}
        return Page("confirm.html", title, values, lives=False)

    @cached_property
    def now(self) -> datetime:
        """The time by the database's clock."""
        return self.inspect.now()

    def part(self, name: str) -> str:
        """Return a part of the path, by the name that the route gives it. Raises `BadRequest`."""
        value = str(self.request.path_params[name])
        if "\x00" in value:
            raise BadRequest(f"{name} has a character that no name has")
        return value

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
