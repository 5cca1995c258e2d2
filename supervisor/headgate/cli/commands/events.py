"""``headgate events|triggerers|dlq list``: what stands in the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import typer

from headgate.cli.invocation import invocation
from headgate.cli.output import ROWS_SHOWN_MAX, JsonOption, LimitOption, fields, payload, print_rows, print_structs

triggerers_app = typer.Typer(help="Supervisors that run triggers, now or in the past.", no_args_is_help=True)
events_app = typer.Typer(help="The event log.", no_args_is_help=True)
dead_letters_app = typer.Typer(help="Events that could not be stored.", no_args_is_help=True)

_Row = TypeVar("_Row")

# Other programs read these; fields may be added at the end, never renamed.
EVENT_COLUMNS = (
    "id",
    "watcher",
    "trigger_id",
    "trigger_run_id",
    "sequence_index",
    "key",
    "payload",
    "is_last",
    "stored_at",
    "redelivered",
)


@events_app.command("list")
def list_events(
    ctx: typer.Context,
    watcher: Annotated[str | None, typer.Option(metavar="NAME", help="Only events of this watcher.")] = None,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """List stored events, the oldest first."""
    with invocation(ctx).store() as store:
        events = store.list_events(watcher=watcher, limit=limit if as_json else _rows_of_table(limit))
        rows = (fields(event, EVENT_COLUMNS) | {"payload": payload(event.payload)} for event in events)
        print_rows(rows, EVENT_COLUMNS, as_json=as_json)


@dead_letters_app.command("list")
def list_dead_letters(ctx: typer.Context, limit: LimitOption = None, as_json: JsonOption = False) -> None:
    """List the dead letters, the newest first: events the database or the runner refused, and why."""
    with invocation(ctx).store() as store:
        print_structs(_bounded(store.list_dead_letters, limit), as_json=as_json, payload_columns=("payload_head",))


@triggerers_app.command("list")
def list_triggerers(ctx: typer.Context, limit: LimitOption = None, as_json: JsonOption = False) -> None:
    """List the supervisors that have registered, the newest first: their latest heartbeats, and what each runs now."""
    with invocation(ctx).store() as store:
        print_structs(_bounded(store.list_triggerers, limit), as_json=as_json)


def _rows_of_table(limit: int | None) -> int:
    """Return how many rows to ask for: one more than a table shows, so that it can say that there are more."""
    return min(limit or ROWS_SHOWN_MAX + 1, ROWS_SHOWN_MAX + 1)


def _bounded(verb: Callable[..., Sequence[_Row]], limit: int | None) -> Sequence[_Row]:
    """Call a list verb with the limit that was given, else with its own."""
    return verb() if limit is None else verb(limit)
