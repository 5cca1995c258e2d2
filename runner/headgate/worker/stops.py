"""Being ended: signals of the supervisor that end the step that runs, and with it the process.

SIGTERM ends the step: its limit of time is over, or headgate leaves. SIGUSR2 ends it because a user said so; then, and
only then, the task's ``on_kill()`` is called as well (I14).

The step is ended by `StepStopped`, raised in the main thread wherever it is, so that the author's ``finally`` blocks
run. It is raised once in the life of a process, and nowhere but where `Stops.interruptible` says: a frame or a record
is written whole, or not at all. Whoever catches it and goes on is killed by the supervisor after a grace.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import structlog

log = structlog.get_logger(__name__)

END_SIGNAL: Final = signal.SIGTERM
USER_SIGNAL: Final = signal.SIGUSR2


class StepStopped(KeyboardInterrupt):
    """The step is to end now. It is an interrupt, so that no ``except Exception`` takes it for an error of its own."""


class Stops:
    """The signals of this process. All but `notice` is for the main thread."""

    def __init__(self) -> None:
        self._is_open = False
        self._is_raised = False
        self._on_kill: Callable[[], None] | None = None
        # Held where on_kill is set and taken; by the main thread a second time, where a signal finds it doing so.
        self._lock = threading.RLock()
        self._hook: threading.Thread | None = None
        self.is_asked = False
        self.hook_timeout_s = 10.0

    def listen(self, wakeup_fd: int) -> None:
        """Take the signals from now on. The kernel's word reaches ``wakeup_fd`` even while the main thread is busy."""
        os.set_blocking(wakeup_fd, False)
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        # A process that a step forks is ended as any other, and what is sent to it is nothing to us.
        os.register_at_fork(after_in_child=_forget_signals)
        self.restore()

    def restore(self) -> None:
        """Take the signals again, whatever a step has made of their handlers."""
        for number in (END_SIGNAL, USER_SIGNAL):
            if signal.getsignal(number) != self._handle:
                signal.signal(number, self._handle)

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Let `StepStopped` be raised meanwhile; at once, if the signal has come before."""
        self._is_open = True
        try:
            self._raise_if_asked()
            yield
        finally:
            self._is_open = False

    @contextmanager
    def held(self) -> Generator[None]:
        """Let nothing be raised meanwhile; where it was to be, it is afterwards. Does nothing in other threads."""
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
        """Have ``on_kill`` called if a user ends what runs meanwhile."""
        context = contextvars.copy_context()
        with self._lock:
            self._on_kill = lambda: context.run(on_kill)
        try:
            yield
        finally:
            with self._lock:
                self._on_kill = None

    def notice(self, number: int) -> None:
        """Take a signal as the kernel told it; called beside the main thread as well, which may be stuck.

        The hook has a thread of its own: it may ask the supervisor, whose answer comes through the caller's.
        """
        if number != USER_SIGNAL:
            return
        with self._lock:
            on_kill, self._on_kill = self._on_kill, None
            if on_kill is not None:
                self._hook = threading.Thread(target=_call, args=(on_kill,), name="on_kill", daemon=True)
                self._hook.start()

    def wait_hook(self) -> None:
        """Wait for an on_kill that runs, as long as it may take."""
        with self._lock:
            hook = self._hook
        if hook is None:
            return
        hook.join(self.hook_timeout_s)
        if hook.is_alive():
            log.error("a hook took too long", hook="on_kill", timeout_s=self.hook_timeout_s)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.is_asked = True
        self.notice(number)
        if self._is_open:
            self._raise_if_asked()

    def _raise_if_asked(self) -> None:
        if self.is_asked and not self._is_raised:
            self._is_raised = True
            # The step stands still while its on_kill runs: it needs what the step's `finally` blocks will close.
            self.wait_hook()
            raise StepStopped


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (END_SIGNAL, USER_SIGNAL):
        signal.signal(number, signal.SIG_DFL)


def _call(on_kill: Callable[[], None]) -> None:
    try:
        on_kill()
    except BaseException:  # whatever an author's hook raises, the process ends as it was to
        log.exception("a hook failed", hook="on_kill")
