"""``headgate brokers check``: the broker is asked by a process of the runner's side."""

from __future__ import annotations

import os
from typing import Any

import pytest
import redis
from tests.brokers.servers.absent import skip_or_fail

REDIS_URL = os.environ.get("HEADGATE_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")


@pytest.fixture
def stream() -> Any:
    """The name of a stream with two entries, and a group."""
    name = f"headgate-test-check-{os.getpid()}"
    with redis.Redis.from_url(REDIS_URL) as client:
        try:
            client.delete(name)
        except redis.ConnectionError:
            skip_or_fail("no Redis server answers at HEADGATE_TEST_REDIS_URL")
        client.xgroup_create(name, "accounting", "0", mkstream=True)
        for _ in range(2):
            client.xadd(name, {"a": "b"})
        yield name
        client.delete(name)


def test_a_source_is_checked_and_nothing_of_it_is_taken(call_database: Any, stream: str) -> None:
    call_database("connections", "set", "shop", REDIS_URL)
    for _ in range(2):
        called = call_database("brokers", "check", f"redis://shop/{stream}?group=accounting")
        assert (called.code in (0, 3), called.err) == (True, "")  # 3: the server may have no append-only file
        assert f"redis stream {stream} of group accounting: it can be read; it has 2 messages" in called.out
    missing = call_database("brokers", "check", f"redis://shop/{stream}?group=nobody")
    assert (missing.code, "there is no such group" in missing.err) == (1, True)


@pytest.mark.parametrize(
    ("source", "code", "error"),
    [
        ("redis://shop", 2, "the argument is no source: it must be SCHEME://CONNECTION/NAME"),
        ("redis://nowhere/orders?group=g", 1, "there is no connection 'nowhere'"),
        ("redis://shop/orders?group=g&lane=none", 1, 'lane must be "stream"'),
        ("rabbitmq://shop/orders", 1, "the connection 'shop' must begin with amqp:// or amqps://, not redis://"),
        ("redis://shop/orders?group=g", 1, "Connection refused"),
    ],
)
def test_what_cannot_be_read_is_named_without_a_secret(call_database: Any, source: str, code: int, error: str) -> None:
    call_database("connections", "set", "shop", "redis://me:hunter22@127.0.0.1:1/0")
    called = call_database("brokers", "check", source)
    assert (called.code, error in called.err) == (code, True), called.err
    assert "hunter22" not in called.err + called.out
    as_json = call_database("brokers", "check", source, "--json")
    assert "hunter22" not in as_json.err + as_json.out
