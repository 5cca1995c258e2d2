"""Redis servers of a test's own: with TLS, as a replica, with settings that lose entries, with a new password."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import redis
import structlog
from tests.brokers.servers.certificates import NOW, Certify

from headgate.brokers import broker_thread
from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.redis_client import open_client, run
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.redis_station import PASSWORD, SHORT_LIMIT_BYTES, RedisStation
from headgate.testing.brokers.station import ServerProcess, free_port, wait_until
from headgate.triggers.named_values import Connection


def failure_of(station: RedisStation) -> BaseException:
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as reading:
        return reading.failure()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_would_drop_whole_streams_is_refused(station: RedisStation, policy: str) -> None:
    run(station.client, "CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", policy)
    failure = failure_of(station)
    assert isinstance(failure, BrokerMisconfigured)
    assert f"with maxmemory-policy {policy} the server drops whole streams" in str(failure)


def test_a_server_without_an_append_only_file_is_warned_of_once(station: RedisStation) -> None:
    run(station.client, "CONFIG", "SET", "appendonly", "no")
    with structlog.testing.capture_logs() as records:
        with Reading(station.trigger(), uri=station.uri) as reading:
            station.publish(names(1))
            reading.wait_stored(names(1))
            links = station.tap.links
            station.tap.cut()
            wait_until(lambda: station.tap.links > links, "it is connected again")
            station.publish(names(1, 1))
            reading.wait_stored(names(2))
    warned = [record for record in records if "no append-only file" in record["event"]]
    assert len(warned) == 1


def test_a_password_that_is_changed_ends_the_stream_at_the_next_connection(station: RedisStation) -> None:
    station.publish(names(1))
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as reading:
        reading.wait_stored(names(1))
        run(station.client, "CONFIG", "SET", "requirepass", "another-password")
        station.tap.cut()
        failure = reading.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "refuses access" in str(failure)
    assert PASSWORD not in str(failure) + repr(failure)


def test_a_user_who_may_not_ask_for_settings_reads_all_the_same(station: RedisStation) -> None:
    rights = "+xreadgroup +xack +xinfo +type +ttl +ping +multi +exec"
    run(station.client, "ACL", "SETUSER", "reader", "on", f">{PASSWORD}", f"~{station.stream}", *rights.split())
    station.publish(names(3))
    uri = f"redis://reader:{PASSWORD}@127.0.0.1:{station.tap.port}"
    with Reading(station.trigger(), uri=uri) as reading:
        reading.wait_stored(names(3))
        wait_until(lambda: not station.pending(), "everything is acknowledged")


def test_a_place_for_which_there_is_no_memory_costs_no_connection_and_holds_up_nothing(
    station: RedisStation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_thread, "LAG_INTERVAL_S", 1e9)  # without memory Redis has no answer to that either
    trigger = station.trigger(**station.with_place(), lane="message")
    with structlog.testing.capture_logs() as records, Reading(trigger, uri=station.uri) as read:
        station.publish(names(1))
        read.wait_stored(names(1))
        links = station.tap.links
        with station.client.pipeline(transaction=True) as pipeline:
            for value in ("x" * (SHORT_LIMIT_BYTES + 1), *names(3, 1)):
                run(pipeline, "XADD", station.stream, "*", "message", value)
            run(pipeline, "CONFIG", "SET", "maxmemory", "1")
            pipeline.execute()
        read.wait_stored(names(4))
        refusals = [f"the stream {station.stream}-rejected of dead_letter takes no entry", "maxmemory"]

        def refused() -> int:
            return sum(all(part in each.get("error", "") for part in refusals) for each in records)

        wait_until(lambda: refused() > 1, "it is tried again")
        wait_until(lambda: len(station.pending()) == 1, "all others are acknowledged")
        run(station.client, "CONFIG", "SET", "maxmemory", "0")
        wait_until(lambda: not station.pending(), "it comes to its place once there is room")
        assert station.tap.links == links
    assert len(station.in_place()) == 1


@pytest.mark.parametrize("lacking", ["xpending", "xrange", "watch"])
def test_what_a_rejected_entry_needs_is_asked_for_when_the_stream_is_opened(
    station: RedisStation, lacking: str
) -> None:
    commands = "xreadgroup xack xinfo type ttl ping multi exec xadd xpending xrange watch unwatch"
    rights = set(commands.split())
    allowed = [f"+{command}" for command in sorted(rights - {lacking})]
    run(station.client, "ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", *allowed)
    uri = f"redis://reader:{PASSWORD}@127.0.0.1:{station.tap.port}"
    with Reading(station.trigger(**station.with_place()), uri=uri, has_restarts=False) as reading:
        failure = reading.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert lacking in str(failure)


def test_a_replica_is_not_read(tmp_path: Path, redis_server: str, station: RedisStation) -> None:
    port = free_port()
    command = [redis_server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--replicaof", "127.0.0.1", "1"]
    replica = ServerProcess(command, port=port, log_path=tmp_path / "replica.log")
    replica.start()
    try:
        with pytest.raises(redis.ConnectionError, match=r"127\.0\.0\.1 is a replica"):
            open_client(Connection.from_uri("shop", f"redis://127.0.0.1:{port}"))
    finally:
        replica.close()


# --- TLS --------------------------------------------------------------------------------------------


@pytest.fixture
def tls_server(tmp_path: Path, redis_server: str) -> Iterator[Callable[[Path, Path, Path], int]]:
    """Starts a server that speaks TLS only, and asks clients for certificates of a file; returns its port."""
    servers: list[ServerProcess] = []

    def start(certificate: Path, key: Path, clients: Path) -> int:
        port = free_port()
        command = [
            *(redis_server, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", ""),
            *("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(clients)),
        ]
        server = ServerProcess(command, port=port, log_path=tmp_path / "tls.log")
        servers.append(server)
        server.start()
        return port

    yield start
    for server in servers:
        server.close()


def opened(port: int, **options: Path | str) -> redis.Redis:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return open_client(Connection.from_uri("shop", f"rediss://127.0.0.1:{port}/0?{query}"))


def test_certificates_of_both_sides_are_checked(
    certify: Certify, tls_server: Callable[[Path, Path, Path], int]
) -> None:
    server, client, other = certify("server"), certify("client"), certify("other")
    port = tls_server(*server, client[0])
    with opened(port, ssl_ca_certs=server[0], ssl_certfile=client[0], ssl_keyfile=client[1]) as connected:
        assert connected.ping()
    with pytest.raises(BrokerMisconfigured, match="the certificate of the server is refused: self-signed"):
        opened(port, ssl_ca_certs=other[0], ssl_certfile=client[0], ssl_keyfile=client[1])
    with pytest.raises(BrokerMisconfigured, match="the server refuses our certificate"):
        opened(port, ssl_ca_certs=server[0], ssl_certfile=other[0], ssl_keyfile=other[1])
    with pytest.raises(BrokerMisconfigured, match=r"ssl_ca_certs .*nowhere cannot be read"):
        opened(port, ssl_ca_certs=server[0].with_name("nowhere"))


def test_an_expired_certificate_and_one_of_another_host_are_refused(
    certify: Certify, tls_server: Callable[[Path, Path, Path], int]
) -> None:
    client = certify("client")
    identity = {"ssl_certfile": client[0], "ssl_keyfile": client[1]}
    expired, foreign = certify("expired", until=NOW - timedelta(days=1)), certify("foreign", address="127.0.0.2")
    with pytest.raises(BrokerMisconfigured, match="certificate has expired"):
        opened(tls_server(*expired, client[0]), ssl_ca_certs=expired[0], **identity)
    port = tls_server(*foreign, client[0])
    with pytest.raises(BrokerMisconfigured, match="IP address mismatch"):
        opened(port, ssl_ca_certs=foreign[0], **identity)
    with opened(port, ssl_ca_certs=foreign[0], ssl_check_hostname="false", **identity) as connected:
        assert connected.ping()
