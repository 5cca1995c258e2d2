"""What all benchmarks share: options, interleaved runs, medians and spread, one table, one JSON document.

A benchmark is a list of cases. A case runs our side and then its baseline, again and again (A B A B), so that whatever
else the machine does meets both. Each run returns named figures; a row of the table is one figure of one case.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Literal, NamedTuple, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import databases

Figures = Mapping[str, float]  # by name, in the unit that the case's `Figure` says
Size = Literal["full", "quick", "tiny"]
Of = TypeVar("Of")

TABLE_COLUMNS = 140  # wide enough for all eight columns, whatever the terminal is
LIMIT_S = {"full": 240.0, "quick": 60.0, "tiny": 600.0}  # one benchmark; past it what is measured so far is printed
REPEATS = {"full": 3, "quick": 1, "tiny": 1}


class OutOfTime(Exception):
    """The benchmark's time is over."""


class BenchFailed(Exception):
    """What ran did not do what it was to do, so there is nothing to measure; the text says what."""


class Target(NamedTuple):
    """What is to be reached; a bound that is None holds nothing."""

    ratio_min: float | None = None
    ratio_max: float | None = None
    value_min: float | None = None
    value_max: float | None = None

    def bounds(self, value: float, ratio: float | None) -> list[tuple[str, bool]]:
        """Return every bound in words, and whether it is held. A ratio that is not there holds none."""
        told = []
        for what, number, least, most in (
            ("", value, self.value_min, self.value_max),
            ("ratio ", ratio, self.ratio_min, self.ratio_max),
        ):
            if least is not None:
                told.append((f"{what}≥ {shown(least)}", number is not None and number >= least))
            if most is not None:
                told.append((f"{what}≤ {shown(most)}", number is not None and number <= most))
        return told


class Figure(NamedTuple):
    """One row of a case: a figure by its name, its unit, what it is to reach, and the baseline's name for it."""

    name: str
    unit: str
    target: Target = Target()
    baseline: str | None = None  # where the baseline has another name for it


class Case(NamedTuple):
    """Our side and its baseline. ``figures`` are the rows it gives."""

    label: str
    figures: Sequence[Figure]
    ours: Callable[[], Figures]
    baseline: Callable[[], Figures] | None


class Row(msgspec.Struct, frozen=True):
    """A row of the table: medians, and the lowest and highest of the runs.

    ``ratio`` is the median of the ratios of each run to its own baseline, and not the ratio of the medians.
    """

    case: str
    figure: str
    unit: str
    median: float
    low: float
    high: float
    baseline: float | None
    baseline_low: float | None
    baseline_high: float | None
    ratio: float | None
    target: str
    reached: bool | None  # None where there is nothing to reach


class Document(msgspec.Struct, frozen=True):
    """What one benchmark found; also its form as JSON. ``stopped`` says why, where it did not come to its end."""

    bench: str
    title: str
    baseline: str
    size: Size
    repeats: int
    seconds: float
    rows: list[Row]
    stopped: str = ""


class Options(msgspec.Struct, frozen=True):
    """What the command line says."""

    size: Size
    databases: tuple[str, ...]
    json: bool
    only: str
    repeats: int
    limit_s: float

    def of(self, full: Of, quick: Of, tiny: Of) -> Of:
        """Choose by the size of the run."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.size]


class Bench(NamedTuple):
    """One benchmark. ``cases`` makes its cases for the options; ``baseline`` says in words what stands beside."""

    name: str
    title: str
    baseline: str
    cases: Callable[[Options], Sequence[Case]]
    repeats: int = REPEATS["full"]  # of a full run


# --- the command line ----------------------------------------------------------------------------


def parser(name: str) -> argparse.ArgumentParser:
    """Return the flags that all benchmarks have."""
    flags = argparse.ArgumentParser(prog=f"python -m {name}")
    flags.add_argument("--quick", action="store_const", const="quick", dest="size", default="full")
    flags.add_argument("--tiny", action="store_const", const="tiny", dest="size", help="to see whether it works at all")
    flags.add_argument("--db", choices=["sqlite", "postgresql", "both"], default="both")
    flags.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    flags.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    flags.add_argument("--repeats", type=int, help="how often each case and its baseline run")
    flags.add_argument("--limit", type=float, metavar="SECONDS", help="of time, after which it ends as it is")
    return flags


def options_of(given: argparse.Namespace, repeats_full: int = REPEATS["full"]) -> Options:
    """Return the options; PostgreSQL is left out, with a word, where no server answers."""
    kinds: tuple[str, ...] = ("sqlite", "postgresql") if given.db == "both" else (given.db,)
    if "postgresql" in kinds and not databases.postgresql_answers():
        if given.db == "postgresql":
            raise BenchFailed(f"no PostgreSQL server answers at {databases.POSTGRES_URL}")
        print("no PostgreSQL server answers: SQLite only", file=sys.stderr)
        kinds = ("sqlite",)
    usual = repeats_full if given.size == "full" else REPEATS[given.size]
    return Options(
        given.size, kinds, given.json, given.only, given.repeats or usual, given.limit or LIMIT_S[given.size]
    )


def main(bench: Bench, arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark as a command; return its exit code, which says nothing of how fast it was."""
    try:
        options = options_of(parser(f"benchmarks.bench_{bench.name}").parse_args(arguments), bench.repeats)
        signal.signal(signal.SIGTERM, _leave)
        with TimeLimit(options.limit_s):
            document = measure(bench, options)
    except BenchFailed as error:
        print(f"{bench.name}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(msgspec.json.encode(document).decode())
    else:
        print(rendered(document))
    return 1 if document.stopped else 0


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # on the way out the pairs are ended


# --- measuring -----------------------------------------------------------------------------------


def measure(bench: Bench, options: Options) -> Document:
    """Run the cases, ours and the baseline in turn, as often as the options say; `OutOfTime` ends it as it is."""
    begun = time.monotonic()
    cases = [case for case in bench.cases(options) if options.only in case.label]
    if not cases:
        raise BenchFailed(f"no case contains {options.only!r}")
    ours: dict[str, list[Figures]] = {case.label: [] for case in cases}
    theirs: dict[str, list[Figures]] = {case.label: [] for case in cases}
    stopped = ""
    try:
        for _ in range(options.repeats):
            for case in cases:
                _progress(bench.name, case.label)
                ours[case.label].append(_run(case.ours))
                if case.baseline is not None:
                    theirs[case.label].append(_run(case.baseline))
    except OutOfTime as error:
        stopped = str(error)
    rows = [
        row_of(case, figure, ours[case.label], theirs[case.label])
        for case in cases
        for figure in case.figures
        if ours[case.label] and (case.baseline is None or theirs[case.label])
    ]
    seconds = round(time.monotonic() - begun, 1)
    return Document(bench.name, bench.title, bench.baseline, options.size, options.repeats, seconds, rows, stopped)


def _run(side: Callable[[], Figures]) -> Figures:
    gc.collect()  # what the run before left behind is not this one's to clear away
    return side()


def _progress(bench: str, label: str) -> None:
    if sys.stderr.isatty() or os.environ.get("BENCH_PROGRESS"):
        print(f"{bench}: {label}", file=sys.stderr, flush=True)


def row_of(case: Case, figure: Figure, ours: Sequence[Figures], theirs: Sequence[Figures]) -> Row:
    """Return the row of one figure."""
    values = [run[figure.name] for run in ours]
    others = [run[figure.baseline or figure.name] for run in theirs]
    median = statistics.median(values)
    other = statistics.median(others) if others else None
    # Of each run to the baseline right after it: whatever else the machine did then met both.
    ratios = [value / beside for value, beside in zip(values, others, strict=False) if beside]
    ratio = statistics.median(ratios) if ratios else None
    bounds = figure.target.bounds(median, ratio)
    return Row(
        case=case.label,
        figure=figure.name,
        unit=figure.unit,
        median=median,
        low=min(values),
        high=max(values),
        baseline=other,
        baseline_low=min(others, default=None),
        baseline_high=max(others, default=None),
        ratio=ratio,
        target=", ".join(words for words, _ in bounds),
        reached=all(held for _, held in bounds) if bounds else None,
    )


class TimeLimit:
    """Raises `OutOfTime` in the main thread after so many seconds; what is inside cleans up after itself."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"stopped after {self._limit_s:g} s")


# --- showing -------------------------------------------------------------------------------------


def shown(value: float | None) -> str:
    """Return a number as people read it: three digits that count, thousands apart."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"


def _with_spread(median: float | None, low: float | None, high: float | None) -> str:
    if median is None or low is None or high is None or low == high:
        return shown(median)
    return f"{shown(median)} ({shown(low)} to {shown(high)})"


def rendered(document: Document) -> str:
    """Return the table as text."""
    table = Table(title=document.title, title_justify="left", caption_justify="left")
    table.caption = f"baseline: {document.baseline}\n{document.repeats} runs each, {document.seconds:g} s in all; "
    table.caption += "the ratio is the median of each run by its own baseline"
    if document.stopped:
        table.caption += f"\nNOT COMPLETE: {document.stopped}"
    for name in ("case", "figure", "unit"):
        table.add_column(name, overflow="fold")
    for name in ("median (lowest to highest)", "baseline", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("to reach", overflow="fold")
    table.add_column("")
    case = None
    for row in document.rows:
        table.add_row(
            row.case if row.case != case else "",
            row.figure,
            row.unit,
            _with_spread(row.median, row.low, row.high),
            _with_spread(row.baseline, row.baseline_low, row.baseline_high),
            shown(row.ratio),
            row.target,
            {None: "", True: "yes", False: "NO"}[row.reached],
        )
        case = row.case
    console = Console(width=TABLE_COLUMNS, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
