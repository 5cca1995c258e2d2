"""Watchers: named triggers that users add, and that run until users remove them."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import insert, select, update

from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE, address_problem
from headgate.protocol.values import encode_value
from headgate.store.db.bulk import insert_into
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, acting
from headgate.store.errors import BadName, NoSuchWatcher, ValueRefused, WatcherExists
from headgate.store.tables import asset, asset_watcher, trigger

NAME_CHARS_MAX = 250  # at most 1,000 bytes of UTF-8: fits into an index row of any database, and a line of a terminal
CLASSPATH_CHARS_MAX = 1000  # longer than any real module path
MAX_DELIVERIES = 5  # of one message, if the user does not say: 1 + 2 + 4 + 8 s pass between them
MAX_DELIVERIES_MAX = 1000  # with waits of up to `retry_wait_max_s` these take days

# Control characters, surrogates, line and paragraph separators, which break databases, logs or terminals.
_UNFIT_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


def check_name(name: str, what: str, *, chars_max: int = NAME_CHARS_MAX, separators: str = "") -> str:
    """Return ``name``; raise `BadName` if it is empty, too long, or cannot be stored and shown safely."""
    if not isinstance(name, str):
        raise BadName(f"{what} must be a str, not {name!r:.100}")
    if not name or name != name.strip():
        raise BadName(f"{what} must not be empty or begin or end with a space: {name!r}")
    if len(name) > chars_max:
        raise BadName(f"{what} must not be longer than {chars_max} characters; it has {len(name):,}")
    for character in name:
        if unicodedata.category(character) in _UNFIT_CATEGORIES or character in separators:
            raise BadName(f"{what} must not contain {character!r}: {name!r}")
    return name


def check_queue(queue: str) -> str:
    """Return the name of a queue, which must not have a comma, because lists of queues are separated by commas."""
    return check_name(queue, "the queue", separators=",")


def check_classpath(classpath: str) -> str:
    """Return the path of a class. Raises `BadName`."""
    return check_name(classpath, "the classpath", chars_max=CLASSPATH_CHARS_MAX)


def check_max_deliveries(max_deliveries: int) -> int:
    """Return a limit of deliveries. Raises `ValueRefused` if it is not from 0 to `MAX_DELIVERIES_MAX`."""
    if type(max_deliveries) is not int or not 0 <= max_deliveries <= MAX_DELIVERIES_MAX:
        limits = f"from 1 to {MAX_DELIVERIES_MAX:,}, or 0 for no limit"
        raise ValueRefused(f"max_deliveries must be {limits}: {max_deliveries!r:.100}")
    return max_deliveries


def encode_kwargs(kwargs: Mapping[str, Any]) -> bytes:
    """Return the keyword arguments as they are stored, before they are encrypted.

    Raises `ValueNotSerializable` and `ValueTooLong` (`headgate.protocol.errors`).
    """
    return encode_value(dict(kwargs), where="kwargs", bytes_max=KWARGS_BYTES_MAX)


def trigger_of_watcher(tx: Tx, name: str) -> int:
    """Return the id of the trigger of a watcher. Raises `NoSuchWatcher`."""
    present = (asset_watcher.c.name == name, asset_watcher.c.removed_at.is_(None))
    found = tx.connection.execute(select(asset_watcher.c.trigger_id).where(*present)).scalar_one_or_none()
    if found is None:
        raise NoSuchWatcher(name)
    return int(found)


def check_known(tx: Tx, name: str | None) -> None:
    """Raise `NoSuchWatcher` for a name that no watcher has or had."""
    if name is not None:
        named = select(asset_watcher.c.id).where(asset_watcher.c.name == name).limit(1)
        if tx.connection.execute(named).first() is None:
            raise NoSuchWatcher(name)


class Feed(NamedTuple):
    """What the new events of a watcher go to, beside the log: an asset, and a key of signals. Either may be None."""

    watcher: str
    asset_id: int | None = None
    signal: tuple[str, str] | None = None  # namespace and key


class Replaced(NamedTuple):
    """An event whose signal has its id alone, because no signal may have its payload, which has so many bytes."""

    watcher: str
    event_id: int
    bytes: int


class WatcherVerbs(Verbs):
    """The verbs by which users add and remove watchers."""

    def add_watcher(
        self,
        name: str,
        classpath: str,
        kwargs: Mapping[str, Any],
        *,
        queue: str = "default",
        asset: str | None = None,
        signal: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        max_deliveries: int = MAX_DELIVERIES,
    ) -> int:
        """Add a watcher with its own trigger, and its asset if that is new; return the id of the trigger.

        ``signal``: each of its events is sent as a signal under this key of ``namespace``.

        ``max_deliveries``: after so many failures on one message of a shared stream, it becomes a dead letter, and the
        trigger is not given it any more; 0: never.

        ``kwargs`` are stored encrypted. Raises `WatcherExists`, `BadName`, `ValueRefused` for a key that no signal can
        have and for ``max_deliveries`` that are not from 0 to `MAX_DELIVERIES_MAX`, and from `headgate.protocol.errors`
        `ValueNotSerializable` for kwargs that have no form on the wire, `ValueTooLong` for more than
        `KWARGS_BYTES_MAX` of them.
        """
        check_name(name, "the name of a watcher")
        check_classpath(classpath)
        check_queue(queue)
        if asset is not None:
            check_name(asset, "the name of an asset")
        if signal is not None and (problem := address_problem(signal, namespace)) is not None:
            raise ValueRefused(problem)
        sends = {} if signal is None else {"signal_namespace": namespace, "signal_key": signal}
        row = {"classpath": classpath, "queue": queue, "max_deliveries": check_max_deliveries(max_deliveries)}
        return self._add_watcher({"name": name, **sends}, row, encode_kwargs(kwargs), asset)

    @acting
    def _add_watcher(
        self, tx: Tx, new: Mapping[str, str], row: Mapping[str, Any], kwargs: bytes, asset_name: str | None
    ) -> int:
        tx.notify()
        asset_id = None if asset_name is None else _asset_id(tx, asset_name)
        new_trigger = insert(trigger).values(**row, kwargs=tx.encrypt(kwargs), created_date=tx.now)
        trigger_id = tx.connection.execute(new_trigger.returning(trigger.c.id)).scalar_one()
        watcher = insert_into(tx.connection, asset_watcher).values(
            **new, asset_id=asset_id, trigger_id=trigger_id, created_date=tx.now
        )
        added = tx.connection.execute(watcher.on_conflict_do_nothing().returning(asset_watcher.c.id)).first()
        if added is None:
            raise WatcherExists(new["name"])
        after: dict[str, str | int | None] = {**row, "asset": asset_name, "signal": new.get("signal_key")}
        tx.act("watchers add", f"watcher {new['name']}", after=after)
        return int(trigger_id)

    @acting
    def remove_watcher(self, tx: Tx, name: str) -> None:
        """Mark a watcher and its trigger as removed; the supervisor that runs the trigger cancels it.

        Raises `NoSuchWatcher`.
        """
        tx.notify()
        present = (asset_watcher.c.name == name, asset_watcher.c.removed_at.is_(None))
        removed = update(asset_watcher).where(*present).values(removed_at=tx.now).returning(asset_watcher.c.trigger_id)
        trigger_id = tx.connection.execute(removed).scalar_one_or_none()
        if trigger_id is None:
            raise NoSuchWatcher(name)
        tx.act("watchers remove", f"watcher {name}", before={"trigger": trigger_id})
        tx.connection.execute(
            update(trigger).where(trigger.c.id == trigger_id, trigger.c.removed_at.is_(None)).values(removed_at=tx.now)
        )


def _asset_id(tx: Tx, name: str) -> int:
    new_asset = insert_into(tx.connection, asset).values(name=name, created_date=tx.now)
    tx.connection.execute(new_asset.on_conflict_do_nothing())
    return int(tx.connection.execute(select(asset.c.id).where(asset.c.name == name)).scalar_one())


# The columns of the watcher's row that make its feed, as `feed_of_row` takes them.
FEED = (asset_watcher.c.name, asset_watcher.c.asset_id, asset_watcher.c.signal_namespace, asset_watcher.c.signal_key)


def feed_of_row(watcher: str, asset_id: int | None, namespace: str | None, key: str | None) -> Feed:
    """Return the feed of a watcher by the columns `FEED`."""
    return Feed(watcher, asset_id, None if namespace is None or key is None else (namespace, key))


def feed_of(tx: Tx, trigger_id: int) -> Feed | None:
    """Return what the events of a watcher go to, which may be removed; None for a trigger of a task."""
    row = tx.connection.execute(select(*FEED).where(asset_watcher.c.trigger_id == trigger_id)).first()
    return None if row is None else feed_of_row(*row)
