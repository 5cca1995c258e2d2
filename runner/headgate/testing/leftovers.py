"""Leftovers of a trigger that has ended: tasks, descriptors, and Python's warnings about them."""

from __future__ import annotations

import gc
import os
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
        """Return descriptions of all tasks and descriptors that have appeared since."""
        found = [f"the task {task.name}" for task in _tasks() if task not in self._tasks]
        for number, target in _descriptors().items():
            if self._descriptors.get(number) != target and not target.startswith(_KEPT):
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


def _named(target: str) -> str:
    for prefix, words in (("socket:", "a socket"), ("pipe:", "a pipe"), ("anon_inode:", "of the kernel: ")):
        if target.startswith(prefix):
            return words if not words.endswith(" ") else words + target.removeprefix(prefix)
    return target
