"""The servers that tests of Kafka start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.brokers.servers.absent import skip_or_fail

from headgate.testing.brokers.kafka_station import KafkaStation, find_server


@pytest.fixture
def station(tmp_path: Path) -> Iterator[KafkaStation]:
    """A server of the test's own; where there is none the tests skip, but never where ``CI`` is set."""
    path = find_server()
    if path is None:
        skip_or_fail("noida-db is not installed, or not for this machine")
    station = KafkaStation(tmp_path, path)
    try:
        station.create()
        yield station
    finally:
        station.close()
