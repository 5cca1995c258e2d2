"""The servers of RabbitMQ that tests use: that of the machine, and one of the tests' own for those that kill it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pika
import pytest
from tests.brokers.servers.absent import skip_or_fail

from headgate.testing.brokers.rabbitmq_station import RabbitNode, RabbitStation, find_server

RABBITMQ_URL = os.environ.get("HEADGATE_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672")


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """The server at ``HEADGATE_TEST_RABBITMQ_URL``; where none answers the tests skip, but not where ``CI`` is set."""
    try:
        pika.BlockingConnection(pika.URLParameters(RABBITMQ_URL)).close()
    except (pika.exceptions.AMQPError, OSError) as error:
        skip_or_fail(f"no RabbitMQ server answers at HEADGATE_TEST_RABBITMQ_URL: {error!r}")
    return RABBITMQ_URL


@pytest.fixture(params=["quorum", pytest.param("classic", marks=pytest.mark.campaign)])
def station(rabbitmq_url: str, request: pytest.FixtureRequest) -> Iterator[RabbitStation]:
    """A queue of the server that others use, too."""
    url = urlsplit(rabbitmq_url)
    assert url.hostname is not None
    station = RabbitStation(
        address=(url.hostname, url.port or 5672),
        login=url.username or "guest",
        password=url.password or "guest",
        is_quorum=request.param == "quorum",
    )
    try:
        station.create()
        yield station
    finally:
        station.close()


@pytest.fixture
def rabbitmq_node() -> Iterator[RabbitNode]:
    """A node of the test's own, which takes seconds to start: after a kill 3.10 makes no more quorum queues."""
    path = find_server()
    if path is None:
        skip_or_fail("this machine has no rabbitmq-server")
    # Not below the folder of pytest, which each of its sessions closes to other users: the node may run as one.
    with tempfile.TemporaryDirectory(prefix="headgate-rabbitmq-") as folder:
        Path(folder).chmod(0o711)
        node = RabbitNode(Path(folder), path)
        try:
            node.start()
            yield node
        finally:
            node.close()
