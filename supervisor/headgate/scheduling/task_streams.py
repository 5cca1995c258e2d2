"""Decisions about the stream of a task that waits, or whose step has just handled events: what it does next."""

from __future__ import annotations

from typing import Literal

from headgate.protocol.messages.task_streams import StreamContract

# ``wait`` for events; begin a ``step`` with those that wait; or ``end``: no event waits, and none will come.
Next = Literal["wait", "step", "end"]


def decide(contract: StreamContract, *, waiting: int, wanted: int, is_ended: bool, is_due: bool = False) -> Next:
    """Return what a task does next if ``waiting`` of its events are not handled.

    ``wanted`` is the size of a whole batch, ``is_due`` whether one that is not whole has waited for long enough.
    """
    if waiting == 0:
        return "end" if is_ended else "wait"
    if contract != "batch" or is_ended or is_due or waiting >= wanted:
        return "step"
    return "wait"
