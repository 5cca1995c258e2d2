"""A table of PostgreSQL as a queue (an *outbox*): each row is stored, and then deleted or marked.

The promise, in the words of ``docs/brokers.md``: **every row that is committed is stored once**, for each watcher,
whatever dies, as long as the server does not lose it. A row is deleted (or marked) after everything derived from it is
stored. It is known by the server, its table, its id, the transaction that has written it (``xmin``) and its content. A
row that others change between its storing and its deletion is another message, and is neither lost nor deleted unread.

Ids are no order of commits: a row of a slow transaction appears behind rows with greater ids. So the table is read from
its beginning again and again, and there is no place in it to be remembered.

One session at a time reads a table, under an advisory lock of the server. The lock, and every deletion, belong to one
connection: a reader that has lost it deletes nothing. A pooler that gives statements of one connection to several
sessions (PgBouncer, by transaction) is found out by that, and refused.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import structlog

from headgate.brokers.broker_errors import BrokerSourceMissing
from headgate.brokers.broker_trigger import BrokerTrigger, arguments_of, check_choice, check_name, check_names
from headgate.brokers.clients.bodies import KEY_CHARS_MAX, decoded_body
from headgate.brokers.clients.postgres_client import (
    TROUBLE,
    PostgresClient,
    PostgresLocked,
    PostgresPasses,
    Row,
    translated,
)
from headgate.brokers.clients.postgres_table import Statements, Table, find_table, statements_of
from headgate.brokers.threaded import (
    HEAD_BYTES_MAX,
    IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
    BrokerMisconfigured,
    Received,
    ThreadedProducer,
    oversized,
)
from headgate.triggers.shared_stream import Undecodable

__all__ = ["PostgresOutboxProducer", "PostgresOutboxTrigger"]

VERSION_MIN: Final = 12
READER: Final = "headgate"
LOOK_S: Final = 0.02  # between two looks at a table that had rows a moment ago, then twice as long, ...
LOOK_MAX_S: Final = 1.0  # ... up to this
LOOK_MAX_NOTIFIED_S: Final = 5.0  # the same where notifications come: one that is sent while nobody listens is gone
AGAIN_S: Final = 5.0  # between two looks at the beginning while the table is full: rows may have appeared there
LOCKED_S: Final = 1.0  # before a row that was locked when it was to be deleted is read once more
LOCKED_MAX: Final = 10  # rows of one acknowledgement that are waited for, a moment each
PING_S: Final = 1.0  # while as many rows are in flight as may be
LAG_MAX: Final = 1_000_000  # rows that are counted

_log = structlog.get_logger("headgate.brokers.postgres")


class RowName(NamedTuple):
    """A version of a row: its id, and the transaction that has written it, as texts."""

    id: str
    xmin: str


class PostgresOutboxProducer(ThreadedProducer):
    """Reads one table; the arguments are those of `PostgresOutboxTrigger`."""

    trouble = TROUBLE
    left_takes_room = True  # the table is read from its beginning: what is left is read over each time

    def __init__(
        self,
        connection: str,
        table: str,
        *,
        id: str = "id",
        body: str = "row",
        lane: str = "table",
        then: str = "delete",
        where: str | None = None,
        notify: str | None = None,
        reader: str = READER,
        dead_letter: str | None = None,
        accept_drop: bool = False,
        **limits: Any,
    ) -> None:
        super().__init__(connection, **limits)
        for what, text in {"table": table, "id": id, "reader": reader}.items():
            check_name(what, text)
        check_names(notify=notify, dead_letter=dead_letter, where=where)
        check_choice("body", body, ("row",), ("json:",))
        check_choice("lane", lane, ("table", "message"), ("column:",))
        check_choice("then", then, ("delete",), ("set:",))
        if dead_letter == table:
            raise ValueError("dead_letter must be another table than the one that is read")
        self.keeps_rejected = dead_letter is not None
        body_column, lane_column, mark = (text.partition(":")[2] for text in (body, lane, then))
        self._table = Table(table, id, body_column, lane_column, mark, where, dead_letter)
        self._orders = lane != "message"
        self._notify = notify
        self._reader = reader
        self._accepts_drop = accept_drop
        self._client: PostgresClient | None = None
        self._statements: Statements | None = None
        self._server = ""  # its identity
        self._oid = 0  # of the table
        self._token = ""  # of the session that has the lock; empty: not yet
        self._after: str | None = None  # the id behind which the next look begins; None: at the beginning
        self._again_at = self._look_at = self._ping_at = 0.0
        self._pause_s = LOOK_S
        self._taken: dict[str, str] = {}  # rows that are held: id and xmin
        self._locked: dict[str, float] = {}  # ids, and until when they are read over

    @property
    def name(self) -> str:
        """The table."""
        return f"postgresql table {self._table.name}"

    # --- connecting -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, and try every statement on no row: permissions, types and columns are known then."""
        assert self.connection is not None
        self._token, self._after = "", None
        self._look_at = self._again_at = 0.0
        self._client = client = PostgresClient(self.connection, f"reads {self._table.name}")
        if client.server_version < VERSION_MIN:
            raise BrokerMisconfigured(
                f"{self.name}: the server is PostgreSQL {client.server_version}, and must be {VERSION_MIN} or newer"
            )
        with translated(self.name):
            found = find_table(client, self._table, self.name)
            for danger in found.dangers:
                self._drop(danger)
            for warning in found.warnings:
                self.warn(warning)
            if self._oid not in (0, found.oid):
                # What is held is of another table.
                raise BrokerSourceMissing(f"{self.name}: the table that was read does not exist any more")
            statements = statements_of(found, self._table)
            self._check_server(client)
            client.rows(statements.read, self._range("", 0))
            for statement in (statements.acknowledge, statements.reject, statements.still_there):
                if statement:
                    client.rows(statement, {"ids": [], "xmins": [], "token": ""})
            # A row whose deletion a crash of the server forgets comes again, and is recognised.
            client.rows("SET synchronous_commit = off")
            if self._notify is not None:
                client.listen(self._notify)
        self._oid, self._statements = found.oid, statements

    def disconnect(self) -> None:
        """Close the connection, and with it the lock."""
        client, self._client = self._client, None
        self._token = ""
        if client is not None:
            client.close()

    def _check_server(self, client: PostgresClient) -> None:
        ((self._server, fsync),) = client.rows(
            "SELECT system_identifier::text, current_setting('fsync') FROM pg_control_system()"
        )
        if fsync == "off":
            self.warn("the server does not sync its files (fsync=off): a crash of its machine loses rows")
        if client.is_behind_pooler:
            self.warn("the connection goes through a pooler, which must pool by session, not by transaction")
        if client.is_readable_on_the_way:
            self.warn("the connection is not encrypted: sslmode=verify-full in its query encrypts and checks it")

    def _lock(self) -> None:
        """Become the one session that reads the table. Raises `PostgresPasses` while another one is."""
        if self._token:
            return
        digest = hashlib.blake2b(f"headgate {self._oid} {self._reader}".encode(), digest_size=8).digest()
        number = {"lock": int.from_bytes(digest, "big", signed=True)}
        if self._db.rows("SELECT pg_try_advisory_lock(%(lock)s)", number) != [(True,)]:
            holders = self._db.rows(
                "SELECT pid, coalesce(client_addr::text, 'local') FROM pg_stat_activity JOIN pg_locks USING (pid) "
                "WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND (classid::bigint << 32) | objid::bigint "
                "= %(lock)s",
                number,
            )
            whose = ", ".join(f"process {pid} of {address}" for pid, address in holders) or "it has just left"
            raise PostgresPasses(f"another session reads the table as {self._reader!r} ({whose})")
        token = secrets.token_hex(8)
        self._db.rows("SELECT set_config('headgate.reader', %(token)s, false)", {"token": token})
        self._token = token

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        """Return rows that are not held, in the order of their ids; look again at the beginning after the last."""
        with translated(self.name):
            self._lock()
            wait_s = min(wait_s, self._look_at - time.monotonic(), LOOK_S if self._taken else wait_s)
            if wait_s > 0 and self._notify is not None:
                if self._db.wait(wait_s):
                    self._look_at = 0.0
            elif wait_s > 0:
                time.sleep(wait_s)
            if (now := time.monotonic()) < self._look_at:
                return []
            rows = self._look(count_max, now)
        return [self._message(*row) for row in rows]

    def idle(self) -> None:
        """Notice a link that is gone also while no row is read."""
        if time.monotonic() >= self._ping_at:
            self._ping_at = time.monotonic() + PING_S
            with translated(self.name):
                self._db.rows("SELECT 1")

    def _look(self, count_max: int, now: float) -> list[Row]:
        if now >= self._again_at:
            self._after, self._again_at = None, now + AGAIN_S
        for row_id in [row_id for row_id, until in self._locked.items() if until <= now]:
            del self._locked[row_id]
        if self._after is None:
            rows = self._db.rows(self._sql.read, self._range("", count_max))
        else:
            rows = self._db.rows(self._sql.read_after, self._range(self._after, count_max))
        if len(rows) == count_max:
            self._after, self._look_at = rows[-1][0], 0.0
            return rows
        self._after, self._again_at = None, now + AGAIN_S
        pause_max_s = LOOK_MAX_S if self._notify is None else LOOK_MAX_NOTIFIED_S
        self._pause_s = LOOK_S if rows else min(2 * self._pause_s, pause_max_s)
        self._look_at = now + self._pause_s
        return rows

    def _range(self, after: str, count_max: int) -> dict[str, Any]:
        return {
            "after": after,
            "passed": [*self._taken, *self._locked],
            "count_max": count_max,
            "bytes_max": self.limits.message_bytes_max,
            "head_bytes": HEAD_BYTES_MAX,
        }

    def _message(
        self, row_id: str, xmin: str, oid: int, lane: str | None, size: int | None, body: str | bytes | None
    ) -> Received:
        if oid != self._oid:
            raise BrokerSourceMissing(f"{self.name}: the table that was read does not exist any more")
        data = body.encode() if isinstance(body, str) else body
        content = hashlib.blake2b(b"NULL" if data is None else data, digest_size=8).hexdigest()
        key = f"postgres:{self._server}:{oid}:{row_id}:{xmin}:{content}"
        if len(key) > KEY_CHARS_MAX:
            short = hashlib.blake2b(row_id.encode(), digest_size=16).hexdigest()
            key = f"postgres:{self._server}:{oid}:{short}:{xmin}:{content}"
        name = RowName(row_id, xmin)
        self._taken[row_id] = xmin
        return Received(name, self._raw_event(row_id, size or 0, data), key, lane if self._orders else name, size or 0)

    def _raw_event(self, row_id: str, size: int, data: bytes | None) -> Any:
        """Return what filters get; an `Undecodable` for a row that is not what ``body`` says."""
        if data is None:
            return Undecodable(f"the column {self._table.body} is NULL", f"id {row_id}")
        if (too_long := oversized(size, data, self.limits.message_bytes_max)) is not None:
            return too_long
        value = decoded_body(data, "json")
        if isinstance(value, Undecodable):
            return value
        return value if self._table.body else {"id": row_id, "table": self._table.name, "row": value}

    # --- outcomes -------------------------------------------------------------------------------------------------

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Delete or mark rows, in one transaction. Those that another one has locked are read once more later."""
        self._tell(self._sql.acknowledge, messages)

    def reject(self, messages: Sequence[Received]) -> None:
        """Copy rows to the table of rejected ones, and delete or mark them, in one transaction."""
        self._tell(self._sql.reject, messages)

    def _tell(self, statement: str, messages: Sequence[Received]) -> None:
        names: list[RowName] = [message.ref for message in messages]
        with translated(self.name):
            self._lock()
            try:
                told = self._told(statement, names)
            except PostgresLocked:
                told = self._told_one_by_one(statement, names)
        for name in names:
            self._taken.pop(name.id, None)
            if name not in told:
                self._locked[name.id] = time.monotonic() + LOCKED_S

    def _told(self, statement: str, names: Sequence[RowName]) -> set[RowName]:
        """Return the rows that are done: all of these."""
        versions = {"ids": [name.id for name in names], "xmins": [name.xmin for name in names]}
        with translated(self.name):
            ((holds_lock, count),) = self._db.rows(statement, {**versions, "token": self._token})
            if not holds_lock:
                raise BrokerMisconfigured(
                    f"{self.name}: statements of one connection come to several sessions of the server: a pooler must "
                    f"pool by session, not by transaction"
                )
            # Others may have deleted some. But what is there, and unchanged, would come again for ever.
            if count < len(names) and (kept := self._db.rows(self._sql.still_there, {**versions, "token": ""})):
                raise BrokerMisconfigured(
                    f"{self.name}: the row {kept[0][0]} is still there after it was {self._table.done}: a rule or a "
                    f"trigger of the table stands against that"
                )
        return set(names)

    def _told_one_by_one(self, statement: str, names: Sequence[RowName]) -> set[RowName]:
        told: set[RowName] = set()
        locked = 0
        with translated(self.name):
            self._db.rows("SELECT set_config('lock_timeout', '10ms', false)")
            for name in names:
                try:
                    told |= self._told(statement, [name])
                except PostgresLocked:
                    locked += 1
                    if locked == LOCKED_MAX:
                        break
            self._db.rows("SELECT set_config('lock_timeout', '2s', false)")
        _log.info("rows are locked by other transactions", stream=self.name, rows=len(names) - len(told))
        return told

    def lag(self) -> int | None:
        """Return how many rows are there, held or not; no more than a million are counted."""
        with translated(self.name):
            ((count,),) = self._db.rows(self._sql.lag, {"count_max": LAG_MAX})
        return int(count)

    @property
    def _db(self) -> PostgresClient:
        assert self._client is not None
        return self._client

    @property
    def _sql(self) -> Statements:
        assert self._statements is not None
        return self._statements


class PostgresOutboxTrigger(BrokerTrigger):
    """Fires an event for every row of a table; triggers of one table and reader share a reader.

    ``connection`` names a stored connection (see `headgate.brokers.clients.postgres_client`); ``table`` is a name as in
    SQL, with or without a schema, and its column ``id`` must be unique by itself and never NULL. The raw event is
    ``{"id": str, "table": str, "row": {column: value}}``, with values as PostgreSQL writes them as JSON; with
    ``body="json:COLUMN"`` the value of that column, parsed. ``lane``: ``"table"`` keeps the order of ids,
    ``"column:COLUMN"`` that of rows with the same value, ``"message"`` none. ``then``: ``"delete"``, or
    ``"set:COLUMN"``: set a column that is NULL until then, of type timestamp (to the time), date or boolean (to true).
    ``where``: a condition in SQL; other rows are not read. ``notify``: a channel on which writers notify, so that the
    table is looked at at once; without it up to a second passes. ``reader``: of readers with the same name only one
    reads at a time; those with other names must read other rows (``where``). ``dead_letter``: a table with the same
    columns that gets the rows that subscribers reject; without it they become dead letters of headgate.
    ``accept_drop``: read a table that loses rows. The limits are those of `headgate.brokers.threaded.ThreadedProducer`.
    Raises ValueError for arguments that cannot be used.

    To select or transform rows, subclass it and override ``filter_shared_stream``.
    """

    producer = PostgresOutboxProducer
    scheme = "postgres"
    place = ("connection", "table", "reader")

    def __init__(
        self,
        connection: str,
        table: str,
        *,
        id: str = "id",
        body: str = "row",
        lane: str = "table",
        then: str = "delete",
        where: str | None = None,
        notify: str | None = None,
        reader: str = READER,
        dead_letter: str | None = None,
        accept_drop: bool = False,
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(**arguments_of(locals()))
