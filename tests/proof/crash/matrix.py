"""The whole matrix: which campaigns there are, and running one of them."""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.proof.crash.campaign import FAULTS, SERVER_FAULTS, Campaign, Fault, Result, is_possible
from tests.proof.crash.databases import Databases

from headgate.protocol.marks import MARKS

SUBSCRIBERS = (1, 3)
RANDOM_KILLS_AT_ONCE = 40  # of one campaign: enough to be worth its beginning and its end


@dataclass(frozen=True)
class Plan:
    """One campaign: a mark with some of its faults, or (``mark`` is None) so many random kills."""

    dialect: str
    subscribers: int
    mark: str | None
    faults: tuple[Fault, ...] = ()
    kills: int = 0

    @property
    def steps(self) -> int:
        """How far it brings a progress bar: cells, or kills."""
        return self.kills or len(self.faults)

    @property
    def needs_server(self) -> bool:
        """Whether it restarts the server, which must be nobody else's."""
        return any(fault in SERVER_FAULTS for fault in self.faults)


def plans(
    dialects: list[str], marks: list[str] | None, kills: int, seed: int, *, repeat: int = 1, restarts: bool = True
) -> list[Plan]:
    """Return all campaigns, mixed, so that a run that is cut short has seen something of everything.

    The matrix is in it ``repeat`` times; ``restarts``: with the faults that restart the server.
    """
    cells = []
    for mark, dialect, subscribers in itertools.product(MARKS if marks is None else marks, dialects, SUBSCRIBERS):
        possible = [fault for fault in FAULTS if is_possible(mark, fault, dialect)]
        cells.append(Plan(dialect, subscribers, mark, tuple(f for f in possible if f not in SERVER_FAULTS)))
        if restarts and dialect == "postgresql":
            cells.append(Plan(dialect, subscribers, mark, tuple(f for f in possible if f in SERVER_FAULTS)))
    variants = itertools.cycle(itertools.product(dialects, SUBSCRIBERS))
    sizes = [min(RANDOM_KILLS_AT_ONCE, kills - done) for done in range(0, kills, RANDOM_KILLS_AT_ONCE)]
    mixed = cells * repeat + [Plan(*next(variants), None, kills=size) for size in sizes]
    random.Random(seed).shuffle(mixed)
    return mixed


class Matrix:
    """Runs campaigns; what failed keeps its folder."""

    def __init__(self, folder: Path, databases: Databases, *, seed: int) -> None:
        self._folder = folder
        self._databases = databases
        self._seed = seed

    def run_one(self, number: int, plan: Plan) -> list[Result]:
        """Run one campaign in a folder and on a database of its own."""
        folder = self._folder / f"{number}-{plan.mark or 'random'}-{plan.dialect}-{plan.subscribers}"
        folder.mkdir()
        results = []
        seed = self._seed * 1_000_003 + number
        with self._databases.one(plan.dialect, folder, needs_server=plan.needs_server) as (url, server):
            with Campaign(folder, url, subscribers=plan.subscribers, seed=seed, server=server) as campaign:
                if plan.mark is None:
                    results.append(campaign.run_random(plan.kills))
                for fault in plan.faults:
                    assert plan.mark is not None
                    results.append(campaign.run_cell(plan.mark, fault))
                    if results[-1].error:
                        break  # what state the pair is in nobody knows
                if not any(result.error for result in results) and (drain := campaign.finish()) is not None:
                    results.append(drain)
            if not any(result.error for result in results):
                results.append(campaign.replay())
        if all(result.is_good for result in results):
            shutil.rmtree(folder)
        return results


def broken(plan: Plan, text: str) -> Result:
    """Return what a campaign comes to that raised."""
    return Result(plan.mark or "random", "the test itself", plan.subscribers, plan.dialect, error=text)
