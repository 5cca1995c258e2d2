"""What a task can be expanded over: lists in the DAG file, outputs of other tasks, and what is made of them.

A `Mappable` says on the wire how many values it will have (`source`), and gives them to the step of an instance
(`values`). Nothing is asked for, and no function of the author's is called, before an instance needs its own value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headgate.protocol.messages import maps
from headgate.protocol.messages.maps import Source
from headgate.tasks.errors import TaskSkipped

if TYPE_CHECKING:
    from headgate.tasks.context import Context
    from headgate.tasks.operator import XComArg


class Mappable:
    """Base of what a task can be expanded over; its methods make another of it."""

    def source(self) -> Source:
        """Return from what the number of values is known."""
        raise NotImplementedError

    def values(self, context: Context) -> Sequence[Any]:
        """Return the values, in an instance of the task."""
        raise NotImplementedError

    def outputs(self) -> Iterator[XComArg]:
        """Yield the outputs of tasks that have to be there."""
        raise NotImplementedError

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


def mappable(value: Any) -> Mappable:
    """Return what a task can be expanded over. Raises TypeError for any other value."""
    if isinstance(value, Mappable):
        return value
    if isinstance(value, Mapping):
        return Given(list(value.items()))
    if isinstance(value, list | tuple | range):
        return Given(value)
    raise TypeError(f"a list, a dict or the output of a task is needed, not the {type(value).__name__} {value!r:.100}")


class Given(Mappable):
    """Values that stand in the DAG file; those of a dict are pairs of key and value."""

    def __init__(self, given: Sequence[Any]) -> None:
        self.given = given

    def source(self) -> Source:
        return maps.Values(len(self.given))

    def values(self, context: Context) -> Sequence[Any]:
        return self.given

    def outputs(self) -> Iterator[XComArg]:
        return iter(())


class MappedValues(Mappable):
    """What a function makes of each value, or those of which it is true."""

    def __init__(self, of: Mappable, function: Callable[[Any], Any], *, is_filter: bool = False) -> None:
        if not callable(function):
            raise TypeError(f"a plain function is needed, not the {type(function).__name__} {function!r:.100}")
        self._of = of
        self._function = function
        self._is_filter = is_filter

    def source(self) -> Source:
        return self._of.source()

    def values(self, context: Context) -> Sequence[Any]:
        of = self._of.values(context)
        return _Computed(len(of), lambda index: self._value(of[index], index))

    def outputs(self) -> Iterator[XComArg]:
        return self._of.outputs()

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

    def outputs(self) -> Iterator[XComArg]:
        for part in self._parts:
            yield from part.outputs()

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

        return _Computed((max if self._is_longest else min)(lengths), at)


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

        return _Computed(sum(lengths), at)


class Combinations(_Combined):
    """Each combination of a value of each part, as a tuple; those of the last part change fastest."""

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

        return _Computed(math.prod(lengths), at)


class _Computed(Sequence[Any]):
    """A sequence whose values are computed when they are asked for; by index only."""

    def __init__(self, length: int, at: Callable[[int], Any]) -> None:
        self._length = length
        self._at = at

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._at(index)
