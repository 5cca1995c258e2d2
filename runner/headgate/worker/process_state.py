"""State of the process that outlives a step: users' modules, and for example the working directory and the environment.

User modules are loaded from source, never from cached bytecode, because bytecode is considered current for a source
that changed twice within a second. The file that each module was read from is recorded. When one of these files
changes, all user modules are removed from `sys.modules`: it is not known which of them import from which.
"""

from __future__ import annotations

import contextlib
import decimal
import errno
import gc
import importlib
import importlib.machinery
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable
from types import CodeType
from typing import Final, NamedTuple

from headgate.triggers.encoding import DAG_MODULES

# Signals that headgate handles itself or that cannot be handled.
_KEPT: Final = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL, signal.SIGSTOP}
OPEN_FILES_SHARE: Final = 0.5  # of those that may be open, left by steps: then the process is replaced
_LIMITS: Final = {getattr(resource, name): name for name in reversed(dir(resource)) if name.startswith("RLIMIT_")}
_HANDLED: Final = sorted(signal.valid_signals() - _KEPT)


class ProcessState:
    """The state of the process at the time of construction, as far as steps are known to change it.

    That is the working directory, the environment with its time zone, the search path, the umask, handlers and mask of
    signals, limits of resources, the priority, and settings of Python. It is restored between two steps, which may be
    of different DAGs.
    """

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._environment = dict(os.environ)
        self._path = list(sys.path)
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._handlers = {number: signal.getsignal(number) for number in _HANDLED}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._limits = {limit: resource.getrlimit(limit) for limit in _LIMITS}
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        self._context = decimal.getcontext().copy()
        self._collects = gc.isenabled()
        self._calls_max = sys.getrecursionlimit()
        self._socket_timeout_s = socket.getdefaulttimeout()

    def restore(self) -> str | None:
        """Undo all changes; return what cannot be undone, and makes the process unfit for another step."""
        with contextlib.suppress(OSError):  # the folder may have been deleted
            os.chdir(self._folder)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
            time.tzset()
        if sys.path != self._path:
            sys.path[:] = self._path
        os.umask(self._umask)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm of the last step must not fire in the next one
        for number, handler in self._handlers.items():
            if signal.getsignal(number) != handler:
                with contextlib.suppress(OSError, TypeError, ValueError):
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        decimal.setcontext(self._context.copy())
        (gc.enable if self._collects else gc.disable)()
        sys.setrecursionlimit(self._calls_max)
        socket.setdefaulttimeout(self._socket_timeout_s)
        return self._unfit_limit() or _unfit_files()

    def _unfit_limit(self) -> str | None:
        for limit, values in self._limits.items():
            if resource.getrlimit(limit) != values:
                try:
                    resource.setrlimit(limit, values)
                except (OSError, ValueError) as error:
                    return f"its {_LIMITS[limit]} cannot be raised to {values} again: {error}"
        if os.getpriority(os.PRIO_PROCESS, 0) != self._priority:
            try:
                os.setpriority(os.PRIO_PROCESS, 0, self._priority)
            except OSError as error:
                return f"its priority cannot be {self._priority} again: {error}"
        return None


def _unfit_files() -> str | None:
    """Return what is wrong if files that steps have left open take so much that others soon could open none."""
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        files = _open_files()
        if files > files_max * OPEN_FILES_SHARE:
            gc.collect()  # some may belong to objects that refer to each other
            files = _open_files()
    except OSError as error:
        return f"it can open no file: {error}" if error.errno in (errno.EMFILE, errno.ENFILE) else None
    return f"{files} files are left open, and {files_max} may be" if files > files_max * OPEN_FILES_SHARE else None


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


class _Stamp(NamedTuple):
    """State of a file when a module was read from it."""

    path: str
    mtime_ns: int
    size: int


class UserModules:
    """The modules loaded from ``folders`` and their subfolders, except from ``others`` within them.

    ``others`` are the folders of installed modules: a virtual environment may be inside a user's folder.
    """

    def __init__(self, folders: Iterable[str], others: Iterable[str]) -> None:
        self._folders = {os.path.realpath(folder) for folder in folders}
        self._others = {os.path.realpath(folder) for folder in others if folder} - self._folders
        self._stamps: dict[str, _Stamp] = {}

    def install(self) -> None:
        """Install the import hook."""
        sys.path_hooks.insert(0, self._finder)
        sys.path_importer_cache.clear()

    def add_folder(self, folder: str) -> None:
        """Add a user's folder."""
        folder = os.path.realpath(folder)
        if folder not in self._folders:
            self._folders.add(folder)
            self._others.discard(folder)
            sys.path_importer_cache.clear()

    def refresh(self) -> bool:
        """Remove all user modules from `sys.modules` if the file of one has changed; return whether one has."""
        importlib.invalidate_caches()  # a new file may have the folder's old time of change
        if all(_stamp_of(stamp.path) == stamp for stamp in self._stamps.values()):
            return False
        for name in self._stamps:
            sys.modules.pop(name, None)
        self._stamps.clear()
        for name, module in list(sys.modules.items()):
            # A package without __init__.py has no file; DAG files are run again for each step anyway.
            if name.startswith(DAG_MODULES + ".") or self._is_namespace(module):
                del sys.modules[name]
        return True

    def note(self, name: str, stamp: _Stamp) -> None:
        """Record the file that a module was read from."""
        self._stamps[name] = stamp

    def owns(self, path: str) -> bool:
        """Return whether modules in this folder are the user's, as decided by the nearest known folder above it."""
        path = os.path.realpath(path)
        while True:
            if path in self._folders:
                return True
            if path in self._others or path == (above := os.path.dirname(path)):
                return False
            path = above

    def _finder(self, path: str) -> importlib.machinery.FileFinder:
        if not self.owns(path or os.getcwd()) or not os.path.isdir(path or "."):
            raise ImportError("not a user's folder", path=path)

        class Loader(_SourceLoader):
            modules = self

        return importlib.machinery.FileFinder(
            path,
            (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
            (Loader, importlib.machinery.SOURCE_SUFFIXES),
        )

    def _is_namespace(self, module: object) -> bool:
        spec = getattr(module, "__spec__", None)
        if not isinstance(spec, importlib.machinery.ModuleSpec) or spec.origin is not None:
            return False
        folders = spec.submodule_search_locations
        return bool(folders) and all(self.owns(folder) for folder in folders or ())


class _SourceLoader(importlib.machinery.SourceFileLoader):
    modules: UserModules

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file's current content."""
        path = self.get_filename(fullname)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            source = file.read()
        # Recorded before it is run, so that a module that raises is loaded again after a change as well.
        self.modules.note(fullname, _Stamp(path, status.st_mtime_ns, status.st_size))
        code: CodeType = self.source_to_code(source, path)
        return code


def _stamp_of(path: str) -> _Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _Stamp(path, status.st_mtime_ns, status.st_size)
