"""How much is stored in one transaction: learnt from the times that the database took for the slices before."""

from __future__ import annotations

from collections import deque

SLICE_S = 0.15  # the time that storing a slice should take: heartbeats, claims and requests wait for it
SLICE_EVENTS_FIRST = 500  # of the first slices, before the speed of the database is known
SLICE_EVENTS_MIN = 50  # even if they are stored slowly: a commit for each event would be slower still
SLICES_LEARNT = 8  # the newest slices, from whose times the next size is computed
# An attempt that failed sooner met a database that is down or locked: connecting, or waiting for a lock, times out
# after 5 s. One that failed later may have hit the timeout of a statement, of a transaction or of the network, which
# are all at least 10 s. Then a smaller slice may succeed.
FAILED_LATE_S = 8.0


class SliceSize:
    """The number of items in a slice: as many as the database stores in `SLICE_S`, but at most ``items_max``.

    It begins with ``first``, and never falls below ``least`` because they are stored slowly: a commit for each of fewer
    items would be slower still.

    If the commit itself takes most of that time, smaller slices would only cause more commits; therefore a slice may
    take twice the time of a commit. The times of a commit and of an item are those of a line fitted through the sizes
    and times of the last few slices. The number at most doubles or halves from one slice to the next, because a single
    measurement is not reliable.

    A slice that failed late is halved, down to one item, so that a single one is stored if that is possible at all.
    Only this leads to fewer than ``least``.
    """

    def __init__(self, items_max: int, *, first: int = SLICE_EVENTS_FIRST, least: int = SLICE_EVENTS_MIN) -> None:
        self._items_max = items_max
        self._least = least
        self._samples: deque[tuple[int, float]] = deque(maxlen=SLICES_LEARNT)
        self._commit_s = 0.0  # the time of a slice without its items, 0 if it is not known
        self.items = min(first, items_max)

    def stored(self, items: int, took_s: float) -> None:
        """Learn from a slice that was stored, unless it was much smaller than the limit."""
        if items * 4 < self.items:
            return
        self._samples.append((items, took_s))
        if self.items < self._least:
            # Twice as many items may take twice as long, and fail again. Even if that is likely, it is tried now and
            # then, because perhaps only the commit takes so long.
            is_tried = took_s <= FAILED_LATE_S / 2 or len(self._samples) == SLICES_LEARNT
            if is_tried and items == self.items:
                self.items = min(self.items * 2, self._least, self._items_max)
            return
        fitting = max(self.items // 2, min(self._fitting(), self.items * 2))
        self.items = min(max(fitting, self._least), self._items_max)

    def failed(self, items: int, took_s: float) -> None:
        """Learn from a slice that the database did not store. Earlier measurements are dropped.

        The cause may not be the size: the database may have gone away in the middle. A smaller size then costs little,
        because the number doubles with each slice once the database is back.
        """
        if took_s < FAILED_LATE_S:
            return
        self.items = min(self.items, max(1, items // 2))
        self._samples.clear()
        self._commit_s = 0.0

    def _fitting(self) -> int:
        sizes = [size for size, _ in self._samples]
        mean_size = sum(sizes) / len(sizes)
        mean_s = sum(took_s for _, took_s in self._samples) / len(sizes)
        allowed_s = max(SLICE_S, 2 * self._commit_s)
        if max(sizes) - min(sizes) < mean_size / 4:
            # The sizes are too similar: the differences of times are noise. Unless the time is right, change the size.
            newest_s = self._samples[-1][1]
            if newest_s > allowed_s:
                return self.items // 2
            return self.items * 2 if newest_s < allowed_s / 2 else self.items
        spread = sum((size - mean_size) ** 2 for size in sizes)
        item_s = sum((size - mean_size) * (took_s - mean_s) for size, took_s in self._samples) / spread
        self._commit_s = max(0.0, mean_s - max(0.0, item_s) * mean_size)
        if item_s <= 0:
            return self.items * 2  # a larger slice takes no longer
        return int((max(SLICE_S, 2 * self._commit_s) - self._commit_s) / item_s)
