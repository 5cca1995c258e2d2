"""A real ``headgate triggerer`` that stands still: who takes over gets the messages that its broker has handed out."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.brokers.servers.absent import skip_or_fail
from tests.integration.conftest import StartPair
from tests.integration.pair import stored
from tests.integration.test_broker_pages import RABBITMQ_URL
from tests.processes import stop
from tests.waiting import wait_until

from headgate.store.store import Store
from headgate.supervisor.commands import EXIT_LEASE_LOST
from headgate.testing.brokers import nats_station
from headgate.testing.brokers.nats_station import NatsStation
from headgate.testing.brokers.rabbitmq_station import RabbitStation
from headgate.testing.brokers.reading import names

SETTINGS = {"heartbeat_s": "0.2", "poll_interval_s": "0.5", "lease_silence_max_s": "2"}
MESSAGES = 20

pytestmark = pytest.mark.campaign


@pytest.fixture(params=["nats", "rabbitmq"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NatsStation | RabbitStation]:
    """A broker that gives each message to one of its readers, until that has acknowledged it or is gone."""
    station: NatsStation | RabbitStation
    if request.param == "nats":
        if (path := nats_station.find_server()) is None:
            skip_or_fail("this machine has no server of NATS")
        (tmp_path / "broker").mkdir()
        station = NatsStation(tmp_path / "broker", path)
    else:
        url = urlsplit(RABBITMQ_URL)
        station = RabbitStation(
            address=(url.hostname or "127.0.0.1", url.port or 5672),
            login=url.username or "guest",
            password=url.password or "guest",
            is_quorum=False,
        )
    try:
        station.create()
        yield station
    finally:
        station.close()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_who_takes_over_gets_what_the_broker_has_handed_out_to_one_that_stands_still(
    broker: NatsStation | RabbitStation, start_pair: StartPair, users_store: Store
) -> None:
    settings = SETTINGS | {"conn_shop": broker.uri}
    trigger = broker.trigger()
    users_store.add_watcher("orders", type(trigger)._classpath(), trigger.serialize()[1] | {"connection": "shop"})
    stopped = start_pair(**settings)
    stopped.wait_ready()
    broker.publish(names(1))
    wait_until(lambda: stored(users_store) == 1, "the stream is read")
    stop(stopped.process.pid)
    try:
        broker.publish(names(MESSAGES, 1))
        start_pair(**settings).wait_log("took over from supervisors that are gone")
        wait_until(lambda: stored(users_store) == 1 + MESSAGES, "the other supervisor has stored them")
        wait_until(lambda: not broker.pending(), "they are acknowledged")
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    assert stopped.process.wait(60) == EXIT_LEASE_LOST
    assert stored(users_store) == 1 + MESSAGES
