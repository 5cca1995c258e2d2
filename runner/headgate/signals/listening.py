"""Listening: the versions of a key as they are sent, whichever implementation of signals hears them.

An implementation answers *hear*: what is above a place, as soon as there is something. What a listener is promised,
the order, the end and the time that it waits, is made of that here, once.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from headgate.signals.versions import SignalVersion


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


@dataclass(frozen=True)
class Heard:
    """Versions of a key in their order, perhaps none; there are no others up to ``seen``, which is where to go on."""

    signals: Sequence[SignalVersion]
    seen: int


# What is above a place as soon as there is something, or after so many seconds at the latest; None: where the key is.
Hear: TypeAlias = Callable[[int | None, float], Heard]


def seconds_of(timeout: timedelta | float | None) -> float:
    """Return the seconds of a timeout; None is infinite. Raises ValueError for a negative one."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else math.inf if timeout is None else timeout
    if not seconds >= 0:  # so that a NaN is refused, too
        raise ValueError(f"the timeout must be 0 seconds or more, not {seconds:g}")
    return seconds


def pages_of(hear: Hear, after: int, until: int | None, timeout_s: float) -> Iterator[Sequence[SignalVersion]]:
    """Iterate over the versions of a key above ``after``, as many at once as there are.

    Ends behind the version ``until``, or after so much time without a new one.
    """
    ends_at = time.monotonic() + timeout_s
    while until is None or after < until:
        try:
            heard = hear(after, max(0.0, ends_at - time.monotonic()))
        except NothingMore:
            return
        after = heard.seen
        if heard.signals:
            yield heard.signals
            ends_at = time.monotonic() + timeout_s
        elif time.monotonic() >= ends_at:
            return
