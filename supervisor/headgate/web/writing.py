"""Stores that can write, each opened for one verb of one user. They have no key to encrypt or decrypt with."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from headgate.store.access.audit import Actor
from headgate.store.db.engine import database_name, open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseBusy
from headgate.store.store import Store

WRITERS_MAX = 4  # at a time; pages that only read have connections of their own
WAIT_S_MAX = 5.0


class Writer:
    """Opens stores for users of the pages."""

    def __init__(self, url: str) -> None:
        """Nothing is connected yet."""
        self._url = url
        self._free = threading.BoundedSemaphore(WRITERS_MAX)

    @contextmanager
    def store(self, actor: Actor | None, *, wait_s: float = WAIT_S_MAX) -> Generator[Store]:
        """Lend a store whose verbs are recorded as acts of this user; with None only sessions may be written.

        Raises `DatabaseBusy` if `WRITERS_MAX` are in use for longer than ``wait_s``.
        A file that is missing is not made.
        """
        engine = open_engine(self._url, creates=False)
        if not self._free.acquire(timeout=wait_s):
            raise DatabaseBusy(database_name(engine), f"{WRITERS_MAX} users are changing something already")
        try:
            try:
                with Store(engine, secrets=Secrets.none(), actor=actor) as store:
                    yield store
            finally:
                engine.dispose()
        finally:
            self._free.release()
