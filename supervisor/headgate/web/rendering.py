"""Templates: where they are, what they may use, and how a text that strangers have written is shown.

Everything is escaped, and no template marks anything as safe. Passwords in URLs are masked in every text, because an
error of a client may quote the URL that it was given.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import msgspec
from markupsafe import Markup

from headgate.presentation.moments import age, duration, exact
from headgate.presentation.values import json_line, payload, readable
from headgate.scheduling.words import counted, error_line
from headgate.web import cells
from headgate.web.states import look_of

TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
STATIC = ("headgate.css", "headgate.js", "headgate.svg", "vendor/htmx/htmx.min.js")
# It begins with the last letter of the scheme: from the first one, a long run of letters would be read again from each.
# A password may have an unquoted / or @, although it should not: it goes up to the last @ before a space, a quote or
# another URL. What looks like a port and a path is none. A text may have been cut within a password, and so end there.
_URL_PASSWORD = re.compile(
    r"""([A-Za-z0-9+.-]://(?!\[[0-9A-Fa-f:.%]*\](?:[:/?#]|\Z))[^\s/:@?#]*):
    (?:
        (?! [0-9]{1,5}/ ) (?: [^\s/@]+ (?: @(?:(?!://)[^\s"'<>])* )? | (?:(?!://)[^\s"'<>])+ ) (@)
        | (?! [0-9]{1,5}\W*\Z ) [^\s/?#@"'<>]+ \Z
    )""",
    re.VERBOSE,
)


class Static(NamedTuple):
    """A file that pages use: its bytes, its type, and a part of its hash, which is in its URL."""

    data: bytes
    content_type: str
    version: str


def mask_passwords(text: str) -> str:
    """Return a text without the passwords of the URLs in it."""
    # Most texts of a page are short, and none is a URL.
    return _URL_PASSWORD.sub(r"\1:***\2", text) if "://" in text else text


def cut(text: str, chars_max: int = cells.TEXT_CHARS_MAX) -> str:
    """Return what a cell shows of a text. It is masked before it is cut: half of a password would be none any more."""
    shown = mask_passwords(text)
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def masked(value: Any) -> Any:
    """Return a readable value with `mask_passwords` done to every text in it."""
    match value:
        case str():
            return mask_passwords(value)
        case dict():
            return {name: masked(item) for name, item in value.items()}
        case list():
            return [masked(item) for item in value]
        case _:
            return value


def read_static() -> dict[str, Static]:
    """Return the files that pages use, by name."""
    folder = resources.files("headgate.web") / "static"
    found = {}
    for name in STATIC:
        data = (folder / name).read_bytes()
        found[name] = Static(data, TYPES["." + name.rpartition(".")[2]], hashlib.sha256(data).hexdigest()[:12])
    return found


def _finalize(value: Any) -> Any:
    return mask_passwords(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _kind_of(cell: cells.Cell) -> str:
    """Return the name of the macro that draws a cell."""
    match cell:
        case None:
            return "nothing"
        case bool():
            return "flag"
        case int() | float():
            return "number"
        case str():
            return "text"
        case datetime():
            return "moment"
        case msgspec.Struct():
            return type(cell).__name__.lower()
        case _:
            return "links"


def _count(number: float | int) -> str:
    return f"{number:,}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,} B"


def _pretty(data: bytes | None) -> str:
    """Return a stored payload as indented JSON, or as text."""
    shown = payload(data)
    if isinstance(shown, str):
        return shown
    return msgspec.json.format(json_line(shown), indent=2)


def environment(static: dict[str, Static], **given: Any) -> jinja2.Environment:
    """Return the environment of all templates, in which each of them has what is ``given``."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("headgate.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters: dict[str, Any] = {
        "age": age,
        "exact": exact,
        "took": duration,
        "count": _count,
        "cut": cut,
        "bytes": _bytes,
        "error_line": error_line,
        "pretty": _pretty,
        "plural": counted,
        "kind": _kind_of,
        "readable": readable,
    }
    made.filters.update(filters)
    names: dict[str, Any] = {
        "look_of": look_of,
        "path": cells.path,
        "static": {name: f"/static/{name}?v={one.version}" for name, one in static.items()},
    }
    made.globals.update(names | given)
    return made
