"""Files that are renamed, copied, truncated and replaced: each line that was there at a look is handed out, or an
error says which file is missing."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.brokers.filelog.filelog_harness import CLEAN, FAILED, Reader, offsets, reading

from headgate.brokers import filelog_offsets
from headgate.brokers.filelog import FileLogPosition, FileLogRewritten
from headgate.brokers.filelog_writer import FileLogWriter
from headgate.brokers.filelogs.storage import load_offsets

OLD = [f"old {number}" for number in range(6)]
NEW = [f"new {number}" for number in range(6)]  # lines of the same length


def lines(values: list[str]) -> bytes:
    return b"".join(b'"%s"\n' % value.encode() for value in values)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def edit(path: Path, script: str, backup: str = "") -> None:
    subprocess.run(["sed", f"-i{backup}", script, path], check=True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with one partition of six lines."""
    with FileLogWriter(tmp_path / "log") as writer:
        writer.append_many("p", OLD)
    return tmp_path / "log"


async def take_clean(reader: Reader, count: int) -> list[Any]:
    """Take lines, and have each accepted before the next."""
    values = []
    for _ in range(count):
        taken = await reader.take(1)
        await reader.advance(taken, CLEAN)
        values.append(taken[0][0])
    return values


async def keys_of(reader: Reader, taken: list[tuple[Any, FileLogPosition]]) -> list[str]:
    return [reader.producer.event_key(position) for _, position in taken]


def rename(log: Path) -> None:
    (log / "p.jsonl").rename(log / "p.jsonl.1")
    (log / "p.jsonl").write_bytes(lines(NEW))


def rename_to_a_partition_like_name(log: Path) -> None:
    (log / "p.jsonl").rename(log / "p-1122.jsonl")
    (log / "p.jsonl").write_bytes(lines(NEW))


def copy_and_truncate(log: Path) -> None:
    shutil.copyfile(log / "p.jsonl", log / "p.jsonl.1")
    os.truncate(log / "p.jsonl", 0)
    append(log / "p.jsonl", lines(NEW))


ROTATIONS = pytest.mark.parametrize("rotate", [rename, rename_to_a_partition_like_name, copy_and_truncate])


@asynccontextmanager
async def once_more(log: Path, reader: Reader, *, restarted: bool) -> AsyncIterator[Reader]:
    """The same reader, or the next one."""
    if not restarted:
        yield reader
        return
    await reader.stream.aclose()
    await reader.producer.aclose()
    async with reading(log) as another:
        yield another


@ROTATIONS
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("accepted", [0, 1, 4, 6])
async def test_a_rotated_file_is_read_to_its_end_and_then_the_new_one(
    log: Path, rotate: Callable[[Path], None], restarted: bool, accepted: int
) -> None:
    async with reading(log) as first:
        taken = await first.take(6)
        if accepted:
            await first.advance(taken[:accepted], *[CLEAN] * accepted)
        rotate(log)
        async with once_more(log, first, restarted=restarted) as reader:
            if not restarted and accepted < 6:
                await reader.advance(taken[accepted:5], *[CLEAN] * (5 - accepted))
                await reader.advance(taken[5:], FAILED)
                accepted = 5
            values = await take_clean(reader, 12 - accepted)
    assert values == [*OLD[accepted:], *NEW]
    assert offsets(log)["p"] == len(lines(NEW))


@ROTATIONS
async def test_lines_keep_their_keys_in_a_rotated_file_and_no_two_lines_have_one(
    log: Path, rotate: Callable[[Path], None]
) -> None:
    async with reading(log) as reader:
        taken = await reader.take(6)
        before = await keys_of(reader, taken)
    rotate(log)
    async with reading(log) as reader:
        taken = await reader.take(6)
        assert await keys_of(reader, taken) == before
        await reader.advance(taken, *[CLEAN] * 6)
        after = await keys_of(reader, await reader.take(6))
    assert len({*before, *after}) == 12


@ROTATIONS
async def test_a_rotated_file_is_not_read_again_by_any_later_reader(log: Path, rotate: Callable[[Path], None]) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 6)
        rotate(log)
        await take_clean(reader, 6)
    for number in range(2):
        append(log / "q.jsonl", b"%d\n" % number)
        async with reading(log) as reader:
            assert await take_clean(reader, 1) == [number]


async def test_the_new_file_waits_for_what_is_unresolved_in_the_old_one(log: Path) -> None:
    async with reading(log) as reader:
        taken = await reader.take(6)
        rename(log)
        (log / "q.jsonl").write_bytes(b"1\n2\n")
        assert await take_clean(reader, 1) == [1]
        await reader.advance(taken[:5], *[CLEAN] * 5)
        assert await take_clean(reader, 1) == [2]
        await reader.advance(taken[5:], FAILED)
        assert await reader.values(1) == [OLD[5]]


async def test_several_rotations_of_names_are_followed(log: Path) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 6)
        for number in range(4):
            for rotated in range(number, 0, -1):
                (log / f"p.jsonl.{rotated}").rename(log / f"p.jsonl.{rotated + 1}")
            (log / "p.jsonl").rename(log / "p.jsonl.1")
            (log / "p.jsonl").write_bytes(b'"round %d"\n' % number)
            assert await take_clean(reader, 1) == [f"round {number}"]
    async with reading(log) as reader:
        append(log / "p.jsonl", b'"last"\n')
        assert await take_clean(reader, 1) == ["last"]
    names = [(entry.name, entry.is_rotated) for entry in load_offsets(str(log), "g", reader.producer._log_id)]
    assert names == [*((f"p.jsonl.{number}", True) for number in (4, 3, 2, 1)), ("p.jsonl", False)]


async def test_a_line_that_is_still_written_to_the_old_file_is_handed_out(log: Path) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 6)
        with (log / "p.jsonl").open("ab") as writer:
            rename(log)
            assert await take_clean(reader, 6) == NEW
            writer.write(b'"late"\n')
            writer.flush()
            assert await take_clean(reader, 1) == ["late"]


async def test_a_rotated_file_that_was_read_to_its_end_may_be_removed(log: Path) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 6)
        rename(log)
        assert await take_clean(reader, 6) == NEW
        (log / "p.jsonl.1").unlink()
        (log / "q.jsonl").write_bytes(b"1\n")
        assert await take_clean(reader, 1) == [1]
    assert len(load_offsets(str(log), "g", reader.producer._log_id)) == 2


async def test_a_rotated_file_that_is_removed_before_its_end_is_an_error_that_names_it(log: Path) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 5)
        rename(log)
        await reader.take(1)
    (log / "p.jsonl.1").unlink()
    async with reading(log) as reader:
        problem = r"'p' up to 40 of at least 48 bytes is under no name in the folder; .* --restart PARTITION"
        with pytest.raises(FileLogRewritten, match=problem):
            await reader.take(1)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_file_that_is_truncated_and_written_again_is_an_error_however_long_it_is(
    log: Path, restarted: bool
) -> None:
    async with reading(log) as first:
        await take_clean(first, 3)
        os.truncate(log / "p.jsonl", 0)
        append(log / "p.jsonl", lines(NEW))
        async with once_more(log, first, restarted=restarted) as reader:
            if not restarted:  # what was read before the truncation is not lost
                assert await take_clean(reader, 3) == OLD[3:]
            with pytest.raises(FileLogRewritten, match="is under no name in the folder"):
                await reader.take(1)


async def test_lines_that_were_seen_and_are_not_in_the_copy_are_an_error_for_every_later_reader(log: Path) -> None:
    async with reading(log) as reader:
        await reader.take(6)
        shutil.copyfile(log / "p.jsonl", log / "p.jsonl.1")
        append(log / "p.jsonl", b'"written between copy and truncation"\n')
        await reader.take(1)
        os.truncate(log / "p.jsonl", 0)
        with pytest.raises(FileLogRewritten, match="up to 86 of at least 86 bytes"):
            await reader.take(1)
    for _ in range(2):
        async with reading(log) as reader:
            with pytest.raises(FileLogRewritten, match="up to 0 of at least 86 bytes"):
                await reader.take(1)


async def test_a_partition_and_its_offsets_made_anew_have_other_keys(log: Path) -> None:
    async with reading(log) as reader:
        taken = await reader.take(6)
        before = await keys_of(reader, taken)
        await reader.advance(taken, *[CLEAN] * 6)
    shutil.rmtree(log / ".groups")
    inode = (log / "p.jsonl").stat().st_ino
    (log / "p.jsonl").write_bytes(lines([OLD[0], *NEW[1:]]))
    assert (log / "p.jsonl").stat().st_ino == inode, "as a file system may give it, with the same first line"
    async with reading(log) as reader:
        after = await keys_of(reader, await reader.take(6))
    assert not {*before} & {*after[1:]}


async def test_offsets_that_were_removed_lead_to_the_same_keys(log: Path) -> None:
    async with reading(log) as reader:
        before = await keys_of(reader, await reader.take(6))
    (log / ".groups" / "g.json").unlink()
    async with reading(log) as reader:
        assert await keys_of(reader, await reader.take(6)) == before


async def test_a_log_that_was_copied_goes_on_where_it_was_with_the_same_keys(log: Path, tmp_path: Path) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 2)
        before = await keys_of(reader, await reader.take(4))
    shutil.copytree(log, tmp_path / "elsewhere")
    async with reading(tmp_path / "elsewhere") as reader:
        taken = await reader.take(4)
        assert [value for value, _ in taken] == OLD[2:]
        assert await keys_of(reader, taken) == before


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_edit_of_unread_lines_is_taken_and_one_of_read_lines_is_an_error(log: Path, restarted: bool) -> None:
    async with reading(log) as first:
        await take_clean(first, 6)
        append(log / "p.jsonl", lines(NEW[:1]))
        edit(log / "p.jsonl", "s/new 0/edited/")
        async with once_more(log, first, restarted=restarted) as reader:
            assert await take_clean(reader, 1) == ["edited"]
            edit(log / "p.jsonl", "s/old 0/shorter/")
            async with once_more(log, reader, restarted=restarted) as last:
                with pytest.raises(FileLogRewritten, match="first line"):
                    await last.take(1)


async def test_an_editor_that_leaves_a_backup_is_asked_about(log: Path) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 6)
    edit(log / "p.jsonl", "s/new 0/edited/", ".bak")
    async with reading(log) as reader:
        with pytest.raises(FileLogRewritten, match=r"remove p\.jsonl\.bak from the folder"):
            await reader.take(1)
    (log / "p.jsonl.bak").unlink()
    append(log / "p.jsonl", lines(NEW))
    async with reading(log) as reader:
        assert await take_clean(reader, 6) == NEW


async def test_files_that_swap_their_names_are_still_who_they_are(log: Path) -> None:
    (log / "q.jsonl").write_bytes(lines(NEW))
    async with reading(log) as reader:
        before = {}
        for value, position in await reader.take(12):
            before[value] = reader.producer.event_key(position)
            if value in (OLD[0], NEW[0]):
                await reader.advance([(value, position)], CLEAN)
    (log / "p.jsonl").rename(log / "r")
    (log / "q.jsonl").rename(log / "p.jsonl")
    (log / "r").rename(log / "q.jsonl")
    async with reading(log) as reader:
        after = {value: reader.producer.event_key(position) for value, position in await reader.take(10)}
    assert after == {value: key for value, key in before.items() if value not in (OLD[0], NEW[0])}


async def test_an_empty_new_file_and_a_torn_end_of_the_old_one_make_no_noise(log: Path) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 6)
        append(log / "p.jsonl", b'"torn')
        (log / "p.jsonl").rename(log / "p.jsonl.1")
        (log / "p.jsonl").touch()
        (log / "q.jsonl").write_bytes(b"1\n")
        assert await take_clean(reader, 1) == [1]
        reads = 0

        class Reads(trio.abc.Instrument):
            def before_task_step(self, task: trio.lowlevel.Task) -> None:
                nonlocal reads
                reads += task.name.endswith("take")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.take, 1)
            await trio.testing.wait_all_tasks_blocked(0.05)
            trio.lowlevel.add_instrument(Reads())
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert reads == 0
            (log / "p.jsonl").write_bytes(b"2\n")


# --- random histories ----------------------------------------------------------------------------


class Story:
    """A partition that is written, rotated and read at random, and its lines in order. No two lines are alike."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.written = 0
        self.accepted = 0
        self.rotations = 0
        self.begins_at = 0  # the number of the first line of the newest file
        self.keys: dict[int, str] = {}

    @property
    def path(self) -> Path:
        return self.folder / "p.jsonl"

    @property
    def may_rotate(self) -> bool:
        """Whether the newest file was looked at: a line of it was handed out."""
        return self.begins_at in self.keys

    def write(self) -> None:
        count = self.chance.randint(1, 5)
        append(self.path, b"".join(b"%06d\n" % (10**5 + self.written + number) for number in range(count)))
        self.written += count

    def rotate(self) -> None:
        self.rotations += 1
        rotated = self.folder / self.chance.choice((f"p.jsonl.{self.rotations}", f"p-{self.rotations}.jsonl"))
        if self.chance.random() < 0.5:
            self.path.rename(rotated)
        else:
            shutil.copyfile(self.path, self.folder / f"p.jsonl.{self.rotations}")
            os.truncate(self.path, 0)
        self.begins_at = self.written
        if self.chance.random() < 0.5:
            self.write()

    async def read(self, reader: Reader, *, accept: bool) -> None:
        ((value, position),) = taken = await reader.take(1)
        number = value - 10**5
        assert number == self.accepted, "the first line that is not accepted"
        key = reader.producer.event_key(position)
        assert self.keys.setdefault(number, key) == key
        await reader.advance(taken, CLEAN if accept else FAILED)
        self.accepted += accept


@pytest.mark.parametrize("seed", range(10))
async def test_each_line_is_handed_out_in_order_under_one_key_whatever_is_rotated_and_restarted(
    tmp_path: Path, seed: int
) -> None:
    with FileLogWriter(tmp_path):
        story = Story(tmp_path, seed)
    story.write()
    for _ in range(8):
        async with reading(tmp_path) as reader:
            for _ in range(story.chance.randint(0, 10)):
                if story.accepted < story.written and story.chance.random() < 0.6:
                    await story.read(reader, accept=story.chance.random() < 0.8)
                elif story.may_rotate and story.chance.random() < 0.5:
                    story.rotate()
                else:
                    story.write()
        if story.may_rotate and story.chance.random() < 0.5:
            story.rotate()
    async with reading(tmp_path) as reader:
        while story.accepted < story.written:
            await story.read(reader, accept=True)
    assert len(set(story.keys.values())) == story.written
    story.write()
    async with reading(tmp_path) as reader:
        await story.read(reader, accept=True)
    story.chance.choice((story.path.unlink, partial(story.path.write_bytes, b"1\n")))()
    for _ in range(2):
        async with reading(tmp_path) as reader:
            with pytest.raises(FileLogRewritten, match="is under no name in the folder"):
                await reader.take(1)


# --- giving a file up ----------------------------------------------------------------------------


async def test_a_file_that_is_given_up_is_followed_by_the_next_one_with_keys_of_its_own(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with reading(log) as reader:
        taken = await reader.take(6)
        before = await keys_of(reader, taken)
        await reader.advance(taken[:4], *[CLEAN] * 4)
    os.truncate(log / "p.jsonl", 0)
    append(log / "p.jsonl", lines([OLD[0], *NEW[1:]]))
    assert filelog_offsets.main([str(log), "g", "--restart", "p"]) == 0
    assert "p: given up at 32 of at least 48 bytes" in capsys.readouterr().out
    assert filelog_offsets.main([str(log), "g"]) == 0
    assert "p: the next file" in capsys.readouterr().out
    async with reading(log) as reader:
        taken = await reader.take(6)
        assert [value for value, _ in taken] == [OLD[0], *NEW[1:]]
        assert not {*before} & {*await keys_of(reader, taken)}, "not even that of the first line, which is the same"


async def test_a_partition_that_was_removed_is_given_up_and_the_others_go_on(log: Path) -> None:
    (log / "q.jsonl").write_bytes(b"1\n2\n")
    async with reading(log) as reader:
        await reader.take(8)
    (log / "p.jsonl").unlink()
    assert filelog_offsets.main([str(log), "g", "--restart", "p"]) == 0
    async with reading(log) as reader:
        assert await take_clean(reader, 2) == [1, 2]
    assert offsets(log) == {"q": 4}


async def test_nothing_is_given_up_while_the_group_is_read_or_by_a_wrong_name(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with reading(log) as reader:
        await take_clean(reader, 4)
        assert filelog_offsets.main([str(log), "g", "--restart", "p", "--lock-timeout", "0"]) == 1
        assert "is in use by process" in capsys.readouterr().err
        assert filelog_offsets.main([str(log), "g"]) == 0
        assert capsys.readouterr().out == "p: 32 of 48 bytes of p.jsonl\n"
        append(log / "p.jsonl", b"7\n")
        assert filelog_offsets.main([str(log), "g"]) == 0
        assert capsys.readouterr().out == "p: 32 of 50 bytes of p.jsonl\n", "what was not looked at yet counts"
        os.truncate(log / "p.jsonl", 48)
        (log / "p.jsonl").rename(log / "away")
        assert filelog_offsets.main([str(log), "g"]) == 0
        assert capsys.readouterr().out == "p: 32 of at least 48 bytes of p.jsonl\n"
        (log / "away").rename(log / "p.jsonl")
    assert filelog_offsets.main([str(log), "G"]) == 1
    assert "by a group 'G'" in capsys.readouterr().err
    assert filelog_offsets.main([str(log), "g", "--restart", "P"]) == 1
    assert "group 'g' has no partition 'P'; it has: p" in capsys.readouterr().err
    assert filelog_offsets.main([str(log / "nowhere"), "g"]) == 1
    assert "nowhere is not a folder" in capsys.readouterr().err
    async with reading(log) as reader:
        assert await take_clean(reader, 2) == OLD[4:]
