"""The server that tests of SQS start: moto, which has all in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.brokers.servers.absent import skip_or_fail

from headgate.testing.brokers.sqs_station import MotoServer, SqsStation, is_there


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    """A server for all tests of a module; where moto is not installed they skip, but never where ``CI`` is set."""
    if not is_there():
        skip_or_fail("moto, flask and flask-cors are not installed")
    server = MotoServer(tmp_path_factory.mktemp("moto"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def station(moto: MotoServer) -> Iterator[SqsStation]:
    """A queue of the test's own."""
    station = SqsStation(moto)
    try:
        station.create()
        yield station
    finally:
        station.close()


@pytest.fixture
def fifo(moto: MotoServer) -> Iterator[SqsStation]:
    """A FIFO queue of the test's own."""
    station = SqsStation(moto, is_fifo=True)
    try:
        station.create()
        yield station
    finally:
        station.close()
