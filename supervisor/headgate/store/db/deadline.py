"""A limit on the duration of a transaction that holds even if the server does not answer.

A server applies its own timeouts only while it runs and can be reached. If it is suspended, or the network drops
packets, the supervisor would wait, and neither renew its lease nor react to signals. So a thread watches: if a
transaction takes too long, it shuts the socket down, the driver sees a broken connection, and the caller gets
`DatabaseAway` as for any other.

The driver may close its descriptor at any time, and another connection of the process may then get the same number. So
a transaction is watched by a descriptor of its own for the same socket.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from sqlalchemy import exc

# Called with the descriptor of a connection that has just been opened (`Deadline.connecting`).
LOGGED_IN: Final[ContextVar[Callable[[int], None] | None]] = ContextVar("LOGGED_IN", default=None)


class Deadline:
    """Shuts down the socket of a transaction that takes longer than ``limit_s`` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._ends_at: float | None = None
        self._descriptor = -1
        self._has_cut = False
        self._thread: threading.Thread | None = None

    def take_cut(self) -> str | None:
        """Return once why a socket was shut down; None if none was. The error of its transaction is the driver's."""
        has_cut, self._has_cut = self._has_cut, False
        return f"a transaction has taken longer than {self._limit_s:g} s" if has_cut else None

    @contextmanager
    def watching(self, descriptor: int) -> Generator[None]:
        """Watch the transaction that runs within this block, over the socket with this descriptor.

        Raises SQLAlchemy's ``DisconnectionError`` if this process may open no more files.
        """
        with self._limited() as watch:
            watch(descriptor)
            yield

    @contextmanager
    def connecting(self) -> Generator[None]:
        """Watch a connection that is opened within this block, from its login on; before that the driver has a limit.

        The session has none yet: a pooler may let a client log in, and answer nothing. Raises as `watching` does.
        """
        with self._limited() as watch:
            token = LOGGED_IN.set(watch)
            try:
                yield
            finally:
                LOGGED_IN.reset(token)

    @contextmanager
    def _limited(self) -> Generator[Callable[[int], None]]:
        """Yield what begins the watch of a socket, which ends with the block."""
        own: list[int] = []

        def watch(descriptor: int) -> None:
            try:
                own.append(os.dup(descriptor))
            except OSError as error:
                raise exc.DisconnectionError(f"its connection cannot be watched: {error.strerror}") from error
            self._begin(own[-1])

        self._has_cut = False
        try:
            yield watch
        finally:
            with self._changed:
                self._ends_at = None
                for each in own:
                    os.close(each)  # under the lock: nobody shuts it down any more

    def _begin(self, descriptor: int) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="headgate database deadline", daemon=True)
                thread.start()
                self._thread = thread
            self._descriptor = descriptor
            self._ends_at = time.monotonic() + self._limit_s

    def _watch(self) -> None:
        with self._changed:
            while True:
                if self._ends_at is None:
                    # Transactions do not wake this thread when they begin: that would cost each a switch of threads.
                    self._changed.wait(self._limit_s / 2)
                    if self._ends_at is None:
                        self._thread = None  # the next transaction starts another: an unused database has none
                        return
                elif (left_s := self._ends_at - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    self._ends_at, self._has_cut = None, True
                    _shut_down(self._descriptor)


def _shut_down(descriptor: int) -> None:
    duplicate = socket.socket(fileno=descriptor)
    try:
        duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed already, as intended
    finally:
        duplicate.detach()
