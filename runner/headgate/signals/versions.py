"""`Signal` and `SignalVersion`: a signal before it is sent, and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Signal:
    """A value under a key. ``dedup``: if the key has a version with this one, it is not sent again."""

    key: str
    value: Any = None
    dedup: str | None = None


@dataclass(frozen=True)
class SignalVersion(Signal):
    """A signal that was sent: the ``version`` of its key, which no other signal has.

    ``is_new`` is False if an earlier one with the same ``dedup`` has this version. ``sender`` and ``sent_at`` are
    known of signals that were listed, and so is ``run``, a dag_id and a run_id, of one that a program lists and that is
    for that run alone.
    """

    version: int = 0
    is_new: bool = True
    sender: str = ""
    sent_at: datetime | None = None
    run: tuple[str, str] | None = None


def signals_in(signals: Iterable[Signal]) -> list[Signal]:
    """Return signals that are to be sent as a list. Raises TypeError for anything else."""
    found = list(signals)
    for one in found:
        if not isinstance(one, Signal):
            raise TypeError(f"signals are sent as Signal(key, value), not as {one!r:.100}")
    return found
