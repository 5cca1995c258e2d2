"""What a supervisor says of itself, published with its heartbeats if it has changed: nothing at rest.

It may be a heartbeat late. Others take it for true as long as the heartbeats go on.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.store.facts.supervisor_status import SupervisorStatus, encode_status


class Published:
    """What was published last. ``measure`` says what it is now."""

    def __init__(self, measure: Callable[[], SupervisorStatus]) -> None:
        self._measure = measure
        self._stored: str | None = None

    def changed(self) -> str | None:
        """Return what is to be stored with the heartbeat that is due; None if it is stored already."""
        status = encode_status(self._measure())
        return None if status == self._stored else status

    def stored(self, status: str | None) -> None:
        """Note that a heartbeat with this is committed. If that is not known, it is stored again."""
        if status is not None:
            self._stored = status
