"""Logs of the runner: JSON lines on a socket of their own, so that a flood of them delays no acknowledgement.

Whoever logs, be it a trigger, the watchdog's thread or a library that uses `logging`, only appends to a
bounded queue. One thread writes it to the socket. When the supervisor does not keep up, the newest records
are dropped and counted; the next record that gets through says how many are missing.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

import structlog

from headgate.protocol.messages import TriggerSpec
from headgate.runner.asking import told

RECORDS_WAITING_MAX = 10_000  # records waiting for the socket
RECORDS_BYTES_MAX = 16 * 1024 * 1024  # bytes of these records: what a supervisor that does not read may cost
RECORD_BYTES_MAX = 60_000  # a longer record is cut, so that the reader's line limit is never met
FIELD_CHARS_MAX = 2000  # of each field of a record that is cut; both ends are kept
# Of each field when that was not enough and only the known ones are kept: JSON may need 12 bytes a character.
KNOWN_FIELD_CHARS_MAX = 800
KNOWN_FIELDS = ("event", "level", "logger", "timestamp", "trigger_id")
WALK_DEPTH_MAX = 8  # how deep secrets are looked for in the lists and dicts of a record; what is deeper becomes text
CLOSE_WAIT_S = 2.0  # how long the last records may take to leave

# The trigger that the current task works for. Not one of structlog's context variables, because a trigger may
# clear those, and neither its records nor the watchdog's should lose its name by that.
trigger_names: ContextVar[Mapping[str, object]] = ContextVar("headgate_trigger", default=MappingProxyType({}))


class SpecNames(Mapping[str, object]):
    """What a record says of the trigger that wrote it; smaller than the dict that it stands for."""

    __slots__ = ("_spec",)

    def __init__(self, spec: TriggerSpec) -> None:
        self._spec = spec

    def __getitem__(self, name: str) -> object:
        return getattr(self._spec, _SPEC_FIELDS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_SPEC_FIELDS)

    def __len__(self) -> int:
        return len(_SPEC_FIELDS)


_SPEC_FIELDS = {"trigger_id": "trigger_id", "trigger_name": "name", "classpath": "classpath"}


@contextmanager
def naming_trigger(names: Mapping[str, object]) -> Generator[None]:
    """Put ``names`` on all records logged meanwhile, and in all tasks started meanwhile, for as long as they live."""
    token = trigger_names.set(names)
    try:
        yield
    finally:
        trigger_names.reset(token)


class LogChannel:
    """The runner's end of the log socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._records: deque[bytes] = deque()
        self._dropped = 0
        self._bytes = 0
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._write, name="headgate log channel", daemon=True)
        self._thread.start()

    def put(self, record: bytes) -> None:
        """Queue one record (a JSON object, without line end); drop it when the queue is full."""
        with self._wake:
            if len(self._records) >= RECORDS_WAITING_MAX or self._bytes >= RECORDS_BYTES_MAX:
                self._dropped += 1
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

    def _note_dropped(self) -> None:
        if self._dropped:
            note = {"event": "log records were dropped", "level": "warning", "records": self._dropped}
            self._records.append(json.dumps(note).encode())
            self._dropped = 0

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


# --- rendering -----------------------------------------------------------------------------------


def render(record: Mapping[str, object]) -> bytes:
    """One record as a JSON object of at most `RECORD_BYTES_MAX` bytes; what JSON does not know becomes its repr.

    The secrets this process was told are not in it (I12). They are taken out first: a cut could leave half of one.
    """
    if told:
        record = _without_secrets(record)
    data = _object(record)
    if len(data) > RECORD_BYTES_MAX:
        data = _object({name: _cut(value, FIELD_CHARS_MAX) for name, value in record.items()})
    if len(data) > RECORD_BYTES_MAX:
        known = {name: _cut(record[name], KNOWN_FIELD_CHARS_MAX) for name in KNOWN_FIELDS if name in record}
        data = _object(known | {"cut": True})
    return data.encode()


def _without_secrets(record: Mapping[str, object]) -> dict[str, object]:
    # What says where the record belongs stays, even where somebody's variable has the same text; but only that.
    ours = {**trigger_names.get(), "level": record.get("level"), "timestamp": record.get("timestamp")}
    return {
        told.hide(str(name)): value if _is_ours(ours.get(name), value) else _hidden(value, WALK_DEPTH_MAX)
        for name, value in record.items()
    }


def _is_ours(ours: object, value: object) -> bool:
    return ours is value or (isinstance(value, str | int) and type(ours) is type(value) and ours == value)


def _hidden(value: object, depth: int) -> object:
    if isinstance(value, str):
        return told.hide(value)
    if value is None or isinstance(value, bool | int | float):
        text = _repr(value)
        hidden = told.hide(text)
        return value if hidden == text else hidden
    if depth and type(value) is dict:
        members: dict[object, object] = value
        return {_hidden_key(key): _hidden(member, depth - 1) for key, member in list(members.items())}
    if depth and isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [_hidden(member, depth - 1) for member in list(value)]
    return told.hide(_repr(value))


def _hidden_key(key: object) -> str:
    return told.hide(key if isinstance(key, str) else _repr(key))


def _object(record: Mapping[str, object]) -> str:
    try:
        return json.dumps(record, default=_repr, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        # A nan, a key that is no str, a cycle: one such field must not cost the others.
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


def configure(channel: LogChannel) -> None:
    """Send structlog's and the standard library's records through the channel, with the trigger they belong to."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_trigger_names,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        _format_positional,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
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


def _add_trigger_names(_logger: object, _method: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for name, value in trigger_names.get().items():
        record.setdefault(name, value)
    return record


_positional = structlog.stdlib.PositionalArgumentsFormatter()


def _format_positional(logger: object, method: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Format ``log.info("%d events", "five")`` too: this runs inside the trigger that wrote it, which must go on."""
    try:
        return _positional(logger, method, record)
    except Exception:
        record["event"] = f"{record['event']} (these arguments do not fit: {_repr(record.pop('positional_args'))})"
        return record


def _render_text(_logger: object, _method: str, record: structlog.typing.EventDict) -> str:
    return render(record).decode()


class _ChannelHandler(logging.Handler):
    def __init__(self, channel: LogChannel) -> None:
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
                    **trigger_names.get(),
                }
            )
        self._channel.put(data)
