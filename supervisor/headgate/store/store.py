"""`Store`: the database as the supervisor and the command line see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
from sqlalchemy import Engine

from headgate.protocol import marks
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    RedeliveryEnd,
    RefusedEvent,
)
from headgate.store.access.audit import Actor
from headgate.store.db.changes import Followers
from headgate.store.db.secrets import Secrets
from headgate.store.db.times import Clock
from headgate.store.db.transaction import Database, LeasedTx
from headgate.store.db.verbs import leased
from headgate.store.errors import EventExists, ValueRefused
from headgate.store.facts import trigger_runs
from headgate.store.facts.drift import DriftVerbs
from headgate.store.ids import Epoch, Hold
from headgate.store.scheduling_verbs import SchedulingVerbs
from headgate.store.signals import sending
from headgate.store.signals.feeds import NOTHING_FED, feed
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks import deferral, resuming, task_rows, task_streams
from headgate.store.tasks.graphs import Graphs
from headgate.store.triggers import by_hand, dead_letters, holds, redrives, reopening, streams, watchers
from headgate.store.triggers import events as event_log
from headgate.store.triggers.changes import ChangeVerbs
from headgate.store.triggers.events import EventVerbs
from headgate.store.triggers.holds import HoldVerbs
from headgate.store.triggers.leases import LeaseVerbs
from headgate.store.triggers.redrives import RedriveVerbs
from headgate.store.triggers.strikes import StrikeVerbs
from headgate.store.triggers.watchers import WatcherVerbs

if TYPE_CHECKING:
    from headgate.store.access.users import AccessVerbs
    from headgate.store.cleaning import CleaningVerbs
    from headgate.store.consuming.consumers import ConsumerVerbs
    from headgate.store.inspect.inspection import Inspection
    from headgate.store.keys import KeyVerbs
    from headgate.store.letters import LetterVerbs
    from headgate.store.signal_verbs import SignalVerbs

_WITH_RUNNER = ("shutdown", "reassigned")  # reasons for which runs end that are begun again elsewhere


class Store(LeaseVerbs, EventVerbs, StrikeVerbs, WatcherVerbs, HoldVerbs, ChangeVerbs, RedriveVerbs, DriftVerbs):
    """The verbs of the database, each one transaction (`headgate.store.db.verbs`): here those of triggers.

    Those of tasks are in `tasks`, those of the scheduler in `scheduling`, read-only queries in `inspect`, the deletion
    of old rows in `cleaning`, the encryption keys in `keys`, signals in `signals`, and the actions of users on dead
    letters in `letters`. A store is used by one thread.

    Every verb may raise `DatabaseAway` (repeat it later), `DatabaseFault` and `SchemaOutOfDate`. Every verb that takes
    an epoch and writes raises `LeaseLost`, with nothing written, once the epoch is fenced or ended (I10). Every verb
    may be repeated, and must be if it is unknown whether its commit arrived: a slice stored twice is stored once.

    ``clock`` replaces the database's clock, for simulations; it returns aware datetimes. ``actor`` is the user for
    whom it is opened: what the verbs do is recorded under this name (`headgate.store.access.audit`).
    """

    def __init__(
        self, engine: Engine, *, secrets: Secrets, clock: Clock | None = None, actor: Actor | None = None
    ) -> None:
        super().__init__(Database(engine, secrets, clock, actor))
        graphs = Graphs()
        self.tasks = TaskVerbs(self.database, graphs)
        self.scheduling = SchedulingVerbs(self.database, graphs)
        self._followers = Followers()

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

    @cached_property
    def consumers(self) -> ConsumerVerbs:
        """The verbs of consumers."""
        from headgate.store.consuming.consumers import ConsumerVerbs

        return ConsumerVerbs(self.database)

    @cached_property
    def keys(self) -> KeyVerbs:
        """The verbs about the encryption keys."""
        from headgate.store.keys import KeyVerbs

        return KeyVerbs(self.database)

    @cached_property
    def access(self) -> AccessVerbs:
        """The verbs of users and sessions of the pages."""
        from headgate.store.access.users import AccessVerbs

        return AccessVerbs(self.database)

    @cached_property
    def letters(self) -> LetterVerbs:
        """The verbs by which users resolve dead letters."""
        from headgate.store.letters import LetterVerbs

        return LetterVerbs(self.database)

    @cached_property
    def signals(self) -> SignalVerbs:
        """The verbs of signals."""
        from headgate.store.signal_verbs import SignalVerbs

        return SignalVerbs(self.database)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A verb that is called later opens another."""
        self.database.close()

    # --- the verbs of triggers and of tasks ------------------------------------------------------

    @leased
    def dead_letter_event(self, tx: LeasedTx, event: FiredEvent, reason: str) -> bool:
        """Record an event as a dead letter, with its whole payload; return whether it has one.

        Repeating it changes nothing. A task that waited for the event is resumed to fail with the reason. There is no
        letter of an event of a task's stream that belongs to no message of a broker: its trigger fires it again in the
        next try.
        """
        is_kept = event.seq != 0 or event.trigger_id not in self.task_streams
        if is_kept:
            dead_letters.dead_letter(tx, event, reason)
        letters = dead_letters.open_letters_of(tx, [event] if is_kept else [])
        deferral.take_refused(tx, {event.trigger_id: reason}, self.waited_for)
        task_streams.take(tx, self.task_streams, refused={event.trigger_id: reason}, letters=letters)
        return is_kept

    def store_slice(
        self,
        epoch: Epoch,
        *,
        events: Sequence[FiredEvent] = (),
        refused: Sequence[RefusedEvent] = (),
        finished: Sequence[FinishedTrigger] = (),
        described: Sequence[DescribedTrigger] = (),
        redriven: Sequence[RedeliveryEnd] = (),
    ) -> event_log.StoredSlice:
        """Store a slice of a round in one transaction: after the return all of it is durable (I1, I2).

        The events of a run are stored no later than its end. Raises `RowsRefused` if an event cannot be stored as it
        is, and `ItemFailed` if a task cannot take one; then nothing of the slice is stored, and the caller finds the
        event by halving. The rest can always be stored.
        """
        waited_for, streams_of_tasks, feeds = self.waited_for, self.task_streams, self.feeds
        with self.database.leased(epoch) as tx:
            marks.reach("store.begun")
            stored, redelivered, differing, fed = event_log.insert_events(tx, events, feeds)
            if stored and self._followers.are_there(tx.connection):
                tx.notify_readers({event.trigger_id for event in events})
            marks.reach("store.rows_inserted")
            dead_letters.dead_letter_refused(tx, refused)
            over: frozenset[int] = frozenset()
            reasons = {one.trigger_id: one.reason for one in refused}
            # Tasks before the triggers' own rows: see `headgate.store.tasks.task_rows` on locks.
            if streams_of_tasks:
                letters = dead_letters.open_letters_of(
                    tx, [one for one in refused if one.trigger_id in streams_of_tasks]
                )
                over = task_streams.take(
                    tx, streams_of_tasks, events=events, refused=reasons, letters=letters, finished=finished
                )
            if waited_for:
                over |= deferral.take_events(tx, events, waited_for)
                over |= deferral.take_refused(tx, reasons, waited_for)
                over |= deferral.take_ends(tx, finished, waited_for)
            placed = self._place(tx, described)
            if placed.refused and waited_for:
                over |= deferral.take_ends(tx, placed.refused, waited_for)
            if placed.refused and streams_of_tasks:
                over |= task_streams.take(tx, streams_of_tasks, finished=placed.refused)
            if over:
                tx.notify()  # this supervisor may run no tasks, or have no worker that is free
            ends = (*finished, *placed.refused)
            redrives.end(tx, redriven)
            redrives.returned(tx, self._returned_from_messages(finished))
            failure_counts, struck = event_log.finish(tx, ends)
            trigger_runs.write(tx, self._of_watchers(finished))
            # Only a run that has returned is let go here, and its task is locked already.
            if streams_of_tasks and (returned := [run.trigger_id for run in finished if run.outcome == "returned"]):
                reopening.reopen(tx, returned)
            said = feed(tx, fed, feeds) if fed else NOTHING_FED
            marks.reach("store.before_commit")
        marks.reach("store.committed")
        if said.has_sent:
            sending.note_committed()
        moved_tasks = self._may_move_tasks((events, refused, ends))
        if moved_tasks:
            marks.reach("resume.committed")
        fired = event_log.fired_by_runs((*events, *refused), streams_of_tasks) if streams_of_tasks else {}
        self.forget([run.trigger_id for run in finished if run.outcome == "returned"])
        self.forget(sorted(placed.elsewhere))
        self.streamed.difference_update([*placed.here, *[run.trigger_id for run in placed.refused]])
        self.streamed.update(trigger_id for trigger_id, digest in placed.here.items() if digest)
        return event_log.StoredSlice(
            stored, redelivered, failure_counts, over, moved_tasks, struck, differing, placed, fired, *said
        )

    def _may_move_tasks(self, said: Sequence[Sequence[FiredEvent | RefusedEvent | FinishedTrigger]]) -> bool:
        if not (self.waited_for or self.task_streams or self.feeds):
            return False
        ids = {item.trigger_id for items in said for item in items}
        if not (ids.isdisjoint(self.waited_for) and ids.isdisjoint(self.task_streams)):
            return True
        return any(self.feeds[trigger_id].asset_id is not None for trigger_id in ids & self.feeds.keys())

    def forget(self, trigger_ids: Sequence[int]) -> None:
        """Forget triggers that are not run here any more."""
        super().forget(trigger_ids)
        self.redriven_to.difference_update(trigger_ids)

    def _of_watchers(self, finished: Sequence[FinishedTrigger]) -> list[FinishedTrigger]:
        """Return the runs of watchers' triggers that have not just been ended together with their runner."""
        waited_for, streams_of_tasks = self.waited_for, self.task_streams
        return [
            msgspec.structs.replace(
                run,
                trigger_run_id=dead_letters.storable_text(run.trigger_run_id, KEY_CHARS_MAX),
                error=dead_letters.storable_text(run.error, ERROR_CHARS_MAX),
            )
            for run in finished
            if run.trigger_id not in waited_for
            and run.trigger_id not in streams_of_tasks
            and run.reason not in _WITH_RUNNER
        ]

    def _returned_from_messages(self, finished: Sequence[FinishedTrigger]) -> list[FinishedTrigger]:
        """Return the runs that have returned, of triggers that were given messages of dead letters."""
        if not self.redriven_to:
            return []
        return [run for run in finished if run.outcome == "returned" and run.trigger_id in self.redriven_to]

    def put_event(self, watcher: str, payload: bytes, *, key: str | None = None) -> int:
        """Store an event by hand, as if the watcher had fired it now; return its id.

        ``payload`` is encoded by `headgate.protocol.values`. Runs of DAGs begin for it, and tasks that wait for it are
        resumed, as for any event. Raises `NoSuchWatcher`, `EventExists` if there is one with this ``key`` already,
        `ValueRefused` for a key that is too long, and the errors of `headgate.store.triggers.by_hand.writing_by_hand`.
        """
        if key is not None and not 0 < len(key) <= KEY_CHARS_MAX:
            raise ValueRefused(f"the key of an event has from 1 to {KEY_CHARS_MAX} characters; this one has {len(key)}")
        with self.database.reading() as tx:
            trigger_id = watchers.trigger_of_watcher(tx, watcher)
            fed = watchers.feed_of(tx, trigger_id)
        feeds = {} if fed is None else {trigger_id: fed}
        event = FiredEvent(trigger_id, f"by hand {uuid4().hex}", 0, 0, payload, key=key)
        with by_hand.writing_by_hand(self.database, trigger_id) as tx:
            if key is not None and (found := event_log.with_key(tx, trigger_id, key)) is not None:
                raise EventExists(watcher, key, found)
            inserted = event_log.insert_events(tx, [event], feeds)
            deferral.take_events(tx, [event], {trigger_id})
            said = feed(tx, inserted.fed, feeds)
            tx.notify()
            event_id = event_log.id_of(tx, event)
            tx.act("events put", f"watcher {watcher}", after={"event": event_id, "key": key})
        if said.has_sent:
            sending.note_committed()
        return event_id

    def _place(self, tx: LeasedTx, described: Sequence[DescribedTrigger]) -> streams.Placed:
        # Most triggers read no stream, and their rows say so already.
        news = [one for one in described if one.stream or one.trigger_id in self.streamed]
        if not news:
            return streams.NOTHING_PLACED
        ids = {one.trigger_id for one in news}  # their tasks before the triggers' own rows, as in `store_slice`
        task_streams.locked_of_triggers(tx, self.task_streams & ids)
        for trigger_id in sorted(self.waited_for & ids):
            task_rows.locked_by_trigger(tx, trigger_id)
        return streams.describe(tx, news)

    @leased
    def hold_trigger(self, tx: LeasedTx, trigger_id: int, hold: Hold, reason: str) -> bool:
        """Hold an owned trigger until a user releases it; return whether it is held now. ``reason`` is for users.

        A trigger of a task cannot wait for that: its task fails at once with the reason, and the trigger is over. A
        trigger that is held already, or that another epoch owns, is left unchanged. Repeating it changes nothing.
        """
        # The task before the trigger's own row, as in `store_slice`.
        streaming = task_streams.locked_of_triggers(tx, [trigger_id])
        task = None if streaming else task_rows.locked_by_trigger(tx, trigger_id)
        if not holds.hold_own(tx, trigger_id, hold, reason):
            return False
        marks.reach("holds.written")
        if streaming:
            task_streams.fail(tx, trigger_id, reason)
        elif task is None:
            return True
        else:
            resuming.resume_to_fail(tx, task, "trigger_failed", "trigger_failure", reason)
        tx.notify()
        return False
