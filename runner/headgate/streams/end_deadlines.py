"""Deadlines for subscribers of a stream that has failed: they may finish their queue, but not take for ever.

A stream that fails lets its subscribers process the events in their queues, and only then raises its failure at their
next pull. A subscriber that hangs in its filter would never see the failure. One that has seen it and does not
unsubscribe (its filter catches everything and pulls again, or cleans up for ever) is no better: it would do nothing for
good, and so would the next stream of the same key, which waits for it to rejoin.

On the fast path nothing is redelivered, and no filter has to finish by a certain time. There a subscriber that has not
seen the failure yet has no deadline, unless the next stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from headgate.streams.contract import AckTimeout
from headgate.streams.subscription import Subscription


class _EndDeadline:
    """The number of ``pulls`` of a subscriber at the last check, and the time from which its deadline counts."""

    __slots__ = ("key", "pulls", "since", "subscription", "was_told")

    def __init__(self, subscription: Subscription, key: Hashable, since: float) -> None:
        self.subscription = subscription
        self.key = key
        self.pulls = subscription.pulls
        self.since = since
        self.was_told = False  # the failure of the stream was raised at its pull


class EndDeadlines:
    """Subscribers that still have to leave a failed stream. Each has ``timeout_s`` (by ``now``) for one pull.

    ``is_awaited`` says of a stream and a trigger whether a new stream of that key waits for the trigger to rejoin.
    """

    def __init__(
        self, *, timeout_s: float, now: Callable[[], float], is_awaited: Callable[[Hashable, int], bool]
    ) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._is_awaited = is_awaited
        self._waiting: dict[int, _EndDeadline] = {}  # by trigger, which leaves one stream before it joins the next

    def start(self, subscription: Subscription, key: Hashable) -> None:
        """Start the deadline of a subscriber whose stream has just failed."""
        self._waiting[subscription.trigger_id] = _EndDeadline(subscription, key, self._now())

    def cancel(self, trigger_id: int) -> None:
        """Forget the deadline of a trigger that has left."""
        self._waiting.pop(trigger_id, None)

    def expire(self, now: float) -> float | None:
        """Fail the subscribers whose deadline has passed; return the next deadline, None if there is none."""
        next_due: float | None = None
        for trigger_id, deadline in list(self._waiting.items()):
            subscription = deadline.subscription
            if self._starts_over(subscription, deadline):
                deadline.pulls, deadline.since = subscription.pulls, now
            due = deadline.since + self._timeout_s
            if due <= now:
                del self._waiting[trigger_id]
                subscription.fail(AckTimeout(deadline.key, self._timeout_s, after_end=True))
            elif next_due is None or due < next_due:
                next_due = due
        return next_due

    def _starts_over(self, subscription: Subscription, deadline: _EndDeadline) -> bool:
        """Whether the time of a subscriber starts over at this check."""
        if subscription.waits_for_store:
            return True
        if deadline.was_told:  # further pulls change nothing
            return False
        deadline.was_told = subscription.has_seen_end
        is_gated = subscription.account is not None
        has_moved = subscription.pulls != deadline.pulls
        is_awaited = is_gated or self._is_awaited(deadline.key, subscription.trigger_id)
        return has_moved or deadline.was_told or not is_awaited
