"""``headgate streams``: shared streams, who reads and runs them, and who holds them up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headgate.cli.commands.why import liveness_here
from headgate.cli.invocation import invocation
from headgate.cli.lists import ROWS_LISTED, AllOption, JsonOption, RowsOption, WideOption, print_pages, print_record
from headgate.cli.tables import Column, fields, print_block, print_fields, print_table
from headgate.presentation.moments import age
from headgate.presentation.streams import hold_text, lag_text

if TYPE_CHECKING:
    from headgate.store.inspect.streams import LiveStream

app = typer.Typer(help="Shared streams: who reads each, who runs it, and who holds it up.", no_args_is_help=True)


def lag_of(live: LiveStream) -> str | None:
    """Return how far a stream is behind; None if that is not known."""
    return lag_text(live.lag, live.lag_unit)


def hold_of(live: LiveStream) -> str | None:
    """Return why a stream pulls nothing, for whom, and since when; None if it does."""
    return hold_text(live.held, live.held_since, live.held_by)


_SHOWN: tuple[Column, ...] = (
    *("id", "name", "queue", "triggerer_id", "subscribers"),
    ("missing", lambda line: line.missing or None),
    ("lag", lambda line: None if line.live is None else lag_of(line.live)),
    ("in flight", lambda line: None if line.live is None else line.live.in_flight or None),
    ("held by", lambda line: line.unreadable if line.live is None else hold_of(line.live)),
    *("stored_at", "last_error"),
)
_SUBSCRIBERS_SHOWN: tuple[Column, ...] = (
    *("trigger_id", "name"),
    ("the stream waits for it", lambda line: line.missing),
    *("hold", "stored_at"),
    ("open letters", lambda line: line.open_letters or None),
    ("failures", lambda line: line.failure_count or None),
)


@app.command("list")
def list_streams(
    ctx: typer.Context,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the streams that triggers read: the supervisor of each, its subscribers, and how many it waits for."""
    from headgate.store.inspect.streams import StreamLine

    call = invocation(ctx)
    with call.store() as store:
        page = partial(store.inspect.streams, liveness=liveness_here(call.settings().lease_silence_max_s))
        print_pages(page, StreamLine, limit=limit, everything=everything, as_json=as_json, wide=wide, shown=_SHOWN)


@app.command()
def show(
    ctx: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="Its id, or the name of a watcher that reads it.")],
    as_json: JsonOption = False,
) -> None:
    """Show a stream, its subscribers, and for which of them it waits."""
    call = invocation(ctx)
    liveness = liveness_here(call.settings().lease_silence_max_s)
    with call.store() as store:
        line, subscribers = store.inspect.stream(store.inspect.find_stream(stream), liveness=liveness)
    record = fields(line, line.__struct_fields__)
    if as_json:
        print_record(record | {"readers": [msgspec.structs.asdict(each) for each in subscribers]}, as_json=True)
        return
    error, live, unreadable = record.pop("last_error"), record.pop("live"), record.pop("unreadable")
    print_record(record, as_json=False)
    if live is not None:
        print(f"\nas its supervisor said {age(live.as_of)}:")
        print_fields(_live_fields(live))
    if unreadable:
        print(f"\n{unreadable}")
    if subscribers:
        print("\nsubscribers:")
        print_table(subscribers, _SUBSCRIBERS_SHOWN)
    if error:
        print("\nlast error:")
        print_block(error)


def _live_fields(live: LiveStream) -> dict[str, Any]:
    return {
        "lag": lag_of(live),
        "in_flight": live.in_flight,
        "queued": live.queued,
        "lanes": live.lanes,
        "subscribers": f"{live.online} online" + (f", {live.absent} absent" if live.absent else ""),
        "held_by": hold_of(live),
        "oldest_in_flight": live.oldest_at,
        "advanced": f"{live.acked:,} accepted, {live.failed:,} failed, {live.rejected:,} rejected",
        "opened_anew": live.ended,
        "ended_at": live.ended_at,
        "ended_by": live.ended_by,
    }
