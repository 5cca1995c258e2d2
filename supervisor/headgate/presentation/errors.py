"""Errors of users' code as people read them."""

from __future__ import annotations

_TRACEBACK = "Traceback (most recent call last):\n"


def without_own_frames(error: str) -> str:
    """Return an error without the frames of headgate that lead to the user's own, if it has such frames.

    The sentence above the traceback is left out if the traceback ends with it.
    """
    sentence, head, trace = error.rpartition(_TRACEBACK) if error.count(_TRACEBACK) == 1 else ("", "", "")
    if not head or (sentence and not sentence.endswith("\n")):
        return error
    sentence = sentence.rstrip()
    above = [] if trace.rstrip().endswith(sentence) else sentence.splitlines()
    lines = trace.splitlines()
    frames: list[list[str]] = []
    for line in lines:
        if line.startswith("  File ") or not line.startswith(" ") or not frames:
            frames.append([])
        frames[-1].append(line)
    users = next((at for at, frame in enumerate(frames) if not _is_own(frame[0])), 0)
    if not any(frame[0].startswith("  File ") for frame in frames[users:]):
        users = 0  # the mistake is not in a frame of the user's: nothing is left out
    return "\n".join([*above, head.rstrip(), *(line for frame in frames[users:] for line in frame)])


def _is_own(line: str) -> bool:
    places = ("/headgate/tasks/", "/headgate/child/", "/headgate/worker/", "<frozen importlib")
    return line.startswith("  File ") and any(place in line for place in places)
