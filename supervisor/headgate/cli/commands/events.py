"""``headgate events|triggerers list``: stored events and supervisors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.commands.why import liveness_here
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import ID_MAX, JsonOption, LimitOption, WideOption, print_json_lines, print_structs
from headgate.cli.options import since
from headgate.cli.output import payload
from headgate.cli.tables import ROWS_SHOWN_MAX, Column, fields, print_table

if TYPE_CHECKING:
    from headgate.store.inspect.event_log import EventRow

triggerers_app = typer.Typer(help="Supervisors that run triggers, now or in the past.", no_args_is_help=True)
events_app = typer.Typer(help="The event log.", no_args_is_help=True)

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
_TRIGGERERS_SHOWN: tuple[Column, ...] = (
    ("epoch", lambda lease: lease.id),
    *("state", "hostname", "pid", "started_at"),
    ("heartbeat", lambda lease: lease.latest_heartbeat),
    ("ended", lambda lease: lease.stopped_at or lease.fenced_at),
    *("capacity", "triggers", "workers", "tasks", "queues"),
    ("runner", lambda lease: lease.runner_told()),
)


@events_app.command("list")
def list_events(
    ctx: typer.Context,
    watcher: Annotated[str | None, typer.Option(metavar="NAME", help="Only events of this watcher.")] = None,
    newest: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=ROWS_SHOWN_MAX, help="The newest N events.")
    ] = None,
    after: Annotated[
        int | None, typer.Option(metavar="ID", min=0, max=ID_MAX, help="Only events with greater ids.")
    ] = None,
    since_text: Annotated[
        str | None, typer.Option("--since", metavar="WHEN", help="Only events stored since: 2h, 3d, or a time.")
    ] = None,
    limit: LimitOption = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List stored events, the oldest first."""
    if newest is not None and (after, since_text, limit) != (None, None, None):
        raise CommandError("--newest goes with none of --after, --since and --limit", exit_code=2)
    # A table asks for one row more than it shows, so that it can say that there are more.
    rows_max = limit if as_json else min(limit or ROWS_SHOWN_MAX + 1, ROWS_SHOWN_MAX + 1)
    with invocation(ctx).store() as store:
        events: Iterable[EventRow]
        if newest is not None:
            events = store.inspect.newest_events(watcher=watcher, limit=newest)
        else:
            moment = since(since_text, store.inspect.now)
            events = store.inspect.events(watcher=watcher, limit=rows_max, after_id=after or 0, since=moment)
        rows = (fields(event, EVENT_COLUMNS) | {"payload": payload(event.payload)} for event in events)
        if as_json:
            print_json_lines(rows)
        else:
            print_table(rows, EVENT_COLUMNS if wide else _EVENTS_SHOWN, wide=wide)


@triggerers_app.command("list")
def list_triggerers(
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Also those that ended more than a day ago.")] = False,
    limit: LimitOption = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the supervisors, the newest first: their states and heartbeats, and how many triggers and tasks each has."""
    call = invocation(ctx)
    liveness = liveness_here(call.settings().lease_silence_max_s)
    at_most = {} if limit is None else {"limit": limit}
    with call.store() as store:
        leases = store.inspect.triggerers(**at_most, with_past=everything, liveness=liveness)
    print_structs(leases, _TRIGGERERS_SHOWN, as_json=as_json, wide=wide)
