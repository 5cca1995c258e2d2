"""Hosts of brokers that refuse: another one is tried at once, and the error says what they did."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headgate.brokers.clients.nats_client import NatsClient
from headgate.brokers.clients.rabbitmq_client import open_connection
from headgate.testing.brokers.station import free_port
from headgate.triggers.named_values import Connection


@pytest.mark.parametrize(("scheme", "connect"), [("nats", NatsClient), ("amqp", open_connection)])
def test_the_error_says_why_there_is_no_connection(scheme: str, connect: Callable[[Connection, str], object]) -> None:
    nobody = Connection.from_uri("shop", f"{scheme}://u:p@127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    with pytest.raises(ConnectionError, match=r"(?i)connect.*refused|connect call failed"):
        connect(nobody, "test")
