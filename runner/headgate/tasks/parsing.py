"""Load the DAGs of a DAG file: the file is run; its DAGs are all that it makes, and those it has imported by name.

The file is run as a module with a unique name, so that two files with the same name do not conflict, and always from
source: cached bytecode is considered current for a file that changed twice within a second.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import sys
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Final

import msgspec

from headgate.child.error_text import describe_error
from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import DagSpec, encode_dag
from headgate.protocol.messages.maps import digest_of
from headgate.tasks.graph import DAG, collecting
from headgate.tasks.maps.sources import source_digest
from headgate.triggers.encoding import DAG_MODULES

FILE_BYTES_MAX: Final = 4 * 1024 * 1024  # a longer file holds data, which belongs in another file
DAGS_PER_FILE_MAX: Final = 1000
_IMPORTED_FROM: Final = "modules are imported from import_paths (headgate config show)"


class DagFileRefused(Exception):
    """A DAG file is too long, or makes too many DAGs."""


class ParsedFile(msgspec.Struct, frozen=True):
    """Result of `parse_file`: the DAGs, or the error and its traceback, each at most ``ERROR_CHARS_MAX`` characters."""

    dags: tuple[DagSpec, ...] = ()
    error: str = ""
    traceback: str = ""
    source_digest: str = ""  # of what was run, if it could be read


def parse_file(path: str | os.PathLike[str]) -> ParsedFile:
    """Run the file and return the specs of its DAGs, or the error.

    If one DAG of the file is malformed, the file has none. Raises nothing but `KeyboardInterrupt`.
    """
    path, digest = os.path.abspath(path), ""
    try:
        source = _read(path)
        digest = digest_of([source])
        specs = tuple(dag.to_spec() for dag in _run(path, source, digest).values())
        for spec in specs:
            encode_dag(spec)  # the length on the wire is a limit as well
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: the author's file is run as it is
        linecache.checkcache()  # so that the traceback shows the lines that ran, not those of an earlier version
        text, trace = describe_error(error)
        return ParsedFile(error=text, traceback=trace, source_digest=digest)
    return ParsedFile(dags=specs, source_digest=digest)


def load_dags(path: str | os.PathLike[str]) -> dict[str, DAG]:
    """Run the file and return its DAGs by id, in the order of their creation; those of other modules come last.

    Raises whatever the file raises, `DagFileRefused` for one that is too long or makes too many, `DagMalformed` for two
    DAGs of one id.
    """
    path = os.path.abspath(path)
    source = _read(path)
    return _run(path, source, digest_of([source]))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        source = file.read(FILE_BYTES_MAX + 1)
    if len(source) > FILE_BYTES_MAX:
        raise DagFileRefused(f"{path} is longer than {FILE_BYTES_MAX:,} bytes")
    return source


def _run(path: str, source: bytes, digest: str) -> dict[str, DAG]:
    module = ModuleType(module_name(path))
    module.__file__, module.__package__ = path, DAG_MODULES
    code = _compiled(source, path)
    # It stays there, because dataclasses, pickle and others look up a class's module by name, also while tasks run.
    previous = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    token = source_digest.set(digest)
    try:
        with collecting(module.__dict__) as made:
            exec(code, module.__dict__)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError):
            _add_hint(error, path)
        sys.modules.pop(module.__name__, None)
        if previous is not None:
            sys.modules[module.__name__] = previous
        raise
    finally:
        source_digest.reset(token)
    found = list(dict.fromkeys([*made, *(value for value in module.__dict__.values() if isinstance(value, DAG))]))
    if len(found) > DAGS_PER_FILE_MAX:
        raise DagFileRefused(f"{path} makes {len(found)} DAGs; the limit is {DAGS_PER_FILE_MAX}")
    dags: dict[str, DAG] = {}
    for dag in found:
        dag.check_expanded()
        if dag.dag_id in dags:
            raise DagMalformed(dag.dag_id, None, "is made twice by this file: each DAG needs its own dag_id")
        dags[dag.dag_id] = dag
    return dags


@lru_cache(maxsize=8)  # a worker runs the same few files again and again
def _compiled(source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def _add_hint(error: ModuleNotFoundError, path: str) -> None:
    """Add to the message that a module beside the DAG file is not found there, as it is in Airflow."""
    name = (error.name or "").partition(".")[0]
    beside = os.path.join(os.path.dirname(path), name)
    if name == DAG_MODULES:  # `from . import x`, or `from .x import y`
        error.msg = f"a DAG file belongs to no package, so nothing can be imported relative to it: {_IMPORTED_FROM}"
    for found in (f"{beside}.py", beside):
        if name and os.path.exists(found) and found != path:
            error.msg += f"; {found} is beside the DAG file, and {_IMPORTED_FROM}: move it there, or add its folder"
            return


@lru_cache(maxsize=1000)
def module_name(path: str) -> str:
    """Return the module name for the file at this absolute path, which is unique to the path."""
    stem = re.sub(r"\W", "_", os.path.splitext(os.path.basename(path))[0])[:60]
    return f"{DAG_MODULES}.{stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
