"""The suite runs with each implementation, on each database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.signals.conformance.rigs import RIGS, Rig
from tests.store.harness import OpenStore, Query

from headgate.signals import BaseSignalService


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, open_store: OpenStore, query: Query) -> Iterator[Rig]:
    """An implementation, on a database without signals."""
    rig = RIGS[request.param](open_store, query)
    with rig.running():
        yield rig


@pytest.fixture
def service(rig: Rig) -> Iterator[BaseSignalService]:
    """A service of the implementation, for the thread of the test."""
    with rig.open() as service:
        yield service
