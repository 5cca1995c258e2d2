"""What a seed of tasks means for a mapped task: over what it is expanded, how many at a time, and how it is drawn."""

from __future__ import annotations

import random

from tests.proof.simulation.scenario import Part

from headgate.protocol.messages.maps import MapSpec, Output, Values

LIST_KEY = "list"  # of the XCom that holds the values for a mapped task below
LENGTHS = 6  # a list has less values than that


class Mapped(Part, frozen=True):
    """How a task is mapped: over what ``of`` leaves, which may be mapped itself, or over ``count`` values of the file.

    ``active_max`` is how many of its instances may be with workers at once.
    """

    of: str = ""
    count: int = 0
    window: int = 256
    fail_fast: bool = False
    failures_max: int | None = None
    active_max: int | None = None

    @property
    def spec(self) -> MapSpec:
        """What the DAG file says of it."""
        source = Output(self.of, LIST_KEY) if self.of else Values(self.count)
        return MapSpec(source, self.window, self.fail_fast, self.failures_max)

    @property
    def stops_at(self) -> int | None:
        """How many instances may fail before no other one begins; None for any number."""
        return 1 if self.fail_fast else self.failures_max


def list_length(leaves: int, try_number: int) -> int:
    """Return how many values a task leaves in a try: if it is cleared, it leaves more or less."""
    return (leaves + 4 * try_number) % LENGTHS


def task_of(name: str) -> str:
    """Return the name of the task that a row belongs to: an instance has its index behind it, in brackets."""
    return name.partition("[")[0]


def index_of(name: str) -> int:
    """Return the index of an instance; -1 for the task itself."""
    return int(name.partition("[")[2].rstrip("]") or -1)


def draw(rng: random.Random, of: str) -> Mapped:
    """Draw how a task is mapped. ``of`` is a task upstream of it, or empty."""
    return Mapped(
        of=of,
        count=0 if of else rng.choice((0, 1, 2, 3, 5, 8)),
        window=rng.choice((1, 2, 3, 5, 256)),
        fail_fast=rng.random() < 0.2,
        failures_max=rng.choice((None, None, None, 1, 2)),
        active_max=rng.choice((None, None, 1, 2)),
    )
