"""Deleting the logs of the tasks of a run, and of tries that were long ago."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from headgate.supervisor.logs.task_log_files import MAP_FOLDER, folder_of_run, is_log_file, is_try_folder


def delete_logs(folder: Path, dag_id: str, run_id: str, *, is_tried_only: bool = False) -> int:
    """Delete the logs of all tasks of a run; return the number of files. With ``is_tried_only`` delete nothing.

    Only files that are logs by their place and name are deleted, and then folders that are empty; other files stay.
    Raises `OSError` if one cannot be read or deleted.
    """
    run_folder = folder_of_run(folder, dag_id, run_id)
    files = list(_logs_of(run_folder))
    if is_tried_only:
        return len(files)
    for path in files:
        path.unlink(missing_ok=True)
    for task_folder in _folders_in(run_folder):
        for of_tries in _folders_of_tries(task_folder):
            for each in (*_folders_in(of_tries), of_tries):
                _remove_if_empty(each)
        for each in (*_folders_in(task_folder / MAP_FOLDER), task_folder / MAP_FOLDER, task_folder):
            _remove_if_empty(each)
    _remove_if_empty(run_folder)
    _remove_if_empty(run_folder.parent)
    return len(files)


def delete_tries_before(of_tries: Path, try_number: int) -> None:
    """Delete the logs of all tries of a task before this one, in the folder that holds its tries. Raises `OSError`."""
    for folder in filter(_is_number, _folders_in(of_tries)):
        if int(folder.name) < try_number:
            for path in _logs_in(folder):
                path.unlink(missing_ok=True)
            _remove_if_empty(folder)


def _logs_of(run_folder: Path) -> Iterator[Path]:
    for task_folder in _folders_in(run_folder):
        holding = list(filter(_is_number, _folders_in(task_folder / MAP_FOLDER)))
        for of_tries in _folders_of_tries(task_folder):
            holding += filter(_is_number, _folders_in(of_tries))
        for each in holding:
            yield from _logs_in(each)


def _logs_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if is_log_file(path.name))
    except FileNotFoundError:  # another process is deleting it
        return []


def _folders_of_tries(task_folder: Path) -> Iterator[Path]:
    """Yield the folders that hold the tries of a task: of its instances, and its own."""
    for thousand in filter(_is_number, _folders_in(task_folder / MAP_FOLDER)):
        yield from filter(_is_number, _folders_in(thousand))
    yield task_folder


def _is_number(folder: Path) -> bool:
    return is_try_folder(folder.name)


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []  # nothing was ever logged there, or another process has just deleted it


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
