"""The database of a replay: an empty one, changed only as the log shows.

Triggers get the ids they have in the log, so that they can be recognized in the database. Which of them can be
claimed, and when, was decided outside the log, by users and by other supervisors; here `ReplayStore.allow` decides it,
from the next frames of the log.
"""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
import tempfile
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet
from sqlalchemy import Engine, delete, event, exists, insert, select, update

from headgate.protocol.messages.queries import Query, QueryResult, StoredEvent
from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger, FiredEvent, RefusedEvent, TriggerSpec
from headgate.protocol.values import encode_value
from headgate.store.db import schema
from headgate.store.db.engine import database_name, open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DATABASE_UNUSABLE, DatabaseAway, StoreError
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tables import asset_watcher, dead_letter, strike, trigger, trigger_event, triggerer
from headgate.store.triggers.events import StoredSlice
from headgate.store.triggers.leases import ClaimedTrigger, Poll
from headgate.store.triggers.strikes import KILLS_MAX
from headgate.supervisor.queries import QueryRefused

TRIGGER_ID_MAX = 2**63 - 1  # of the column
FENCED_FOR_GOOD_S = 1e9  # longer than the silence of any triggerer of a replay
NO_LIMIT = 2**62  # of deliveries: no failure in a log reaches it
CLAIM_LIMIT = 1000  # triggers claimed in one transaction

_MASKED = re.compile(rb'"masked: (\d{1,9}) bytes"')
_KWARGS_BYTES_MAX = 1024 * 1024  # as many as a trigger can have


class DatabaseNotFresh(StoreError):
    """The database given for a replay holds rows already."""


class RecordedFault(DatabaseAway):
    """The database did not answer a query when the log was recorded, so it does not in the replay either."""

    def __init__(self, text: str) -> None:
        super().__init__("", text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class RecordedAnswers:
    """Answers the other queries of triggers as the log shows, because a capture holds no secrets (I12)."""

    def __init__(self) -> None:
        self._next: QueryResult | str = ""

    def give(self, answer: QueryResult | str) -> None:
        """Set the result of the next query, or the text with which it is refused."""
        self._next = answer

    def answer(self, query: Query, *, dag_run_id: int | None) -> QueryResult:
        """Return the result that was set. Raises `QueryRefused`."""
        if isinstance(self._next, str):
            raise QueryRefused(self._next)
        return self._next


class ReplayStore(Store):
    """A store in which users, other supervisors, faults and the clock follow a log.

    ``time`` is the time of its clock, in seconds since 1970. ``fault`` is the last error of the replay's own database,
    which has nothing to do with the log.
    """

    def __init__(self, engine: Engine, secrets: Secrets | None = None) -> None:
        """Open it; ``secrets`` are those of a database that is kept, so that the commands can read it."""
        secrets = secrets or Secrets([Fernet.generate_key().decode()], source="the replay")
        super().__init__(engine, secrets=secrets, clock=self._clock_of_log)
        self.time = 0.0
        self.recorded = RecordedAnswers()
        self.fault: StoreError | None = None
        self.made: dict[int, str] = {}  # the names of the triggers made so far, by id
        self._removed: set[int] = set()
        self._allowed: set[int] = set()
        self._fault_told: str | None = None

    def _clock_of_log(self) -> datetime:
        try:
            return datetime.fromtimestamp(self.time if math.isfinite(self.time) else 0.0, UTC)
        except (ValueError, OverflowError, OSError):
            return datetime.fromtimestamp(0.0, UTC)

    # --- acts of others ---------------------------------------------------------------------------

    def allow(self, specs: Sequence[TriggerSpec]) -> None:
        """Let these triggers be claimed, and no others; make those that are not there yet.

        Which messages they are passed over is taken from the log, because it depends on limits that users have set, and
        on deaths of runners, which are not in the log.
        """
        for spec in specs:
            if spec.trigger_id not in self.made:
                self._make(spec)
            self._pass_over(spec)
        self._allowed = {spec.trigger_id for spec in specs}

    def _make(self, spec: TriggerSpec) -> None:
        now = self._clock_of_log()
        for trigger_id, name in self.made.items():
            if name == spec.name:
                # Another trigger has its name now, so it was removed while no supervisor was running.
                self.remove(trigger_id)
        kwargs = self.database.secrets.encrypt(kwargs_like(spec.kwargs))
        with self.database.writing() as tx:
            row = {"id": spec.trigger_id, "classpath": spec.classpath, "kwargs": kwargs, "created_date": now}
            row["max_deliveries"] = NO_LIMIT
            tx.connection.execute(insert(trigger).values(row))
            watcher = {"name": spec.name, "trigger_id": spec.trigger_id, "created_date": now}
            tx.connection.execute(insert(asset_watcher).values(watcher))
        self.made[spec.trigger_id] = spec.name

    def _pass_over(self, spec: TriggerSpec) -> None:
        now = self._clock_of_log()
        rows = [
            {
                "trigger_id": spec.trigger_id,
                "key": key,
                "strikes": KILLS_MAX,
                "kills": KILLS_MAX,
                "last_error": "",
                "last_run_id": "",
                "last_at": now + timedelta(microseconds=number),  # their order
            }
            for number, key in enumerate(spec.passed_over)
        ]
        if rows:
            with self.database.writing() as tx:
                tx.connection.execute(delete(strike).where(strike.c.trigger_id == spec.trigger_id))
                tx.connection.execute(insert(strike), rows)

    def remove(self, trigger_id: int) -> None:
        """Remove a trigger, as a user would; one that is not there, or removed, is left alone."""
        if trigger_id not in self.made or trigger_id in self._removed:
            return
        self._removed.add(trigger_id)
        now = self._clock_of_log()
        with self.database.writing() as tx:
            which = asset_watcher.c.trigger_id == trigger_id
            tx.connection.execute(update(asset_watcher).where(which).values(removed_at=now))
            tx.connection.execute(update(trigger).where(trigger.c.id == trigger_id).values(removed_at=now))

    def finish(self, trigger_id: int) -> None:
        """Finish a trigger that nothing waits for any more, for example because its task timed out; keep its owner."""
        of_id = trigger.c.id == trigger_id, trigger.c.removed_at.is_(None), trigger.c.finished_at.is_(None)
        with self.database.writing() as tx:
            tx.connection.execute(update(trigger).where(*of_id).values(finished_at=self._clock_of_log()))

    def fence(self, epoch: Epoch) -> None:
        """Take the lease of ``epoch`` away, as another supervisor would."""
        neighbour = self.register_triggerer(
            hostname="neighbour", pid=0, machine="neighbour", process_started=0.0, capacity=1, queues=("default",)
        )
        self.fence_triggerers(neighbour, silence_max_s=FENCED_FOR_GOOD_S, dead=[epoch])
        self.release_triggerer(neighbour)

    def fail_next_query(self, text: str) -> None:
        """Have the next `last_event` fail with this text."""
        self._fault_told = text

    # --- verbs that the core calls ----------------------------------------------------------------

    def poll(self, epoch: Epoch, queues: Sequence[str]) -> Poll:
        """Return that triggers can be claimed only if the log shows some next."""
        poll = super().poll(epoch, queues)
        return Poll(poll.removed, poll.claimable and bool(self._allowed), poll.ended)

    def claim_triggers(
        self, epoch: Epoch, *, limit: int, queues: Sequence[str], room: int | None = None, is_idle: bool = False
    ) -> list[ClaimedTrigger]:
        """Claim all triggers that the log shows to be claimed next."""
        claimed: list[ClaimedTrigger] = []
        with self._noting_faults():
            while True:
                some = super().claim_triggers(epoch, limit=CLAIM_LIMIT, queues=queues)
                claimed += some
                if len(some) < CLAIM_LIMIT:
                    break
            others = [found.id for found in claimed if found.id not in self._allowed]
            if others:
                self.release_triggers(epoch, others)
        mine = [found for found in claimed if found.id in self._allowed]
        self._allowed.difference_update(found.id for found in mine)
        return mine

    def store_slice(
        self,
        epoch: Epoch,
        *,
        events: Sequence[FiredEvent] = (),
        refused: Sequence[RefusedEvent] = (),
        finished: Sequence[FinishedTrigger] = (),
        described: Sequence[DescribedTrigger] = (),
    ) -> StoredSlice:
        """Store, and note a fault of the database."""
        with self._noting_faults():
            return super().store_slice(epoch, events=events, refused=refused, finished=finished, described=described)

    def last_event(self, trigger_id: int) -> StoredEvent | None:
        """Answer, or fail as the log shows that it failed."""
        told, self._fault_told = self._fault_told, None
        if told is not None:
            raise RecordedFault(told)
        with self._noting_faults():
            return super().last_event(trigger_id)

    @contextlib.contextmanager
    def _noting_faults(self) -> Generator[None]:
        try:
            yield
        except DATABASE_UNUSABLE as error:
            self.fault = error
            raise

    def is_dead_letter(self, trigger_run_id: str, sequence_index: int) -> bool:
        """Whether this event is a dead letter. One that is stored with other coordinates than its own is not found."""
        which = (dead_letter.c.trigger_run_id == trigger_run_id, dead_letter.c.sequence_index == sequence_index)
        with self.database.reading() as tx:
            return tx.connection.execute(select(dead_letter.c.id).where(*which)).first() is not None

    def require_fresh(self) -> None:
        """Raise `DatabaseNotFresh` if the database holds rows already."""
        with self.database.reading() as tx:
            for table in (triggerer, trigger, trigger_event, dead_letter):
                if tx.connection.execute(select(exists(select(table.c.id)))).scalar_one():
                    name = database_name(self.database.engine)
                    raise DatabaseNotFresh(f"the database {name} is not empty: a replay needs one of its own")


def masked_bytes(kwargs: bytes) -> int:
    """Return how many bytes the kwargs had before they were masked for the capture."""
    masked = _MASKED.fullmatch(kwargs)
    return len(kwargs) if masked is None else int(masked[1])


def kwargs_like(recorded: bytes) -> bytes:
    """Return encoded kwargs of the size that is all a capture tells of them.

    No kwargs have 3 to 5 bytes: if a log says so, the size differs in the replay as well.
    """
    bytes_wanted = min(masked_bytes(recorded), _KWARGS_BYTES_MAX)
    empty = encode_value({"": ""}, where="kwargs")
    if bytes_wanted < len(empty):
        return b"{}" if bytes_wanted < len(empty) - 1 else b'{"":0}'
    return encode_value({"": "x" * (bytes_wanted - len(empty))}, where="kwargs")


@contextlib.contextmanager
def open_replay_store(
    url: str | None, *, secrets_of: Callable[[Engine], Secrets] | None = None
) -> Generator[ReplayStore]:
    """Open a fresh database for a replay: that of ``url``, which is kept, else one that is removed at the end.

    ``secrets_of`` returns the keys of one that is kept. Raises `DatabaseNotFresh`, and as `open_engine` and
    `headgate.store.db.schema.upgrade` do.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-replay-"))
            engine = open_engine(f"sqlite:///{Path(folder) / 'replay.db'}")
            event.listen(engine, "connect", _do_not_sync)
        else:
            engine = open_engine(url)
        stack.callback(engine.dispose)
        schema.upgrade(engine)
        secrets = None if secrets_of is None else secrets_of(engine)
        store = stack.enter_context(contextlib.closing(ReplayStore(engine, secrets)))
        store.require_fresh()
        yield store


def _do_not_sync(connection: sqlite3.Connection, record: Any) -> None:
    # A database that is deleted at the end need not survive a power cut, and a replay commits a thousand times a
    # second.
    connection.execute("PRAGMA synchronous = OFF")
