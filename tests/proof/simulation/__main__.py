"""``python -m tests.proof.simulation --seeds N [--start S] [--jobs J]``: judge N seeds; exit code 1 where one fails.

``--seed S [--faults 0,2|none]`` runs one, with only those of its faults, and tells its history; ``--digest`` prints
a digest of the history instead. ``--mutant NAME`` breaks the pair first (see `tests.proof.simulation.mutants`).
``--tasks`` means the seeds of `tests.proof.simulation.tasks` in place of those of the pair, and ``--groups`` and
``--signals`` those of the packages of these names there.
``--proof`` looks for every mutant as well, and adds what was counted to ``docs/proof.md``; with ``--seeds 0`` it says
there anew after how many seeds each mutant is found, where `make proof` looks first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from headgate.protocol.startup import without_collections

with without_collections():  # to import takes longer than a seed, and this is started again and again
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from tests.proof import document as proof
    from tests.proof.simulation import judging, records
    from tests.proof.simulation import proof as counts
    from tests.proof.simulation.families import FamilyName, family

MUTANTS = {name: section.mutants for name, section in counts.SECTIONS.items()}
FAILURES_SHOWN_MAX = 10
ROW_SEEDS = 5000  # of one row of the document: a long run that is broken off has proven what it has written


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.simulation", description="The simulation of the pair.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="just this one, with its history")
    parser.add_argument("--faults", help="keep only these of its faults, by number, or: none")
    parser.add_argument("--digest", action="store_true", help="of the one seed, a digest of its history")
    parser.add_argument("--tasks", action="store_true", help="the seeds of tasks")
    parser.add_argument("--groups", action="store_true", help="the seeds of groups of tasks")
    parser.add_argument("--signals", action="store_true", help="the seeds of signals")
    parser.add_argument(
        "--mutant",
        choices=sorted(bug for mutants in MUTANTS.values() for bug in mutants),
        metavar="NAME",
        help="break the pair on purpose; docs/proof.md has the names",
    )
    parser.add_argument("--proof", type=Path, nargs="?", const=proof.PATH, help="add what was counted to this document")
    chosen = parser.parse_args(arguments)
    if chosen.proof is not None and (chosen.mutant is not None or chosen.seed is not None):
        parser.error("--proof is of many seeds, and of the pair as it is")
    options: tuple[FamilyName, ...] = ("signals", "groups", "tasks")
    name: FamilyName = next((one for one in options if getattr(chosen, one)), "pair")
    if chosen.mutant is not None and chosen.mutant not in MUTANTS[name]:
        parser.error(f"--mutant {chosen.mutant} is one of the other seeds")
    jobs = 1 if chosen.mutant else chosen.jobs  # another process would run the pair unbroken
    with ExitStack() as stack:
        if chosen.mutant is not None:
            stack.enter_context(MUTANTS[name][chosen.mutant].applied())
        if chosen.seed is not None:
            return _run_one(name, chosen.seed, chosen.faults, only_digest=chosen.digest)
        seeds = range(chosen.start, chosen.start + chosen.seeds)
        return _run_many(name, seeds, jobs) if chosen.proof is None else _prove(name, seeds, jobs, chosen.proof)


def _run_one(name: FamilyName, seed: int, faults: str | None, *, only_digest: bool) -> int:
    judging.prepare_process()
    plan = family(name).draw(seed)
    if faults is not None:
        plan = judging.with_faults(plan, [] if faults == "none" else [int(number) for number in faults.split(",")])
    findings, history = judging.judge_with_history(plan)
    if only_digest:
        print(records.digest(history))
        return 0
    print(plan.topology)
    for dag in getattr(plan, "dags", ()):
        print(dag)
    for number, fault in enumerate(plan.faults):
        print(f"fault {number}: {fault}")
    for record in history:
        print(record)
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def _run_many(name: FamilyName, seeds: range, jobs: int) -> int:
    tally = Tally(seeds, name)
    for _ in tally.judge(jobs):
        pass
    print(tally)
    return 1 if tally.failed else 0


def _prove(name: FamilyName, seeds: range, jobs: int, path: Path) -> int:
    """Look for the mutants, then judge the seeds; tell the document of it all along."""
    found = dict(judging.spread(partial(counts.look_for, name), list(MUTANTS[name]), jobs))
    commit, tally = proof.commit(), Tally(seeds, name)
    counts.write(None, found, path, counts.SECTIONS[name])
    first, failed = seeds.start, 0
    for judged in tally.judge(jobs):
        behind = seeds.start + judged
        if behind - first >= ROW_SEEDS or behind == seeds.stop:
            per_s = round(tally.seeds_per_s)
            run = counts.Run(first, behind - 1, tally.failed - failed, per_s, proof.now(), commit)
            counts.write(run, found, path, counts.SECTIONS[name])
            first, failed = behind, tally.failed
    survivors = [bug for bug, hit in found.items() if hit is None]
    print(tally)
    print(f"{len(found) - len(survivors)} of {len(found)} mutants found; written to {path}")
    for bug in survivors:
        print(f"nobody noticed the mutant {bug}")
    return 1 if tally.failed or survivors else 0


class Tally:
    """Seeds being judged, and how many of them failed."""

    def __init__(self, seeds: range, name: FamilyName) -> None:
        self._name: FamilyName = name
        self._seeds = seeds
        self._judged = 0
        self._began_at = time.monotonic()
        self.failed = 0

    def judge(self, jobs: int) -> Iterator[int]:
        """Judge them all, and show where it stands; yield, in the order of the seeds, how many are judged."""
        console = Console(stderr=True)
        shown = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("seeds", total=len(self._seeds))
            for judged, some in judging.judge_many(self._seeds, jobs, self._name):
                self._judged += judged
                self.failed += len(some)
                for failure in some[: FAILURES_SHOWN_MAX - shown]:
                    shown += 1
                    progress.console.print(str(failure), highlight=False, markup=False, soft_wrap=True)
                progress.update(task, advance=judged, description=f"{self.failed} failed")
                yield self._judged

    @property
    def seeds_per_s(self) -> float:
        """How many a second, by all jobs together."""
        return self._judged / (time.monotonic() - self._began_at)

    def __str__(self) -> str:
        first, per_s = self._seeds.start, self.seeds_per_s
        return f"{self._judged:,} seeds from {first:,}: {self.failed:,} failed; {per_s:,.0f} seeds a second"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
