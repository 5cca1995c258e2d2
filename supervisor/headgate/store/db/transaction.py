"""`Database`: one connection and the transactions on it. `Tx`: one transaction, as the functions of a verb see it.

Verbs are declared by the decorators of `headgate.store.db.verbs`; read that first.

A `Database` is used by one thread and keeps one connection. After `DatabaseAway` and `DatabaseFault` the connection
is thrown away, and the next transaction opens another, so that no state of the broken one survives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, Connection, Engine, and_, bindparam, func, select, true, update

from headgate.protocol import marks
from headgate.store.access import audit
from headgate.store.access.audit import Action, Actor, Detail, Unaudited, Written
from headgate.store.db import changes, driver_errors
from headgate.store.db.bells import Bells, Kind
from headgate.store.db.changes import News
from headgate.store.db.database_file import DatabaseFile
from headgate.store.db.deadline import Deadline
from headgate.store.db.engine import READS_ONLY, STATEMENT_TIMEOUT_S, database_name, is_cut, is_in_memory
from headgate.store.db.faults import PassedOver
from headgate.store.db.prepared import Prepared, driver_of
from headgate.store.db.secrets import Secrets
from headgate.store.db.times import Clock, DatabaseNow, read, read_clock
from headgate.store.errors import BadKey, DatabaseAway, LeaseLost, RowsRefused, TransactionOpen
from headgate.store.ids import DagRunId, Epoch
from headgate.store.tables import dag_run, encryption_key, triggerer

# A server ends statements before: a transaction that takes longer waits for one, or a network, that answers no more.
ANSWER_MAX_S = STATEMENT_TIMEOUT_S + 5.0


def is_alive() -> ColumnElement[bool]:
    """Return the condition that a lease is neither fenced nor ended."""
    return and_(triggerer.c.fenced_at.is_(None), triggerer.c.stopped_at.is_(None))


_THIS_LEASE = and_(triggerer.c.id == bindparam("epoch"), is_alive())
_LOCK_LEASE = Prepared(select(DatabaseNow()).where(_THIS_LEASE).with_for_update(read=True))
# FOR NO KEY UPDATE: it has to wait for the FOR SHARE of `lock_lease`, and foreign keys need not wait for it.
_WAIT_FOR_INFLIGHT = Prepared(select(triggerer.c.id).where(_THIS_LEASE).with_for_update(key_share=True))
_PRIMARY_KEY = select(encryption_key.c.fingerprint).where(encryption_key.c.superseded_at.is_(None))
_READ_PRIMARY_KEY = Prepared(_PRIMARY_KEY)
# FOR SHARE: a rotation waits for the transactions that encrypt with the old key (`headgate.store.keys`).
_LOCK_PRIMARY_KEY = Prepared(_PRIMARY_KEY.with_for_update(read=True))
_KEYS_COUNT = Prepared(select(func.count()).select_from(encryption_key))
_MARK_DIRTY = Prepared(update(dag_run).where(dag_run.c.id == bindparam("of_id")).values(needs_look=true()))


def lock_lease(connection: Connection, epoch: Epoch, clock: Clock | None) -> datetime:
    """Keep ``epoch`` from being fenced until the transaction ends; return the time. Raises `LeaseLost`.

    The lock is FOR SHARE, which the UPDATE of a fencing has to respect; FOR KEY SHARE it would not.
    """
    row = _LOCK_LEASE.run(connection, epoch=epoch).fetchone()
    if row is None:
        raise LeaseLost(epoch)
    return read(connection, row[0]) if clock is None else clock().astimezone(UTC)


def wait_for_inflight(connection: Connection, epoch: Epoch) -> None:
    """Wait until no other transaction of ``epoch`` is in flight: later statements see all that they have committed.

    A COMMIT may be with the server for long after its connection was cut, waiting for a disk or a standby, and until
    it is done its changes are invisible. But it keeps the row that `lock_lease` has locked. If it takes longer than
    the limit on waiting for locks, this raises `DatabaseAway`. Raises `LeaseLost`.
    """
    if _WAIT_FOR_INFLIGHT.run(connection, epoch=epoch).fetchone() is None:
        raise LeaseLost(epoch)


def lock_primary_key(connection: Connection) -> str | None:
    """Return the fingerprint of the key that encrypts, and keep it from being superseded until the transaction ends.

    Return None if no key is registered, as in a database that was made by a test.
    """
    while (row := _LOCK_PRIMARY_KEY.run(connection).fetchone()) is None:
        if not _KEYS_COUNT.run(connection).fetchone()[0]:
            return None
        # It was superseded while this waited for its row: the next statement sees the new one.
    return str(row[0])


class Tx:
    """One transaction: its connection, and everything else that the functions of a verb need."""

    __slots__ = (
        "_dirty_runs",
        "_key",
        "_now",
        "actor",
        "clock",
        "connection",
        "has_acted",
        "passed_over",
        "rings",
        "secrets",
        "written",
    )

    def __init__(
        self,
        connection: Connection,
        secrets: Secrets,
        clock: Clock | None,
        now: datetime | None,
        passed_over: PassedOver,
    ) -> None:
        self.connection = connection
        self.passed_over = passed_over
        self.secrets = secrets
        self.clock = clock
        self._now = now
        self._dirty_runs: set[DagRunId] = set()
        self._key: str | None = None  # that encrypts, once its row is locked
        # The bells of others that are rung when this is committed, each with the ids that have news; none: any may.
        self.rings: dict[Kind, frozenset[int]] = {}
        self.actor: Actor | None = None  # the user for whom this is done; None: a supervisor, or a program
        self.has_acted = False
        self.written: Written | None = None  # the row of the audit that was written last, maybe by an earlier one

    @property
    def now(self) -> datetime:
        """The time of the transaction by the database's clock: of its lock on the lease, or of the first access."""
        if self._now is None:
            self._now = read_clock(self.connection, self.clock)
        return self._now

    @property
    def is_postgresql(self) -> bool:
        """Whether it runs on PostgreSQL; SQLite has one writer at a time."""
        return self.connection.dialect.name == "postgresql"

    def encrypt(self, data: bytes) -> str:
        """Return ``data`` under the key that the database is written with. Raises `WrongKeys` if it is not here."""
        if self._key is None:
            self._key = lock_primary_key(self.connection)
        return self.secrets.encrypt(data, self._key)

    def decrypt(self, text: str) -> bytes:
        """Return encrypted data in clear. Raises `BadKey`; `WrongKeys` if it is not the fault of the data."""
        try:
            return self.secrets.decrypt(text)
        except BadKey:
            self.require_key()
            raise

    def require_key(self) -> None:
        """Raise `WrongKeys` unless the key that the database is written with is here: little can be read without it."""
        if (row := _READ_PRIMARY_KEY.run(self.connection).fetchone()) is not None:
            self.secrets.require(str(row[0]))

    def notify(self) -> None:
        """Make other supervisors query the database, once this is committed (`headgate.store.db.changes`)."""
        self._ring("changes", ())

    def notify_readers(self, trigger_ids: Collection[int]) -> None:
        """Make readers look for new events of these triggers, once this is committed."""
        self._ring("events", trigger_ids)

    def notify_listeners(self, key_ids: Collection[int]) -> None:
        """Make listeners look for new versions of these keys of signals, once this is committed."""
        self._ring("signals", key_ids)

    def _ring(self, kind: Kind, ids: Collection[int]) -> None:
        before = self.rings.get(kind, ids)
        self.rings[kind] = frozenset(before).union(ids) if before and ids else frozenset()

    def act(
        self,
        action: Action,
        subject: str,
        *,
        before: Detail | None = None,
        after: Detail | None = None,
        counts: Mapping[str, int] | None = None,
        changed: bool = True,
        is_refused: bool = False,
        of_many: str | None = None,
    ) -> int | None:
        """Record what a user does in this transaction; return the id of the row, None if it is done by nobody.

        With ``counts`` it is a part of what this user did last, if that has the same action and the same subject, or
        the same ``of_many``, which is the subject of the row from then on. Not ``changed``: it was so already.
        ``is_refused``: the row says only that somebody wanted to.
        """
        self.has_acted = True
        if self.actor is None:
            return None
        last, shared = self.written, of_many or subject
        if counts is not None and last is not None and (last.action, last.subject) == (action, shared):
            self.written = audit.write_more(self.connection, last, counts)
            return last.id
        whole = after if counts is None else {**(after or {}), **counts}
        about = audit.Told(
            action, subject, before, whole, "refused" if is_refused else "done" if changed else "unchanged"
        )
        new = audit.write(self.connection, self.now, self.actor, about)
        self.written = Written(new, action, shared, whole or {}, is_refused)
        return new

    def act_nothing(self) -> None:
        """Say that this transaction of a user changes nothing that others see, and so leaves no row."""
        self.has_acted = True

    def mark_run_dirty(self, dag_run: DagRunId) -> None:
        """Have the scheduler evaluate this run, once this is committed."""
        self._dirty_runs.add(dag_run)

    def unmark_run_dirty(self, dag_run: DagRunId) -> None:
        """Take `mark_run_dirty` back: this transaction has itself evaluated the run."""
        self._dirty_runs.discard(dag_run)

    def finish(self) -> None:
        """Write the dirty flags, and have the server ring the bells; the last thing a transaction does."""
        self.flush()
        changes.notify(self.connection, self.rings)

    def flush(self) -> None:
        """Write the dirty flags, which nothing but the bells follows.

        A flag is written even if it is set: if the scheduler evaluates the run at this moment, this waits until it has
        done so, and makes it evaluate again. In order of their ids, so that two transactions that flag the same runs do
        not deadlock, and with nothing waited for afterwards.
        """
        for dag_run_id in sorted(self._dirty_runs):
            _MARK_DIRTY.run(self.connection, of_id=dag_run_id)
        self._dirty_runs.clear()


class LeasedTx(Tx):
    """A transaction on behalf of ``epoch``, whose lease is locked until it ends: it cannot be fenced before."""

    __slots__ = ("epoch",)

    def __init__(
        self,
        connection: Connection,
        secrets: Secrets,
        clock: Clock | None,
        now: datetime,
        passed_over: PassedOver,
        epoch: Epoch,
    ) -> None:
        super().__init__(connection, secrets, clock, now, passed_over)
        self.epoch = epoch


class Database:
    """One connection, made when it is needed, and the kinds of transactions that verbs run on it.

    Each is a context manager: it commits at the end of the block, rolls back on any exception, and raises the drivers'
    errors as those of `headgate.store.errors`. Those that write raise `DatabaseReplaced` if SQLite has committed to a
    file that is no longer there.
    """

    def __init__(self, engine: Engine, secrets: Secrets, clock: Clock | None, actor: Actor | None = None) -> None:
        self.secrets = secrets
        self.clock = clock
        self.engine = engine
        self.actor = actor
        self.passed_over = PassedOver()  # by its verbs
        self._written: Written | None = None  # the row of the audit that was committed last
        self._connection: Connection | None = None
        self.is_beginning = False  # a transaction of its own
        self._changes: changes.ChangeListener | None = None
        self._news: dict[News, changes.NewsListener] = {}
        self._doorbell: changes.Doorbell | None = None
        self._deadline = Deadline(ANSWER_MAX_S)
        self._bells = Bells.of(engine)
        self._file = DatabaseFile.of(engine)

    def watch(self, file: DatabaseFile) -> None:
        """Look at this file after each commit instead of the engine's: for simulations."""
        self._file = file

    def close(self) -> None:
        """Close the connection. A transaction that begins later opens another."""
        connection = self._forget_connection()
        if connection is not None:
            connection.close()
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None

    def is_as_opened(self) -> bool:
        """Whether a new connection would read the same, and no more: SQLite's file may be replaced, or this one cut."""
        is_whole = self._connection is None or not is_cut(self._connection)
        return is_whole and (self._file is None or self._file.is_as_opened())

    @contextmanager
    def leased(self, epoch: Epoch) -> Generator[LeasedTx]:
        """Run a transaction that writes on behalf of ``epoch``. Raises `LeaseLost`."""
        with self._transaction(reads_only=False) as connection:
            now = lock_lease(connection, epoch, self.clock)
            tx = LeasedTx(connection, self.secrets, self.clock, now, self.passed_over, epoch)
            yield tx
            tx.finish()
        self._ring(tx)

    @contextmanager
    def writing(self) -> Generator[Tx]:
        """Run a transaction that writes, for a supervisor that has no lease yet, or for a program."""
        if self.actor is not None:
            raise Unaudited("a store of a user writes in transactions that leave a row in the audit alone")
        with self.acting() as tx:
            yield tx

    @contextmanager
    def acting(self) -> Generator[Tx]:
        """Run a transaction in which a user changes something: the block has to call `Tx.act`, or `Tx.act_nothing`."""
        with self._transaction(reads_only=False) as connection:
            tx = Tx(connection, self.secrets, self.clock, None, self.passed_over)
            tx.actor, tx.written = self.actor, self._written
            yield tx
            tx.finish()
            if self.actor is not None and not tx.has_acted:
                raise Unaudited("a transaction of a user was to write without a row in the audit")
        self._written = tx.written
        self._ring(tx)

    @contextmanager
    def reading(self) -> Generator[Tx]:
        """Run a transaction that only reads: on SQLite it waits for no writer."""
        with self._transaction(reads_only=True) as connection:
            yield Tx(connection, self.secrets, self.clock, None, self.passed_over)

    @contextmanager
    def single_statement(self) -> Generator[Tx]:
        """Run one `Prepared` statement, which is a transaction by itself: BEGIN and COMMIT would be two more."""
        with self._translating():
            connection = self._free()
            tx = Tx(connection, self.secrets, self.clock, None, self.passed_over)
            driver = driver_of(connection)
            with self._within_deadline(connection):
                if not tx.is_postgresql:  # the driver of SQLite begins no transaction by itself
                    yield tx
                    self._check_file()
                    return
                driver.autocommit = True
                try:
                    yield tx
                finally:
                    if not driver.closed:
                        driver.autocommit = False

    def doorbell(self) -> int:
        """Return a descriptor that is readable when `has_changes` would say yes, until this is closed."""
        if self._doorbell is None:
            self._doorbell = changes.Doorbell()
        return self._doorbell.fileno()

    @property
    def no_bell(self) -> str | None:
        """Why `has_changes` has to be asked every now and then, once it was; None if that descriptor tells."""
        return None if self._changes is None else self._changes.no_bell

    def has_changes(self) -> bool:
        """Whether others may have written since this was asked last; it begins no transaction."""
        with self._translating():
            if self._changes is not None and self._changes.is_lost():
                self._stop_listening()
            if self._connection is None or self._changes is None:
                connection = self._connected()
                with self._within_deadline(connection):
                    self._changes = changes.listen(connection, self._bells)
                if self._doorbell is not None:
                    self._doorbell.hang(self._changes)
            return self._changes.has_changes()

    def listen_for(self, news: News) -> bool:
        """Listen for new events, or signals, from now on; return False if it has done so since it connected."""
        listener = self._news.get(news)
        if listener is not None and listener.is_lost():
            self._stop_listening()
        if self._connection is not None and news in self._news:
            return False
        with self._translating():
            connection = self._connected()
            with self._within_deadline(connection):
                self._news[news] = changes.listen_for(connection, self._bells, news)
        return True

    def wait_for(self, news: News, timeout_s: float, concerns: Callable[[int], bool], until: int | None = None) -> bool:
        """Wait, outside of transactions, until there may be news of a trigger, or a key, that ``concerns`` the caller.

        Return False if there were none within ``timeout_s`` seconds, or before the descriptor ``until`` was readable.
        `listen_for` must have been called.
        """
        with self._translating():
            return self._news[news].wait(timeout_s, concerns, until)

    @contextmanager
    def _transaction(self, *, reads_only: bool) -> Generator[Connection]:
        with self._translating():
            connection = self._free().execution_options(**{READS_ONLY: reads_only})
            self.is_beginning = True
            with self._within_deadline(connection), connection.begin():
                self.is_beginning = False
                try:
                    yield connection
                except driver_errors.psycopg_errors():
                    # SQLAlchemy does not see the errors of prepared statements. It would roll back on a broken
                    # connection, and the error of that would replace this one.
                    if driver_of(connection).closed:
                        connection.invalidate()
                    raise
            if not reads_only:
                self._check_file()

    @property
    def last_act(self) -> int | None:
        """The row of the audit that was committed last; None if there is none."""
        return None if self._written is None else self._written.id

    def go_on_with(self, last: Written) -> None:
        """Have what the user does next counted in a row that an earlier store of this user has written."""
        self._written = last

    def act_beside(self, connection: Connection, action: Action, subject: str, *, after: Detail | None = None) -> None:
        """Record what a user does in a transaction of another connection, which the caller commits."""
        if self.actor is not None:
            about = audit.Told(action, subject, None, after, "done")
            new = audit.write(connection, read_clock(connection, self.clock), self.actor, about)
            self._written = Written(new, action, subject, after or {})

    def _ring(self, tx: Tx) -> None:
        """Ring the bells of others, who see by now what was committed. The server of PostgreSQL has done so itself."""
        if tx.rings:
            marks.reach("bells.unrung")
            if self._bells is not None:
                self._bells.ring(tx.rings)

    def _check_file(self) -> None:
        """Raise `DatabaseReplaced` if what SQLite has just committed is lost."""
        if self._file is not None:
            self._file.check()

    def _free(self) -> Connection:
        """Return the connection for a transaction. Raises `TransactionOpen`, which leaves the open one as it is."""
        connection = self._connected()
        if connection.in_transaction():
            raise TransactionOpen
        return connection

    def _connected(self) -> Connection:
        if self._connection is None:
            if self._file is not None:
                self._file.before_connecting()
            with self._deadline.connecting():
                self._connection = self.engine.connect()
            if self._file is not None:
                self._file.connected()
        return self._connection

    @contextmanager
    def _translating(self) -> Generator[None]:
        try:
            yield
        except driver_errors.translated() as error:
            name = database_name(self.engine)
            cut = self._deadline.take_cut()
            translated = driver_errors.translate(error, database=name) if cut is None else DatabaseAway(name, cut)
            if not isinstance(translated, RowsRefused):
                self._drop_connection()
            raise translated from error

    def _within_deadline(self, connection: Connection) -> AbstractContextManager[None]:
        """A server must answer in time; SQLite waits only for its lock, which has a limit of its own."""
        if connection.dialect.name != "postgresql":
            return nullcontext()
        return self._deadline.watching(connection.connection.dbapi_connection.fileno())  # type: ignore[union-attr]

    def _drop_connection(self) -> None:
        """Throw the connection away, because its state is unknown. One in memory is the database, and is kept."""
        connection = self._forget_connection()
        if connection is None:
            return
        if not is_in_memory(self.engine):
            connection.invalidate()
        connection.close()

    def _forget_connection(self) -> Connection | None:
        self._stop_listening()
        connection, self._connection = self._connection, None
        return connection

    def _stop_listening(self) -> None:
        if self._doorbell is not None:
            self._doorbell.unhang()
        for listener in (self._changes, *self._news.values()):
            if listener is not None:
                listener.close()
        self._changes = None
        self._news = {}
