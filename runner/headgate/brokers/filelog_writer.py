"""Write to a file log from any synchronous program: `FileLogWriter`, and a small command that generates load.

::

    python -m headgate.brokers.filelog_writer FOLDER --events N [--partitions P] [--rate EVENTS_PER_SECOND]

appends ``{"id": 0, "partition": "p0", "written_at": 1700000000.0}`` and so on, with ids assigned round robin to the
partitions ``p0``, ``p1``, ..., and prints only errors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from headgate.brokers.filelogs import storage

__all__ = ["FileLogWriter"]

BATCH_EVENTS_MAX = 1000  # events the command appends to one partition at once
TICK_S = 0.01  # with --rate, the events due are written this often: a smooth rate without a busy loop


class FileLogWriter:
    """Appends JSON values to the partitions of a file log; creates the folder on first use.

    Safe to use from several threads, and while other processes write too: each batch of lines is one append under the
    file's lock. If a crashed writer left a torn last line, a newline ends it first, and readers pass over it as a line
    that is not JSON. Use as a context manager, or call `close`.
    """

    def __init__(self, folder: str | os.PathLike[str], *, line_bytes_max: int = storage.LINE_BYTES_MAX) -> None:
        self._folder = os.fspath(folder)
        self._line_bytes_max = line_bytes_max
        self._mutex = threading.Lock()
        self._files: dict[str, int] = {}
        self._names_synced: set[str] = set()  # partitions whose file name is known to be on the disk
        os.makedirs(self._folder, exist_ok=True)
        self.log_id = storage.ensure_log_id(self._folder)

    def append(self, partition: str, value: Any, *, durable: bool = False) -> int:
        """Append one value; return its offset in bytes. See `append_many` for ``durable`` and the errors."""
        return self.append_many(partition, (value,), durable=durable)[0]

    def append_many(self, partition: str, values: Iterable[Any], *, durable: bool = False) -> list[int]:
        """Append values as adjacent lines; return their offsets in bytes.

        With ``durable`` they are on the disk when this returns. Raises TypeError or ValueError if a value is not a
        JSON value or needs a line of more than ``line_bytes_max`` bytes; then none is written. Raises OSError if the
        disk is full; then some whole lines may have been written.
        """
        lines = [self._encode(value) for value in values]
        if not lines:
            return []
        data = b"".join(lines)
        with self._mutex:
            fd = self._open(partition)
            with storage.appending(fd):
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                storage.write_all(fd, b"\n" + data if torn else data)
                # An append leaves the file's position at its own end, even if other processes write too.
                offset = os.lseek(fd, 0, os.SEEK_CUR) - len(data)
            if durable:
                os.fsync(fd)
                if partition not in self._names_synced:
                    storage.sync_folder(self._folder)
                    self._names_synced.add(partition)
        offsets = []
        for line in lines:
            offsets.append(offset)
            offset += len(line)
        return offsets

    def close(self) -> None:
        """Close the files; the writer can still be used and opens them again."""
        with self._mutex:
            while self._files:
                os.close(self._files.popitem()[1])

    def __enter__(self) -> FileLogWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self, partition: str) -> int:
        fd = self._files.get(partition)
        if fd is None:
            path = storage.partition_path(self._folder, partition)
            fd = self._files[partition] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        return fd

    def _encode(self, value: Any) -> bytes:
        line = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        if len(line) > self._line_bytes_max:
            raise ValueError(f"a value needs a line of {len(line):,} bytes; the limit is {self._line_bytes_max:,}")
        return line + b"\n"


def write_load(writer: FileLogWriter, *, events: int, partitions: int, rate: float | None, durable: bool) -> None:
    """Append numbered events to ``p0``, ``p1``, ..., as fast as possible or at ``rate`` events a second."""
    started = time.monotonic()
    written = 0
    while written < events:
        due = min(events, written + BATCH_EVENTS_MAX * partitions)
        if rate is not None:
            due = min(due, int((time.monotonic() - started) * rate) + 1)
        for number in range(partitions):
            first = written + (number - written) % partitions
            name = f"p{number}"
            now = time.time()
            batch = [{"id": id_, "partition": name, "written_at": now} for id_ in range(first, due, partitions)]
            writer.append_many(name, batch, durable=durable)
        written = max(written, due)
        if rate is not None and written < events:
            time.sleep(TICK_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m headgate.brokers.filelog_writer", description="Fill a file log.")
    parser.add_argument("folder")
    parser.add_argument("--events", type=int, required=True, help="how many to write")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--rate", type=float, help="events a second; without it as fast as possible")
    parser.add_argument("--durable", action="store_true", help="sync every batch to the disk")
    given = parser.parse_args(arguments)
    if given.events < 0 or given.partitions < 1 or (given.rate is not None and given.rate <= 0):
        parser.error("--events must not be negative, --partitions and --rate must be positive")
    try:
        with FileLogWriter(given.folder) as writer:
            write_load(writer, events=given.events, partitions=given.partitions, rate=given.rate, durable=given.durable)
    except (OSError, storage.FileLogError) as error:
        print(f"filelog_writer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
