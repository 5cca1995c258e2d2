"""The database of a replay: an empty one, changed only as the log shows.

Triggers get the ids they have in the log, so that they can be recognized in the database. Which of them can be
claimed, and when, was decided outside the log, by users and by other supervisors; here
`headgate.supervisor.replay.acts` decides it, from the next frames of the log.
"""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
from cryptography.fernet import Fernet
from sqlalchemy import Engine, delete, event, exists, insert, select, update

from headgate.protocol.messages.queries import Query, QueryResult, StoredEvent
from headgate.protocol.messages.runner import (
    AbsentSubscriber,
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    Redelivery,
    RedeliveryEnd,
    RefusedEvent,
    TriggerSpec,
)
from headgate.protocol.values import encode_value
from headgate.store.db import schema
from headgate.store.db.bulk import chunks, insert_into
from headgate.store.db.engine import database_name, open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Tx
from headgate.store.errors import DATABASE_UNUSABLE, DatabaseAway, StoreError
from headgate.store.ids import Epoch, Hold
from headgate.store.store import Store
from headgate.store.tables import asset_watcher, dead_letter, stream, strike, trigger, trigger_event, triggerer
from headgate.store.triggers.events import StoredSlice
from headgate.store.triggers.leases import ClaimedTrigger, Poll
from headgate.store.triggers.strikes import KILLS_MAX
from headgate.supervisor.queries import QueryRefused

TRIGGER_ID_MAX = 2**63 - 1  # of the column
NO_LIMIT = 2**62  # of deliveries: no failure in a log reaches it
CLAIM_LIMIT = 1000  # triggers claimed in one transaction

Act = Literal["changed", "fenced", "held", "owned elsewhere", "paused", "redriven", "released", "removed", "restarted"]

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

    def answer(self, query: Query, *, dag_run_id: int | None, asker: str | None = None) -> QueryResult:
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
        self.acts: Counter[Act] = Counter()  # of users and of other supervisors, so far
        self.made: dict[int, TriggerSpec] = {}  # the triggers made so far, as they are now
        self.held: set[int] = set()  # those that are held by an act
        self._unknown: set[int] = set()  # those of which the log has shown only the stream
        self._streamless: set[int] = set()  # those that are known to read no stream since before the log begins
        self._removed: set[int] = set()
        self._allowed: set[int] = set()
        self._neighbour: Epoch | None = None  # the supervisor that owns streams of others
        self._taken: dict[str, int] = {}  # these, by digest, each with its trigger
        self._fault_told: str | None = None

    def _clock_of_log(self) -> datetime:
        try:
            return datetime.fromtimestamp(self.time if math.isfinite(self.time) else 0.0, UTC)
        except (ValueError, OverflowError, OSError):
            return datetime.fromtimestamp(0.0, UTC)

    # --- acts of others ---------------------------------------------------------------------------

    def make(self, spec: TriggerSpec) -> None:
        """Make a trigger that is not there yet, as the log shows it."""
        for trigger_id, made in list(self.made.items()):
            if made.name == spec.name:
                # Another trigger has its name now, so it was removed while no supervisor was running.
                self.remove(trigger_id)
        now = self._clock_of_log()
        with self.database.writing() as tx:
            row = {"id": spec.trigger_id, "created_date": now, **self._values(spec)}
            row |= {"max_deliveries": NO_LIMIT, "stream_id": _stream_id(tx, spec.stream) if spec.stream else None}
            tx.connection.execute(insert(trigger).values(row))
            watcher = {"name": spec.name, "trigger_id": spec.trigger_id, "created_date": now}
            tx.connection.execute(insert(asset_watcher).values(watcher))
        self.made[spec.trigger_id] = spec
        if spec.stream == "":
            self._streamless.add(spec.trigger_id)

    def make_unknown(self, absent: AbsentSubscriber) -> None:
        """Make a trigger of which the log shows only its stream, until it is started (`change`)."""
        self._unknown.add(absent.trigger_id)
        self.make(TriggerSpec(absent.trigger_id, "", f"trigger {absent.trigger_id}", "", b"{}", stream=absent.stream))

    def _values(self, spec: TriggerSpec) -> dict[str, Any]:
        kwargs = encode_value(kwargs_like(spec.kwargs), where="kwargs")
        return {"classpath": spec.classpath, "kwargs": self.database.secrets.encrypt(kwargs)}

    def is_as_made(self, spec: TriggerSpec) -> bool:
        """Whether a trigger has the class and the size of kwargs of this spec; the kwargs are masked in a log."""
        made = self.made[spec.trigger_id]
        return made.classpath == spec.classpath and masked_bytes(made.kwargs) == masked_bytes(spec.kwargs)

    def allow(self, trigger_ids: Iterable[int]) -> None:
        """Let these triggers be claimed, and no others."""
        self._allowed = set(trigger_ids)

    def pass_over(self, spec: TriggerSpec) -> None:
        """Pass a trigger over the messages that the log shows.

        They are taken from the log because they depend on limits that users have set, on deaths of runners, and on what
        was committed when a supervisor died, none of which is in the log.
        """
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
        with self.database.writing() as tx:
            tx.connection.execute(delete(strike).where(strike.c.trigger_id == spec.trigger_id))
            if rows:
                tx.connection.execute(insert(strike), rows)

    def remove(self, trigger_id: int) -> None:
        """Remove a trigger, as a user would; one that is not there, or removed, is left alone."""
        if trigger_id not in self.made or trigger_id in self._removed:
            return
        self._removed.add(trigger_id)
        self.acts["removed"] += 1
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

    def hold(self, trigger_id: int, hold: Hold) -> None:
        """Hold a trigger, as a user does who pauses it, or as a brake."""
        self.held.add(trigger_id)
        self.acts["paused" if hold == "paused" else "held"] += 1
        held = {"hold": hold, "hold_reason": "as in the log", "held_at": self._clock_of_log()}
        with self.database.writing() as tx:
            tx.connection.execute(update(trigger).where(trigger.c.id == trigger_id).values(held))

    def release(self, trigger_id: int) -> None:
        """Release a held trigger, as a user would."""
        self.held.discard(trigger_id)
        self.acts["released"] += 1
        self.release_trigger(trigger_id)

    def change(self, spec: TriggerSpec) -> None:
        """Have a trigger started again, as a user would, with the class and the size of kwargs of this spec."""
        trigger_id, values = spec.trigger_id, self._values(spec)
        with self.database.writing() as tx:
            if trigger_id in self._unknown:
                self._unknown.remove(trigger_id)
                which = asset_watcher.c.trigger_id == trigger_id
                tx.connection.execute(update(asset_watcher).where(which).values(name=spec.name))
            else:
                self.acts["restarted" if self.is_as_made(spec) else "changed"] += 1
            values["changed_at"] = self._clock_of_log()
            tx.connection.execute(update(trigger).where(trigger.c.id == trigger_id).values(values))
        self.made[trigger_id] = spec

    def redrive(self, redelivery: Redelivery) -> None:
        """Have a message given to its trigger, as a user would. Its letter is made, and has an id of the replay."""
        self.acts["redriven"] += 1
        letter_id, size = replayed_letter_id(redelivery.letter_id), len(redelivery.message)
        again = {"state": "redriving", "payload": redelivery.message, "target_id": redelivery.trigger_id}
        row = {
            "id": letter_id,
            "trigger_id": redelivery.trigger_id,
            "trigger_run_id": f"redriven {letter_id}",
            "sequence_index": 0,
            "key": redelivery.key,
            "position": letter_id - 1,  # the log's own letter of the message may be there, and is another
            "payload_head": b"",
            "payload_bytes": size,
            "payload_kept": True,
            "reason": "as in the log",
            "stored_at": self._clock_of_log(),
            "content": "message",
        }
        with self.database.writing() as tx:
            of_letter = update(dead_letter).where(dead_letter.c.id == letter_id)
            if not tx.connection.execute(of_letter.values(again)).rowcount:
                tx.connection.execute(insert(dead_letter).values(row | again))

    def open_again(self, trigger_id: int) -> None:
        """Let a trigger that is over run again, as a user would, or a task whose stream goes on with it."""
        self.acts["restarted"] += 1
        self._removed.discard(trigger_id)
        free = {"finished_at": None, "removed_at": None, "triggerer_id": None}
        with self.database.writing() as tx:
            which = asset_watcher.c.trigger_id == trigger_id
            tx.connection.execute(update(asset_watcher).where(which).values(removed_at=None))
            tx.connection.execute(update(trigger).where(trigger.c.id == trigger_id).values(free))

    def states(self, trigger_ids: Iterable[int]) -> dict[int, tuple[Hold | None, bool]]:
        """Return the hold of each of these triggers, and whether it has returned, was finished or removed."""
        found: dict[int, tuple[Hold | None, bool]] = {}
        with self.database.reading() as tx:
            for ids in chunks(sorted(trigger_ids)):
                columns = (trigger.c.id, trigger.c.hold, trigger.c.finished_at, trigger.c.removed_at)
                for row in tx.connection.execute(select(*columns).where(trigger.c.id.in_(ids))):
                    found[row.id] = (row.hold, (row.finished_at, row.removed_at) != (None, None))
        return found

    def fence(self, epoch: Epoch) -> None:
        """Take the lease of ``epoch`` away, as another supervisor would."""
        self.acts["fenced"] += 1
        neighbour = self._register_neighbour()
        self.fence_triggerers(neighbour, dead=[epoch])
        self.release_triggerer(neighbour)

    def take_stream(self, described: DescribedTrigger) -> None:
        """Have another supervisor own the stream of a trigger, because it runs a trigger of its own on it."""
        self.acts["owned elsewhere"] += 1
        if described.stream in self._taken:
            return
        self._neighbour = self._neighbour or self._register_neighbour()
        theirs = TRIGGER_ID_MAX - self.acts["owned elsewhere"]  # no log has counted up to there
        now = self._clock_of_log()
        with self.database.writing() as tx:
            stream_id = _stream_id(tx, described.stream)
            owned = {"triggerer_id": self._neighbour}
            tx.connection.execute(update(stream).where(stream.c.id == stream_id).values(owned))
            row = {"id": theirs, "classpath": "", "kwargs": "", "created_date": now, "stream_id": stream_id, **owned}
            tx.connection.execute(insert(trigger).values(row))
        self._taken[described.stream] = theirs

    def give_back(self, digest: str) -> None:
        """Have the other supervisor leave a stream, if it owns it."""
        theirs = self._taken.pop(digest, None)
        if theirs is not None:
            with self.database.writing() as tx:
                which = stream.c.digest == digest, stream.c.triggerer_id == self._neighbour
                tx.connection.execute(update(stream).where(*which).values(triggerer_id=None))
                left = {"triggerer_id": None, "stream_id": None, "removed_at": self._clock_of_log()}
                tx.connection.execute(update(trigger).where(trigger.c.id == theirs).values(left))

    def _register_neighbour(self) -> Epoch:
        return self.register_triggerer(
            hostname="neighbour", pid=0, machine="neighbour", process_started=0.0, capacity=1, queues=("default",)
        )

    def fail_next_query(self, text: str) -> None:
        """Have the next `last_event` fail with this text."""
        self._fault_told = text

    # --- verbs that the core calls ----------------------------------------------------------------

    def poll(self, epoch: Epoch, queues: Sequence[str]) -> Poll:
        """Return that triggers can be claimed only if the log shows some next."""
        poll = super().poll(epoch, queues)
        return msgspec.structs.replace(poll, claimable=poll.claimable and bool(self._allowed))

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
        return [msgspec.structs.replace(found, stream="") if found.id in self._streamless else found for found in mine]

    def store_slice(
        self,
        epoch: Epoch,
        *,
        events: Sequence[FiredEvent] = (),
        refused: Sequence[RefusedEvent] = (),
        finished: Sequence[FinishedTrigger] = (),
        described: Sequence[DescribedTrigger] = (),
        redriven: Sequence[RedeliveryEnd] = (),
    ) -> StoredSlice:
        """Store, and note a fault of the database."""
        with self._noting_faults():
            return super().store_slice(
                epoch,
                events=events,
                refused=refused,
                finished=finished,
                described=described,
                redriven=redriven,
            )

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


def replayed_letter_id(recorded: int) -> int:
    """Return the id that a letter which is redriven in the log has in the replay, where no other letter has it."""
    return -recorded


def masked_bytes(kwargs: bytes) -> int:
    """Return how many bytes the kwargs had before they were masked for the capture."""
    masked = _MASKED.fullmatch(kwargs)
    return len(kwargs) if masked is None else int(masked[1])


def kwargs_like(recorded: bytes) -> dict[str, Any]:
    """Return kwargs whose encoded form has the size that is all a capture tells of them.

    No kwargs have 3 to 5 bytes: if a log says so, the size differs in the replay as well.
    """
    bytes_wanted = min(masked_bytes(recorded), _KWARGS_BYTES_MAX)
    empty_bytes = len(encode_value({"": ""}, where="kwargs"))
    if bytes_wanted < empty_bytes:
        return {} if bytes_wanted < empty_bytes - 1 else {"": 0}
    return {"": "x" * (bytes_wanted - empty_bytes)}


def _stream_id(tx: Tx, digest: str) -> int:
    """Return the row of a stream, which is made if it is not there; nobody owns it then."""
    row = {"digest": digest, "name": digest, "queue": "default", "created_date": tx.now}
    tx.connection.execute(insert_into(tx.connection, stream).values(row).on_conflict_do_nothing())
    return int(tx.connection.execute(select(stream.c.id).where(stream.c.digest == digest)).scalar_one())


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
