"""The ends of processes that are no children of the tests'."""

from __future__ import annotations

import os
import select

END_S_MAX = 20.0  # a killed process lives on until it runs next: on a busy machine, a while


def ends(pid: int, *, within_s: float = END_S_MAX) -> bool:
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
