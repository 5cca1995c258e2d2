"""Tables and records for people: ids that can be copied, ages instead of timestamps, states in colours.

An id is always printed whole. Errors, payloads and descriptions are cut so that the table fits the terminal, and then
columns such as ages are left out, if need be. Columns that are empty are left out as well, and a DAG, a run or a queue
that all rows have is printed once, above the table. With ``wide`` nothing is left out, and times are exact.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from headgate.cli.output import json_line, readable
from headgate.presentation.moments import age, exact
from headgate.scheduling.words import error_line

ROWS_SHOWN_MAX = 1000  # rows of a table: people read no more, and a table is laid out in memory
CELL_CHARS_MAX = 200  # of one cell of a table; JSON lines have everything
# Columns are cut to so many characters before others are left out for them, and afterwards to so many.
CUT_CHARS, CUT_CHARS_MIN = 30, 10

# Of these a beginning is enough to tell rows apart; the command `show` of each list has the whole.
_CUT = frozenset(
    {"last_error", "reason", "payload", "payload_head", "description", "headline", "next", "tasks", "runner"}
)
# Columns that are left out, the first one first, if a table is wider than the terminal.
_LEFT_OUT_FIRST = ("took", "try", "started_at", "created_date", "triggerer_id")
# These are often the same in all rows.
_HOISTED = frozenset({"dag", "run_id", "watcher", "queue", "queues", "pool", "operator", "hostname", "run_type"})
_HEADINGS = {"is_paused": "paused", "triggerer_id": "supervisor", "last_error": "error", "created_date": "created"}
_GREEN, _RED, _YELLOW, _CYAN, _BLUE, _DIM, _BOLD = "32", "31", "33", "36", "34", "2", "1"
_COLOURS = {
    **dict.fromkeys(("success",), _GREEN),
    **dict.fromkeys(("failed",), _RED),
    **dict.fromkeys(("upstream_failed", "up_for_retry", "restarting"), _YELLOW),
    **dict.fromkeys(("running",), _CYAN),
    **dict.fromkeys(("deferred", "queued", "scheduled"), _BLUE),
    **dict.fromkeys(("skipped", "none"), _DIM),
}

# The name of a field, or a heading and the function that returns the value for a row.
Column = str | tuple[str, Callable[[Any], Any]]


def print_table(rows: Iterable[Any], columns: Sequence[Column], *, wide: bool = False) -> None:
    """Print rows, which are structs or mappings, with these columns; ``none`` if there are no rows."""
    rows = iter(rows)
    shown_rows = list(islice(rows, ROWS_SHOWN_MAX))
    if not shown_rows:
        print("none")
        return
    values = {_heading(column): [_value(row, column) for row in shown_rows] for column in columns}
    names = {_heading(column): column if isinstance(column, str) else column[0] for column in columns}
    if not wide:
        values = {heading: cells for heading, cells in values.items() if any(map(_is_filled, cells))}
        hoisted = _hoist(values, names) if len(shown_rows) > 1 else {}
        if hoisted:
            print("  ".join(f"{heading}: {cell(cells[0])}" for heading, cells in hoisted.items()))
        values = {heading: cells for heading, cells in values.items() if heading not in hoisted}
    _lay_out(values, names, wide=wide)
    if next(rows, None) is not None:
        print(f"There are more than {ROWS_SHOWN_MAX}: --limit shows the first of them, --json all.")


def print_fields(record: Mapping[str, Any]) -> None:
    """Print one thing, a line for each field; those that are empty are left out."""
    filled = {name: value for name, value in record.items() if _is_filled(value)}
    width = max(map(len, filled), default=0)
    for name, value in filled.items():
        text = cell(value, cut_to=None)
        if isinstance(value, datetime):
            text = f"{text} ({age(value)})"
        print(_styled(f"{name.replace('_', ' '):<{width}}", _BOLD) + f"  {_coloured(name, text)}")


def print_block(text: str, *, indent: str = "  ") -> None:
    """Print a text of several lines, as a traceback is, with whatever does not print made visible."""
    for line in text.splitlines():
        print(indent + shown(line))


def place(path: str) -> str:
    """Return a path as it is shown: relative to the current folder if it is inside of it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path


def cell(value: Any, *, cut_to: int | None = CELL_CHARS_MAX) -> str:
    """Return the text of a value in a table."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, datetime):
        return exact(value)
    plain = readable(value)
    if isinstance(plain, list) and all(isinstance(item, str) for item in plain):
        plain = ", ".join(plain)
    text = plain if isinstance(plain, str) else json_line(plain)
    return shown(text if cut_to is None or len(text) <= cut_to else text[: cut_to - 1] + "…")


def shown(text: str) -> str:
    """Return a text with whatever does not print made visible."""
    # What others wrote must not move the cursor or colour the terminal.
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


# --- the layout -----------------------------------------------------------------------------------


def _heading(column: Column) -> str:
    name = column if isinstance(column, str) else column[0]
    return _HEADINGS.get(name, name.removesuffix("_at").replace("_", " "))


def _value(row: Any, column: Column) -> Any:
    if not isinstance(column, str):
        return column[1](row)
    return row[column] if isinstance(row, Mapping) else getattr(row, column)


def _is_filled(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], (), {})


def _hoist(values: Mapping[str, list[Any]], names: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the columns that are the same in all rows, of those that tell no rows apart."""
    same = {heading for heading, cells in values.items() if all(one == cells[0] for one in cells)}
    return {heading: values[heading] for heading in values if heading in same and names[heading] in _HOISTED}


def _lay_out(values: Mapping[str, list[Any]], names: Mapping[str, str], *, wide: bool) -> None:
    from rich.cells import cell_len, set_cell_size

    texts: dict[str, list[str]] = {}
    for heading, cells in values.items():
        if names[heading] == "last_error" and not wide:
            cells = [error_line(one) if isinstance(one, str) else one for one in cells]
        texts[heading] = [age(one) if isinstance(one, datetime) and not wide else cell(one) for one in cells]
    widths = {heading: max(map(cell_len, [heading, *cells])) for heading, cells in texts.items()}
    if sys.stdout.isatty() and not wide:
        _fit(widths, names)
        texts = {heading: cells for heading, cells in texts.items() if heading in widths}
    numbers = {heading for heading, cells in values.items() if all(type(one) is int for one in cells)}

    def line(row: Mapping[str, str], style: Callable[[str, str], str]) -> str:
        parts = []
        for heading, text in row.items():
            width = widths[heading]
            if cell_len(text) > width:
                text = set_cell_size(text, width - 1) + "…"
            padding = " " * (width - cell_len(text))
            styled = style(names[heading], text)
            parts.append(padding + styled if heading in numbers else styled + padding)
        return "  ".join(parts).rstrip()

    print(line({heading: heading for heading in texts}, lambda _, text: _styled(text, _BOLD)))
    for row in zip(*texts.values(), strict=True):
        print(line(dict(zip(texts, row, strict=True)), _coloured))


def _fit(widths: dict[str, int], names: Mapping[str, str]) -> None:
    """Make columns narrower, the widest first, and leave columns out, until the table fits the terminal if it can."""
    columns = shutil.get_terminal_size().columns
    cut = [heading for heading in widths if names[heading] in _CUT]
    left_out = [heading for name in _LEFT_OUT_FIRST for heading in widths if names[heading] == name]
    while sum(widths.values()) + 2 * (len(widths) - 1) > columns:
        widest = max(cut, key=lambda heading: widths[heading], default="")
        least = max(CUT_CHARS if left_out else CUT_CHARS_MIN, len(widest))
        if widest and widths[widest] > least:
            widths[widest] -= 1
        elif left_out:
            del widths[left_out.pop(0)]
        else:
            return


def _coloured(name: str, text: str) -> str:
    colour = _COLOURS.get(text) if name == "state" or name.endswith("_state") else None
    return text if colour is None else _styled(text, colour)


def _styled(text: str, style: str) -> str:
    """Return a text with a style, if standard output is a terminal that shows it; see https://no-color.org."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if is_plain or not text else f"\x1b[{style}m{text}\x1b[0m"


def fields(row: msgspec.Struct, columns: Sequence[str]) -> dict[str, Any]:
    """Return the named fields of a row of the store."""
    return {column: getattr(row, column) for column in columns}
