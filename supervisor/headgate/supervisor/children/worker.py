"""One worker process: its greeting, the deadlines by which it is killed, and a pause between starts that fail."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from headgate.protocol.link.connection import Connection
from headgate.protocol.link.wire import Role
from headgate.protocol.link.worker_dialect import WorkerDialect
from headgate.protocol.messages.queries import Request
from headgate.protocol.messages.runner import PROTOCOL_VERSION
from headgate.protocol.messages.worker import (
    STEP_LINE,
    FromWorker,
    StepLoaded,
    StepsReturned,
    ToWorker,
    WorkerHello,
    WorkerSettings,
    WorkerWelcome,
)
from headgate.supervisor.backoff import Backoff
from headgate.supervisor.children.link import WorkerLink
from headgate.supervisor.children.process import ChildProcess
from headgate.supervisor.children.watched import ChildOwner, WatchedChild

log = structlog.get_logger(__name__)

START_S_MAX: Final = 60.0  # from the start of a process to its hello: its imports, on a machine that is busy
STACKS_WAIT_S: Final = 0.5  # for a process to write its stacks before it is killed
LINK_LOST_GRACE_S: Final = 1.0  # a worker that closed its link by exiting is gone by then
RETIRE_GRACE_S: Final = 10.0  # an idle worker leaves at once, unless a thread of a step hangs in C code
START_FAILURES_MAX: Final = 5  # in a row; then the work that waits for a worker fails rather than waits
RESPAWN_WAIT_S: Final = 0.5  # after the first worker that died before it was ready
RESPAWN_WAIT_MAX_S: Final = 30.0

SpawnWorker = Callable[[], ChildProcess]


class WorkerOwner(ChildOwner[FromWorker], Protocol):
    """Gives work to workers."""

    def worker_ready(self, pid: int) -> None:
        """The worker has said hello, and can be given work."""
        ...

    def worker_prints(self, pid: int, token: str) -> None:
        """The worker has begun this step: all output that follows is of it."""
        ...


class Worker(WatchedChild[ToWorker, FromWorker]):
    """A worker, killed at ``kill_at`` for ``kill_reason`` unless it has ended by then; infinity is never."""

    def __init__(
        self,
        process: ChildProcess,
        selector: selectors.BaseSelector,
        owner: WorkerOwner,
        settings: WorkerSettings,
        clock: Callable[[], float],
    ) -> None:
        self._dialect = WorkerDialect()
        connection = Connection(self._dialect, Role.SUPERVISOR, frame_bytes_max=settings.frame_bytes_max)
        super().__init__(process, WorkerLink(process.frames, connection, "worker"), selector, owner)
        self.is_ready = False
        self.kill_at = clock() + START_S_MAX
        self.kill_reason = f"it did not say hello within {START_S_MAX:g} s"
        self._workers_owner = owner
        self._clock = clock
        self._settings = settings
        self._stacks_asked = False

    def is_open(self, request_id: int) -> bool:
        """Whether the worker's request of this id waits for its response."""
        return not self.link.is_ended and self._dialect.is_open(request_id)

    @property
    def is_free(self) -> bool:
        """Whether it has said hello and is still there."""
        return self.is_ready and not self.is_ended and not self.link.is_ended and not self.process.has_died()

    def retire(self) -> None:
        """Have an idle worker leave because it is not needed any more."""
        self.link.close_sending()
        self.kill_by(self._clock() + RETIRE_GRACE_S, "it did not leave when its link was closed")

    def kill_by(self, kill_at: float, reason: str) -> None:
        """Have it killed at ``kill_at``, unless it ends or is to be killed before."""
        if kill_at < self.kill_at:
            self.kill_at, self.kill_reason, self._stacks_asked = kill_at, reason, False

    def spare(self) -> None:
        """Cancel all deadlines by which it is to be killed."""
        self.kill_at = float("inf")

    def tick(self, now: float) -> None:
        """Kill it if its time is over. First it is asked for its stacks, which show where it was."""
        if self.is_ended or now < self.kill_at:
            return
        if not self._stacks_asked and self.is_ready:
            self._stacks_asked = True
            self.process.dump_stacks()
            self.kill_at = now + STACKS_WAIT_S
        else:
            self.kill_at = float("inf")
            self.process.kill(self.kill_reason)

    def _handle_message(self, message: FromWorker) -> None:
        if isinstance(message, WorkerHello):
            self.is_ready = True
            self.kill_at = float("inf")
            self.send(WorkerWelcome(PROTOCOL_VERSION, self._settings))
            self._workers_owner.worker_ready(self.pid)
            return
        if not isinstance(message, Request | StepLoaded | StepsReturned):
            # All output was written before the message was: every line belongs to the work that has just ended.
            self.read_empty()
        super()._handle_message(message)

    def _print(self, line: bytes) -> None:
        # What the last step has printed without an end of line stands before it.
        before, found, token = line.rpartition(STEP_LINE)
        if not found:
            super()._print(line)
            return
        if before:
            super()._print(before)
        self._workers_owner.worker_prints(self.pid, token.decode(errors="replace").strip())

    def _handle_closed_link(self) -> None:
        self.kill_by(self._clock() + LINK_LOST_GRACE_S, "it has closed its link")


class WorkerStarter:
    """Starts workers for their owner, and pauses until ``start_at`` after one that did not become ready."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        spawn: SpawnWorker,
        owner: WorkerOwner,
        settings: WorkerSettings,
        clock: Callable[[], float],
    ) -> None:
        self._selector = selector
        self._spawn = spawn
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self._backoff = Backoff(RESPAWN_WAIT_S, RESPAWN_WAIT_MAX_S)
        self.start_at = 0.0

    @property
    def failures(self) -> int:
        """How many starts in a row have failed."""
        return self._backoff.failures

    def start(self) -> Worker:
        """Start a worker. Raises `OSError`, which counts as a failure."""
        try:
            process = self._spawn()
        except OSError as error:
            # No memory, no descriptors: the cause of the last worker's death may prevent the next start.
            log.error("no worker can be started", error=str(error), next_in_s=self._pause())
            raise
        return Worker(process, self._selector, self._owner, self._settings, self._clock)

    def succeeded(self) -> None:
        """A worker has become ready."""
        self._backoff.succeed()

    def failed(self, pid: int, explanation: str) -> None:
        """A worker has died before it was ready."""
        log.error("a worker died before it was ready", pid=pid, how=explanation, next_in_s=self._pause())

    def _pause(self) -> float:
        wait_s = self._backoff.fail()
        self.start_at = self._clock() + wait_s
        return round(wait_s, 1)
