"""``/dags/DAG`` and ``/dags/DAG/graph``: how did the last runs go, task by task, and what waits for what?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from headgate.presentation.moments import duration
from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.store.ids import instance_name
from headgate.store.inspect.dags import DagLine
from headgate.store.inspect.runs import RunLine
from headgate.store.inspect.spans import Phase, PhaseName
from headgate.web import acts
from headgate.web.cells import Cell, Code, State, path
from headgate.web.layout import Layouts
from headgate.web.states import look_of
from headgate.web.views import Answer, Page, View

RUNS_SHOWN = 25
TASKS_SHOWN = 60  # of one page of the grid: with all its links it stays below 350 KB
BAR_H = 44  # of the longest of the runs
BOXES_MAX = 300  # beyond, the neighbours of one task
HOPS = 2
UPSTREAM_SHOWN = 20  # of each task, in the table below the graph
GANTT_W = 600
GANTT_TASKS_MAX = 60
_TONES = {"queued": "idle", "running": "busy", "deferred": "wait", "retry wait": "warn"}
_layouts = Layouts()


class Bar(msgspec.Struct, frozen=True):
    """A run above the grid: its height out of `BAR_H`."""

    run: RunLine
    height: int


class Row(msgspec.Struct, frozen=True):
    """A task of the grid, with its state in each run; None: the run does not have it."""

    task: str
    states: tuple[str | None, ...]


class Part(msgspec.Struct, frozen=True):
    """What a task did for a while, beside the times of its run: where it begins and how long it is, of `GANTT_W`."""

    phase: PhaseName
    x: float
    width: float
    tone: str
    text: str


class Bars(msgspec.Struct, frozen=True):
    """A task, or an instance of one, with its parts."""

    task: str
    parts: tuple[Part, ...]


def dag_facts(line: DagLine) -> tuple[tuple[str, Cell], ...]:
    """Return the facts above both pictures."""
    return (
        ("state", dag_state(line)),
        ("schedule", Code(line.schedule) if line.schedule else None),
        ("next run", line.next_run_at),
        ("active runs", line.active_runs or None),
        ("queued runs", line.queued_runs or None),
        ("waiting events", line.waiting_events or None),
        ("file", Code(line.file)),
        ("parsed", line.parsed_at),
    )


def dag_state(line: DagLine) -> Cell:
    """Return whether a DAG is active, paused, or cannot be parsed."""
    if line.import_error:
        return State("failed", "cannot be parsed")
    return State("paused") if line.is_paused else State("alive", "active")


def grid(view: View) -> Answer:
    """Show the newest runs of a DAG, task by task."""
    line, spec = view.inspect.dag(view.part("dag"))
    runs = view.inspect.runs(dag=spec.dag_id, beyond_id=view.number("beyond"), limit=RUNS_SHOWN + 1)
    shown, first = runs[:RUNS_SHOWN][::-1], view.number("from") or 0
    names = [task.task_id for task in spec.tasks]
    tasks = names[first : first + TASKS_SHOWN]
    states = view.inspect.states_by_run([run.id for run in shown], tasks)
    here = ("dags", spec.dag_id)
    values = {
        "name": spec.dag_id,
        "error": line.import_error,
        "facts": dag_facts(line),
        "bars": _bars(shown, view.now),
        "rows": [Row(task, tuple(states.get(run.id, {}).get(task) for run in shown)) for task in tasks],
        "acts": view.acts(*acts.of_dag(spec.dag_id, is_paused=line.is_paused, now=view.now)),
        "older": path(*here, beyond=shown[0].id) if len(runs) > RUNS_SHOWN else None,
        "newest": path(*here) if view.number("beyond") is not None else None,
        "more": path(*here, **{"from": first + TASKS_SHOWN}) if len(names) > first + TASKS_SHOWN else None,
        "bar_h": BAR_H,
    }
    return Page("dag.html", spec.dag_id, values)


def _bars(runs: Sequence[RunLine], now: datetime) -> list[Bar]:
    took = [0.0 if run.started_at is None else ((run.ended_at or now) - run.started_at).total_seconds() for run in runs]
    longest = max(took, default=0.0) or 1.0
    return [Bar(run, max(2, round(BAR_H * one / longest))) for run, one in zip(runs, took, strict=True)]


def graph(view: View) -> Answer:
    """Show what waits for what in a DAG, with the states of one run."""
    line, spec = view.inspect.dag(view.part("dag"))
    runs = view.inspect.runs(dag=spec.dag_id, limit=RUNS_SHOWN)
    asked = view.text("run")
    run = next((one for one in runs if one.run_id == asked), None) if asked else (runs[0] if runs else None)
    if asked and run is None:
        run = view.inspect.run(spec.dag_id, asked).line
    around = view.text("around")
    tasks = _shown_tasks(spec, around)
    names = {task.task_id for task in tasks}
    middle = around if around in names or not tasks else tasks[0].task_id
    layout = _layouts.of({task.task_id: [up for up in task.upstream if up in names] for task in tasks}, middle)
    states = {} if run is None else view.inspect.states_by_run([run.id], sorted(names)).get(run.id, {})
    values = {
        "name": spec.dag_id,
        "facts": dag_facts(line),
        "picture": layout,
        "states": states,
        "specs": {task.task_id: task for task in tasks},
        "run": run,
        "runs": runs,
        "left": len(spec.tasks) - len(tasks),
        "around": around,
        "middle": middle,
        "asked_run": asked,
        "upstream_shown": UPSTREAM_SHOWN,
        "look_of": look_of,
    }
    return Page("graph.html", f"{spec.dag_id}: graph", values)


def _shown_tasks(spec: DagSpec, around: str | None) -> list[TaskSpec]:
    """Return the tasks to draw: all, or if these are too many, those near one of them."""
    by_name = {task.task_id: task for task in spec.tasks}
    if around not in by_name and len(spec.tasks) <= BOXES_MAX:
        return list(spec.tasks)
    if not by_name:
        return []
    near = {around if around is not None and around in by_name else spec.tasks[0].task_id: None}
    for _ in range(HOPS):
        _add(near, [up for name in near for up in by_name[name].upstream])
        _add(near, [task.task_id for task in spec.tasks if any(up in near for up in task.upstream)])
    return [task for task in spec.tasks if task.task_id in near]


def _add(near: dict[str, None], names: Iterable[str]) -> None:
    """Add names, as long as there is room: what is nearer, the first of all, is not left out for what is farther."""
    for name in names:
        if len(near) == BOXES_MAX:
            break
        near[name] = None


def gantt(run: RunLine, phases: Sequence[Phase], now: datetime) -> list[Bars]:
    """Return where the time of a run has gone, for the first `GANTT_TASKS_MAX` of its tasks."""
    if run.started_at is None:
        return []
    begin = run.started_at
    whole_s = max(((run.ended_at or now) - begin).total_seconds(), 0.001)
    by_task: dict[str, list[Part]] = {}
    for phase in phases:
        name = instance_name(phase.task_id, phase.map_index)
        if name not in by_task and len(by_task) == GANTT_TASKS_MAX:
            break
        by_task.setdefault(name, []).append(_part(phase, begin, whole_s, now))
    return [Bars(name, tuple(parts)) for name, parts in by_task.items()]


def _part(phase: Phase, begin: datetime, whole_s: float, now: datetime) -> Part:
    from_s = max(0.0, (phase.began_at - begin).total_seconds())
    took_s = max(0.0, ((phase.ended_at or now) - phase.began_at).total_seconds())
    x = min(GANTT_W - 2.0, GANTT_W * from_s / whole_s)
    width = max(1.5, min(GANTT_W - x, GANTT_W * took_s / whole_s))
    tone = _TONES[phase.phase]
    if phase.phase == "running":
        tone = {"failed": "bad", "lost": "bad", None: "busy"}.get(phase.outcome, "good")
    took = duration(phase.began_at, phase.ended_at or now)
    return Part(phase.phase, round(x, 1), round(width, 1), tone, f"{phase.phase} {took}, try {phase.try_number}")
