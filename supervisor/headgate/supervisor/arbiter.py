"""The supervisor's loop: it waits for events, passes them to the core, and carries out the core's commands.

One thread, one selector. Nothing in it blocks: the sockets and pipes are non-blocking, signal handlers only enqueue,
and the core does one bounded piece of work in each turn.
"""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, assert_never

import structlog

from headgate.protocol import marks
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.messages.runner import FromRunner, FromSupervisor
from headgate.supervisor.children.link import RunnerLink
from headgate.supervisor.children.process import ChildProcess, ChildStatistics
from headgate.supervisor.children.watched import WatchedChild
from headgate.supervisor.commands import Command, DumpStacks, Exit, Kill, Send, Spawn
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.logs.process_log import relay
from headgate.supervisor.logs.task_logs import LEVELS_FOR_ALL, TaskLogs
from headgate.supervisor.reporting import Reporter

log = structlog.get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
WAIT_MAX_S = 60.0  # the longest turn of the loop
STATISTICS_INTERVAL_S = 60.0  # between two records of the runner's memory and CPU time


class Arbiter:
    """Runs a core against real processes, sockets and signals. Owner of the runner: see `ChildOwner`."""

    def __init__(
        self,
        core: SupervisorCore,
        spawn: Callable[[int], ChildProcess],
        link_of: Callable[[socket.socket, int], RunnerLink],
        *,
        task_logs: TaskLogs | None = None,
        selector: selectors.BaseSelector | None = None,
        bell: int | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        """``spawn`` starts the runner of an incarnation, ``link_of`` makes its link.

        ``bell`` is a descriptor that is readable when others have written to the database. Other parts may have
        registered descriptors with ``selector``, each with a function that is called when it is ready.
        """
        self._core = core
        self._task_logs = task_logs
        self._spawn = spawn
        self._link_of = link_of
        self._selector = selector or selectors.DefaultSelector()
        self._bell = bell
        self._reporter = reporter
        self._is_listening = False
        self._signals: deque[int] = deque()
        self._runner: _WatchedRunner | None = None
        self._incarnation = 0
        self._exit: Exit | None = None
        self._statistics_at = 0.0

    def run(self) -> int:
        """Run until the core decides to exit; return the exit code. SIGTERM and SIGINT drain, a second one kills."""
        with _Signals(self._selector, self._signals):
            while self._exit is None:
                self._listen(self._core.is_listening)
                wake_at = min(self._core.wake_at(), math.inf if self._reporter is None else self._reporter.wake_at())
                wait_s = min(wake_at - time.monotonic(), WAIT_MAX_S)
                ready = self._selector.select(max(0.0, wait_s))
                if self._reporter is not None:
                    self._reporter.turn_began()
                for key, _ in ready:
                    key.data()
                while self._signals:
                    self._handle_signal(self._signals.popleft())
                if self._exit is not None:
                    break  # a step may wait for a database that hangs
                for command in self._core.step(time.monotonic()):
                    self._handle_command(command)
                self._log_statistics()
                if self._reporter is not None:
                    self._reporter.turn_ended(self._statistics)
        log.info("leaving", code=self._exit.code, reason=self._exit.reason)
        if self._runner is not None:
            self._runner.destroy()
        return self._exit.code

    def _listen(self, wanted: bool) -> None:
        """Be woken by the bell, or not: the step that follows each turn hears by itself whether it has rung."""
        if self._bell is None or wanted == self._is_listening:
            return
        self._is_listening = wanted
        if wanted:
            self._selector.register(self._bell, selectors.EVENT_READ, lambda: None)
        else:
            self._selector.unregister(self._bell)

    def _handle_command(self, command: Command) -> None:
        match command:
            case Spawn():
                self._handle_spawn(command)
            case Send() if self._runner is not None:
                self._runner.send(command.message)
            case DumpStacks() if self._runner is not None:
                self._runner.process.dump_stacks()
            case Kill() if self._runner is not None:
                log.warning("killing the runner", pid=self._runner.pid, reason=command.reason)
                self._runner.process.kill(command.reason)
            case Send() | DumpStacks() | Kill():
                pass  # the runner has ended meanwhile
            case Exit():
                self._exit = command
            case _:
                assert_never(command)

    # --- the runner (`ChildOwner`) ----------------------------------------------------------------

    def _handle_spawn(self, command: Spawn) -> None:
        assert self._runner is None, "one runner at a time"
        marks.reach("arbiter.before_spawn")
        try:
            process = self._spawn(command.incarnation)
        except OSError as exc:
            # No memory, no descriptors: the cause of the last runner's death may prevent the next start.
            self._core.runner_ended(command.incarnation, f"could not be started: {exc}", time.monotonic())
            return
        marks.reach("arbiter.spawned")
        log.info("started a runner", pid=process.pid, incarnation=command.incarnation)
        self._incarnation = command.incarnation
        self._runner = _WatchedRunner(process, self._link_of(process.frames, command.incarnation), self._selector, self)
        self._statistics_at = time.monotonic() + STATISTICS_INTERVAL_S

    def child_said(self, pid: int, message: FromRunner) -> None:
        """Pass a message on."""
        self._core.receive(self._incarnation, message, time.monotonic())

    def child_printed(self, pid: int, line: str) -> None:
        """Log a line of output."""
        log.warning("output of the runner", line=line, incarnation=self._incarnation)

    def child_logged(self, pid: int, record: dict[str, Any]) -> None:
        """Write the record of a trigger to the log of the task that waits for it; warnings and errors also to ours."""
        record["incarnation"] = self._incarnation
        trigger_id = record.get("trigger_id")
        task = self._core.assignments.task_of(trigger_id) if isinstance(trigger_id, int) else None
        if task is None or self._task_logs is None:
            relay(record)
            return
        self._task_logs.write(task, record, source="trigger")
        if record.get("level") in LEVELS_FOR_ALL:
            relay(record)

    def child_broke_protocol(self, pid: int, error: RemoteProtocolError) -> None:
        """Let the core decide."""
        self._core.protocol_failed(error)

    def runner_closed_link(self) -> None:
        """Let the core decide."""
        self._core.runner.link_closed(time.monotonic())

    def child_ended(self, pid: int, explanation: str) -> None:
        """Report the end to the core."""
        assert self._runner is not None
        process, self._runner = self._runner.process, None
        marks.reach("arbiter.reaped")
        self._core.runner_ended(
            self._incarnation,
            explanation,
            time.monotonic(),
            gave_up=process.returncode is not None and process.returncode > 0,
            ended_itself=process.ended_itself,
            record=process.last_record,
        )

    def _log_statistics(self) -> None:
        if self._runner is None or time.monotonic() < self._statistics_at:
            return
        self._statistics_at = time.monotonic() + STATISTICS_INTERVAL_S
        statistics = self._statistics()
        if statistics is not None:
            log.info(
                "the runner uses",
                rss_mib=round(statistics.rss_bytes / 2**20, 1),
                cpu_s=round(statistics.cpu_s, 1),
                triggers=self._core.assignments.running(),
            )

    def _statistics(self) -> ChildStatistics | None:
        return None if self._runner is None else self._runner.process.statistics()

    # --- signals ----------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._core.is_leaving:
            for command in self._core.stop_now(f"{name} came a second time"):
                self._handle_command(command)
        else:
            log.info("asked to stop", signal=name)
            self._core.drain(time.monotonic())


class _WatchedRunner(WatchedChild[FromSupervisor, FromRunner]):
    """The runner: nothing more can come from one that has closed its link, and it should end."""

    def __init__(
        self, process: ChildProcess, link: RunnerLink, selector: selectors.BaseSelector, arbiter: Arbiter
    ) -> None:
        super().__init__(process, link, selector, arbiter)
        self._arbiter = arbiter

    def _handle_closed_link(self) -> None:
        if not self.is_ended:
            self._arbiter.runner_closed_link()


class _Signals:
    """In the block, the handlers of SIGTERM and SIGINT enqueue the signal, and a descriptor wakes the selector.

    After the block both are ignored: the process ends with the exit code that is decided by then.
    """

    def __init__(self, selector: selectors.BaseSelector, queue: deque[int]) -> None:
        self._selector = selector
        self._queue = queue

    def __enter__(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        signal.set_wakeup_fd(self._write_end.fileno())
        self._selector.register(self._read_end, selectors.EVENT_READ, self._on_wakeup)
        for number in STOP_SIGNALS:
            signal.signal(number, self._enqueue)

    def __exit__(self, *_: object) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        self._selector.unregister(self._read_end)
        self._read_end.close()
        self._write_end.close()

    def _enqueue(self, number: int, _frame: FrameType | None) -> None:
        self._queue.append(number)

    def _on_wakeup(self) -> None:
        self._read_end.recv(4096)
