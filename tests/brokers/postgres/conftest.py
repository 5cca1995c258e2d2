"""The servers that tests of tables of PostgreSQL start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.brokers.servers.absent import skip_or_fail

from headgate.testing.brokers.postgres_server import why_none
from headgate.testing.brokers.postgres_station import PostgresStation


@pytest.fixture
def station() -> Iterator[PostgresStation]:
    """A server of the test's own; where there is none the tests skip, but never where ``CI`` is set."""
    if problem := why_none():
        skip_or_fail(problem)
    station = PostgresStation()
    try:
        station.create()
        yield station
    finally:
        station.close()
