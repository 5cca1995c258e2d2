"""Below SIGKILL: what is left of the database when the power goes at the moment a confirmation leaves.

A system-call trace of the real intake, store and link shows every write to the database's files, every sync, and
every answer that is sent. From it the files are rebuilt as a disk would hold them that lost whatever was not synced,
and SQLite is asked what it finds in them: every event the answer confirms must be there (I1).
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from cryptography.fernet import Fernet

HERE = Path(__file__).parent
ROUNDS = 5
TRACED = "pwrite64,ftruncate,fdatasync,fsync,sendto,sendmsg"
CALL = re.compile(r'^\d+ +(\w+)\(\d+<([^>]*)>(?:, "([^"]*)"(?:, (\d+), (\d+))?|, (\d+))?.*\) += (-?\d+)')


class Call(NamedTuple):
    """One traced call: ``data`` went to ``path`` at ``offset`` (of a truncation: the new size)."""

    name: str
    path: str
    data: bytes
    offset: int


class Answer(NamedTuple):
    """One answer that left: what it confirms, and what the disk held for certain at that moment."""

    confirmed: set[int]
    stored: set[int]


def trace(url: str, folder: Path, synchronous: str) -> list[Call]:
    """Run the program that stores and answers under strace; return what it did. Skips where that cannot be."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    output = folder / "trace"
    command = [strace, "-f", "-y", "-xx", "-s", "1000000", "-e", f"trace={TRACED}", "-o", str(output), sys.executable]
    command += [str(HERE / "storing.py"), url, Fernet.generate_key().decode(), str(ROUNDS), synchronous]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip(f"this machine lets nobody trace: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return [call for line in output.read_text().splitlines() if (call := parse(line)) is not None]


def parse(line: str) -> Call | None:
    """Read one line of the trace; None for the end of a process."""
    if "+++ exited" in line or "--- SIG" in line:
        return None
    match = CALL.match(line)
    assert match is not None, f"a line of the trace that cannot be read: {line[:200]}"
    name, path, data, length, offset, size, result = match.groups()
    assert int(result) >= 0, line[:200]
    if name == "pwrite64":
        assert result == length, "a short write, which the program itself would have to go on with"
    return Call(name, bytes_of(path).decode(), bytes_of(data or ""), int(offset or size or 0))


def bytes_of(escaped: str) -> bytes:
    """Undo strace's ``-xx``."""
    return bytes.fromhex(escaped.replace("\\x", ""))


class Disk:
    """The files of a database as a disk holds them: what was written, and what of it is certain."""

    def __init__(self, database: Path) -> None:
        self._paths = {str(database): "cut.db", f"{database}-wal": "cut.db-wal"}
        self._written = {path: Path(path).read_bytes() if Path(path).exists() else b"" for path in self._paths}
        self._certain = dict(self._written)

    def apply(self, call: Call) -> None:
        """Take one call."""
        if call.path not in self._paths:
            return
        content = self._written[call.path]
        match call.name:
            case "pwrite64":
                content = content.ljust(call.offset, b"\0")
                end = call.offset + len(call.data)
                self._written[call.path] = content[: call.offset] + call.data + content[end:]
            case "ftruncate":
                self._written[call.path] = content[: call.offset].ljust(call.offset, b"\0")
            case "fdatasync" | "fsync":
                self._certain[call.path] = content
            case _:
                pass  # an answer, which is not written to a file

    def events_after_power_cut(self, folder: Path) -> set[int]:
        """Return the events that SQLite finds when only what is certain is left."""
        folder.mkdir()
        for path, name in self._paths.items():
            (folder / name).write_bytes(self._certain[path])
        connection = sqlite3.connect(folder / "cut.db")
        try:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            return {index for (index,) in connection.execute("SELECT sequence_index FROM trigger_event")}
        finally:
            connection.close()


def answers(calls: list[Call], disk: Disk, folder: Path) -> list[Answer]:
    """Follow the calls; at each answer, cut the power."""
    found: list[Answer] = []
    for call in calls:
        disk.apply(call)
        if call.name in ("sendto", "sendmsg") and call.data[5:10] == b"\xa4sync":
            _tag, _round, persisted, *_ = msgspec.msgpack.decode(call.data[4:])
            found.append(Answer(set(persisted), disk.events_after_power_cut(folder / f"cut-{len(found)}")))
    return found


def run(sqlite_url: str, tmp_path: Path, synchronous: str) -> list[Answer]:
    database = Path(sqlite_url.removeprefix("sqlite:///"))
    disk = Disk(database)
    found = answers(trace(sqlite_url, tmp_path, synchronous), disk, tmp_path)
    assert [answer.confirmed for answer in found] == [{number} for number in range(1, ROUNDS + 1)]
    return found


def test_what_a_confirmation_confirms_survives_a_power_cut_at_the_moment_it_leaves(
    sqlite_url: str, tmp_path: Path
) -> None:
    for answer in run(sqlite_url, tmp_path, "FULL"):
        assert answer.confirmed <= answer.stored


def test_with_synchronous_normal_the_same_power_cut_loses_confirmed_events(sqlite_url: str, tmp_path: Path) -> None:
    assert any(not answer.confirmed <= answer.stored for answer in run(sqlite_url, tmp_path, "NORMAL"))
