"""The limits of a group, and the settings and the state that all groups of one manager share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from headgate.streams.absence import AbsentSubscribers
from headgate.streams.end_deadlines import EndDeadlines
from headgate.streams.flow import FlowControl
from headgate.streams.lease import Lease
from headgate.streams.ledger import SeqTable

# Events in one call of advance: bounds the work that is redelivered if that call fails.
ADVANCE_BATCH_EVENTS_MAX = 1000
# Events broadcast and not yet advanced, over all subscribers. If the first event of a lane waits for the ack timeout,
# all later ones queue behind it; without a limit a fast broker would fill the memory in those minutes. The poll waits
# at the limit, and the ack timeout guarantees that it continues, if no subscriber waits for credit.
OUTSTANDING_EVENTS_MAX = 100_000
# Broadcasts without a visit to the scheduler if open_stream never really awaits. Low enough that filters run long
# before a queue of the default length is full; a visit for each broadcast would cost more than the broadcast.
BROADCASTS_PER_CHECKPOINT_MAX = 16
# How long an ended group may continue to advance resolved events, including the call in flight. Events not advanced by
# then are redelivered and recognised, so this only trades shutdown time for redeliveries.
DRAIN_TIMEOUT_S = 10.0
# How long it waits for the lease to be renewed: an answer takes milliseconds, or never arrives.
LEASE_WAIT_S = 1.0
# How long a stream stays open while nobody is online, for a subscriber that is waited for. A trigger that fails on one
# message is started several times meanwhile, until it is passed over. One that is held may be away for days, and other
# readers may want what the stream has taken.
DESERTED_S_MAX = 60.0
# How long an open_stream that failed may take to unwind, and how long aclose may take.
STREAM_CLOSE_TIMEOUT_S = 5.0
PRODUCER_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings and state shared by all groups of one manager; see `SharedStreamManager`. Times in seconds."""

    log: structlog.typing.FilteringBoundLogger
    queue_events_max: int
    ack_timeout_s: float
    cohort_grace_s: float
    overflow: Literal["fail", "pause"]
    now: Callable[[], float]
    flow: FlowControl
    seqs: SeqTable
    absent: AbsentSubscribers
    advance_timeout_s: float
    on_advance_cut: Callable[[], object]
    lease: Lease | None
    end_deadlines: EndDeadlines
