"""`SchedulingVerbs`: what a scheduler does, each verb one short transaction. It is reached as ``store.scheduling``.

What `headgate.store.store.Store` says of its verbs holds for these: the errors, the epoch, and that each may be
repeated. Any number of supervisors call them on one PostgreSQL, and share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from sqlalchemy import Connection

from headgate.store.db import notices
from headgate.store.db.secrets import Secrets
from headgate.store.ids import Epoch
from headgate.store.scheduling import due_times, new_runs, planning
from headgate.store.scheduling.due_times import Due
from headgate.store.scheduling.new_runs import NewRuns
from headgate.store.scheduling.planning import Planned
from headgate.store.tasks.graphs import Graphs
from headgate.store.triggers import leases
from headgate.store.triggers.leases import Clock

RUNS_PER_LOOK_MAX = 20  # looked at in one transaction: locks, and the memory of their tasks' states
RUNS_PER_TRANSACTION_MAX = 20  # made: each writes a row for each of its tasks

Transaction = Callable[[], AbstractContextManager[Connection]]


class SchedulingVerbs:
    """The verbs for what begins, and when."""

    def __init__(
        self,
        writing: Transaction,
        reading: Transaction,
        asking: Transaction,
        secrets: Secrets,
        clock: Clock | None,
        graphs: Graphs,
    ) -> None:
        self._writing = writing
        self._reading = reading
        self._asking = asking
        self._secrets = secrets
        self._clock = clock
        self._graphs = graphs

    def plan(self, epoch: Epoch, *, limit: int = RUNS_PER_LOOK_MAX) -> Planned:
        """Look at runs to which something has happened: begin tasks and runs, skip tasks, end runs."""
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            planned = planning.plan(connection, now, self._secrets, self._graphs, limit=limit)
            if planned.scheduled or planned.in_triggers:
                notices.tell(connection)
            return planned

    def create_due_runs(self, epoch: Epoch, *, limit: int = RUNS_PER_TRANSACTION_MAX) -> NewRuns:
        """Make the runs that are due by the clock, one at most of each DAG."""
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            return new_runs.by_clock(connection, now, self._graphs, limit=limit)

    def create_asset_runs(self, epoch: Epoch, *, limit: int = RUNS_PER_TRANSACTION_MAX) -> NewRuns:
        """Make up to ``limit`` runs that the events of assets ask for."""
        with self._reading() as connection:
            now = leases.read_clock(connection, self._clock)
            ready = new_runs.with_work(connection, now, self._graphs)
        if not ready:
            return NewRuns()
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            return new_runs.by_events(connection, now, self._graphs, ready, limit=limit)

    def next_due(self, epoch: Epoch) -> Due:
        """Say what there is to do, and when, by the database's clock. One statement."""
        with self._asking() as connection:
            return due_times.next_due(connection, epoch, self._clock, self._graphs.readable(connection))
