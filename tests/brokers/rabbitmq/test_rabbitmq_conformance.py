"""RabbitMQ queues pass the conformance suite: on the server of the machine, and on one that is killed and paused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.testing.brokers.conformance import ServerConformance, SourceConformance
from headgate.testing.brokers.rabbitmq_station import RabbitNode, RabbitStation
from headgate.testing.brokers.station import Station


class TestRabbitQueues(SourceConformance):
    @pytest.fixture
    def station(self, station: RabbitStation) -> Station:
        return station

    @pytest.mark.campaign
    def test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(
        self, station: Station, tmp_path: Path
    ) -> None:
        super().test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(station, tmp_path)


@pytest.mark.campaign
class TestQueuesOfANodeThatIsKilled(ServerConformance):
    @pytest.fixture
    def station(self, rabbitmq_node: RabbitNode) -> Iterator[Station]:
        station = RabbitStation(rabbitmq_node)
        try:
            station.create()
            # A quorum queue that is younger than the last clean start of its node does not survive a kill.
            rabbitmq_node.stop()
            rabbitmq_node.start()
            yield station
        finally:
            station.close()
