"""A trigger that waits for a file."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import trio

from headgate.child.own_threads import OwnThreads
from headgate.triggers.base import BaseTrigger, TriggerEvent

__all__ = ["FileTrigger"]

POKE_INTERVAL_S = 5.0

LOOK_THREADS_MAX = 16  # a look at a file system that hangs keeps its thread until the file system answers
_look_threads = OwnThreads("headgate file looks", LOOK_THREADS_MAX)


class FileTrigger(BaseTrigger):
    """Fires once, as soon as there is a file (or folder) at ``path``.

    The path may be a pattern with ``*``, ``?``, ``[]`` and ``**``. A file with exactly that name is preferred; of
    several matches the first by name is used. The trigger looks every ``poke_interval_s`` seconds. The payload is
    ``{"path": str, "size": bytes, "modified": aware UTC datetime}``. The event's key identifies the file and its
    content, so that an unchanged file is not stored a second time (I2). Raises OSError if access is denied.
    Raises TypeError or ValueError for an empty path or an interval that is not a positive number.
    """

    def __init__(self, path: str | os.PathLike[str], *, poke_interval_s: float = POKE_INTERVAL_S) -> None:
        self.path = os.fspath(path)
        if not isinstance(self.path, str):
            raise TypeError(f"path must be a str or a path, not {type(path).__name__}")
        if not self.path or "\0" in self.path:
            raise ValueError(f"{self.path!r} is not a path")
        if not (poke_interval_s > 0 and math.isfinite(poke_interval_s)):
            raise ValueError(f"poke_interval_s must be a positive number of seconds, not {poke_interval_s!r}")
        self.poke_interval_s = poke_interval_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class, the path and the interval."""
        kwargs = {"path": self.path, "poke_interval_s": self.poke_interval_s}
        return self._classpath(), kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there is a file, then yield one event."""
        while True:
            found = await self._look()
            if found is not None:
                break
            await trio.sleep(self.poke_interval_s)
        status = found.status
        modified = datetime.fromtimestamp(status.st_mtime, UTC)
        payload = {"path": found.path, "size": status.st_size, "modified": modified}
        yield TriggerEvent(payload, key=f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}:{status.st_size}")

    async def _look(self) -> _Found | None:
        return await _look_threads.run(_find, self.path)


class _Found(NamedTuple):
    path: str
    status: os.stat_result


def _find(pattern: str) -> _Found | None:
    """Return the file at the path, or the first by name that matches it as a pattern. Blocks."""
    found = _stat(pattern)
    if found is None and glob.has_magic(pattern):
        # The first may be a link to nothing, or be gone by now.
        return next(filter(None, map(_stat, sorted(glob.iglob(pattern, recursive=True)))), None)
    return found


def _stat(path: str) -> _Found | None:
    try:
        return _Found(path, os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
