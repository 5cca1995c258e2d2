"""Runs a scenario and judges it; runs many, over all cores; makes a failing one small."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog
from tests.proof.simulation.checker import Finding
from tests.proof.simulation.families import FamilyName, family, family_of
from tests.proof.simulation.records import Record
from tests.proof.simulation.scenario import Scenario

UNFORESEEN_SHOWN_MAX = 5  # of one scenario
SEEDS_A_CHUNK = 50  # judged between two reports of a worker process
ScenarioT = TypeVar("ScenarioT", bound=Scenario)
Item = TypeVar("Item")
Result = TypeVar("Result")

# A seed makes some thousand objects that die with it; looking for cycles among them takes longer than it frees.
GC_THRESHOLDS = (200_000, 50, 100)


unforeseen: list[str] = []  # errors that cost what they are about a while, and that no scenario injects: bugs


def note_unforeseen(logger: object, event: object, exc_info: object) -> None:
    """Note what a supervisor, not a runner, logs with a traceback: it goes on, and nothing else tells of it."""
    if isinstance(exc_info, Exception) and str(logger).startswith("headgate.supervisor"):
        unforeseen.append(f"{event}: {exc_info!r}")


def name_of_logger(*names: str) -> str:
    """Return the name of a logger, in place of one that writes somewhere."""
    return "".join(names)


class Silent:
    """A logger that discards everything: a log of a million injected faults is slow and of no use."""

    def __init__(self, logger: object, *_arguments: object, **_bound: object) -> None:
        self._logger = logger

    def bind(self, **_fields: object) -> Silent:
        """Return itself."""
        return self

    def _say_nothing(self, *_arguments: object, **_fields: object) -> None:
        pass

    debug = info = warning = critical = exception = _say_nothing

    def error(self, event: object, *_arguments: object, exc_info: object = None, **_fields: object) -> None:
        """Say nothing, but note what is a bug."""
        note_unforeseen(self._logger, event, exc_info)


def prepare_process() -> None:
    """Prepare this process for simulations only: no logs, and a garbage collector that rarely runs."""
    wrapper: Any = Silent
    structlog.configure(wrapper_class=wrapper, logger_factory=name_of_logger, cache_logger_on_first_use=True)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def judge(plan: Scenario) -> list[Finding]:
    """Run a scenario and return the findings. An error in the simulation itself is a finding, too."""
    return judge_with_history(plan)[0]


def judge_with_history(plan: Scenario) -> tuple[list[Finding], list[Record]]:
    """Run a scenario and return the findings and the history."""
    unforeseen.clear()
    try:
        history = family_of(plan).run(plan)
    except Exception as error:
        return [Finding("broke", f"the simulation: {error!r}", 0.0)], []
    broken = [Finding("broke", what, 0.0) for what in unforeseen[:UNFORESEEN_SHOWN_MAX]]
    return [*family_of(plan).check(plan, history), *broken], history


def with_faults(plan: ScenarioT, numbers: Sequence[int]) -> ScenarioT:
    """Return the scenario with only these of its faults, by their place."""
    return msgspec.structs.replace(plan, faults=tuple(plan.faults[number] for number in numbers))


# --- making a failure small ------------------------------------------------------------------------


def shrink(items: Sequence[int], still_fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return a part of ``items`` that still fails and of which no single one can be left out (delta debugging)."""
    kept = list(items)
    pieces = 2
    while kept:
        size = max(1, len(kept) // pieces)
        parts = [kept[start : start + size] for start in range(0, len(kept), size)]
        for part in parts:
            rest = [item for item in kept if item not in part]
            if still_fails(rest):
                kept, pieces = rest, max(2, pieces - 1)
                break
        else:
            if size == 1:
                return kept
            pieces = min(len(kept), pieces * 2)
    return kept


def shrink_faults(plan: Scenario, kinds: frozenset[str]) -> list[int]:
    """Return the places of the faults that are needed to find something of one of these kinds."""

    def still_fails(numbers: Sequence[int]) -> bool:
        return any(finding.kind in kinds for finding in judge(with_faults(plan, numbers)))

    return shrink(range(len(plan.faults)), still_fails)


# --- many ------------------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True):
    """A seed with findings, the faults it takes, and the command that shows it."""

    seed: int
    findings: tuple[str, ...]
    faults: tuple[int, ...]
    kept: tuple[Any, ...]
    option: str = ""

    @property
    def command(self) -> str:
        """The command that reproduces it."""
        faults = ",".join(map(str, self.faults)) or "none"
        return f"python -m tests.proof.simulation {self.option}--seed {self.seed} --faults {faults}"

    def __str__(self) -> str:
        lines = [f"seed {self.seed}:", *(f"    {finding}" for finding in self.findings[:10])]
        lines += [f"    needs {fault}" for fault in self.kept]
        return "\n".join([*lines, f"    {self.command}"])


def judge_seed(seed: int, name: FamilyName = "pair") -> Failure | None:
    """Judge one seed of a family; shrink it if it fails."""
    plan = family(name).draw(seed)
    findings = judge(plan)
    if not findings:
        return None
    faults = shrink_faults(plan, frozenset(finding.kind for finding in findings))
    small, option = with_faults(plan, faults), family(name).option
    return Failure(seed, tuple(str(finding) for finding in judge(small)), tuple(faults), small.faults, option)


def _judge_chunk(name: FamilyName, chunk: range) -> tuple[int, list[Failure]]:
    found = (judge_seed(seed, name) for seed in chunk)
    return len(chunk), [failure for failure in found if failure is not None]


def judge_many(seeds: range, jobs: int, name: FamilyName = "pair") -> Iterator[tuple[int, list[Failure]]]:
    """Yield, chunk by chunk and in their order, how many seeds were judged and which failed."""
    chunks = [seeds[start : start + SEEDS_A_CHUNK] for start in range(0, len(seeds), SEEDS_A_CHUNK)]
    yield from spread(partial(_judge_chunk, name), chunks, jobs)


def spread(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """Yield what ``work`` returns of each item, in their order, from so many processes."""
    if jobs == 1:
        prepare_process()
        yield from map(work, items)
        return
    # Spawned, not forked: a fork would inherit the parent's database.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=prepare_process) as pool:
        yield from pool.imap(work, items)
