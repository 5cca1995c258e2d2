"""``/variables`` and ``/connections``: which are there? Their values are encrypted, and no page has them."""

from __future__ import annotations

from headgate.store.tables import connection, variable
from headgate.store.tasks.values import ValueVerbs
from headgate.web.cells import Code, Column
from headgate.web.views import ROWS_PER_PAGE, Answer, Listing, View, cut


def variables(view: View) -> Answer:
    """List the variables by name."""
    return _listing(view, ValueVerbs(view.inspect.database, variable), "variables")


def connections(view: View) -> Answer:
    """List the connections by name."""
    return _listing(view, ValueVerbs(view.inspect.database, connection), "connections")


def _listing(view: View, verbs: ValueVerbs, what: str) -> Answer:
    rows, next_beyond = cut(verbs.listed(beyond=view.text("beyond"), limit=ROWS_PER_PAGE + 1), by="name")
    return Listing(
        title=what.capitalize(),
        intro=f"Which {what} may tasks and triggers read? Pages do not have their values.",
        columns=COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty=f"There are no {what}. `headgate {what} set` stores one.",
    )


COLUMNS = (
    Column("name", lambda row: Code(row.name)),
    Column("description", lambda row: row.description or None),
    Column("set", lambda row: row.updated_at),
)
