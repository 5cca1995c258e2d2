"""Deleting the logs of a run that has been deleted from the database.

Nothing is deleted but files that are logs by their place and name, and folders that are empty then: whatever else
somebody keeps there stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from headgate.supervisor.logs.task_log_files import folder_of_run, is_log_file, is_try_folder


def delete_logs(folder: Path, dag_id: str, run_id: str, *, is_tried_only: bool = False) -> int:
    """Delete the logs of all tasks of a run; return how many files that were. ``is_tried_only``: delete nothing.

    Raises `OSError` for what cannot be read or deleted.
    """
    run_folder = folder_of_run(folder, dag_id, run_id)
    files = list(_logs_of(run_folder))
    if is_tried_only:
        return len(files)
    for path in files:
        path.unlink(missing_ok=True)
    for task_folder in _folders_in(run_folder):
        for each in (*_folders_in(task_folder), task_folder):
            _remove_if_empty(each)
    _remove_if_empty(run_folder)
    _remove_if_empty(run_folder.parent)
    return len(files)


def _logs_of(run_folder: Path) -> Iterator[Path]:
    for task_folder in _folders_in(run_folder):
        for try_folder in _folders_in(task_folder):
            if is_try_folder(try_folder.name):
                with contextlib.suppress(FileNotFoundError):  # somebody else is deleting it
                    yield from sorted(path for path in try_folder.iterdir() if is_log_file(path.name))


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []  # nothing was ever logged there, or another has just deleted it


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
