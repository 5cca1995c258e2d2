"""What holds the polls of all streams back: an assignment that is still joining, and the drain."""

from __future__ import annotations

import trio


class FlowControl:
    """Two gates for all streams of one manager.

    *Held* (counted): a poll that has not begun does not begin, so that all triggers of one assignment have
    joined before the first broadcast. *Stopped* (for good, for the drain): nothing is pulled from producers and
    nothing is handed to subscribers.
    """

    def __init__(self) -> None:
        self._holds = 0
        self._released = trio.lowlevel.ParkingLot()
        self.is_stopped = False

    def hold(self) -> None:
        """Hold new polls back until as many calls of `release` follow."""
        self._holds += 1

    def release(self) -> None:
        """Undo one `hold`. Raises `RuntimeError` where there is none."""
        if self._holds == 0:
            raise RuntimeError("release() without hold()")
        self._holds -= 1
        if self._holds == 0:
            self._released.unpark_all()

    def stop(self) -> None:
        """Close the second gate; there is no way back."""
        self.is_stopped = True

    async def wait_released(self) -> None:
        """Return when nothing is held."""
        while self._holds:
            await self._released.park()
