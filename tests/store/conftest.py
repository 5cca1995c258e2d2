"""What several tests of the store use: a clock that the test sets."""

from __future__ import annotations

import pytest
from tests.store.harness import Clock, OpenStore

from headgate.store.store import Store


@pytest.fixture
def clock() -> Clock:
    """The clock of `old`, which stands still until the test moves it."""
    return Clock()


@pytest.fixture
def old(open_store: OpenStore, clock: Clock) -> Store:
    """A store whose clock the test sets."""
    return open_store(clock=clock)
