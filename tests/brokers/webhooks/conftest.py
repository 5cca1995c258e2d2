"""The sender that tests of webhooks use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.testing.brokers.webhook_station import WebhookStation


@pytest.fixture
def station() -> Iterator[WebhookStation]:
    """A sender, and a port for the listener."""
    station = WebhookStation()
    try:
        yield station
    finally:
        station.close()
