"""The log of this process: structlog on standard error, human on a terminal and JSON lines elsewhere.

Three kinds of records end in one `_Sink`: those of headgate's own loggers (structlog), those of libraries (the standard
library's logging, from warnings on), and those of children, which arrive complete over their own channel and are
written by `relay`. A log that cannot be written, because the terminal or the disk is gone, never stops the work.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog

from headgate.supervisor.config import Settings
from headgate.supervisor.logs.log_writer import LogWriter

LINES_WAITING_MAX = 10_000  # lines that wait for the reader of the log
BYTES_WAITING_MAX = 8 * 1024 * 1024  # characters of these lines

# The first fields of every JSON line, so that lines can be read by eye too.
_FIRST = ("timestamp", "level", "event", "logger")
_LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

Record = Mapping[str, Any]


class _Sink:
    """Renders a finished record and writes it, one line (or one traceback) at a time."""

    def __init__(self, stream: TextIO | None, log_format: str, level: int) -> None:
        self._stream = stream
        self._writer: LogWriter[None, str] | None = None
        self.level = level
        terminal = self._target().isatty()
        self._human: structlog.dev.ConsoleRenderer | None = None
        if log_format == "human" or (log_format == "auto" and terminal):
            # The plain formatter: the rich one shows local variables, and those may hold kwargs (I12).
            self._human = structlog.dev.ConsoleRenderer(
                colors=terminal, exception_formatter=structlog.dev.plain_traceback
            )

    def _target(self) -> TextIO:
        # Looked up each time: standard error may be redirected while we run.
        return sys.stderr if self._stream is None else self._stream

    def render(self, record: Record) -> str:
        """Return the line of a record; never raises, whatever it holds: it must not cost the work that it tells of."""
        if self._human is not None:
            try:
                return str(self._human(None, str(record.get("level")), dict(record)))
            except Exception as exc:  # a value that the renderer cannot show must not cost the record
                record = {**record, "render_error": repr(exc)}
        return _json_line(record)

    def write(self, line: str) -> None:
        if self._writer is None:
            self._write_now(line)
        else:
            self._writer.put(None, line)

    @contextmanager
    def in_background(self) -> Generator[None]:
        self._writer = writer = LogWriter(
            "headgate log",
            self._write_lines,
            self._note_of_dropped,
            lines_max=LINES_WAITING_MAX,
            bytes_max=BYTES_WAITING_MAX,
        )
        try:
            yield
        finally:
            self._writer = None
            writer.close()

    def _note_of_dropped(self, lines: int) -> str:
        fields = {"timestamp": _text_of_time(None), "level": "warning", "event": "log lines were dropped"}
        return self.render({**fields, "logger": __name__, "lines": lines})

    def _write_lines(self, lines: Sequence[tuple[None, str]], _is_last: bool) -> None:
        for _, line in lines:
            self._write_now(line)

    def _write_now(self, line: str) -> None:
        target = self._target()
        try:
            target.write(line + "\n")
            target.flush()
        except (OSError, ValueError):
            pass  # the reader of the log has gone; the work goes on without it


class _Logger:
    """Receives rendered lines from structlog; ``name`` is the argument of `get_logger`."""

    def __init__(self, name: str, sink: _Sink) -> None:
        self.name = name
        self._sink = sink

    def msg(self, line: str) -> None:
        self._sink.write(line)

    debug = info = warning = error = critical = msg


class _FromLogging(logging.Handler):
    """Receives the records of libraries that use the standard library's logging."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__()
        self._sink = sink
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = {
                "timestamp": _text_of_time(record.created),
                "level": record.levelname.lower(),
                "event": record.getMessage(),
                "logger": record.name,
            }
            if record.exc_info and record.exc_info[0] is not None:
                fields["exception"] = logging.Formatter().formatException(record.exc_info)
            self._sink.write(self._sink.render(fields))
        except Exception:  # a library's record with bad arguments: logging's own way of saying so
            self.handleError(record)


_sink: _Sink | None = None


def configure(settings: Settings, *, stream: TextIO | None = None) -> None:
    """Send all records of this process to ``stream`` (standard error by default). May be called again.

    ``settings.log_level`` is for headgate's own loggers and for relayed records. Of libraries only warnings and above
    are written: below that they would log SQL statements with their parameters.
    """
    global _sink
    level = _LEVELS[settings.log_level]
    sink = _sink = _Sink(stream, settings.log_format, level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            lambda _logger, _method, record: sink.render(record),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *names: _Logger(names[0] if names else "headgate", sink),
        # A second call of configure must reach loggers that were used before it.
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _FromLogging)]:
        root.removeHandler(handler)
    root.addHandler(_FromLogging(sink))
    root.setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)


def in_background() -> AbstractContextManager[None]:
    """While this lasts, a thread writes the log, so that a reader that has stopped reading delays nobody."""
    return nullcontext() if _sink is None else _sink.in_background()


def relay(record: Record) -> None:
    """Write a record that a child made, with its ``event``, ``level``, ``timestamp``, ``logger`` and other fields.

    Every field is kept as it came; missing ones of the four are filled in. A record below the configured level is
    dropped. Never raises, whatever the record holds: it comes from a process that runs users' code.
    """
    sink = _sink if _sink is not None else _Sink(None, "auto", logging.INFO)
    level = str(record.get("level", "info")).lower()
    if _LEVELS.get(level, logging.INFO) < sink.level:
        return
    fields: dict[str, Any] = {
        "timestamp": _text_of_time(None),
        "logger": "headgate.runner",
        **{str(key): value for key, value in record.items()},
        "level": level,
        "event": str(record.get("event", "")),
    }
    # The renderer expects live objects in these; from a child they can only be text.
    for key in ("exc_info", "stack_info"):
        if (value := fields.pop(key, None)) is not None:
            fields[f"{key}_text"] = str(value)
    for key in ("exception", "stack"):
        if key in fields:
            fields[key] = str(fields[key])
    sink.write(sink.render(fields))


def _json_line(record: Record) -> str:
    ordered = {key: record[key] for key in _FIRST if key in record}
    ordered.update(record)
    try:
        return json.dumps(ordered, default=repr)
    except Exception:
        # A dict with keys that JSON does not have, a cycle, an int of more digits than Python writes, an object whose
        # repr fails: at least the fields stay separate.
        return json.dumps({key: _plain(value) for key, value in ordered.items()})


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return repr(value)
    except Exception as error:
        # As commands and pages show such an int; one that is within something else is not looked for.
        return hex(value) if isinstance(value, int) else f"<{type(value).__name__} that cannot be shown: {error}>"


def _text_of_time(seconds: float | None) -> str:
    """Return a time in the form of all our records; None is now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def reset() -> None:
    """Undo `configure`: for tests, which share one process."""
    global _sink
    _sink = None
    structlog.reset_defaults()
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _FromLogging)]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(False)
