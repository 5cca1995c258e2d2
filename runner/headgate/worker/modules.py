"""Users' modules in a process that outlives their files: a step sees the code that is on the disk when it begins.

Modules from the folders of the user's are loaded from their source, never from cached bytecode, which would be taken
for a source that was changed twice within a second; and with each is noted what file it was read from. When one of
these files has changed, all such modules are forgotten: which of them has taken what from which, nobody knows.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Iterable
from types import CodeType
from typing import NamedTuple

from headgate.tasks.storing import DAG_MODULES


class _Stamp(NamedTuple):
    """What a file was when a module was read from it."""

    path: str
    mtime_ns: int
    size: int


class UsersModules:
    """The modules loaded from ``folders``, and from what is below them, but not from ``others`` below them.

    ``others`` are the folders of installed modules: a virtual environment may stand within a folder of the user's.
    """

    def __init__(self, folders: Iterable[str], others: Iterable[str]) -> None:
        self._folders = {os.path.realpath(folder) for folder in folders}
        self._others = {os.path.realpath(folder) for folder in others if folder} - self._folders
        self._stamps: dict[str, _Stamp] = {}

    def install(self) -> None:
        """Be asked for what is imported from now on."""
        sys.path_hooks.insert(0, self._finder)
        sys.path_importer_cache.clear()

    def add_folder(self, folder: str) -> None:
        """Take another folder for one of the user's."""
        folder = os.path.realpath(folder)
        if folder not in self._folders:
            self._folders.add(folder)
            self._others.discard(folder)
            sys.path_importer_cache.clear()

    def refresh(self) -> bool:
        """Forget all modules of the user's if one of them has changed on the disk; return whether it has."""
        importlib.invalidate_caches()  # a new file may be there within the same tick of the file system's clock
        if all(_stamp_of(stamp.path) == stamp for stamp in self._stamps.values()):
            return False
        for name in self._stamps:
            sys.modules.pop(name, None)
        self._stamps.clear()
        for name, module in list(sys.modules.items()):
            # A package without __init__.py has no file; and DAG files are run anew for each step anyway.
            if name.startswith(DAG_MODULES + ".") or self._is_namespace(module):
                del sys.modules[name]
        return True

    def note(self, name: str, stamp: _Stamp) -> None:
        """Note what a module was read from."""
        self._stamps[name] = stamp

    def owns(self, path: str) -> bool:
        """Whether what stands in this folder is the user's: the nearest folder above it that we know says."""
        path = os.path.realpath(path)
        while True:
            if path in self._folders:
                return True
            if path in self._others or path == (above := os.path.dirname(path)):
                return False
            path = above

    def _finder(self, path: str) -> importlib.machinery.FileFinder:
        if not self.owns(path or os.getcwd()) or not os.path.isdir(path or "."):
            raise ImportError("not a folder of the user's", path=path)

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
    modules: UsersModules

    def get_code(self, fullname: str) -> CodeType:
        """Compile what is in the file now."""
        path = self.get_filename(fullname)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            source = file.read()
        # Noted before it is run: a module that fails is one to be looked at again as well.
        self.modules.note(fullname, _Stamp(path, status.st_mtime_ns, status.st_size))
        code: CodeType = self.source_to_code(source, path)
        return code


def _stamp_of(path: str) -> _Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _Stamp(path, status.st_mtime_ns, status.st_size)
