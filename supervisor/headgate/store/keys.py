"""The keys that a database is written with: found again at each start, and rotated while supervisors run.

The table ``encryption_key`` has the fingerprint of each key. The *primary* one encrypts, in all processes; superseded
ones may still be needed to decrypt; retired ones are not. `open_secrets` refuses a process that does not have all keys
that are not retired: it could not read what others have stored, and others could not read what it stores.

A rotation has three steps, each of which may be repeated after a kill:

1. `KeyVerbs.begin_rotation` makes another key the primary one. Every transaction that encrypts holds a lock on the
   primary key's row, so this waits for those that use the old one, and later ones use the new one.
2. `KeyVerbs.encrypt_again` rewrites the values that are not under the primary key, batch by batch.
3. `KeyVerbs.retire` marks the superseded keys as retired, if no other rotation has begun meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy import Column, Connection, Engine, insert, select, update

from headgate.store.db import schema
from headgate.store.db.engine import READS_ONLY
from headgate.store.db.secrets import Secrets, wrong_keys
from headgate.store.db.times import read_clock
from headgate.store.db.transaction import Tx, lock_primary_key
from headgate.store.db.verbs import Verbs, acting
from headgate.store.errors import BadKey, NoKeyFile, UnusableKey
from headgate.store.tables import connection as connection_table
from headgate.store.tables import encryption_key, task_instance, task_stream, trigger, variable

# Every column that is encrypted; its table has one integer as its primary key.
ENCRYPTED: Final[dict[str, Column[Any]]] = {
    str(column): column
    for column in (
        *(trigger.c.kwargs, task_instance.c.next_kwargs, task_stream.c.state),
        *(variable.c.value, connection_table.c.value),
    )
}
BATCH_ROWS = 500  # read in one transaction of a rotation: some tens of milliseconds
_K = encryption_key.c


class KeyLine(msgspec.Struct, frozen=True):
    """One key of the database."""

    fingerprint: str
    created_date: datetime
    superseded_at: datetime | None
    retired_at: datetime | None


class Batch(msgspec.Struct, frozen=True):
    """Result of one batch: ``next_id`` is where the next one begins, None after the last.

    ``rewritten`` values are under the primary key now. ``left`` were changed or locked by others: look again.
    ``unreadable`` ones are under none of the keys, and stay as they are.
    """

    next_id: int | None
    rewritten: int = 0
    left: int = 0
    unreadable: int = 0


# --- at the start of a process -------------------------------------------------------------------


def open_secrets(engine: Engine, home: Path, environment_value: str | None, *, makes_file: bool) -> Secrets:
    """Return the keys of this machine, which are those of the database.

    If the database has none yet, the first of them becomes its primary key; if this machine has none either, and
    nothing is encrypted yet, a key file is created if ``makes_file`` is true. Of several processes that start at once
    one is first. Raises `WrongKeys`, `NoKeyFile` and `UnusableKey`.
    """
    with schema.translated(engine), engine.connect().execution_options(**{READS_ONLY: True}) as connection:
        needed = _unretired(connection)
    if not needed:
        with schema.exclusively(engine) as connection:
            needed = _unretired(connection)
            if not needed:
                return _register_first(connection, home, environment_value, makes_file=makes_file)
    try:
        secrets = Secrets.open(home, environment_value)
    except NoKeyFile as error:
        raise wrong_keys(needed, f"there is no key file {error.path}") from None
    missing = [fingerprint for fingerprint in needed if fingerprint not in secrets.fingerprints]
    if missing:
        raise secrets.wrong_for(missing)
    return secrets


def _unretired(connection: Connection) -> list[str]:
    statement = select(_K.fingerprint).where(_K.retired_at.is_(None)).order_by(_K.superseded_at.is_not(None))
    return list(connection.execute(statement).scalars())


def _register_first(connection: Connection, home: Path, environment_value: str | None, *, makes_file: bool) -> Secrets:
    """Write down the keys that a database without any is written with, which may be one of an older version."""
    tokens = _tokens(connection)
    first = next(tokens, None)
    secrets = Secrets.open(home, environment_value, makes_file=makes_file and first is None)
    used: set[str] = set()
    unreadable = 0
    for token in () if first is None else (first, *tokens):
        try:
            used.add(secrets.decrypt_with_key(token)[1])
        except BadKey:
            unreadable += 1
    if unreadable and not used:
        keys = ", ".join(secrets.fingerprints)
        raise UnusableKey(
            f"this database is written with another key than {secrets.source} has ({keys}): copy the key file of the "
            f"machine that made it, or set HEADGATE_FERNET_KEYS"
        )
    now = read_clock(connection, None)
    primary = secrets.fingerprints[0]
    for fingerprint in (primary, *sorted(used - {primary})):
        superseded_at = None if fingerprint == primary else now
        row = {"fingerprint": fingerprint, "created_date": now, "superseded_at": superseded_at}
        connection.execute(insert(encryption_key).values(row))
    return secrets


def _tokens(connection: Connection) -> Iterator[str]:
    for column in ENCRYPTED.values():
        yield from connection.execute(select(column).where(column.is_not(None))).scalars()


def known_keys(engine: Engine) -> list[KeyLine]:
    """Return all keys that the database was ever written with, the newest first."""
    statement = select(_K.fingerprint, _K.created_date, _K.superseded_at, _K.retired_at).order_by(
        _K.superseded_at.is_not(None), _K.created_date.desc(), _K.fingerprint
    )
    with schema.translated(engine), engine.connect().execution_options(**{READS_ONLY: True}) as connection:
        return [KeyLine(*row) for row in connection.execute(statement)]


# --- afterwards ----------------------------------------------------------------------------------


class KeyVerbs(Verbs):
    """The verbs about the keys of the database."""

    def add(self) -> str:
        """Put a new key into the key file of this machine; return its fingerprint. Raises `UnusableKey`."""
        with schema.exclusively(self.database.engine) as connection:  # no other process changes the file meanwhile
            self.database.secrets.read_again()
            new = self.database.secrets.add_key()
            self.database.act_beside(connection, "keys add", f"key {new}")
            return new

    def begin_rotation(self, *, makes_key: bool) -> str:
        """Make the first key of this machine that the database does not know the primary one; return its fingerprint.

        If a rotation has begun and is not finished, nothing is changed: it is to be finished first. If there is no such
        key, one is put into the key file if ``makes_key`` is true. Raises `UnusableKey` if there is none.
        """
        secrets = self.database.secrets
        with schema.exclusively(self.database.engine) as connection:
            known = {row.fingerprint: row for row in connection.execute(select(encryption_key))}
            primary = next(str(name) for name, row in known.items() if row.superseded_at is None)
            if any(row.superseded_at is not None and row.retired_at is None for row in known.values()):
                return primary
            secrets.read_again()
            new = next((name for name in secrets.fingerprints if name not in known), None)
            if new is None:
                if not makes_key:
                    raise UnusableKey(f"{secrets.source} has no key that is new")
                new = secrets.add_key()
            now = read_clock(connection, self.database.clock)
            # This waits for the transactions that hold the row of the old key, and those that wait for it see the new.
            connection.execute(update(encryption_key).where(_K.superseded_at.is_(None)).values(superseded_at=now))
            connection.execute(insert(encryption_key).values(fingerprint=new, created_date=now))
            self.database.act_beside(connection, "keys rotate", f"key {new}", after={"state": "primary"})
            return new

    @acting
    def encrypt_again(self, tx: Tx, name: str, after_id: int, *, rows_max: int = BATCH_ROWS) -> Batch:
        """Rewrite the values of one column of `ENCRYPTED` that are not under the primary key, beginning after an id."""
        column = ENCRYPTED[name]
        (key,) = column.table.primary_key.columns
        rows = tx.connection.execute(
            select(key, column).where(key > after_id, column.is_not(None)).order_by(key).limit(rows_max)
        ).all()
        if not rows:
            tx.act_nothing()
            return Batch(None)
        primary = lock_primary_key(tx.connection)
        stale: dict[int, tuple[str, bytes]] = {}
        unreadable = 0
        for number, token in rows:
            try:
                data, fingerprint = tx.secrets.decrypt_with_key(token)
            except BadKey:
                unreadable += 1
                continue
            if fingerprint != primary:
                stale[number] = token, data
        # Nothing waits for a lock here, so that this cannot deadlock with the supervisors' transactions.
        free = select(key).where(key.in_(stale)).order_by(key).with_for_update(skip_locked=True)
        rewritten = 0
        for number in tx.connection.execute(free).scalars().all() if stale else ():
            token, data = stale[number]
            as_read = (key == number, column == token)
            change = update(column.table).where(*as_read).values({column.name: tx.secrets.encrypt(data, primary)})
            rewritten += tx.connection.execute(change).rowcount
        _tell_rotation(tx, primary, {"rewritten": rewritten})
        return Batch(int(rows[-1][0]), rewritten, len(stale) - rewritten, unreadable)

    @acting
    def retire(self, tx: Tx, primary: str) -> list[str] | None:
        """Mark the superseded keys as retired; return their fingerprints. All values must be under ``primary``.

        Return None if it is not the primary key any more: another rotation has begun.
        """
        if lock_primary_key(tx.connection) != primary:
            tx.act_nothing()
            return None
        retired = (
            update(encryption_key)
            .where(_K.superseded_at.is_not(None), _K.retired_at.is_(None))
            .values(retired_at=tx.now)
            .returning(_K.fingerprint)
        )
        gone = sorted(tx.connection.execute(retired).scalars())
        _tell_rotation(tx, primary, {"retired": len(gone)})
        return gone


def _tell_rotation(tx: Tx, primary: str | None, counts: Mapping[str, int]) -> None:
    """Tell how far a rotation has come: nothing, if this part of it had nothing to do."""
    if primary is None or not any(counts.values()):
        tx.act_nothing()
    else:
        tx.act("keys rotate", f"key {primary}", counts=counts)
