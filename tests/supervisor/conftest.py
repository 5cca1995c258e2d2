"""The world that the tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.supervisor.core_harness import World

from headgate.store.db.engine import open_engine
from headgate.store.db.schema import upgrade


@pytest.fixture
def world() -> Iterator[World]:
    engine = open_engine("sqlite://")
    upgrade(engine)
    world = World(engine)
    yield world
    world.store.close()
    engine.dispose()
