"""The whole matrix: which campaigns there are, the databases they run on, and running them a few at a time."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url
from tests.crash.campaign import FAULTS, Campaign, Result, is_possible

from headgate.protocol.marks import MARKS
from headgate.store import schema
from headgate.store.engine import open_engine

POSTGRES_URL = os.environ.get("HEADGATE_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
POSTGRES_CONNECT_TIMEOUT_S = 5
SUBSCRIBERS = (1, 3)
RANDOM_KILLS_AT_ONCE = 20  # of one campaign: its history is read again and again, so it stays short


@dataclass(frozen=True)
class Plan:
    """One campaign: a mark with all its faults, or (``mark`` is None) so many random kills."""

    dialect: str
    subscribers: int
    mark: str | None
    kills: int = 0

    @property
    def steps(self) -> int:
        """How far it brings a progress bar: cells, or kills."""
        if self.mark is None:
            return self.kills
        return sum(is_possible(self.mark, fault, self.dialect) for fault in FAULTS)


def plans(dialects: list[str], marks: list[str] | None, kills: int, seed: int) -> list[Plan]:
    """Return all campaigns, mixed, so that a run that is cut short has seen something of everything."""
    cells = [
        Plan(dialect, subscribers, mark)
        for mark, dialect, subscribers in itertools.product(marks or MARKS, dialects, SUBSCRIBERS)
    ]
    variants = itertools.cycle(itertools.product(dialects, SUBSCRIBERS))
    sizes = [min(RANDOM_KILLS_AT_ONCE, kills - done) for done in range(0, kills, RANDOM_KILLS_AT_ONCE)]
    mixed = cells + [Plan(*next(variants), None, size) for size in sizes]
    random.Random(seed).shuffle(mixed)
    return mixed


class Databases:
    """Makes empty, migrated databases, each a copy of one that was migrated once."""

    def __init__(self, folder: Path, dialects: list[str]) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._template = f"headgate_crash_{os.getpid()}"
        self._admin: psycopg.Connection[Any] | None = None
        _migrate(f"sqlite:///{folder}/migrated.db")
        if "postgresql" in dialects:
            self._admin = psycopg.connect(POSTGRES_URL, autocommit=True, connect_timeout=POSTGRES_CONNECT_TIMEOUT_S)
            self._admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._template)))
            _migrate(self._postgres_url(self._template))

    def close(self) -> None:
        """Drop what was made on the server."""
        if self._admin is not None:
            self._drop(self._template)
            self._admin.close()

    @contextmanager
    def one(self, dialect: str, folder: Path) -> Iterator[str]:
        """Give the URL of a database for a campaign in ``folder``; it is gone afterwards."""
        if dialect == "sqlite":
            shutil.copy(self._folder / "migrated.db", folder / "headgate.db")
            yield f"sqlite:///{folder}/headgate.db"
            return
        assert self._admin is not None
        with self._lock:
            name = f"{self._template}_{next(self._numbers)}"
            command = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
            self._admin.execute(command.format(sql.Identifier(name), sql.Identifier(self._template)))
        try:
            yield self._postgres_url(name)
        finally:
            with self._lock:
                self._drop(name)

    def _drop(self, name: str) -> None:
        assert self._admin is not None
        self._admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _postgres_url(self, name: str) -> str:
        return make_url(POSTGRES_URL).set(database=name).render_as_string(hide_password=False)


def _migrate(url: str) -> None:
    engine = open_engine(url)
    schema.upgrade(engine)
    engine.dispose()


class Matrix:
    """Runs campaigns, ``jobs`` at a time; what failed keeps its folder."""

    def __init__(self, folder: Path, databases: Databases, *, seed: int, jobs: int) -> None:
        self._folder = folder
        self._databases = databases
        self._seed = seed
        self._jobs = jobs

    def run(
        self, todo: list[Plan], on_results: Callable[[Plan, list[Result]], object], is_over: Callable[[], bool]
    ) -> None:
        """Run the plans in order until all are done or ``is_over``; campaigns that have begun are finished."""
        waiting = list(enumerate(todo))
        with ThreadPoolExecutor(self._jobs) as pool:
            running: dict[Future[list[Result]], Plan] = {}
            while (waiting and not is_over()) or running:
                while waiting and len(running) < self._jobs and not is_over():
                    number, plan = waiting.pop(0)
                    running[pool.submit(self.run_one, number, plan)] = plan
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    on_results(running.pop(done), done.result())

    def run_one(self, number: int, plan: Plan) -> list[Result]:
        """Run one campaign in a folder and on a database of its own."""
        folder = self._folder / f"{number}-{plan.mark or 'random'}-{plan.dialect}-{plan.subscribers}"
        folder.mkdir()
        results = []
        seed = self._seed * 1_000_003 + number
        with (
            self._databases.one(plan.dialect, folder) as url,
            Campaign(folder, url, subscribers=plan.subscribers, seed=seed) as campaign,
        ):
            if plan.mark is None:
                results.append(campaign.run_random(plan.kills))
            else:
                for fault in FAULTS:
                    if is_possible(plan.mark, fault, plan.dialect):
                        results.append(campaign.run_cell(plan.mark, fault))
                        if results[-1].error:
                            break  # what state the pair is in nobody knows
            if not any(result.error for result in results) and (drain := campaign.finish()) is not None:
                results.append(drain)
        if all(result.is_good for result in results):
            shutil.rmtree(folder)
        return results
