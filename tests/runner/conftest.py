"""Authors' classes are importable, and nothing that a trigger left behind warns in another test."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import structlog
from tests.runner.authors import AUTHORS


@pytest.fixture(autouse=True)
def authors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module of authors' classes, empty at the beginning of each test; logs are captured."""
    monkeypatch.setitem(sys.modules, AUTHORS.__name__, AUTHORS)
    with structlog.testing.capture_logs():
        yield
    for name in [name for name in vars(AUTHORS) if not name.startswith("__")]:
        delattr(AUTHORS, name)
    gc.collect()
