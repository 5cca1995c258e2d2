"""What may become of a task by which verb, stated a second time and apart from the table under test."""

from __future__ import annotations

from tests.proof.simulation.tasks.rules import ENDED

_UNFINISHED = "none scheduled running deferred up_for_retry restarting".split()

# By the verb: what may become of a task that it names, and of others; as (from, to).
OF_STEP = {
    "defer": {("running", "deferred"), ("running", "scheduled")},  # events of its stream wait already
    "handle": {
        *(("running", to) for to in ("deferred", "scheduled", "success", "failed", "skipped", "up_for_retry")),
    },
    "succeed": {("running", "success"), ("running", "skipped")},
    "fail": {("running", "failed"), ("running", "up_for_retry")},
    "return_step": {("running", "scheduled"), ("restarting", "none")},
    "lose_worker": {("running", "failed"), ("running", "up_for_retry"), ("restarting", "none")},
}
OF_ALL = {
    "create_run": {("", "none")},
    "create_event_runs": {("", "none")},
    "a user": {("", "none")},  # with the signals that it sends
    "plan": {
        *(("none", to) for to in ("scheduled", "upstream_failed", "skipped", "deferred")),
        *((state, "removed") for state in ("none", "scheduled", "deferred", "up_for_retry")),
        *(("", to) for to in ("none", "scheduled", "upstream_failed", "skipped", "deferred")),  # new in its DAG
    },
    "retry_due": {("up_for_retry", "scheduled"), ("up_for_retry", "deferred")},
    "dispatch": {("scheduled", "running")},
    "store_slice": {("deferred", to) for to in ("scheduled", "success", "failed", "skipped", "up_for_retry")},
    "time_out": {("deferred", "scheduled")},
    "consider_signals": {("deferred", "success")},
    "begin_due_batches": {("deferred", "scheduled")},
    "adopt": {("running", "failed"), ("running", "up_for_retry"), ("restarting", "none")},
}
OF_USER = {
    "clear": {
        *((state, "none") for state in ("deferred", "scheduled", "up_for_retry", *ENDED)),
        ("running", "restarting"),
    },
    "mark_success": {
        *((state, "success") for state in (*_UNFINISHED, "failed", "upstream_failed")),
        ("upstream_failed", "none"),  # of one below that had failed
    },
    "mark_failed": {(state, "failed") for state in _UNFINISHED},
}
