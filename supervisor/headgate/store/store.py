"""`Store`: the database as the supervisor and the command line see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from sqlalchemy import Engine

from headgate.protocol import marks
from headgate.protocol.messages.runner import FinishedTrigger, FiredEvent, RefusedEvent
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Clock, Database
from headgate.store.ids import Epoch
from headgate.store.scheduling_verbs import SchedulingVerbs
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks import deferral
from headgate.store.tasks.graphs import Graphs
from headgate.store.triggers import dead_letters
from headgate.store.triggers import events as event_log
from headgate.store.triggers.events import EventVerbs
from headgate.store.triggers.leases import LeaseVerbs
from headgate.store.triggers.watchers import WatcherVerbs

if TYPE_CHECKING:
    from headgate.store.cleaning import CleaningVerbs
    from headgate.store.inspect.inspection import Inspection


class Store(LeaseVerbs, EventVerbs, WatcherVerbs):
    """The verbs of the database, each one transaction (`headgate.store.db.verbs`): here those of triggers.

    Those of tasks are in `tasks`, those of the scheduler in `scheduling`, read-only queries in `inspect`, and the
    deletion of old rows in `cleaning`. A store is used by one thread.

    Every verb may raise `DatabaseAway` (repeat it later), `DatabaseFault` and `SchemaOutOfDate`. Every verb that takes
    an epoch and writes raises `LeaseLost`, with nothing written, once the epoch is fenced or ended (I10). Every verb
    may be repeated, and must be if it is unknown whether its commit arrived: a slice stored twice is stored once.

    ``clock`` replaces the database's clock, for simulations; it returns aware datetimes.
    """

    def __init__(self, engine: Engine, *, secrets: Secrets, clock: Clock | None = None) -> None:
        super().__init__(Database(engine, secrets, clock))
        graphs = Graphs()
        self.tasks = TaskVerbs(self.database, graphs)
        self.scheduling = SchedulingVerbs(self.database, graphs)

    # Modules that only the command line uses are imported on first use, because a supervisor has to start quickly.

    @cached_property
    def inspect(self) -> Inspection:
        """The read-only queries."""
        from headgate.store.inspect.inspection import Inspection

        return Inspection(self.database)

    @cached_property
    def cleaning(self) -> CleaningVerbs:
        """The verbs that delete old rows."""
        from headgate.store.cleaning import CleaningVerbs

        return CleaningVerbs(self.database)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A verb that is called later opens another."""
        self.database.close()

    # --- the verb of triggers and of tasks -------------------------------------------------------

    def store_slice(
        self,
        epoch: Epoch,
        *,
        events: Sequence[FiredEvent] = (),
        refused: Sequence[RefusedEvent] = (),
        finished: Sequence[FinishedTrigger] = (),
    ) -> event_log.StoredSlice:
        """Store a slice of a round in one transaction: after the return all of it is durable (I1, I2).

        The events of a run are stored no later than its end. Raises `RowsRefused` if an event cannot be stored as it
        is; then nothing of the slice is stored, and the caller finds the event by halving. ``refused`` and ``finished``
        can always be stored.
        """
        waited_for, assets = self.waited_for, self.assets
        with self.database.leased(epoch) as tx:
            marks.reach("store.begun")
            stored, redelivered = event_log.insert_events(tx, events, assets)
            marks.reach("store.rows_inserted")
            dead_letters.dead_letter_refused(tx, refused)
            over: frozenset[int] = frozenset()
            if waited_for:  # before the triggers' own rows: see `headgate.store.tasks.task_rows` on locks
                deferral.take_events(tx, events, waited_for)
                over = deferral.take_ends(tx, finished, waited_for)
            failure_counts = event_log.finish(tx, finished)
            marks.reach("store.before_commit")
        marks.reach("store.committed")
        moved_tasks = False
        if waited_for or assets:
            ids = {event.trigger_id for event in events} | {run.trigger_id for run in finished}
            moved_tasks = not ids.isdisjoint(waited_for) or not ids.isdisjoint(assets)
        if moved_tasks:
            marks.reach("resume.committed")
        self.forget([run.trigger_id for run in finished if run.outcome == "returned"])
        return event_log.StoredSlice(stored, redelivered, failure_counts, over, moved_tasks)
