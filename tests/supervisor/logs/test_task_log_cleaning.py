"""The logs of a run that is gone are deleted, and nothing else is, whatever lies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.store.ids import TryName
from headgate.supervisor.logs.task_log_deletion import delete_logs
from headgate.supervisor.logs.task_log_files import file_of, tries
from headgate.supervisor.logs.task_logs import TRIES_KEPT, TaskLogs

LONG = "r" * 300  # a run_id whose folder has a hash for a name


def log(folder: Path, dag_id: str, run_id: str, *, task_id: str = "t", try_number: int = 1, part: int = 0) -> Path:
    path = file_of(folder, TryName(dag_id, run_id, task_id, try_number), 7, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"{}\\n")
    return path


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("run_id", ["scheduled__2026-01-01T00:00:00+00:00", LONG, "a/b", ".."])
def test_a_run_loses_all_its_logs_and_their_folders_and_no_other_run_does(tmp_path: Path, run_id: str) -> None:
    for task_id in "ab":
        for try_number, part in ((1, 0), (1, 3), (2, 0)):
            log(tmp_path, "d", run_id, task_id=task_id, try_number=try_number, part=part)
    others = [log(tmp_path, "d", "other"), log(tmp_path, "e", run_id)]
    assert delete_logs(tmp_path, "d", run_id, is_tried_only=True) == 6
    assert len(files_in(tmp_path)) == 8
    assert delete_logs(tmp_path, "d", run_id) == 6
    assert sorted(files_in(tmp_path)) == sorted(others)
    assert len(list((tmp_path / "d").iterdir())) == 1
    assert delete_logs(tmp_path, "d", run_id) == 0


def test_the_last_run_takes_the_folder_of_its_dag_with_it(tmp_path: Path) -> None:
    log(tmp_path, "d", "r")
    assert delete_logs(tmp_path, "d", "r") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_logs_of_instances_go_with_their_run_and_nothing_else_among_them(tmp_path: Path) -> None:
    files = [
        file_of(tmp_path, TryName("d", run_id, "t", try_number, map_index), 7)
        for run_id in ("r", "other")
        for map_index in (-1, 0, 17, 1000, 12_345)
        for try_number in (1, 2)
    ]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}\n")
    assert delete_logs(tmp_path, "d", "r", is_tried_only=True) == 10
    assert delete_logs(tmp_path, "d", "r") == 10
    assert sorted(files_in(tmp_path)) == sorted(files[10:])
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["other"]
    mine = [
        files[12].parent.parent / "notes.txt",
        tmp_path / "d" / "other" / "t" / "map" / "mine" / "3" / "1" / "7.jsonl",
    ]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert delete_logs(tmp_path, "d", "other") == 10
    assert sorted(files_in(tmp_path)) == sorted(mine)


def test_what_is_no_log_stays(tmp_path: Path) -> None:
    path = log(tmp_path, "d", "r")
    others = [
        path.parent / "notes.txt",
        path.parent.parent / "latest" / "7.jsonl",
        tmp_path / "d" / "7.jsonl",
        tmp_path / "d" / "r" / "core",
    ]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("mine")
    outside = tmp_path.parent / f"{tmp_path.name} outside"
    away = log(outside, "d", "r")
    (tmp_path / "d" / "r" / "linked").symlink_to(outside / "d" / "r" / "t")
    assert delete_logs(tmp_path, "d", "r") == 1
    assert all(other.exists() for other in (*others, away))


def test_a_run_without_logs_has_none_to_lose(tmp_path: Path) -> None:
    assert delete_logs(tmp_path / "nowhere", "d", "r") == 0
    (tmp_path / "d").write_text("a file")
    assert delete_logs(tmp_path, "d", "r") == 0


@pytest.mark.parametrize("map_index", [-1, 17])
def test_of_a_task_that_starts_again_and_again_the_last_tries_keep_their_logs(tmp_path: Path, map_index: int) -> None:
    def write(*numbers: int) -> None:
        logs = TaskLogs(tmp_path)  # another supervisor each time: nothing of the earlier ones is known
        for number in numbers:
            # More than an instance may have in its segment.
            logs.write(TryName("d", "r", "t", number, map_index), {"event": "x" * 70_000})
        assert logs.flush(10.0)
        logs.close()

    other, strange = log(tmp_path, "d", "r", task_id="other"), log(tmp_path, "d", "r").parent.parent / "notes.txt"
    strange.touch()
    write(*range(1, 4), TRIES_KEPT)
    assert tries(tmp_path, "d", "r", "t", map_index) == [1, 2, 3, TRIES_KEPT]
    write(TRIES_KEPT + 2)
    assert tries(tmp_path, "d", "r", "t", map_index) == [3, TRIES_KEPT, TRIES_KEPT + 2]
    write(TRIES_KEPT + 1)  # late
    assert tries(tmp_path, "d", "r", "t", map_index) == [3, TRIES_KEPT, TRIES_KEPT + 1, TRIES_KEPT + 2]
    assert other.exists()
    assert strange.exists()


def test_a_log_that_cannot_be_deleted_costs_the_next_try_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(path)

    old = log(tmp_path, "d", "r")
    monkeypatch.setattr(Path, "unlink", refuse)
    logs = TaskLogs(tmp_path)
    name = TryName("d", "r", "t", TRIES_KEPT + 5)
    logs.say(name, "info", "begun")
    assert logs.flush(10.0)
    logs.close()
    assert old.exists()
    assert file_of(tmp_path, name, 0).read_bytes().count(b"begun") == 1
