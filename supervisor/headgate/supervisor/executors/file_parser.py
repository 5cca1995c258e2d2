"""DAG files are parsed by a worker of their own, one at a time, each within a limit of time.

A file that takes longer, or that brings its worker down, is an import error with the place where it was; the next file
gets a new worker (`headgate.supervisor.executors.single`).
"""

from __future__ import annotations

from typing import Final

import msgspec
import structlog

from headgate.protocol.messages.worker import FileParsed, FromWorker, ParseFile, ToWorker
from headgate.supervisor.executors.single import OUTPUT_CHARS_MAX, SingleWorker

log = structlog.get_logger(__name__)

PARSER_FILES_MAX: Final = 1000  # then the worker is replaced, as one that runs steps is


class FileParser(SingleWorker[str, FileParsed]):
    """Parses one file at a time."""

    _pieces: list[FileParsed]  # of the file, so far

    def parse(self, file: str) -> None:
        """Parse a file, an absolute path. Its `FileParsed`, whole, comes with `events`."""
        self._pieces = []
        self._begin(file)

    # --- of the worker ----------------------------------------------------------------------------

    def _message(self, job: str) -> ToWorker:
        return ParseFile(job)

    def _take(self, job: str, message: FromWorker) -> bool:
        assert isinstance(message, FileParsed), "the session refuses all else"
        self._pieces.append(message)
        if not message.more:
            dags = tuple(dag for piece in self._pieces for dag in piece.dags)
            self._done.append(msgspec.structs.replace(message, dags=dags))
        return not message.more

    def _fail(self, job: str, error: str, trace: str) -> None:
        self._done.append(FileParsed(job, error=error, traceback=trace))

    def _words(self) -> tuple[str, str, str]:
        return "parse", "parsed", "dag_parse_timeout_s"

    def _jobs_max(self) -> int:
        return PARSER_FILES_MAX

    def _note_left_out(self, job: str, lines: int) -> None:
        limit = f"{OUTPUT_CHARS_MAX:,} characters for each parse"
        log.warning("output of a DAG file was left out", file=job, lines=lines, limit=limit)
