"""``/audit``: who did what?"""

from __future__ import annotations

from typing import get_args

from headgate.store.access.audit import Action
from headgate.store.inspect.audit import AuditFilter
from headgate.web.cells import Column, State
from headgate.web.views import ROWS_PER_PAGE, Answer, Filter, Listing, View, cut

ACTIONS: tuple[Action, ...] = tuple(sorted(get_args(Action)))


def listing(view: View) -> Answer:
    """List what users have done by commands and by pages, the newest first."""
    actor, subject, since = view.text("by"), view.text("object"), view.since()
    action = view.choice("action", ACTIONS)
    which = AuditFilter(actor, action, subject, since)
    rows, next_beyond = cut(view.inspect.audit(which, beyond_id=view.number("beyond"), limit=ROWS_PER_PAGE + 1))
    return Listing(
        title="Audit",
        intro="Who did what, by commands and by pages?",
        columns=COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="Nobody has done anything.",
        filters=(
            Filter("by", "By", actor or "", placeholder="exact name"),
            Filter("action", "What", action or "", tuple((one, one) for one in ACTIONS)),
            Filter("object", "Object", subject or "", placeholder="DAG etl"),
            Filter("since", "Since", view.text("since") or "", placeholder="2h, 3d"),
        ),
    )


COLUMNS = (
    Column("at", lambda row: row.at),
    Column("by", lambda row: row.actor),
    Column("role", lambda row: row.role, is_minor=True),
    Column("from", lambda row: row.address or row.via, is_minor=True),
    Column("what", lambda row: row.action),
    Column("object", lambda row: row.object),
    Column("change", lambda row: row.change),
    Column(
        "outcome", lambda row: State({"done": "success", "refused": "failed"}.get(row.outcome, "none"), row.outcome)
    ),
)
