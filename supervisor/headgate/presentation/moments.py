"""Moments and spans of time as people read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

SPAN_S_MAX = 100 * 365 * 86_400.0  # the zero of no clock is so far back that a moment before it cannot be stored
SPANS = "90s, 30m, 1h30m, 7d or 2w"


def age(moment: datetime) -> str:
    """Return how long ago a moment was, or how far ahead it is: ``3 m ago``, ``in 2 h``; a date if it is far away."""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    if abs(seconds) < 1:
        return "now"
    if abs(seconds) >= 60 * 86_400:
        return f"{moment.astimezone(UTC):%Y-%m-%d}"
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if abs(seconds) >= unit_s:
            count = int(abs(seconds) // unit_s)
            return f"{count} {unit} ago" if seconds > 0 else f"in {count} {unit}"
    raise AssertionError(seconds)


def duration(begin: datetime | None, end: datetime | None) -> str:
    """Return the time between two moments in the two largest units; nothing if one of them is not known."""
    if begin is None or end is None:
        return ""
    seconds = (end - begin).total_seconds()
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86_400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} m" if hours else f"{minutes} m {int(seconds) % 60} s"


def exact(moment: datetime) -> str:
    """Return a moment as people read it: ``2026-01-31 12:00:00.000 UTC``."""
    zone = moment.tzname() if moment.tzinfo is not None and moment.utcoffset() != timedelta(0) else "UTC"
    return f"{moment.replace(tzinfo=None).isoformat(sep=' ', timespec='milliseconds')} {zone}"


_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?(?:s|min|m|h|d|w))+")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d|w)")


def span_s(text: str) -> float:
    """Return the seconds in ``90s``, ``30m``, ``1h30m``, ``7d`` or ``2w``. Raises `ValueError`, which says why."""
    if _SPAN.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a span of time; write {SPANS}")
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _SPAN_PART.findall(text))
    if seconds > SPAN_S_MAX:
        raise ValueError(f"{text} is longer than a hundred years")
    return seconds


def moment(text: str) -> datetime:
    """Return a moment written in ISO 8601; without a zone it is in UTC. Raises `ValueError`, which says why."""
    try:
        found = datetime.fromisoformat(text)
        return (found.replace(tzinfo=UTC) if found.tzinfo is None else found).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a moment; write 2026-01-31 or 2026-01-31T12:00:00+00:00") from error


def begin_of(text: str, now: Callable[[], datetime]) -> datetime:
    """Return the moment that is meant by a moment, or by a span before now. Raises `ValueError`, which says why."""
    if _SPAN.fullmatch(text) is not None:
        return now() - timedelta(seconds=span_s(text))
    try:
        return moment(text)
    except ValueError:
        expected = "expected a span before now such as 2h or 3d, or a time such as 2026-01-31T12:00Z"
        raise ValueError(f"{expected}; got {text!r}") from None
