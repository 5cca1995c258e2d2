"""The servers that tests of Redis start."""

from __future__ import annotations

import os

import pytest

from headgate.testing.brokers.redis_station import find_server


@pytest.fixture
def redis_server() -> str:
    """The path of a server; where there is none the tests skip, but never where ``CI`` is set."""
    path = find_server()
    if path is None:
        message = "this machine has no redis-server and no valkey-server"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
