"""Facts about worker processes from the kernel: memory, whether they are stopped, kills for want of memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import msgspec
import psutil

from headgate.supervisor.children.process import ChildProcess

LOOK_INTERVAL_S: Final = 2.0  # between two looks at the memory of workers that run something
RETIRE_SHARE: Final = 0.5  # of the memory limit: an idle worker that holds more is replaced, before a step pays for it


class SessionUse(msgspec.Struct, frozen=True):
    """Use of resources by one session: resident memory in bytes, and whether its leader is stopped (SIGSTOP)."""

    rss_bytes: int
    is_stopped: bool


def excess(use: SessionUse, bytes_max: int | None) -> str:
    """Say that a worker uses more memory than it may; "" if it does not."""
    if bytes_max is None or use.rss_bytes <= bytes_max:
        return ""
    used, limit = (f"{count / 2**20:,.0f} MiB" for count in (use.rss_bytes, bytes_max))
    return f"used {used} of memory with what it has started; the limit is {limit} (worker_memory_max_mib)"


def is_fat(process: ChildProcess, bytes_max: int | None) -> bool:
    """Whether a worker keeps so much memory that what it runs next could pay for it."""
    if bytes_max is None:
        return False
    use = process.statistics()
    return use is not None and use.rss_bytes > bytes_max * RETIRE_SHARE


def uses(leaders: Collection[int]) -> dict[int, SessionUse]:
    """Return the use of each worker and all that it has started, by the worker's pid, from one look at all processes.

    Shared memory is counted for each process: a limit is reached too early rather than never.
    """
    rss: dict[int, int] = {}
    stopped: set[int] = set()
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            session = os.getsid(pid)
            if session not in leaders:
                continue
            process = psutil.Process(pid)
            rss[session] = rss.get(session, 0) + process.memory_info().rss
            if pid == session and process.status() == psutil.STATUS_STOPPED:
                stopped.add(pid)
    return {session: SessionUse(used, session in stopped) for session, used in rss.items()}


def oom_kills() -> int:
    """Return how often the kernel has killed a process for want of memory, on this machine or in this container."""
    counts = [_counter(Path("/proc/vmstat"))]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        counts.append(_counter(Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events")))
    return max(counts)


class OomKills:
    """The count of `oom_kills`, which takes long: it is asked for again only after ``interval_s``."""

    def __init__(self, clock: Callable[[], float], interval_s: float) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._count = 0
        self._at = float("-inf")

    def known(self) -> int:
        """Return the count as of a moment ago."""
        return self._count if self._clock() < self._at + self._interval_s else self.now()

    def now(self) -> int:
        """Return the count."""
        self._count, self._at = oom_kills(), self._clock()
        return self._count


def _counter(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
