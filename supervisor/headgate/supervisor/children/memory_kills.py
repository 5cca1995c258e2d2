"""How many processes the kernel has killed for want of memory, by counters that everybody may read.

SIGKILL does not tell who sent it. If the count has risen between the start of a process and its end by SIGKILL, the
kernel is taken to have sent it. What that is worth depends on the counter:

- ``memory.events`` of our cgroup (version 2) counts the processes of the cgroup and of those below it, whether the
  limit of the cgroup was reached or the machine had no memory left. Where the memory controller is not enabled for our
  cgroup, the nearest one above it for which it is enabled is the one whose limit holds.
- ``/proc/vmstat`` counts all processes of the machine, in a container those of its host. So the kill of any other
  process counts as well, if our process is killed by a user in the same lifetime.

With either counter a worker that was killed counts for the runner, and a killer that runs as a process of its own
(systemd-oomd, earlyoom) does not count at all. Neither does a cgroup of version 1, whose kills are in ``/proc/vmstat``.
A child is expected to be in our cgroup: one that was moved to another is not found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
READ_BYTES_MAX = 64 * 1024  # of one of these files; they have a few kilobytes


class MemoryKills(NamedTuple):
    """A count of kills, and the file that has it."""

    source: Path
    kills: int


def memory_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryKills | None:
    """Return how many processes the kernel has killed by now; None if no file says so."""
    for source in (*_of_our_cgroup(proc, cgroups), proc / "vmstat"):
        count = _count(source)
        if count is not None:
            return MemoryKills(source, count)
    return None


def have_risen(before: MemoryKills | None, after: MemoryKills | None) -> bool:
    """Whether there were kills between two counts. Counts of different files tell nothing, and neither does one."""
    return before is not None and after is not None and before.source == after.source and before.kills < after.kills


def _of_our_cgroup(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Return the files of our cgroup and of those above it, the nearest first."""
    for line in _lines(proc / "self" / "cgroup"):
        if line.startswith("0::/"):
            cgroup = PurePosixPath(line.removeprefix("0::/"))
            if ".." not in cgroup.parts:  # it is outside of what we see
                yield from (cgroups / each / "memory.events" for each in (cgroup, *cgroup.parents))


def _count(source: Path) -> int | None:
    for line in _lines(source):
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value) if value.isascii() and value.isdecimal() and len(value) <= 20 else None
    return None


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            return file.read(READ_BYTES_MAX).decode("utf-8", "surrogateescape").split("\n")
    except (OSError, ValueError):  # a ValueError: there is a NUL in the name
        return []
