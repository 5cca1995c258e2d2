"""The watchdog: names the trigger, the class and the line that block the loop, while they still block it.

A thread samples the loop's thread a few times a second: which trio task is running a step, and where. A task that is in
the same step for longer than the limit blocks all others, and is reported with its stack. This costs nothing per step.
If even this thread cannot run (C code that keeps the GIL), the supervisor notices the silence and has the stacks dumped
by a signal.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import structlog

import headgate
from headgate.child.logs import trigger_names

log = structlog.get_logger(__name__)

SAMPLES_PER_LIMIT = 5  # samples of a step that is as long as the limit
# A loop that was idle in so many samples is sampled only once per limit until it is busy again, because sampling is
# most of the cost of an idle runner. A step that blocks it then is still found when it is twice as long as the limit.
IDLE_SAMPLES = 20
# A sample that is this many intervals late means that the whole process was stopped, not one task.
LATE_INTERVALS = 4
STACK_FRAMES_MAX = 20  # of a reported stack, innermost last

# Folders that hold no users' code: the standard library, installed packages, and headgate itself.
_LIBRARY_FOLDERS = tuple(
    str(Path(folder).resolve()) + "/"
    for folder in (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), *headgate.__path__)
)


class _Step(NamedTuple):
    """One step of one task. A weak reference, because the address of a task may be reused."""

    task: weakref.ref[Any]
    schedule_points: int


class Watchdog:
    """Watches the loop of the thread that creates it. A context manager: its own thread lives as long as the block."""

    def __init__(self, *, blocked_after_s: float) -> None:
        self._loop_thread = threading.get_ident()
        self._blocked_after_s = blocked_after_s
        self._interval_s = blocked_after_s / SAMPLES_PER_LIMIT
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headgate watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        seen: _Step | None = None  # the step that the last sample found; ``since``: when it was first found
        since = sampled = time.monotonic()
        reported: _Step | None = None
        idle_samples = 0
        while not self._end.wait(interval_s := self._interval_after(idle_samples)):
            now = time.monotonic()
            late = now - sampled > LATE_INTERVALS * interval_s
            sampled = now
            step, frame = self._sample()
            idle_samples = 0 if step is not None else idle_samples + 1
            if reported is not None and step != reported:
                log.warning("the loop runs again", blocked_s=round(now - since, 2))
                reported = None
            if step is None or step != seen or (late and reported is None):
                seen, since = step, now
            elif now - since >= self._blocked_after_s and reported is None:
                reported = step
                _report(step.task(), frame, now - since)
            del frame  # keep no reference to users' frames between samples

    def _interval_after(self, idle_samples: int) -> float:
        return self._interval_s if idle_samples < IDLE_SAMPLES else self._blocked_after_s

    def _sample(self) -> tuple[_Step | None, FrameType | None]:
        """Return the step being run and the innermost frame; None if the loop is idle or in its own code."""
        innermost = frame = sys._current_frames().get(self._loop_thread)
        while frame is not None:
            # trio's own loop: its local variable `task` is the task being stepped.
            if frame.f_code.co_name == "unrolled_run":
                task = frame.f_locals.get("task")
                if task is None or not getattr(task.coro, "cr_running", False):
                    return None, None
                return _Step(weakref.ref(task), task._schedule_points), innermost
            frame = frame.f_back
        return None, None


def _report(task: Any, frame: FrameType | None, blocked_s: float) -> None:
    if task is None:
        return  # it has ended since the sample
    stack = traceback.extract_stack(frame)[-STACK_FRAMES_MAX:]
    culprit = culprit_of(stack)
    named = subject_of(task)
    log.error(
        "a trigger blocks the loop" if "trigger_id" in named else "the loop is blocked",
        blocked_s=round(blocked_s, 2),
        at=f"{culprit.filename}:{culprit.lineno} in {culprit.name}" if culprit else "unknown",
        line=culprit.line if culprit else "",
        stack="".join(traceback.format_list(stack)),
        **named,
    )


def subject_of(task: Any) -> dict[str, object]:
    """Describe a task by its name and its trigger: the one being constructed, or the one that started the task."""
    return {"task": task.name, **task.context.get(trigger_names, {})}


def culprit_of(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame of users' code; if there is none, the innermost frame of all."""
    for frame in reversed(stack):
        folder = str(Path(frame.filename).resolve())
        if not folder.startswith(_LIBRARY_FOLDERS) and not frame.filename.startswith("<"):
            return frame
    return stack[-1] if stack else None
