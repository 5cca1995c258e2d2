"""What stands in one cell of a table, or beside the name of a fact. The template ``cells.html`` draws each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

TEXT_CHARS_MAX = 200  # of one cell; the page of the thing has all


def path(*parts: str | int, **query: str | int | None) -> str:
    """Return a path of these parts, each quoted, and a query of what is not None."""
    asked = urlencode({name: value for name, value in query.items() if value is not None and value != ""})
    return "/" + "/".join(quote(str(part), safe="@:+=~.") for part in parts) + (f"?{asked}" if asked else "")


class Link(msgspec.Struct, frozen=True):
    """A link to another page; ``href`` is from `path`."""

    href: str
    text: str
    is_code: bool = False


class State(msgspec.Struct, frozen=True):
    """A state, drawn as `headgate.web.states` says; ``text`` in place of its name."""

    name: str
    text: str | None = None
    href: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Numbers by state, drawn as small signs; each leads to ``list_href`` with that state, if there is such a list."""

    by_state: dict[str, int]
    list_href: str | None = None


class Code(msgspec.Struct, frozen=True):
    """Text in a fixed width: an id, a key, a class."""

    text: str


class Error(msgspec.Struct, frozen=True):
    """An error, of which a table shows the decisive line."""

    text: str


class Took(msgspec.Struct, frozen=True):
    """The time between two moments; until now if it has not ended."""

    begin: datetime | None
    end: datetime | None


Cell = Link | State | Counts | Code | Error | Took | datetime | str | int | float | bool | None | Sequence["Link"]


class Column(msgspec.Struct, frozen=True):
    """A column of a table: its heading, and what it shows of a row.

    ``is_number``: it stands at the right. ``is_minor``: a narrow screen has no room for it.
    """

    heading: str
    cell: Callable[[Any], Cell]
    is_number: bool = False
    is_minor: bool = False
