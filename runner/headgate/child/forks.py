"""Forks that users' code makes of a runner or worker with ``os.fork()``: some descriptors stay with the process itself.

A fork has copies of all descriptors. If two processes wrote frames to one socket, both would count the same numbers,
and a confirmation for the one would be taken for that of the other. And the lock of a file lasts until its last copy is
closed, so a fork that lives on would refuse the next runner. Programs that users' code starts are not concerned: these
descriptors are not inherited over ``exec``.
"""

from __future__ import annotations

import contextlib
import os

_cut_off: set[int] = set()


def cut_off_forks(*descriptors: int) -> None:
    """Have these descriptors lead to ``/dev/null`` in all forks of this process from now on."""
    _cut_off.update(descriptors)


def close_cut_off(descriptor: int) -> None:
    """Close such a descriptor: its number may be that of another file afterwards."""
    _cut_off.discard(descriptor)
    os.close(descriptor)


def _lead_nowhere() -> None:
    descriptors = sorted(_cut_off)
    _cut_off.clear()  # the fork may close them, and use their numbers
    if not descriptors:
        return
    for descriptor in descriptors:  # first, so that the next line works even if no descriptor is left
        with contextlib.suppress(OSError):  # users' code has closed it
            os.close(descriptor)
    null = os.open(os.devnull, os.O_RDWR)
    # Not only closed: the socket objects would then use whatever file the author opens next.
    for descriptor in descriptors:
        if descriptor != null:
            os.dup2(null, descriptor, inheritable=False)
    if null not in descriptors:
        os.close(null)


os.register_at_fork(after_in_child=_lead_nowhere)
