"""``python -m tests.simulation --seeds N [--start S] [--jobs J]``: judge N seeds; exit code 1 where one fails.

``--seed S [--faults 0,2|none]`` runs one, with only those of its faults, and tells its history; ``--digest`` prints
a digest of the history instead. ``--mutant NAME`` breaks the pair first (see `tests.simulation.mutants`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tests.simulation import judging, records, scenario
from tests.simulation.mutants import MUTANTS

FAILURES_SHOWN_MAX = 10


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="The simulation of the pair.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="just this one, with its history")
    parser.add_argument("--faults", help="keep only these of its faults, by number, or: none")
    parser.add_argument("--digest", action="store_true", help="of the one seed, a digest of its history")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the pair on purpose")
    chosen = parser.parse_args(arguments)
    jobs = 1 if chosen.mutant else chosen.jobs  # another process would run the pair unbroken
    with ExitStack() as stack:
        if chosen.mutant is not None:
            stack.enter_context(MUTANTS[chosen.mutant].applied())
        if chosen.seed is not None:
            return _run_one(chosen.seed, chosen.faults, only_digest=chosen.digest)
        return _run_many(range(chosen.start, chosen.start + chosen.seeds), jobs)


def _run_one(seed: int, faults: str | None, *, only_digest: bool) -> int:
    judging.prepare_process()
    plan = scenario.draw(seed)
    if faults is not None:
        plan = judging.with_faults(plan, [] if faults == "none" else [int(number) for number in faults.split(",")])
    findings, history = judging.judge_with_history(plan)
    if only_digest:
        print(records.digest(history))
        return 0
    print(plan.topology)
    for number, fault in enumerate(plan.faults):
        print(f"fault {number}: {fault}")
    for record in history:
        print(record)
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def _run_many(seeds: range, jobs: int) -> int:
    console = Console(stderr=True)
    failed, shown, began_at = 0, 0, time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        for judged, some in judging.judge_many(seeds, jobs):
            failed += len(some)
            for failure in some[: FAILURES_SHOWN_MAX - shown]:
                shown += 1
                progress.console.print(str(failure), highlight=False, markup=False, soft_wrap=True)
            progress.update(task, advance=judged, description=f"{failed} failed")
    took_s = time.monotonic() - began_at
    print(f"{len(seeds):,} seeds from {seeds.start:,}: {failed:,} failed; {len(seeds) / took_s:,.0f} seeds a second")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
