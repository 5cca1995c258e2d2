"""``/dags``: which are broken, paused, or late?"""

from __future__ import annotations

from pathlib import Path

from headgate.store.inspect.dags import DagLine
from headgate.web.cells import Cell, Code, Column, Error, Link, State, path
from headgate.web.pages.overview import RUN_COLUMNS
from headgate.web.views import ROWS_PER_PAGE, Answer, Filter, Listing, Page, View, cut

STATES = ("active", "paused", "broken")
RUNS_SHOWN = 25  # on the page of one DAG
TASKS_SHOWN = 200


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
    rows, next_beyond = cut(found, by="name")
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


def one(view: View) -> Answer:
    """Show a DAG: its newest runs, and its tasks."""
    line, spec = view.inspect.dag(view.part("dag"))
    values = {
        "name": spec.dag_id,
        "error": line.import_error,
        "facts": (
            ("state", _state(line)),
            ("schedule", Code(line.schedule) if line.schedule else None),
            ("next run", line.next_run_at),
            ("active runs", line.active_runs or None),
            ("queued runs", line.queued_runs or None),
            ("waiting events", line.waiting_events or None),
            ("file", Code(line.file)),
            ("parsed", line.parsed_at),
        ),
        "run_columns": RUN_COLUMNS[1:],
        "runs": view.inspect.runs(dag=spec.dag_id, limit=RUNS_SHOWN),
        "task_columns": TASK_COLUMNS,
        "tasks": spec.tasks[:TASKS_SHOWN],
        "left": max(0, len(spec.tasks) - TASKS_SHOWN),
    }
    return Page("dag.html", spec.dag_id, values)


def _state(line: DagLine) -> Cell:
    if line.import_error:
        return State("failed", "cannot be parsed")
    return State("paused") if line.is_paused else State("alive", "active")


COLUMNS = (
    Column(
        "DAG",
        lambda line: Code(Path(line.file).name) if line.name is None else Link(path("dags", line.name), line.name),
    ),
    Column("state", _state),
    Column("schedule", lambda line: Code(line.schedule) if line.schedule else None),
    Column("next run", lambda line: line.next_run_at),
    Column("active", lambda line: line.active_runs or None, is_number=True),
    Column("queued", lambda line: line.queued_runs or None, is_number=True, is_minor=True),
    Column("waiting events", lambda line: line.waiting_events or None, is_number=True, is_minor=True),
    Column("last run", lambda line: State(line.last_run_state) if line.last_run_state else None),
    Column("began", lambda line: line.last_run_at, is_minor=True),
    Column("error", lambda line: Error(line.import_error) if line.import_error else None),
)
TASK_COLUMNS = (
    Column("task", lambda task: Code(task.task_id)),
    Column("operator", lambda task: task.operator),
    Column("upstream", lambda task: ", ".join(task.upstream) or None),
    Column("trigger rule", lambda task: task.trigger_rule, is_minor=True),
    Column("retries", lambda task: task.retries or None, is_number=True, is_minor=True),
)
