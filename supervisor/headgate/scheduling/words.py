"""Numbers, times, names, commands and errors as people read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

NAMES_SHOWN_MAX = 5  # of tasks, runs and holders in one sentence; the list commands show all
ERROR_CHARS_SHOWN_MAX = 400  # of an error in one sentence; `show` prints all of it
_END_CHARS_SHOWN = 150  # of these, if it is longer: an error ends with what to do about it

_TRACEBACK = "Traceback (most recent call last):"  # also of a group of errors, with more before it
# The line that Python prints between the error before it and the one that was raised because of it.
_CAUSED = "The above exception was the direct cause of the following exception:"
_STREAM_ENDED = "PollTerminated: "  # says nothing beside its cause, which is long enough
_OF_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+: )")  # before the name of a class


def error_line(error: str) -> str:
    """Return an error on one line, without its traceback; of a traceback alone its last line.

    An error that was raised because of another is of little use without that one, so the line ends with it.
    """
    lines = error.strip().splitlines()
    caused = next((at for at, line in enumerate(lines) if line.strip() == _CAUSED), 0)
    cause = next((at for at in range(caused - 1, 0, -1) if lines[at].strip()), None)
    begins = next((at for at, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)), len(lines))
    headline = lines[: begins if cause is None else min(begins, cause)]
    if not headline:
        headline = [line for line in lines if line.strip() and not line[0].isspace()][-1:] or lines[-1:]
    text = " ".join(" ".join(headline).split())
    if cause is None:
        return text
    of = _OF_MODULE.sub("", lines[cause].strip().removeprefix("|").strip())
    return f"its stream has ended: {of}" if text.startswith(_STREAM_ENDED) else f"{text}, caused by {of}"


def tries(number: int, most: int, retries: int, of: str = " of ") -> str:
    """Return the number of a try, of how many; alone if it has no retries and was begun anew: then each is the last."""
    return str(number) if most > 1 and not retries else f"{number}{of}{most}"


def span(seconds: float) -> str:
    """Return a length of time as text, in its two largest units."""
    seconds = abs(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit_s, unit, part_s, part in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // part_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def counted(number: int, what: str) -> str:
    """Return a number of things as text."""
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"


def times(number: int) -> str:
    """Return how often something has happened as text."""
    return "once" if number == 1 else f"{number:,} times"


def some(names: Sequence[str]) -> str:
    """Return the first names as text, and the number of the others."""
    shown = ", ".join(names[:NAMES_SHOWN_MAX])
    more = len(names) - NAMES_SHOWN_MAX
    return f"{shown} and {more:,} more" if more > 0 else shown


def command(*words: object) -> str:
    """Return a command of headgate as a shell takes it, whatever the names in it are."""
    return shlex.join(("headgate", *map(str, words)))


def shortened(error: str | None) -> str:
    """Return an error on one line, without its traceback, and without its middle if it is long."""
    text = error_line(error or "")
    if len(text) <= ERROR_CHARS_SHOWN_MAX:
        return text
    return f"{text[: ERROR_CHARS_SHOWN_MAX - 1 - _END_CHARS_SHOWN]}…{text[-_END_CHARS_SHOWN:]}"


def moment(in_s: float | None) -> str:
    """Return a moment relative to now: ``in 3 min``, ``2 s ago``, ``none``."""
    if in_s is None:
        return "none"
    return f"in {span(in_s)}" if in_s >= 0 else f"{span(in_s)} ago"
