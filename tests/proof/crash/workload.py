"""The interface between a campaign and what its processes work on while they are killed."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from cryptography.fernet import Fernet
from tests.proof.crash.truth import Truth

from headgate.protocol.marks import Mark
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store

Fault = Literal[
    "kill program",
    "kill workers",
    "kill runner",
    "kill supervisor",
    "kill both",
    "kill all",
    "stop",
    "drop connection",
    "database away",
    "restart server",
    "crash server",
]


class Workload(ABC):
    """One kind of work for a supervisor: the pair with a file log, or tasks that defer.

    ``url`` is an empty, migrated database. ``subscribers`` is 0 for a workload that has none.
    """

    name: ClassVar[str]
    command: ClassVar[str]  # of `headgate`, which starts the supervisor
    marks: ClassVar[Mapping[str, Mark]]
    faults: ClassVar[tuple[Fault, ...]]
    subscriber_counts: ClassVar[tuple[int, ...]] = (0,)
    kill_weights: ClassVar[Mapping[Fault, int]]  # of the random kills
    skips_max: ClassVar[int]  # a mark of the flow is passed up to so many times first, to vary the moment of the fault
    is_captured: ClassVar[bool] = False  # whether the frame log of the campaign is replayed at its end
    is_stuck_after_error: ClassVar[bool]  # whether work that has not come to rest in time is judged as if it had
    at_rest: ClassVar[str]  # the state in which `Truth.is_complete` holds, for error messages

    truth: Truth[Any, Any]

    def __init__(self, folder: Path, url: str, subscribers: int = 0) -> None:
        self.folder = folder
        self.url = url
        self.subscribers = subscribers
        self.keys = Fernet.generate_key().decode()
        self.settings: dict[str, str] = {}
        self.environment: Mapping[str, str] = {}  # of all processes of the campaign, which arms their marks

    @abstractmethod
    def warm_up(self, *, is_new: bool) -> None:
        """Return when the supervisor is at work. ``is_new``: it is the first one on this database."""

    @abstractmethod
    def feed(self) -> None:
        """Add a portion of work."""

    @abstractmethod
    def is_hungry(self) -> bool:
        """Whether it is time for the next portion, while a mark is waited for."""

    @abstractmethod
    def work_until_kill(self, randomness: random.Random) -> None:
        """Keep the processes at work until the moment of the next random kill."""

    @abstractmethod
    def counts(self) -> Counter[str]:
        """Return the totals that the proof document shows, since the beginning of the campaign."""

    def wait_progress(self) -> None:
        """Return when all work is done that does not need the one worker that is stopped."""
        raise NotImplementedError("this workload has no workers")

    def programs(self) -> list[int]:
        """Return the pids of the programs of users that run beside the supervisor."""
        raise NotImplementedError("this workload has no programs")

    def close(self) -> None:
        """Leave nothing behind: no connection, and nothing that only this workload has."""
        self.truth.close()

    def is_drainable(self) -> bool:
        """Whether a drain has nothing left to cancel."""
        return True

    @contextmanager
    def _store(self) -> Iterator[Store]:
        """Open the store as a user's command does: its connection is gone afterwards, and no fault is about it."""
        engine = open_engine(self.url)
        with Store(engine, secrets=Secrets([self.keys], source="the tests")) as store:
            yield store
        engine.dispose()
