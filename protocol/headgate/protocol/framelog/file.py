"""The files of the frame log: their format, their writer and their reader.

The frame log is a flight recorder: it has every frame of both directions, in files that stay readable if the writer
crashes. `headgate.protocol.framelog.log` checks and shows their content.

A file; integers are big-endian::

    magic "\\x89HGF\\r\\n\\x1a\\n" | format version u16 | part u16 | CRC32 of this header u32
    record
    record
    ...

A record::

    body length u32 | time f64 | incarnation u64 | direction u8 | CRC32 of these u32
    body
    CRC32 of header and body u32

``time`` is in seconds since 1970, ``direction`` a value of `Direction`. ``part`` is 0 in the first file of a writer and
is incremented at each rotation, so that a reader knows whether the file begins in the middle of a conversation. The
header of a record has its own CRC: if it matches, the length can be trusted. Therefore damage in a body loses only that
record, and a record cut off by a crash can be distinguished from a damaged length.

Trigger kwargs, variables and connections are masked before they are written (I12). Payloads are not, so the files are
created with mode 0600.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import time as time_module
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from headgate.protocol import marks
from headgate.protocol.errors import FrameLogError
from headgate.protocol.link.runner_dialect import RUNNER_WIRE, Direction, Message
from headgate.protocol.link.wire import encode_message
from headgate.protocol.masking import MASK
from headgate.protocol.messages.queries import Response, SecretText
from headgate.protocol.messages.runner import StateSync, TriggerSpec

FORMAT_VERSION = 1
FILE_BYTES_MAX = 64 * 1024 * 1024  # a file rotates at this size: still easy to copy and to read
FILES_MAX = 16  # files kept in a folder: 1 GiB of history at most with the size above
FILE_NUMBER_TRIES_MAX = 100  # names tried that exist already, before the folder counts as unusable

_MAGIC: Final = b"\x89HGF\r\n\x1a\n"
_FILE_HEADER: Final = struct.Struct("!8sHH")
_RECORD_HEADER: Final = struct.Struct("!IdQB")
_CRC: Final = struct.Struct("!I")
_FILE_HEADER_BYTES: Final = _FILE_HEADER.size + _CRC.size
_RECORD_HEADER_BYTES: Final = _RECORD_HEADER.size + _CRC.size
_PART_MAX: Final = 2**16 - 1
_FILE_NAME: Final = re.compile(r"frames-(\d{8,})\.hgframe")


# --- writing ---------------------------------------------------------------------------------------


def mask(message: Message) -> Message:
    """Return ``message`` without secrets, and with the sizes of its triggers' kwargs in place of the kwargs (I12)."""
    match message:
        case StateSync(to_create=specs) if specs:
            return msgspec.structs.replace(message, to_create=tuple(_mask_spec(spec) for spec in specs))
        case Response(result=SecretText(value=value)) if value is not None:
            return msgspec.structs.replace(message, result=SecretText(MASK))
        case _:
            return message


def _mask_spec(spec: TriggerSpec) -> TriggerSpec:
    return msgspec.structs.replace(spec, kwargs=f'"masked: {len(spec.kwargs)} bytes"'.encode())


def encode_record(time: float, direction: Direction, incarnation: int, body: bytes) -> bytes:
    """Return one record of a frame log."""
    header = _RECORD_HEADER.pack(len(body), time, incarnation, direction.value)
    header += _CRC.pack(zlib.crc32(header))
    return b"".join((header, body, _CRC.pack(zlib.crc32(body, zlib.crc32(header)))))


class FrameLogWriter:
    """Writes the frames of a supervisor's links into a folder.

    Each record is one unbuffered append, so all records written before a crash are in the file. The file is rotated
    before it would exceed ``file_bytes_max`` (a longer record gets its own file). If the folder then has more than
    ``files_max`` files, the oldest is removed, even if another process wrote it. An existing file is never written to.

    Raises `FrameLogError` if the folder cannot be used. If writing fails later, for example because the disk is full,
    `record` raises it once, and recording stops for good: it never takes the supervisor down.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        files_max: int = FILES_MAX,
        clock: Callable[[], float] = time_module.time,
    ) -> None:
        if file_bytes_max < 1 or files_max < 1:
            raise ValueError("file_bytes_max and files_max must be at least 1")
        self._folder = Path(folder)
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max
        self._clock = clock
        self._part = 0
        self._fd = -1
        self._file_bytes = 0
        self.path: Path
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open_file()
        except OSError as error:
            self.close()
            raise FrameLogError(f"frames cannot be recorded in {self._folder}: {error}") from error

    def record(self, direction: Direction, incarnation: int, message: Message, body: bytes) -> None:
        """Append one frame: ``message``, and ``body``, its encoding.

        Raises `FrameLogError` the first time that writing fails; does nothing from then on, and after `close`.
        """
        if self._fd < 0:
            return
        masked = mask(message)
        if masked is not message:
            body = encode_message(masked)
        record = encode_record(self._clock(), direction, incarnation, body)
        try:
            if self._file_bytes > _FILE_HEADER_BYTES and self._file_bytes + len(record) > self._file_bytes_max:
                self._rotate()
            for part in marks.in_halves("capture.half_written", record):
                self._write(part)
        except OSError as error:
            self.close()
            raise FrameLogError(f"no more frames are recorded in {self._folder}: {error}") from error

    def close(self) -> None:
        """Stop recording. Closing twice is allowed; never raises."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # An error at the close is of no use: a failing disk was reported when a record was written.
            with contextlib.suppress(OSError):
                os.close(fd)

    def _rotate(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)
        self._part = min(self._part + 1, _PART_MAX)
        self._open_file()

    def _open_file(self) -> None:
        number = max(_numbered_files(self._folder), default=0)
        for _ in range(FILE_NUMBER_TRIES_MAX):
            number += 1
            self.path = self._folder / f"frames-{number:08d}.hgframe"
            try:
                # O_EXCL, so that two supervisors that share a folder never share a file.
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o600)
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(errno.EEXIST, "no free name for a frame log was found", str(self.path))
        self._file_bytes = 0
        header = _FILE_HEADER.pack(_MAGIC, FORMAT_VERSION, self._part)
        self._write(header + _CRC.pack(zlib.crc32(header)))
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        files = _numbered_files(self._folder)
        for number in sorted(files)[: -self._files_max]:
            if files[number] != self.path:
                files[number].unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._file_bytes += written
            view = view[written:]


def _numbered_files(folder: Path) -> dict[int, Path]:
    return {int(match[1]): path for path in folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))}


# --- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """One frame of a frame log, at ``offset`` of the file; ``time`` is in seconds since 1970."""

    offset: int
    time: float
    direction: Direction
    incarnation: int
    body: bytes

    def message(self) -> Message:
        """Return the message; raises `RemoteProtocolError` if the body is not a message."""
        message: Message = RUNNER_WIRE.decode(self.direction.sender, self.body)
        return message


@dataclass(frozen=True, slots=True)
class Torn:
    """An incomplete record at the end of the file, because the writer died while it wrote."""

    offset: int
    torn_bytes: int


@dataclass(frozen=True, slots=True)
class Damaged:
    """A record whose CRC does not match. ``goes_on``: the records after it can still be found."""

    offset: int
    problem: str
    goes_on: bool


def read_frames(path: str | os.PathLike[str]) -> Iterator[Record | Torn | Damaged]:
    """Read a frame log record by record.

    Raises `FrameLogError` at once if the file is not a frame log or has another format version, and OSError
    if it cannot be read. Later faults are yielded, not raised.
    """
    part = read_part(path)
    return _read_records(path) if part is not None else iter([Torn(0, os.stat(path).st_size)])


def read_part(path: str | os.PathLike[str]) -> int | None:
    """Return the part number of a file; None if not even its header was written completely.

    Raises as `read_frames` does.
    """
    with open(path, "rb") as file:
        header = file.read(_FILE_HEADER_BYTES)
    if not header.startswith(_MAGIC[: len(header)]):
        raise FrameLogError(f"{os.fspath(path)} is not a frame log")
    if len(header) < _FILE_HEADER_BYTES:
        return None
    _, version, part = _FILE_HEADER.unpack_from(header)
    if _CRC.unpack_from(header, _FILE_HEADER.size)[0] != zlib.crc32(header[: _FILE_HEADER.size]):
        raise FrameLogError(f"{os.fspath(path)} is a frame log whose header is damaged")
    if version != FORMAT_VERSION:
        raise FrameLogError(
            f"{os.fspath(path)} is a frame log of format version {version}; "
            f"this headgate reads version {FORMAT_VERSION}"
        )
    return int(part)


def _read_records(path: str | os.PathLike[str]) -> Iterator[Record | Torn | Damaged]:
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        offset = file.seek(_FILE_HEADER_BYTES)
        while offset < file_bytes:
            record = _read_record(file, offset, file_bytes)
            yield record
            if isinstance(record, Torn) or (isinstance(record, Damaged) and not record.goes_on):
                return
            offset = file.tell()


def _read_record(file: BinaryIO, offset: int, file_bytes: int) -> Record | Torn | Damaged:
    header = file.read(min(_RECORD_HEADER_BYTES, file_bytes - offset))
    if len(header) < _RECORD_HEADER_BYTES:
        return Torn(offset, file_bytes - offset)
    if _CRC.unpack_from(header, _RECORD_HEADER.size)[0] != zlib.crc32(header[: _RECORD_HEADER.size]):
        return Damaged(offset, "the CRC of the record's header does not match; the records after it are lost", False)
    body_bytes, time, incarnation, direction = _RECORD_HEADER.unpack_from(header)
    # A length beyond the end of the file is never allocated.
    if offset + _RECORD_HEADER_BYTES + body_bytes + _CRC.size > file_bytes:
        return Torn(offset, file_bytes - offset)
    body = file.read(body_bytes)
    crc = file.read(_CRC.size)
    if crc != _CRC.pack(zlib.crc32(body, zlib.crc32(header))):
        return Damaged(offset, "the CRC of the record does not match", True)
    try:
        return Record(offset, time, Direction(direction), incarnation, body)
    except ValueError:
        return Damaged(offset, f"{direction} is not a direction", True)
