"""``headgate dags``: which DAGs there are, what they are made of, and how they are started and stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from headgate.cli.asking import AllOption, DagArgument, RowsOption, json_object, moment
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.output import JsonOption, fields, print_block, print_record, print_rows
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.values import encode_value

app = typer.Typer(help="DAGs, as their files say.", no_args_is_help=True)

DAGS_LISTED = 1000  # where the user does not say: all, in nearly every installation

_SHOWN = (
    *("name", "schedule", "is_paused", "tasks", "active_runs", "queued_runs", "waiting_events", "next_run_at"),
    *("last_run", "last_run_state", "file"),
)
_TASK_COLUMNS = (
    *("task_id", "operator", "upstream", "trigger_rule", "retries", "execution_timeout_s"),
    *("queue", "pool", "pool_slots", "priority_weight"),
)


@app.command("list")
def list_dags(
    ctx: typer.Context,
    paused: Annotated[bool | None, typer.Option("--paused/--active", help="Only those that are.")] = None,
    limit: RowsOption = DAGS_LISTED,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the DAGs by name, and the files that cannot be parsed, with the traceback."""
    from headgate.store.inspect.inspecting import LIST_DAGS_MAX, DagLine

    with invocation(ctx).store() as store:
        lines = store.inspect.dags(is_paused=paused, limit=LIST_DAGS_MAX if everything else limit)
    columns = DagLine.__struct_fields__ if as_json else _SHOWN
    known = [line for line in lines if as_json or line.name is not None]
    if known or as_json:
        print_rows((fields(line, columns) for line in known), columns, as_json=as_json)
    else:
        print("none")
    if as_json:
        return
    for file, error in sorted({line.file: line.import_error for line in lines if line.import_error}.items()):
        print(f"\ncannot be parsed: {file}")
        print_block(error)


@app.command()
def show(ctx: typer.Context, dag: DagArgument, as_json: JsonOption = False) -> None:
    """Show a DAG and its tasks."""
    with invocation(ctx).store() as store:
        line, spec = store.inspect.dag(dag)
    record = fields(line, line.__struct_fields__)
    error = record.pop("import_error")
    record |= {
        "description": spec.description,
        "tags": spec.tags,
        "catchup": spec.catchup,
        "max_active_runs": spec.max_active_runs,
    }
    tasks = [fields(task, _TASK_COLUMNS) for task in spec.tasks]
    if as_json:
        print_record(record | {"import_error": error, "task_list": tasks}, as_json=True)
        return
    print_record(record, as_json=False)
    print()
    print_rows(tasks, _TASK_COLUMNS, as_json=False)
    if error:
        print("\nits file cannot be parsed now; the DAG is as the file said before:")
        print_block(error)


@app.command()
def trigger(
    ctx: typer.Context,
    dag: DagArgument,
    conf: Annotated[
        str, typer.Option(metavar="JSON", help="The run's parameters, a JSON object; tags as in `watchers add`.")
    ] = "{}",
    run_id: Annotated[
        str | None, typer.Option(metavar="ID", help="A name of your choice; else manual__ and the time.")
    ] = None,
    logical_date: Annotated[
        str | None, typer.Option(metavar="WHEN", help="The moment the run is about, in ISO 8601; UTC without a zone.")
    ] = None,
) -> None:
    """Begin a run of a DAG."""
    about = None if logical_date is None else moment(logical_date, "--logical-date")
    values = json_object(conf, "--conf")
    encoded = encode_value(values, where="conf", bytes_max=KWARGS_BYTES_MAX)
    with invocation(ctx).store() as store:
        line, _ = store.inspect.dag(dag)
        name = run_id or f"manual__{store.inspect.now().isoformat()}"
        if store.tasks.create_run(dag, name, logical_date=about, conf=encoded if values else None) is None:
            raise CommandError(f"the DAG {dag} has a run named {name!r} already")
    print(f"created run {name} of {dag}")
    if line.is_paused:
        print(f"the DAG is paused: the run waits for `headgate dags unpause {dag}`")


@app.command()
def pause(ctx: typer.Context, dag: DagArgument) -> None:
    """Have no more tasks of a DAG begin, nor runs by its schedule; what runs goes on."""
    _set_paused(ctx, dag, is_paused=True)


@app.command()
def unpause(ctx: typer.Context, dag: DagArgument) -> None:
    """Have a paused DAG go on."""
    _set_paused(ctx, dag, is_paused=False)


def _set_paused(ctx: typer.Context, dag: str, *, is_paused: bool) -> None:
    with invocation(ctx).store() as store:
        line, _ = store.inspect.dag(dag)
        store.tasks.set_paused(dag, is_paused=is_paused)
    done = "paused" if is_paused else "unpaused"
    print(f"{dag} was {done} already" if line.is_paused == is_paused else f"{done} {dag}")
