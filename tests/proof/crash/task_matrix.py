"""The matrix of tasks: which campaigns there are, and running one of them."""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.proof.crash.databases import Databases
from tests.proof.crash.task_campaign import FAULTS, SIDES, Fault, Result, TaskCampaign, is_possible

RANDOM_KILLS_AT_ONCE = 40  # of one campaign: enough to be worth its beginning and its end


@dataclass(frozen=True)
class Plan:
    """One campaign: a mark with all its faults, or (``mark`` is None) so many random kills."""

    dialect: str
    mark: str | None
    faults: tuple[Fault, ...] = ()
    kills: int = 0

    @property
    def steps(self) -> int:
        """How far it brings a progress bar: cells, or kills."""
        return self.kills or len(self.faults)


def plans(dialects: list[str], marks: list[str] | None, kills: int, seed: int, *, repeat: int = 1) -> list[Plan]:
    """Return all campaigns, mixed, so that a run that is cut short has seen something of everything."""
    cells = [
        Plan(dialect, mark, tuple(fault for fault in FAULTS if is_possible(fault, dialect)))
        for mark, dialect in itertools.product(SIDES if marks is None else marks, dialects)
    ]
    variants = itertools.cycle(dialects)
    sizes = [min(RANDOM_KILLS_AT_ONCE, kills - done) for done in range(0, kills, RANDOM_KILLS_AT_ONCE)]
    mixed = cells * repeat + [Plan(next(variants), None, kills=size) for size in sizes]
    random.Random(seed).shuffle(mixed)
    return mixed


def run_one(databases: Databases, root: Path, seed: int, number: int, plan: Plan) -> list[Result]:
    """Run one campaign in a folder of its own under ``root``; what failed keeps it."""
    folder = root / f"tasks-{number}-{plan.mark or 'random'}-{plan.dialect}"
    folder.mkdir()
    results = []
    with databases.one(plan.dialect, folder) as (url, _):
        with TaskCampaign(folder, url, seed=seed * 1_000_003 + number) as campaign:
            if plan.mark is None:
                results.append(campaign.run_random(plan.kills))
            for fault in plan.faults:
                assert plan.mark is not None
                results.append(campaign.run_cell(plan.mark, fault))
                if results[-1].error:
                    break  # what state the station is in nobody knows
            if not any(result.error for result in results) and (drain := campaign.finish()) is not None:
                results.append(drain)
    if all(result.is_good for result in results):
        shutil.rmtree(folder)
    return results


def broken(plan: Plan, text: str) -> Result:
    """Return what a campaign comes to that raised."""
    return Result(plan.mark or "random", "the test itself", plan.dialect, error=text)
