"""The servers that tests of NATS start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.brokers.servers.nats import own_nats

from headgate.testing.brokers.nats_station import NatsStation


@pytest.fixture
def station(tmp_path: Path) -> Iterator[NatsStation]:
    """A server of the test's own."""
    with own_nats(tmp_path) as station:
        yield station
