"""``headgate streams``: shared streams, who reads and runs them, and who holds them up."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headgate.cli.commands.why import liveness_here
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import (
    ROWS_LISTED,
    AllOption,
    JsonOption,
    RowsOption,
    WideOption,
    print_json_lines,
    print_pages,
    print_record,
)
from headgate.cli.tables import Column, fields, print_block, print_fields, print_table
from headgate.presentation.drift import finding_text, position_text
from headgate.presentation.moments import age
from headgate.presentation.streams import hold_text, lag_text

if TYPE_CHECKING:
    from headgate.store.facts.drift import StreamDrift
    from headgate.store.inspect.streams import LiveStream, StreamLine
    from headgate.store.inspect.why_facts import Liveness
    from headgate.store.store import Store

CANNOT_BE_TOLD = 3  # the exit code: nothing was found, but a stream could not be judged
DRIFT_WAIT_S = 30.0  # a runner waits for a broker for 20 s
LOOK_INTERVAL_S = 0.1

app = typer.Typer(help="Shared streams: who reads each, who runs it, and who holds it up.", no_args_is_help=True)


_SHOWN: tuple[Column, ...] = (
    *("id", "name", "queue", "triggerer_id", "subscribers"),
    ("missing", lambda line: line.missing or None),
    ("lag", lambda line: lag_text(line.live)),
    ("in flight", lambda line: None if line.live is None else line.live.in_flight or None),
    ("held by", lambda line: line.unreadable if line.live is None else hold_text(line.live)),
    *("stored_at", "last_error"),
)
_SUBSCRIBERS_SHOWN: tuple[Column, ...] = (
    *("trigger_id", "name"),
    ("the stream waits for it", lambda line: line.missing),
    *("hold", "stored_at"),
    ("open letters", lambda line: line.open_letters or None),
    ("failures", lambda line: line.failure_count or None),
)


_LANES_SHOWN: tuple[Column, ...] = (
    *("lane", "verdict"),
    *((name, lambda lane, name=name: position_text(lane[name])) for name in ("committed", "advanced", "end")),
    *("lag", ("dropped", lambda lane: lane["missing"] or None)),
    ("oldest unresolved", lambda lane: lane["oldest_key"]),
    ("since", lambda lane: None if lane["oldest_at"] is None else _moment(lane["oldest_at"])),
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


@app.command()
def drift(
    ctx: typer.Context,
    stream: Annotated[
        str | None,
        typer.Argument(metavar="[STREAM]", help="Its id, or the name of a watcher. Without it: all streams."),
    ] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Forget what was found of STREAM, and ask again.")] = False,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for the brokers' answers.")
    ] = DRIFT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Ask the brokers of streams whether they are where headgate has left them.

    The supervisors that run the streams ask them. The exit code is 0 if all are, 1 if one went back, so that messages
    come again, 2 if others have moved it or it lost messages before they were read, and 3 if none of this was found but
    one could not be judged. Without STREAM, streams whose brokers have no positions are left out of that.
    """
    call = invocation(ctx)
    if accept and stream is None:
        raise CommandError("--accept needs the STREAM of which something is accepted", exit_code=2)
    with call.store() as store:
        liveness = liveness_here(call.settings().lease_silence_max_s)
        if stream is None:
            lines = _all_streams(store, liveness)
        else:
            lines = [store.inspect.stream(store.inspect.find_stream(stream), liveness=liveness)[0]]
        accepted = store.ask_drift([line.id for line in lines], accepts=accept)
        if accept and not as_json:
            print(f"accepted: {'; '.join(map(finding_text, accepted)) or 'nothing was found'}\n")
        known = _answers(store, [line.id for line in lines if line.triggerer_id is not None], wait)
        records = [_drift_record(line, known.get(line.id), store.inspect.newest_key(line.id)) for line in lines]
    if as_json:
        print_json_lines(msgspec.to_builtins(record, builtin_types=(datetime,)) for record in records)
    else:
        for number, record in enumerate(records):
            _print_drift(record, is_first=number == 0)
    raise typer.Exit(drift_exit_code(records, is_named=stream is not None))


def drift_exit_code(records: Sequence[Mapping[str, Any]], *, is_named: bool) -> int:
    """Return the exit code by the verdicts on streams, or on the one that ``is_named``."""
    from headgate.protocol.messages.runner import CANNOT_TELL
    from headgate.scheduling.drift import LEVELS

    code = max([0, *(LEVELS[record["verdict"]] - 1 for record in records)])
    untold = [record for record in records if record["verdict"] == "cannot be told"]
    if not is_named:
        untold = [record for record in untold if record["error"] != CANNOT_TELL]
    return code or (CANNOT_BE_TOLD if untold else 0)


def _all_streams(store: Store, liveness: Liveness) -> list[StreamLine]:
    lines: list[StreamLine] = []
    while page := store.inspect.streams(beyond_id=lines[-1].id if lines else 0, liveness=liveness):
        lines += page
    return lines


def _answers(store: Store, stream_ids: Sequence[int], wait_s: float) -> dict[int, StreamDrift]:
    """Wait until the brokers of these streams have answered, for so many seconds at most; return what is known."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and store.inspect.is_drift_asked(stream_ids):
        time.sleep(LOOK_INTERVAL_S)
    return store.inspect.drift(stream_ids)


def _drift_record(line: StreamLine, known: StreamDrift | None, newest_key: str | None) -> dict[str, Any]:
    """Return what is known of the drift of a stream; what was found before counts also if nobody has answered now."""
    from headgate.scheduling.drift import worst

    record: dict[str, Any] = {"stream": line.id, "name": line.name, "verdict": "cannot be told"}
    record |= {"newest_stored_key": newest_key, "answered_at": None, "error": None, "found": [], "lanes": []}
    if known is not None:
        record["found"] = list(known.found)
    if line.triggerer_id is None:
        record["error"] = "no supervisor runs it"
    elif known is None or known.asked_at is not None:
        record["error"] = "its supervisor has not answered yet"
    elif known.report is not None:
        report = known.report
        lanes = [msgspec.structs.asdict(lane) for lane in report.lanes]
        if report.lanes_in_all > len(lanes):
            record["error"] = f"only {len(lanes):,} of {report.lanes_in_all:,} lanes are told"
        record |= {"verdict": report.verdict, "answered_at": known.answered_at, "lanes": lanes}
        record["error"] = report.error or record["error"]
    record["verdict"] = worst([record["verdict"], *(finding.verdict for finding in record["found"])])
    return record


def _print_drift(record: Mapping[str, Any], *, is_first: bool) -> None:
    if not is_first:
        print()
    print_fields({name: record[name] for name in ("stream", "name", "verdict", "newest_stored_key", "error")})
    for finding in record["found"]:
        print(f"found {age(_moment(finding.at))}: {finding_text(finding)}")
    if record["lanes"]:
        print_table(record["lanes"], _LANES_SHOWN)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _live_fields(live: LiveStream) -> dict[str, Any]:
    return {
        "lag": lag_text(live),
        "in_flight": live.in_flight,
        "queued": live.queued,
        "lanes": live.lanes,
        "subscribers": f"{live.online} online" + (f", {live.absent} absent" if live.absent else ""),
        "held_by": hold_text(live),
        "oldest_in_flight": live.oldest_at,
        "advanced": f"{live.acked:,} accepted, {live.failed:,} failed, {live.rejected:,} rejected",
        "opened_anew": live.ended,
        "ended_at": live.ended_at,
        "ended_by": live.ended_by,
    }
