"""Memory and CPU time of a process, from the kernel. Imports nothing heavy, because `benchmarks.bare_trio` uses it."""

from __future__ import annotations

import os
from pathlib import Path


def pss_kb(pid: int) -> float:
    """Return the memory of a process, in KB, with shared pages divided among the processes (PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return float(line.split()[1])
    raise ValueError(f"the kernel does not say how much memory {pid} has")


def rss_peak_mb(pid: int) -> float:
    """Return the peak of the resident memory of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) / 1024
    raise ValueError(f"the kernel does not say how much memory {pid} had")


def rss_kb(pid: int) -> float:
    """Return the resident memory of a process, in KB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1])
    raise ValueError(f"the kernel does not say how much memory {pid} has")


def forget_peak(pid: int) -> None:
    """Have the peak of the resident memory of a process begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds, to the nanosecond."""
    tasks = os.listdir(f"/proc/{pid}/task")
    return sum(int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) for task in tasks) / 1e9
