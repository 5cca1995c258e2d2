"""The servers that tests of Redis start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.brokers.servers.absent import skip_or_fail

from headgate.testing.brokers.redis_station import RedisStation, find_server


@pytest.fixture
def redis_server() -> str:
    """The path of a server; where there is none the tests skip, but never where ``CI`` is set."""
    path = find_server()
    if path is None:
        skip_or_fail("this machine has no redis-server and no valkey-server")
    return path


@pytest.fixture
def station(tmp_path: Path, redis_server: str) -> Iterator[RedisStation]:
    """A server of the test's own."""
    station = RedisStation(tmp_path, redis_server)
    try:
        station.create()
        yield station
    finally:
        station.close()
