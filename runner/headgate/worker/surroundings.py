"""What a step may change of the process it runs in, put back for the next one, which may be of another DAG."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Final

# Not those that headgate sets itself, nor those that nobody can set.
_KEPT: Final = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL, signal.SIGSTOP}
_HANDLED: Final = sorted(signal.valid_signals() - _KEPT)


class Surroundings:
    """The working directory, environment, search path, umask and handlers of signals, as they are now."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._environment = dict(os.environ)
        self._path = list(sys.path)
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._handlers = {number: signal.getsignal(number) for number in _HANDLED}

    def restore(self) -> None:
        """Put back what has changed."""
        with contextlib.suppress(OSError):  # the folder may be gone; then nothing can be done, and few will notice
            os.chdir(self._folder)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        if sys.path != self._path:
            sys.path[:] = self._path
        os.umask(self._umask)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm of the last step's would ring in the next one
        for number, handler in self._handlers.items():
            if signal.getsignal(number) != handler:
                with contextlib.suppress(OSError, TypeError, ValueError):
                    signal.signal(number, handler)
