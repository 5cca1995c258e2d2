"""`HttpSensor`, in its own module because its client takes long to import."""

from __future__ import annotations

from datetime import timedelta
from typing import Unpack

from headgate.tasks.context import Context
from headgate.tasks.sensors import SensorOptions, TriggerSensor
from headgate.triggers.base import BaseTrigger
from headgate.triggers.http import POLL_INTERVAL_S, TIMEOUT_S, TRIES_MAX, HttpTrigger

__all__ = ["HttpSensor"]


class HttpSensor(TriggerSensor):
    """Waits until ``url`` is answered with ``expected_status``; see `HttpTrigger`, whose payload it returns.

    ``poke_interval`` is the wait between two requests, ``request_timeout`` the limit for one, and ``tries_max`` the
    number of consecutive failed requests that fails the try.
    """

    poke_interval_default = timedelta(seconds=POLL_INTERVAL_S)
    template_fields = ("url", "headers")

    def __init__(
        self,
        *,
        url: str,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        expected_status: int = 200,
        request_timeout: timedelta = timedelta(seconds=TIMEOUT_S),
        tries_max: int = TRIES_MAX,
        **options: Unpack[SensorOptions],
    ) -> None:
        super().__init__(**options)
        self.url = url
        self.method = method
        self.headers = dict(headers or {})
        self.expected_status = expected_status
        self.request_timeout = request_timeout
        self.tries_max = tries_max
        self._check_trigger()

    def make_trigger(self, context: Context) -> BaseTrigger:
        """Return an `HttpTrigger` for the request."""
        return HttpTrigger(
            self.url,
            method=self.method,
            headers=self.headers,
            expected_status=self.expected_status,
            poll_interval_s=self.poke_interval.total_seconds(),
            timeout_s=self.request_timeout.total_seconds(),
            tries_max=self.tries_max,
        )
