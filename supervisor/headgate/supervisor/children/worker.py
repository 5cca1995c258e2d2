"""One worker process, watched by the supervisor's selector; what it is used for is its owner's affair."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import structlog

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.workconnection import WorkConnection
from headgate.protocol.link.worksession import WorkRole
from headgate.protocol.messages.runner import FRAME_BYTES_MAX
from headgate.protocol.messages.worker import (
    WORK_PROTOCOL_VERSION,
    FileParsed,
    Request,
    StepEnded,
    ToWorker,
    WorkerHello,
    WorkerSettings,
    WorkerWelcome,
)
from headgate.supervisor.children.child import ChildProcess, LineReader
from headgate.supervisor.children.link import WorkerLink

log = structlog.get_logger(__name__)

START_S_MAX = 60.0  # from the start of a process to its hello: its imports, on a machine that is busy
STACKS_WAIT_S = 0.5  # for a process to write its stacks before it is killed
LINK_LOST_GRACE_S = 1.0  # a worker that has closed its link is gone by then, or it was not the worker's doing
RETIRE_GRACE_S = 10.0  # an idle worker leaves at once, unless a thread of a step's hangs in C code
FINAL_READS_MAX = 1024  # reads to empty the socket of a worker that is gone

_decode_record = msgspec.json.Decoder(dict[str, object]).decode

Work = StepEnded | FileParsed | Request


class WorkerChild(ChildProcess):
    """A worker as a process, and its link."""

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        frame_bytes_max: int = FRAME_BYTES_MAX,
        hide: Callable[[bytes], bytes] = bytes,
    ) -> None:
        super().__init__("headgate.worker", (), environment, hide=hide)
        self.link = WorkerLink(self.frames, WorkConnection(WorkRole.SUPERVISOR, frame_bytes_max=frame_bytes_max))

    def close(self) -> None:
        """Close all descriptors."""
        self.link.close()
        super().close()


class Owner(Protocol):
    """Who is told what a worker says and how it ends."""

    def worker_ready(self, worker: Worker) -> None:
        """It has said hello, and can be given work."""
        ...

    def worker_said(self, worker: Worker, message: Work) -> None: ...

    def worker_logged(self, worker: Worker, record: dict[str, Any]) -> None: ...

    def worker_printed(self, worker: Worker, line: bytes) -> None: ...

    def worker_ended(self, worker: Worker, explanation: str) -> None:
        """It is reaped; all it said was told before. ``explanation`` goes on from "the worker ...": how it ended."""
        ...


class Worker:
    """A worker that is registered with the selector until it has ended, and then told to its owner.

    ``kill_at`` is when it is killed if it has not ended by then, for ``kill_reason``; infinity is never.
    """

    def __init__(
        self,
        child: WorkerChild,
        selector: selectors.BaseSelector,
        owner: Owner,
        settings: WorkerSettings,
        clock: Callable[[], float],
    ) -> None:
        self.child = child
        self.pid = child.pid
        self.is_ready = False
        self.is_ended = False
        self.kill_at = clock() + START_S_MAX
        self.kill_reason = f"it did not say hello within {START_S_MAX:g} s"
        self._owner = owner
        self._clock = clock
        self._selector = selector
        self._settings = settings
        self._stacks_asked = False
        self._events = selectors.EVENT_READ
        selector.register(child.link, self._events, self._on_frames)
        selector.register(child.output, selectors.EVENT_READ, self._on_output)
        selector.register(child.records, selectors.EVENT_READ, self._on_records)
        selector.register(child.pidfd, selectors.EVENT_READ, self._on_end)

    @property
    def is_free(self) -> bool:
        """Whether it has said hello and is still there."""
        return self.is_ready and not self.is_ended and not self.child.link.is_ended and not self.child.has_died()

    # --- what the owner does with it --------------------------------------------------------------

    def send(self, message: ToWorker) -> None:
        """Send a message. Raises `LocalProtocolError` for one that cannot be sent."""
        try:
            self.child.link.send(message)
        except RemoteProtocolError as error:
            self.child.kill(str(error))
        self._watch_writing()

    def retire(self) -> None:
        """Have it leave, as it is not needed any more; it must be idle."""
        self.child.link.close_sending()
        self.kill_by(self._clock() + RETIRE_GRACE_S, "it did not leave when its link was closed")

    def kill_by(self, kill_at: float, reason: str) -> None:
        """Have it killed at ``kill_at``, unless it has ended by then or is to be killed before."""
        if kill_at < self.kill_at:
            self.kill_at, self.kill_reason, self._stacks_asked = kill_at, reason, False

    def tick(self, now: float) -> None:
        """Kill it, if it is time to: first its stacks are asked for, so that it is seen where it was."""
        if self.is_ended or now < self.kill_at:
            return
        if not self._stacks_asked and self.is_ready:
            self._stacks_asked = True
            self.child.dump_stacks()
            self.kill_at = now + STACKS_WAIT_S
        else:
            self.kill_at = float("inf")
            self.child.kill(self.kill_reason)

    def read_empty(self) -> None:
        """Take in what it has printed and logged by now."""
        if not self.child.output.is_ended:
            for line in self.child.output.read_empty():
                self._print(line)
            self._forget_ended(self.child.output)
        if not self.child.records.is_ended:
            for line in self.child.records.read_empty():
                self._log(line)
            self._forget_ended(self.child.records)

    def destroy(self) -> None:
        """Kill it now and leave nothing of it behind; the owner is not told."""
        if self.is_ended:
            return
        self._unregister()
        self.child.kill("the supervisor leaves")
        self.child.reap()
        self.child.close()

    # --- what the selector calls ------------------------------------------------------------------

    def _on_frames(self) -> None:
        link = self.child.link
        if link.is_ended:
            return
        link.flush()
        for message in link.receive():
            self._take(message)
        if link.error is not None and not link.is_ended:
            link.is_ended = True
            self.child.kill(f"it broke the protocol: {link.error}")
        if link.is_ended:
            self._selector.unregister(link)
            self.kill_by(self._clock() + LINK_LOST_GRACE_S, "it has closed its link")
        else:
            self._watch_writing()

    def _on_output(self) -> None:
        if self.child.output.is_ended:
            return
        for line in self.child.output.read():
            self._print(line)
        self._forget_ended(self.child.output)

    def _on_records(self) -> None:
        if self.child.records.is_ended:
            return
        for line in self.child.records.read():
            self._log(line)
        self._forget_ended(self.child.records)

    def _on_end(self) -> None:
        """The process is gone. First take in all it said, then tell its owner."""
        if self.is_ended:
            return
        self.is_ended = True
        for _ in range(FINAL_READS_MAX):
            if self.child.link.is_ended:
                break
            self._on_frames()
        self.read_empty()
        self._unregister()
        explanation = self.child.reap()
        self.child.close()
        self._owner.worker_ended(self, explanation)

    # --- what it says -----------------------------------------------------------------------------

    def _take(self, message: WorkerHello | Work) -> None:
        if isinstance(message, WorkerHello):
            self.is_ready = True
            self.kill_at = float("inf")
            self.send(WorkerWelcome(WORK_PROTOCOL_VERSION, self._settings))
            self._owner.worker_ready(self)
            return
        if not isinstance(message, Request):
            # All of it was written before the message was: every line belongs to what has just ended.
            self.read_empty()
        self._owner.worker_said(self, message)

    def _print(self, line: bytes) -> None:
        self.child.note_output(line)
        self._owner.worker_printed(self, line)

    def _log(self, line: bytes) -> None:
        try:
            record = _decode_record(line)
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors, as is bad UTF-8
            self._print(line)
        else:
            self._owner.worker_logged(self, record)

    # --- the selector -----------------------------------------------------------------------------

    def _watch_writing(self) -> None:
        """Wake for writing while something is unsent."""
        link = self.child.link
        if link.is_ended:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(link, events, self._on_frames)

    def _forget_ended(self, source: LineReader) -> None:
        if source.is_ended:
            self._selector.unregister(source)

    def _unregister(self) -> None:
        self.is_ended = True
        for source in (self.child.link, self.child.output, self.child.records):
            if not source.is_ended:
                self._selector.unregister(source)
        self._selector.unregister(self.child.pidfd)
