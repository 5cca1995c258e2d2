"""The states a task of a run can be in. On its own, since both what DAGs and what questions are made of need it."""

from __future__ import annotations

import enum


class TaskState(enum.StrEnum):
    """Where a task of a run stands; what leads from one to the other is the scheduler's table."""

    NONE = "none"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    DEFERRED = "deferred"
    UP_FOR_RETRY = "up_for_retry"
    RESTARTING = "restarting"
    SUCCESS = "success"
    FAILED = "failed"
    SKIPPED = "skipped"
    UPSTREAM_FAILED = "upstream_failed"
    REMOVED = "removed"
