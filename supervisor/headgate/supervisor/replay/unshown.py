"""The parts of messages that the core of a replay has sent without being asked, and the log has not shown yet."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from headgate.protocol.messages.runner import CancelTrigger, Redelivery, StateSync
from headgate.supervisor.replay.acts import CAUSES
from headgate.supervisor.replay.compare import Differs
from headgate.supervisor.replay.database import replayed_letter_id

PARTS: Final = tuple(CAUSES)  # the fields of a `StateSync` that something outside causes


class _Sent(NamedTuple):
    """A part, and the message that it was in."""

    sync: StateSync
    part: Any


def _key(name: str, part: Any) -> tuple[str, int]:
    """Return the name of a part of a message in the log: a trigger may be given several letters."""
    return name, replayed_letter_id(part.letter_id) if isinstance(part, Redelivery) else part.trigger_id


class UnshownParts:
    """Parts of `StateSync` messages that answer no round, by their field and trigger, or letter.

    The log may group them otherwise, because waits before them have other lengths there.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], _Sent] = {}

    def add(self, sync: StateSync) -> None:
        """Take a message of the core."""
        for name in PARTS:
            for part in getattr(sync, name):
                number = part.letter_id if isinstance(part, Redelivery) else part.trigger_id
                self._sent[name, number] = _Sent(sync, part)

    def missing(self, recorded: StateSync) -> dict[str, list[Any]]:
        """Return the parts of a message in the log that the core has not sent."""
        return {
            name: [part for part in getattr(recorded, name) if _key(name, part) not in self._sent] for name in PARTS
        }

    def first_cancel(self) -> CancelTrigger | None:
        """Return a cancellation that the log has not shown; None if there is none."""
        return next((sent.part for (name, _), sent in self._sent.items() if name == "to_cancel"), None)

    def take(self, recorded: StateSync, *, all_cancels: bool) -> StateSync | None:
        """Take the parts that the log shows in one message; return them as one, in its order. None if there are none.

        The log has to show all absent subscribers of a message together, and with ``all_cancels`` all cancellations.
        Raises `Differs` if triggers of one stream are started one after the other.
        """
        keys = [_key(name, part) for name in PARTS for part in getattr(recorded, name)]
        syncs = [self._sent[key].sync for key in keys if key in self._sent]
        for key, sent in self._sent.items():
            is_absent = key[0] == "absent" and any(sent.sync is sync for sync in syncs)
            if (is_absent or (all_cancels and key[0] == "to_cancel")) and key not in keys:
                keys.append(key)
        taken = [(key[0], self._sent.pop(key)) for key in keys if key in self._sent]
        _check_together([sent for name, sent in taken if name == "to_create"])
        parts: dict[str, Any] = {name: tuple(sent.part for of, sent in taken if of == name) for name in PARTS}
        return StateSync(**parts) if taken else None


def _check_together(starts: list[_Sent]) -> None:
    """Raise `Differs` unless the triggers of each stream are started by one message."""
    first: dict[str, StateSync] = {}
    for sent in starts:
        if sent.part.stream and first.setdefault(sent.part.stream, sent.sync) is not sent.sync:
            raise Differs("these triggers were started together, and the replay starts them one after the other")
