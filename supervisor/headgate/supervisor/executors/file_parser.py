"""DAG files are parsed by a worker of their own, one at a time, each within a limit of time.

A file that takes longer, or brings its worker down, is an import error that says so, and where the file was; the next
one gets a new worker.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.protocol.messages.worker import FileParsed, ParseFile, Request, StepEnded, WorkerSettings
from headgate.supervisor.backoff import Backoff
from headgate.supervisor.children.worker import Work, Worker
from headgate.supervisor.executors.local import RESPAWN_WAIT_MAX_S, RESPAWN_WAIT_S, START_FAILURES_MAX, Spawn

log = structlog.get_logger(__name__)

PARSER_FILES_MAX: Final = 1000  # then the worker is replaced, as one that runs steps is
LINES_KEPT_MAX: Final = 200  # of what a file's worker printed: its stacks are among them

OnFileRecord = Callable[[str | None, dict[str, Any]], object]
OnFileOutput = Callable[[str | None, bytes], object]


class FileParser:
    """Parses one file at a time. ``timeout_s`` is for one file, from when its worker begins with it.

    ``on_record`` and ``on_output`` get what a file logs and prints when it is run, and its path.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        spawn: Spawn,
        *,
        timeout_s: float,
        settings: WorkerSettings,
        on_record: OnFileRecord,
        on_output: OnFileOutput,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selector = selector
        self._spawn = spawn
        self._timeout_s = timeout_s
        self._settings = settings
        self._on_record = on_record
        self._on_output = on_output
        self._clock = clock
        self._worker: Worker | None = None
        self._file: str | None = None
        self._is_sent = False
        self._is_late = False
        self._is_retiring = False
        self._files = 0
        self._pieces: list[FileParsed] = []
        self._lines: deque[str] = deque(maxlen=LINES_KEPT_MAX)
        self._events: list[FileParsed] = []
        self._backoff = Backoff(RESPAWN_WAIT_S, RESPAWN_WAIT_MAX_S)
        self._spawn_at = 0.0

    # --- what the supervisor calls ----------------------------------------------------------------

    def room(self) -> int:
        """Return how many files may be given to `parse` now: one or none."""
        return 1 if self._file is None else 0

    def parse(self, file: str) -> None:
        """Parse a file, an absolute path. Its `FileParsed`, whole, comes with `events`."""
        assert self._file is None, "one file at a time"
        self._file = file
        self._is_sent = self._is_late = False
        self._pieces = []
        self._lines.clear()
        self._go_on()

    def events(self, now: float) -> Sequence[FileParsed]:
        """Return the files that are done since the last call."""
        worker = self._worker
        if worker is not None:
            if self._is_sent and now >= worker.kill_at:
                self._is_late = True
            worker.tick(now)
        self._go_on()
        events, self._events = self._events, []
        return events

    def wake_at(self) -> float:
        """Return when `events` has something to do even if nothing happens."""
        if self._events:
            return 0.0
        if self._worker is not None:
            return self._worker.kill_at
        return float("inf") if self._file is None else self._spawn_at

    def close(self) -> None:
        """Leave no process behind."""
        self._file = None
        if self._worker is not None:
            self._worker.destroy()
            self._worker = None

    # --- what the worker says (`worker.Owner`) ----------------------------------------------------

    def worker_ready(self, worker: Worker) -> None:
        """The worker has started."""
        self._backoff.succeed()
        self._go_on()

    def worker_said(self, worker: Worker, message: Work) -> None:
        """Take what a file holds, piece by piece."""
        match message:
            case FileParsed():
                self._pieces.append(message)
                if not message.more:
                    dags = tuple(dag for piece in self._pieces for dag in piece.dags)
                    self._done(FileParsed(message.file, dags, message.error, message.traceback))
                    worker.kill_at = float("inf")
                    self._files += 1
                    if self._files >= PARSER_FILES_MAX:
                        self._files = 0
                        self._is_retiring = True
                        worker.retire()
            case Request() | StepEnded():
                raise AssertionError("the session lets nothing of it through but in a step")

    def worker_logged(self, worker: Worker, record: dict[str, Any]) -> None:
        """Pass a record on."""
        self._on_record(self._file, record)

    def worker_printed(self, worker: Worker, line: bytes) -> None:
        """Pass a line of output on."""
        self._lines.append(line.decode("utf-8", "backslashreplace"))
        self._on_output(self._file, line)

    def worker_ended(self, worker: Worker, explanation: str) -> None:
        """The worker is gone, and the file it was at is at fault, if it was at one."""
        self._worker = None
        self._is_retiring = False
        if not worker.is_ready:
            wait_s = self._backoff.fail()
            self._spawn_at = self._clock() + wait_s
            log.error("a worker died before it was ready", pid=worker.pid, how=explanation, next_in_s=round(wait_s, 1))
            if self._backoff.failures >= START_FAILURES_MAX and self._file is not None:
                self._done(FileParsed(self._file, error=f"no worker can be started to parse it: {explanation}"))
        elif self._file is not None and self._is_sent:
            if self._is_late:
                error = f"it took longer than {self._timeout_s:g} s to parse (dag_parse_timeout_s)"
            else:
                error = f"the process that parsed it {explanation.partition('; its last output')[0]}"
            trace = "\n".join(self._lines)[-ERROR_CHARS_MAX:].replace("\0", "\\x00")
            self._done(FileParsed(self._file, error=error, traceback=trace))
        self._go_on()

    # --- inside -----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Start a worker if a file needs one, and send the file to it once it is ready."""
        if self._file is None or self._is_sent:
            return
        if self._worker is None:
            if self._clock() >= self._spawn_at:
                self._start()
        elif self._worker.is_free and not self._is_retiring:
            self._is_sent = True
            self._worker.send(ParseFile(self._file))
            self._worker.kill_by(self._clock() + self._timeout_s, "a DAG file takes too long")

    def _start(self) -> None:
        try:
            child = self._spawn()
        except OSError as error:
            wait_s = self._backoff.fail()
            self._spawn_at = self._clock() + wait_s
            log.error("no worker can be started", error=str(error), next_in_s=round(wait_s, 1))
            return
        self._worker = Worker(child, self._selector, self, self._settings, self._clock)

    def _done(self, parsed: FileParsed) -> None:
        self._events.append(parsed)
        self._file = None
        self._is_sent = False
