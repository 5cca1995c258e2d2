"""Loading triggers: from a `TriggerSpec` to an object. The first place at which users' code runs."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import structlog

from headgate.protocol.messages.runner import TriggerSpec
from headgate.protocol.values import decode_value
from headgate.triggers.base import BaseTrigger

log = structlog.get_logger(__name__)

_Stamp = tuple[int, int]  # of a file: the time of its last change in ns, and its size

_imported: dict[str, _Stamp] = {}  # the files of triggers, as they were at the import
_told: dict[str, _Stamp] = {}  # those of them that have changed, as the log says


class TriggerNotLoaded(Exception):
    """A trigger cannot be constructed. The message names the step, and the cause is the reason."""


def load_trigger(spec: TriggerSpec) -> BaseTrigger:
    """Import the class and construct the trigger. Raises `TriggerNotLoaded`, or whatever users' code raises."""
    cls = import_class(spec.classpath)
    _warn_if_changed(sys.modules.get(cls.__module__))
    kwargs = decode_value(spec.kwargs)
    if not isinstance(kwargs, dict):
        raise TriggerNotLoaded(f"the kwargs of {spec.name} are a {type(kwargs).__name__}, not a dict")
    trigger: object = cls(**kwargs)
    if not isinstance(trigger, BaseTrigger):  # a __new__ of the author's may return anything
        raise TriggerNotLoaded(f"{spec.classpath} constructs a {type(trigger).__name__}, not a trigger")
    return trigger


def _warn_if_changed(module: ModuleType | None) -> None:
    """Warn once for each change of a file that this process has imported a trigger from: it runs as it was imported."""
    changed = None if module is None else _changed(module)
    if module is not None and changed is not None and _told.get(changed[0]) != changed[1]:
        _told[changed[0]] = changed[1]
        log.warning(
            "the module of a trigger has changed since the runner imported it; triggers run as it was then, until "
            "headgate is started again",
            module=module.__name__,
            file=changed[0],
        )


def _changed(module: ModuleType) -> tuple[str, _Stamp] | None:
    """Return the file of a module and its stamp, if it has changed since the first look, soon after the import."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str):
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None  # it may be in an archive
    stamp = (status.st_mtime_ns, status.st_size)
    return None if _imported.setdefault(path, stamp) == stamp else (path, stamp)


def import_class(classpath: str) -> type[BaseTrigger]:
    """Import ``package.module.Class``, or ``package.module.Outer.Inner``."""
    names = classpath.split(".")
    if len(names) < 2 or not all(names):
        raise TriggerNotLoaded(f"{classpath!r} is not of the form package.module.Class")
    # The longest prefix that is a module wins; the rest names the class inside it.
    for length in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:length])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as exc:
            # Only the requested module may be missing; a module that it imports in turn is the author's error.
            if exc.name is None or not (module_name == exc.name or module_name.startswith(exc.name + ".")):
                raise
        else:
            return _class_in(module, names[length:], classpath)
    raise TriggerNotLoaded(
        f"{classpath}: there is no module {names[0]!r}; is its folder among import_paths (headgate config show)?"
    )


def _class_in(module: ModuleType, names: list[str], classpath: str) -> type[BaseTrigger]:
    found: Any = module
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            way_out = "if another module was meant, is its folder among import_paths (headgate config show)?"
            if (changed := _changed(module)) is not None:
                way_out = f"{changed[0]} has changed since the runner imported it: start headgate again"
            raise TriggerNotLoaded(f"{classpath}: {module.__name__} has no {'.'.join(names)}; {way_out}") from None
    if not (isinstance(found, type) and issubclass(found, BaseTrigger)):
        raise TriggerNotLoaded(f"{classpath} is not a class derived from headgate.triggers.base.BaseTrigger")
    return found
