"""Shared streams: one poll of a broker, many triggers, and the broker advanced only after every event is stored.

The modules, from the inside out: `contract` (what a producer implements and is handed), `ledger` (who still
owes what for which event; no I/O, no clock, no trio), `flow` (what holds all polls back), `subscription` (one
trigger's end of a stream), `group` (one poll, its subscribers and its pump), `manager` (all groups by key).
"""

from __future__ import annotations

from headgate.streams.manager import SharedStreamManager, StreamStatistics
from headgate.streams.subscription import Binding, Subscription

__all__ = ["Binding", "SharedStreamManager", "StreamStatistics", "Subscription"]
