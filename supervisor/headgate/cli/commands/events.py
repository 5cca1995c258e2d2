"""``headgate events|triggerers list`` and ``dlq``: stored events, supervisors and dead letters."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, LimitOption, WideOption, print_json_lines, print_record, print_structs
from headgate.cli.output import json_line, payload
from headgate.cli.tables import ROWS_SHOWN_MAX, Column, error_line, fields, print_block, print_table

triggerers_app = typer.Typer(help="Supervisors that run triggers, now or in the past.", no_args_is_help=True)
events_app = typer.Typer(help="The event log.", no_args_is_help=True)
dead_letters_app = typer.Typer(
    help="Events that could not be stored, and messages that triggers could not take.", no_args_is_help=True
)

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


_EVENTS_SHOWN = ("id", "watcher", "trigger_id", "key", "stored_at", "payload")
_DEAD_LETTERS_SHOWN: tuple[Column, ...] = (
    *("id", "watcher", "content"),
    ("kind", lambda letter: letter.kind if letter.kind != "event" else None),
    *("key", "deliveries", "stored_at"),
    ("bytes", lambda letter: letter.payload_bytes),
    ("whole", lambda letter: letter.payload_kept),
    ("last_error", lambda letter: error_line(letter.reason)),
)
_TRIGGERERS_SHOWN: tuple[Column, ...] = (
    ("epoch", lambda lease: lease.id),
    *("hostname", "pid", "started_at"),
    ("heartbeat", lambda lease: lease.latest_heartbeat),
    ("ended", lambda lease: lease.stopped_at or lease.fenced_at),
    *("capacity", "triggers", "workers", "tasks", "queues"),
)


@events_app.command("list")
def list_events(
    ctx: typer.Context,
    watcher: Annotated[str | None, typer.Option(metavar="NAME", help="Only events of this watcher.")] = None,
    limit: LimitOption = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List stored events, the oldest first."""
    # A table asks for one row more than it shows, so that it can say that there are more.
    rows_max = limit if as_json else min(limit or ROWS_SHOWN_MAX + 1, ROWS_SHOWN_MAX + 1)
    with invocation(ctx).store() as store:
        events = store.inspect.events(watcher=watcher, limit=rows_max)
        rows = (fields(event, EVENT_COLUMNS) | {"payload": payload(event.payload)} for event in events)
        if as_json:
            print_json_lines(rows)
        else:
            print_table(rows, EVENT_COLUMNS if wide else _EVENTS_SHOWN, wide=wide)


@dead_letters_app.command("list")
def list_dead_letters(
    ctx: typer.Context, limit: LimitOption = None, wide: WideOption = False, as_json: JsonOption = False
) -> None:
    """List the dead letters, the newest first: what the database, the runner or a trigger could not take, and why."""
    with invocation(ctx).store() as store:
        letters = store.inspect.dead_letters() if limit is None else store.inspect.dead_letters(limit)
    print_structs(letters, _DEAD_LETTERS_SHOWN, as_json=as_json, wide=wide, payload_columns=("payload_head",))


@dead_letters_app.command("show")
def show_dead_letter(
    ctx: typer.Context,
    letter: Annotated[int, typer.Argument(metavar="ID", min=1, help="Its id, as `dlq list` prints it.")],
    raw: Annotated[bool, typer.Option("--raw", help="Print only the payload, as the bytes that were stored.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a dead letter: where it comes from, its error, and its payload as far as it is kept."""
    with invocation(ctx).store() as store:
        found = store.inspect.dead_letter(letter)
    row = found.row
    if raw:
        if found.payload is None:
            head, whole = len(row.payload_head), row.payload_bytes
            raise CommandError(f"dead letter {letter} has only the first {head:,} of {whole:,} bytes of its payload")
        sys.stdout.buffer.write(found.payload)
        return
    record = fields(row, [name for name in row.__struct_fields__ if name not in ("reason", "payload_head")])
    content = payload(row.payload_head if found.payload is None else found.payload)
    if as_json:
        more = {"reason": row.reason, "traceback": found.traceback}
        print_record(record | more | {"payload": content}, as_json=True)
        return
    print_record(record | {"error": error_line(row.reason)}, as_json=False)
    if found.traceback or row.reason != error_line(row.reason):
        print("\ntraceback:" if found.traceback else "\nwhole error:")
        print_block(found.traceback or row.reason)
    if found.payload is not None:
        print("\npayload:")
        print_block(json_line(content))
    elif row.payload_head:
        print(f"\nthe first {len(row.payload_head):,} bytes of its payload:")
        print_block(content if isinstance(content, str) else json_line(content))


@triggerers_app.command("list")
def list_triggerers(
    ctx: typer.Context, limit: LimitOption = None, wide: WideOption = False, as_json: JsonOption = False
) -> None:
    """List the supervisors, the newest first: their latest heartbeats, and how many triggers and tasks each has."""
    with invocation(ctx).store() as store:
        leases = store.inspect.triggerers() if limit is None else store.inspect.triggerers(limit)
    print_structs(leases, _TRIGGERERS_SHOWN, as_json=as_json, wide=wide)
