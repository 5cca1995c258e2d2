"""``headgate frames``: what supervisor and runner said to each other, from a capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.invocation import CommandError
from headgate.cli.output import JsonOption, LimitOption, json_line

if TYPE_CHECKING:
    from headgate.protocol.framelog import Damaged, Record, Torn

app = typer.Typer(help="Captures of the link between supervisor and runner.", no_args_is_help=True)

FILE_PATTERN = "*.hgframe"

PathArgument = Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A frame log, or a folder of them.")]


@app.command()
def show(ctx: typer.Context, path: PathArgument, limit: LimitOption = None, as_json: JsonOption = False) -> None:
    """Print the frames, one a line. Kwargs of triggers are masked in every capture."""
    shown = 0
    for file, record in _records(path):
        if limit is not None and shown == limit:
            return
        shown += 1
        print(_frame_as_json(file, record) if as_json else _frame_as_text(file, record))


@app.command()
def verify(path: PathArgument, as_json: JsonOption = False) -> None:
    """Check the CRC of every frame and the order of the conversation; exit with 1 if anything is wrong.

    A torn last record, which a crash while writing leaves behind, is reported and is no error.
    """
    from headgate.protocol.framelog import verify as verify_file

    ok = True
    for file in frame_logs(path):
        verification = verify_file(file)
        ok = ok and verification.ok
        if as_json:
            print(json_line(dataclasses.asdict(verification) | {"ok": verification.ok}))
            continue
        left_off = verification.findings_left_off
        incarnations = ", ".join(map(str, verification.incarnations)) or "none"
        print(
            f"{file}: {verification.frames:,} frames, incarnations {incarnations}: {'ok' if verification.ok else 'BAD'}"
        )
        for finding in verification.findings:
            print(f"  {finding.severity} at offset {finding.offset:,}: {finding.problem}")
        if left_off:
            print(f"  and {left_off:,} more")
    if not ok:
        raise typer.Exit(1)


def frame_logs(path: Path) -> list[Path]:
    """Return the file, or the frame logs of the folder in the order they were written. Raises `CommandError`."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(FILE_PATTERN))
    if not files:
        raise CommandError(f"there is no frame log ({FILE_PATTERN}) in {path}")
    return files


def _records(path: Path) -> Iterator[tuple[Path, Record | Torn | Damaged]]:
    from headgate.protocol.framelog import read_frames

    for file in frame_logs(path):
        for record in read_frames(file):
            yield file, record


def _frame_as_text(file: Path, record: Record | Torn | Damaged) -> str:
    from headgate.protocol.framelog import Damaged, Torn, describe

    match record:
        case Torn():
            return f"{file.name}: the last record is torn: {record.torn_bytes} bytes at offset {record.offset}"
        case Damaged():
            return f"{file.name}: damaged at offset {record.offset}: {record.problem}"
        case _:
            return describe(record)


def _frame_as_json(file: Path, record: Record | Torn | Damaged) -> str:
    from headgate.protocol.framelog import Damaged, Torn, describe

    place = {"file": str(file), "offset": record.offset}
    match record:
        case Torn():
            return json_line(place | {"torn_bytes": record.torn_bytes})
        case Damaged():
            return json_line(place | {"damaged": record.problem})
        case _:
            return json_line(
                place
                | {
                    "time": record.time,
                    "direction": record.direction.name.lower(),
                    "incarnation": record.incarnation,
                    "body_bytes": len(record.body),
                    "text": describe(record),
                }
            )
