"""Logs of users' code: JSON lines on a socket of their own, so that a flood of them delays no acknowledgement.

The runner's go through a `LogChannel`; a worker has a channel of its own kind (`headgate.worker.output`). In the
runner, a log call (of a trigger, the watchdog's thread or a library that uses `logging`) only appends to a bounded
queue. One thread writes the queue to the socket. If the supervisor does not keep up, the newest records are dropped and
counted; before the next record that is sent, another one says how many are missing, and of which triggers.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import Protocol

import structlog

from headgate.child.error_text import traceback_of
from headgate.child.queries import secrets
from headgate.protocol.messages.runner import TriggerSpec

RECORDS_WAITING_MAX = 50_000  # records waiting for the socket; beside the next limit, it bounds the small ones
DROPPED_OWNERS_MAX = 1000  # triggers whose dropped records are counted apart; those of others are counted together
RECORDS_BYTES_MAX = 16 * 1024 * 1024  # bytes of these records, if the supervisor does not read
RECORD_BYTES_MAX = 60_000  # a longer record is split or cut, so that it stays below the reader's line limit
EVENT_CHARS_MAX = 4000  # of the event in each part of a record that is split: 48,000 bytes of JSON at most
FIELD_CHARS_MAX = 2000  # of each field of a record that is cut; both ends are kept
# Of each field, if that was not enough and only the known ones are kept: JSON may need 12 bytes a character.
KNOWN_FIELD_CHARS_MAX = 500
# The fields that identify a record. Those with names of the protocol are short enough (`ID_CHARS_MAX`).
STEP_FIELDS = ("dag_id", "run_id", "task_id", "try_number", "task_instance_id")
KNOWN_FIELDS = ("event", "level", "logger", "timestamp", "trigger_id", "source", *STEP_FIELDS)
KNOWN_NUMBERS = ("part", "more")
WALK_DEPTH_MAX = 8  # how deep secrets are masked in lists and dicts of a record; deeper values become text
CLOSE_WAIT_S = 2.0  # how long the last records may take to be written

# The trigger that the current task works for. Not one of structlog's context variables, because a trigger may
# clear those, and neither its records nor the watchdog's should lose its name by that.
_NOBODY: Mapping[str, object] = MappingProxyType({})
trigger_names: ContextVar[Mapping[str, object]] = ContextVar("headgate_trigger", default=_NOBODY)

# The step that a worker runs: one value for the process. Threads that the step starts have contexts of their own, but
# their records belong to it as well.
_process_names: Mapping[str, object] = MappingProxyType({})


class SpecNames(Mapping[str, object]):
    """The fields that name the trigger of a record: a mapping that takes less memory than a dict.

    ``record`` is for the black box: it identifies what the trigger is doing now.
    """

    __slots__ = ("record", "spec")

    def __init__(self, spec: TriggerSpec) -> None:
        self.spec = spec
        self.record = b""

    def __getitem__(self, name: str) -> object:
        return getattr(self.spec, _SPEC_FIELDS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_SPEC_FIELDS)

    def __len__(self) -> int:
        return len(_SPEC_FIELDS)


_SPEC_FIELDS = {"trigger_id": "trigger_id", "trigger_name": "name", "classpath": "classpath"}


@contextmanager
def naming_trigger(names: Mapping[str, object]) -> Generator[None]:
    """Add ``names`` to all records logged inside the block, and to all records of tasks that are started inside it."""
    token = trigger_names.set(names)
    try:
        yield
    finally:
        trigger_names.reset(token)


@contextmanager
def naming_process(names: Mapping[str, object]) -> Generator[None]:
    """Add ``names`` to all records that this process logs inside the block, in any thread."""
    global _process_names
    before, _process_names = _process_names, names
    try:
        yield
    finally:
        _process_names = before


def names_with(names: Mapping[str, object]) -> dict[str, object]:
    """Return the identifying fields of a record of a trigger with these ``names``."""
    return {**_process_names, **names}


def names_now() -> dict[str, object]:
    """Return the identifying fields of a record that is written now."""
    return names_with(trigger_names.get())


class Channel(Protocol):
    """Destination of finished records."""

    def put(self, record: bytes) -> None:
        """Take one record, a JSON object without line end, or several with line ends between them."""
        ...


class LogChannel:
    """The runner's end of the log socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._records: deque[bytes] = deque()
        self._dropped: dict[int, tuple[Mapping[str, object], int]] = {}  # by the id of the names, which are held here
        self._bytes = 0
        # Reentrant, because a signal handler may log while it is held.
        self._wake = threading.Condition(threading.RLock())
        self._is_closing = False
        self._is_fork = False
        self._thread = threading.Thread(target=self._write, name="headgate log channel", daemon=True)
        self._thread.start()

    def put(self, record: bytes) -> None:
        """Queue one record (a JSON object, without line end), or several; drop them if the queue is full."""
        if self._is_fork:
            _write_all(2, record + b"\n")
            return
        with self._wake:
            if len(self._records) >= RECORDS_WAITING_MAX or self._bytes >= RECORDS_BYTES_MAX:
                self._count_dropped()
                return
            self._note_dropped()
            self._records.append(record)
            self._bytes += len(record)
            self._wake.notify()

    def close(self) -> None:
        """Write what is queued, for at most `CLOSE_WAIT_S` seconds."""
        with self._wake:
            self._note_dropped()
            self._is_closing = True
            self._wake.notify()
        self._thread.join(CLOSE_WAIT_S)

    def write_to_stderr(self) -> None:
        """From now on write all records to standard error: this is a fork, which has no thread of the channel's."""
        self._is_fork = True

    def _count_dropped(self) -> None:
        names = trigger_names.get()
        if id(names) not in self._dropped and len(self._dropped) >= DROPPED_OWNERS_MAX:
            names = _NOBODY
        _, count = self._dropped.get(id(names), (names, 0))
        self._dropped[id(names)] = (names, count + 1)

    def _note_dropped(self) -> None:
        if self._dropped:
            for names, count in self._dropped.values():
                note = {"event": "log records were dropped", "level": "warning", "records": count, **names}
                self._records.append(render(note))
            self._dropped.clear()

    def _write(self) -> None:
        while True:
            with self._wake:
                while not self._records and not self._is_closing:
                    self._wake.wait()
                batch = list(self._records)
                self._records.clear()
                self._bytes = 0
            if not batch:
                return
            try:
                self._socket.sendall(b"".join(record + b"\n" for record in batch))
            except OSError:
                return  # the supervisor is gone, and this process with it


def _write_all(descriptor: int, data: bytes) -> None:
    with suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


# --- rendering -----------------------------------------------------------------------------------


def render(record: Mapping[str, object]) -> bytes:
    """One record as a JSON object of at most `RECORD_BYTES_MAX` bytes; what JSON does not know becomes its repr.

    Secrets that this process knows are masked in it (I12), before it is cut: a cut could leave half of one.
    """
    if secrets:
        record = _without_secrets(record)
    data = _object(record)
    if len(data) > RECORD_BYTES_MAX:
        data = _object({name: _cut(value, FIELD_CHARS_MAX) for name, value in record.items()})
    if len(data) > RECORD_BYTES_MAX:
        known = {name: _cut(record[name], KNOWN_FIELD_CHARS_MAX) for name in KNOWN_FIELDS if name in record}
        known |= {name: record[name] for name in KNOWN_NUMBERS if isinstance(record.get(name), int)}
        data = _object(known | {"cut": True})
    return data.encode()


def render_lines(record: Mapping[str, object]) -> bytes:
    """One record as one JSON object, or as several, a line each, where its ``event`` is too long for one.

    The event is never cut: all but the last part of it have ``more: true``, and ``part`` counts them. Other fields are
    cut as `render` does it, and stand in the first part. Secrets are taken out as there, before the event is split.
    """
    if secrets:
        record = _without_secrets(record)
    data = _object(record)
    event = record.get("event")
    if len(data) <= RECORD_BYTES_MAX:
        return data.encode()
    if not isinstance(event, str) or len(event) <= EVENT_CHARS_MAX:
        return render(record)
    part = record.get("part")
    first = part if isinstance(part, int) else 1
    known = {name: record[name] for name in (*KNOWN_FIELDS, *KNOWN_NUMBERS) if name in record}
    fields: Mapping[str, object] = {name: _cut(value, FIELD_CHARS_MAX) for name, value in record.items()}
    if len(_object({**fields, "event": ""})) > RECORD_BYTES_MAX - 12 * EVENT_CHARS_MAX:
        fields = known | {"cut": True}
    lines = []
    for number, begin in enumerate(range(0, len(event), EVENT_CHARS_MAX), first):
        end = begin + EVENT_CHARS_MAX
        more = {"more": True} if end < len(event) else {}
        lines.append(render({**fields, "event": event[begin:end], "part": number, **more}))
        fields = known
    return b"\n".join(lines)


def _without_secrets(record: Mapping[str, object]) -> dict[str, object]:
    # The fields that identify the record stay, even if a variable has the same text; all others are masked.
    ours = {**trigger_names.get(), "level": record.get("level"), "timestamp": record.get("timestamp")}
    return {
        secrets.hide(str(name)): value if _is_ours(ours.get(name), value) else _hidden(value, WALK_DEPTH_MAX)
        for name, value in record.items()
    }


def _is_ours(ours: object, value: object) -> bool:
    return ours is value or (isinstance(value, str | int) and type(ours) is type(value) and ours == value)


def _hidden(value: object, depth: int) -> object:
    if isinstance(value, str):
        return secrets.hide(value)
    if value is None or isinstance(value, bool | int | float):
        text = _repr(value)
        hidden = secrets.hide(text)
        return value if hidden == text else hidden
    if depth and type(value) is dict:
        members: dict[object, object] = value
        return {_hidden_key(key): _hidden(member, depth - 1) for key, member in list(members.items())}
    if depth and isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [_hidden(member, depth - 1) for member in list(value)]
    return secrets.hide(_repr(value))


def _hidden_key(key: object) -> str:
    return secrets.hide(key if isinstance(key, str) else _repr(key))


def _object(record: Mapping[str, object]) -> str:
    try:
        return json.dumps(record, default=_repr, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        # A NaN, a key that is not a str, a cycle: one such field must not cost the others.
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_member(value)}" for name, value in record.items()) + "}"


def _member(value: object) -> str:
    try:
        return json.dumps(value, default=_repr, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_repr(value))


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as exc:
        return f"<{type(value).__name__} whose repr raised {type(exc).__name__}>"


def _cut(value: object, chars_max: int) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else _repr(value)
    if len(text) <= chars_max:
        return value if isinstance(value, str) or len(_member(value)) <= chars_max else text
    half = chars_max // 2
    return f"{text[:half]} [{len(text) - 2 * half:,} characters cut] {text[-half:]}"


# --- who logs ------------------------------------------------------------------------------------


def configure(channel: Channel) -> None:
    """Send structlog's and the standard library's records through the channel, with their identifying fields."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_names,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        _format_positional,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.ExceptionRenderer(lambda exc_info: traceback_of(exc_info[1]).rstrip("\n")),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = _ChannelHandler(channel)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _render_text],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)


def _add_names(_logger: object, _method: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for name, value in names_now().items():
        record.setdefault(name, value)
    return record


_positional = structlog.stdlib.PositionalArgumentsFormatter()


def _format_positional(logger: object, method: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Format ``log.info("%d events", "five")`` too: this runs inside the trigger that logs, which must not fail."""
    try:
        return _positional(logger, method, record)
    except Exception:
        record["event"] = f"{record['event']} (these arguments do not fit: {_repr(record.pop('positional_args'))})"
        return record


def _render_text(_logger: object, _method: str, record: structlog.typing.EventDict) -> str:
    return render_lines(record).decode()


class _ChannelHandler(logging.Handler):
    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = self.format(record).encode()
        except Exception as exc:  # a record that cannot be formatted must not end the trigger that logged it
            data = render(
                {
                    "event": "a log record could not be formatted",
                    "level": "error",
                    "logger": record.name,
                    "template": _repr(record.msg),
                    "error": _repr(exc),
                    **names_now(),
                }
            )
        self._channel.put(data)
