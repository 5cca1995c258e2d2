"""Deleting the logs of runs that are no longer in the database.

Nothing is deleted but files that are logs by their place and name, and folders that are empty then: whatever else
somebody keeps there stays. A run counts as old by when its logs were last written to, by the clock of their file
system, so that a run whose logs are young is never taken for one that was deleted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from headgate.supervisor.task_log_files import file_name_of, is_log_file, is_try_folder


class CleanedRun(msgspec.Struct, frozen=True):
    """The logs of one run that were deleted: how many files, of how many bytes together."""

    folder: Path
    files: int
    bytes: int


def clean_logs(
    folder: Path, before_s: float, runs: Mapping[str, Collection[str]], *, is_tried_only: bool = False
) -> Iterator[CleanedRun]:
    """Delete the logs of runs that are not among ``runs`` (run_ids by dag_id); yield what was deleted, run by run.

    ``before_s``: only what was last written to before that moment, in seconds since the epoch. ``is_tried_only``:
    delete nothing. A folder that is not there has no logs. Raises `OSError` for what cannot be read or deleted.
    """
    run_ids_of = {file_name_of(dag_id): run_ids for dag_id, run_ids in runs.items()}
    for dag_folder in _folders_in(folder):
        known = {file_name_of(run_id) for run_id in run_ids_of.get(dag_folder.name, ())}
        for run_folder in _folders_in(dag_folder):
            if run_folder.name in known:
                continue
            files = list(_logs_of(run_folder))
            if not files or any(stat.st_mtime >= before_s for _, stat in files):
                continue
            if not is_tried_only:
                for path, _ in files:
                    path.unlink(missing_ok=True)
                _remove_empty(run_folder)
            yield CleanedRun(run_folder, len(files), sum(stat.st_size for _, stat in files))
        if not is_tried_only:
            with contextlib.suppress(OSError):
                dag_folder.rmdir()


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []  # nothing was ever logged there, or another has just deleted it


def _logs_of(run_folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for task_folder in _folders_in(run_folder):
        for try_folder in _folders_in(task_folder):
            if not is_try_folder(try_folder.name):
                continue
            for path in sorted(try_folder.iterdir()):
                if is_log_file(path.name):
                    with contextlib.suppress(FileNotFoundError):
                        yield path, path.lstat()


def _remove_empty(run_folder: Path) -> None:
    """Remove the folders of a run from below, as far as they are empty."""
    for task_folder in _folders_in(run_folder):
        for each in (*_folders_in(task_folder), task_folder):
            with contextlib.suppress(OSError):
                each.rmdir()
    with contextlib.suppress(OSError):
        run_folder.rmdir()
