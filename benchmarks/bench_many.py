"""Many streams of one subscriber each, and one stream of many subscribers."""

from __future__ import annotations

import sys

from benchmarks.bench_pair import STORED, run_streams
from benchmarks.harness import Bench, Case, Figure, Options, Target, main

FIGURES = [Figure(STORED, "rows/s", Target(ratio_min=0.5))]


def cases(options: Options) -> list[Case]:
    """Return two cases for each database; the first one alone shows whether it works."""
    many = options.of(1000, 200, 10)
    rows = options.of(40_000, 5000, 100)
    fewer = many // 10
    made = []
    for kind in options.databases:
        made.append(streams_case(kind, many, rows))
        if options.size != "tiny":
            made.append(subscribers_case(kind, many, fewer, rows))
    return made


def streams_case(kind: str, many: int, rows: int) -> Case:
    """Return the case of many streams."""
    return Case(
        f"{kind}, {many:,} streams of 1 subscriber",
        FIGURES,
        lambda: run_streams(kind, streams=many, subscribers=1, events=rows // many),
        lambda: run_streams(kind, streams=1, subscribers=1, events=rows),
    )


def subscribers_case(kind: str, many: int, fewer: int, rows: int) -> Case:
    """Return the case of many subscribers."""
    return Case(
        f"{kind}, 1 stream of {many:,} subscribers",
        FIGURES,
        lambda: run_streams(kind, streams=1, subscribers=many, events=rows // many),
        lambda: run_streams(kind, streams=1, subscribers=fewer, events=rows // fewer),
    )


BENCH = Bench(
    "many",
    "many: streams and subscribers by the thousand",
    "bench_pair: as many rows of one stream of 1 subscriber, and of one stream of a tenth of the subscribers",
    cases,
    repeats=2,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
