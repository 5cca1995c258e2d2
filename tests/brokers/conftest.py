"""What tests of several brokers use: a writer of a file log, certificates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.brokers.servers.certificates import Certify, certify

from headgate.brokers.filelog import FileLogWriter


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[FileLogWriter]:
    with FileLogWriter(tmp_path) as writer:
        yield writer


@pytest.fixture(name="certify")
def certify_here(tmp_path: Path) -> Certify:
    """Makes a self-signed certificate; returns its file and that of its key."""
    return partial(certify, tmp_path)
