"""The loop. It waits for something to happen, tells the core, and does what the core says.

One thread, one selector. Whatever may block is elsewhere: the sockets and pipes are non-blocking, signal
handlers only enqueue, and the core does one bounded piece of work a turn.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import assert_never

import msgspec
import structlog

from headgate.protocol import marks
from headgate.protocol.errors import RemoteProtocolError
from headgate.supervisor.children.child import Child
from headgate.supervisor.commands import Command, DumpStacks, Exit, Kill, Send, Spawn
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.logs.logs import relay
from headgate.supervisor.logs.task_logs import LEVELS_FOR_ALL, TaskLogs

log = structlog.get_logger(__name__)

WAIT_MAX_S = 60.0  # the loop comes round at least this often
STATISTICS_INTERVAL_S = 60.0  # between two lines that say what the runner uses
FINAL_READS_MAX = 1024  # reads to empty the sockets of a runner that is gone

_decode_record = msgspec.json.Decoder(dict[str, object]).decode


class Arbiter:
    """Runs a core against real processes, sockets and signals."""

    def __init__(
        self,
        core: SupervisorCore,
        spawn: Callable[[int], Child],
        *,
        task_logs: TaskLogs | None = None,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """``selector`` may have descriptors of others on it already, each with what to call when it is ready."""
        self._core = core
        self._task_logs = task_logs
        self._spawn = spawn
        self._selector = selector or selectors.DefaultSelector()
        self._signals: deque[int] = deque()
        self._child: Child | None = None
        self._exit: Exit | None = None
        self._writing = False
        self._statistics_at = 0.0

    def run(self) -> int:
        """Run until the core says exit; return the exit code. SIGTERM and SIGINT drain, a second one kills."""
        with self._listening_to_signals():
            while self._exit is None:
                wait_s = min(self._core.wake_at() - time.monotonic(), WAIT_MAX_S)
                for key, _ in self._selector.select(max(0.0, wait_s)):
                    key.data()
                while self._signals:
                    self._handle_signal(self._signals.popleft())
                for command in self._core.step(time.monotonic()):
                    self._handle_command(command)
                self._watch_child()
        log.info("leaving", code=self._exit.code, reason=self._exit.reason)
        self._end_child()
        return self._exit.code

    def _handle_command(self, command: Command) -> None:
        match command:
            case Spawn():
                self._handle_spawn(command)
            case Send() if self._child is not None:
                try:
                    self._child.link.send(command.message)
                except RemoteProtocolError as exc:
                    self._core.protocol_failed(exc)
            case DumpStacks() if self._child is not None:
                self._child.dump_stacks()
            case Kill() if self._child is not None:
                log.warning("killing the runner", pid=self._child.pid, reason=command.reason)
                self._child.kill(command.reason)
            case Send() | DumpStacks() | Kill():
                pass  # the runner it was meant for is gone
            case Exit():
                self._exit = command
            case _:
                assert_never(command)

    # --- the child --------------------------------------------------------------------------------

    def _handle_spawn(self, command: Spawn) -> None:
        assert self._child is None, "one runner at a time"
        marks.reach("arbiter.before_spawn")
        try:
            self._child = child = self._spawn(command.incarnation)
        except OSError as exc:
            # No memory, no descriptors: what killed the last runner may be what keeps the next one from coming.
            self._core.runner_ended(command.incarnation, f"could not be started: {exc}", time.monotonic())
            return
        marks.reach("arbiter.spawned")
        log.info("started a runner", pid=child.pid, incarnation=child.incarnation)
        self._selector.register(child.link, selectors.EVENT_READ, self._on_frames)
        self._selector.register(child.output, selectors.EVENT_READ, self._on_output)
        self._selector.register(child.records, selectors.EVENT_READ, self._on_records)
        self._selector.register(child.pidfd, selectors.EVENT_READ, self._on_end)
        self._statistics_at = time.monotonic() + STATISTICS_INTERVAL_S

    def _on_frames(self) -> None:
        child = self._child
        if child is None:
            return
        child.link.flush()
        try:
            for message in child.link.receive():
                self._core.receive(child.incarnation, message, time.monotonic())
            error = child.link.error
        except RemoteProtocolError as exc:  # the core's own opinion of a message
            error = exc
        if error is not None:
            child.link.is_ended = True
            self._core.protocol_failed(error)
        if child.link.is_ended:
            self._selector.unregister(child.link)

    def _on_output(self) -> None:
        child = self._child
        if child is None:
            return
        for line in child.output.read():
            log.warning("output of the runner", line=child.note_output(line), incarnation=child.incarnation)
        if child.output.is_ended:
            self._selector.unregister(child.output)

    def _on_records(self) -> None:
        child = self._child
        if child is None:
            return
        for line in child.records.read():
            try:
                self._handle_record(_decode_record(line) | {"incarnation": child.incarnation})
            except (ValueError, RecursionError):  # msgspec's errors are ValueErrors, as is bad UTF-8
                log.warning("output of the runner", line=child.note_output(line), incarnation=child.incarnation)
        if child.records.is_ended:
            self._selector.unregister(child.records)

    def _handle_record(self, record: dict[str, object]) -> None:
        """What a trigger logs belongs in the log of the task that waits for it; here it is read from warnings on."""
        trigger_id = record.get("trigger_id")
        task = self._core.assignments.task_of(trigger_id) if isinstance(trigger_id, int) else None
        if task is None or self._task_logs is None:
            relay(record)
            return
        self._task_logs.write(task, record, source="trigger")
        if record.get("level") in LEVELS_FOR_ALL:
            relay(record)

    def _on_end(self) -> None:
        """The process is gone. First take in all it said, then let the core decide what follows."""
        child = self._child
        if child is None:
            return
        for source, read in (
            (child.link, self._on_frames),
            (child.output, self._on_output),
            (child.records, self._on_records),
        ):
            reads = 0
            while not source.is_ended and reads < FINAL_READS_MAX:
                read()
                reads += 1
            if not source.is_ended:
                self._selector.unregister(source)
        self._selector.unregister(child.pidfd)
        explanation = child.reap()
        child.close()
        self._child = None
        self._writing = False
        marks.reach("arbiter.reaped")
        gave_up = child.returncode is not None and child.returncode > 0
        self._core.runner_ended(child.incarnation, explanation, time.monotonic(), gave_up=gave_up)

    def _watch_child(self) -> None:
        """Wake for writing while something is unsent; now and then say what the runner uses."""
        child = self._child
        if child is None or child.link.is_ended:
            return
        if child.link.has_unsent is not self._writing:
            self._writing = child.link.has_unsent
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(child.link, events, self._on_frames)
        if time.monotonic() >= self._statistics_at:
            self._statistics_at = time.monotonic() + STATISTICS_INTERVAL_S
            statistics = child.statistics()
            if statistics is not None:
                log.info(
                    "the runner uses",
                    rss_mib=round(statistics.rss_bytes / 2**20, 1),
                    cpu_s=round(statistics.cpu_s, 1),
                    triggers=self._core.assignments.running(),
                )

    def _end_child(self) -> None:
        """Leave no process behind."""
        if self._child is not None:
            self._child.kill("the supervisor leaves")
            self._child.reap()
            self._child.close()
            self._child = None

    # --- signals ----------------------------------------------------------------------------------

    def _listening_to_signals(self) -> _Signals:
        return _Signals(self._selector, self._signals)

    def _handle_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._core.is_leaving:
            self._core.stop_now(f"{name} came a second time")
        else:
            log.info("asked to stop", signal=name)
            self._core.drain(time.monotonic())


class _Signals:
    """SIGTERM and SIGINT, enqueued by their handlers; the wake-up descriptor interrupts the selector."""

    def __init__(self, selector: selectors.BaseSelector, queue: deque[int]) -> None:
        self._selector = selector
        self._queue = queue

    def __enter__(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end.fileno())
        self._selector.register(self._read_end, selectors.EVENT_READ, self._on_wakeup)
        self._before = {number: signal.signal(number, self._enqueue) for number in (signal.SIGTERM, signal.SIGINT)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._selector.unregister(self._read_end)
        self._read_end.close()
        self._write_end.close()

    def _enqueue(self, number: int, _frame: FrameType | None) -> None:
        self._queue.append(number)

    def _on_wakeup(self) -> None:
        self._read_end.recv(4096)
