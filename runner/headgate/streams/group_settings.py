"""The settings and the state that all groups of one manager share."""

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
