"""Calls without the right token, counted and in the log."""

from __future__ import annotations

import time

import structlog

from headgate.signal_server.health import Health
from headgate.supervisor.logs.repeated import Repeated
from headgate.supervisor.metrics import catalogue

log = structlog.get_logger(__name__)


class RefusedTokens:
    """Counts them; the log tells of them as of all that is `Repeated`."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._told = Repeated(log, "calls without the right token are refused", counted="calls")

    def add(self, peer: str) -> None:
        """Count a refused call; ``peer`` is the address that it came from."""
        self._health.count(catalogue.SIGNALS_TOKENS_REFUSED)
        self._told.note(time.monotonic(), last_from=peer)

    def tell_rest(self) -> None:
        """Log those that no line has told of."""
        self._told.tell_rest()
