"""The lock that gives a group one reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.waiting import WITHIN_S
from trio.testing import wait_all_tasks_blocked

from headgate.brokers.filelog import FileLogBusy, FileLogProducer, FileLogWriter

HOLD = """
import sys
from headgate.brokers.filelogs import storage
assert storage.try_lock(sys.argv[1], "g") is not None
print("held", flush=True)
sys.stdin.read()
"""

# The fork says its pid and which file the descriptor of the lock is there, and lives until it is killed.
HOLD_AND_FORK = """
import os, signal, sys
from headgate.brokers.filelogs import storage
fd = storage.try_lock(sys.argv[1], "g")
assert fd is not None
if os.fork() == 0:
    print(os.getpid(), os.readlink(f"/proc/self/fd/{fd}"), flush=True)
    signal.pause()
os.wait()
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[FileLogWriter]:
    with FileLogWriter(tmp_path) as writer:
        yield writer


async def first_value(folder: Path, group: str = "g", **limits: Any) -> Any:
    """Read one line as a group, and close."""
    producer = FileLogProducer(folder, group, **limits)
    try:
        async with aclosing(producer.open_stream()) as stream:
            with trio.fail_after(WITHIN_S):
                return (await anext(stream))[0]
    finally:
        await producer.aclose()


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of group g until it is killed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def holder_that_forks(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Such a process with a fork that lives on; and the file that the descriptor of the lock is in the fork."""
    command = [sys.executable, "-c", HOLD_AND_FORK, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fork, file = process.stdout.readline().split()
        try:
            yield process, file
        finally:
            process.kill()
            os.kill(int(fork), signal.SIGKILL)


async def test_a_second_reader_of_a_group_is_refused_and_told_who_has_it(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append("p", 0)
    with holder(tmp_path) as process:
        with pytest.raises(FileLogBusy, match=f"in use by process {process.pid}") as caught:
            await first_value(tmp_path, lock_timeout_s=0.05)
        assert caught.value.holder_pid == process.pid
        assert await first_value(tmp_path, "another") == 0


async def test_a_reader_waits_for_a_dying_holder_and_a_killed_one_frees_the_group(
    tmp_path: Path, writer: FileLogWriter
) -> None:
    writer.append("p", 0)
    with holder(tmp_path) as process:
        async with trio.open_nursery() as nursery:
            values: list[Any] = []

            async def take() -> None:
                values.append(await first_value(tmp_path))

            nursery.start_soon(take)
            await wait_all_tasks_blocked(0.02)
            assert values == []
            process.kill()
    assert values == [0]


async def test_a_fork_that_lives_on_does_not_keep_the_lock_of_a_reader_that_was_killed(
    tmp_path: Path, writer: FileLogWriter
) -> None:
    writer.append("p", 0)
    with holder_that_forks(tmp_path) as (process, descriptor_of_fork):
        with pytest.raises(FileLogBusy, match=f"in use by process {process.pid}"):
            await first_value(tmp_path, lock_timeout_s=0)
        process.kill()
        process.wait()
        assert await first_value(tmp_path, lock_timeout_s=0) == 0
        assert descriptor_of_fork == os.devnull


async def test_a_closed_reader_frees_the_group_and_leaves_no_file_open(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append("p", 0)

    def open_files() -> list[str]:
        links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        targets = [os.readlink(link) for link in links if os.path.lexists(link)]
        return sorted(target for target in targets if target.startswith(str(tmp_path)))

    before = open_files()
    for _ in range(2):
        assert await first_value(tmp_path, lock_timeout_s=0) == 0
        assert open_files() == before == [str(tmp_path / "p.jsonl")]


async def test_a_reader_may_be_closed_twice_and_unopened(tmp_path: Path) -> None:
    producer = FileLogProducer(tmp_path, "g")
    await producer.aclose()
    await producer.aclose()
