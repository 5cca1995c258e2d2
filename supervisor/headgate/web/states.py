"""States as they are drawn: a letter, a shape and a colour, so that none of the three is needed."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """How a state is drawn: its letter, its shape and its tone, which are classes of the style sheet."""

    letter: str
    shape: str
    tone: str


LOOKS = {
    # of tasks and runs
    "success": Look("S", "round", "good"),
    "failed": Look("F", "square", "bad"),
    "running": Look("R", "hexagon", "busy"),
    "deferred": Look("D", "diamond", "wait"),
    "queued": Look("Q", "diamond", "idle"),
    "scheduled": Look("C", "diamond", "idle"),
    "up_for_retry": Look("T", "octagon", "warn"),
    "restarting": Look("A", "octagon", "warn"),
    "upstream_failed": Look("U", "square", "warn"),
    "skipped": Look("K", "round", "idle"),
    "removed": Look("X", "round", "idle"),
    "none": Look("N", "round", "idle"),
    # of findings
    "broken": Look("B", "square", "bad"),
    "attention": Look("!", "octagon", "warn"),
    "notice": Look("i", "round", "busy"),
    # of triggers, streams and supervisors
    "alive": Look("A", "round", "good"),
    "draining": Look("D", "octagon", "warn"),
    "silent": Look("S", "octagon", "warn"),
    "gone": Look("G", "square", "bad"),
    "full": Look("F", "octagon", "warn"),
    "fenced": Look("F", "square", "bad"),
    "ended": Look("E", "round", "idle"),
    "finished": Look("E", "round", "idle"),
    "waiting": Look("W", "diamond", "idle"),
    "failing": Look("F", "square", "bad"),
    "paused": Look("P", "octagon", "warn"),
    "quarantined": Look("Q", "octagon", "bad"),
    "brake": Look("B", "octagon", "bad"),
    "held up": Look("H", "octagon", "bad"),
    # of dead letters
    "open": Look("O", "square", "bad"),
    "at_broker": Look("B", "square", "bad"),
    "redriving": Look("R", "hexagon", "busy"),
    "redriven": Look("V", "round", "good"),
    "stored_meanwhile": Look("M", "round", "good"),
    "discarded": Look("X", "round", "idle"),
}
UNKNOWN = Look("?", "round", "idle")


def look_of(state: str) -> Look:
    """Return how a state is drawn."""
    return LOOKS.get(state, UNKNOWN)
