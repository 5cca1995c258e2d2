"""Show the committed offsets of a group of a file log, and give a file up that cannot be found any more.

::

    python -m headgate.brokers.filelog_offsets FOLDER GROUP
    python -m headgate.brokers.filelog_offsets FOLDER GROUP --restart PARTITION

The second form is the way on after a `FileLogRewritten`: the rest of the partition's file is given up, and the file
that has its name now, or will have it, is read from its start. Its lines have keys of their own, so all of them are
stored, also those that were in the old file. It waits for the group's lock, which a stream that has stopped with the
error holds only for the moment of each new try.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from headgate.brokers.filelogs import storage
from headgate.brokers.filelogs.storage import FileEntry, FileLogBusy, FileLogError

LOCK_TIMEOUT_S = 10.0
LOCK_POLL_S = 0.02  # short, because between two tries of a stream that fails the lock is free


def show(folder: str, group: str) -> list[str]:
    """Return a line for each file of the group. Raises FileLogError if there is no such group."""
    files = storage.load_offsets(folder, group, storage.ensure_log_id(folder))
    if not files:
        raise FileLogError(f"nothing was read in {folder} by a group {group!r}")
    return [_text_of(folder, file) for file in files]


def restart(folder: str, group: str, partition: str, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> str:
    """Give up the files of a partition that are not at their end; return what was done.

    Raises FileLogBusy if the group is read, FileLogError if it has no such partition.
    """
    log_id = storage.ensure_log_id(folder)
    deadline = time.monotonic() + lock_timeout_s
    while (lock := storage.try_lock(folder, group)) is None:
        if time.monotonic() >= deadline:
            raise FileLogBusy(folder, group, storage.lock_holder(folder, group))
        time.sleep(LOCK_POLL_S)
    try:
        files = storage.load_offsets(folder, group, log_id)
        ours = [file for file in files if file.partition == partition and not file.is_rotated]
        if not ours:
            known = ", ".join(sorted({file.partition for file in files})) or "none"
            raise FileLogError(f"group {group!r} has no partition {partition!r}; it has: {known}")
        (old,) = ours
        new = msgspec.structs.replace(old, name="", inode=0, offset=0, last=storage.Seal(0, 0), seen=0)
        rest = [file for file in files if file.partition != partition or _is_done(file)]
        storage.store_offsets(folder, group, log_id, [*rest, new])
    finally:
        storage.release_lock(lock)
    lost = [file for file in files if file not in rest]
    return "; ".join(f"{partition}: given up at {_read_of(file)}" for file in lost)


def _is_done(file: FileEntry) -> bool:
    return file.is_rotated and file.offset >= file.seen


def _text_of(folder: str, file: FileEntry) -> str:
    if not file.name:
        return f"{file.partition}: the next file is read from its start"
    rotated = ", rotated" if file.is_rotated else ""
    return f"{file.partition}: {_read_of(file, _size_of(folder, file))}{rotated}"


def _read_of(file: FileEntry, size: int | None = None) -> str:
    """Return how much of a file is read; of one that is not there, what it had when it was read last."""
    bytes_ = f"at least {file.seen:,}" if size is None else f"{size:,}"
    return f"{file.offset:,} of {bytes_} bytes of {file.name}"


def _size_of(folder: str, file: FileEntry) -> int | None:
    """Return the size of a file now; None if the one with its name is another one."""
    try:
        found = os.stat(os.path.join(folder, file.name))
    except OSError:
        return None
    return found.st_size if found.st_ino == file.inode and found.st_size >= file.seen else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m headgate.brokers.filelog_offsets", description="Committed offsets of a group of a file log."
    )
    parser.add_argument("folder")
    parser.add_argument("group")
    parser.add_argument("--restart", metavar="PARTITION", help="give its file up, and read the next one from its start")
    parser.add_argument(
        "--lock-timeout", type=float, default=LOCK_TIMEOUT_S, metavar="S", help="seconds, 10 by default"
    )
    given = parser.parse_args(arguments)
    try:
        if given.restart is None:
            print("\n".join(show(given.folder, given.group)))
        else:
            print(restart(given.folder, given.group, given.restart, lock_timeout_s=given.lock_timeout))
    except (OSError, ValueError, FileLogError) as error:
        print(f"filelog_offsets: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
