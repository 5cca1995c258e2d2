"""When a task that failed is tried again."""

from __future__ import annotations

from headgate.protocol.messages.dags import DURATION_S_MAX

_DOUBLINGS_MAX = 64  # beyond it any delay is longer than the longest, and a float would overflow in the end


def retry_wait_s(tries: int, *, delay_s: float, is_exponential: bool, delay_max_s: float | None) -> float:
    """Return the seconds until the next try, ``tries`` of which (at least one) have failed so far.

    With an exponential backoff the delay doubles from one try to the next. Never more than ``delay_max_s``, nor than
    the longest time that the database can hold.
    """
    assert tries >= 1
    if is_exponential:
        delay_s *= 2.0 ** min(tries - 1, _DOUBLINGS_MAX)
    return min(delay_s, DURATION_S_MAX if delay_max_s is None else delay_max_s)
