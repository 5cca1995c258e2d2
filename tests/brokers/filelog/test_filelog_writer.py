"""The writer of a file log, and the command that writes events."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headgate.brokers.filelog_writer import FileLogWriter

COMMAND = [sys.executable, "-W", "error", "-m", "headgate.brokers.filelog_writer"]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_an_append_returns_the_offset_of_its_line(tmp_path: Path) -> None:
    with FileLogWriter(tmp_path / "new") as writer:
        assert writer.append("p", {"a": "grün\n"}, durable=True) == 0
        offsets = writer.append_many("p", [1, [2]], durable=True)
        assert writer.append_many("p", []) == []
    data = (tmp_path / "new" / "p.jsonl").read_bytes()
    assert [json.loads(data[offset:].split(b"\n")[0]) for offset in (0, *offsets)] == [{"a": "grün\n"}, 1, [2]]


def test_a_torn_line_of_a_crashed_writer_is_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'1\n{"to')
    with FileLogWriter(tmp_path) as writer:
        offset = writer.append("p", 2)
    assert path.read_bytes() == b'1\n{"to\n2\n'
    assert offset == 7


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, "\ud800", "x" * 99])
def test_a_value_that_cannot_be_a_line_is_refused_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    with FileLogWriter(tmp_path, line_bytes_max=100) as writer, pytest.raises((TypeError, ValueError)):
        writer.append_many("p", [1, value])
    assert not (tmp_path / "p.jsonl").exists()


def test_batches_of_concurrent_threads_and_processes_do_not_mix_and_offsets_are_true(tmp_path: Path) -> None:
    batches, size = 60, 20
    command = [*COMMAND, str(tmp_path), "--events", "3000"]
    others = [subprocess.Popen(command) for _ in range(2)]
    offsets: dict[tuple[int, int], list[int]] = {}
    with FileLogWriter(tmp_path) as shared, FileLogWriter(tmp_path) as own:

        def write(number: int, writer: FileLogWriter) -> None:
            for batch in range(batches):
                values = [{"id": [number, batch, n], "pad": "x" * 200} for n in range(size)]
                offsets[number, batch] = writer.append_many("p0", values)

        threads = [threading.Thread(target=write, args=(n, shared if n < 2 else own)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [process.wait() for process in others] == [0, 0]
    data = (tmp_path / "p0.jsonl").read_bytes()
    assert len(lines(tmp_path / "p0.jsonl")) == 3 * batches * size + 6000
    for (number, batch), starts in offsets.items():
        for n, start in enumerate(starts):
            assert json.loads(data[start : data.index(b"\n", start)])["id"] == [number, batch, n]
        line = data.index(b"\n", starts[0]) + 1 - starts[0]
        assert all(second - first <= line + 2 for first, second in pairwise(starts))


def test_the_command_writes_every_event_once_over_its_partitions_and_prints_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, str(tmp_path), "--events", "2503", "--partitions", "3", "--durable"], capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")
    partitions = {name: lines(tmp_path / f"{name}.jsonl") for name in ("p0", "p1", "p2")}
    ids = [event["id"] for events in partitions.values() for event in events]
    assert sorted(ids) == list(range(2503))
    for number, (name, events) in enumerate(partitions.items()):
        assert [event["id"] for event in events] == list(range(number, 2503, 3))
        assert {event["partition"] for event in events} == {name}


def test_the_command_keeps_a_rate_and_still_writes_every_event_once(tmp_path: Path) -> None:
    subprocess.run([*COMMAND, str(tmp_path), "--events", "50", "--partitions", "3", "--rate", "1000"], check=True)
    ids = [event["id"] for name in ("p0", "p1", "p2") for event in lines(tmp_path / f"{name}.jsonl")]
    assert sorted(ids) == list(range(50))


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run([*COMMAND, str(tmp_path / "file"), "--events", "1"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "filelog_writer:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_writer_needs_no_trio() -> None:
    program = "import sys, headgate.brokers.filelog_writer; sys.exit('trio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
