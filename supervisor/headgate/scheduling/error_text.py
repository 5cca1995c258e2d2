"""Errors as they are stored: a sentence, and below it the traceback, if there is one."""

from __future__ import annotations

import re

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
