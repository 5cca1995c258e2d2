"""Shared streams, for authors of triggers and producers.

Triggers with the same `shared_stream_key` share one poll. If their class has a producer, the broker is advanced only
after every event derived from a message is stored.
"""

from __future__ import annotations

from headgate.streams.contract import (
    AckTimeout,
    AdvanceItem,
    AdvanceOutcome,
    AdvanceTimeout,
    Lag,
    LanePosition,
    PollTerminated,
    SharedStreamProducer,
    SourceMissing,
    SubscriberOverflow,
    Undecodable,
)
from headgate.streams.manager import SharedStreamManager
from headgate.streams.subscription import reject_shared_stream_event

__all__ = [
    "AckTimeout",
    "AdvanceItem",
    "AdvanceOutcome",
    "AdvanceTimeout",
    "Lag",
    "LanePosition",
    "PollTerminated",
    "SharedStreamManager",
    "SharedStreamProducer",
    "SourceMissing",
    "SubscriberOverflow",
    "Undecodable",
    "reject_shared_stream_event",
]
