"""Deaths at marks: processes that kill themselves at a place in the code that the test chooses.

The test puts a folder on ``PYTHONPATH`` whose ``sitecustomize.py`` arms the marks of every Python process started
with it, before anything else of headgate runs. The test asks for a death by creating a file named after the mark. The
process that reaches the mark renames the file and dies at once. So a death happens exactly once, and the new name of
the file shows that it happened.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from headgate.protocol import marks

SKIPS_MAX = 2
_SITECUSTOMIZE = """\
from headgate.testing.crash.killing import die_at_marks

die_at_marks({folder!r})
"""


class MarkedDeaths:
    """The test's side: asks for deaths, and checks whether they happened. It creates ``folder`` for its own use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wanted = folder / "wanted"
        self._wanted.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(folder=str(self._wanted)))

    def ask(self, mark: str, *, skips: int = 0) -> None:
        """Have the next process that reaches the mark die there, after the mark was reached ``skips`` times."""
        assert 0 <= skips <= SKIPS_MAX
        of_tasks = marks.TASK_MARKS | marks.BUNDLE_MARKS | marks.TASK_STREAM_MARKS
        of_tasks |= marks.MAP_MARKS | marks.BELL_MARKS
        assert mark in marks.MARKS | of_tasks | marks.POISON_MARKS | marks.RUNAWAY_MARKS, mark
        (self._wanted / f"{mark}.died").unlink(missing_ok=True)
        for number in range(SKIPS_MAX):
            (self._wanted / f"{mark}.skip{number}").unlink(missing_ok=True)
        for number in range(skips):
            (self._wanted / f"{mark}.skip{number}").touch()
        (self._wanted / mark).touch()

    def has_died(self, mark: str) -> bool:
        """Whether a process has reached the mark since it was asked to die there."""
        return (self._wanted / f"{mark}.died").exists()

    def take_back(self, mark: str) -> bool:
        """Withdraw the request; return False if the process has died already."""
        try:
            (self._wanted / mark).unlink()
        except FileNotFoundError:
            return False
        return True


def die_at_marks(folder: str) -> None:
    """Arm the marks of this process."""

    def look(mark: str) -> None:
        path = f"{folder}/{mark}"
        if not os.path.exists(path):
            return
        for number in range(SKIPS_MAX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}.skip{number}")
                return
        try:
            os.rename(path, f"{path}.died")
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    marks.arm(look)
