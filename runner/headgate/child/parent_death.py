"""The death of the supervisor, as its children notice it. Imported first of all, so it imports little itself.

As a program (``python parent_death.py PID PROGRAM ARGUMENT...``) it becomes another one, which dies with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2): the signal this process gets when its parent dies


class SupervisorGone(Exception):
    """The supervisor closed the link or died; this process must end."""


def die_with(supervisor_pid: int) -> None:
    """Have the kernel kill this process when the supervisor dies, even while users' code blocks it (I7).

    More precisely: when the thread ends that started this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor_pid:
        # It died before the kernel knew of this.
        sys.exit("the supervisor was gone before this process began")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
