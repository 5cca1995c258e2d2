"""A run and its tasks: where is the time, why does a task wait, and what did it leave?"""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.presentation.values import json_line
from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.words import command, tries
from headgate.store.ids import TryName
from headgate.store.inspect.runs import TaskDetail, TaskLine, TaskRef
from headgate.supervisor.logs import task_log_files
from headgate.web import acts
from headgate.web.cells import Cell, Code, Column, Counts, Error, Link, State, Took, path
from headgate.web.pages import pictures
from headgate.web.views import ROWS_PER_PAGE, Answer, BadRequest, Filter, Listing, Page, View, cut

STATES = tuple(state.value for state in TaskState)
XCOMS_SHOWN = 50  # of one task
LOG_BYTES_MAX = 64 * 1024  # of each file of a log: its end, or what follows a cursor
LOG_LINES_SHOWN = 200  # on the page of a task
CURSOR_CHARS_MAX = 4_000
# These have a place of their own, or say nothing to a reader who has named the task.
_PLACED = frozenset(
    {
        *("timestamp", "level", "event", "source", "try_number", "part", "more", "task_instance_id", "logger"),
        *("trigger_id", "trigger_name", "trigger_run_id", "classpath", "incarnation", "epoch", "pid"),
    }
)


class LogLine(msgspec.Struct, frozen=True):
    """One record of the log of a task; ``text`` has what else it says, also a traceback."""

    at: str
    level: str
    source: str
    try_number: int
    text: str


def run(view: View) -> Answer:
    """Show a run: what it was made for, and its tasks in their order."""
    dag, run_id = view.part("dag"), view.part("run")
    detail = view.inspect.run(dag, run_id)
    signals = view.inspect.run_signals(detail.line.id)
    line, sees_payloads = detail.line, view.may("operator")
    found = view.inspect.tasks(dag=dag, run_id=line.run_id, beyond_id=view.number("beyond"), limit=ROWS_PER_PAGE + 1)
    tasks, next_beyond = cut(found)
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
            (
                "signals",
                [Link(path("search", q=key), f"version {version:,} of {key}") for _, key, version, _ in signals]
                or None,
            ),
        ),
        "conf": detail.conf if sees_payloads else None,
        "hides_conf": detail.conf is not None and not sees_payloads,
        "acts": view.acts(*acts.of_run(dag, line.run_id, has_ended=line.ended_at is not None)),
        "columns": TASK_COLUMNS,
        "tasks": tasks,
        "bars": pictures.gantt(line, view.inspect.spans(dag, line.run_id), view.now),
        "place": path("dags", dag, "runs", line.run_id),
        "gantt_w": pictures.GANTT_W,
        "next": None if next_beyond is None else path("dags", dag, "runs", line.run_id, beyond=next_beyond),
    }
    return Page("run.html", f"{dag} {line.run_id}", values)


def task(view: View) -> Answer:
    """Show a task: why it is where it is, its last error, and what it has left."""
    dag, run_id = view.part("dag"), view.part("run")
    # A mapped task as a whole is shown by its own row, as its line is.
    found = view.inspect.find_task(dag, run_id, view.part("task").removesuffix("[]"))
    detail = view.inspect.task(found)
    sees_payloads = view.may("operator")
    xcoms = detail.xcoms if sees_payloads else {}
    is_mapped = detail.line.is_map or found.map_index >= 0
    own_acts = acts.of_task(found.dag, found.run_id, found.name, state=detail.line.state, is_mapped=is_mapped)
    values = {
        "why": view.inspect.why_task(found, liveness=view.site.liveness),
        "facts": _facts(detail),
        "error": detail.line.error,
        "xcoms": list(xcoms.items())[:XCOMS_SHOWN],
        "xcoms_left": max(0, len(xcoms) - XCOMS_SHOWN),
        "hides_xcoms": bool(detail.xcoms) and not sees_payloads,
        "acts": view.acts(*own_acts),
        "hides_log": not sees_payloads,
        "log": _read_log(view, found, None)[0][-LOG_LINES_SHOWN:] if sees_payloads else [],
        "log_command": command("tasks", "logs", found.dag, found.run_id, found.name),
        "no_log": detail.no_log,
        "log_json": path(*_place(found), "log.json"),
        "log_folder": view.site.log_folder,
    }
    return Page("task.html", f"{found.dag} {found.name}", values)


def instances(view: View) -> Answer:
    """List the instances of a mapped task, in their order."""
    found = view.inspect.find_task(view.part("dag"), view.part("run"), view.part("task").removesuffix("[]"))
    state, name = view.choice("state", STATES), view.text("name")
    rows, next_beyond = cut(
        view.inspect.instances(
            found,
            states=() if state is None else (TaskState(state),),
            name=name,
            beyond_index=view.number("beyond"),
            limit=ROWS_PER_PAGE + 1,
        ),
        by="map_index",
    )
    return Listing(
        title=f"Instances of {found.dag} {found.task_id}",
        intro=f"Which of its values in the run {found.run_id} failed, or wait?",
        columns=INSTANCE_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="It has no such instances.",
        filters=(
            Filter("state", "State", state or "", tuple((one, one.replace("_", " ")) for one in STATES)),
            Filter("name", "Name has", name or ""),
        ),
    )


def log(view: View) -> Answer:
    """List the end of a task's log, or what follows a cursor, which is ``next_beyond`` of the answer before."""
    found = view.inspect.find_task(view.part("dag"), view.part("run"), view.part("task").removesuffix("[]"))
    lines, cursor = _read_log(view, found, view.request.query_params.get("beyond"))
    return Listing(
        title=f"Log of {found.dag} {found.name}",
        columns=LOG_COLUMNS,
        rows=lines,
        next_beyond=cursor or None,
        empty=f"There is nothing new in {view.site.log_folder}, where this machine keeps the logs of its tasks.",
        next_text="What follows",
    )


def _read_log(view: View, found: TaskRef, cursor: str | None) -> tuple[list[LogLine], str]:
    if cursor is not None and len(cursor) > CURSOR_CHARS_MAX:
        raise BadRequest(f"beyond has more than {CURSOR_CHARS_MAX:,} characters")
    name = TryName(found.dag, found.run_id, found.task_id, 0, found.map_index)
    try:
        records, behind = task_log_files.read_on(view.site.log_folder, name, cursor, bytes_max=LOG_BYTES_MAX)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    except OSError as error:
        return [LogLine("", "warning", "supervisor", 0, f"its log cannot be read here: {error.strerror}")], ""
    return [_log_line(record) for record in records], behind


def _log_line(record: dict[str, Any]) -> LogLine:
    """Return what stands in one line: without what names the task, and what is about headgate."""
    text = [str(record.get("event", ""))]
    for name, value in record.items():
        if name not in _PLACED and value is not None:
            shown = value if isinstance(value, str) else json_line(value)
            text.append(f"\n{shown.rstrip()}" if "\n" in shown else f" {name}={shown}")
    at, level, source = (str(record.get(name, "")) for name in ("timestamp", "level", "source"))
    return LogLine(at, level, source, record["try_number"], "".join(text))


def _place(found: TaskRef) -> tuple[str, ...]:
    return ("dags", found.dag, "runs", found.run_id, "tasks", found.name)


def task_path(line: TaskLine) -> str:
    """Return the path of the page of a task."""
    return path("dags", line.dag, "runs", line.run_id, "tasks", line.name.removesuffix("[]"))


def _instances(line: TaskLine) -> Cell:
    """Return the numbers of the instances of a mapped task, each of which leads to these instances."""
    href = path("dags", line.dag, "runs", line.run_id, "tasks", line.task_id, "instances")
    return Counts(line.instances, href) if line.instances else None


def _whole(line: TaskLine) -> Cell:
    """Return the mapped task that this is an instance of."""
    if line.map_index < 0:
        return None
    return Link(path("dags", line.dag, "runs", line.run_id, "tasks", line.task_id), f"{line.task_id}[]", is_code=True)


def _took(line: TaskLine) -> Cell:
    """Return how long a try has taken; None of one that has failed and is followed by another: its end is not kept."""
    if line.started_at is None or line.state is TaskState.UP_FOR_RETRY:
        return None
    return Took(line.started_at, line.ended_at)


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
        ("instance of", _whole(line)),
        ("its name", line.map_name),
        ("instances", _instances(line)),
        ("operator", None if detail.operator is None else Code(detail.operator)),
        ("tries", tries(line.try_number, line.tries_max, line.retries)),
        ("upstream", upstream or None),
        ("trigger rule", detail.trigger_rule),
        ("trigger", trigger),
        ("supervisor", line.triggerer_id),
        ("queue", line.queue),
        ("pool", f"{line.pool}, {detail.pool_slots:,} slots" if detail.pool_slots != 1 else line.pool),
        ("scheduled", detail.scheduled_at),
        ("began", line.started_at),
        ("ended", line.ended_at),
        ("took", _took(line)),
        ("again at", line.retry_at),
        ("waits until", line.trigger_timeout),
        ("deadline", detail.deadline),
    )


TASK_COLUMNS = (
    Column("task", lambda line: Link(task_path(line), line.name)),
    Column("state", lambda line: State(line.state)),
    Column("instances", _instances),
    Column("try", lambda line: line.try_number or None, is_number=True),
    Column("began", lambda line: line.started_at),
    Column("took", _took, is_number=True),
    Column("pool", lambda line: line.pool, is_minor=True),
    Column("queue", lambda line: line.queue, is_minor=True),
    Column("last error", lambda line: Error(line.error) if line.error else None),
)
INSTANCE_COLUMNS = (
    Column("instance", lambda line: Link(task_path(line), line.name)),
    Column("its name", lambda line: line.map_name),
    *(column for column in TASK_COLUMNS if column.heading not in ("task", "instances")),
)
LOG_COLUMNS = (
    Column("at", lambda line: Code(line.at)),
    Column("try", lambda line: line.try_number, is_number=True),
    Column("level", lambda line: line.level),
    Column("source", lambda line: line.source),
    Column("text", lambda line: line.text),
)
