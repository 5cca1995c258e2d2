"""``headgate frames``: the messages between supervisor and runner, from a capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headgate.cli.invocation import CommandError, Invocation, invocation
from headgate.cli.lists import JsonOption, LimitOption
from headgate.cli.output import json_line
from headgate.cli.progress import ProgressShown
from headgate.scheduling.words import counted

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from headgate.protocol.framelog.log import Damaged, Record, Torn
    from headgate.store.db.secrets import Secrets
    from headgate.supervisor.replay.run import Replayed

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
    from headgate.protocol.framelog.log import verify as verify_file

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


@app.command()
def replay(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A frame log, or the folder of a capture.")],
    until: Annotated[
        int | None, typer.Option("--until", min=1, metavar="N", help="Stop after frame N, to look at the database.")
    ] = None,
    db: Annotated[str | None, typer.Option(metavar="URL", help="An empty database to replay on, and to keep.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Play a capture again on a fresh supervisor and database, and compare every answer and every row.

    Acts of users, a pause of a watcher for example, are taken from the capture, and counted.

    Exits with 1 at the first difference, and shows both frames. Without --db the database is a temporary one.
    """
    from headgate.supervisor.replay.run import LogIncomplete, ReplayStuck, look_ahead, open_replay_store
    from headgate.supervisor.replay.run import replay as replay_files

    given = invocation(ctx)
    _log_nothing_but_trouble(given)
    files = frame_logs(path)
    try:
        index = look_ahead(files)
        progress = ProgressShown("replayed", "frames", min(index.frames, until or index.frames))
        # A database from a file of settings or the environment may hold real data.
        url = db or given.flags.get("database_url")
        with open_replay_store(url, secrets_of=None if url is None else _secrets_of(given)) as store, progress:
            replayed = replay_files(files, store, index=index, until=until, on_frame=progress.update)
    except (LogIncomplete, ReplayStuck) as exc:
        raise CommandError(f"{path} cannot be replayed: {exc}") from exc
    if as_json:
        print(json_line(dataclasses.asdict(replayed) | {"is_clean": replayed.is_clean, "seconds": progress.seconds}))
    else:
        print(_replayed_as_text(path, replayed, index.frames, progress.seconds))
    if not replayed.is_clean:
        raise typer.Exit(1)


def _secrets_of(given: Invocation) -> Callable[[Engine], Secrets]:
    """Return how to open the keys of a database that is kept: those with which the commands read it later."""
    from headgate.store.keys import open_secrets

    settings = given.resolve().settings
    return lambda engine: open_secrets(engine, settings.home, settings.fernet_keys, makes_file=True)


def frame_logs(path: Path) -> list[Path]:
    """Return the file, or the frame logs of the folder in the order they were written. Raises `CommandError`."""
    if not path.exists():
        raise CommandError(f"there is no file or folder {path}")
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(FILE_PATTERN))
    if not files:
        raise CommandError(f"there is no frame log ({FILE_PATTERN}) in {path}")
    return files


def _records(path: Path) -> Iterator[tuple[Path, Record | Torn | Damaged]]:
    from headgate.protocol.framelog.log import read_frames

    for file in frame_logs(path):
        for record in read_frames(file):
            yield file, record


def _frame_as_text(file: Path, record: Record | Torn | Damaged) -> str:
    from headgate.protocol.framelog.log import Damaged, Torn, describe

    match record:
        case Torn():
            return f"{file.name}: the last record is torn: {record.torn_bytes} bytes at offset {record.offset}"
        case Damaged():
            return f"{file.name}: damaged at offset {record.offset}: {record.problem}"
        case _:
            return describe(record)


def _frame_as_json(file: Path, record: Record | Torn | Damaged) -> str:
    from headgate.protocol.framelog.log import Damaged, Torn, describe

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


def _log_nothing_but_trouble(given: Invocation) -> None:
    """Have the core log errors only, because its records repeat those of the capture; with ``--debug`` all of them."""
    from headgate.supervisor.logs import process_log

    settings = given.resolve().settings
    if given.flags.get("log_level") is None:
        settings = msgspec.structs.replace(settings, log_level="critical")
    process_log.configure(settings)


def _replayed_as_text(path: Path, replayed: Replayed, frames: int, seconds: float) -> str:
    difference = replayed.difference
    if difference is not None:
        lines = [f"{path}: frame {difference.frame:,} of {frames:,} differs: {difference.problem}"]
        lines += [f"  in {difference.path} at offset {difference.offset:,}"]
        lines += [f"  recorded  {difference.recorded or '(cannot be read)'}"]
        lines += [f"  replayed  {difference.replayed or '(nothing)'}"]
        return "\n".join(lines)
    acts = sum(replayed.acts.values())
    kinds = ", ".join(f"{number:,} {act}" for act, number in replayed.acts.items())
    more = [
        *([f"{counted(acts, 'act')} of users or other supervisors taken from the log: {kinds}"] if acts else []),
        *([f"{replayed.skipped:,} frames before the first Hello passed over"] if replayed.skipped else []),
        *([f"{replayed.torn:,} torn records passed over"] if replayed.torn else []),
    ]
    return "; ".join(
        [
            f"{path}: replayed clean: {counted(replayed.frames, 'frame')} of "
            f"{counted(replayed.supervisors, 'supervisor')} and {counted(replayed.runners, 'runner')} in "
            f"{seconds:.1f} s; {counted(replayed.rows, 'row')}, {replayed.redelivered:,} redelivered, "
            f"{counted(replayed.dead_letters, 'dead letter')}",
            *more,
        ]
    )
