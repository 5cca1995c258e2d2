"""The logs of tasks: one for each try, nothing lost, and nobody waits for the disk."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import WITHIN_S

from headgate.store.ids import TryName
from headgate.supervisor.logs import task_log_files, task_logs
from headgate.supervisor.logs.task_log_files import file_name_of, file_of, folder_of_try, follow, read, tries
from headgate.supervisor.logs.task_logs import TaskLogs

A = TryName("etl", "manual__2026-11-20T10:00:00+00:00", "a", 1)
B = TryName("etl", "manual__2026-11-20T10:00:00+00:00", "b", 1)

Open = Callable[..., TaskLogs]


@pytest.fixture
def open_logs(tmp_path: Path) -> Iterator[Open]:
    opened: list[TaskLogs] = []

    def open_another(epoch: int = 7, **settings: Any) -> TaskLogs:
        opened.append(TaskLogs(tmp_path, **settings))
        opened[-1].epoch = epoch
        return opened[-1]

    yield open_another
    for each in opened:
        each.close()


def records(folder: Path, name: TryName = A) -> list[dict[str, Any]]:
    return list(read(folder, name.dag_id, name.run_id, name.task_id, name.try_number))


def events(folder: Path, name: TryName = A) -> list[str]:
    return [record["event"] for record in records(folder, name)]


def at(second: int | str, event: str) -> dict[str, Any]:
    return {"timestamp": f"2026-11-20T10:00:{second:0>2}Z", "event": event, "level": "info"}


# --- what is written -----------------------------------------------------------------------------


def test_each_try_has_a_log_of_its_own_and_a_record_keeps_its_fields(open_logs: Open, tmp_path: Path) -> None:
    logs = open_logs()
    logs.write(A, at(1, "begun") | {"logger": "author", "rows": [1, {"x": None}], "dag_id": "etl", "try_number": 1})
    logs.write(B, at(2, "other"), source="trigger")
    logs.say(A, "warning", "the worker is lost", reason="SIGKILL", pid=12)
    logs.output(A, "from C: \\xff\x00")
    assert logs.flush(WITHIN_S)
    begun, lost, raw = records(tmp_path)
    assert begun == {**at(1, "begun"), "logger": "author", "source": "task", "rows": [1, {"x": None}], "try_number": 1}
    assert lost["timestamp"].endswith("Z")
    assert (lost["level"], lost["source"], lost["reason"], lost["pid"]) == ("warning", "supervisor", "SIGKILL", 12)
    assert (raw["event"], raw["source"], raw["level"]) == ("from C: \\xff\0", "output", "info")
    assert [record["source"] for record in records(tmp_path, B)] == ["trigger"]
    path = file_of(tmp_path, A, 7)
    assert path == tmp_path / "etl" / "manual__2026-11-20T10:00:00+00:00" / "a" / "1" / "7.jsonl"
    first = path.read_bytes().splitlines()[0]
    assert list(json.loads(first)) == ["timestamp", "level", "event", "logger", "source", "rows"]


def test_tries_are_told_apart_and_read_one_after_the_other(open_logs: Open, tmp_path: Path) -> None:
    logs = open_logs()
    for number in (1, 2, 11):
        logs.write(TryName("d", "r", "t", number), at(9, f"try {number}"))
    assert logs.flush(WITHIN_S)
    assert tries(tmp_path, "d", "r", "t") == [1, 2, 11]
    told = [(record["event"], record["try_number"]) for record in read(tmp_path, "d", "r", "t")]
    assert told == [("try 1", 1), ("try 2", 2), ("try 11", 11)]
    assert list(read(tmp_path, "d", "r", "t", 3)) == list(read(tmp_path, "d", "r", "unknown")) == []


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize("value", ["\ud800", 2**70, float("nan"), {(1, 2): 3}, Unspeakable(), object(), b"\xff"])
def test_no_value_costs_a_record(open_logs: Open, tmp_path: Path, value: Any) -> None:
    logs = open_logs()
    logs.write(A, at(1, "before"))
    logs.write(A, {"event": "odd", "value": value})
    logs.write(A, at(1, "after"))
    assert logs.flush(WITHIN_S)
    assert events(tmp_path) == ["before", "odd", "after"]


def test_a_flood_is_whole(open_logs: Open, tmp_path: Path) -> None:
    logs = open_logs()
    for number in range(100_000):
        logs.write(A, at(1, f"line {number} " + "x" * 100))
    assert logs.flush(WITHIN_S)
    assert [event.split()[1] for event in events(tmp_path)] == [str(number) for number in range(100_000)]


def test_more_files_than_may_be_open(open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_logs, "OPEN_FILES_MAX", 3)
    logs = open_logs()
    names = [TryName("d", "r", f"t{number}", 1) for number in range(10)]
    for turn in range(3):
        for name in names:
            logs.write(name, at(turn, f"turn {turn}"))
        assert logs.flush(WITHIN_S)
    held = [link for link in map(os.readlink, _descriptors()) if str(tmp_path) in link]
    assert len(held) == 3
    for name in names:
        assert events(tmp_path, name) == ["turn 0", "turn 1", "turn 2"]


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{number}"):
            yield f"/proc/self/fd/{number}"


# --- odd names -----------------------------------------------------------------------------------

NAMES = [
    "manual__2026-11-20T10:00:00+00:00",
    "../x",
    "..",
    ".",
    ".hidden",
    "a/b",
    "a\0b",
    "",
    "%",
    "%-",
    "%2E",
    "ä" * 250,
    "ä" * 249 + "a",
    "x" * 255,
    "x" * 256,
    "x" * 257,
    "\U0001f600" * 250,
    "\ud800",
    "a b\n\t",
]


def test_any_name_has_a_file_name_of_its_own_and_stays_within_the_folder() -> None:
    found = [file_name_of(name) for name in NAMES]
    assert len(set(found)) == len(NAMES)
    for each in found:
        assert each
        assert each.isascii()
        assert len(each) <= 255
        assert not each.startswith(".")
        assert not set(each) & {"/", "\0", "\n"}
    assert found[0] == NAMES[0]


@pytest.mark.parametrize("odd", NAMES, ids=ascii)
def test_a_try_of_any_name_is_written_and_read(open_logs: Open, tmp_path: Path, odd: str) -> None:
    name = TryName(odd, odd, odd, 3)
    logs = open_logs()
    logs.write(name, at(1, "here"))
    assert logs.flush(WITHIN_S)
    assert events(tmp_path, name) == ["here"]
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


# --- several supervisors -------------------------------------------------------------------------


def test_what_two_supervisors_wrote_is_merged_by_time_and_each_keeps_its_order(open_logs: Open, tmp_path: Path) -> None:
    first, second = open_logs(epoch=9), open_logs(epoch=10)
    for second_, event in ((1, "a"), ("03.5", "b"), (2, "late b"), (7, "c")):
        first.write(A, at(second_, event))
    for second_, event in ((2, "x"), (3, "y"), ("03.500001", "z"), (9, "end")):
        second.write(A, at(second_, event))
    assert first.flush(WITHIN_S)
    assert second.flush(WITHIN_S)
    assert events(tmp_path) == ["a", "x", "y", "b", "late b", "z", "c", "end"]


def test_half_a_line_is_shown_as_far_as_it_is_there_and_costs_no_other(open_logs: Open, tmp_path: Path) -> None:
    logs = open_logs()
    logs.write(A, at(1, "whole"))
    assert logs.flush(WITHIN_S)
    with file_of(tmp_path, A, 7).open("ab") as file:
        file.write(b'{"timestamp": "2026-11-20T10:00:02Z", "event": "ha\xff')
    whole, half = records(tmp_path)
    assert whole["event"] == "whole"
    assert half["damaged"] is True
    assert half["event"] == '{"timestamp": "2026-11-20T10:00:02Z", "event": "ha\\xff'


# --- limits --------------------------------------------------------------------------------------


def test_a_log_over_its_limit_keeps_its_beginning_and_its_end_and_says_what_is_missing(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_logs, "END_BYTES_MAX", 5000)
    monkeypatch.setattr(task_logs, "WRITE_BYTES_MAX", 700)
    monkeypatch.setattr(task_logs, "OPEN_FILES_MAX", 1)
    logs = open_logs(bytes_max=10_000)
    for number in range(1000):
        logs.write(A, at(1, f"line {number}"))
        if number % 100 == 0:
            assert logs.flush(WITHIN_S)
            logs.write(B, at(1, "takes the only descriptor"))
    assert logs.flush(WITHIN_S)
    told = events(tmp_path)
    (gap,) = (event for event in told if "left out" in event)
    at_gap = told.index(gap)
    begin = [int(event.split()[1]) for event in told[:at_gap]]
    end = [int(event.split()[1]) for event in told[at_gap + 1 :]]
    assert begin == list(range(len(begin)))
    assert end == list(range(1000 - len(end), 1000))
    assert gap == f"{1000 - len(begin) - len(end)} records are left out here"
    files = sorted(folder_of_try(tmp_path, A).iterdir())
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) <= 10_000 + 2 * 5000
    assert len(end) * 90 >= 5000


def test_a_log_that_just_exceeds_its_limit_lacks_nothing(open_logs: Open, tmp_path: Path) -> None:
    logs = open_logs(bytes_max=1000)
    for number in range(20):
        logs.write(A, at(1, f"line {number}"))
    assert logs.flush(WITHIN_S)
    assert events(tmp_path) == [f"line {number}" for number in range(20)]
    assert len(list(tmp_path.rglob("*.jsonl"))) == 2


class SlowDisk:
    """Holds up each write until it is permitted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Semaphore(0)
        self.permitted = threading.Semaphore(0)
        append = task_logs._File.append

        def slow_append(file: Any, data: bytes) -> None:
            self.entered.release()
            assert self.permitted.acquire(timeout=WITHIN_S)
            append(file, data)

        monkeypatch.setattr(task_logs._File, "append", slow_append)

    def go_on(self) -> None:
        for _ in range(1000):
            self.permitted.release()


def test_nobody_waits_for_a_disk_that_hangs_and_what_is_dropped_is_said_where_it_is_missing(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_logs, "RECORDS_WAITING_MAX", 3)
    disk = SlowDisk(monkeypatch)
    logs = open_logs()
    logs.write(A, at(1, "first"))
    assert disk.entered.acquire(timeout=WITHIN_S)
    for number in range(3):
        logs.write(A, at(1, str(number)))
    for _ in range(5):
        logs.write(A, at(1, "dropped"))
    logs.write(B, at(1, "dropped"))
    assert not logs.flush(0.0)
    assert not logs.flush(3600.0)  # it was late before: it is not waited for again
    disk.go_on()
    logs.close()
    told = records(tmp_path)
    assert [record["event"] for record in told[:4]] == ["first", "0", "1", "2"]
    assert (told[4]["level"], told[4]["records"]) == ("warning", 5)
    (other,) = records(tmp_path, B)
    assert other["records"] == 1


# --- disks that refuse ---------------------------------------------------------------------------


def test_what_a_disk_refuses_is_written_once_it_takes_it_in_order_and_it_is_said_once(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, dict[str, Any]]] = []

    class Log:
        def error(self, event: str, **fields: Any) -> None:
            told.append((event, fields))

        info = error

    monkeypatch.setattr(task_logs, "log", Log())
    monkeypatch.setattr(task_logs, "RETRY_WAIT_S", 0.0)
    in_the_way = tmp_path / "etl"
    in_the_way.write_text("a file where a folder should be")
    logs = open_logs()
    other = TryName("fine", "r", "t", 1)
    for number in range(5):
        logs.write(A, at(1, str(number)))
        logs.write(other, at(1, str(number)))
        logs.flush(WITHIN_S)
    assert "etl" in logs.trouble
    in_the_way.unlink()
    logs.write(A, at(1, "5"))
    logs.close()
    assert logs.trouble == ""
    assert events(tmp_path, other) == ["0", "1", "2", "3", "4"]
    assert events(tmp_path) == ["0", "1", "2", "3", "4", "5"]
    (began, error), (ended, _) = told
    assert began.startswith("logs of tasks cannot be written")
    assert "etl" in error["error"]
    assert ended == "logs of tasks can be written again"


def test_what_is_held_is_bounded_and_the_rest_is_counted(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_logs, "HELD_BYTES_MAX", 500)
    in_the_way = tmp_path / "etl"
    in_the_way.write_text("")
    logs = open_logs()
    for number in range(100):
        logs.write(A, at(1, f"line {number}"))
    logs.flush(WITHIN_S)
    in_the_way.unlink()
    logs.close()
    *kept, note = records(tmp_path)
    assert [record["event"] for record in kept] == [f"line {number}" for number in range(len(kept))]
    assert 0 < len(kept) < 10
    assert note["records"] == 100 - len(kept)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from headgate.store.ids import TryName
from headgate.supervisor.logs import task_logs

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
logs = task_logs.TaskLogs(Path(sys.argv[1]))
logs.epoch = 7
name = TryName("etl", "r", "t", 1)
for number in range(1000):
    logs.write(name, {"event": f"line {number}"})
assert not logs.flush(20.0)
before = sum(1 for _ in task_logs.file_of(Path(sys.argv[1]), name, 7).open())
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
logs.write(name, {"event": "there is room again"})
logs.close()
print(before)
"""


def test_a_full_disk_tears_no_line_and_loses_none_when_there_is_room_again(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert process.returncode == 0, process.stderr
    assert f"Errno {errno.EFBIG}" in process.stdout + process.stderr
    told = list(read(tmp_path, "etl", "r", "t", 1))
    assert [record["event"] for record in told] == [*(f"line {n}" for n in range(1000)), "there is room again"]
    assert not any("damaged" in record for record in told)


# --- following -----------------------------------------------------------------------------------


def test_a_follower_sees_what_is_there_and_what_comes_from_anybody_and_ends_when_it_is_over(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever is not noticed by inotify takes longer than the test may.
    monkeypatch.setattr(task_log_files, "LOOK_INTERVAL_S", 3600.0)
    first, second = open_logs(epoch=1), open_logs(epoch=2)
    is_over = False
    follower = follow(tmp_path / "logs", A.dag_id, A.run_id, A.task_id, is_over=lambda: is_over)
    (tmp_path / "logs").symlink_to(tmp_path)
    first.write(A, at(1, "before"))
    assert first.flush(WITHIN_S)
    assert next(follower)["event"] == "before"

    writer = threading.Thread(target=lambda: second.write(A, at(2, "by another")))
    writer.start()
    assert next(follower)["event"] == "by another"
    writer.join()
    again = TryName(A.dag_id, A.run_id, A.task_id, 2)
    writer = threading.Thread(target=lambda: first.write(again, at(3, "the next try")))
    writer.start()
    record = next(follower)
    assert (record["event"], record["try_number"]) == ("the next try", 2)
    writer.join()
    first.write(again, at(4, "last words"))
    assert first.flush(WITHIN_S)
    is_over = True
    assert [record["event"] for record in follower] == ["last words"]


def test_a_follower_of_a_task_that_has_not_begun_waits_for_it(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_log_files, "LOOK_INTERVAL_S", 3600.0)
    asked = threading.Event()

    def is_over() -> bool:
        asked.set()
        return False

    got: list[dict[str, Any]] = []
    follower = follow(tmp_path, A.dag_id, A.run_id, A.task_id, 1, is_over=is_over)
    thread = threading.Thread(target=lambda: got.append(next(follower)))
    thread.start()
    assert asked.wait(WITHIN_S)  # there was nothing
    logs = open_logs()
    logs.write(A, at(1, "begun"))
    thread.join(WITHIN_S)
    assert [record["event"] for record in got] == ["begun"]


def test_a_follower_waits_for_the_rest_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_log_files, "LOOK_INTERVAL_S", 3600.0)
    path = file_of(tmp_path, A, 7)
    path.parent.mkdir(parents=True)
    with path.open("ab", buffering=0) as file:
        file.write(b'{"event": "one"}\n{"event": "t')
        follower = follow(tmp_path, A.dag_id, A.run_id, A.task_id, 1)
        assert next(follower)["event"] == "one"
        writer = threading.Thread(target=lambda: file.write(b'wo"}\n'))
        writer.start()
        assert next(follower) == {"event": "two", "try_number": 1}
        writer.join()


def test_a_follower_follows_a_log_over_its_limit(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_logs, "END_BYTES_MAX", 500)
    logs = open_logs(bytes_max=1000)
    is_over = False
    follower = follow(tmp_path, A.dag_id, A.run_id, A.task_id, 1, is_over=lambda: is_over)
    for number in range(100):
        logs.write(A, at(1, f"line {number}"))
        assert logs.flush(WITHIN_S)
        assert next(follower)["event"] == f"line {number}"
    is_over = True
    assert list(follower) == []
