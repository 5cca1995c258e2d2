"""``/runs``: what runs, and what failed?"""

from __future__ import annotations

from headgate.web.pages.overview import RUN_COLUMNS
from headgate.web.views import ROWS_PER_PAGE, Answer, Filter, Listing, View, cut

STATES = ("queued", "running", "success", "failed")


def listing(view: View) -> Answer:
    """List runs, the newest first."""
    dag, state, since = view.text("dag"), view.choice("state", STATES), view.since()
    rows, next_beyond = cut(
        view.inspect.runs(
            dag=dag,
            states=() if state is None else (state,),
            since=since,
            beyond_id=view.number("beyond"),
            limit=ROWS_PER_PAGE + 1,
        )
    )
    return Listing(
        title="Runs",
        intro="What runs, and what failed?",
        columns=RUN_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="There are no such runs.",
        filters=(
            Filter("dag", "DAG", dag or "", placeholder="exact name"),
            Filter("state", "State", state or "", tuple((one, one) for one in STATES)),
            Filter("since", "Created since", view.text("since") or "", placeholder="2h, 3d, 2026-01-31"),
        ),
    )
