"""Redis streams pass the conformance suite, on a private server that is killed, paused and cut off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.testing.brokers.conformance import BrokerConformance
from headgate.testing.brokers.redis_station import RedisStation, find_server
from headgate.testing.brokers.station import Station

pytestmark = pytest.mark.timeout(300)


class TestRedisStreams(BrokerConformance):
    @pytest.fixture
    def station(self, tmp_path: Path) -> Iterator[Station]:
        server = find_server()
        if server is None:
            message = "this machine has no redis-server and no valkey-server"
            if os.environ.get("CI"):
                pytest.fail(message)
            pytest.skip(message)
        station = RedisStation(tmp_path, server)
        try:
            station.create()
            yield station
        finally:
            station.close()
