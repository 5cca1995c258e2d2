"""Webhooks pass the conformance suite, with a sender that tries again in the place of a broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.testing.brokers.conformance import MESSAGES, SourceConformance
from headgate.testing.brokers.reading import names
from headgate.testing.brokers.station import Station, wait_until
from headgate.testing.brokers.webhook_station import WebhookStation


class TestWebhooks(SourceConformance):
    @pytest.fixture
    def station(self, station: WebhookStation) -> Station:
        return station

    def test_what_was_handed_out_before_a_cut_is_acknowledged_after_it_and_nothing_else(self, station: Station) -> None:
        # As that of the suite, for a sender that posts in no order.
        station.publish(names(MESSAGES))
        with self.read(station, is_held=True) as reading:
            reading.wait_stored(names(MESSAGES))
            station.tap.cut()
            wait_until(lambda: station.tap.links > MESSAGES, "it is posted again")
            assert station.tap.acknowledged == []
            reading.confirm()
            reading.wait_stored(names(MESSAGES))
            wait_until(lambda: not list(station.pending()), "everything is acknowledged")

    @pytest.mark.campaign
    def test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(
        self, station: Station, tmp_path: Path
    ) -> None:
        super().test_supervisor_and_runner_are_killed_and_nothing_is_lost_or_stored_twice(station, tmp_path)
