"""Which steps are given to a worker while it runs another one: those that are known to be short.

The round from a worker to its supervisor, into the database, and back takes longer than a short step. So a worker that
is busy gets further steps: as many as take `BUNDLE_S` together, by what steps of the same kind took before. The first
step of a kind is given to a worker that has no other, because nothing is known of it.

All of them are ``running`` in the database: it cannot say which of them have begun, because a worker begins the next
one before the outcome of the last one is stored. So if their supervisor dies, each has lost its try (`adopt`): that is
why only those that have another try are given behind others, and no more than pay. If only the worker dies, its
supervisor knows: what the worker has sent arrives, so the first step without an outcome was running, and those behind
it had not begun.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from headgate.protocol.messages.worker import BUNDLE_MAX

BUNDLE_S: Final = 0.1  # of work that a worker has at once: ten rounds to a slow database
RECALL_AFTER_S: Final = 0.25  # of a step that turns out longer; then those behind it are given to others
KINDS_MAX: Final = (
    10_000  # of steps whose times are known; of others, the one not seen for the longest time is new again
)
LOOKED_AT_MAX: Final = 4096  # tasks, for steps behind others, in one dispatch
FORGETTING: Final = 0.25  # the weight of a new time that is below the known one: a step that was long once may be again


class StepKind(NamedTuple):
    """Steps that are expected to take the same time: of one task of a DAG, from ``execute`` or resumed."""

    dag: str
    task_id: str
    is_resumed: bool


class StepTimes:
    """How long steps of each kind take, in seconds."""

    def __init__(self) -> None:
        self._times: OrderedDict[StepKind, float] = OrderedDict()

    def note(self, kind: StepKind, took_s: float) -> None:
        """Take the time of a step that has ended: longer ones count at once, shorter ones by and by."""
        known_s = self._times.pop(kind, took_s)
        self._times[kind] = max(took_s, known_s + FORGETTING * (took_s - known_s))
        if len(self._times) > KINDS_MAX:
            self._times.popitem(last=False)

    def of(self, kind: StepKind) -> float | None:
        """Return how long the next step of a kind is expected to take; None if nothing is known."""
        return self._times.get(kind)


class Room(NamedTuple):
    """What a busy worker may be given beside what it has: so many steps, of so many seconds together."""

    steps: int
    seconds: float

    def fits(self, expected_s: float) -> bool:
        """Whether a step of this time may be given."""
        return self.steps > 0 and expected_s <= self.seconds

    def less(self, expected_s: float) -> Room:
        """Return what is left when such a step is given."""
        return Room(self.steps - 1, self.seconds - expected_s)


WHOLE: Final = Room(BUNDLE_MAX, BUNDLE_S)  # of a worker that has no step
NONE: Final = Room(0, 0.0)


def room_behind(expected_s: float | None) -> Room:
    """Return what a worker may be given behind a first step that is expected to take so long."""
    return NONE if expected_s is None else WHOLE.less(expected_s)


class Places:
    """The places for steps that are chosen one after the other: ``free`` workers, and ``rooms`` of busy ones."""

    def __init__(self, times: StepTimes, free: int, rooms: Iterable[Room]) -> None:
        self._times = times
        self._free = free
        self._rooms = list(rooms)
        self.workers = free  # that were free before any step was taken
        behind = sum(room.steps for room in self._rooms if room.seconds > 0)
        self.most = free * BUNDLE_MAX + behind  # steps that may be taken if all are short

    def take(self, kind: StepKind, *, has_tries_left: bool) -> bool:
        """Take the best place for a step; return whether there was one. Without another try that is a free worker.

        If not, no less urgent step may be given either: a worker has to become free for this one.
        """
        expected_s = self._times.of(kind)
        if self._free:
            self._free -= 1
            self._rooms.append(room_behind(expected_s))
            return True
        best = most_room(self._rooms)
        if not has_tries_left or expected_s is None or best is None or not self._rooms[best].fits(expected_s):
            return False
        self._rooms[best] = self._rooms[best].less(expected_s)
        return True


class Lookout:
    """How many tasks are looked at to find steps for busy workers: no more than there were such steps lately.

    Tasks that are looked at are locked, and where none is short that is in vain.
    """

    def __init__(self) -> None:
        self._behind = 1

    def limit(self, places: Places) -> int:
        """Return how many tasks are to be looked at for these places."""
        return min(places.workers + self._behind, places.most)

    def found(self, places: Places, limit: int, taken: int) -> None:
        """So many tasks of those that were looked at were given away."""
        behind = max(1, taken - places.workers)
        self._behind = min(2 * max(behind, self._behind), LOOKED_AT_MAX) if taken == limit else behind


def most_room(rooms: list[Room]) -> int | None:
    """Return the index of the worker that will be free first, of those that may get another step; None if none may."""
    indexes = [index for index, room in enumerate(rooms) if room.steps > 0]
    return max(indexes, key=lambda index: rooms[index].seconds, default=None)
