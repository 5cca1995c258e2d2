"""What the instances of a mapped task have left, as one sequence that is read by pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, overload

from headgate.protocol.messages.queries import GetXComs, XComPage
from headgate.protocol.values import decode_value

XComPageReader: TypeAlias = Callable[[GetXComs], XComPage]


class MappedOutput(Sequence[Any]):
    """The values that the instances of a mapped task have pushed under one key, in the order of their indexes.

    It has a value for each instance that has succeeded, None for one that pushed none. It is never in memory as a
    whole: ``len`` is asked for, and iteration reads pages. ``missing`` are the indexes of the instances without a
    value, because they failed or were skipped. To leave all values as an XCom of one's own takes ``list(values)``.

    Without ``key`` it has the elements that a task has emitted so far.
    """

    encode_hint = ", which is read by pages: give list(values)"

    def __init__(self, task_id: str, key: str | None, read: XComPageReader) -> None:
        self._task_id = task_id
        self._key = key
        self._read = read
        self._page: tuple[int, XComPage] = (0, XComPage((), 0, 0))  # that of the last index, and where it begins

    def __repr__(self) -> str:
        what = "elements" if self._key is None else f"values {self._key!r}"
        return f"<{len(self)} {what} of {self._task_id!r}>"

    def __len__(self) -> int:
        return self._pull(limit=1).count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        offset = index if index >= 0 else len(self) + index
        first, page = self._page
        if offset >= 0 and not first <= offset < first + len(page.values):
            # One value alone, unless the one before was asked for last.
            follows = page.values and offset == first + len(page.values)
            first, page = self._page = offset, self._after(page.values[-1][0]) if follows else self._at(offset)
        if offset < 0 or not page.values:
            raise IndexError(f"{self!r} has no value {index}")
        return _decoded(page.values[offset - first][1])

    def __iter__(self) -> Iterator[Any]:
        for _, value in self._items():
            yield _decoded(value)

    @property
    def missing(self) -> list[int]:
        """The indexes of the instances that have no value here; found by reading all values."""
        first = self._pull(limit=1)
        there = {index for index, _ in self._items()}
        return [index for index in range(first.count + first.missing) if index not in there]

    def _pull(self, **part: Any) -> XComPage:
        return self._read(GetXComs(self._task_id, self._key, **part))

    def _at(self, number: int) -> XComPage:
        # If none is missing before it, it is the one with this index, which is found without passing over the others.
        page = self._pull(after=number - 1, limit=1)
        if not page.missing and page.values and page.values[0][0] == number:
            return page
        return self._pull(offset=number, limit=1)

    def _after(self, index: int) -> XComPage:
        # Not counted, so that to read all pages does not look at all instances for each of them.
        return self._pull(after=index, is_counted=False)

    def _items(self) -> Iterator[tuple[int, bytes | None]]:
        after = -1
        while values := self._after(after).values:
            yield from values
            after = values[-1][0]


def _decoded(value: bytes | None) -> Any:
    return None if value is None else decode_value(value)


class Computed(Sequence[Any]):
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
