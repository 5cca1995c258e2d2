"""An author's folder, and pools of real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.supervisor.executors.workers_harness import Author, MakePool, Pool, closing


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path)


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Pool(tmp_path, **options)))


@pytest.fixture
def pool(make_pool: MakePool) -> Pool:
    return make_pool()
