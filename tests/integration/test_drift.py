"""Drift by a real ``headgate triggerer`` and real brokers: what others do to a stream is what the command says."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import select, update
from tests.brokers.servers.absent import skip_or_fail
from tests.integration.conftest import StartPair
from tests.integration.pair import stored
from tests.waiting import wait_until

from headgate.brokers.clients.kafka_client import Consumer, TopicPartition
from headgate.brokers.clients.redis_client import run
from headgate.cli.main import main
from headgate.store.store import Store
from headgate.store.tables import stream_drift, triggerer
from headgate.supervisor.logs import process_log
from headgate.testing.brokers import kafka_station, nats_station, redis_station
from headgate.testing.brokers.kafka_station import KafkaStation
from headgate.testing.brokers.nats_station import NatsStation
from headgate.testing.brokers.reading import names
from headgate.testing.brokers.redis_station import RedisStation

SETTINGS = {"heartbeat_s": "0.2", "retry_wait_max_s": "1"}


class Others(Protocol):
    """A broker, and what people do to it who are not headgate."""

    station: Any

    @property
    def uri(self) -> str: ...

    def skip(self) -> None: ...

    def reset(self) -> None: ...


class KafkaOthers:
    def __init__(self, station: KafkaStation) -> None:
        self.station = station

    @property
    def uri(self) -> str:
        return self.station.uri

    def _commit(self, offset: int) -> None:
        """As a program can that takes the place of the reader in its group."""
        station = self.station
        name = hashlib.blake2b(repr(("shop", station.topic, station.group)).encode(), digest_size=8).hexdigest()
        config = {"bootstrap.servers": station.address, "group.id": station.group, "log_level": 0}
        client = Consumer(config | {"group.instance.id": f"headgate-{name}", "enable.auto.commit": False})
        client.subscribe([station.topic])

        def is_assigned() -> bool:
            client.poll(0.1)
            return bool(client.assignment())

        wait_until(is_assigned, "the partition is given to it")
        client.commit(offsets=[TopicPartition(station.topic, 0, offset)], asynchronous=False)
        client.close()

    def skip(self) -> None:
        self._commit(self.station._end(0))

    def reset(self) -> None:
        self._commit(0)


class RedisOthers:
    def __init__(self, station: RedisStation) -> None:
        self.station = station

    @property
    def uri(self) -> str:
        return self.station.uri

    def _set(self, entry_id: str) -> None:
        run(self.station.client, "XGROUP", "SETID", self.station.stream, self.station.group, entry_id)

    def skip(self) -> None:
        self._set("$")

    def reset(self) -> None:
        self._set("0")

    def drop(self, kept: int) -> None:
        self.station.client.xtrim(self.station.stream, maxlen=kept, approximate=False)


class NatsOthers:
    def __init__(self, station: NatsStation) -> None:
        self.station = station

    @property
    def uri(self) -> str:
        return self.station.uri

    def _make(self, **config: Any) -> None:
        self.station.ask(f"CONSUMER.DELETE.{self.station.stream}.{self.station.durable}")
        self.station.create_consumer(self.station.durable, **config)

    def skip(self) -> None:
        self._make(deliver_policy="new")

    def reset(self) -> None:
        self._make(deliver_policy="all")

    def drop(self, kept: int) -> None:
        config = self.station.ask(f"STREAM.INFO.{self.station.stream}")["config"]
        self.station.ask(f"STREAM.UPDATE.{self.station.stream}", config | {"max_msgs": kept})


@pytest.fixture(params=["kafka", "redis", "nats"])
def others(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Others]:
    modules: dict[str, tuple[Any, Any, Any]] = {
        "kafka": (kafka_station, KafkaStation, KafkaOthers),
        "redis": (redis_station, RedisStation, RedisOthers),
        "nats": (nats_station, NatsStation, NatsOthers),
    }
    module, station_class, others_class = modules[request.param]
    path = module.find_server()
    if path is None:
        skip_or_fail(f"this machine has no server of {request.param}")
    folder = tmp_path / "broker"
    folder.mkdir()
    station = station_class(folder, path)
    try:
        station.create()
        yield others_class(station)
    finally:
        station.close()


class Drift:
    """The command, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Return the exit code, and what it says of the only stream."""
        self._capsys.readouterr()
        code = main(["streams", "drift", "orders", "--json", *arguments])
        written = self._capsys.readouterr()
        assert written.out, written.err
        return code, json.loads(written.out)

    def wait(self, code: int, verdict: str) -> dict[str, Any]:
        """Ask until this is what is said."""
        said: list[Any] = []

        def is_said() -> bool:
            said[:] = self()
            return bool(said[0] == code and said[1]["verdict"] == verdict)

        wait_until(is_said, lambda: f"exit code {code}, {verdict}; the last was {said}")
        record: dict[str, Any] = said[1]
        return record


@pytest.fixture
def drift(
    tmp_path: Path, database_url: str, keys: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Drift]:
    for name in [name for name in os.environ if name.startswith("HEADGATE_")]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), "DATABASE_URL": database_url, "FERNET_KEYS": keys}.items():
        monkeypatch.setenv(f"HEADGATE_{name}", value)
    yield Drift(capsys)
    process_log.reset()


def wait_handled(store: Store, others: Others, events: int) -> None:
    """Wait until so many messages are stored, and all are acknowledged."""
    wait_until(lambda: stored(store) == events, f"{events} messages are stored")
    wait_until(lambda: not others.station.pending(), "they are acknowledged")


def watch(store: Store, others: Others) -> None:
    """Add the watcher whose stream it is."""
    trigger = others.station.trigger()
    kwargs = trigger.serialize()[1] | {"connection": "shop"}
    store.add_watcher("orders", type(trigger)._classpath(), kwargs)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # the tests of the store have both
def test_what_others_do_to_a_stream_is_told(
    others: Others, start_pair: StartPair, users_store: Store, drift: Drift
) -> None:
    station = others.station
    settings = SETTINGS | {"conn_shop": others.uri}
    watch(users_store, others)
    station.publish(names(5))
    pair = start_pair(**settings)
    wait_handled(users_store, others, 5)
    (lane,) = drift.wait(0, "ok")["lanes"]
    assert lane["committed"] == lane["advanced"]
    assert lane["lag"] == 0

    # While nobody reads, somebody passes over two messages.
    pair.stop()
    code, record = drift("--wait", "0")
    assert (code, record["verdict"], record["error"]) == (3, "cannot be told", "no supervisor runs it")
    station.publish(names(2, 5))
    others.skip()
    station.publish(names(1, 7))
    pair = start_pair(**settings)
    wait_until(lambda: stored(users_store) == 6, "what comes after that is stored")
    record = drift.wait(2, "moved by others")
    assert [found["verdict"] for found in record["found"]] == ["moved by others"]
    assert record["found"][0]["was"] < record["found"][0]["now"]
    # It is told until somebody accepts it, whatever happens meanwhile.
    pair.stop()
    pair = start_pair(**settings)
    drift.wait(2, "moved by others")
    # The runner may not be there yet, which is not waited for.
    assert drift("--accept")[1]["found"] == []
    drift.wait(0, "ok")

    # Somebody sets it back to the beginning: all comes again, what was passed over for the first time.
    pair.stop()
    others.reset()
    pair = start_pair(**settings)
    wait_until(lambda: stored(users_store) == 8, "what was passed over is stored")
    drift.wait(1, "went back")
    drift("--accept")
    drift.wait(0, "ok")

    # A death is no drift, although the database does not know the last messages.
    station.publish(names(50, 8))
    wait_until(lambda: stored(users_store) > 10, "some are stored")
    pair.kill()
    pair = start_pair(**settings)
    wait_handled(users_store, others, 58)
    drift.wait(0, "ok")

    station.delete()
    record = drift.wait(2, "unknown to the broker")
    assert record["error"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("others", ["redis", "nats"], indirect=True)
def test_messages_that_a_broker_drops_while_nobody_reads_are_told_until_that_is_accepted(
    others: RedisOthers | NatsOthers, start_pair: StartPair, users_store: Store, drift: Drift
) -> None:
    station = others.station
    settings = SETTINGS | {"conn_shop": others.uri}
    watch(users_store, others)
    station.publish(names(5))
    pair = start_pair(**settings)
    wait_handled(users_store, others, 5)
    drift.wait(0, "ok")
    pair.stop()
    station.publish(names(5, 5))
    others.drop(2)
    for _ in range(2):  # by whatever reader, and however often
        pair = start_pair(**settings)
        wait_until(lambda: stored(users_store) == 7, "what is left is stored")
        record = wait_until(lambda: drift.wait(2, "dropped unread")["found"], "its reader has told of it")
        assert [(found["verdict"], found["missing"]) for found in record] == [("dropped unread", 3)]
        pair.stop()
    assert "drift" in [problem.reason for problem in users_store.inspect.status()]
    drift("--accept")
    start_pair(**settings)
    drift.wait(0, "ok")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("others", ["redis", "nats"], indirect=True)
def test_an_old_copy_of_the_database_is_told(
    others: RedisOthers | NatsOthers, start_pair: StartPair, users_store: Store, drift: Drift
) -> None:
    station = others.station
    settings = SETTINGS | {"conn_shop": others.uri}
    watch(users_store, others)
    station.publish(names(2))
    pair = start_pair(**settings)
    wait_handled(users_store, others, 2)
    drift.wait(0, "ok")
    with users_store.database.reading() as tx:
        old = tx.connection.execute(select(stream_drift.c.progress)).scalar_one()
    station.publish(names(3, 2))
    wait_handled(users_store, others, 5)
    pair.stop()
    # As if it had been copied then, ten minutes ago.
    then = datetime.now(UTC) - timedelta(minutes=10)
    with users_store.database.writing() as tx:
        tx.connection.execute(update(stream_drift).values(progress=old, progress_at=then))
        tx.connection.execute(update(triggerer).values(latest_heartbeat=then))
    start_pair(**settings)
    drift.wait(2, "log newer than the database")
