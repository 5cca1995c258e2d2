"""Whether the file of a SQLite database is still the one that is open.

SQLite goes on writing to a file that was deleted, moved or replaced, and to a deleted write-ahead log, without an
error: every commit succeeds, and is gone when the last process closes the file. So the names are looked up after each
commit, before anything depends on it (I1). Two calls of `os.stat` take a few microseconds.

The files are never opened here: closing a descriptor would drop the locks that SQLite has on the file (fcntl(2)).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from sqlalchemy import Engine

from headgate.store.db.engine import database_name, is_in_memory
from headgate.store.errors import DatabaseAway, DatabaseReplaced


class FileId(NamedTuple):
    """Names a file on this machine, whatever its path."""

    device: int
    inode: int


class DatabaseFile:
    """The database's file and its write-ahead log, as one connection after the other opened them."""

    def __init__(self, path: str, database: str) -> None:
        """Watch ``path``; ``database`` is the name for errors."""
        self._path = os.path.abspath(path)  # as the user names it, with its symbolic links
        self._database = database
        self._file: FileId | None = None
        self._log_path = ""
        self._log: FileId | None = None

    @classmethod
    def of(cls, engine: Engine) -> DatabaseFile | None:
        """Return the watch over the file of a database; None if it is in memory or on a server."""
        if engine.dialect.name != "sqlite" or is_in_memory(engine):
            return None
        return cls(str(engine.url.database), database_name(engine))

    def before_connecting(self) -> None:
        """Raise `DatabaseReplaced` if a new connection would open another file than the last one, or create one."""
        if self._file is not None:
            self._compare(self._path, self._file)

    def connected(self) -> None:
        """Note the file that a new connection has opened. Its log may be a new one."""
        self._file = self._compare(self._path, self._file)
        self._log_path = os.path.realpath(self._path) + "-wal"  # SQLite puts it beside the file itself
        self._log = None

    def check(self) -> None:
        """Raise `DatabaseReplaced` if what was just committed is in no file that the next process would open.

        Raises `DatabaseAway` if the folder cannot be read, so that this is unknown.
        """
        self._compare(self._path, self._file)
        self._log = self._compare(self._log_path, self._log)

    def is_as_opened(self) -> bool:
        """Whether a new connection would read the same file, with the same log: for connections that only read.

        The log counts from the first call on that finds it. Raises `DatabaseAway` if the folder cannot be read.
        """
        if self._file is None:
            return True
        try:
            self._compare(self._path, self._file)
            if self._log is not None or os.path.exists(self._log_path):
                self._log = self._compare(self._log_path, self._log)
        except DatabaseReplaced:
            return False
        return True

    def _compare(self, path: str, known: FileId | None) -> FileId:
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise DatabaseReplaced(self._database, f"{path} was deleted or moved") from None
        except OSError as error:
            raise DatabaseAway(self._database, f"{path}: {error.strerror}") from error
        found = FileId(status.st_dev, status.st_ino)
        if known is not None and found != known:
            raise DatabaseReplaced(self._database, f"{path} was replaced by another file")
        return found
