"""The folder of DAG files: a worker process parses new and changed files, and the supervisor stores the DAGs.

The supervisor reads names, sizes and times of files, never their contents: those are users' code. A file is parsed
again if its size or a time has changed, followed by all the others, because they may import from it. Slow files are
parsed last, and a slow file that has not changed itself pauses before it is parsed again. A file that could not be
parsed is tried again less and less often: what was wrong may be over, and no file says so. If a file is
removed, so are its DAGs, unless the whole folder cannot be read or is empty. If two files define DAGs of the same id,
the first one owns it, and the other is an import error as long as the first defines it.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.dags import DagSpec, check_dag
from headgate.protocol.messages.maps import digest_of
from headgate.protocol.messages.worker import FileParsed
from headgate.scheduling.why import DagFolder
from headgate.store.errors import BLAMELESS, BadName, RowsRefused, described
from headgate.store.ids import Epoch
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks.dags import FILE_CHARS_MAX
from headgate.store.triggers.watchers import check_name
from headgate.supervisor.executors.file_parser import FileParser

log = structlog.get_logger(__name__)

FILES_MAX = 10_000  # DAG files of one folder; a warning is logged if there are more, and the rest is ignored
DEPTH_MAX = 16  # folders within folders
SLOW_S = 10.0  # a file that takes longer must not delay the others each time that one of them changes
SLOW_PAUSE_FACTOR = 10  # times the parse time: the pause before a slow file is parsed again because another changed
FAILED_AGAIN_S = 60.0  # before a file that could not be parsed is parsed again, then twice as long, ...
FAILED_AGAIN_MAX_S = 600.0  # ... up to this
WARNINGS_MAX = 1000  # different warnings that are logged, each once and not at every scan

# Times of the contents and of the inode in ns, size, inode. An archive may give two versions one time of the contents.
Signature = tuple[int, int, int, int]


class _Failure(NamedTuple):
    """The last failure of a file that could not be parsed."""

    error: str
    wait_s: float
    again_at: float


class DagFiles:
    """Synchronises the DAGs in the database with a folder of DAG files.

    ``told`` is what the folder is, as others can compare it with theirs; None before all files are parsed.
    """

    told: DagFolder | None = None

    def __init__(self, folder: Path, parser: FileParser, store: TaskVerbs, *, look_s: float) -> None:
        self._folder = folder
        self._parser = parser
        self._store = store
        self._look_s = look_s
        self._look_at = 0.0
        self._seen: dict[str, Signature] = {}
        self._unseen: list[str] = []  # folders that the last scan could not read completely
        self._waiting: deque[str] = deque()  # to be parsed
        self._changed: set[str] = set()  # those of them that have changed themselves
        self._parsing: str | None = None
        self._begun_at = 0.0  # when the file that is being parsed was given to the parser
        self._slow: dict[str, float] = {}  # the end of the pause of each slow file
        self._failed: dict[str, _Failure] = {}
        self._paused: set[str] = set()  # slow files to be parsed after their pause
        self._parsed: deque[FileParsed] = deque()  # to be stored
        self._gone: deque[str] = deque()  # removed files, whose DAGs are to be removed from the database
        self._owners: dict[str, str] = {}  # the file that defines a DAG, by dag_id
        self._refused: dict[str, set[str]] = {}  # files that define a DAG of another file as well, by that file
        self._knows_database = False
        self._warned: set[str] = set()
        self._digests: dict[str, str] = {}  # of the texts of files that were parsed
        self._is_summed_up = False

    def step(self, epoch: Epoch, now: float) -> bool:
        """Do one piece of work, if any is due; return whether the database has changed.

        Errors of the store are raised; then the next step tries again.
        """
        for parsed in self._parser.events(now):
            self._parsed.append(parsed)
            self._parsing = None
            self._digests[parsed.file] = parsed.source_digest
            self._is_summed_up = False
            self._slow.pop(parsed.file, None)
            if now - self._begun_at > SLOW_S:
                self._slow[parsed.file] = now + SLOW_PAUSE_FACTOR * (now - self._begun_at)
        if now >= self._look_at:
            self._look(now)
            self._look_at = now + self._look_s
        if self._waiting and self._parser.room():
            self._begun_at = now
            self._parsing = self._waiting.popleft()
            self._changed.discard(self._parsing)
            self._parser.parse(self._parsing)
        if not self._is_summed_up and not self._waiting and self._parsing is None:
            self._sum_up()
        return self._store_next(epoch, now)

    def _sum_up(self) -> None:
        self._is_summed_up = True
        self._digests = {file: digest for file, digest in self._digests.items() if file in self._seen}
        if len(self._digests) < len(self._seen):
            return
        files = {os.path.relpath(file, self._folder): digest for file, digest in self._digests.items()}
        where, whole = (
            digest_of([text.encode("utf-8", "surrogateescape")])
            for text in (os.path.realpath(self._folder), repr(sorted(files.items())))
        )
        if self.told is None or whole != self.told.files:
            self.told = DagFolder(where, whole, time.time())

    def wake_at(self) -> float:
        """Return the time at which the next step is due."""
        if self._parsed or self._gone:
            return 0.0
        begin_at = 0.0 if self._waiting and self._parser.room() else math.inf
        return min(begin_at, self._look_at, self._parser.wake_at())

    def close(self) -> None:
        """End the process of the parser."""
        self._parser.close()

    def _store_next(self, epoch: Epoch, now: float) -> bool:
        if not self._knows_database:
            # Find files that were removed while no supervisor ran.
            prefix = str(self._folder) + os.sep
            known = {file: dags for file, dags in self._store.dag_files().items() if file.startswith(prefix)}
            there = {*self._seen, *self._gone}
            self._gone.extend(file for file in known if file not in there and not self._is_unseen(file))
            self._owners = {dag_id: file for file, dags in known.items() for dag_id in dags}
            self._knows_database = True
        if self._gone:
            self._save(epoch, self._gone[0], ())
            log.warning("a DAG file is gone, and its DAGs with it", file=self._gone.popleft())
            return True
        if self._parsed:
            self._store_parsed(epoch, self._parsed[0], now)
            self._parsed.popleft()
            return True
        return False

    def _store_parsed(self, epoch: Epoch, parsed: FileParsed, now: float) -> None:
        error = parsed.error and f"{parsed.error}\n{parsed.traceback}".rstrip()
        before = self._failed.pop(parsed.file, None)
        if not error:
            try:
                for spec in parsed.dags:
                    check_dag(spec)  # a process that runs users' code has sent it
                error = self._duplicate(parsed)
                if not error:
                    self._save(epoch, parsed.file, parsed.dags)
                    log.info("parsed a DAG file", file=parsed.file, dags=len(parsed.dags))
                    return
            except BLAMELESS:
                raise
            except (ProtocolError, BadName, RowsRefused) as refused:
                error = str(refused)
            except Exception as unforeseen:
                error = f"headgate cannot store the DAGs of the file: {described(unforeseen)}"
                log.error("the DAGs of a file cannot be stored", file=parsed.file, exc_info=unforeseen)
        is_known = before is not None and before.error == error
        if not is_known:
            self._store.save_import_error(epoch, parsed.file, error)
        if parsed.error:
            wait_s = min(2 * before.wait_s, FAILED_AGAIN_MAX_S) if before is not None and is_known else FAILED_AGAIN_S
            self._failed[parsed.file] = _Failure(error, wait_s, now + wait_s)
        if is_known:
            return
        log.error("a DAG file cannot be parsed", file=parsed.file, error=parsed.error or error)

    def _duplicate(self, parsed: FileParsed) -> str:
        """Return the error if another file defines one of these DAGs, '' if none does."""
        for spec in parsed.dags:
            owner = self._owners.get(spec.dag_id, parsed.file)
            if owner != parsed.file:
                self._refused.setdefault(owner, set()).add(parsed.file)
                return (
                    f"DAG {spec.dag_id!r} is defined by two files, {owner} and {parsed.file}: the first has it until "
                    f"one of the two uses another dag_id"
                )
        return ""

    def _save(self, epoch: Epoch, file: str, specs: Sequence[DagSpec]) -> None:
        self._store.save_file(epoch, file, specs)
        self._owners = {dag_id: owner for dag_id, owner in self._owners.items() if owner != file}
        self._owners.update((spec.dag_id, file) for spec in specs)
        # Files that were refused because of this one may be accepted now.
        self._waiting.extend(sorted(self._refused.pop(file, set()) & self._seen.keys() - set(self._waiting)))
        for spec in specs:
            if not spec.tasks:
                self._warn_once(
                    "a DAG has no tasks; a @task function makes one when it is called in the DAG's with block",
                    dag=spec.dag_id,
                    file=file,
                )

    # --- the folder -------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        found: dict[str, Signature] = {}
        was_unseen, self._unseen = bool(self._unseen), []
        for path, signature in self._python_files():
            if len(found) == FILES_MAX:
                self._warn_once(
                    "there are more DAG files than are looked at", folder=str(self._folder), limit=FILES_MAX
                )
                self._unseen = [str(self._folder)]
                break
            found[path] = signature
        gone = sorted(path for path in self._seen.keys() - found.keys() if not self._is_unseen(path))
        changed = [path for path, signature in sorted(found.items()) if self._seen.get(path) != signature]
        if changed:
            self._changed.update(changed)
            # The one that is being parsed may turn out to be slow.
            paused = {path for path in found if path == self._parsing or self._slow.get(path, now) > now}
            self._paused = paused - self._changed
            others = [path for path in found if path not in changed and path not in self._paused]
            self._waiting = deque(sorted([*changed, *others], key=lambda path: path in self._slow))
        elif gone:
            self._waiting = deque(path for path in self._waiting if path not in gone)
        self._paused.difference_update(gone)
        self._changed.difference_update(gone)
        over = [path for path in self._paused if path != self._parsing and self._slow.get(path, now) <= now]
        self._paused.difference_update(over)
        self._waiting.extend(over)
        for path in (*changed, *gone):
            self._failed.pop(path, None)
        due = [path for path, failure in self._failed.items() if failure.again_at <= now and path in found]
        busy = {*self._waiting, *self._paused, self._parsing}
        self._waiting.extend(path for path in due if path not in busy)
        self._gone.extend(gone)
        self._is_summed_up = self._is_summed_up and not gone
        kept = {path: signature for path, signature in self._seen.items() if self._is_unseen(path)}
        self._seen = kept | found
        if was_unseen and not self._unseen:
            self._knows_database = False  # files may have been removed unseen

    def _is_unseen(self, file: str) -> bool:
        """Whether a file may exist though the scan did not see it: its folder was unreadable or had too many files."""
        return any(file.startswith(folder + os.sep) for folder in self._unseen)

    def _python_files(self) -> Iterator[tuple[str, Signature]]:
        """Yield all Python files. A folder is scanned once, even if several links lead to it."""
        folders, links = deque([(self._folder, DEPTH_MAX)]), deque[tuple[Path, int]]()
        visited: set[tuple[int, int]] = set()
        while folders or links:
            folder, depth = (folders or links).popleft()
            for entry, status in self._entries(folder, visited):
                if stat.S_ISDIR(status.st_mode):
                    if depth > 1:
                        (links if entry.is_symlink() else folders).append((Path(entry.path), depth - 1))
                elif entry.name.endswith(".py") and stat.S_ISREG(status.st_mode) and self._has_name(entry.path):
                    yield entry.path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)

    def _entries(
        self, folder: Path, visited: set[tuple[int, int]]
    ) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        try:
            status = folder.stat()
            if (identity := (status.st_dev, status.st_ino)) in visited:
                return
            visited.add(identity)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            self._warn_once("a folder of DAG files cannot be read", folder=str(folder), error=str(error))
            self._unseen.append(str(folder))
            return
        if not entries and folder == self._folder:
            # The disk may not be mounted: to remove its DAGs would end all their waiting tasks.
            self._warn_once(
                "the folder of DAG files is empty; what it held before goes on as it was", folder=str(folder)
            )
            self._unseen.append(str(folder))
        for entry in entries:
            if not entry.name.startswith((".", "__")):
                with contextlib.suppress(OSError):  # removed meanwhile, or a dangling link
                    yield entry, entry.stat()

    def _has_name(self, file: str) -> bool:
        """Whether the path can be sent to a worker and stored; the name of a file may contain any bytes."""
        try:
            check_name(file, "the path of a DAG file", chars_max=FILE_CHARS_MAX)
        except BadName as bad:
            self._warn_once("a DAG file is ignored because of its name", file=repr(file), error=str(bad))
            return False
        return True

    def _warn_once(self, event: str, **fields: object) -> None:
        key = f"{event} {fields}"
        if key in self._warned or len(self._warned) > WARNINGS_MAX:
            return
        self._warned.add(key)
        if len(self._warned) > WARNINGS_MAX:
            event, fields = "there are more warnings about DAG files than are given", {"limit": WARNINGS_MAX}
        log.warning(event, **fields)
