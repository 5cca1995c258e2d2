"""Subscribers whose stream has ended before they came to its end: they may take their time, but not for ever.

A stream that fails lets its subscribers work off what they have waiting, and then raises. One that hangs in its filter
would never hear of it, nor hold anybody up who could complain: the trigger would be there, and do nothing, for good.
This is for ack mode: on the fast path nothing is redelivered, and no filter ever has to be done by a certain time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from headgate.runner.streams.contract import AckTimeout
from headgate.runner.streams.subscription import Subscription


class _Farewell:
    """``pulls`` of a subscriber at its last look, and since when it has made none."""

    __slots__ = ("key", "pulls", "since")

    def __init__(self, key: Hashable, pulls: int, since: float) -> None:
        self.key = key
        self.pulls = pulls
        self.since = since


class Farewells:
    """Those that are still to hear of their stream's end. Each has ``timeout_s`` (by ``now``) for one pull."""

    def __init__(self, *, timeout_s: float, now: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._waiting: dict[Subscription, _Farewell] = {}

    def add(self, subscription: Subscription, key: Hashable) -> None:
        """The stream of a subscriber has ended."""
        self._waiting[subscription] = _Farewell(key, subscription.pulls, self._now())

    def forget(self, trigger_id: int) -> None:
        """This trigger has left, however it did."""
        for subscription in [each for each in self._waiting if each.trigger_id == trigger_id]:
            del self._waiting[subscription]

    def expire(self, now: float) -> float | None:
        """Fail who has stood still for too long; return when the next one will have, None where nobody is left."""
        next_due: float | None = None
        for subscription, farewell in list(self._waiting.items()):
            if subscription.is_over:
                del self._waiting[subscription]
                continue
            if subscription.pulls != farewell.pulls or subscription.waits_for_store:
                farewell.pulls, farewell.since = subscription.pulls, now
            due = farewell.since + self._timeout_s
            if due <= now:
                del self._waiting[subscription]
                subscription.fail(AckTimeout(farewell.key, self._timeout_s))
            elif next_due is None or due < next_due:
                next_due = due
        return next_due
