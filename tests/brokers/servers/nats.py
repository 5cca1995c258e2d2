"""A server of NATS of the test's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.brokers.servers.absent import skip_or_fail

from headgate.testing.brokers.nats_station import NatsStation, find_server


@contextmanager
def own_nats(folder: Path) -> Generator[NatsStation]:
    """Yield a station with a server; where there is none the test skips, but never where ``CI`` is set."""
    if (path := find_server()) is None:
        skip_or_fail("this machine has no nats-server")
    with closing(NatsStation(folder, path)) as station:
        station.create()
        yield station
