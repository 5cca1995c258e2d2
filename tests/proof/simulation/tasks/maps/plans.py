"""What a seed of tasks means for a mapped task: over what it is expanded, how many at a time, and how it is drawn."""

from __future__ import annotations

import random
from typing import Literal

from tests.proof.simulation.scenario import Part

from headgate.protocol.messages import maps
from headgate.protocol.messages.maps import Elements, MapSpec, Output, Values

LIST_KEY = "list"  # of the XCom that holds the values for a mapped task below
EndAt = Literal["fail", "skip"]
LENGTHS = 6  # a list has less values than that


class Emits(Part, frozen=True):
    """What a task emits: ``count`` elements, the same in every try, of which ``early`` are stored before it ends.

    If they ``have_keys`` each try emits them in an order of its own, and the first of them twice.
    """

    count: int
    early: int
    have_keys: bool = False

    def values(self, try_number: int) -> list[int]:
        """Return what a try emits, in its order."""
        in_order = list(range(self.count))
        if not self.have_keys or not in_order:
            return in_order
        first = try_number % self.count
        return [*in_order[first:], *in_order[:first], first]


class Worklist(Part, frozen=True):
    """What the instances of a task append to it, or those of the tasks ``by`` of its group to the task ``to``.

    The instance at an index appends one value for each of the keys that ``appends`` has in turn; an empty one is none.
    Of a loop ``stops`` has in turn, by the number of the try, the iteration that its gate takes for the last one.
    """

    to: str
    given: int
    length_max: int
    by: tuple[str, ...] = ()
    appends: tuple[tuple[str, ...], ...] = ((),)
    stops: tuple[int, ...] = ()

    @property
    def spec(self) -> maps.Worklist:
        """What the DAG file says of it."""
        return maps.Worklist(self.to, self.given, self.length_max, is_loop=bool(self.stops))

    @property
    def room(self) -> int:
        """How many values may be appended."""
        return self.length_max - self.given

    def keys(self, task: str, index: int, try_number: int) -> tuple[str, ...]:
        """Return the keys of what the instance of a task appends in a try."""
        if self.stops and task == self.to:
            is_last = index >= self.stops[(try_number - 1) % len(self.stops)] or index + 1 >= self.length_max
            return () if is_last else (str(index + 1),)
        return self.appends[(index + try_number - 1) % len(self.appends)] if task in self.by else ()


class Mapped(Part, frozen=True):
    """How a task is mapped: over what ``of`` leaves, which may be mapped itself, or over ``count`` values of the file.

    ``active_max`` is how many of its instances may be with workers at once. It may be mapped with the others of its
    ``group``, over what ``of`` emits if that is what ``of`` does, or over a ``worklist``. ``ends``: by the index of an
    instance, how its first tries end, and how many they are.
    """

    of: str = ""
    count: int = 0
    window: int = 256
    fail_fast: bool = False
    failures_max: int | None = None
    active_max: int | None = None
    group: str = ""
    is_of_elements: bool = False
    worklist: Worklist | None = None
    ends: tuple[tuple[int, EndAt, int], ...] = ()

    @property
    def spec(self) -> MapSpec:
        """What the DAG file says of it."""
        source: maps.Source = Output(self.of, LIST_KEY) if self.of else Values(self.count)
        if self.is_of_elements:
            source = Elements(self.of)
        elif self.worklist is not None:
            source = self.worklist.spec
        return MapSpec(source, self.window, self.fail_fast, self.failures_max)

    @property
    def grows(self) -> bool:
        """Whether there may be more values later."""
        return self.is_of_elements or self.worklist is not None

    @property
    def stops_at(self) -> int | None:
        """How many instances may fail before no other one begins; None for any number."""
        return 1 if self.fail_fast else self.failures_max

    def end_at(self, index: int, try_number: int) -> EndAt | None:
        """Return how the try of an instance ends, if it ends otherwise than those at other indexes."""
        return next((end for at, end, tries in self.ends if at == index and try_number <= tries), None)


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
