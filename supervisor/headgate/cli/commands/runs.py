"""``headgate runs``: the runs of DAGs."""

from __future__ import annotations

import enum
from functools import partial
from typing import Annotated

import typer

from headgate.cli.asking import (
    ROWS_LISTED,
    AllOption,
    DagArgument,
    RowsOption,
    RunArgument,
    SinceOption,
    pages,
    print_pages,
    since,
    until_free,
)
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.output import JsonOption, fields, payload, print_record, print_rows

app = typer.Typer(help="Runs of DAGs.", no_args_is_help=True)

_SHOWN = ("dag", "run_id", "run_type", "state", "logical_date", "created_date", "started_at", "ended_at", "tasks")
_TASKS_SHOWN = ("task_id", "state", "try_number", "tries_max", "started_at", "ended_at", "last_error")


class RunState(enum.StrEnum):
    """What a run can be."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"


@app.command("list")
def list_runs(
    ctx: typer.Context,
    dag: Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only runs of this DAG.")] = None,
    state: Annotated[list[RunState] | None, typer.Option(help="Only those in this state; may be given again.")] = None,
    since_text: SinceOption = None,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """List runs, the newest first."""
    from headgate.store.inspect.inspecting import RunLine

    with invocation(ctx).store() as store:
        states = [one.value for one in state or ()]
        page = partial(store.inspect.runs, dag=dag, states=states, since=since(since_text, store.inspect.now))
        print_pages(page, RunLine, limit=limit, everything=everything, as_json=as_json, shown=_SHOWN)


@app.command()
def show(ctx: typer.Context, dag: DagArgument, run: RunArgument, as_json: JsonOption = False) -> None:
    """Show a run and its tasks."""
    with invocation(ctx).store() as store:
        found = store.inspect.run(dag, run)
        of_run = partial(store.inspect.tasks, dag=dag, run_id=found.line.run_id)
        tasks = list(pages(of_run, None))
    record = fields(found.line, found.line.__struct_fields__)
    record |= {"data_interval_start": found.data_interval_start, "data_interval_end": found.data_interval_end}
    record["conf"] = payload(found.conf)
    record["events"] = [
        f"{id_} of {asset}{' (superseded)' if is_superseded else ''}" for id_, asset, is_superseded in found.events
    ]
    if as_json:
        whole = [fields(task, task.__struct_fields__) for task in tasks]
        print_record(record | {"task_list": whole}, as_json=True)
        return
    print_record(record, as_json=False)
    print()
    print_rows((fields(task, _TASKS_SHOWN) for task in tasks), _TASKS_SHOWN, as_json=False)


@app.command()
def cancel(ctx: typer.Context, dag: DagArgument, run: RunArgument) -> None:
    """End a run and all of its tasks that have not ended, as failed; what runs or waits is ended with on_kill()."""
    with invocation(ctx).store() as store:
        line = store.inspect.run(dag, run).line
        if line.ended_at is not None:
            raise CommandError(f"the run {line.run_id} of {dag} has ended already: {line.state}")
        tasks = 0

        def ask() -> bool:
            nonlocal tasks
            cancelled = store.tasks.cancel_run(line.id)
            tasks += cancelled.tasks
            return cancelled.is_ended or store.inspect.run(dag, line.run_id).line.ended_at is not None

        until_free(ask, bool, f"the run {line.run_id}")
    print(f"cancelled run {line.run_id} of {dag}: {tasks:,} unfinished tasks have ended as failed")
