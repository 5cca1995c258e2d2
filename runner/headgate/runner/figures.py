"""When figures go with a round: once a second at most, and only if they have changed."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from headgate.protocol.messages.runner import RunnerFigures

FIGURES_INTERVAL_S = 1.0


class FiguresReport:
    """Decides which rounds have figures. ``measure`` says what they are now."""

    def __init__(self, measure: Callable[[], RunnerFigures]) -> None:
        self._measure = measure
        self._told = RunnerFigures()  # of a runner that has no stream, as the supervisor takes it for
        self._told_at = -math.inf

    def take(self) -> RunnerFigures | None:
        """Return the figures for a round that is sent now; None if it has none."""
        now = trio.current_time()
        if now < self._told_at + FIGURES_INTERVAL_S:
            return None
        self._told_at = now
        figures = self._measure()
        if figures == self._told:
            return None
        self._told = figures
        return figures
