"""Files of a file log: its identity, its partitions, offsets and rejected lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headgate.brokers import filelog_storage as storage
from headgate.brokers.filelog_storage import BadLine, FileLogCorrupt, FileLogError, FileLogRewritten, Line, RejectedLine


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / ".groups").mkdir()
    return str(tmp_path)


def read(path: Path, position: int = 0, *, line_bytes_max: int = 1000, scanned_to: int = 0) -> storage.Chunk:
    return storage.read_lines(str(path), position, line_bytes_max=line_bytes_max, scanned_to=scanned_to)


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
    storage.store_offsets(folder, "g", "3f2a9c41", {"orders": 1234, "a": 0})
    text = Path(folder, ".groups", "g.json").read_text()
    assert json.loads(text) == {"log": "3f2a9c41", "offsets": {"a": 0, "orders": 1234}}
    assert storage.load_offsets(folder, "g", "3f2a9c41") == {"a": 0, "orders": 1234}


def test_a_new_group_has_no_offsets(folder: str) -> None:
    assert storage.load_offsets(folder, "g", "3f2a9c41") == {}


def test_a_draft_that_was_cut_at_any_byte_leaves_the_old_offsets(folder: str) -> None:
    storage.store_offsets(folder, "g", "3f2a9c41", {"p": 10})
    path = Path(folder, ".groups", "g.json")
    draft = path.with_suffix(".json.tmp")
    whole = path.read_bytes().replace(b"10", b"20")
    for cut in range(len(whole) + 1):
        draft.write_bytes(whole[:cut])
        assert storage.load_offsets(folder, "g", "3f2a9c41") == {"p": 10}
    draft.write_bytes(b"x" * 1000)
    storage.store_offsets(folder, "g", "3f2a9c41", {"p": 30})
    assert storage.load_offsets(folder, "g", "3f2a9c41") == {"p": 30}


STORE_FOR_EVER = """
import sys
from headgate.brokers import filelog_storage as storage
for offset in range(int(sys.argv[2]), 10**9):
    storage.store_offsets(sys.argv[1], "g", "3f2a9c41", {"p": offset, "q" * 200: offset})
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
        offset = storage.load_offsets(folder, "g", "3f2a9c41")["p"]
        assert offset in (reported, reported + 1)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"log": "3f2a9c41"}', b'{"log": "3f2a9c41", "offsets": {"p": -1}}', b"\xff\xfe", b"[" * 9999],
)
def test_offsets_that_are_damaged_are_an_error_that_names_the_file(folder: str, content: bytes) -> None:
    Path(folder, ".groups", "g.json").write_bytes(content)
    with pytest.raises(FileLogCorrupt, match=r"g\.json is not a file of committed offsets"):
        storage.load_offsets(folder, "g", "3f2a9c41")


def test_offsets_of_another_log_are_refused(folder: str) -> None:
    storage.store_offsets(folder, "g", "3f2a9c41", {"p": 10})
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


def test_the_text_of_a_rejected_line_survives_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"1\ngr\xfcn \xe2\x82\xac\n")
    assert storage.read_text(str(path), 2, 11) == "gr\\xfcn €"


# --- lines ---------------------------------------------------------------------------------------


def test_whole_lines_are_read_and_a_torn_last_one_is_left(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"a": 1}\n"b"\n[3')
    chunk = read(path)
    assert chunk.lines == [Line(0, 9, {"a": 1}), Line(9, 13, "b")]
    assert chunk.at_end
    assert read(path, 13).lines == []
    with path.open("ab") as file:
        file.write(b"]\n")
    assert read(path, 13).lines == [Line(13, 17, [3])]


@pytest.mark.parametrize("text", [b"", b"{", b"nan", b'"\xff"', b"1 2", b"[" * 5000, b"1e999"])
def test_what_is_not_json_is_a_bad_line_between_good_ones(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"1\n" + text + b"\n2\n")
    first, bad, last = read(path, line_bytes_max=10_000).lines
    end = 2 + len(text) + 1
    assert (first, last) == (Line(0, 2, 1), Line(end, end + 2, 2))
    assert isinstance(bad, BadLine)
    assert (bad.offset, bad.end_offset, bad.head) == (2, end, text)
    assert bad.reason.startswith("not a JSON value")


@pytest.mark.parametrize("read_bytes_max", [16, 100, 1000])
def test_a_line_longer_than_the_limit_is_bad_and_one_at_the_limit_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes_max: int
) -> None:
    monkeypatch.setattr(storage, "READ_BYTES_MAX", read_bytes_max)
    path = tmp_path / "p.jsonl"
    for length in (99, 100, 101, 300):
        path.write_bytes(b"1\n" + b'"' + b"x" * (length - 2) + b'"\n2\n')
        found: list[Line | BadLine] = []
        position = 0
        while lines := read(path, position, line_bytes_max=100).lines:
            found += lines
            position = lines[-1].end_offset
        kinds = [type(line) for line in found]
        assert kinds == ([Line, Line, Line] if length <= 100 else [Line, BadLine, Line])
        assert [line.offset for line in found] == [0, 2, length + 3]
        if length > 100:
            assert f"{length} bytes long; the limit is 100" in found[1][2]


def test_a_torn_line_longer_than_the_limit_is_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "READ_BYTES_MAX", 200)
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"x" * 500)
    chunk = read(path, line_bytes_max=100)
    assert (chunk.lines, chunk.at_end, chunk.scanned_to) == ([], True, 500)
    # A newline where it looked before would be found if it looked there again.
    path.write_bytes(b"x" * 300 + b"\n" + b"x" * 199 + b"x\n1\n")
    (bad,) = read(path, line_bytes_max=100, scanned_to=500).lines
    assert (bad.offset, bad.end_offset) == (0, 502)
    assert [line[2] for line in read(path, 502, line_bytes_max=100).lines] == [1]


def test_one_read_is_bounded_in_lines_and_says_that_there_are_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "READ_LINES_MAX", 3)
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"".join(b"%d\n" % n for n in range(4)))
    chunk = read(path)
    assert ([line[2] for line in chunk.lines], chunk.at_end) == ([0, 1, 2], False)
    chunk = read(path, 6)
    assert ([line[2] for line in chunk.lines], chunk.at_end) == ([3], True)


def test_a_file_that_is_not_append_only_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"1\n22\n")
    chunk = read(path)
    with pytest.raises(FileLogRewritten, match=r"p\.jsonl has 5 bytes, but was read up to 6"):
        read(path, 6)
    with pytest.raises(FileLogRewritten, match="no line that starts at 3"):
        read(path, 3)
    with pytest.raises(FileLogRewritten, match="replaced by another file"):
        storage.read_lines(str(path), 2, line_bytes_max=100, inode=chunk.inode + 1)
    path.unlink()
    with pytest.raises(FileLogRewritten, match="was removed"):
        read(path)


def test_a_scan_finds_visible_jsonl_files_only(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n")
    (tmp_path / "a b.jsonl").write_bytes(b"")
    for name in (".hidden.jsonl", "a.json", "jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "nothing")
    assert storage.scan(str(tmp_path)) == {"a": 2, "a b": 0}


def test_a_partition_whose_name_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).touch()
    with pytest.raises(FileLogError, match="cannot be the name of a partition"):
        storage.scan(str(tmp_path))


# --- lock ----------------------------------------------------------------------------------------


def test_a_lock_is_held_once_and_names_its_holder(folder: str) -> None:
    fd = storage.try_lock(folder, "g")
    assert fd is not None
    assert storage.try_lock(folder, "g") is None
    assert storage.lock_holder(folder, "g") == os.getpid()
    other = storage.try_lock(folder, "another-group")
    assert other is not None
    os.close(other)
    os.close(fd)
    again = storage.try_lock(folder, "g")
    assert again is not None
    os.close(again)
