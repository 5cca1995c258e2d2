"""Worklists: what a task is expanded over grows while its instances run, because they append to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from headgate.protocol.messages import maps
from headgate.protocol.messages.dags import XCOM_BYTES_MAX
from headgate.protocol.messages.maps import INSTANCES_MAX, Source
from headgate.protocol.messages.steps import Appended
from headgate.protocol.values import encode_value
from headgate.tasks.maps.elements import hash_of_key
from headgate.tasks.maps.outputs import Computed
from headgate.tasks.maps.sources import Mappable

if TYPE_CHECKING:
    from headgate.tasks.context import Context

DEFAULT_LENGTH_MAX: Final = 100_000
APPENDS_PER_STEP_MAX: Final = 10_000
APPENDED_BYTES_MAX: Final = 8 * 1024 * 1024  # by one step: its outcome fits a frame


class AppendMisused(Exception):
    """A step appends, and then defers."""


class TooManyAppended(Exception):
    """A step appends more than its outcome can hold."""


class Worklist(Mappable):
    """Values that stand in the DAG file, and those that instances append with ``ti.append()``.

    It ends when each of its values has an instance, and none of these is unfinished.
    """

    def __init__(self, given: Sequence[Any], length_max: int) -> None:
        self._given = list(given)
        self._length_max = length_max
        self._task_id = ""

    def bind(self, task_id: str) -> None:
        """Have what is appended belong to the task ``task_id``. Raises ValueError the second time."""
        if self._task_id:
            raise ValueError(f"the worklist is that of {self._task_id!r}: make one for each task")
        self._task_id = task_id

    def source(self) -> Source:
        return maps.Worklist(self._task_id, len(self._given), self._length_max)

    def in_file(self) -> Sequence[Any]:
        return self._given

    def values(self, context: Context) -> Sequence[Any]:
        given, appended = self._given, context["ti"].pull_elements(self._task_id)
        length = len(given)
        return Computed(
            length + len(appended), lambda index: given[index] if index < length else appended[index - length]
        )

    def appends(self) -> Appends:
        """Return what takes the values that one step appends."""
        given = frozenset(value for value in self._given if isinstance(value, str))
        return Appends(self._task_id, self._length_max - len(self._given), given)


class Appends:
    """The values that one step appends; ``given`` are keys of values that stand in the DAG file."""

    def __init__(self, task_id: str, length_max: int, given: frozenset[str]) -> None:
        self._task_id = task_id
        self._length_max = length_max
        self._given = given
        self._values: list[bytes] = []
        self._keys: list[str | None] = []
        self._hashes: list[bytes | None] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: Any, key: str | None) -> None:
        """Append a value. Raises `ValueNotSerializable`, `ValueTooLong`, TypeError, ValueError, `TooManyAppended`."""
        hashed = None if key is None else hash_of_key(key, "what is appended")
        encoded = encode_value(value, where="what is appended", bytes_max=XCOM_BYTES_MAX)
        if key in self._given:
            return
        if len(self._values) >= APPENDS_PER_STEP_MAX or self._bytes + len(encoded) > APPENDED_BYTES_MAX:
            limits = f"{APPENDS_PER_STEP_MAX:,} values and {APPENDED_BYTES_MAX:,} bytes"
            raise TooManyAppended(f"a step may append {limits}: it has appended {len(self._values):,} values")
        self._values.append(encoded)
        self._keys.append(key)
        self._hashes.append(hashed)
        self._bytes += len(encoded)

    def pairs(self) -> Sequence[tuple[bytes, str | None]]:
        """Return what the step has appended, each value encoded, with its key."""
        return list(zip(self._values, self._keys, strict=True))

    def take(self) -> Appended | None:
        """Return what goes with the outcome of the step; None if it has appended nothing."""
        if not self._values:
            return None
        return Appended(self._task_id, tuple(self._values), tuple(self._hashes), self._length_max)


def worklist(values: Sequence[Any], *, max_length: int = DEFAULT_LENGTH_MAX) -> Worklist:
    """Return what a task is to be expanded over: these values first, and what its instances append::

        @task
        def crawl(url, ti):
            for link in links_of(url):
                ti.append(link, key=link)

        crawl.expand(url=worklist(["https://example.org/"], max_length=10_000))

    A value whose key is there already is not appended again; a str in ``values`` has itself as its key. A step that
    would exceed ``max_length`` fails. Raises TypeError and ValueError.
    """
    if not isinstance(values, list | tuple):
        raise TypeError(f"a worklist begins with a list of values, not with {values!r:.100}")
    if not isinstance(max_length, int) or isinstance(max_length, bool):
        raise TypeError(f"max_length must be an int, not {max_length!r:.100}")
    if not max(len(values), 1) <= max_length <= INSTANCES_MAX:
        limits = f"as many as it begins with, and at most {INSTANCES_MAX:,}"
        raise ValueError(f"max_length must be {limits}, not {max_length:,}")
    return Worklist(values, max_length)
