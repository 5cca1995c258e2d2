"""What users write on command lines: names of tasks, spans of time, moments, JSON objects."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

import typer

from headgate.cli.invocation import CommandError
from headgate.presentation import moments
from headgate.presentation.values import json_line
from headgate.protocol.encoded_values import object_of
from headgate.protocol.errors import ProtocolError
from headgate.protocol.values import decode_value

TEXT_CHARS_SHOWN_MAX = 60  # of a text that is no JSON, in the error
TASK_HELP = "The task_id; TASK[17] or TASK[10-19] for instances of a mapped task."
DagArgument = Annotated[str, typer.Argument(metavar="DAG", help="The dag_id.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run_id, or `latest`.")]
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help=TASK_HELP)]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="WHEN", help="Only runs created since: 2h, 3d, or 2026-01-31T12:00Z.")
]


def span_s(text: str, option: str) -> float:
    """Return the seconds in ``90s``, ``30m``, ``1h30m``, ``7d`` or ``2w``. Raises `CommandError`."""
    with _as_usage(option):
        return moments.span_s(text)


def moment(text: str, option: str) -> datetime:
    """Return a moment written in ISO 8601; without a zone it is in UTC. Raises `CommandError`."""
    with _as_usage(option):
        return moments.moment(text)


def since(text: str | None, now: Callable[[], datetime]) -> datetime | None:
    """Return the moment that ``--since`` means: a moment, or a span before now. Raises `CommandError`."""
    if text is None:
        return None
    with _as_usage("--since"):
        return moments.begin_of(text, now)


@contextmanager
def _as_usage(option: str) -> Generator[None]:
    try:
        yield
    except ValueError as error:
        raise CommandError(f"{option}: {error}", exit_code=2) from error


def json_value(text: str, option: str) -> Any:
    """Return the value in a text of JSON, with tagged values read. Raises `CommandError`, with how to write a text."""
    try:
        return _of_json(text, option)
    except CommandError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError) or len(text) > TEXT_CHARS_SHOWN_MAX:
            raise
        raise CommandError(f"{error}; a text needs quotes: {shlex.quote(json_line(text))}", exit_code=2) from error


def _of_json(text: str, option: str) -> Any:
    try:
        # The standard library says where in the text a mistake is.
        json.dumps(json.loads(text, object_pairs_hook=object_of), ensure_ascii=False).encode()
        return decode_value(text.encode())
    except UnicodeEncodeError as exc:
        half = ascii(exc.object[exc.start])
        raise CommandError(f"{option}: {half} is half of a surrogate pair, which is not text", exit_code=2) from exc
    except (ValueError, ProtocolError) as exc:
        raise CommandError(f"{option}: {exc}", exit_code=2) from exc
    except RecursionError:
        raise CommandError(f"{option}: is nested too deeply", exit_code=2) from None


def json_object(text: str, option: str) -> dict[str, Any]:
    """Return the values in a JSON object, with tagged values read. Raises `CommandError`."""
    values = _of_json(text, option)
    if not isinstance(values, dict):
        raise CommandError(f"{option}: expected a JSON object, got {text}", exit_code=2)
    for name in values:
        if not isinstance(name, str):
            raise CommandError(f"{option}: {name!r} cannot be the name of a value", exit_code=2)
    return values
