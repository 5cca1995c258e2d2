"""What a task can be expanded over: lists in the DAG file, outputs of other tasks, and what is made of them.

A `Mappable` says on the wire how many values it will have (`source`), and gives them to the step of an instance
(`values`). Nothing is asked for, and no function of the author's is called, before an instance needs its own value.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from headgate.protocol.messages import maps
from headgate.protocol.messages.maps import Source
from headgate.tasks.errors import TaskSkipped
from headgate.tasks.maps.outputs import Computed

if TYPE_CHECKING:
    from headgate.tasks.context import Context


source_digest: ContextVar[str] = ContextVar("source_digest", default="")  # of the DAG file that is being run


class Mappable:
    """Base of what a task can be expanded over; its methods make another of it."""

    def source(self) -> Source:
        """Return from what the number of values is known."""
        raise NotImplementedError

    def values(self, context: Context) -> Sequence[Any]:
        """Return the values, in an instance of the task."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Mappable]:
        """Yield the lists and outputs of tasks that this is made of."""
        yield self

    def in_file(self) -> Sequence[Any]:
        """Return the values of a leaf that stand in the DAG file."""
        return ()

    def map(self, function: Callable[[Any], Any]) -> Mappable:
        """Return ``function`` of each value, called in its instance, which is skipped if it raises `TaskSkipped`."""
        return MappedValues(self, function)

    def filter(self, function: Callable[[Any], Any]) -> Mappable:
        """Leave out the values of which ``function`` is false: their instances are skipped, and keep their indexes."""
        return MappedValues(self, function, is_filter=True)

    def zip(self, *others: Any, fillvalue: Any = NotImplemented) -> Mappable:
        """Return tuples of a value of each, as many as the shortest has; with ``fillvalue`` as the longest has."""
        return Zipped([self, *map(mappable, others)], fillvalue)

    def concat(self, *others: Any) -> Mappable:
        """Return all values of this, then those of the others."""
        return Concatenated([self, *map(mappable, others)])

    def batch(self, count: int) -> Mappable:
        """Return lists of up to ``count`` values, of which each is for one instance; none are empty."""
        return Batched(self, count)


def mappable(value: Any) -> Mappable:
    """Return what a task can be expanded over. Raises TypeError for any other value."""
    if isinstance(value, Mappable):
        return value
    if isinstance(value, Mapping):
        return Given(list(value.items()))
    if isinstance(value, list | tuple | range):
        return Given(value)
    has_output = isinstance(getattr(value, "output", None), Mappable)
    hint = ": take its .output" if has_output else ""
    kind = type(value).__name__
    raise TypeError(f"a list, a dict or the output of a task is needed, not the {kind} {value!r:.100}{hint}")


class Given(Mappable):
    """Values that stand in the DAG file; those of a dict are pairs of key and value.

    Outputs of tasks within them, which need not be upstream otherwise, are replaced by their values.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self.given = given

    def source(self) -> Source:
        return maps.Values(len(self.given))

    def in_file(self) -> Sequence[Any]:
        return self.given

    def values(self, context: Context) -> Sequence[Any]:
        from headgate.tasks.operators import resolved  # it imports this module

        return Computed(len(self.given), lambda index: resolved(self.given[index], context))


class MappedValues(Mappable):
    """What a function makes of each value, or those of which it is true."""

    def __init__(self, of: Mappable, function: Callable[[Any], Any], *, is_filter: bool = False) -> None:
        if (problem := function_problem(function)) is not None:
            raise TypeError(problem)
        self._of = of
        self._function = function
        self._is_filter = is_filter

    def source(self) -> Source:
        return self._of.source()

    def values(self, context: Context) -> Sequence[Any]:
        of = self._of.values(context)
        return Computed(len(of), lambda index: self._value(of[index], index))

    def leaves(self) -> Iterator[Mappable]:
        return self._of.leaves()

    def _value(self, value: Any, index: int) -> Any:
        found = self._function(value)
        if not self._is_filter:
            return found
        if not found:
            raise TaskSkipped(f"the value {index} was filtered out")
        return value


class _Combined(Mappable):
    """Base of those that are made of several."""

    def __init__(self, parts: Sequence[Mappable]) -> None:
        self._parts = parts

    def leaves(self) -> Iterator[Mappable]:
        for part in self._parts:
            yield from part.leaves()

    def _sources(self) -> tuple[Source, ...]:
        return tuple(part.source() for part in self._parts)

    def _values(self, context: Context) -> list[Sequence[Any]]:
        return [part.values(context) for part in self._parts]


class Zipped(_Combined):
    """Tuples of a value of each part."""

    def __init__(self, parts: Sequence[Mappable], fillvalue: Any) -> None:
        super().__init__(parts)
        self._fillvalue = fillvalue
        self._is_longest = fillvalue is not NotImplemented

    def source(self) -> Source:
        return maps.Zip(self._sources(), self._is_longest)

    def values(self, context: Context) -> Sequence[Any]:
        parts = self._values(context)
        lengths = list(map(len, parts))

        def at(index: int) -> tuple[Any, ...]:
            return tuple(
                part[index] if index < length else self._fillvalue for part, length in zip(parts, lengths, strict=True)
            )

        return Computed((max if self._is_longest else min)(lengths), at)


class Concatenated(_Combined):
    """The values of one part after the other."""

    def source(self) -> Source:
        return maps.Concat(self._sources())

    def values(self, context: Context) -> Sequence[Any]:
        parts = self._values(context)
        lengths = list(map(len, parts))

        def at(index: int) -> Any:
            for part, length in zip(parts, lengths, strict=True):
                if index < length:
                    return part[index]
                index -= length
            raise AssertionError("the index is below the sum of the lengths")

        return Computed(sum(lengths), at)


class Combinations(_Combined):
    """Each combination of a value of each part, as a tuple; those of the last part change fastest."""

    @property
    def alone(self) -> Mappable | None:
        """Its part, if it has only one."""
        return self._parts[0] if len(self._parts) == 1 else None

    def source(self) -> Source:
        sources = self._sources()
        return sources[0] if len(sources) == 1 else maps.Product(sources)

    def values(self, context: Context) -> Sequence[Any]:
        parts = self._values(context)
        lengths = list(map(len, parts))

        def at(index: int) -> tuple[Any, ...]:
            places = []
            for length in reversed(lengths):
                index, place = divmod(index, length)
                places.append(place)
            return tuple(part[place] for part, place in zip(parts, reversed(places), strict=True))

        return Computed(math.prod(lengths), at)


class Batched(Mappable):
    """Lists of values; those that `filter` leaves out, or that a function of `map` skips, are not in them."""

    def __init__(self, of: Mappable, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"the count of a batch must be an int, not {count!r:.100}")
        if count < 1:
            raise ValueError(f"a batch has 1 value or more, not {count}")
        self._of = of
        self._count = count

    def source(self) -> Source:
        return maps.Batch(self._of.source(), self._count)

    def values(self, context: Context) -> Sequence[Any]:
        of = self._of.values(context)
        length = len(of)

        def at(index: int) -> list[Any]:
            first = index * self._count
            found = []
            for place in range(first, min(first + self._count, length)):
                with contextlib.suppress(TaskSkipped):
                    found.append(of[place])
            if not found:
                raise TaskSkipped(f"all values of the batch {index} were left out")
            return found

        return Computed(-(-length // self._count), at)

    def leaves(self) -> Iterator[Mappable]:
        return self._of.leaves()


def function_problem(function: object) -> str | None:
    """Return the problem with a function of the author's that an instance is to call; None if there is none."""
    if not callable(function) or isinstance(function, Mappable):
        return f"a plain function is needed, not the {type(function).__name__} {function!r:.100}"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return f"a plain function is needed, not the async {function!r:.100}: tasks are synchronous"
    if hasattr(function, "expand_kwargs"):
        return f"a plain function is needed, not the task {function!r:.100}: give its .function"
    return None
