"""Logins of Kafka by SCRAM and by tokens, which a proxy checks before a server that knows none of them."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from tests.brokers.servers.kafka_logins import TokenServer, Users, token_of
from tests.brokers.servers.kafka_proxy import KafkaProxy

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.kafka_client import client_config
from headgate.testing.brokers.kafka_station import KafkaStation
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, wait_until
from headgate.triggers.named_values import Connection

CLIENT, SECRET = "reader", "hunter22-of-the-test"


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    """A server that gives tokens."""
    server = TokenServer(CLIENT, SECRET)
    yield server
    server.close()


@pytest.fixture
def used() -> list[str]:
    """The mechanisms of the logins that the proxy has taken."""
    return []


@pytest.fixture
def proxy(station: KafkaStation, tokens: TokenServer, used: list[str]) -> Iterator[KafkaProxy]:
    """A proxy that lets in one user, by a password or a token."""
    taken = {tokens.token}
    proxy = KafkaProxy(station, make_logins=lambda: Users({CLIENT: SECRET}, taken, used))
    yield proxy
    proxy.close()


def uri_of(proxy: KafkaProxy, secret: str, **options: str) -> str:
    return f"kafka://{CLIENT}:{secret}@127.0.0.1:{proxy.port}/?{urlencode(options)}"


def bearer(tokens: TokenServer) -> dict[str, str]:
    return {
        "sasl_mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": tokens.url,
        "sasl.oauthbearer.scope": "orders",
    }


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_messages_are_read_after_a_login_by_scram_and_a_wrong_password_is_named(
    station: KafkaStation, proxy: KafkaProxy, used: list[str], mechanism: str
) -> None:
    station.publish(names(3))
    with Reading(station.trigger(), uri=uri_of(proxy, SECRET, sasl_mechanism=mechanism)) as read:
        read.wait_stored(names(3))
        wait_until(lambda: not station.pending(), "everything is committed")
    assert set(used) == {mechanism}
    refused = station.trigger().check(uri_of(proxy, "another-secret", sasl_mechanism=mechanism)).problem
    assert "kafka topic orders, group accounting: the broker refuses access" in refused
    assert "another-secret" not in refused


def test_messages_are_read_with_a_token_that_the_client_got(
    station: KafkaStation, proxy: KafkaProxy, tokens: TokenServer, used: list[str]
) -> None:
    station.publish(names(3))
    with Reading(station.trigger(), uri=uri_of(proxy, SECRET, **bearer(tokens))) as read:
        read.wait_stored(names(3))
        wait_until(lambda: not station.pending(), "everything is committed")
    assert set(used) == {"OAUTHBEARER"}
    assert tokens.asked
    assert all(form == {"grant_type": ["client_credentials"], "scope": ["orders"]} for form in tokens.asked)


def test_a_token_that_is_not_given_or_not_taken_is_a_mistake_and_shows_no_secret(
    station: KafkaStation, proxy: KafkaProxy, tokens: TokenServer
) -> None:
    refused = station.trigger().check(uri_of(proxy, "another-secret", **bearer(tokens))).problem
    assert "the broker refuses access: Failed to acquire SASL OAUTHBEARER token" in refused
    assert "another-secret" not in refused
    tokens.token = token_of("somebody")
    refused = station.trigger().check(uri_of(proxy, SECRET, **bearer(tokens))).problem
    assert "SASL authentication error: the login is refused" in refused
    assert SECRET not in refused


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sasl_mechanism": "OAUTHBEARER"}, "needs the address that gives tokens, sasl.oauthbearer.token.endpoint.url"),
        ({"sasl.oauthbearer.scope": "orders"}, "'sasl.oauthbearer.scope' of sasl_mechanism=OAUTHBEARER"),
    ],
)
def test_options_of_tokens_are_given_whole_or_not_at_all(options: dict[str, str], problem: str) -> None:
    uri = f"kafka://{CLIENT}:{SECRET}@127.0.0.1/?{urlencode(options)}"
    with pytest.raises(BrokerMisconfigured, match=problem) as caught:
        client_config(Connection.from_uri(CONNECTION, uri))
    assert SECRET not in str(caught.value)
