"""The servers that tests of MQTT start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.brokers.servers.absent import skip_or_fail

from headgate.testing.brokers.mqtt_station import MqttStation, find_server


@pytest.fixture
def mosquitto() -> str:
    """The path of the server; where there is none the tests skip, but never where ``CI`` is set."""
    path = find_server()
    if path is None:
        skip_or_fail("this machine has no mosquitto and mosquitto_passwd")
    return path


@pytest.fixture
def station(tmp_path: Path, mosquitto: str) -> Iterator[MqttStation]:
    """A server of the test's own."""
    station = MqttStation(tmp_path, mosquitto)
    try:
        station.create()
        yield station
    finally:
        station.close()
