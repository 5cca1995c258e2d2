"""Mapped tasks on the wire: over which values a task is expanded, told so that nobody needs the values to count them.

The author's file says where the values come from. The supervisor, which imports no such file, only has to know how many
there are: it makes an instance of the task for each (`length`). Which value belongs to an instance is for the worker to
find, when it runs that instance.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias, assert_never

from headgate.protocol.messages import WireStruct

INSTANCES_MAX: Final = 1_000_000  # of one task in one run
WINDOW_MAX: Final = 10_000  # unfinished instances of one task in one run; each is looked for when one ends
DEFAULT_WINDOW: Final = 256
PARTS_MAX: Final = 100  # of a product, a zip or a concatenation
DEPTH_MAX: Final = 20  # of sources in sources
KEY_CHARS_MAX: Final = 250
GROUP_TASKS_MAX: Final = 100  # of one mapped group; all of them have an instance at each of its indexes


class Values(WireStruct, frozen=True, tag="values"):
    """As many values as stand in the DAG file."""

    length: int


class Output(WireStruct, frozen=True, tag="output"):
    """The items of the list or dict that a task has pushed; of a mapped task one value for each that succeeded."""

    task_id: str
    key: str


class Elements(WireStruct, frozen=True, tag="elements"):
    """The elements that a task emits, while it runs: how many there will be is known when it has ended."""

    task_id: str


class Worklist(WireStruct, frozen=True, tag="worklist"):
    """As many values as stand in the DAG file, and those that the instances append while they run.

    They are appended to the task ``task_id``: the one that is mapped over them, or one of its mapped group. There are
    no more when all of them have an instance, and no instance is unfinished. There are never more than ``length_max``.
    Of a loop they are its iterations: each is appended by the one before.
    """

    task_id: str
    given: int
    length_max: int
    is_loop: bool = False


class Zip(WireStruct, frozen=True, tag="zip"):
    """The first values of all parts, then the second ones, and so on: as many as the shortest, or the longest, has."""

    parts: tuple[Source, ...]
    is_longest: bool = False


class Concat(WireStruct, frozen=True, tag="concat"):
    """The values of one part after the other."""

    parts: tuple[Source, ...]


class Product(WireStruct, frozen=True, tag="product"):
    """Each combination of values of its parts; those of the last part change fastest."""

    parts: tuple[Source, ...]


class Batch(WireStruct, frozen=True, tag="batch"):
    """Lists of up to ``count`` values of its part, in their order; only the last one may have fewer."""

    part: Source
    count: int


Source: TypeAlias = Values | Output | Elements | Worklist | Zip | Concat | Product | Batch
OfTask: TypeAlias = Output | Elements
Counted: TypeAlias = OfTask | Worklist


class MapSpec(WireStruct, frozen=True):
    """How a task is mapped; part of `TaskSpec`.

    At most ``window`` instances that have begun are unfinished. With ``fail_fast`` none begins after the first that has
    failed, with ``failures_max`` none after that many. ``given_digest`` says which lists stand in the file,
    because each step makes them anew: the `digest_of` them, and what else a worker compares, after dots; "" if there
    are none.
    """

    source: Source
    window: int = DEFAULT_WINDOW
    fail_fast: bool = False
    failures_max: int | None = None
    given_digest: str = ""


class OwnValue(WireStruct, frozen=True):
    """The value that an instance has of the ``length`` values over which its task is expanded; part of a step.

    It is encoded, and what the task ``task_id`` has left under ``key``, or emitted if that is None. It goes with the
    step because thousands of instances would ask for theirs otherwise, one by one.
    """

    task_id: str
    key: str | None
    length: int
    value: bytes


class Available(NamedTuple):
    """How many values there are so far, at the indexes from 0 on, and whether there will be no more."""

    length: int
    is_complete: bool


def digest_of(parts: Iterable[bytes]) -> str:
    """Return a digest of encoded lists, or of what else lists are made of, in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for one in parts:
        digest.update(b"%d," % len(one) + one)
    return digest.hexdigest()


def of_tasks(source: Source) -> Iterator[OfTask]:
    """Yield what other tasks leave or emit among the sources, as often as it stands there."""
    match source:
        case Values() | Worklist():
            return
        case Output() | Elements():
            yield source
        case Zip(parts=parts) | Concat(parts) | Product(parts):
            for part in parts:
                yield from of_tasks(part)
        case Batch(part):
            yield from of_tasks(part)
        case _:
            assert_never(source)


def available(source: Source, of: Callable[[Counted], Available]) -> Available:
    """Return how many values there are; ``of`` says so of what tasks leave, emit or append.

    A value that there is keeps its index, whatever values are still to come.
    """
    match source:
        case Values(count):
            return Available(count, is_complete=True)
        case Output() | Elements() | Worklist():
            return of(source)
        case Zip(parts, is_longest):
            found = [available(part, of) for part in parts]
            if is_longest and all(part.is_complete for part in found):
                return max(found)
            if is_longest:
                return Available(min(part.length for part in found if not part.is_complete), is_complete=False)
            shortest = min(part.length for part in found)
            return Available(shortest, any(part.is_complete and part.length == shortest for part in found))
        case Concat(parts):
            count = 0
            for part in parts:
                some = available(part, of)
                count += some.length
                if not some.is_complete:
                    return Available(count, is_complete=False)
            return Available(count, is_complete=True)
        case Product(parts):
            first, *others = [available(part, of) for part in parts]
            if not all(part.is_complete for part in others):  # they say how far apart the values of the first are
                return Available(0, is_complete=False)
            return Available(first.length * math.prod(part.length for part in others), first.is_complete)
        case Batch(part, count):
            whole = available(part, of)
            batches = -(-whole.length // count) if whole.is_complete else whole.length // count
            return Available(batches, whole.is_complete)
        case _:
            assert_never(source)


def map_problem(spec: MapSpec, upstream: Collection[str]) -> str | None:
    """Return the problem with how a task is mapped, or None.

    ``upstream`` are the tasks directly upstream of it; of a mapped group those of any of its tasks.
    """
    if not 1 <= spec.window <= WINDOW_MAX:
        return f"window must be in 1..{WINDOW_MAX}, not {spec.window}"
    if spec.failures_max is not None and not 1 <= spec.failures_max <= INSTANCES_MAX:
        return f"failures_max must be in 1..{INSTANCES_MAX}, not {spec.failures_max}"
    if (problem := _source_problem(spec.source, 0)) is not None:
        return problem
    for output in of_tasks(spec.source):
        if output.task_id not in upstream:
            return f"is expanded over the output of {output.task_id!r}, which is not upstream of it"
    least = available(spec.source, lambda output: Available(0, is_complete=True)).length
    return None if least <= INSTANCES_MAX else f"is expanded over {least:,} values; the limit is {INSTANCES_MAX:,}"


def _source_problem(source: Source, depth: int) -> str | None:
    if depth >= DEPTH_MAX:
        return f"is expanded over sources in sources, more than {DEPTH_MAX} deep"
    match source:
        case Values(count):
            return (
                None if 0 <= count <= INSTANCES_MAX else f"is expanded over {count:,} values, not 0..{INSTANCES_MAX:,}"
            )
        case Output(key=key):
            holds = 0 < len(key) <= KEY_CHARS_MAX
            return None if holds else f"the key of an XCom must have 1..{KEY_CHARS_MAX} characters, not {len(key)}"
        case Elements():
            return None
        case Worklist(given=given, length_max=length_max):
            if depth:
                return "a worklist cannot be combined with other values: what is appended decides when it ends"
            holds = 0 <= given <= length_max <= INSTANCES_MAX
            limits = f"0..max_length values, and max_length at most {INSTANCES_MAX:,}"
            return None if holds else f"a worklist has {limits}, not {given:,} values and max_length={length_max:,}"
        case Zip(parts=parts) | Concat(parts) | Product(parts):
            if not 1 <= len(parts) <= PARTS_MAX:
                return f"is expanded over {len(parts)} sources at once, not 1..{PARTS_MAX}"
            return next(filter(None, (_source_problem(part, depth + 1) for part in parts)), None)
        case Batch(part, count):
            if not 1 <= count <= INSTANCES_MAX:
                return f"is expanded over batches of {count:,} values, not of 1..{INSTANCES_MAX:,}"
            return _source_problem(part, depth + 1)
        case _:
            assert_never(source)
