"""Listening: the versions of a key as they are sent, while a step of a task runs.

The supervisor keeps the query until something is sent, for some seconds at most; then it is sent again. So a step that
listens does nothing meanwhile, and neither does the database.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from headgate.child import queries
from headgate.protocol.messages.queries import ListenSignals, SignalsHeard
from headgate.protocol.messages.signals import LISTEN_S_MAX, StoredSignal

if TYPE_CHECKING:
    from headgate.signals.service import SignalVersion


class StopListening(Exception):
    """Raised by `SignalWatcher.process` when it wants no more signals: the listening ends."""


class NothingMore(Exception):
    """Raised by the one who answers, instead of an answer, if nothing will ever be sent: in an author's own tests."""


class SignalWatcher(ABC):
    """Takes the signals that `headgate.signals.SignalService.listen_signal` hears."""

    @abstractmethod
    def process(self, signals: Sequence[SignalVersion]) -> None:
        """Take signals of the key: those that there are, at least one, in the order of their versions.

        It is called again with those behind them, never twice at once, in the thread that listens. To end that, raise
        `StopListening`. Any other exception leaves `listen_signal`, and so fails the step that does not catch it.
        """


def heard(
    key: str, namespace: str, after: int | None, *, until: int | None, timeout: timedelta | float | None
) -> Iterator[tuple[StoredSignal, ...]]:
    """Iterate over the versions of a key above ``after``, as many at once as there are; see `listen_signal`.

    Without ``after``, the first query, which is sent now, says which one is the next. Ends behind the version
    ``until``, or after so much time without a new one. Raises ValueError for a negative time, and as a query does.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else math.inf if timeout is None else timeout
    if not seconds >= 0:  # so that a NaN is refused, too
        raise ValueError(f"the timeout must be 0 seconds or more, not {seconds:g}")
    if after is None:
        after = _ask(ListenSignals(key, namespace)).seen
    return _pages(key, namespace, after, until, seconds)


def _pages(
    key: str, namespace: str, after: int, until: int | None, timeout_s: float
) -> Iterator[tuple[StoredSignal, ...]]:
    ends_at = time.monotonic() + timeout_s
    while until is None or after < until:
        within_s = min(max(0.0, ends_at - time.monotonic()), LISTEN_S_MAX)
        try:
            answer = _ask(ListenSignals(key, namespace, after, within_s))
        except NothingMore:
            return
        after = answer.seen
        if answer.signals:
            yield answer.signals
            ends_at = time.monotonic() + timeout_s
        elif time.monotonic() >= ends_at:
            return


def _ask(query: ListenSignals) -> SignalsHeard:
    answer = queries.send_query(query)
    if not isinstance(answer, SignalsHeard):
        raise queries.QueryFailed(f"the supervisor answered with {type(answer).__name__}, not with signals")
    return answer
