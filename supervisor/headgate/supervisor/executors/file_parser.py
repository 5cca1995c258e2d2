"""DAG files are parsed by a worker of their own, one at a time, each within a limit of time.

A file that takes longer, or that brings its worker down, is an import error with the place where it was; the next file
gets a new worker.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.protocol.messages.worker import FileParsed, FromWorker, ParseFile, WorkerSettings
from headgate.supervisor.children.worker import START_FAILURES_MAX, SpawnWorker, Worker, WorkerStarter

log = structlog.get_logger(__name__)

PARSER_FILES_MAX: Final = 1000  # then the worker is replaced, as one that runs steps is
LINES_KEPT_MAX: Final = 200  # of the output of a file's worker, with its stacks
OUTPUT_CHARS_MAX: Final = 64 * 1024  # of records and output that are passed on, for one parse of a file

OnFileRecord = Callable[[str | None, dict[str, Any]], object]
OnFileOutput = Callable[[str | None, str], object]


class FileParser:
    """Parses one file at a time. ``timeout_s`` is for one file, from when its worker begins with it.

    ``on_record`` and ``on_output`` get the records and the output of a file, and its path, up to `OUTPUT_CHARS_MAX` for
    each parse; the number of those left out is logged.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        spawn: SpawnWorker,
        *,
        timeout_s: float,
        settings: WorkerSettings,
        on_record: OnFileRecord,
        on_output: OnFileOutput,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starter = WorkerStarter(selector, spawn, self, settings, clock)
        self._timeout_s = timeout_s
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
        self._output_chars = 0  # of this file, passed on
        self._left_out = 0  # lines and records of this file
        self._events: list[FileParsed] = []

    # --- called by the supervisor -----------------------------------------------------------------

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
        self._output_chars = self._left_out = 0
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
        return float("inf") if self._file is None else self._starter.start_at

    def close(self) -> None:
        """End the worker."""
        self._file = None
        if self._worker is not None:
            self._worker.destroy()
            self._worker = None

    # --- called by the worker (`WorkerOwner`) -----------------------------------------------------

    def worker_ready(self, pid: int) -> None:
        """The worker has started."""
        self._starter.succeeded()
        self._go_on()

    def worker_prints(self, pid: int, token: str) -> None:
        """A parser runs no steps; what a file prints is read as it is."""

    def child_said(self, pid: int, message: FromWorker) -> None:
        """Take the content of a file, piece by piece."""
        assert isinstance(message, FileParsed), "the session refuses all else"
        assert self._worker is not None
        self._pieces.append(message)
        if message.more:
            return
        dags = tuple(dag for piece in self._pieces for dag in piece.dags)
        self._done(FileParsed(message.file, dags, message.error, message.traceback))
        self._worker.kill_at = float("inf")
        self._files += 1
        if self._files >= PARSER_FILES_MAX:
            self._files = 0
            self._is_retiring = True
            self._worker.retire()

    def child_logged(self, pid: int, record: dict[str, Any]) -> None:
        """Pass a record on."""
        if self._has_room_for(sum(len(str(value)) for value in record.values())):
            self._on_record(self._file, record)

    def child_printed(self, pid: int, line: str) -> None:
        """Pass a line of output on."""
        self._lines.append(line)
        if self._has_room_for(len(line)):
            self._on_output(self._file, line)

    def child_broke_protocol(self, pid: int, error: RemoteProtocolError) -> None:
        """Kill the worker."""
        if self._worker is not None:
            self._worker.process.kill(f"it broke the protocol: {error}")

    def child_ended(self, pid: int, explanation: str) -> None:
        """Handle the end of the worker. If it was parsing a file, that file is at fault."""
        assert self._worker is not None
        is_ready = self._worker.is_ready
        self._worker = None
        self._is_retiring = False
        if not is_ready:
            self._starter.failed(pid, explanation)
            if self._starter.failures >= START_FAILURES_MAX and self._file is not None:
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
            if self._clock() >= self._starter.start_at:
                with contextlib.suppress(OSError):  # logged, and tried again
                    self._worker = self._starter.start()
        elif self._worker.is_free and not self._is_retiring:
            self._is_sent = True
            self._worker.send(ParseFile(self._file))
            self._worker.kill_by(self._clock() + self._timeout_s, "a DAG file takes too long")

    def _has_room_for(self, chars: int) -> bool:
        self._output_chars += chars
        if self._output_chars > OUTPUT_CHARS_MAX:
            self._left_out += 1
        return self._output_chars <= OUTPUT_CHARS_MAX

    def _done(self, parsed: FileParsed) -> None:
        if self._left_out:
            limit = f"{OUTPUT_CHARS_MAX:,} characters for each parse"
            log.warning("output of a DAG file was left out", file=parsed.file, lines=self._left_out, limit=limit)
        self._events.append(parsed)
        self._file = None
        self._is_sent = False
