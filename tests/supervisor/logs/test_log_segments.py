"""The logs of instances of mapped tasks: a thousand of them share one file, and each is read as if it had its own."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.waiting import WITHIN_S, wait_until

from headgate.store.ids import TryName
from headgate.supervisor.logs import task_log_files, task_logs
from headgate.supervisor.logs.task_log_deletion import delete_logs
from headgate.supervisor.logs.task_log_files import SEGMENT_SHARE_BYTES_MAX, follow, read, read_on, tries
from headgate.supervisor.logs.task_logs import TaskLogs


def instance(index: int, try_number: int = 1) -> TryName:
    return TryName("etl", "r", "each", try_number, index)


def at(second: int, event: str) -> dict[str, Any]:
    return {"timestamp": f"2026-11-25T10:00:{second:0>2}Z", "event": event}


def events(folder: Path, index: int, try_number: int | None = None) -> list[tuple[int, str]]:
    found = read(folder, "etl", "r", "each", try_number, map_index=index)
    return [(record["try_number"], record["event"]) for record in found]


def files(folder: Path) -> list[str]:
    of_map = folder / "etl" / "r" / "each" / "map"
    return sorted(str(path.relative_to(of_map)) for path in of_map.rglob("*") if path.is_file())


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[TaskLogs]:
    opened = TaskLogs(tmp_path)
    opened.epoch = 7
    yield opened
    opened.close()


def test_a_thousand_instances_share_a_file_and_each_is_read_alone(logs: TaskLogs, tmp_path: Path) -> None:
    for index in (1, 11, 999, 1000):
        logs.write(instance(index), at(1, f"first of {index}") | {"of": "the author's"})
        logs.write(instance(index, 2), at(2, f"second of {index}"))
    logs.write(instance(1), at(3, "more"))
    assert logs.flush(WITHIN_S)
    assert files(tmp_path) == ["0/7.jsonl", "1/7.jsonl"]
    assert events(tmp_path, 1) == [(1, "first of 1"), (1, "more"), (2, "second of 1")]
    assert events(tmp_path, 11, 2) == [(2, "second of 11")]
    assert tries(tmp_path, "etl", "r", "each", 999) == [1, 2]
    assert events(tmp_path, 2) == []
    (record, _) = read(tmp_path, "etl", "r", "each", 1, map_index=1)
    assert record["of"] == "the author's"


def test_what_a_try_logs_beyond_its_share_is_in_a_file_of_its_own(logs: TaskLogs, tmp_path: Path) -> None:
    line = "x" * 1000
    for number in range(100):
        logs.write(instance(3), at(number // 2, f"{number} {line}"))
    logs.write(instance(4), at(1, "a neighbour"))
    assert logs.flush(WITHIN_S)
    logs.write(instance(3), at(59, "the end"))
    assert logs.flush(WITHIN_S)
    assert files(tmp_path) == ["0/3/1/7.jsonl", "0/7.jsonl"]
    assert (tmp_path / "etl/r/each/map/0/7.jsonl").stat().st_size < SEGMENT_SHARE_BYTES_MAX + 1000
    found = [event.partition(" ")[0] for _, event in events(tmp_path, 3)]
    assert found == [*map(str, range(100)), "the"]
    assert events(tmp_path, 4) == [(1, "a neighbour")]


def test_a_refused_write_gives_a_try_no_larger_share(
    logs: TaskLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "x" * 1000
    append, refusals = task_logs._File.append, [OSError(errno.ENOSPC, "full")]

    def refuse_once(file: Any, data: bytes) -> None:
        if refusals:
            raise refusals.pop()
        append(file, data)

    monkeypatch.setattr(task_logs, "RETRY_WAIT_S", 0.0)
    for half in (range(50), range(50, 100)):
        for number in half:
            logs.write(instance(3), at(number // 2, f"{number} {line}"))
        wait_until(lambda: logs.flush(WITHIN_S), "the disk takes them")
        monkeypatch.setattr(task_logs._File, "append", refuse_once)
    assert refusals == []
    assert (tmp_path / "etl/r/each/map/0/7.jsonl").stat().st_size < SEGMENT_SHARE_BYTES_MAX + 1000
    assert [event.partition(" ")[0] for _, event in events(tmp_path, 3)] == [*map(str, range(100))]


def test_what_two_supervisors_have_logged_is_merged_by_time(logs: TaskLogs, tmp_path: Path) -> None:
    other = TaskLogs(tmp_path)
    other.epoch = 8
    logs.write(instance(1), at(1, "a"))
    other.write(instance(1), at(2, "b"))
    logs.write(instance(1), at(3, "c"))
    assert logs.flush(WITHIN_S)
    assert other.flush(WITHIN_S)
    other.close()
    assert events(tmp_path, 1) == [(1, "a"), (1, "b"), (1, "c")]


def test_a_follower_of_an_instance_sees_its_records_alone(logs: TaskLogs, tmp_path: Path) -> None:
    logs.write(instance(1), at(1, "before"))
    logs.write(instance(2), at(1, "of another"))
    assert logs.flush(WITHIN_S)
    seen: list[tuple[int, str]] = []

    def is_over() -> bool:
        if len(seen) == 1:
            logs.write(instance(2), at(2, "of another"))
            logs.write(instance(1, 2), at(3, "the next try"))
            assert logs.flush(WITHIN_S)
        return len(seen) == 2

    for record in follow(tmp_path, "etl", "r", "each", map_index=1, is_over=is_over):
        seen.append((record["try_number"], record["event"]))
    assert seen == [(1, "before"), (2, "the next try")]


def test_a_reader_goes_on_behind_its_cursor(logs: TaskLogs, tmp_path: Path) -> None:
    logs.write(instance(2001), at(1, "a"))
    logs.write(instance(2002), at(1, "of another"))
    assert logs.flush(WITHIN_S)
    found, cursor = read_on(tmp_path, instance(2001), None, bytes_max=10)
    assert [record["event"] for record in found] == ["a"]
    logs.write(instance(2001, 2), at(2, "b"))
    assert logs.flush(WITHIN_S)
    found, cursor = read_on(tmp_path, instance(2001), cursor, bytes_max=1000)
    assert [(record["try_number"], record["event"]) for record in found] == [(2, "b")]
    assert read_on(tmp_path, instance(2001), cursor, bytes_max=1000) == ([], cursor)


def test_a_reader_need_not_wait_for_what_others_have_logged(
    logs: TaskLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_log_files, "FOLLOW_READ_BYTES_MAX", 1000)  # of a segment at a time
    cursor = None
    for event in ("a", "b"):
        for number in range(50):
            logs.write(instance(2), at(1, f"of another: {number}"))
        logs.write(instance(1), at(1, event))
        assert logs.flush(WITHIN_S)
        found, cursor = read_on(tmp_path, instance(1), cursor, bytes_max=200)
        assert [record["event"] for record in found] == [event]


def test_a_torn_line_costs_no_other(logs: TaskLogs, tmp_path: Path) -> None:
    logs.write(instance(1), at(1, "a"))
    assert logs.flush(WITHIN_S)
    with (tmp_path / "etl/r/each/map/0/6.jsonl").open("wb") as torn:
        torn.write(
            b'{"of":"1.1","timestamp":"2026-11-25T10:00:02Z","event":"to\n{"of":"1.1","event":"b"}\nnothing\n{"of":"1'
        )
    found = list(read(tmp_path, "etl", "r", "each", map_index=1))
    assert sorted(record["event"] for record in found if "damaged" not in record) == ["a", "b"]
    assert [record["event"][-11:] for record in found if "damaged" in record] == ['"event":"to']


def test_segments_are_deleted_with_their_run(logs: TaskLogs, tmp_path: Path) -> None:
    for index in range(0, 3000, 500):
        logs.write(instance(index), at(1, "a"))
    logs.write(msgspec.structs.replace(instance(0), map_index=-1), at(1, "of the task itself"))
    assert logs.flush(WITHIN_S)
    assert delete_logs(tmp_path, "etl", "r", is_tried_only=True) == 4
    assert delete_logs(tmp_path, "etl", "r") == 4
    assert not (tmp_path / "etl").exists()
