"""``/search``: go to anything by an id or the beginning of a name."""

from __future__ import annotations

from starlette.responses import RedirectResponse

from headgate.store.inspect.browsing.search import Found
from headgate.web.cells import Cell, Column, Link, path
from headgate.web.views import Answer, Listing, View

_PLACES = {
    "event": "events",
    "trigger": "triggers",
    "dead letter": "dead-letters",
    "watcher": "triggers",
    "key": "events",
    "asset": "assets",
    "signal": "signals",
}
EMPTY = (
    "Nothing was found. Write an id, a run id, the beginning of the name of a DAG, task, watcher, asset or signal, or "
    "a watcher and the beginning of a key: big-orders berlin:47"
)


def search(view: View) -> Answer:
    """List what a text may mean; what alone it means is shown at once."""
    text = view.text("q")
    rows = [] if text is None else view.inspect.search(text)
    sees_signals = view.may("operator")
    is_exact = len(rows) == 1 and not view.request.scope["headgate.is_json"]
    if is_exact and (sees_signals or rows[0].kind != "signal"):
        return RedirectResponse(place_of(rows[0]), status_code=303)
    return Listing(
        title=f"Search for {text}" if text else "Search",
        columns=COLUMNS if sees_signals else VIEWER_COLUMNS,
        rows=rows,
        empty=EMPTY if text else EMPTY.removeprefix("Nothing was found. "),
    )


def place_of(found: Found) -> str:
    """Return the path of the page of what was found."""
    match found.kind:
        case "DAG":
            return path("dags", found.name)
        case "run":
            return path("dags", found.dag or "", "runs", found.name)
        case "task":
            return path("dags", found.dag or "", "runs", found.run or "", "tasks", found.name)
        case _:
            return path(_PLACES[found.kind], found.id or 0)


def _where(found: Found) -> str | None:
    if found.kind == "task":
        return f"{found.dag}, {found.run}"
    return found.dag


def _name_to_viewers(found: Found) -> Cell:
    return found.name if found.kind == "signal" else Link(place_of(found), found.name)


COLUMNS = (
    Column("what", lambda found: found.kind),
    Column("name", lambda found: Link(place_of(found), found.name)),
    Column("of", _where),
)
VIEWER_COLUMNS = (COLUMNS[0], Column("name", _name_to_viewers), COLUMNS[2])
