"""What is done to processes that tests have not started themselves."""

from __future__ import annotations

import os
import select
import signal

import psutil
from tests.waiting import WITHIN_S, wait_until


def ends(pid: int, *, within_s: float = WITHIN_S) -> bool:
    """Wait until the process has ended, whether or not somebody has reaped it; return False if it lives on."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        return bool(poll.poll(within_s * 1000))
    finally:
        os.close(end)


def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"process {pid} stops")
