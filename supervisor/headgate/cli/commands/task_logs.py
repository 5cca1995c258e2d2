"""``headgate tasks logs``: what a task and its trigger logged and printed, and what its supervisors said of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.asking import DagArgument, RunArgument, TaskArgument
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.output import JsonOption, json_line, shown

if TYPE_CHECKING:
    from headgate.store.inspect.inspecting import TaskRef
    from headgate.store.store import Store

# Told at the beginning of a line, or not at all; the others of a record come after its event.
_TOLD = frozenset({"timestamp", "level", "event", "source", "try_number", "logger", "part", "more", "exception"})
_UNSAID = frozenset({"task_instance_id"})  # who reads the log of a task knows which
_SOURCE_CHARS = 10


def logs(
    ctx: typer.Context,
    dag: DagArgument,
    run: RunArgument,
    task: TaskArgument,
    try_number: Annotated[
        int | None, typer.Option("--try", min=1, metavar="N", help="Only this try; else all of them.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the task has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the log of a task, what its trigger logged while it waited included, merged by time."""
    # It imports inotify, which the other commands do not need.
    from headgate.supervisor.logs import task_log_files

    call = invocation(ctx)
    folder = call.settings().log_folder
    with call.store() as store:
        ref = store.inspect.find_task(dag, run, task)
        names = (folder, dag, ref.run_id, task, try_number)
        if follow:
            records = task_log_files.follow(*names, is_over=lambda: _is_over(store, ref))
        else:
            records = task_log_files.read(*names)
        shown_try: int | None = None
        for record in records:
            if as_json:
                sys.stdout.write(json_line(record) + "\n")
            else:
                if try_number is None and record["try_number"] != shown_try:
                    shown_try = record["try_number"]
                    print(f"--- try {shown_try} ---")
                _print(record)
            if follow:
                sys.stdout.flush()
        if not follow and not task_log_files.tries(folder, dag, ref.run_id, task):
            state = store.inspect.task(ref).line.state
            where = f"there is no log of {task} in {folder}; the task is {state.value}"
            raise CommandError(f"{where}. Logs are on the machines that ran it, unless log_folder is shared")


def _is_over(store: Store, ref: TaskRef) -> bool:
    from headgate.scheduling.states import TERMINAL

    return store.inspect.task(ref).line.state in TERMINAL


def _print(record: Mapping[str, Any]) -> None:
    """Print a record: a line for people, and what its event has of further lines below it."""
    time = str(record.get("timestamp", ""))
    begin = f"{time:<27} {record.get('level', ''):<8} {record.get('source', ''):<{_SOURCE_CHARS}} "
    others = [f"{name}={value if isinstance(value, str) else json_line(value)}" for name, value in _others(record)]
    first, *more = str(record.get("event", "")).splitlines() or [""]
    print(begin + shown(" ".join([first, *others])))
    for line in (*more, *str(record.get("exception") or "").splitlines()):
        print(" " * len(begin) + shown(line))


def _others(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in record.items() if name not in _TOLD | _UNSAID and value is not None]
