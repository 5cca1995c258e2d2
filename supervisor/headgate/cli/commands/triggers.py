"""``headgate triggers``: which triggers there are, who runs them, and which of them something may be wrong with."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from headgate.cli.asking import ROWS_LISTED, AllOption, RowsOption, print_pages, span_s
from headgate.cli.invocation import invocation
from headgate.cli.output import JsonOption, fields, payload, print_block, print_record, print_structs

app = typer.Typer(help="Triggers, with their failures.", no_args_is_help=True)

_SHOWN = (
    *("id", "name", "dag", "run_id", "task_id", "classpath", "queue", "triggerer_id", "created_date"),
    *("failure_count", "last_error", "finished_at"),
)


@app.command("list")
def list_triggers(
    ctx: typer.Context,
    queue: Annotated[str | None, typer.Option(metavar="Q", help="Only those of this queue.")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="Finished and removed ones, too.")] = False,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the triggers, for whom and by whom they run, how often each has failed and why it did the last time."""
    from headgate.store.inspect.inspecting_triggers import TriggerLine

    with invocation(ctx).store() as store:
        page = partial(store.inspect.triggers, with_ended=ended, queue=queue)
        print_pages(page, TriggerLine, limit=limit, everything=everything, as_json=as_json, shown=_SHOWN)


@app.command()
def show(
    ctx: typer.Context,
    trigger: Annotated[str, typer.Argument(metavar="TRIGGER", help="Its id, or the name of its watcher.")],
    kwargs: Annotated[bool, typer.Option("--kwargs", help="Its arguments in clear, passwords included.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show all that is known of a trigger."""
    with invocation(ctx).store() as store:
        detail = store.inspect.trigger(store.inspect.find_trigger(trigger))
        record = fields(detail.line, detail.line.__struct_fields__)
        record |= fields(detail, [name for name in detail.__struct_fields__ if name != "line"])
        if kwargs:
            record["kwargs"] = payload(store.inspect.trigger_kwargs(detail.line.id))
    error = record.pop("last_error")
    if as_json:
        print_record(record | {"last_error": error}, as_json=True)
        return
    print_record(record, as_json=False)
    if error:
        print("\nlast error:")
        print_block(error)


@app.command()
def orphans(
    ctx: typer.Context,
    remove: Annotated[bool, typer.Option("--remove", help="Remove them; whoever runs one cancels it.")] = False,
    limit: RowsOption = ROWS_LISTED,
    as_json: JsonOption = False,
) -> None:
    """List the open triggers that neither a watcher nor a task has. A running scheduler removes them by itself."""
    with invocation(ctx).store() as store:
        if not remove:
            print_structs(store.inspect.orphans(limit=limit), as_json=as_json)
            return
        removed = store.tasks.remove_orphans()
    print(f"removed {len(removed):,} triggers" + (f": {', '.join(map(str, removed))}" if removed else ""))


@app.command()
def slow(
    ctx: typer.Context,
    longer_than: Annotated[str, typer.Option(metavar="SPAN", help="For how long, as in 90s, 30m, 1h30m, 7d.")] = "1h",
    limit: RowsOption = ROWS_LISTED,
    as_json: JsonOption = False,
) -> None:
    """List the triggers that tasks have waited for longer than this, the oldest first."""
    seconds = span_s(longer_than, "--longer-than")
    with invocation(ctx).store() as store:
        print_structs(store.inspect.slow(longer_than_s=seconds, limit=limit), as_json=as_json)
