"""What separates the processes that run users' code from the supervisor's secrets, besides their environment (I12).

Processes of one user can read one another's memory, environment and open files. The kernel refuses that for a process
that is not *dumpable*. Files are another matter: only another user cannot read the key file and the database.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from collections.abc import Mapping

import msgspec

PR_SET_DUMPABLE = 4  # prctl(2)


class RunAs(msgspec.Struct, frozen=True):
    """The Unix user that runs users' code."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with the variables that name the user, as far as they are in it."""
        own = {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}
        return {name: own.get(name, value) for name, value in environ.items()}


def hide_memory() -> None:
    """Have the kernel refuse other processes of this user the memory, environment and open files of this process.

    Debuggers and profilers that attach to it need root then, and it leaves no core dump. Raises `OSError`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")


def user_named(name: str) -> RunAs:
    """Return the user to run users' code as. Raises `ValueError` if there is none, or if this process may not do it."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise ValueError(f"there is no user {name!r} on this machine") from None
    if os.geteuid() not in (0, found.pw_uid):
        raise ValueError(f"only root can run processes as the user {name!r}, and this is {pwd_name(os.geteuid())!r}")
    groups = os.getgrouplist(name, found.pw_gid) if os.geteuid() == 0 else os.getgroups()
    return RunAs(name, found.pw_uid, found.pw_gid, tuple(groups), found.pw_dir)


def pwd_name(uid: int) -> str:
    """Return the name of a user, or its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
