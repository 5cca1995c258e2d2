"""The whole matrix: which campaigns there are, and running them, a few at a time."""

from __future__ import annotations

import itertools
import random
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tests.proof.crash.campaign import Campaign, Result, is_possible
from tests.proof.crash.databases import Databases
from tests.proof.crash.faults import SERVER_FAULTS
from tests.proof.crash.workload import Fault, Workload

RANDOM_KILLS_AT_ONCE = 40  # of one campaign: enough to be worth its beginning and its end
WRITE_INTERVAL_S = 60.0  # a run of hours that is cut off loses no more of its counts than this

Planned = TypeVar("Planned")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Plan:
    """One campaign: a mark with some of its faults, or (``mark`` is None) so many random kills."""

    workload: type[Workload]
    dialect: str
    subscribers: int
    mark: str | None
    faults: tuple[Fault, ...] = ()
    kills: int = 0

    @property
    def steps(self) -> int:
        """Its share of a progress bar: cells, or kills."""
        return self.kills or len(self.faults)

    @property
    def needs_server(self) -> bool:
        """Whether it restarts the server, which must be nobody else's."""
        return any(fault in SERVER_FAULTS for fault in self.faults)

    def __str__(self) -> str:
        return f"{self.workload.name}-{self.mark or 'random'}-{self.dialect}-{self.subscribers}"


def plans(
    workload: type[Workload],
    dialects: list[str],
    marks: list[str] | None,
    kills: int,
    seed: int,
    *,
    repeat: int = 1,
    restarts: bool = True,
) -> list[Plan]:
    """Return all campaigns, mixed, so that a run that is cut short has seen something of everything.

    The matrix is in it ``repeat`` times; ``restarts``: with the faults that restart the server.
    """
    cells = []
    counts = workload.subscriber_counts
    for mark, dialect, subscribers in itertools.product(workload.marks if marks is None else marks, dialects, counts):
        possible = [fault for fault in workload.faults if is_possible(mark, fault, dialect)]
        alone = tuple(fault for fault in possible if fault in SERVER_FAULTS)
        cells.append(Plan(workload, dialect, subscribers, mark, tuple(f for f in possible if f not in SERVER_FAULTS)))
        if restarts and alone:
            cells.append(Plan(workload, dialect, subscribers, mark, alone))
    variants = itertools.cycle(itertools.product(dialects, counts))
    sizes = [min(RANDOM_KILLS_AT_ONCE, kills - done) for done in range(0, kills, RANDOM_KILLS_AT_ONCE)]
    mixed = cells * repeat + [Plan(workload, *next(variants), None, kills=size) for size in sizes]
    random.Random(seed).shuffle(mixed)
    return mixed


class Matrix:
    """Runs campaigns, each in a folder of its own under ``folder``; the folder of one that failed is kept."""

    def __init__(self, folder: Path, databases: Databases, *, seed: int) -> None:
        self._folder = folder
        self._databases = databases
        self._seed = seed

    def run_one(self, number: int, plan: Plan) -> list[Result]:
        """Run one campaign on a database of its own. A campaign that breaks is a result that failed."""
        try:
            return self._run(number, plan)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return [Result(plan.mark or "random", "the test itself", plan.dialect, plan.subscribers, error=text)]

    def _run(self, number: int, plan: Plan) -> list[Result]:
        folder = self._folder / f"{number}-{plan}"
        folder.mkdir()
        results = []
        seed = self._seed * 1_000_003 + number
        with self._databases.one(plan.dialect, folder, needs_server=plan.needs_server) as (url, server):
            with Campaign(plan.workload(folder, url, plan.subscribers), seed=seed, server=server) as campaign:
                if plan.mark is None:
                    results.append(campaign.run_random(plan.kills))
                for fault in plan.faults:
                    assert plan.mark is not None
                    results.append(campaign.run_cell(plan.mark, fault))
                    if results[-1].error:
                        break  # the state of the processes is not known
                if not any(result.error for result in results) and (drain := campaign.finish()) is not None:
                    results.append(drain)
            if plan.workload.is_captured and not any(result.error for result in results):
                results.append(campaign.replay())
        if all(result.is_good for result in results):
            shutil.rmtree(folder)
        return results


def run_all(
    todo: Sequence[Planned],
    run_one: Callable[[int, Planned], list[Found]],
    on_results: Callable[[Planned, list[Found]], object],
    *,
    jobs: int,
    deadline: float,
) -> None:
    """Run the plans in order until all are done, or the deadline of the monotonic clock is over.

    Campaigns that have begun are finished.
    """
    waiting = list(enumerate(todo))
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[list[Found]], Planned] = {}
        while (waiting and time.monotonic() < deadline) or running:
            while waiting and len(running) < jobs and time.monotonic() < deadline:
                number, plan = waiting.pop(0)
                running[pool.submit(run_one, number, plan)] = plan
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                on_results(running.pop(done), done.result())


def run_and_write(
    todo: Sequence[Plan],
    run_one: Callable[[int, Plan], list[Result]],
    write: Callable[[list[Result], float], object],
    console: Console,
    *,
    jobs: int,
    deadline: float,
) -> bool:
    """Run the plans, show the progress, and ``write`` the results and how long they took; return whether all are good.

    An interrupt cuts it short, and is raised again when the results are written.
    """
    results: list[Result] = []
    started_at = written_at = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        name = todo[0].workload.name if todo else "nothing"
        task = bar.add_task(name, total=sum(plan.steps for plan in todo))

        def note(plan: Plan, some: list[Result]) -> None:
            nonlocal written_at
            results.extend(some)
            for result in some:
                if not result.is_good:
                    bar.print(str(result), markup=False)
            found = sum(len(result.findings) for result in results)
            kills = sum(result.counts["kills"] for result in results)
            bar.update(task, advance=plan.steps, description=f"{name}: {kills:,} kills, {found} findings")
            if time.monotonic() - written_at >= WRITE_INTERVAL_S:
                written_at = time.monotonic()
                write(results, time.monotonic() - started_at)

        try:
            run_all(todo, run_one, note, jobs=jobs, deadline=deadline)
        except KeyboardInterrupt:
            bar.print("cut short; the results so far are written")
            raise
        finally:
            write(results, time.monotonic() - started_at)
    failed = sum(not result.is_good for result in results)
    kills_per_min = sum(result.counts["kills"] for result in results) / (time.monotonic() - started_at) * 60
    console.print(f"{len(results)} results, {failed} failed; {kills_per_min:.0f} kills a minute")
    return not failed
