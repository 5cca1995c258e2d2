"""What users add and remove: a watcher is a name, and one trigger that runs for as long as the name stands."""

from __future__ import annotations

import unicodedata
from datetime import datetime

from sqlalchemy import Connection, insert, select, update

from headgate.store.db.bulk import insert_into
from headgate.store.errors import BadName, NoSuchWatcher, WatcherExists
from headgate.store.tables import asset, asset_watcher, trigger

NAME_CHARS_MAX = 250  # 1,000 bytes of UTF-8 at most: fits an index row everywhere, and a line of a terminal
CLASSPATH_CHARS_MAX = 1000  # longer than any module path of anybody

# Control characters, surrogates, line and paragraph separators: what breaks a database, a log or a terminal.
_UNFIT_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


def check_name(name: str, what: str, *, chars_max: int = NAME_CHARS_MAX, separators: str = "") -> str:
    """Return ``name``; raise `BadName` when it is empty, too long, or holds what cannot be stored and shown."""
    if not name or name != name.strip():
        raise BadName(f"{what} must not be empty or begin or end with a space: {name!r}")
    if len(name) > chars_max:
        raise BadName(f"{what} must not be longer than {chars_max} characters; it has {len(name):,}")
    for character in name:
        if unicodedata.category(character) in _UNFIT_CATEGORIES or character in separators:
            raise BadName(f"{what} must not contain {character!r}: {name!r}")
    return name


def check_queue(queue: str) -> str:
    """Return the name of a queue; lists of them are written with commas."""
    return check_name(queue, "the queue", separators=",")


def add(
    connection: Connection, now: datetime, *, name: str, classpath: str, kwargs: str, queue: str, asset_name: str | None
) -> int:
    """Add a watcher with a trigger of its own, and the asset where it is new; return the trigger's id.

    ``kwargs`` are encrypted already. Raises `WatcherExists` and `BadName`.
    """
    check_name(name, "the name of a watcher")
    check_name(classpath, "the classpath", chars_max=CLASSPATH_CHARS_MAX)
    check_queue(queue)
    asset_id = None if asset_name is None else _asset_id(connection, now, asset_name)
    trigger_id = connection.execute(
        insert(trigger)
        .values(classpath=classpath, kwargs=kwargs, created_date=now, queue=queue)
        .returning(trigger.c.id)
    ).scalar_one()
    watcher = insert_into(connection, asset_watcher).values(
        name=name, asset_id=asset_id, trigger_id=trigger_id, created_date=now
    )
    added = connection.execute(watcher.on_conflict_do_nothing().returning(asset_watcher.c.id)).first()
    if added is None:
        raise WatcherExists(name)
    return int(trigger_id)


def _asset_id(connection: Connection, now: datetime, name: str) -> int:
    check_name(name, "the name of an asset")
    statement = insert_into(connection, asset).values(name=name, created_date=now)
    connection.execute(statement.on_conflict_do_nothing())
    return int(connection.execute(select(asset.c.id).where(asset.c.name == name)).scalar_one())


def remove(connection: Connection, now: datetime, name: str) -> None:
    """Put tombstones on a watcher and its trigger; whoever runs the trigger sees it. Raises `NoSuchWatcher`."""
    present = (asset_watcher.c.name == name, asset_watcher.c.removed_at.is_(None))
    removed = update(asset_watcher).where(*present).values(removed_at=now).returning(asset_watcher.c.trigger_id)
    trigger_id = connection.execute(removed).scalar_one_or_none()
    if trigger_id is None:
        raise NoSuchWatcher(name)
    connection.execute(
        update(trigger).where(trigger.c.id == trigger_id, trigger.c.removed_at.is_(None)).values(removed_at=now)
    )
