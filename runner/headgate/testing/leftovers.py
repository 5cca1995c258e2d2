"""Leftovers of a trigger that has ended: tasks, descriptors, and Python's warnings about them."""

from __future__ import annotations

import gc
import os
import socket
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress

import trio

from headgate.testing.clock import tasks_below

# Opened once for the process, by Python or a library.
_KEPT = ("/dev/",)
# The categories of warnings about objects that were dropped instead of closed.
_LEAK_WARNINGS = (ResourceWarning, RuntimeWarning)


class Snapshot:
    """The tasks of this trio run and the descriptors of this process at one time."""

    def __init__(self) -> None:
        self._tasks = set(_tasks())
        self._descriptors = _descriptors()
        self._served = {_bound(number, is_listening=True) for number in self._descriptors} - {None}

    @contextmanager
    def not_counting(self) -> Generator[None]:
        """Leave out the descriptors that appear in the ``with`` block, because others open them."""
        before = _descriptors()
        try:
            yield
        finally:
            opened = {number: target for number, target in _descriptors().items() if before.get(number) != target}
            self._descriptors.update(opened)

    def left_behind(self) -> list[str]:
        """Return descriptions of all tasks and descriptors that have appeared since.

        A test often runs the server that its trigger asks, in a thread of its own. What that has accepted is closed
        by that thread and in its own time, so connections to what listened before the trigger are the server's.
        """
        found = [f"the task {task.name}" for task in _tasks() if task not in self._tasks]
        for number, target in _descriptors().items():
            is_new = self._descriptors.get(number) != target and not target.startswith(_KEPT)
            if is_new and _bound(number, is_listening=False) not in self._served:
                found.append(f"the descriptor {number} ({_named(target)})")
        return found


@contextmanager
def leak_warnings() -> Generator[list[str]]:
    """Collect Python's warnings about leaks: a socket that was dropped, a coroutine never awaited.

    Other warnings are issued again afterwards.
    """
    found: list[str] = []
    gc.collect()  # objects dropped earlier do not count
    with warnings.catch_warnings(record=True) as caught:
        for category in _LEAK_WARNINGS:
            warnings.simplefilter("always", category)
        try:
            yield found
        finally:
            gc.collect()
    for warning in caught:
        if issubclass(warning.category, _LEAK_WARNINGS):
            found.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _tasks() -> list[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    assert root is not None
    return list(tasks_below(root))


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    # Without the descriptor by which the folder was listed, which is closed by now.
    return {number: target for number, target in found.items() if "/fd" not in target or "/proc/" not in target}


def _bound(number: int, *, is_listening: bool) -> object:
    """Return the port or path to which a socket that listens, or does not, is bound; None for all other descriptors.

    A port without its address, as a server that listens on all has its connections on each.
    """
    try:
        sock = socket.socket(fileno=number)
    except OSError:  # no socket, or closed by another thread meanwhile
        return None
    try:
        if bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is not is_listening:
            return None
        bound = sock.getsockname()
    except OSError:
        return None
    finally:
        sock.detach()  # it belongs to others
    return (bound[1] if isinstance(bound, tuple) else bound) or None


def _named(target: str) -> str:
    for prefix, words in (("socket:", "a socket"), ("pipe:", "a pipe"), ("anon_inode:", "of the kernel: ")):
        if target.startswith(prefix):
            return words if not words.endswith(" ") else words + target.removeprefix(prefix)
    return target
