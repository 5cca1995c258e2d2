"""Calls without the right token, in the log: a caller may repeat them for ever, and the log must not grow with that."""

from __future__ import annotations

import math
import threading
import time

import structlog

from headgate.signal_server.health import Health
from headgate.supervisor.metrics import catalogue

log = structlog.get_logger(__name__)

TOLD_EVERY_S = 60.0  # between two lines


class RefusedTokens:
    """Logs the first refusal at once, and then at most one line in `TOLD_EVERY_S`, with how many there were."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._lock = threading.Lock()
        self._calls = 0  # that no line tells of
        self._peer = ""
        self._quiet_until = -math.inf

    def add(self, peer: str) -> None:
        """Count a refused call; ``peer`` is the address that it came from."""
        self._health.count(catalogue.SIGNALS_TOKENS_REFUSED)
        now = time.monotonic()
        with self._lock:
            self._calls, self._peer = self._calls + 1, peer
            if now < self._quiet_until:
                return
            self._quiet_until = now + TOLD_EVERY_S
            self._tell()

    def tell_rest(self) -> None:
        """Log those that no line has told of."""
        with self._lock:
            if self._calls:
                self._tell()

    def _tell(self) -> None:
        log.warning("calls without the right token are refused", calls=self._calls, last_from=self._peer)
        self._calls = 0
