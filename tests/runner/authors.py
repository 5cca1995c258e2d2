"""A module of authors' classes for the tests of this folder, which is importable while a test runs."""

from __future__ import annotations

import types

from headgate.triggers.base import BaseTrigger

AUTHORS = types.ModuleType("authors_of_tests")


def publish(cls: type[BaseTrigger]) -> str:
    """Make a class importable; return its classpath."""
    setattr(AUTHORS, cls.__name__, cls)
    return f"{AUTHORS.__name__}.{cls.__name__}"
