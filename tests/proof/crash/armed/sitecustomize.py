"""Imported by every Python that has this folder on its PYTHONPATH: arms the marks of both halves of a pair.

``CRASH_CONTROL`` names a folder. A file ``armed`` in it says ``<token> <mark> <skip>``: the process that is the first
to reach that mark, after passing it ``skip`` times, says so in ``reached.<token>`` and stays there until
``released.<token>`` exists or somebody kills it. A file ``bug`` names one of
`bugs_of_supervisors` or `bugs_of_children`, which all such processes then have.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

HELD_S_MAX = 300.0  # a harness that is gone releases nobody
LOOK_INTERVAL_S = 0.001


class Point:
    """What a mark calls."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._armed = os.path.join(folder, "armed")
        self._passed: dict[str, int] = {}

    def __call__(self, name: str) -> None:
        try:
            with open(self._armed) as file:
                token, wanted, skip = file.read().split()
        except (FileNotFoundError, ValueError):
            return
        if name != wanted:
            return
        self._passed[token] = self._passed.get(token, 0) + 1
        if self._passed[token] > int(skip):
            self._stay(token)

    def _stay(self, token: str) -> None:
        draft = os.path.join(self._folder, f"draft.{os.getpid()}.{time.monotonic_ns()}")
        with open(draft, "w") as file:
            file.write(str(os.getpid()))
        try:
            # A link appears whole or not at all, and for one process only.
            os.link(draft, os.path.join(self._folder, f"reached.{token}"))
        except FileExistsError:
            return
        finally:
            os.unlink(draft)
        deadline = time.monotonic() + HELD_S_MAX
        while not os.path.exists(os.path.join(self._folder, f"released.{token}")) and time.monotonic() < deadline:
            time.sleep(LOOK_INTERVAL_S)


if (control := os.environ.get("CRASH_CONTROL")) is not None:
    from headgate.protocol import marks

    marks.arm(Point(control))
    if os.path.exists(bug := os.path.join(control, "bug")):
        with open(bug) as named:
            name = named.read()
        # What a supervisor imports takes a child as long as its own start.
        module = "bugs_of_supervisors" if "headgate.cli" in sys.orig_argv else "bugs_of_children"
        importlib.import_module(module).BUGS.get(name, lambda: None)()
