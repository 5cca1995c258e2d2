"""What the command runs: campaigns of one kind, a few at a time, with what they count."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

WRITE_INTERVAL_S = 60.0  # a run of hours that is cut off loses no more of its counts than this


class Plan(Protocol):
    """One campaign that is to be run."""

    @property
    def steps(self) -> int:
        """How far it brings a progress bar: cells, or kills."""
        ...


class Result(Protocol):
    """What came of a cell."""

    @property
    def kills(self) -> int: ...

    @property
    def is_good(self) -> bool: ...


PlanT = TypeVar("PlanT", bound=Plan)
ResultT = TypeVar("ResultT", bound=Result)


@dataclass(frozen=True)
class Part(Generic[PlanT, ResultT]):
    """Campaigns of one kind.

    ``run_one`` runs the campaign of a number; ``broken`` says what one comes to that raised, with its traceback.
    ``write`` puts what was counted into the document, ``words`` says it in a few words.
    """

    todo: Sequence[PlanT]
    run_one: Callable[[int, PlanT], list[ResultT]]
    broken: Callable[[PlanT, str], ResultT]
    write: Callable[[list[ResultT], float], object]
    words: Callable[[list[ResultT]], str]


def run_all(
    part: Part[PlanT, ResultT],
    on_results: Callable[[PlanT, list[ResultT]], object],
    *,
    jobs: int,
    is_over: Callable[[], bool],
) -> None:
    """Run the plans in order until all are done or ``is_over``; campaigns that have begun are finished."""
    waiting = list(enumerate(part.todo))
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[list[ResultT]], PlanT] = {}
        while (waiting and not is_over()) or running:
            while waiting and len(running) < jobs and not is_over():
                number, plan = waiting.pop(0)
                running[pool.submit(part.run_one, number, plan)] = plan
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                plan = running.pop(done)
                on_results(plan, _results_of(part, plan, done))


def _results_of(part: Part[PlanT, ResultT], plan: PlanT, done: Future[list[ResultT]]) -> list[ResultT]:
    """A campaign that breaks fails by itself, and the others go on."""
    try:
        return done.result()
    except Exception as error:
        return [part.broken(plan, "".join(traceback.format_exception(error)))]


def run_part(part: Part[Any, Any], console: Console, *, jobs: int, deadline: float) -> bool:
    """Run a part until all is done or the deadline of the monotonic clock is over, and write what it counted.

    Returns whether nothing failed. An interrupt cuts it short, and is raised again when all is written.
    """
    results: list[Any] = []
    started_at = written_at = time.monotonic()
    with _progress(console) as bar:
        task = bar.add_task("nothing found", total=sum(plan.steps for plan in part.todo))

        def note(plan: Any, some: list[Any]) -> None:
            nonlocal written_at
            results.extend(some)
            for result in some:
                if not result.is_good:
                    bar.print(str(result), markup=False)
            bar.update(task, advance=plan.steps, description=part.words(results))
            if time.monotonic() - written_at >= WRITE_INTERVAL_S:
                written_at = time.monotonic()
                part.write(results, time.monotonic() - started_at)

        try:
            run_all(part, note, jobs=jobs, is_over=lambda: time.monotonic() >= deadline)
        except KeyboardInterrupt:
            bar.print("cut short; what was counted is written")
            raise
        finally:
            part.write(results, time.monotonic() - started_at)
    failed = sum(not result.is_good for result in results)
    kills_per_min = sum(result.kills for result in results) / (time.monotonic() - started_at) * 60
    console.print(f"{len(results)} results, {failed} failed; {kills_per_min:.0f} kills a minute")
    return not failed


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console)
