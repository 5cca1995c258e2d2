"""The reader of a file log: what it reads, when it looks, and the damage it does not pass over in silence."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import trio
from inotify_simple import Event, flags  # type: ignore[import-untyped]
from tests.brokers.filelog.filelog_harness import CLEAN, reading
from trio.testing import wait_all_tasks_blocked

from headgate.brokers.filelog import (
    FileLogCorrupt,
    FileLogError,
    FileLogPosition,
    FileLogRewritten,
    FileLogWriter,
)
from headgate.brokers.filelogs import reading as filelog_reading

NOTICES_MAX = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


# --- tailing -------------------------------------------------------------------------------------


async def test_an_append_wakes_a_reader_that_waits(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append("p", "old")
    async with reading(tmp_path) as reader:
        assert await reader.values(1) == ["old"]
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                await wait_all_tasks_blocked(0.01)
                writer.append("p", {"new": 1})

            nursery.start_soon(write)
            ((value, position),) = await reader.take(1)
    assert value == {"new": 1}
    assert position == FileLogPosition("p", 6, 16, 0, position.file, zlib.crc32(b'{"new":1}\n'))


async def test_an_idle_reader_takes_no_step(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append("p", 1)

    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += task.name.endswith("take")

    steps = Steps()
    async with reading(tmp_path) as reader, trio.open_nursery() as nursery:
        await reader.take(1)
        nursery.start_soon(reader.take, 1)
        await wait_all_tasks_blocked(0.02)
        trio.lowlevel.add_instrument(steps)
        await wait_all_tasks_blocked(0.1)
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()
    assert steps.count == 0


async def test_a_torn_last_line_is_waited_for(tmp_path: Path, writer: FileLogWriter) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'1\n{"half": ')
    async with reading(tmp_path) as reader:
        assert await reader.values(1) == [1]
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                for piece in (b"true", b"}", b"\n"):
                    await wait_all_tasks_blocked(0.01)
                    with path.open("ab") as file:
                        file.write(piece)

            nursery.start_soon(write)
            assert await reader.values(1) == [{"half": True}]


async def test_partitions_that_appear_later_are_read_from_their_start(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append("a", "a0")
    async with reading(tmp_path) as reader:
        assert await reader.values(1) == ["a0"]
        writer.append("b", "b0")
        assert await reader.values(1) == ["b0"]
        (tmp_path / "draft").write_text('"c0"\n')
        (tmp_path / "draft").rename(tmp_path / "c.jsonl")
        assert await reader.values(1) == ["c0"]
        writer.append("a", "a1")
        assert await reader.values(1) == ["a1"]


async def test_partitions_take_turns(tmp_path: Path, writer: FileLogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filelog_reading, "READ_LINES_MAX", 2)
    for partition in ("a", "b"):
        writer.append_many(partition, [partition] * 5)
    async with reading(tmp_path) as reader:
        values = await reader.values(10)
    assert sorted(["".join(values[:2]), "".join(values[2:4])]) == ["aa", "bb"]
    assert sorted(values) == ["a"] * 5 + ["b"] * 5


@pytest.mark.skipif(NOTICES_MAX > 100_000, reason="filling the kernel's queue of notices takes too long here")
async def test_what_inotify_lost_when_its_queue_overflowed_is_found(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append("a", "first")
    async with reading(tmp_path) as reader:
        assert await reader.values(1) == ["first"]
        # The kernel's queue takes this many notices; neighbouring ones of one file are merged, so two take turns.
        for _ in range(NOTICES_MAX // 2 + 1):
            writer.append("a", 0)
            writer.append("b", 0)
        writer.append("late", 0)
        seen = {position.partition for _, position in await reader.take(2 * (NOTICES_MAX // 2 + 1) + 1)}
    assert seen == {"a", "b", "late"}


async def test_an_overflow_notice_calls_for_a_look_at_the_folder(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append("a", 1)

    class Overflowed:
        def __init__(self, real: Any) -> None:
            self.real = real

        def read(self, timeout: int) -> list[Any]:
            return [Event(-1, flags.Q_OVERFLOW, 0, "")] if list(self.real.read(timeout)) else []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    async with reading(tmp_path) as reader:
        await reader.take(1)
        reader.producer._inotify = Overflowed(reader.producer._inotify)
        writer.append("b", 2)
        assert await reader.values(1) == [2]
        writer.append("a", 3)
        assert await reader.values(1) == [3]


async def test_changes_that_inotify_does_not_tell_of_are_found_by_the_next_look(tmp_path: Path) -> None:
    with FileLogWriter(tmp_path / "log") as writer:
        writer.append("p", 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("2\n")
    (tmp_path / "log" / "link.jsonl").symlink_to(elsewhere)
    async with reading(tmp_path / "log", rescan_interval_s=0.01) as reader:
        assert sorted(await reader.values(2)) == [1, 2]
        with elsewhere.open("a") as file:
            file.write("3\n")
        assert await reader.values(1) == [3]


async def test_no_more_lines_are_in_flight_than_the_limit_and_one_read(
    tmp_path: Path, writer: FileLogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filelog_reading, "READ_LINES_MAX", 2)
    writer.append_many("p", list(range(9)))
    async with reading(tmp_path, in_flight_max=3) as reader:
        taken = await reader.take(4)
        async with trio.open_nursery() as nursery:
            fifth: list[Any] = []

            async def take() -> None:
                fifth.extend(await reader.take(1))

            nursery.start_soon(take)
            await wait_all_tasks_blocked(0.05)
            assert fifth == []
            await reader.advance(taken[:2], CLEAN, CLEAN)
        assert fifth[0][0] == 4


# --- what must not be silent ---------------------------------------------------------------------


async def test_a_log_shorter_than_its_committed_offset_is_an_error(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append_many("p", [0, 1])
    async with reading(tmp_path) as reader:
        await reader.advance(await reader.take(2), CLEAN, CLEAN)
    (tmp_path / "p.jsonl").write_bytes(b"0\n")
    async with reading(tmp_path) as reader:
        with pytest.raises(FileLogRewritten, match=r"p\.jsonl has 2 bytes, but was read up to 4"):
            await reader.take(1)
    (tmp_path / "p.jsonl").unlink()
    async with reading(tmp_path) as reader:
        with pytest.raises(FileLogRewritten, match=r"p\.jsonl was removed"):
            await reader.take(1)


@pytest.mark.parametrize("change", ["shorten", "remove", "replace", "move the folder"])
async def test_a_log_that_is_rewritten_while_it_is_read_is_an_error(
    tmp_path: Path, writer: FileLogWriter, change: str
) -> None:
    folder = tmp_path / "log"
    with FileLogWriter(folder) as log:
        log.append_many("p", [0, 1])
    path = folder / "p.jsonl"
    async with reading(folder) as reader:
        await reader.take(2)
        if change == "shorten":
            os.truncate(path, 2)
        elif change == "remove":
            path.unlink()
        elif change == "replace":
            (folder / "new").write_bytes(b"0\n7\n2\n")
            (folder / "new").rename(path)
        else:
            folder.rename(tmp_path / "moved")
        with pytest.raises(FileLogError, match=r"bytes|removed|replaced|not a folder any more"):
            await reader.take(1)


async def test_damaged_offsets_are_an_error_and_never_a_start_from_zero(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append("p", 0)
    (tmp_path / ".groups").mkdir()
    (tmp_path / ".groups" / "g.json").write_text("{}")
    async with reading(tmp_path) as reader:
        with pytest.raises(FileLogCorrupt, match=r"g\.json"):
            await reader.take(1)


async def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    async with reading(tmp_path / "nowhere") as reader:
        with pytest.raises(FileLogError, match="nowhere is not a folder"):
            await reader.take(1)
