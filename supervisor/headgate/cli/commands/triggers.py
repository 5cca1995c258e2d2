"""``headgate triggers``: triggers, the supervisors that run them, and their failures."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.invocation import invocation
from headgate.cli.lists import (
    ROWS_LISTED,
    AllOption,
    JsonOption,
    RowsOption,
    WideOption,
    print_pages,
    print_record,
    print_structs,
)
from headgate.cli.options import span_s
from headgate.cli.output import payload
from headgate.cli.tables import Column, fields, print_block, print_table
from headgate.scheduling.words import counted

if TYPE_CHECKING:
    from headgate.store.inspect.triggers import TriggerLine

app = typer.Typer(help="Triggers, with their failures.", no_args_is_help=True)

_SHOWN: tuple[Column, ...] = (
    "id",
    ("class", lambda trigger: trigger.classpath.rpartition(".")[2]),
    ("watcher or task", lambda trigger: _user_of(trigger)),
    *("triggerer_id", "created_date"),
    ("failures", lambda trigger: trigger.failure_count or None),
    *("hold", "last_error", "finished_at"),
)
RUNS_SHOWN = 10  # of a trigger; --json has all that are kept
_RUNS_SHOWN: tuple[Column, ...] = ("ended_at", "outcome", "events", "error")
_STRIKES_SHOWN: tuple[Column, ...] = (
    *("key", "strikes"),
    ("kills", lambda strike: strike.kills or None),
    ("passed over", lambda strike: strike.is_passed_over),
    *("last_at", "last_error"),
)


def _user_of(trigger: TriggerLine) -> str:
    return f"{trigger.dag} {trigger.run_id} {trigger.task}" if trigger.dag else trigger.name


@app.command("list")
def list_triggers(
    ctx: typer.Context,
    queue: Annotated[str | None, typer.Option(metavar="Q", help="Only those of this queue.")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="Also finished and removed ones.")] = False,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the triggers: the task or watcher of each, the supervisor that runs it, its failures and its last error."""
    from headgate.store.inspect.triggers import TriggerLine

    with invocation(ctx).store() as store:
        page = partial(store.inspect.triggers, with_ended=ended, queue=queue)
        print_pages(page, TriggerLine, limit=limit, everything=everything, as_json=as_json, wide=wide, shown=_SHOWN)


@app.command()
def show(
    ctx: typer.Context,
    trigger: Annotated[str, typer.Argument(metavar="TRIGGER", help="Its id, or the name of its watcher.")],
    kwargs: Annotated[bool, typer.Option("--kwargs", help="Also its arguments in clear, passwords included.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a trigger. Its events are counted up to 10,001."""
    from headgate.store.inspect.triggers import EVENTS_COUNTED_MAX

    with invocation(ctx).store() as store:
        detail = store.inspect.trigger(store.inspect.find_trigger(trigger))
        record = fields(detail.line, detail.line.__struct_fields__)
        record |= fields(detail, [name for name in detail.__struct_fields__ if name not in ("line", "strikes")])
        if kwargs:
            record["kwargs"] = payload(store.inspect.trigger_kwargs(detail.line.id))
        runs = store.inspect.trigger_runs(detail.line.id)
    error = record.pop("last_error")
    if detail.events == EVENTS_COUNTED_MAX and not as_json:
        record["events"] = f"more than {EVENTS_COUNTED_MAX - 1:,}"
    if as_json:
        print_record(record | {"last_error": error, "strikes": detail.strikes, "runs": runs}, as_json=True)
        return
    print_record(record, as_json=False)
    if detail.strikes:
        print("\nmessages that it has failed on:")
        print_table(detail.strikes, _STRIKES_SHOWN)
    if runs:
        print("\nits runs that have ended, the newest first:")
        print_table(runs[:RUNS_SHOWN], _RUNS_SHOWN)
    if error:
        print("\nlast error:")
        print_block(error)


@app.command()
def release(
    ctx: typer.Context,
    triggers: Annotated[list[str], typer.Argument(metavar="TRIGGER...", help="Ids, or names of watchers.")],
) -> None:
    """Start triggers again that are held: quarantined because they harmed others, stopped by the brake, or paused."""
    with invocation(ctx).store() as store:
        for name in triggers:
            hold = store.release_trigger(store.inspect.find_trigger(name))
            print(f"{name} is not held" if hold is None else f"released {name} (it was held: {hold})")


@app.command()
def orphans(
    ctx: typer.Context,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove them; a supervisor that runs one cancels it.")
    ] = False,
    limit: RowsOption = ROWS_LISTED,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the open triggers that neither a watcher nor a task has. A running scheduler removes them by itself."""
    with invocation(ctx).store() as store:
        if not remove:
            print_structs(store.inspect.orphans(limit=limit), _SHOWN, as_json=as_json, wide=wide)
            return
        removed = store.tasks.remove_orphans()
    ids = f": {', '.join(map(str, removed))}" if removed else ""
    print(f"removed {counted(len(removed), 'trigger')}{ids}")


@app.command()
def slow(
    ctx: typer.Context,
    longer_than: Annotated[str, typer.Option(metavar="SPAN", help="For how long, as in 90s, 30m, 1h30m, 7d.")] = "1h",
    limit: RowsOption = ROWS_LISTED,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the triggers that tasks have waited for longer than this, the oldest first."""
    seconds = span_s(longer_than, "--longer-than")
    with invocation(ctx).store() as store:
        slow = store.inspect.slow(longer_than_s=seconds, limit=limit)
        print_structs(slow, _SHOWN, as_json=as_json, wide=wide)
