"""Cost of a deferral: the time from the deferring step to the resumed one, with a trigger that fires at once."""

from __future__ import annotations

import statistics
import sys

from benchmarks import stations
from benchmarks.harness import Bench, Case, Figure, Figures, Options, main

DAGS = {
    "deferring": """
from benchmarks.users.tasks import Deferring
from headgate.tasks.graph import DAG

with DAG("measured", max_active_runs=1):
    Deferring(task_id="deferring")
""",
    "plain": """
from benchmarks.users.tasks import First, Second
from headgate.tasks.graph import DAG

with DAG("measured", max_active_runs=1):
    First(task_id="first") >> Second(task_id="second")
""",
}
FIRST_RUNS = 4  # left out: workers start, and import what they need
RUN_S_MAX = 5.0  # of one run, on a busy machine
GAP_P50, GAP_P99, FIRED_P50 = "p50", "p99", "to the trigger's event, p50"


def run_station(kind: str, which: str, runs: int) -> Figures:
    """Have runs one after the other, as the scheduler begins them; return the gap between the two steps of each."""
    count = FIRST_RUNS + runs
    with stations.running(kind, DAGS[which], moments=count) as station:
        station.wait_dag("measured")
        for number in range(count):
            station.create_run("measured", f"run-{number}", {"board": station.board_path, "number": number})
        station.wait_ended(count * RUN_S_MAX)
        board = station.pair.board
        measured = range(FIRST_RUNS, count)
        gaps_ms = [(board.advanced_at[number] - board.handed_at[number]) * 1000 for number in measured]
        figures = {GAP_P50: statistics.median(gaps_ms), GAP_P99: percentile(gaps_ms, 99)}
        if which == "deferring":
            fired_ms = [(board.stored_at[number] - board.handed_at[number]) * 1000 for number in measured]
            figures[FIRED_P50] = statistics.median(fired_ms)
        return figures


def percentile(values: list[float], percent: int) -> float:
    """Return the smallest of these values that ``percent`` percent of them do not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    return [case(kind, options.of(100, 40, 3)) for kind in options.databases]


def case(kind: str, runs: int) -> Case:
    """Return the case of so many deferrals, one after the other."""
    figures = [Figure(GAP_P50, "ms"), Figure(GAP_P99, "ms"), Figure(FIRED_P50, "ms", baseline=GAP_P50)]
    return Case(
        f"{kind}, {runs:,} deferrals",
        figures,
        lambda: run_station(kind, "deferring", runs),
        lambda: run_station(kind, "plain", runs),
    )


BENCH = Bench(
    "defer",
    "defer: from a step that defers to the step that is resumed; the trigger fires at once",
    "from the end of a plain task to the beginning of the next one in a chain of two",
    cases,
    repeats=2,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
