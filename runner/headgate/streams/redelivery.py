"""A message that one subscriber gets once more, not from its broker but from a dead letter that a user has redriven.

It is broadcast to that subscriber alone, in a lane of its own, and everything that holds for a broker's message holds
for it: the events that derive from it are bound to it and recognised by its key (I1, I2), and it is resolved when they
are stored. Only the last step differs. Where the producer would be told to forget a message of the broker, the letter's
outcome is settled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headgate.streams.contract import AdvanceOutcome


class RedeliveredMessage(NamedTuple):
    """What a raw event has that is not its broker's. ``settle`` is called once, with what the subscriber did with it.

    It is not called if the stream ends before. It must not raise.
    """

    settle: Callable[[AdvanceOutcome], object]
