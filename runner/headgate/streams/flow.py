"""Two gates for the polls of all streams: triggers that are still joining, and the drain."""

from __future__ import annotations

import trio


class FlowControl:
    """Two gates for all streams of one manager.

    *Starts paused* (counted): a poll that has not begun does not begin, so that all triggers of one assignment have
    joined before the first broadcast. *Stopped* (for good, for the drain): nothing is pulled from producers and
    nothing is handed to subscribers.
    """

    def __init__(self) -> None:
        self._pauses = 0
        self._resumed = trio.lowlevel.ParkingLot()
        self.is_stopped = False

    def pause_starts(self) -> None:
        """Let no new poll begin until as many calls of `resume_starts` follow."""
        self._pauses += 1

    def resume_starts(self) -> None:
        """Undo one `pause_starts`. Raises `RuntimeError` if there is none to undo."""
        if self._pauses == 0:
            raise RuntimeError("resume_starts() without pause_starts()")
        self._pauses -= 1
        if self._pauses == 0:
            self._resumed.unpark_all()

    def stop(self) -> None:
        """Close the second gate, for good."""
        self.is_stopped = True

    async def wait_resumed(self) -> None:
        """Return when polls may begin."""
        while self._pauses:
            await self._resumed.park()
