"""`Signal` and `SignalVersion`: a signal before it is sent, and after; and its value, if that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headgate.protocol.errors import ValueMalformed
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE
from headgate.protocol.values import decode_value


@dataclass(frozen=True)
class Signal:
    """A value under a key. ``dedup``: if the key has a version with this one, it is not sent again."""

    key: str
    value: Any = None
    dedup: str | None = None


@dataclass(frozen=True)
class SignalVersion(Signal):
    """A signal that was sent: the ``version`` of its key, which no other signal has.

    ``is_new`` is False if an earlier one with the same ``dedup`` has this version: then ``value`` is what was to be
    sent now, and a list of the key has the one that was sent. ``sender`` and ``sent_at`` are known of signals that were
    listed, and so is ``run``, a dag_id and a run_id, of one that a program lists and that is for that run alone.
    Another ``namespace`` has other keys.
    """

    version: int = 0
    is_new: bool = True
    sender: str = ""
    sent_at: datetime | None = None
    run: tuple[str, str] | None = None
    namespace: str = DEFAULT_NAMESPACE


@dataclass(frozen=True)
class UnreadableValue:
    """The value of a signal that this process cannot read: its type is not registered here, or a tag is malformed.

    ``data`` is its JSON as it was sent, and ``error`` why it cannot be read. So one such signal keeps no other from
    whoever lists or hears them, or from a task that they start.
    """

    data: bytes
    error: str


def value_of(data: bytes) -> Any:
    """Return the value of a signal, of which ``data`` is the encoded form; an `UnreadableValue` if need be."""
    try:
        return decode_value(data)
    except ValueMalformed as error:
        return UnreadableValue(data, str(error))


def signals_in(signals: Iterable[Signal]) -> list[Signal]:
    """Return signals that are to be sent as a list. Raises TypeError for anything else."""
    found = list(signals)
    for one in found:
        if not isinstance(one, Signal):
            raise TypeError(f"signals are sent as Signal(key, value), not as {one!r:.100}")
    return found
