"""`SchedulingVerbs`: the verbs of a scheduler, each a short transaction. It is reached as ``store.scheduling``.

The docstring of `headgate.store.store.Store` applies to these verbs, too. Any number of supervisors call them on one
PostgreSQL, and share the work.
"""

from __future__ import annotations

from headgate.store.scheduling.considering import SignalDutyVerbs
from headgate.store.scheduling.deciding import DecidingVerbs
from headgate.store.scheduling.due_times import DueVerbs
from headgate.store.scheduling.failing import FailingVerbs
from headgate.store.scheduling.new_runs import NewRunVerbs
from headgate.store.scheduling.planning import PlanningVerbs


class SchedulingVerbs(PlanningVerbs, NewRunVerbs, SignalDutyVerbs, DecidingVerbs, DueVerbs, FailingVerbs):
    """All verbs of ``store.scheduling``."""
