"""Lists on every command: their options, JSON lines or a table, and lists that are too long to be read at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Final, Protocol

import msgspec
import typer

from headgate.cli.output import json_line, payload
from headgate.cli.tables import Column, fields, print_fields, print_table

ROWS_LISTED = 100  # of a list that grows for ever, if the user does not say
ROWS_PER_PAGE_MAX = 1000  # read at a time

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for programs.")]
WideOption = Annotated[bool, typer.Option("--wide", help="Print all columns, with exact times.")]
ID_MAX: Final = 2**63 - 1  # as much as a column holds; of no table are more rows asked for
RowsOption = Annotated[int, typer.Option("--limit", min=1, max=ID_MAX, metavar="N", help="Print at most N of them.")]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, max=ID_MAX, metavar="N", help="Print at most N of them.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Print all of them.")]


class _HasId(Protocol):
    @property
    def id(self) -> int: ...


class _Page(Protocol):
    """One page of a list of the store; the rows have ids."""

    def __call__(self, *, beyond_id: Any, limit: int) -> Sequence[Any]: ...


def print_json_lines(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print one JSON object a line, while the rows are read."""
    for row in rows:
        sys.stdout.write(json_line(dict(row)) + "\n")


def print_record(record: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one thing: a JSON object, or a line for each field."""
    if as_json:
        print_json_lines([record])
    else:
        print_fields(record)


def print_structs(
    structs: Sequence[msgspec.Struct],
    shown: Sequence[Column],
    *,
    as_json: bool,
    wide: bool = False,
    payload_columns: tuple[str, ...] = (),
) -> None:
    """Print rows: as JSON and with ``wide`` all their fields, otherwise the columns ``shown``.

    ``payload_columns`` are decoded.
    """
    columns = structs[0].__struct_fields__ if structs else ()
    if as_json or wide:
        rows = (fields(struct, columns) for struct in structs)
        decoded = (row | {name: payload(row[name]) for name in payload_columns} for row in rows)
        if as_json:
            print_json_lines(decoded)
        else:
            print_table(decoded, columns, wide=True)
        return
    print_table(structs, shown)


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
    page: _Page,
    kind: type[msgspec.Struct],
    *,
    limit: int,
    everything: bool,
    as_json: bool,
    wide: bool,
    shown: Sequence[Column],
) -> None:
    """Print a long list: JSON lines with all fields of ``kind``, or a table of the columns ``shown``."""
    columns = kind.__struct_fields__
    # One more than is shown, to be able to say that there are more.
    found = pages(page, None if everything else limit + 1)
    rows = found if everything else islice(found, limit)
    if as_json:
        print_json_lines(fields(row, columns) for row in rows)
    else:
        print_table(rows, columns if wide else shown, wide=wide)
    if not everything and next(found, None) is not None:
        told = sys.stderr if as_json else sys.stdout
        print(f"There are more than {limit}: --limit and --all show them.", file=told)
