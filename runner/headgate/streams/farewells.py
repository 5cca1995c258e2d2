"""Subscribers whose stream has ended before they came to its end: they may take their time, but not for ever.

A stream that fails lets its subscribers work off what they have waiting, and then raises. One that hangs in its filter
would never hear of it. One that has heard of it and does not end (its filter catches everything and pulls again, or
cleans up for ever) is no better: it would do nothing for good, and so would the next stream, which keeps it a seat.

On the fast path nothing is redelivered, and no filter has to be done by a certain time. There somebody who has not
heard of the end yet is left in peace, unless the next stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from headgate.streams.contract import AckTimeout
from headgate.streams.subscription import Subscription


class _Farewell:
    """``pulls`` of a subscriber at its last look, and since when it has made none, or has known of the end."""

    __slots__ = ("is_told", "key", "pulls", "since")

    def __init__(self, key: Hashable, pulls: int, since: float) -> None:
        self.key = key
        self.pulls = pulls
        self.since = since
        self.is_told = False


class Farewells:
    """Those that are still to come to their end after their stream's. Each has ``timeout_s`` (by ``now``) for one pull.

    ``is_awaited`` says of a stream and a trigger whether there is another such stream by now, which waits for it.
    """

    def __init__(
        self, *, timeout_s: float, now: Callable[[], float], is_awaited: Callable[[Hashable, int], bool]
    ) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._is_awaited = is_awaited
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
            if self._has_time(subscription, farewell):
                farewell.pulls, farewell.since = subscription.pulls, now
            due = farewell.since + self._timeout_s
            if due <= now:
                del self._waiting[subscription]
                subscription.fail(AckTimeout(farewell.key, self._timeout_s, after_end=True))
            elif next_due is None or due < next_due:
                next_due = due
        return next_due

    def _has_time(self, subscription: Subscription, farewell: _Farewell) -> bool:
        """Whether the time of a subscriber begins anew."""
        if subscription.waits_for_store:
            return True
        if farewell.is_told:  # and pulling again changes nothing any more
            return False
        farewell.is_told = subscription.is_over
        is_gated = subscription.account is not None
        has_moved = subscription.pulls != farewell.pulls
        return (
            has_moved or farewell.is_told or not (is_gated or self._is_awaited(farewell.key, subscription.trigger_id))
        )
