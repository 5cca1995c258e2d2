"""The limits of a group, the settings and the state that all groups of one manager share, and the record of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import structlog

from headgate.child.error_text import describe_error
from headgate.child.queries import secrets
from headgate.protocol.messages.runner import STREAM_ERROR_CHARS_MAX
from headgate.streams.absence import AbsentSubscribers
from headgate.streams.contract import AdvanceItem
from headgate.streams.end_deadlines import EndDeadlines
from headgate.streams.flow import FlowControl
from headgate.streams.lease import Lease
from headgate.streams.ledger import SeqTable
from headgate.triggers.base import BaseEventTrigger

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


class Source(NamedTuple):
    """What a producer of a stream is made of: the first subscriber's class and kwargs."""

    trigger_class: type[BaseEventTrigger]
    kwargs: dict[str, Any]

    def differences(self, other: Source) -> dict[str, str]:
        """Return the arguments by which the other would open the stream otherwise, each with both values in words."""
        with suppress(BaseException):  # an author's code
            mine, others = (one.trigger_class.shared_stream_arguments(one.kwargs) for one in (self, other))
            return {
                name: f"{mine[name]!r:.100}, not {value!r:.100}"
                for name, value in others.items()
                if name in mine and mine[name] != value
            }
        return {}

    def is_like(self, other: Source | None) -> bool:
        """Whether the producers of both are the same, or that cannot be found out."""
        with suppress(BaseException):  # the values are an author's objects
            return bool(self == other)
        return True


@dataclass(slots=True)
class StreamRecord:
    """The outcomes of one stream since the runner started, however often it has ended and was opened again."""

    acked: int = 0
    failed: int = 0
    rejected: int = 0
    ended: int = 0
    last_error: str = ""
    last_error_at: float | None = None  # by the manager's clock
    source: Source | None = None  # of its producer

    def note_advanced(self, batch: Sequence[AdvanceItem]) -> None:
        """Count the messages of an advance that has returned."""
        failed = rejected = 0
        for _, outcome in batch:
            if outcome.failed or not (outcome.acked or outcome.rejected):
                failed += 1
            elif outcome.rejected:
                rejected += 1
        self.acked += len(batch) - failed - rejected
        self.failed += failed
        self.rejected += rejected

    def note_end(self, cause: BaseException, now: float) -> None:
        """Note that the stream has ended by an error."""
        self.ended += 1
        lines = describe_error(cause)[0].splitlines() or [""]
        self.last_error, self.last_error_at = secrets.hide(lines[0])[:STREAM_ERROR_CHARS_MAX], now
