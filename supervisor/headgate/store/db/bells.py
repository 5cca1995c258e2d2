"""Bells beside a SQLite database: whoever commits something that others wait for rings theirs.

SQLite tells nobody of a commit. So a process that waits hangs up a *bell*, a datagram socket with a name in the folder
``<database>-bells``, and a process that has committed sends a byte to each. The bytes say only that there is something
to look for. It is sent after the commit, so whoever is woken sees what was written; the log of the database changes
before that.

Ringing never fails and never waits, because the commit has succeeded: a bell that is full of bytes rings already, and
one whose process has ended is taken down. Nobody waits if there is no folder, which costs one look. A bell may be
missed nevertheless: its process may live in another kernel that shares the folder, or the writer is killed between the
commit and the byte. So a bell only makes earlier what the one who waits does in any case, after some seconds.

Whoever may write to the database may hang up bells, ring them and take them down, and nobody else.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from typing import Literal

from sqlalchemy import Engine

from headgate.store.db.engine import is_in_memory

Kind = Literal[
    "changes", "events", "signals"
]  # those of supervisors, of readers of events, and of listeners to signals

ADDRESS_BYTES_MAX = 107  # unix(7): the path of a socket, without the NUL at its end
RUNG_MAX = 1000  # bells that one commit rings; the others look by themselves
HEARD_MAX = 64  # bytes that are read at once; as a rule the kernel keeps 10 (net.unix.max_dgram_qlen)
CHECK_S = 5.0  # a bell looks so often whether it still hangs: one call of the kernel


class Bells:
    """The bells beside one database: those that this process hangs up, and those of others."""

    def __init__(self, database: str) -> None:
        """``database`` is the path of the file, which need not exist yet."""
        self._database = os.path.realpath(database)  # a link and its file have the same bells
        self.folder = f"{self._database}-bells"
        self._own: set[str] = set()

    @classmethod
    def of(cls, engine: Engine) -> Bells | None:
        """Return the bells of a database; None if it is in memory or on a server."""
        if engine.dialect.name != "sqlite" or is_in_memory(engine):
            return None
        return cls(str(engine.url.database))

    def hang(self, kind: Kind) -> Bell:
        """Hang up a bell, which this object does not ring itself. Raises `OSError` if that cannot be done here."""
        reach = os.stat(self._database)
        self._make_folder(reach)
        name = f"{kind}-{os.getpid()}-{secrets.token_hex(8)}"  # never used again: it may be taken down at any time
        listener = _new_socket()
        path = os.path.join(self.folder, name)
        try:
            with _addresses(self.folder, name) as (address,):
                listener.bind(address)
            _give(path, stat.S_IMODE(reach.st_mode) & 0o666, reach.st_gid)
        except OSError:
            listener.close()
            with suppress(OSError):
                os.unlink(path)
            raise
        self._own.add(name)
        return Bell(listener, path, self._own)

    def ring(self, kinds: Collection[Kind]) -> None:
        """Ring the bells of others, of these kinds."""
        try:
            hanging = os.listdir(self.folder)
        except OSError:
            return  # as a rule there is none, because nobody has waited yet
        names = [name for name in hanging if name.partition("-")[0] in kinds and name not in self._own][:RUNG_MAX]
        if not names:
            return
        with suppress(OSError):  # there are no descriptors left, for example: the others look by themselves
            with _new_socket() as sender, _addresses(self.folder, *names) as addresses:
                for name, address in zip(names, addresses, strict=True):
                    self._ring(sender, name, address)

    def _ring(self, sender: socket.socket, name: str, address: str) -> None:
        try:
            sender.sendto(b"!", address)
        except ConnectionRefusedError:  # its process has ended without taking it down
            with suppress(OSError):
                os.unlink(os.path.join(self.folder, name))
        except OSError:
            pass  # it is full, was taken down meanwhile, or belongs to a user that we may not ring

    def _make_folder(self, reach: os.stat_result) -> None:
        with suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
            writers = reach.st_mode & 0o222
            _give(self.folder, 0o700 | writers << 1 | writers | writers >> 1, reach.st_gid)


class Bell:
    """A bell of this process."""

    def __init__(self, listener: socket.socket, path: str, own: set[str]) -> None:
        self._socket = listener
        self._path = path
        self._own = own
        self._check_at = time.monotonic() + CHECK_S

    def fileno(self) -> int:
        """Return the descriptor that is readable while it rings."""
        return self._socket.fileno()

    def has_rung(self) -> bool:
        """Whether it has rung since this was called last."""
        for heard in range(HEARD_MAX):
            try:
                self._socket.recv(1)
            except BlockingIOError:
                return heard > 0
        return True

    def is_lost(self) -> bool:
        """Whether somebody has taken it down, so that it will not ring any more. It is looked at once in `CHECK_S`."""
        if time.monotonic() < self._check_at:
            return False
        self._check_at = time.monotonic() + CHECK_S
        return not os.path.lexists(self._path)

    def close(self) -> None:
        """Take it down."""
        with suppress(OSError):
            os.unlink(self._path)
        self._own.discard(os.path.basename(self._path))
        self._socket.close()


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)


def _give(path: str, mode: int, group: int) -> None:
    """Let those reach a file who reach the database."""
    if os.stat(path).st_gid != group:
        with suppress(OSError):  # only its members may give it to a group
            os.chown(path, -1, group)
    os.chmod(path, mode)


@contextmanager
def _addresses(folder: str, *names: str) -> Generator[list[str]]:
    """Yield the addresses of sockets in a folder, whose own path may be longer than an address."""
    paths = [os.path.join(folder, name) for name in names]
    if all(len(os.fsencode(path)) <= ADDRESS_BYTES_MAX for path in paths):
        yield paths
        return
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield [f"/proc/self/fd/{opened}/{name}" for name in names]
    finally:
        os.close(opened)
