"""The settings of the supervisor's core."""

from __future__ import annotations

import msgspec

from headgate.protocol.messages.runner import RunnerSettings
from headgate.supervisor.backoff import DatabaseOutage, DatabaseRetry
from headgate.supervisor.triggers.leases import LeaseTimes


class CoreSettings(msgspec.Struct, frozen=True):
    """Settings of `headgate.supervisor.core.SupervisorCore`; times in seconds. See `headgate.supervisor.config`."""

    runner: RunnerSettings
    lease: LeaseTimes
    capacity: int = 1000
    queues: tuple[str, ...] = ("default",)
    workers: int = 0  # of tasks
    endless_workers: int = 0  # beside these
    runner_silence_max_s: float = 30.0
    respawn_wait_s: float = 0.1
    respawn_wait_max_s: float = 30.0
    respawn_healthy_s: float = 60.0
    retry_wait_s: float = 1.0
    retry_wait_max_s: float = 300.0
    database_retry_wait_s: float = 0.1
    database_retry_wait_max_s: float = 10.0
    slice_events_max: int = 5000
    drain_s: float = 30.0

    def retry_of(self, duty: str, outage: DatabaseOutage | None) -> DatabaseRetry:
        """Return when a duty may use the database again after a failure."""
        return DatabaseRetry(duty, self.database_retry_wait_s, self.database_retry_wait_max_s, outage)
