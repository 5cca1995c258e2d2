"""The conformance suite for SQS, on a server in memory: it hangs and is cut off, and is never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.testing.brokers.conformance import ServerConformance, SourceConformance
from headgate.testing.brokers.sqs_station import SqsStation
from headgate.testing.brokers.station import Station


class TestSqs(SourceConformance):
    @pytest.fixture
    def station(self, station: SqsStation) -> Station:
        return station

    @pytest.mark.campaign
    def test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(
        self, station: Station, tmp_path: Path
    ) -> None:
        super().test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(station, tmp_path)

    @pytest.mark.campaign
    def test_a_link_that_is_cut_within_an_answer_costs_no_message(self, station: Station) -> None:
        super().test_a_link_that_is_cut_within_an_answer_costs_no_message(station)


@pytest.mark.campaign
class TestSqsFifo(TestSqs):
    @pytest.fixture
    def station(self, fifo: SqsStation) -> Station:
        return fifo


class TestSqsThatHangs(ServerConformance):
    @pytest.fixture
    def station(self, station: SqsStation) -> Station:
        station.server = station.moto
        return station

    @pytest.mark.skip(reason="moto keeps everything in memory: a kill of it is the end of all messages")
    def test_a_broker_that_is_killed_under_load_costs_no_message(self, station: Station) -> None: ...
