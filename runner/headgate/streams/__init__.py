"""Shared streams: one poll of a broker, many triggers, and the broker advanced only after every event is stored.

The theory of a group, in the order in which it matters:

- *One poll for many triggers.* Triggers with an equal key share a `Group`. The first subscriber's class opens the
  stream; the last one that leaves ends it. What a subscriber gets is decided when an event is broadcast: those online
  get it, later ones do not.
- *Two tasks.* The **poll** pulls from the producer and broadcasts. The **pump** hands resolved events to
  ``producer.advance``, one call at a time (I4). They meet only in the `Ledger`, which has no task, clock or I/O.
- *Back-pressure, not loss.* The poll waits before it pulls: while a queue is full (``overflow="pause"``), while too
  many events are unresolved, while a subscriber is absent, or while the runner drains. Each wait is a `Stall`, which
  is logged if it lasts. The first two are bounded by the ack timeout, which fails the subscriber that causes them,
  unless it waits for credit (I22).
- *A failure costs a pause, not an event.* A failed subscriber's shares resolve as failed, so a producer that commits
  cumulatively rewinds. Until the trigger has been restarted and has rejoined, nothing is broadcast, however long that
  takes (`AbsentSubscribers`). A message that it fails on too often is passed over for it (`PassOver`).
  If it was the only subscriber, the broker is kept for a minute, so that its messages are handed out again from memory.
  If the trigger comes back with other values, that stream is closed nevertheless, and then another begins.
- *The end is one step.* Whatever ends a group (an error of the producer, an advance that fails, the last subscriber if
  none is waited for, the drain) goes through one synchronous function: the key leaves the table, the ledger closes, the
  subscribers get their failure (I5). A subscriber that arrives in the next step gets a new group. Afterwards the pump
  advances what was already resolved, for a limited time, and the producer is closed last.
- *The lease.* An advance begins only while no other supervisor can have taken over (`Lease`, I10).

The modules, from the inside out: `contract` (the methods of a producer), `ledger` (which subscriber still has to handle
which event), `flow` (gates for all polls), `lease`, `subscription` (one trigger's end of a stream), `absence`,
`end_deadlines` and `stalls` (waits, and their limits), `group` (one poll, its subscribers and its pump), `manager` (all
groups by key).
"""

from __future__ import annotations

from headgate.streams.manager import SharedStreamManager, StreamStatistics
from headgate.streams.subscription import Binding, Subscription

__all__ = ["Binding", "SharedStreamManager", "StreamStatistics", "Subscription"]
