"""How users name what they mean, on every command: tasks, spans of time, moments, JSON, and pages of long lists."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import typer

from headgate.cli.invocation import CommandError
from headgate.cli.output import fields, print_rows
from headgate.protocol.errors import ProtocolError
from headgate.protocol.values import decode_value

ROWS_LISTED = 100  # of a list that grows for ever, where the user does not say
ROWS_PER_PAGE_MAX = 1000  # read at a time
SPAN_S_MAX = 100 * 365 * 86_400.0  # no clock's zero lies so far back that a moment before it cannot be stored
# What another is changing this moment is asked for again; such a change takes milliseconds.
BUSY_ROUNDS_MAX = 100
BUSY_PAUSE_S = 0.05

_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?(?:s|min|m|h|d|w))+")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d|w)")

DagArgument = Annotated[str, typer.Argument(metavar="DAG", help="The dag_id.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run_id, or `latest`.")]
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="The task_id.")]
RowsOption = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Print at most N of them.")]
AllOption = Annotated[bool, typer.Option("--all", help="Print all of them.")]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="WHEN", help="Only runs created since: 2h, 3d, or 2026-01-31T12:00Z.")
]


class _HasId(Protocol):
    @property
    def id(self) -> int: ...


class _Page(Protocol):
    """One page of a list of the store; the rows have ids."""

    def __call__(self, *, beyond_id: Any, limit: int) -> Sequence[Any]: ...


_Answer = TypeVar("_Answer")


def span_s(text: str, option: str) -> float:
    """Return the seconds in ``90s``, ``30m``, ``1h30m``, ``7d`` or ``2w``. Raises `CommandError`."""
    if _SPAN.fullmatch(text) is None:
        raise CommandError(f"{option}: {text!r} is no span of time; write 90s, 30m, 1h30m, 7d or 2w", exit_code=2)
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _SPAN_PART.findall(text))
    if seconds > SPAN_S_MAX:
        raise CommandError(f"{option}: {text} is longer than a hundred years", exit_code=2)
    return seconds


def moment(text: str, option: str) -> datetime:
    """Return a moment written in ISO 8601; without a zone it is in UTC. Raises `CommandError`."""
    try:
        found = datetime.fromisoformat(text)
        return (found.replace(tzinfo=UTC) if found.tzinfo is None else found).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise CommandError(
            f"{option}: {text!r} is no moment; write 2026-01-31 or 2026-01-31T12:00:00+00:00", exit_code=2
        ) from exc


def since(text: str | None, now: Callable[[], datetime]) -> datetime | None:
    """Return the moment that ``--since`` means: a moment, or a span before now. Raises `CommandError`."""
    if text is None:
        return None
    return now() - timedelta(seconds=span_s(text, "--since")) if _SPAN.fullmatch(text) else moment(text, "--since")


def json_object(text: str, option: str) -> dict[str, Any]:
    """Return the values in a JSON object, with tagged values read. Raises `CommandError`."""
    try:
        # The standard library says where in the text a mistake is.
        plain = json.loads(text)
        values = decode_value(text.encode())
    except (ValueError, ProtocolError) as exc:
        raise CommandError(f"{option}: {exc}", exit_code=2) from exc
    if not isinstance(plain, dict) or not isinstance(values, dict):
        raise CommandError(f"{option}: expected a JSON object, got {text}", exit_code=2)
    for name in values:
        if not isinstance(name, str):
            raise CommandError(f"{option}: {name!r} cannot be the name of a value", exit_code=2)
    return values


def pages(page: _Page, limit: int | None) -> Iterator[Any]:
    """Iterate over the rows of a list, a page at a time, up to ``limit`` of them; None: all."""
    beyond_id: int | None = None
    left = limit
    while left is None or left > 0:
        size = ROWS_PER_PAGE_MAX if left is None else min(left, ROWS_PER_PAGE_MAX)
        kwargs = {} if beyond_id is None else {"beyond_id": beyond_id}
        rows: Sequence[_HasId] = page(**kwargs, limit=size)
        yield from rows
        if len(rows) < size:
            return
        beyond_id = rows[-1].id
        left = None if left is None else left - size


def print_pages(
    page: _Page, kind: type[msgspec.Struct], *, limit: int, everything: bool, as_json: bool, shown: Sequence[str]
) -> None:
    """Print a long list: JSON lines with all fields of ``kind``, or a table of the columns ``shown``."""
    if as_json:
        columns = kind.__struct_fields__
        rows = pages(page, None if everything else limit)
        print_rows((fields(row, columns) for row in rows), columns, as_json=True)
        return
    # One more than is shown, to be able to say that there are more.
    found = pages(page, None if everything else limit + 1)
    first = next(found, None)
    if first is None:
        print("none")
        return
    wanted = found if everything else islice(found, limit - 1)
    print_rows((fields(row, shown) for row in _with(first, wanted)), shown, as_json=False)
    if not everything and next(found, None) is not None:
        print(f"There are more than these {limit}: --limit and --all show them.")


def _with(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


def until_free(ask: Callable[[], _Answer], is_done: Callable[[_Answer], bool], what: str) -> _Answer:
    """Ask until nothing is in the way any more; return the last answer. Raises `CommandError` when that never comes."""
    for _ in range(BUSY_ROUNDS_MAX):
        answer = ask()
        if is_done(answer):
            return answer
        time.sleep(BUSY_PAUSE_S)
    raise CommandError(f"{what} is being changed by others all the time; what was done stands, call this again")
