"""Old logs of runs that are gone are deleted, and nothing else is, whatever lies beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headgate.scheduling.names import TryName
from headgate.supervisor.task_log_cleaning import CleanedRun, clean_logs
from headgate.supervisor.task_log_files import file_name_of, file_of

NOW_S = 1_800_000_000.0
OLD_S = NOW_S - 100.0
LONG = "r" * 300  # a run_id whose folder has a hash for a name


def log(folder: Path, dag_id: str, run_id: str, *, at_s: float, task_id: str = "t", part: int = 0) -> Path:
    path = file_of(folder, TryName(dag_id, run_id, task_id, 1), 7, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"12345")
    os.utime(path, (at_s, at_s))
    return path


def clean(folder: Path, **runs: list[str]) -> dict[str, tuple[int, int]]:
    found = clean_logs(folder, NOW_S - 50.0, runs)
    return {str(run.folder.relative_to(folder)): (run.files, run.bytes) for run in found}


def test_a_run_that_is_gone_loses_all_its_logs_and_their_folders(tmp_path: Path) -> None:
    for task_id in "ab":
        for part in (0, 3):
            log(tmp_path, "d", "gone", at_s=OLD_S, task_id=task_id, part=part)
    kept = log(tmp_path, "d", "kept", at_s=OLD_S)
    assert clean(tmp_path, d=["kept"]) == {"d/gone": (4, 20)}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
    assert not (tmp_path / "d" / "gone").exists()
    assert clean(tmp_path, d=["kept"]) == {}


@pytest.mark.parametrize("run_id", ["scheduled__2026-01-01T00:00:00+00:00", LONG, "a/b", ".."])
def test_a_run_that_is_there_keeps_its_logs_whatever_it_is_called(tmp_path: Path, run_id: str) -> None:
    path = log(tmp_path, "d", run_id, at_s=OLD_S)
    assert clean(tmp_path, d=[run_id]) == {}
    assert path.exists()
    assert list(clean(tmp_path, d=[])) == [f"d/{file_name_of(run_id)}"]
    assert not path.exists()


def test_one_young_file_keeps_all_logs_of_its_run(tmp_path: Path) -> None:
    log(tmp_path, "d", "r", at_s=OLD_S)
    log(tmp_path, "d", "r", at_s=NOW_S, task_id="u")
    assert clean(tmp_path) == {}
    assert len(list(tmp_path.rglob("*.jsonl"))) == 2


def test_the_logs_of_a_dag_that_is_gone_go_and_its_folder_with_them(tmp_path: Path) -> None:
    log(tmp_path, "gone", "r", at_s=OLD_S)
    assert clean(tmp_path, d=["r"]) == {"gone/r": (1, 5)}
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_log_stays(tmp_path: Path) -> None:
    path = log(tmp_path, "d", "r", at_s=OLD_S)
    others = [
        path.parent / "notes.txt",
        path.parent.parent / "latest" / "7.jsonl",
        tmp_path / "d" / "7.jsonl",
        tmp_path / "d" / "r" / "core",
    ]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("mine")
        os.utime(other, (OLD_S, OLD_S))
    outside = tmp_path.parent / f"{tmp_path.name} outside"
    away = log(outside, "r", "t", at_s=OLD_S)
    (tmp_path / "linked").symlink_to(outside)
    assert clean(tmp_path) == {"d/r": (1, 5)}
    assert all(other.exists() for other in (*others, away))


def test_nothing_is_deleted_where_it_is_only_tried(tmp_path: Path) -> None:
    path = log(tmp_path, "d", "r", at_s=OLD_S)
    assert list(clean_logs(tmp_path, NOW_S, {}, is_tried_only=True)) == [CleanedRun(tmp_path / "d" / "r", 1, 5)]
    assert path.exists()


def test_a_folder_that_is_not_there_has_no_logs(tmp_path: Path) -> None:
    assert list(clean_logs(tmp_path / "nowhere", NOW_S, {})) == []
