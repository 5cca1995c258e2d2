"""A writer of a file log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.brokers.filelog import (
    FileLogWriter,
)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[FileLogWriter]:
    with FileLogWriter(tmp_path) as writer:
        yield writer
