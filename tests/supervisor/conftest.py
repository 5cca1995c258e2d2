"""The world that the tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.store.harness import open_migrated_in_memory
from tests.supervisor.core_harness import World


@pytest.fixture
def world() -> Iterator[World]:
    engine = open_migrated_in_memory()
    world = World(engine)
    yield world
    world.store.close()
    engine.dispose()
