"""Redis streams pass the conformance suite, on a private server that is killed, paused and cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.testing.brokers.conformance import BrokerConformance
from headgate.testing.brokers.redis_station import RedisStation
from headgate.testing.brokers.station import Station


class TestRedisStreams(BrokerConformance):
    @pytest.fixture
    def station(self, station: RedisStation) -> Station:
        return station

    @pytest.mark.campaign
    def test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(
        self, station: Station, tmp_path: Path
    ) -> None:
        super().test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(station, tmp_path)
