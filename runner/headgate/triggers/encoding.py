"""Encode a trigger for storage: its classpath and kwargs, checked at the author's line of code."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Final

from headgate.protocol.errors import ValueNotSerializable
from headgate.protocol.messages.dags import CLASSPATH_CHARS_MAX
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.values import encode_value
from headgate.triggers.base import BaseTrigger

_BEHAVIOR: Final = (FunctionType, classmethod, staticmethod, property)  # not values, which may be defaults of fields
DAG_MODULES: Final = "headgate_dag_files"  # the package that DAG files are loaded under


class TriggerNotStorable(ValueNotSerializable):
    """A trigger cannot be stored, or a runner cannot construct it from its stored form."""


def encode_trigger(trigger: BaseTrigger) -> tuple[str, bytes]:
    """Return the trigger's classpath and its encoded kwargs.

    Raises `TriggerNotStorable`, `ValueNotSerializable` with the path of the value that cannot travel, `ValueTooLong`,
    or whatever its `serialize` raises.
    """
    name = type(trigger).__name__
    if not isinstance(trigger, BaseTrigger):
        raise TriggerNotStorable("the trigger", f"is a {name}, not a headgate.triggers.base.BaseTrigger")
    form: object = trigger.serialize()
    if not (isinstance(form, tuple) and len(form) == 2 and isinstance(form[0], str) and isinstance(form[1], dict)):
        raise TriggerNotStorable(f"{name}.serialize()", f"must return (classpath, kwargs), not {form!r:.200}")
    classpath, kwargs = form
    check_classpath(classpath)
    for key in kwargs:
        if not isinstance(key, str):
            raise TriggerNotStorable(f"{name} kwargs[{key!r:.100}]", "is no argument: its name must be a str")
    _check_base(type(trigger), classpath, kwargs)
    return classpath, encode_value(kwargs, where=f"{name} kwargs", bytes_max=KWARGS_BYTES_MAX)


def _check_base(cls: type[BaseTrigger], classpath: str, kwargs: dict[str, Any]) -> None:
    """Raise `TriggerNotStorable` if a trigger is stored as one of its bases, and that is not what it is.

    A subclass that only computes the arguments of its base may be stored as it. If it overrides anything else, that
    would never run, and if the base does not take the kwargs, the runner would report that of the base alone.
    """
    paths = [f"{one.__module__}.{one.__qualname__}" for one in cls.__mro__]
    if classpath == paths[0] or classpath not in paths:
        return
    at = paths.index(classpath)
    base, where = cls.__mro__[at], f"{cls.__name__}.serialize()"
    way_out = f"return the path of {cls.__name__}"
    methods = (name for one in cls.__mro__[:at] for name, value in vars(one).items() if isinstance(value, _BEHAVIOR))
    if overridden := dict.fromkeys(name for name in methods if _may_be_lost(name) and hasattr(base, name)):
        lost = ", ".join(overridden)
        raise TriggerNotStorable(where, f"names its base {classpath}, which has another {lost}; {way_out}")
    try:
        inspect.signature(base).bind(**kwargs)
    except TypeError as error:
        problem = f"names its base {classpath}, which does not take these kwargs: {error}"
        raise TriggerNotStorable(where, f"{problem}; {way_out}, or what the base takes") from error


def _may_be_lost(name: str) -> bool:
    """Whether a method matters: constructors and the like have done their work when a trigger is serialized."""
    return not name.startswith("__") and name != "serialize"


def check_classpath(classpath: str) -> None:
    """Raise `TriggerNotStorable` if no trigger runner can import a class by this path."""
    if not isinstance(classpath, str) or not 0 < len(classpath) <= CLASSPATH_CHARS_MAX or "." not in classpath:
        raise TriggerNotStorable(f"{classpath!r:.100}", "is not of the form package.module.Class")
    if "<locals>" in classpath:
        raise TriggerNotStorable(classpath, "is defined inside a function, where no runner can find it")
    if classpath.partition(".")[0] in (DAG_MODULES, "__main__"):
        raise TriggerNotStorable(
            classpath, "is defined in a DAG file, which no runner imports: move it to a module in import_paths"
        )
