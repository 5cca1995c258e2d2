"""Kafka passes the conformance suite, on a private server that is killed, paused and cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.testing.brokers.conformance import BrokerConformance
from headgate.testing.brokers.kafka_station import KafkaStation
from headgate.testing.brokers.station import Station


class TestKafka(BrokerConformance):
    @pytest.fixture
    def station(self, station: KafkaStation) -> Station:
        return station

    @pytest.mark.campaign
    def test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(
        self, station: Station, tmp_path: Path
    ) -> None:
        super().test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(station, tmp_path)

    @pytest.mark.campaign
    def test_a_link_that_is_cut_within_an_answer_costs_no_message(self, station: Station) -> None:
        super().test_a_link_that_is_cut_within_an_answer_costs_no_message(station)
