"""``python -m headgate.testing.brokers.moto_server``: moto's server, whose queues do one thing at a time, as SQS's do.

moto answers each request in a thread, and its queues have no lock: a message of a FIFO queue that is deleted while
another thread is about to lend it again counts as lent for ever, and no more of its group is handed out (5.2.5).
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from moto.server import main
from moto.sqs.models import SQSBackend

LOOK_AGAIN_S: Final = 0.05  # a receive that waits: that a message is visible again wakes nobody
_LOCKED: Final = ("send_message", "delete_message", "change_message_visibility", "purge_queue")
_lock = threading.RLock()


def _locked(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            return verb(*args, **kwargs)

    return locked


def _waiting(receive: Callable[..., Any]) -> Callable[..., Any]:
    """Return a receive that waits without the lock; moto's own spins while the groups of what is visible are lent."""

    @functools.wraps(receive)
    def waiting(self: Any, queue_name: str, count: int, wait_s: int, *args: Any, **kwargs: Any) -> Any:
        ends_at = time.monotonic() + wait_s
        while True:
            with _lock:
                messages = receive(self, queue_name, count, 0, *args, **kwargs)
            if messages or time.monotonic() >= ends_at:
                return messages
            time.sleep(LOOK_AGAIN_S)

    return waiting


def lock_queues(backend: type[SQSBackend] = SQSBackend) -> None:
    """Have the queues of a class of moto do one thing at a time."""
    for name in _LOCKED:
        setattr(backend, name, _locked(getattr(backend, name)))
    setattr(backend, "receive_message", _waiting(backend.receive_message))  # noqa: B010 (a class is given a function)


if __name__ == "__main__":
    lock_queues()
    main(sys.argv[1:])
