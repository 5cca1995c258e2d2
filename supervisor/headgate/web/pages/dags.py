"""``/dags``: which are broken, paused, or late?"""

from __future__ import annotations

from pathlib import Path

from headgate.web.cells import Code, Column, Error, Link, State, path
from headgate.web.pages.pictures import dag_state
from headgate.web.views import ROWS_PER_PAGE, Answer, Filter, Listing, View, cut

STATES = ("active", "paused", "broken")


def listing(view: View) -> Answer:
    """List the DAGs by name, and the files that cannot be parsed."""
    state, name = view.choice("state", STATES), view.text("name")
    found = view.inspect.dags(
        is_paused=None if state in (None, "broken") else state == "paused",
        is_broken=state == "broken",
        name=name,
        beyond=view.text("beyond"),
        limit=ROWS_PER_PAGE + 1,
    )
    rows, next_beyond = cut(found, by="place")
    return Listing(
        title="DAGs",
        intro="Which are broken, paused, or late?",
        columns=COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="No file of the DAG folder has a DAG.",
        filters=(
            Filter("name", "Name has", name or ""),
            Filter("state", "State", state or "", tuple((one, one) for one in STATES)),
        ),
    )


COLUMNS = (
    Column(
        "DAG",
        lambda line: Code(Path(line.file).name) if line.name is None else Link(path("dags", line.name), line.name),
    ),
    Column("state", dag_state),
    Column("schedule", lambda line: Code(line.schedule) if line.schedule else None),
    Column("next run", lambda line: line.next_run_at),
    Column("active", lambda line: line.active_runs or None, is_number=True),
    Column("queued", lambda line: line.queued_runs or None, is_number=True, is_minor=True),
    Column("waiting events", lambda line: line.waiting_events or None, is_number=True, is_minor=True),
    Column("last run", lambda line: State(line.last_run_state) if line.last_run_state else None),
    Column("began", lambda line: line.last_run_at, is_minor=True),
    Column("error", lambda line: Error(line.import_error) if line.import_error else None),
)
