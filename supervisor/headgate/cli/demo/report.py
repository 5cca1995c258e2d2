"""What a demo shows: a progress bar while it runs, and a table at the end."""

from __future__ import annotations

import statistics
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from headgate.cli.demo.run import Kill, Plan, Result

LINE_INTERVAL_S = 5.0  # between two lines of progress where there is no terminal


class Progress:
    """A bar on a terminal, and a line now and then elsewhere."""

    def __init__(self, out: Console, plan: Plan) -> None:
        self._out = out
        self._plan = plan
        self._bar = RichProgress(
            TextColumn("stored"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("written {task.fields[written]:,}  kills {task.fields[kills]} of {task.fields[kills_planned]}"),
            TimeElapsedColumn(),
            console=out,
            disable=not out.is_terminal,
        )
        self._task = self._bar.add_task("stored", total=plan.rows, written=0, kills=0, kills_planned=plan.kills + 1)
        self._line_at = time.monotonic() + LINE_INTERVAL_S

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, rows: int, written: int, kills: int) -> None:
        """Show how far the demo is."""
        self._bar.update(self._task, completed=rows, written=written, kills=kills)
        if not self._out.is_terminal and time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_INTERVAL_S
            self._out.print(
                f"stored {rows:,} of {self._plan.rows:,}, written {written:,}, kills {kills} of {self._plan.kills + 1}"
            )

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._out.print(text, markup=False)


def print_report(out: Console, plan: Plan, result: Result) -> bool:
    """Print the table and the verdict; return whether all is well."""
    faults = result.faults(plan)
    table = Table(title="headgate demo", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value, is_bad in _lines(result):
        table.add_row(label, value, style="bold red" if is_bad else None)
    out.print()
    out.print(table)
    for fault in faults:
        out.print(f"BAD: {fault}", style="bold red", markup=False)
    if not faults:
        out.print("Every event was stored exactly once for every subscriber, and none was acknowledged before.")
    return not faults


def _lines(result: Result) -> list[tuple[str, str, bool]]:
    """Return label, value and whether it is bad, for each line of the table."""
    audit = result.audit
    early = result.acknowledged_before_stored
    runner, supervisor = (sum(kill.target == target for kill in result.kills) for target in ("runner", "supervisor"))
    return [
        ("events written", f"{audit.written:,}", False),
        *((f"stored for {name}", f"{audit.stored(id_):,}", False) for id_, name in audit.names.items()),
        ("redelivered, and not stored again", f"{result.redelivered:,}", False),
        ("stored twice", f"{audit.stored_twice:,}", audit.stored_twice > 0),
        ("lost", f"{audit.lost:,}", audit.lost > 0),
        (f"acknowledged before stored, in {result.looks:,} looks", f"{early:,}", early > 0),
        ("kills with SIGKILL", f"{runner} runner, {supervisor} supervisor", False),
        *((f"recovery from a kill of the {target}", text, False) for target, text in _recoveries(result.kills)),
        ("events stored per second, kills included", f"{result.rows_per_s:,.0f}", False),
    ]


def _recoveries(kills: list[Kill]) -> list[tuple[str, str]]:
    """Return, for each target that recovered, the shortest, the middle and the longest time in words."""
    found: list[tuple[str, Any]] = []
    for target in ("runner", "supervisor"):
        times = sorted(kill.recovery_s for kill in kills if kill.target == target and kill.recovery_s is not None)
        if len(times) == 1:
            found.append((target, f"{times[0]:.2f} s"))
        elif times:
            found.append((target, f"{times[0]:.2f} / {statistics.median(times):.2f} / {times[-1]:.2f} s"))
    return found
