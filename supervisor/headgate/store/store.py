"""`Store`: the verbs of the database, each one transaction.

A store is used by one thread and keeps one connection. After `DatabaseAway` the connection is thrown away, and
the next verb makes another: whatever broke, nothing of it is left. Every verb may be repeated, and must be
when nobody knows whether its commit arrived: a slice stored twice is stored once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine

from headgate.protocol import marks
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX, FinishedTrigger, FiredEvent, RefusedEvent, StoredEvent
from headgate.protocol.values import encode_value
from headgate.store.db import driver_errors, notices
from headgate.store.db.deadline import Deadline
from headgate.store.db.engine import READS_ONLY, STATEMENT_TIMEOUT_S, database_name, is_in_memory
from headgate.store.db.prepared import driver_of
from headgate.store.db.secrets import Secrets
from headgate.store.errors import NoSuchWatcher, RowsRefused
from headgate.store.inspect import reading
from headgate.store.scheduling_verbs import SchedulingVerbs
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks import deferral, task_rows
from headgate.store.tasks.graphs import Graphs
from headgate.store.triggers import dead_letters, leases, watchers
from headgate.store.triggers import events as event_log
from headgate.store.triggers.leases import SILENCE_MAX_S, ClaimedTrigger, Clock, Poll, TriggererRow

if TYPE_CHECKING:
    from headgate.store.cleaning_verbs import CleaningVerbs
    from headgate.store.inspect_verbs import InspectVerbs

# A transaction of the store takes milliseconds, and the server ends a statement after STATEMENT_TIMEOUT_S: one
# that takes longer than both is with a server, or behind a network, that has stopped answering.
ANSWER_MAX_S = STATEMENT_TIMEOUT_S + 5.0
LIST_LIMIT = 100  # rows of a list that grows for ever, where the caller does not say


class Store:
    """The database, as the supervisor and the command line see it.

    Every verb may raise `DatabaseAway` (repeat it later), `DatabaseFault` and `SchemaOutOfDate`. Every verb
    that takes an epoch and writes raises `LeaseLost`, with nothing written, once the epoch is fenced or ended
    (I10). ``clock`` replaces the database's clock, for simulations; it returns aware datetimes.
    """

    def __init__(self, engine: Engine, *, secrets: Secrets, clock: Clock | None = None) -> None:
        self._engine = engine
        self._secrets = secrets
        self._clock = clock
        self._connection: Connection | None = None
        self._notices: notices.Notices | None = None
        self._deadline = Deadline(ANSWER_MAX_S)
        graphs = Graphs()
        self.tasks = TaskVerbs(self._writing, self._reading, secrets, clock, graphs)
        self.scheduling = SchedulingVerbs(self._writing, self._reading, self._asking, secrets, clock, graphs)
        # Triggers that were claimed here, and that a task waits for: all others' events cost nothing more for tasks.
        # No more than this supervisor may own.
        self._waited_for: set[int] = set()
        # The assets of the watchers whose triggers were claimed here, by trigger: their events may make runs.
        self._assets: dict[int, int] = {}

    # What only the command line uses is imported when it does: a supervisor has to start quickly.

    @cached_property
    def inspect(self) -> InspectVerbs:
        """The verbs by which people look."""
        from headgate.store.inspect_verbs import InspectVerbs

        return InspectVerbs(self._reading, self._secrets, self._clock)

    @cached_property
    def cleaning(self) -> CleaningVerbs:
        """The verbs that delete what is old."""
        from headgate.store.cleaning_verbs import CleaningVerbs

        return CleaningVerbs(self._writing, self._clock)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A verb that is called later opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = self._notices = None

    # --- leases ----------------------------------------------------------------------------------

    def register_triggerer(
        self,
        *,
        hostname: str,
        pid: int,
        machine: str,
        process_started: float,
        capacity: int,
        queues: Sequence[str],
        workers: int = 0,
    ) -> int:
        """Begin a lease and return its epoch. ``process_started`` is in clock ticks since boot. Raises `BadName`.

        ``workers``: how many steps of tasks it can run at once; 0 where it runs triggers alone.
        """
        for queue in queues:
            watchers.check_queue(queue)
        with self._writing() as connection:
            return leases.register(
                connection,
                self._clock,
                hostname=hostname,
                pid=pid,
                machine=machine,
                process_started=process_started,
                capacity=capacity,
                queues=queues,
                workers=workers,
            )

    def heartbeat(self, epoch: int) -> None:
        """Renew the lease, by the database's clock."""
        with self._asking() as connection:
            leases.beat(connection, epoch, self._clock)

    def release_triggerer(self, epoch: int) -> None:
        """End the lease and give up its triggers. Ending it again does nothing."""
        with self._writing() as connection:
            leases.end(connection, epoch, self._clock)
            notices.tell(connection)

    def live_triggerers(self) -> list[TriggererRow]:
        """Return the leases that are neither ended nor fenced, however old their heartbeat is."""
        with self._asking() as connection:
            return leases.live(connection, self._clock)

    def fence_triggerers(
        self, epoch: int, *, silence_max_s: float = SILENCE_MAX_S, dead: Sequence[int] = ()
    ) -> list[int]:
        """Fence those silent for more than ``silence_max_s`` seconds, and the epochs in ``dead``; return which.

        ``dead`` are those whose process is known to be gone. Never fences ``epoch`` itself, and passes over a
        triggerer that is in the middle of a transaction: ask again. A fenced epoch never writes again.
        """
        with self._writing() as connection:
            fenced = leases.fence(connection, epoch, self._clock, silence_max_s=silence_max_s, dead=dead)
            if fenced:
                notices.tell(connection)
            return fenced

    def claim_triggers(self, epoch: int, *, limit: int, queues: Sequence[str]) -> list[ClaimedTrigger]:
        """Take up to ``limit`` triggers nobody runs, oldest first, and return them. No trigger has two owners."""
        with self._writing() as connection:
            rows = leases.claim(connection, epoch, self._clock, limit=limit, queues=queues)
            tasks = leases.tasks_of(connection, rows)
        self._note_tasks(rows)
        return [leases.decrypted(row, self._secrets, tasks) for row in rows]

    def claimed_triggers(self, epoch: int) -> list[ClaimedTrigger]:
        """Return the triggers this epoch owns and should be running.

        No claim that was begun before can add to them: one that is still being committed is waited for.
        """
        with self._writing() as connection:  # it writes nothing, but the lock is a writer's
            leases.outwait(connection, epoch)
            rows = leases.claimed(connection, epoch)
            tasks = leases.tasks_of(connection, rows)
        self._note_tasks(rows)
        return [leases.decrypted(row, self._secrets, tasks) for row in rows]

    def has_news(self) -> bool:
        """Whether `poll` may have another answer than last time: looked at without a transaction.

        True more often than necessary; and yet ask now and then even if it stays False (`headgate.store.db.notices`).
        """
        with self._translating():
            if self._connection is None or self._notices is None:
                connection = self._connected()
                with self._within_deadline(connection):
                    self._notices = notices.listen(self._engine, connection)
            return self._notices.has_news()

    def poll(self, epoch: int, queues: Sequence[str]) -> Poll:
        """Say which owned triggers a user removed, or nothing waits for, and whether any can be claimed."""
        with self._asking() as connection:
            return leases.look(connection, epoch, queues)

    def count_claimable(self, queues: Sequence[str]) -> int:
        """Say how many triggers of these queues could be claimed."""
        with self._asking() as connection:
            return leases.count_claimable(connection, queues)

    def release_triggers(self, epoch: int, ids: Sequence[int]) -> None:
        """Give up these triggers; ids that the epoch does not own are passed over."""
        with self._writing() as connection:
            leases.release(connection, epoch, self._clock, ids)
            notices.tell(connection)
        self._waited_for.difference_update(ids)
        for trigger_id in ids:
            self._assets.pop(trigger_id, None)

    # --- events ----------------------------------------------------------------------------------

    def store_slice(
        self,
        epoch: int,
        *,
        events: Sequence[FiredEvent] = (),
        refused: Sequence[RefusedEvent] = (),
        finished: Sequence[FinishedTrigger] = (),
    ) -> event_log.StoredSlice:
        """Store a slice of a round in one transaction: after the return all of it is durable (I1, I2).

        The events of a run go in no later than its end. Raises `RowsRefused` when an event cannot be stored as
        it is; then nothing of the slice is, and the caller finds the event by halving. What ``refused`` and
        ``finished`` say is always storable.
        """
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            marks.reach("store.begun")
            stored, redelivered = event_log.insert_events(connection, now, events, self._assets)
            marks.reach("store.rows_inserted")
            dead_letters.bury_refused(connection, now, refused)
            over: frozenset[int] = frozenset()
            if self._waited_for:  # before the triggers' own rows: see `headgate.store.tasks.task_rows` on locks
                deferral.take_events(connection, now, events, self._waited_for)
                over = deferral.take_ends(connection, now, self._secrets, epoch, finished, self._waited_for)
            failure_counts = event_log.finish(connection, epoch, now, finished)
            marks.reach("store.before_commit")
        marks.reach("store.committed")
        moved_tasks = self._is_anybody_moved(events, finished)
        if moved_tasks:
            marks.reach("resume.committed")
        for run in finished:
            if run.outcome == "returned":
                self._waited_for.discard(run.trigger_id)
                self._assets.pop(run.trigger_id, None)
        return event_log.StoredSlice(stored, redelivered, failure_counts, over, moved_tasks)

    def _is_anybody_moved(self, events: Sequence[FiredEvent], finished: Sequence[FinishedTrigger]) -> bool:
        """Whether a task waits for one of these triggers, or a run may begin by one of their events."""
        if not (self._waited_for or self._assets):
            return False
        ids = {event.trigger_id for event in events} | {run.trigger_id for run in finished}
        return not ids.isdisjoint(self._waited_for) or not ids.isdisjoint(self._assets)

    def _note_tasks(self, rows: Sequence[leases.ToRun]) -> None:
        # A watcher's trigger has its name, removed or not; and its asset, if it has one, it keeps.
        self._waited_for.update(row[0] for row in rows if row[1] is None)
        self._assets.update((row[0], row[6]) for row in rows if row[6] is not None)

    def bury_event(self, epoch: int, event: FiredEvent, reason: str) -> None:
        """Record an event as a dead letter, with its whole payload. Burying it again changes nothing."""
        with self._writing() as connection:
            now = leases.hold(connection, epoch, self._clock)
            dead_letters.bury(connection, now, event, reason)

    def last_event(self, trigger_id: int) -> StoredEvent | None:
        """Return the event of a trigger that was stored last, if there is one."""
        with self._reading() as connection:
            return event_log.last(connection, trigger_id)

    # --- watchers --------------------------------------------------------------------------------

    def add_watcher(
        self,
        name: str,
        classpath: str,
        kwargs: Mapping[str, Any],
        *,
        queue: str = "default",
        asset: str | None = None,
    ) -> int:
        """Add a watcher and its trigger; return the id of the trigger. ``kwargs`` are stored encrypted.

        Raises `WatcherExists`, `BadName`, and from `headgate.protocol.errors` `ValueNotSerializable` for kwargs
        that have no form on the wire, `ValueTooLong` for more than `KWARGS_BYTES_MAX` of them.
        """
        encoded = encode_value(dict(kwargs), where="kwargs", bytes_max=KWARGS_BYTES_MAX)
        encrypted = self._secrets.encrypt(encoded)
        with self._writing() as connection:
            now = leases.read_clock(connection, self._clock)
            notices.tell(connection)
            return watchers.add(
                connection, now, name=name, classpath=classpath, kwargs=encrypted, queue=queue, asset_name=asset
            )

    def remove_watcher(self, name: str) -> None:
        """Remove a watcher; the supervisor that runs its trigger cancels it. Raises `NoSuchWatcher`."""
        with self._writing() as connection:
            watchers.remove(connection, leases.read_clock(connection, self._clock), name)
            notices.tell(connection)

    # --- lists -----------------------------------------------------------------------------------

    def list_watchers(self) -> list[reading.WatcherRow]:
        """Return the watchers, by name."""
        with self._reading() as connection:
            return reading.watchers(connection)

    def list_triggers(self) -> list[reading.TriggerRow]:
        """Return the triggers that were not removed, finished ones included, by id."""
        with self._reading() as connection:
            return reading.triggers(connection)

    def list_triggerers(self, limit: int = LIST_LIMIT) -> list[reading.TriggererLine]:
        """Return the newest ``limit`` leases, living or not, newest first, with what each has."""
        with self._reading() as connection:
            return reading.triggerers(connection, self._clock, limit)

    def list_dead_letters(self, limit: int = LIST_LIMIT) -> list[reading.DeadLetterRow]:
        """Return the newest ``limit`` dead letters, newest first."""
        with self._reading() as connection:
            return reading.dead_letters(connection, limit)

    def list_events(
        self, *, watcher: str | None = None, limit: int | None = None, after_id: int = 0
    ) -> Iterator[reading.EventRow]:
        """Iterate over stored events by id, up to ``limit`` of them, a batch at a time, a transaction a batch.

        ``watcher`` means every watcher that has or had this name. Raises `NoSuchWatcher`. Ids grow, but two
        supervisors on one PostgreSQL may commit out of their order: a reader that follows the log by
        ``after_id`` has to look back a little.
        """
        if watcher is not None:
            with self._reading() as connection:
                if not reading.is_or_was_watcher(connection, watcher):
                    raise NoSuchWatcher(watcher)
        return self._iterate_events(watcher, limit, after_id)

    def _iterate_events(self, watcher: str | None, limit: int | None, after_id: int) -> Iterator[reading.EventRow]:
        left = limit
        while left is None or left > 0:
            size = reading.EVENTS_PER_BATCH_MAX if left is None else min(left, reading.EVENTS_PER_BATCH_MAX)
            with self._reading() as connection:
                batch = reading.events(connection, watcher=watcher, after_id=after_id, limit=size)
            yield from batch
            if len(batch) < size:
                return
            after_id = batch[-1].id
            left = None if left is None else left - len(batch)

    # --- transactions ----------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Generator[Connection]:
        with self._transaction(reads_only=False) as connection:
            task_rows.forget_noted(connection)
            yield connection
            task_rows.mark_noted(connection)

    @contextmanager
    def _reading(self) -> Generator[Connection]:
        with self._transaction(reads_only=True) as connection:
            yield connection

    @contextmanager
    def _transaction(self, *, reads_only: bool) -> Generator[Connection]:
        """Run one transaction: committed at the end, rolled back on any exception, its errors translated."""
        with self._translating():
            connection = self._connected().execution_options(**{READS_ONLY: reads_only})
            with self._within_deadline(connection), connection.begin():
                try:
                    yield connection
                except driver_errors.psycopg_errors():
                    # SQLAlchemy has not seen what a prepared statement raises; it would go on to roll back on a
                    # connection that is not there any more, and its error would take the place of this one.
                    if driver_of(connection).closed:
                        connection.invalidate()
                    raise

    @contextmanager
    def _asking(self) -> Generator[Connection]:
        """Run one prepared statement, which is a transaction by itself: BEGIN and COMMIT would be two more."""
        with self._translating():
            connection = self._connected()
            driver = driver_of(connection)
            with self._within_deadline(connection):
                if connection.dialect.name != "postgresql":  # the driver of SQLite begins nothing by itself
                    yield connection
                    return
                driver.autocommit = True
                try:
                    yield connection
                finally:
                    if not driver.closed:
                        driver.autocommit = False

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection, self._notices = self._engine.connect(), None
        return self._connection

    @contextmanager
    def _translating(self) -> Generator[None]:
        try:
            yield
        except driver_errors.translated() as error:
            told = driver_errors.translate(error, database=database_name(self._engine))
            if not isinstance(told, RowsRefused):
                self._drop_connection()
            raise told from error

    def _within_deadline(self, connection: Connection) -> AbstractContextManager[None]:
        """A server must answer in time; SQLite has no one to wait for but its lock, which has a limit of its own."""
        if connection.dialect.name != "postgresql":
            return nullcontext()
        return self._deadline.watching(connection.connection.dbapi_connection.fileno())  # type: ignore[union-attr]

    def _drop_connection(self) -> None:
        """Throw the connection away; nobody knows what state it is in. One in memory is the database, and stays."""
        connection, self._connection, self._notices = self._connection, None, None
        if connection is None:
            return
        if not is_in_memory(self._engine):
            connection.invalidate()
        connection.close()
