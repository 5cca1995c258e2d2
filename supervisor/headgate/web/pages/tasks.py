"""A run and its tasks: where is the time, why does a task wait, and what did it leave?"""

from __future__ import annotations

from headgate.presentation.values import payload
from headgate.store.inspect.runs import TaskDetail, TaskLine
from headgate.web.cells import Cell, Code, Column, Error, Link, State, Took, path
from headgate.web.views import ROWS_PER_PAGE, Answer, Page, View, cut

XCOMS_SHOWN = 50  # of one task


def run(view: View) -> Answer:
    """Show a run: what it was made for, and its tasks in their order."""
    dag, run_id = view.part("dag"), view.part("run")
    detail = view.inspect.run(dag, run_id)
    line = detail.line
    found = view.inspect.tasks(dag=dag, run_id=line.run_id, beyond_id=view.number("beyond"), limit=ROWS_PER_PAGE + 1)
    tasks, next_id = cut(found)
    values = {
        "facts": (
            ("state", State(line.state)),
            ("DAG", Link(path("dags", dag), dag)),
            ("type", line.run_type),
            ("logical date", line.logical_date),
            ("created", line.created_date),
            ("began", line.started_at),
            ("ended", line.ended_at),
            ("took", Took(line.started_at, line.ended_at) if line.started_at else None),
            ("events", [Link(path("events", id_), f"{id_} of {name}") for id_, name, _ in detail.events] or None),
        ),
        "conf": None if detail.conf is None else payload(detail.conf),
        "columns": TASK_COLUMNS,
        "tasks": tasks,
        "next": None if next_id is None else path("dags", dag, "runs", line.run_id, beyond=next_id),
    }
    return Page("run.html", f"{dag} {line.run_id}", values)


def task(view: View) -> Answer:
    """Show a task: why it is where it is, its last error, and what it has left."""
    dag, run_id = view.part("dag"), view.part("run")
    # A mapped task as a whole is shown by its own row, as its line is.
    found = view.inspect.find_task(dag, run_id, view.part("task").removesuffix("[]"))
    detail = view.inspect.task(found)
    values = {
        "why": view.inspect.why_task(found, liveness=view.site.liveness),
        "facts": _facts(detail),
        "error": detail.line.last_error,
        "xcoms": [(key, payload(value)) for key, value in list(detail.xcoms.items())[:XCOMS_SHOWN]],
        "xcoms_left": max(0, len(detail.xcoms) - XCOMS_SHOWN),
        "log_command": f"headgate tasks logs {found.dag} {found.run_id} {found.name}",
    }
    return Page("task.html", f"{found.dag} {found.name}", values)


def task_path(line: TaskLine) -> str:
    """Return the path of the page of a task."""
    return path("dags", line.dag, "runs", line.run_id, "tasks", line.name.removesuffix("[]"))


def _facts(detail: TaskDetail) -> tuple[tuple[str, Cell], ...]:
    line = detail.line
    trigger = None if line.trigger_id is None else Link(path("triggers", line.trigger_id), f"trigger-{line.trigger_id}")
    upstream = [
        Link(path("dags", line.dag, "runs", line.run_id, "tasks", name), f"{name} ({state or 'no state'})")
        for name, state in (detail.upstream or {}).items()
    ]
    return (
        ("state", State(line.state)),
        ("run", Link(path("dags", line.dag, "runs", line.run_id), line.run_id, is_code=True)),
        ("operator", None if detail.operator is None else Code(detail.operator)),
        ("tries", f"{line.try_number} of {line.tries_max}"),
        ("upstream", upstream or None),
        ("trigger rule", detail.trigger_rule),
        ("trigger", trigger),
        ("supervisor", line.triggerer_id),
        ("queue", line.queue),
        ("pool", f"{line.pool}, {detail.pool_slots:,} slots" if detail.pool_slots != 1 else line.pool),
        ("scheduled", detail.scheduled_at),
        ("began", line.started_at),
        ("ended", line.ended_at),
        ("took", Took(line.started_at, line.ended_at) if line.started_at else None),
        ("again at", line.retry_at),
        ("waits until", line.trigger_timeout),
        ("deadline", detail.deadline),
    )


TASK_COLUMNS = (
    Column("task", lambda line: Link(task_path(line), line.name)),
    Column("state", lambda line: State(line.state)),
    Column("try", lambda line: line.try_number or None, is_number=True),
    Column("began", lambda line: line.started_at),
    Column("took", lambda line: Took(line.started_at, line.ended_at), is_number=True),
    Column("pool", lambda line: line.pool, is_minor=True),
    Column("queue", lambda line: line.queue, is_minor=True),
    Column("last error", lambda line: Error(line.last_error) if line.last_error else None),
)
