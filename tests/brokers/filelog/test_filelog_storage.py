"""Files of a file log: its identity, its partitions, offsets and rejected lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headgate.brokers.filelogs import storage
from headgate.brokers.filelogs.storage import FileEntry, FileLogCorrupt, FileLogError, RejectedLine, Seal


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / ".groups").mkdir()
    return str(tmp_path)


def entry(partition: str, offset: int, *, is_rotated: bool = False) -> FileEntry:
    """A file of a group, committed to an offset."""
    head = last = Seal(2, 0x1234)
    name = f"{partition}.jsonl"
    return FileEntry("0a1b2c3d", partition, name, 77, head, offset, last, offset, 10**18, is_rotated=is_rotated)


# --- identity ------------------------------------------------------------------------------------


def test_a_log_has_one_identity_however_many_make_it_at_once(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    made: list[str] = []

    def make() -> None:
        start.wait()
        made.append(storage.ensure_log_id(str(tmp_path)))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(made)) == 1
    assert os.listdir(tmp_path) == [".log-id"]


def test_a_log_made_anew_has_another_identity(tmp_path: Path) -> None:
    first = storage.ensure_log_id(str(tmp_path))
    (tmp_path / ".log-id").unlink()
    assert storage.ensure_log_id(str(tmp_path)) != first


def test_an_identity_that_is_damaged_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / ".log-id").write_text("3f2a9c")
    with pytest.raises(FileLogCorrupt, match=r"\.log-id does not contain"):
        storage.ensure_log_id(str(tmp_path))


def test_a_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileLogError, match="nowhere is not a folder"):
        storage.ensure_log_id(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a\0b", "x" * 241, "\udcff"])
def test_a_name_that_cannot_be_a_partition_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="partition"):
        storage.partition_path("log", name)


@pytest.mark.parametrize("name", ["", ".", "../a", "a b", "-a", "x" * 101, "a\n"])
def test_a_name_that_cannot_be_a_group_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="group"):
        storage.group_path("log", name, ".json")


# --- offsets -------------------------------------------------------------------------------------


def test_offsets_are_stored_in_the_documented_form(folder: str) -> None:
    files = [entry("orders", 99, is_rotated=True), entry("orders", 1234), entry("a", 0)]
    storage.store_offsets(folder, "g", "3f2a9c41", files)
    stored = json.loads(Path(folder, ".groups", "g.json").read_text())
    assert stored["log"] == "3f2a9c41"
    assert stored["offsets"] == {"a": 0, "orders": 1234}, "of the newest file of each partition"
    assert stored["files"][1] == {
        "id": "0a1b2c3d",
        "partition": "orders",
        "name": "orders.jsonl",
        "inode": 77,
        "head": [2, 0x1234],
        "offset": 1234,
        "last": [2, 0x1234],
        "seen": 1234,
        "mtime": 10**18,
        "is_rotated": False,
    }
    assert storage.load_offsets(folder, "g", "3f2a9c41") == files


def test_a_new_group_has_no_offsets(folder: str) -> None:
    assert storage.load_offsets(folder, "g", "3f2a9c41") == []


def test_offsets_that_were_edited_are_refused(folder: str) -> None:
    storage.store_offsets(folder, "g", "3f2a9c41", [entry("p", 10)])
    path = Path(folder, ".groups", "g.json")
    path.write_text(path.read_text().replace('"p":10', '"p":20'))
    with pytest.raises(FileLogCorrupt, match="was edited"):
        storage.load_offsets(folder, "g", "3f2a9c41")


def test_a_draft_that_was_cut_at_any_byte_leaves_the_old_offsets(folder: str) -> None:
    storage.store_offsets(folder, "g", "3f2a9c41", [entry("p", 10)])
    path = Path(folder, ".groups", "g.json")
    draft = path.with_suffix(".json.tmp")
    whole = path.read_bytes().replace(b"10", b"20")
    for cut in range(len(whole) + 1):
        draft.write_bytes(whole[:cut])
        assert storage.load_offsets(folder, "g", "3f2a9c41") == [entry("p", 10)]
    draft.write_bytes(b"x" * 1000)
    storage.store_offsets(folder, "g", "3f2a9c41", [entry("p", 30)])
    assert storage.load_offsets(folder, "g", "3f2a9c41") == [entry("p", 30)]


STORE_FOR_EVER = """
import sys
from headgate.brokers.filelogs import storage
for offset in range(int(sys.argv[2]), 10**9):
    files = [
        storage.FileEntry("0a1b2c3d", name, name, 7, storage.Seal(2, 9), offset, storage.Seal(2, 9), offset, 8)
        for name in ("p", "q" * 200)
    ]
    storage.store_offsets(sys.argv[1], "g", "3f2a9c41", files)
    print(offset, flush=True)
"""


def test_a_process_killed_while_it_commits_leaves_its_last_commit_or_the_one_before(folder: str) -> None:
    offset = 0
    for round_ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", STORE_FOR_EVER, folder, str(offset)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(round_ + 1):
                reported = int(process.stdout.readline())
            process.kill()
            rest = process.stdout.read().splitlines()
        reported = int(rest[-1]) if rest else reported
        offset = storage.load_offsets(folder, "g", "3f2a9c41")[0].offset
        assert offset in (reported, reported + 1)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"log": "3f2a9c41"}', b'{"log": "3f2a9c41", "offsets": {"p": 1}}', b"\xff\xfe", b"[" * 9999],
)
def test_offsets_that_are_damaged_are_an_error_that_names_the_file(folder: str, content: bytes) -> None:
    Path(folder, ".groups", "g.json").write_bytes(content)
    with pytest.raises(FileLogCorrupt, match=r"g\.json is not a file of committed offsets"):
        storage.load_offsets(folder, "g", "3f2a9c41")


def test_offsets_of_another_log_are_refused(folder: str) -> None:
    storage.store_offsets(folder, "g", "3f2a9c41", [entry("p", 10)])
    with pytest.raises(FileLogCorrupt, match="offsets of the log 3f2a9c41, but this folder holds the log 00000000"):
        storage.load_offsets(folder, "g", "00000000")


# --- rejected lines ------------------------------------------------------------------------------


def test_a_torn_record_of_a_rejected_line_damages_no_later_one(folder: str) -> None:
    records = [RejectedLine(f"k{n}", "p", n, n + 1, "why", "text\n") for n in range(2)]
    storage.append_rejected(folder, "g", records[:1])
    path = Path(folder, ".groups", "g.rejected.jsonl")
    with path.open("ab") as file:
        file.write(b'{"key": "to')
    storage.append_rejected(folder, "g", records[1:])
    lines = path.read_text().splitlines()
    assert [json.loads(lines[n])["key"] for n in (0, 2)] == ["k0", "k1"]
    assert len(lines) == 3


# --- lock ----------------------------------------------------------------------------------------


def test_a_lock_is_held_once_and_names_its_holder(folder: str) -> None:
    fd = storage.try_lock(folder, "g")
    assert fd is not None
    assert storage.try_lock(folder, "g") is None
    assert storage.lock_holder(folder, "g") == os.getpid()
    other = storage.try_lock(folder, "another-group")
    assert other is not None
    storage.release_lock(other)
    storage.release_lock(fd)
    again = storage.try_lock(folder, "g")
    assert again is not None
    storage.release_lock(again)
