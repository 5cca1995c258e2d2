"""Reading a file of a file log: its lines, and whether it is the file that was read before."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgspec
import pytest

from headgate.brokers.filelogs import reading
from headgate.brokers.filelogs.reading import BadLine, FileMoved, Line
from headgate.brokers.filelogs.storage import FileLogError, Seal


def read(path: Path, position: int = 0, *, line_bytes_max: int = 1000, scanned_to: int = 0) -> reading.Chunk:
    """Read without a line before the position to compare."""
    inode = path.stat().st_ino
    return reading.read_lines(
        str(path), position, Seal(0, 0), inode=inode, line_bytes_max=line_bytes_max, scanned_to=scanned_to
    )


def line(offset: int, text: bytes) -> Line:
    return Line(offset, offset + len(text), zlib.crc32(text), msgspec.json.decode(text))


def test_the_text_of_a_rejected_line_survives_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"1\ngr\xfcn \xe2\x82\xac\n")
    assert reading.read_text(str(path), 2, 11, zlib.crc32(b"gr\xfcn \xe2\x82\xac\n"), bytes_max=9) == "gr\\xfcn €"


# --- lines ---------------------------------------------------------------------------------------


def test_whole_lines_are_read_and_a_torn_last_one_is_left(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"a": 1}\n"b"\n[3')
    chunk = read(path)
    assert chunk.lines == [line(0, b'{"a": 1}\n'), line(9, b'"b"\n')]
    assert chunk.at_end
    assert read(path, 13).lines == []
    with path.open("ab") as file:
        file.write(b"]\n")
    assert read(path, 13).lines == [line(13, b"[3]\n")]


@pytest.mark.parametrize("text", [b"", b"{", b"nan", b'"\xff"', b"1 2", b"[" * 5000, b"1e999"])
def test_what_is_not_json_is_a_bad_line_between_good_ones(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"1\n" + text + b"\n2\n")
    first, bad, last = read(path, line_bytes_max=10_000).lines
    end = 2 + len(text) + 1
    assert (first, last) == (line(0, b"1\n"), line(end, b"2\n"))
    assert isinstance(bad, BadLine)
    assert (bad.offset, bad.end_offset, bad.head) == (2, end, text)
    assert bad.reason.startswith("not a JSON value")


@pytest.mark.parametrize("read_bytes_max", [16, 100, 1000])
def test_a_line_longer_than_the_limit_is_bad_and_one_at_the_limit_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes_max: int
) -> None:
    monkeypatch.setattr(reading, "READ_BYTES_MAX", read_bytes_max)
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
            assert f"{length} bytes long; the limit is 100" in found[1][3]


def test_a_torn_line_longer_than_the_limit_is_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READ_BYTES_MAX", 200)
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"x" * 500)
    chunk = read(path, line_bytes_max=100)
    assert (chunk.lines, chunk.at_end, chunk.scanned_to) == ([], True, 500)
    # A newline where it looked before would be found if it looked there again.
    path.write_bytes(b"x" * 300 + b"\n" + b"x" * 199 + b"x\n1\n")
    (bad,) = read(path, line_bytes_max=100, scanned_to=500).lines
    assert (bad.offset, bad.end_offset) == (0, 502)
    assert [line[3] for line in read(path, 502, line_bytes_max=100).lines] == [1]


def test_one_read_is_bounded_in_lines_and_says_that_there_are_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READ_LINES_MAX", 3)
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"".join(b"%d\n" % n for n in range(4)))
    chunk = read(path)
    assert ([line[3] for line in chunk.lines], chunk.at_end) == ([0, 1, 2], False)
    chunk = read(path, 6)
    assert ([line[3] for line in chunk.lines], chunk.at_end) == ([3], True)


def test_a_read_of_a_file_that_is_not_the_one_before_says_how_it_differs(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"1\n22\n")
    inode = path.stat().st_ino
    last = reading.seal_of(2, 5, zlib.crc32(b"22\n"))
    assert reading.read_lines(str(path), 5, last, inode=inode, line_bytes_max=100).lines == []
    with pytest.raises(FileMoved, match="replaced by another file"):
        reading.read_lines(str(path), 5, last, inode=inode + 1, line_bytes_max=100)
    with pytest.raises(FileMoved, match="has 5 bytes, but had 9 at the last look"):
        reading.read_lines(str(path), 5, last, inode=inode, line_bytes_max=100, seen=9)
    head = Seal(2, zlib.crc32(b"1\n"))
    assert len(reading.read_lines(str(path), 0, Seal(0, 0), inode=inode, head=head, line_bytes_max=100).lines) == 2
    path.write_bytes(b"2\n23\n")
    with pytest.raises(FileMoved, match="has another first line than before"):
        reading.read_lines(str(path), 0, Seal(0, 0), inode=inode, head=head, line_bytes_max=100)
    path.write_bytes(b"1\n23\n")
    with pytest.raises(FileMoved, match="has another line before 5 than the one that was read"):
        reading.read_lines(str(path), 5, last, inode=inode, line_bytes_max=100)
    os.truncate(path, 4)
    with pytest.raises(FileMoved, match="has 4 bytes, but was read up to 5"):
        reading.read_lines(str(path), 5, last, inode=inode, line_bytes_max=100)
    with pytest.raises(FileMoved, match="another line at 0"):
        reading.read_text(str(path), 0, 2, zlib.crc32(b"2\n"), bytes_max=9)
    path.unlink()
    with pytest.raises(FileMoved, match="was removed"):
        reading.read_lines(str(path), 5, last, inode=inode, line_bytes_max=100)


def test_a_scan_finds_visible_files_only(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n")
    (tmp_path / "a b.jsonl").write_bytes(b"")
    for name in (".hidden.jsonl", "a.json", "jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "nothing")
    found = reading.scan(str(tmp_path))
    assert {name: status.size for name, status in found.items()} == {
        "a.jsonl": 2,
        "a b.jsonl": 0,
        "a.json": 0,
        "jsonl": 0,
    }


def test_a_partition_whose_name_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).touch()
    with pytest.raises(FileLogError, match="cannot be the name of a partition"):
        reading.scan(str(tmp_path))
