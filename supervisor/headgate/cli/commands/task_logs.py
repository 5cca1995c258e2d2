"""``headgate tasks logs``: the log of a task, of its trigger, and of its supervisors about it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption
from headgate.cli.options import DagArgument, RunArgument, TaskArgument
from headgate.cli.output import json_line
from headgate.cli.tables import shown
from headgate.presentation.errors import without_own_frames

if TYPE_CHECKING:
    from headgate.store.inspect.runs import TaskRef
    from headgate.store.store import Store

# These have a place of their own in a line, or say nothing new to a reader who has named the task.
_PLACED = frozenset({"timestamp", "level", "event", "source", "try_number", "part", "more"})
_UNSAID = frozenset({"task_instance_id", "logger"})
# These are about headgate rather than about the task; ``--wide`` and ``--json`` have them.
_INTERNAL = frozenset({"trigger_id", "trigger_name", "trigger_run_id", "classpath", "incarnation", "epoch", "pid"})
_SOURCE_CHARS = 10

WideOption = Annotated[bool, typer.Option("--wide", help="Print all fields of each record.")]


def logs(
    ctx: typer.Context,
    dag: DagArgument,
    run: RunArgument,
    task: TaskArgument,
    try_number: Annotated[
        int | None, typer.Option("--try", min=1, metavar="N", help="Only this try; otherwise all of them.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the task has ended.")] = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the log of a task and of the trigger it waited for, merged by time. Times are in UTC."""
    # It imports inotify, which the other commands do not need.
    from headgate.supervisor.logs import task_log_files

    call = invocation(ctx)
    folder = call.settings().log_folder
    with call.store() as store:
        refs = store.inspect.find_tasks(dag, run, task)
        if follow and len(refs) > 1:
            raise CommandError(f"--follow takes one task: {refs[0].name}, for example", exit_code=2)
        for ref in refs:
            names = (folder, dag, ref.run_id, ref.task_id, try_number)
            if follow:
                is_over = partial(_is_over, store, ref)
                records = task_log_files.follow(*names, map_index=ref.map_index, is_over=is_over)
            else:
                tries = task_log_files.tries(folder, dag, ref.run_id, ref.task_id, ref.map_index)
                if (missing := _missing(store, ref, folder, tries, try_number)) is not None:
                    if len(refs) == 1:
                        raise CommandError(missing)
                    if not as_json:
                        print(f"--- {missing}")
                    continue
                records = task_log_files.read(*names, map_index=ref.map_index)
            of = None if len(refs) == 1 else ref
            if not _print_all(records, of, as_json=as_json, wide=wide, with_tries=try_number is None, flush=follow):
                print(f"headgate: the log of {ref.name} in {folder} has no record", file=sys.stderr)


def _missing(store: Store, ref: TaskRef, folder: Path, tries: list[int], try_number: int | None) -> str | None:
    """Return why there is nothing to print of a task; None if there is something."""
    if not tries:
        detail = store.inspect.task(ref)
        if detail.no_log is not None:
            return f"there is no log of {ref.name}: {detail.no_log}"
        missing = f"there is no log of {ref.name} in {folder}; the task is {detail.line.state.value}"
        return f"{missing}. Logs are on the machines that ran it, unless log_folder is shared"
    if try_number is not None and try_number not in tries:
        found = ", ".join(map(str, tries))
        return f"there is no log of try {try_number} of {ref.name}; there are logs of: {found}"
    return None


def _print_all(
    records: Iterable[Mapping[str, Any]],
    of: TaskRef | None,
    *,
    as_json: bool,
    wide: bool,
    with_tries: bool,
    flush: bool,
) -> int:
    """Print records as they come, and return their number; ``of`` is the instance they are of, if others follow."""
    begin = "" if of is None else f"{of.name}, "
    index = {} if of is None else {"map_index": of.map_index}
    shown_try: int | None = None
    count = 0
    for record in records:
        count += 1
        if as_json:
            sys.stdout.write(json_line({**record, **index}) + "\n")
        else:
            if (with_tries or of is not None) and record["try_number"] != shown_try:
                shown_try = record["try_number"]
                print(f"--- {begin}try {shown_try} ---")
            _print(record, is_wide=wide)
        if flush:
            sys.stdout.flush()
    return count


def _is_over(store: Store, ref: TaskRef) -> bool:
    from headgate.scheduling.states import TERMINAL

    return store.inspect.task(ref).line.state in TERMINAL


def _print(record: Mapping[str, Any], *, is_wide: bool) -> None:
    """Print a record: a line, and below it, indented, the further lines of its event and of its other fields."""
    time = str(record.get("timestamp", ""))
    begin = f"{time:<27} {record.get('level', ''):<8} {record.get('source', ''):<{_SOURCE_CHARS}} "
    first, *below = str(record.get("event", "")).splitlines() or [""]
    beside: list[str] = []
    for name, value in _others(record, is_wide=is_wide):
        text = value.strip() if isinstance(value, str) else json_line(value)
        if "\n" in text:
            below += text.splitlines() if is_wide else without_own_frames(text).splitlines()
        elif text:
            beside.append(f"{name}={text}")
    print(begin + shown(" ".join([first, *beside])))
    # A traceback is as Python prints it, and not so far to the right that its lines are broken.
    is_traceback = any(line.startswith("Traceback") for line in below)
    for line in below:
        print(("    " if is_traceback else " " * len(begin)) + shown(line))


def _others(record: Mapping[str, Any], *, is_wide: bool) -> list[tuple[str, Any]]:
    left_out = _PLACED | (frozenset() if is_wide else _UNSAID | _INTERNAL)
    return [(name, value) for name, value in record.items() if name not in left_out and value is not None]
