"""Signals of the supervisor that stop the running step, and with it the process.

SIGTERM stops the step because its time limit is over or headgate shuts down. SIGUSR2 stops it because a user acted on
the task; only then the task's ``on_kill()`` is called as well (I14).

The step is stopped by `StepStopped`, raised in the main thread, so that the author's ``finally`` blocks run. It is
raised once in the life of a process, and only within `Stops.interruptible`, so that a frame or a record is written
whole or not at all. If the step catches it and continues, the supervisor kills the process after a grace period.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import structlog

log = structlog.get_logger(__name__)

END_SIGNAL: Final = signal.SIGTERM
USER_SIGNAL: Final = signal.SIGUSR2


class StepStopped(KeyboardInterrupt):
    """The step must stop now. A `KeyboardInterrupt`, so that ``except Exception`` does not catch it."""


class Stops:
    """The signals of this process. All methods except `notice` are for the main thread."""

    def __init__(self) -> None:
        self._is_open = False
        self._is_raised = False
        self._on_kill: Callable[[], None] | None = None
        # Held while on_kill is set and taken. Reentrant, because a signal handler may interrupt the main thread there.
        self._lock = threading.RLock()
        self._hook: threading.Thread | None = None
        self.is_asked = False
        self.is_by_user = False  # a user, or a signal, has ended the task
        self.hook_timeout_s = 10.0

    def listen(self, wakeup_fd: int) -> None:
        """Handle the signals from now on. ``wakeup_fd`` gets their numbers even while the main thread is busy."""
        os.set_blocking(wakeup_fd, False)
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        # A process that a step forks has the default handlers.
        os.register_at_fork(after_in_child=_forget_signals)
        self.restore()

    def restore(self) -> None:
        """Install the handlers again if a step has changed them."""
        for number in (END_SIGNAL, USER_SIGNAL):
            if signal.getsignal(number) != self._handle:
                signal.signal(number, self._handle)

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Allow `StepStopped` to be raised in the block; at once, if the signal has arrived before."""
        self._is_open = True
        try:
            self._raise_if_asked()
            yield
        finally:
            self._is_open = False

    @contextmanager
    def held(self) -> Generator[None]:
        """Delay `StepStopped` until the end of the block. Does nothing in other threads."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = before
        if before:
            self._raise_if_asked()

    @contextmanager
    def killing(self, on_kill: Callable[[], None]) -> Generator[None]:
        """Call ``on_kill`` if a user stops the task during the block."""
        context = contextvars.copy_context()
        with self._lock:
            self._on_kill = lambda: context.run(on_kill)
        try:
            yield
        finally:
            with self._lock:
                self._on_kill = None

    def notice(self, number: int) -> None:
        """Act on a signal number; also called in another thread, because the main thread may be stuck.

        The hook has its own thread: it may send queries, whose results arrive in the caller's thread.
        """
        if number != USER_SIGNAL:
            return
        with self._lock:
            on_kill, self._on_kill = self._on_kill, None
            if on_kill is not None:
                self._hook = threading.Thread(target=_call, args=(on_kill,), name="on_kill", daemon=True)
                self._hook.start()

    def wait_hook(self) -> None:
        """Wait for a running on_kill, within its time limit."""
        with self._lock:
            hook = self._hook
        if hook is None:
            return
        hook.join(self.hook_timeout_s)
        if hook.is_alive():
            log.error("a hook took too long", hook="on_kill", timeout_s=self.hook_timeout_s)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.is_asked = True
        self.is_by_user |= number == USER_SIGNAL
        self.notice(number)
        if self._is_open:
            self._raise_if_asked()

    def _raise_if_asked(self) -> None:
        if self.is_asked and not self._is_raised:
            self._is_raised = True
            # The step waits while its on_kill runs, which may need resources that the step's `finally` blocks close.
            self.wait_hook()
            raise StepStopped


def place_of(error: BaseException, file: str) -> str:
    """Return the innermost line of a DAG file at which an error was raised, or of any file if it was outside."""
    # Behind the line are those of the handler of the operating system's signal.
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    frame = next((one for one in reversed(frames) if one.filename == os.path.abspath(file)), frames[-1])
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (END_SIGNAL, USER_SIGNAL):
        signal.signal(number, signal.SIG_DFL)


def _call(on_kill: Callable[[], None]) -> None:
    try:
        on_kill()
    except BaseException:  # the process ends in any case
        log.exception("a hook failed", hook="on_kill")
