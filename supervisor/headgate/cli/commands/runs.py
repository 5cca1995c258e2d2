"""``headgate runs``: runs of DAGs."""

from __future__ import annotations

import enum
from functools import partial
from typing import Annotated

import typer

from headgate.cli.invocation import CommandError, Step, invocation, repeat_until_done
from headgate.cli.lists import (
    ROWS_LISTED,
    AllOption,
    JsonOption,
    RowsOption,
    WideOption,
    pages,
    print_pages,
    print_record,
)
from headgate.cli.options import DagArgument, RunArgument, SinceOption, since
from headgate.cli.output import payload
from headgate.cli.progress import ProgressShown
from headgate.cli.tables import Column, fields, print_table
from headgate.cli.task_lines import TASK_COLUMNS
from headgate.presentation.moments import duration

app = typer.Typer(help="Runs of DAGs.", no_args_is_help=True)

_TOOK: Column = ("took", lambda row: duration(row.started_at, row.ended_at))
_SHOWN: tuple[Column, ...] = (
    "dag",
    "run_id",
    "state",
    "created_date",
    _TOOK,
    ("tasks", lambda run: _counts(run.tasks)),
)


def _counts(tasks: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in tasks.items())


class RunState(enum.StrEnum):
    """The states of a run."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"


@app.command("list")
def list_runs(
    ctx: typer.Context,
    dag: Annotated[str | None, typer.Argument(metavar="DAG", help="Only runs of this DAG.")] = None,
    dag_option: Annotated[
        str | None, typer.Option("--dag", metavar="DAG", help="The same, as other lists have it.")
    ] = None,
    state: Annotated[
        list[RunState] | None, typer.Option(metavar="STATE", help="Only those in this state; may be repeated.")
    ] = None,
    since_text: SinceOption = None,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List runs, the newest first."""
    from headgate.store.inspect.runs import RunLine

    if dag is not None and dag_option is not None:
        raise CommandError(f"name the DAG once: {dag}, or --dag {dag_option}", exit_code=2)
    dag = dag_option if dag is None else dag
    with invocation(ctx).store() as store:
        states = [one.value for one in state or ()]
        page = partial(store.inspect.runs, dag=dag, states=states, since=since(since_text, store.inspect.now))
        print_pages(page, RunLine, limit=limit, everything=everything, as_json=as_json, wide=wide, shown=_SHOWN)


@app.command()
def show(ctx: typer.Context, dag: DagArgument, run: RunArgument, as_json: JsonOption = False) -> None:
    """Show a run and its tasks."""
    with invocation(ctx).store() as store:
        found = store.inspect.run(dag, run)
        of_run = partial(store.inspect.tasks, dag=dag, run_id=found.line.run_id)
        tasks = list(pages(of_run, None))
        signals = store.inspect.run_signals(found.line.id)
        ends = store.inspect.run_end_rules(found.line.id)
    record = fields(found.line, found.line.__struct_fields__)
    record |= {"data_interval_start": found.data_interval_start, "data_interval_end": found.data_interval_end}
    record["conf"] = payload(found.conf)
    record["events"] = [
        f"{id_} of {asset}{' (superseded)' if is_superseded else ''}" for id_, asset, is_superseded in found.events
    ]
    record["signals"] = [
        f"version {version} of {key}{' (superseded)' if is_superseded else ''}"
        for _, key, version, is_superseded in signals
    ]
    record["end_on"] = [str(rule) for rule in ends]
    if as_json:
        whole = [fields(task, task.__struct_fields__) for task in tasks]
        print_record(record | {"task_list": whole}, as_json=True)
        return
    print_record(record | {"tasks": _counts(found.line.tasks)}, as_json=False)
    print()
    print_table(tasks, TASK_COLUMNS)


@app.command()
def cancel(ctx: typer.Context, dag: DagArgument, run: RunArgument) -> None:
    """End a run and its unfinished tasks as failed; tasks that run or are deferred are ended with on_kill()."""
    from headgate.scheduling.states import UNFINISHED

    with invocation(ctx).store() as store:
        line = store.inspect.run(dag, run).line
        if line.ended_at is not None:
            raise CommandError(f"the run {line.run_id} of {dag} has ended already: {line.state}")
        is_kept_open = store.inspect.is_kept_open(line.id)
        tasks = 0
        with ProgressShown("ended", "tasks", sum(line.tasks.get(state, 0) for state in UNFINISHED)) as progress:

            def cancel_some() -> Step:
                nonlocal tasks
                ended = store.tasks.cancel_run(line.id)
                tasks += ended.tasks
                progress.update(tasks)
                if ended.is_ended:
                    return "done"
                if ended.tasks and not ended.is_busy:
                    return "more"
                return "busy" if store.inspect.run(dag, line.run_id).line.ended_at is None else "done"

            repeat_until_done(cancel_some, f"the run {line.run_id}")
        state = store.inspect.run(dag, run).line.state
    if state != "failed":
        raise CommandError(f"the run {line.run_id} of {dag} has ended by itself: {state}")
    ended = "1 unfinished task has" if tasks == 1 else f"{tasks:,} unfinished tasks have"
    print(f"cancelled run {line.run_id} of {dag}: {ended} ended as failed")
    if is_kept_open and not tasks:
        print("only signals kept it open: `headgate runs end` ends such a run in the state that its tasks give it")


@app.command()
def end(ctx: typer.Context, dag: DagArgument, run: RunArgument) -> None:
    """Have signals start nothing more in a run; it ends when what is under way has ended."""
    with invocation(ctx).store() as store:
        line = store.inspect.run(dag, run).line
        if not store.signals.end_run(line.id):
            raise CommandError(f"the run {line.run_id} of {dag} has ended already: {line.state}")
    print(f"run {line.run_id} of {dag} is to end: signals start nothing of it any more")
