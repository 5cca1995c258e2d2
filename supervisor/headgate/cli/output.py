"""How the commands print: JSON lines for programs, tables for people, and values made readable for both."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import msgspec
import typer

from headgate.protocol.values import decode_value

ROWS_SHOWN_MAX = 1000  # rows of a table: people read no more, and a table is laid out in memory
CELL_CHARS_MAX = 200  # of one cell of a table; JSON lines have everything

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for programs.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Print at most N of them.")]


def print_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Print rows that all have ``columns``. JSON lines are written while the rows are read."""
    if as_json:
        for row in rows:
            sys.stdout.write(json_line({column: row[column] for column in columns}) + "\n")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    more = False
    for number, row in enumerate(rows):
        if number == ROWS_SHOWN_MAX:
            more = True
            break
        # Text, not markup: what is in a cell was written by others.
        table.add_row(*(Text(cell(row[column])) for column in columns))
    console().print(table)
    if more:
        console().print(f"There are more than {ROWS_SHOWN_MAX}: --limit shows the first of them, --json all.")


def fields(row: msgspec.Struct, columns: Sequence[str]) -> dict[str, Any]:
    """Return the named fields of a row of the store."""
    return {column: getattr(row, column) for column in columns}


def print_structs(structs: Sequence[msgspec.Struct], *, as_json: bool, payload_columns: tuple[str, ...] = ()) -> None:
    """Print rows with all their fields; ``payload_columns`` are decoded."""
    if not structs:
        if not as_json:
            print("none")
        return
    columns = structs[0].__struct_fields__
    rows = (fields(struct, columns) for struct in structs)
    decoded = (row | {name: payload(row[name]) for name in payload_columns} for row in rows)
    print_rows(decoded, columns, as_json=as_json)


def print_record(record: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one thing: a JSON object, or a line a field, those that are empty left out."""
    if as_json:
        sys.stdout.write(json_line(dict(record)) + "\n")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in record.items():
        if value is None or value in ("", [], (), {}):
            continue
        table.add_row(Text(name.replace("_", " ")), Text(cell(value)))
    console().print(table)


def print_block(text: str, *, indent: str = "  ") -> None:
    """Print a text of several lines, as a traceback is, with whatever does not print made visible."""
    for line in text.splitlines():
        print(indent + shown(line))


def console(*, stderr: bool = False) -> Any:
    """Return a rich console. Where the output is not a terminal nothing is wrapped, so that it can be searched."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 10_000, highlight=False, soft_wrap=False)


def cell(value: Any) -> str:
    """Return a value as it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    plain = readable(value)
    if isinstance(plain, list) and all(isinstance(item, str) for item in plain):
        plain = ", ".join(plain)
    text = plain if isinstance(plain, str) else json_line(plain)
    return shown(text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…")


def shown(text: str) -> str:
    """Return a text with whatever does not print made visible."""
    # What others wrote must not move the cursor or colour the terminal.
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def json_line(value: Any) -> str:
    """Return a value as JSON on one line; what JSON does not have is made readable first."""
    plain = readable(value)
    try:
        return msgspec.json.encode(plain).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_escaped(plain)).decode()


def payload(data: bytes | None) -> Any:
    """Return a stored payload as it may be shown; never raises.

    A value of a type that only the user's program knows is shown as it is stored.
    """
    if data is None:
        return None
    try:
        return readable(decode_value(data))
    except Exception:
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _text_of_bytes(data)


def readable(value: Any) -> Any:
    """Return what JSON can say of a value: times in ISO 8601, numbers and ids as text, bytes as text or base64."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta() | Decimal() | UUID():
            return str(value)
        case bytes() | bytearray() | memoryview():
            return _text_of_bytes(bytes(value))
        case dict():
            return {key if isinstance(key, str) else json_line(key): readable(item) for key, item in value.items()}
        case list() | tuple():
            return [readable(item) for item in value]
        case set() | frozenset():
            return sorted((readable(item) for item in value), key=json_line)
        case msgspec.Struct():
            return readable(msgspec.structs.asdict(value))
        case _:
            return str(value)


def _text_of_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode()


def _escaped(value: Any) -> Any:
    """Return a readable value whose lone surrogates are written as escapes."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_escaped(key): _escaped(item) for key, item in value.items()}
        case list():
            return [_escaped(item) for item in value]
        case _:
            return value
