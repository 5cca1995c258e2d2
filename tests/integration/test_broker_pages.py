"""The commands of each broker's section of docs/brokers.md, run as written until what they add has stored an event."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from urllib.parse import urlsplit

import pika
import pytest
from tests.brokers.servers.absent import skip_or_fail
from tests.integration.test_readme import blocks, run_commands, section

from headgate.testing.brokers import kafka_station, mqtt_station, nats_station, postgres_server, postgres_station
from headgate.testing.brokers.station import free_port

RABBITMQ_URL = os.environ.get("HEADGATE_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672")
LOOKS_MAX = 200  # each takes half a second, or more: none is worth it before the runner is there

pytestmark = pytest.mark.campaign

Replaced = dict[str, str]  # texts of the page, and what stands for them here


def _path_of(find: Callable[[], str | None]) -> str:
    if (path := find()) is None:
        skip_or_fail("this machine has no such server")
    return path


@contextmanager
def kafka(folder: Path) -> Generator[Replaced]:
    with closing(kafka_station.KafkaStation(folder, _path_of(kafka_station.find_server))) as station:
        yield {"URI": f"kafka://{station.address}/", "localhost:9092": station.address}


@contextmanager
def nats(folder: Path) -> Generator[Replaced]:
    with closing(nats_station.NatsStation(folder, _path_of(nats_station.find_server))) as station:
        yield {"URI": station.uri, "nats://localhost:4222": station.uri}


@contextmanager
def mqtt(folder: Path) -> Generator[Replaced]:
    with closing(mqtt_station.MqttStation(folder, _path_of(mqtt_station.find_server))) as station:
        at = urlsplit(station.uri)
        yield {"URI": station.uri, "-h localhost": f"-h 127.0.0.1 -p {at.port} -u {at.username} -P {at.password}"}


@contextmanager
def postgres(_: Path) -> Generator[Replaced]:
    if problem := postgres_server.why_none():
        skip_or_fail(problem)
    with closing(postgres_station.PostgresStation()) as station:
        (tables,) = blocks(section("docs/brokers.md", "PostgreSQL"), "sql")
        for statement in tables.split(";\n"):
            if statement:
                station.source.rows(statement)
        yield {"URI": station.uri}


@contextmanager
def rabbitmq(_: Path) -> Generator[Replaced]:
    name = f"orders-{uuid.uuid4().hex[:12]}"  # the server is the machine's
    try:
        connection = pika.BlockingConnection(pika.URLParameters(RABBITMQ_URL))
    except (pika.exceptions.AMQPError, OSError) as error:
        skip_or_fail(f"no RabbitMQ server answers: {error!r}")
    with connection:
        try:
            yield {"URI": RABBITMQ_URL, "amqp://guest:guest@localhost:5672/": RABBITMQ_URL, "orders": name}
        finally:
            channel = connection.channel()
            for queue in (name, f"{name}-dropped"):
                channel.queue_delete(queue)
            channel.exchange_delete(f"{name}-dropped")


def webhooks(_: Path) -> nullcontext[Replaced]:
    return nullcontext({"0.0.0.0:8080": f"127.0.0.1:{(port := free_port())}", "localhost:8080": f"127.0.0.1:{port}"})


@pytest.mark.parametrize(
    ("heading", "server"),
    [
        ("PostgreSQL", postgres),
        ("Kafka", kafka),
        ("RabbitMQ", rabbitmq),
        ("NATS JetStream", nats),
        ("MQTT", mqtt),
        ("Webhooks", webhooks),
    ],
)
def test_a_section_runs_as_written_until_an_event_is_stored(
    heading: str, server: Callable[[Path], AbstractContextManager[Replaced]], tmp_path: Path
) -> None:
    add, *later = blocks(section("docs/brokers.md", heading), "sh")
    add = re.sub(r"^pip install .*\n", "", add, flags=re.MULTILINE)
    (watcher,) = re.findall(r"headgate watchers add (\w+)", add)
    # A warning is no failure: the server may be of another make than the one that the page is about.
    add = re.sub(r"^headgate brokers check .*$", r"\g<0> || test $? = 3", add, flags=re.MULTILINE)
    script = f"""```sh
export HEADGATE_HOME="$PWD/home"
headgate db upgrade
{add}
headgate triggerer > up.log 2>&1 &
until grep -q 'the runner is ready' up.log; do sleep 0.1; done
for look in $(seq {LOOKS_MAX}); do
(
{"".join(later) or ":"}
) || true
headgate events list --watcher {watcher} > events
if grep -q 'stored' events; then break; fi
done
cat events
kill %1; wait
```
"""
    servers = tmp_path / "server"
    servers.mkdir()
    with server(servers) as replaced:
        if (uri := replaced.pop("URI", None)) is not None:
            script = re.sub(r"(headgate connections set \w+) '[^']*'", rf"\1 '{uri}'", script)
        for text, here in replaced.items():
            assert text in script, f"the page does not have {text!r} any more"
            script = script.replace(text, here)
        printed = run_commands(script, tmp_path)
    assert "it can be read" in printed
    assert re.search(r'"(id|body)":', printed.rpartition("added watcher")[2]), (
        printed + (tmp_path / "up.log").read_text()
    )
